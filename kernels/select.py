"""Select: shares of the group's mass, and the M pages of a KV head that are attended to.

    share[n] = sum over the group's heads of exp(log_mass[n] - total)

A share is not negative, so the bits of its float32 are ordered as it is. The threshold tau, the K-th largest key, is
found four bits at a time from the top by counting; then one pass in page order keeps every candidate above tau and
the lowest pages at tau. No sort, no atomic: ids come out ascending, and equal inputs give equal ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def share_kernel(
    log_mass_ptr,
    total_ptr,
    share_ptr,
    stride_m_b,
    stride_m_h,
    stride_t_b,
    stride_s_b,
    stride_s_h,
    max_pages,
    G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """share of BLOCK_N pages: +inf for a marked page, 0 where nothing was scored."""
    off_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    mask_n = off_n < max_pages
    share = tl.zeros((BLOCK_N,), tl.float32)
    for g in range(G):
        q_head = head * G + g
        x = tl.load(
            log_mass_ptr + row * stride_m_b + q_head * stride_m_h + off_n, mask=mask_n, other=-float("inf")
        )
        total = tl.load(total_ptr + row * stride_t_b + q_head)
        # Without a finite candidate the total is -inf, and only marked pages have a share.
        known = tl.abs(total) < float("inf")
        part = tl.where(known, tl.exp(x - tl.where(known, total, 0.0)), 0.0)
        share += tl.where(x == float("inf"), float("inf"), part)
    tl.store(share_ptr + row * stride_s_b + head * stride_s_h + off_n, share, mask=mask_n)


@triton.jit
def load_keys(share_ptr, off_n, last):
    """Order-preserving int32 keys of candidates 1 .. last - 1, -1 elsewhere; nan counts as +inf."""
    mask = (off_n > 0) & (off_n < last)
    x = tl.load(share_ptr + off_n, mask=mask, other=0.0)
    x = tl.where(x == x, tl.maximum(x, 0.0), float("inf"))
    return tl.where(mask, x.to(tl.int32, bitcast=True), -1)


@triton.jit
def select_kernel(
    share_ptr,
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    stride_s_b,
    stride_s_h,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    max_pages,
    window_pages,
    P: tl.constexpr,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """page_ids and count of one (row, KV head)."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    share_ptr += row * stride_s_b + head * stride_s_h
    ids_ptr += row * stride_i_b + head * stride_i_h
    pages = (tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P) + P - 1) // P
    count = tl.minimum(pages, M)
    tl.store(counts_ptr + row * stride_c_b + head, count)
    off_m = tl.arange(0, BLOCK_M)
    if pages <= M:
        tl.store(ids_ptr + off_m, tl.where(off_m < pages, off_m, -1), mask=off_m < M)
    else:
        last = pages - window_pages
        wanted = M - 1 - window_pages
        # The K-th largest key: after each digit, `tau` is its prefix and `need` counts what is still missing below.
        tau = tl.zeros((1,), tl.int32)
        need = tl.zeros((1,), tl.int32) + wanted
        digits = tl.arange(0, 16)
        for step in range(8):
            shift = 28 - 4 * step
            counts = tl.zeros((16,), tl.int32)
            for n in range(0, last, BLOCK_N):
                key = load_keys(share_ptr, n + tl.arange(0, BLOCK_N), last)
                # Keys that agree with tau in all higher digits.
                match = ((key >> shift) >> 4) == ((tau >> shift) >> 4)
                digit = tl.where(match & (key >= 0), (key >> shift) & 15, -1)
                counts += tl.sum((digit[None, :] == digits[:, None]).to(tl.int32), 1)
            # at_least[d]: keys of this prefix whose digit is d or more.
            at_least = tl.sum(tl.where(digits[None, :] >= digits[:, None], counts[None, :], 0), 1)
            chosen = tl.max(tl.where(at_least >= need, digits, 0), 0)
            need -= tl.sum(tl.where(digits > chosen, counts, 0), 0)
            tau += chosen << shift
        tl.store(ids_ptr, 0)
        at = 1
        ties = 0
        for n in range(0, last, BLOCK_N):
            off_n = n + tl.arange(0, BLOCK_N)
            key = load_keys(share_ptr, off_n, last)
            tie = (key == tau).to(tl.int32)
            rank = ties + tl.cumsum(tie, 0)
            keep = ((key > tau) | ((tie > 0) & (rank <= need))).to(tl.int32)
            tl.store(ids_ptr + at + tl.cumsum(keep, 0) - 1, off_n, mask=keep > 0)
            at += tl.sum(keep, 0)
            ties += tl.sum(tie, 0)
        newest = off_m < window_pages
        tl.store(ids_ptr + M - window_pages + off_m, last + off_m, mask=newest)


def share(log_mass: Tensor, total: Tensor, num_kv_heads: int, *, out: Tensor | None = None) -> Tensor:
    """Returns share [B, Hkv, N] float32 from log_mass [B, Hq, N] and total [B, Hq]."""
    B, Hq, N = log_mass.shape
    if out is None:
        out = torch.empty((B, num_kv_heads, N), dtype=torch.float32, device=log_mass.device)
    share_kernel[(triton.cdiv(N, 1024), num_kv_heads, B)](
        log_mass,
        total,
        out,
        *log_mass.stride()[:2],
        total.stride(0),
        *out.stride()[:2],
        N,
        G=Hq // num_kv_heads,
        BLOCK_N=1024,
    )
    return out


def select(
    share: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    pages: int,
    window_pages: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns page_ids [B, Hkv, M] int32, ascending, -1 behind the last, and counts [B, Hkv] int32; M = `pages`."""
    B, Hkv, N = share.shape
    ids, counts = out or (
        torch.empty((B, Hkv, pages), dtype=torch.int32, device=share.device),
        torch.empty((B, Hkv), dtype=torch.int32, device=share.device),
    )
    select_kernel[(Hkv, B)](
        share,
        seq_lens,
        ids,
        counts,
        *share.stride()[:2],
        *ids.stride()[:2],
        counts.stride(0),
        N,
        window_pages,
        P=page,
        M=pages,
        BLOCK_M=triton.next_power_of_2(pages),
        BLOCK_N=1024,
        num_warps=8,
    )
    return ids, counts
