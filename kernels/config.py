"""The launch shape of a kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """Pages a tile, warps a program and pipeline stages: a pure function of the shape, or the caller's choice."""

    block_n: int
    num_warps: int
    num_stages: int = 1
