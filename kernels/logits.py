"""Page logits: scale * q . k^_t for every token of every scored page, for analysis; decoding never stores them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import KernelConfig
from .records import load_query, page_bases, page_logits
from .score import default_config, record_constants


@triton.jit
def logits_kernel(
    q_ptr,
    rec_ptr,
    rec16_ptr,
    block_table_ptr,
    seq_lens_ptr,
    out_ptr,
    stride_q_b,
    stride_q_h,
    stride_r_b,
    stride_r_h,
    stride_r_p,
    stride_t_b,
    stride_o_b,
    stride_o_h,
    scale,
    max_pages,
    per_block,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    MEAN_BITS: tl.constexpr,
    BASIS_BITS: tl.constexpr,
    COEF_BITS: tl.constexpr,
    BASIS_AT: tl.constexpr,
    COEF_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Logits of BLOCK_N pages, -inf for pages that are not scored."""
    off_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P)
    live = off_n < (length + P - 1) // P - 1
    off_g = tl.arange(0, BLOCK_G)
    off_t = tl.arange(0, P // 2)
    q_first, q_second, q_unit, _ = load_query(
        q_ptr, row, head, stride_q_b, stride_q_h, G, D, MIXED, BLOCK_G, BLOCK_H
    )
    base = page_bases(block_table_ptr, row, off_n, live, stride_t_b, stride_r_b, stride_r_p, per_block)
    first, second, _ = page_logits(
        q_first,
        q_second,
        q_unit,
        rec_ptr,
        rec16_ptr,
        base + head * stride_r_h,
        live,
        scale,
        P,
        R,
        D,
        MEAN_BITS,
        BASIS_BITS,
        COEF_BITS,
        BASIS_AT,
        COEF_AT,
        SCALES_AT,
        BLOCK_H,
    )
    # [BLOCK_G, BLOCK_N, P / 2]
    at = row * stride_o_b + (head * G + off_g)[:, None, None] * stride_o_h
    at += off_n.to(tl.int64)[None, :, None] * P + off_t[None, None, :]
    mask = (off_g < G)[:, None, None] & (off_n < max_pages)[None, :, None]
    tl.store(out_ptr + at, tl.where(live[None, :, None], first, -float("inf")), mask=mask)
    tl.store(out_ptr + at + P // 2, tl.where(live[None, :, None], second, -float("inf")), mask=mask)


def logits(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt,
    *,
    scale: float,
    config: KernelConfig | None = None,
) -> Tensor:
    """Returns logits [B, Hq, N, P] float32; arguments as in `locks.api.page_logits`, already checked."""
    B, Hq, D = q.shape
    Hkv, per_block = records.shape[1], records.shape[2]
    G, N = Hq // Hkv, block_table.shape[1] * per_block
    config = config or default_config(fmt.page, G, D)
    out = torch.empty((B, Hq, N, fmt.page), dtype=torch.float32, device=q.device)
    logits_kernel[(triton.cdiv(N, config.block_n), Hkv, B)](
        q,
        records.view(torch.int8),
        records.view(torch.int16),
        block_table,
        seq_lens,
        out,
        q.stride(0),
        q.stride(1),
        *records.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        scale,
        N,
        per_block,
        **record_constants(fmt, D),
        G=G,
        BLOCK_N=config.block_n,
        BLOCK_G=max(16, triton.next_power_of_2(G)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
