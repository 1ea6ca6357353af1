"""Quantise: queries as the fast score kernel takes them, once a step.

A query is rotated as the records are (`locks.format.rotate`) and written as two int8 digits, 15 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent import dependent, release, wait
from .records import hadamard


@triton.jit
def quantise_kernel(
    q_ptr,
    digits_ptr,
    numbers_ptr,
    stride_q_b,
    stride_q_h,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Two int8 digits of up to 8 queries of a group, rotated.

    Of both halves of D there are 16 rows, 8 of high digits and 8 of low ones; the numbers are the value of one unit
    and |scale q|^2, scale in log2.
    """
    wait(DEPENDENT)
    release(DEPENDENT)
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    H: tl.constexpr = D // 2
    off_g = tl.arange(0, 8)
    d = tl.arange(0, H)
    # Rows of absent heads repeat the last one; their results are not stored.
    q_head = head * G + tl.minimum(tile * 8 + off_g, G - 1)
    at = q_ptr + row * stride_q_b + q_head[:, None] * stride_q_h + d[None, :]
    a = tl.load(at).to(tl.float32) * scale
    b = tl.load(at + H).to(tl.float32) * scale
    norm = tl.sum(a * a + b * b, 1)
    # `locks.format.rotate`, whose blocks are 16 elements of each half.
    first = hadamard(a + b, 1, 16) * 32**-0.5
    second = hadamard(a - b, 1, 16) * 32**-0.5
    unit = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
    unit = tl.maximum(unit, 1e-30) * (1.0 / 16256.0)
    item = (row * tl.num_programs(1) + head) * tl.num_programs(0) + tile
    at = digits_ptr + item * (32 * H) + off_g[:, None] * H + d[None, :]
    for half in tl.static_range(2):
        x = first if half == 0 else second
        x = tl.floor(x * (1.0 / unit)[:, None] + 0.5).to(tl.int32)
        high = (x + 64) >> 7
        tl.store(at + half * (16 * H), high.to(tl.int8))
        tl.store(at + half * (16 * H) + 8 * H, (x - high * 128).to(tl.int8))
    tl.store(numbers_ptr + item * 16 + off_g, unit)
    tl.store(numbers_ptr + item * 16 + 8 + off_g, norm)


def query_buffers(B: int, Hq: int, Hkv: int, D: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Room for the quantised queries: their digits, and their units and norms."""
    tiles = (B, Hkv, -(-(Hq // Hkv) // 8), 2)
    return (
        torch.empty((*tiles, 16, D // 2), dtype=torch.int8, device=device),
        torch.empty((*tiles, 8), dtype=torch.float32, device=device),
    )


def quantise(q: Tensor, scale: float, digits: Tensor, numbers: Tensor) -> None:
    """Writes the digits, units and squared norms of scale * q [B, Hq, D] into `query_buffers`."""
    B, Hkv, tiles = digits.shape[:3]
    quantise_kernel[(tiles, Hkv, B)](
        q,
        digits,
        numbers,
        *q.stride()[:2],
        scale,
        G=q.shape[1] // Hkv,
        D=q.shape[2],
        num_warps=1,
        **dependent(quantise_kernel, q.device),
    )
