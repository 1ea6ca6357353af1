"""What a kernel takes of a multiprocessor, read from its compiled code on a machine without a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


class Limits(NamedTuple):
    """Of one multiprocessor: warps, programs, and bytes of shared memory; registers are 65536 on all of them."""

    warps: int
    programs: int
    shared_bytes: int


# By compute capability. Source: CUDA C++ Programming Guide, technical specifications per compute capability.
LIMITS = {
    80: Limits(64, 32, 164 * 1024),
    86: Limits(48, 16, 100 * 1024),
    89: Limits(48, 24, 100 * 1024),
    90: Limits(64, 32, 228 * 1024),
    100: Limits(64, 32, 228 * 1024),
    120: Limits(48, 24, 100 * 1024),
}
REGISTERS = 65536
# Each has its own registers, a quarter of them, and its own warps.
SUB_PARTITIONS = 4
# Kept back by the system, of every program.
SHARED_RESERVED = 1024


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel, and the code that it was given.

    Shared memory is what Triton asks for at a launch and what inline assembly declares.
    """

    name: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str = field(default="", repr=False, compare=False)


def occupancy(used: Resources, arch: int) -> int:
    """Programs of a kernel that one multiprocessor of a compute capability in `LIMITS` runs at once; 0 if none fits."""
    of = LIMITS[arch]
    shared = used.shared_bytes + SHARED_RESERVED
    # Registers are given to a warp, 256 at a time.
    of_warp = -(-used.registers * 32 // 256) * 256
    warps = REGISTERS // SUB_PARTITIONS // of_warp * SUB_PARTITIONS
    return min(of.programs, of.warps // used.warps, warps // used.warps, of.shared_bytes // shared)


def _compile(fn: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> Resources:
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    options.pop("launch_pdl", None)
    values = dict(zip(fn.arg_names, args, strict=False)) | kwargs
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(fn.params):
        name, value = parameter.name, values[parameter.name]
        divisible = False
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], divisible = TYPES[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i64" if abs(value) >= 2**31 else "i32"
            divisible = value % 16 == 0 and not parameter.do_not_specialize
        if divisible:
            aligned[(i,)] = [["tt.divisibility", 16]]
    if arch < 90 and "DEPENDENT" in constants:
        # Older GPUs have no such instruction.
        constants["DEPENDENT"] = False
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [binaries / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    # Triton's own is given at a launch and not in here; from Hopper on, what the system keeps is.
    declared = max(0, found["SHARED"] - (SHARED_RESERVED if arch >= 90 else 0))
    return Resources(
        fn.fn.__name__,
        kernel.metadata.num_warps,
        found["REG"],
        found["STACK"],
        kernel.metadata.shared + declared,
        kernel.asm["ptx"],
    )


@contextlib.contextmanager
def capture(arch: int = 90) -> Iterator[list[Resources]]:
    """Within the block, a launch compiles its kernel instead of running it; yields what was compiled.

    Raises:
        RuntimeError: Triton's interpreter is on, which compiles nothing.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET: expected none where kernels are compiled, got '1'")
    done: list[Resources] = []
    original: Callable[..., Any] = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        done.append(_compile(self, args, kwargs, arch))

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield done
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
