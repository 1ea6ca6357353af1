"""Append: the new tokens' keys and values go to their places in a paged cache.

A row is a token: it goes to slot seq_len - 1 of its sequence, its own length counting itself. A row of length 0, or one
longer than its table has room for, is not written, so idle rows of a CUDA graph leave the cache alone.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def append_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    stride_k_b,
    stride_k_h,
    stride_v_b,
    stride_v_h,
    stride_kc_b,
    stride_kc_h,
    stride_kc_t,
    stride_vc_b,
    stride_vc_h,
    stride_vc_t,
    stride_t_b,
    room,
    block_size,
    q_len,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One token's keys and values of all KV heads."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(seq_lens_ptr + row) - 1
    if (token < 0) | (token >= room):
        return
    off_h = tl.arange(0, BLOCK_H)
    off_d = tl.arange(0, BLOCK_D)
    off_v = tl.arange(0, BLOCK_DV)
    mask_h = (off_h < H)[:, None]
    block = tl.load(block_table_ptr + row // q_len * stride_t_b + token // block_size).to(tl.int64)
    place = (token % block_size).to(tl.int64)
    head = off_h.to(tl.int64)[:, None]
    mask = mask_h & (off_d < D)[None, :]
    # [BLOCK_H, BLOCK_D]
    k = tl.load(k_ptr + row * stride_k_b + head * stride_k_h + off_d[None, :], mask=mask)
    at = block * stride_kc_b + head * stride_kc_h + place * stride_kc_t
    tl.store(k_cache_ptr + at + off_d[None, :], k, mask=mask)
    mask = mask_h & (off_v < DV)[None, :]
    # [BLOCK_H, BLOCK_DV]
    v = tl.load(v_ptr + row * stride_v_b + head * stride_v_h + off_v[None, :], mask=mask)
    at = block * stride_vc_b + head * stride_vc_h + place * stride_vc_t
    tl.store(v_cache_ptr + at + off_v[None, :], v, mask=mask)


def append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor
) -> None:
    """Writes k [B, Hkv, D] and v [B, Hkv, Dv] to slot seq_lens - 1 of their rows.

    Args:
        k: [B, Hkv, D] in the cache's dtype.
        v: [B, Hkv, Dv] likewise.
        k_cache: [num_blocks, Hkv, block, D].
        v_cache: [num_blocks, Hkv, block, Dv].
        block_table: [B / q_len, max_blocks] int32: q_len rows, one behind the other, share one of its rows.
        seq_lens: [B] int32.
    """
    B, Hkv, D = k.shape
    DV, block_size = v.shape[2], k_cache.shape[2]
    append_kernel[(B,)](
        k,
        v,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        block_table.shape[1] * block_size,
        block_size,
        B // block_table.shape[0],
        H=Hkv,
        D=D,
        DV=DV,
        BLOCK_H=triton.next_power_of_2(Hkv),
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_DV=triton.next_power_of_2(DV),
        num_warps=4 if Hkv * max(D, DV) > 512 else 1,
    )
