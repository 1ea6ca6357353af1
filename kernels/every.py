"""Every: all pages of rows whose table has room for no more than the budget's, so that nothing need be scored."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def every_kernel(
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    max_pages,
    P: tl.constexpr,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """All pages of one row, which are at most M, for one KV head."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    pages = (tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P) + P - 1) // P
    tl.store(counts_ptr + row * stride_c_b + head, pages)
    off_m = tl.arange(0, BLOCK_M)
    at = ids_ptr + row * stride_i_b + head * stride_i_h + off_m
    tl.store(at, tl.where(off_m < pages, off_m, -1), mask=off_m < M)


def every(
    seq_lens: Tensor,
    num_kv_heads: int,
    *,
    room: int,
    page: int,
    pages: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what `select` does where a table has `room` for at most M = `pages` pages."""
    B = seq_lens.shape[0]
    ids, counts = out or (
        torch.empty((B, num_kv_heads, pages), dtype=torch.int32, device=seq_lens.device),
        torch.empty((B, num_kv_heads), dtype=torch.int32, device=seq_lens.device),
    )
    every_kernel[(num_kv_heads, B)](
        seq_lens,
        ids,
        counts,
        *ids.stride()[:2],
        counts.stride(0),
        room,
        P=page,
        M=pages,
        BLOCK_M=triton.next_power_of_2(pages),
        num_warps=1,
    )
    return ids, counts
