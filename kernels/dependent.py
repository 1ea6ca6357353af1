"""Dependent launches: on Hopper a kernel may start while the one before it on the stream still runs.

It waits where it needs what others wrote; what was there before the launch in front of it may be read earlier. Compiled
for an older GPU, or interpreted, a kernel has neither instruction and is launched as usual. What has to hold:

* every program waits, also one that has nothing to do: a launch is complete when its programs are, and the next but one
  takes it that all launches before it are, too;
* a kernel lets the next one start only behind its own wait; so that one, before it waits in its turn, may read all but
  what this kernel writes;
* a kernel that does not know what was launched before it reads nothing before it waits.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until all launches before this one are complete, and what they wrote can be read."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """The next launch may start as soon as every program has come here, or has ended."""
    if DEPENDENT:
        gdc_launch_dependents()


@functools.cache
def _supported(device: torch.device) -> bool:
    # Where there is no GPU, kernels are compiled for Hopper or not at all.
    return device.type == "cpu" or (
        torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def dependent(kernel: Any, device: torch.device) -> dict[str, bool]:
    """The launch options of a kernel that waits: its constexpr DEPENDENT, and the attribute of the launch."""
    # Triton's interpreter knows neither.
    if isinstance(kernel, triton.JITFunction) and _supported(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
