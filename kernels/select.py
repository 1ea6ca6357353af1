"""Select: shares of the group's mass, and the M pages of a KV head that are attended to.

    share[n] = sum over the group's heads of exp(log_mass[n] - total)

A share is not negative, so the bits of its float32 are ordered as it is. The threshold tau, the K-th largest key, is
found from the top bits down by counting; then every candidate above tau is kept, in page order, and the lowest pages
at tau. No sort, no atomic: ids come out ascending, and equal inputs give equal ids.

One program selects for one (row, KV head), so what it reads is what counts:

* up to `DIRECT` pages: all keys at once, in registers;
* more: the largest key of every group of pages first. The K first groups, by their largest keys and then by number,
  hold the K first pages, by key and then by number: before a page of any other group come K pages, one of each. So
  only their keys are read;
* where K groups are too many for registers: keys in tiles, again for each digit of the threshold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Most keys that one program keeps in registers at once: pages, groups, or pages of the chosen groups.
DIRECT = 4096
IN_REGISTERS = 8192


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
    for g in tl.static_range(G):
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
def threshold(key, wanted):
    """The wanted-th largest of key [BLOCK] int32, 0 where fewer are not negative; how many of its equals to keep."""
    tau = tl.full((), 0, tl.int32)
    # Two bits a step: the counts at three candidates for tau are one sum.
    for step in range(15):
        one = 1 << (29 - 2 * step)
        reached = (key >= tau + one).to(tl.int64)
        reached += (key >= tau + 2 * one).to(tl.int64) << 20
        reached += (key >= tau + 3 * one).to(tl.int64) << 40
        count = tl.sum(reached, 0)
        digit = ((count & 0xFFFFF) >= wanted).to(tl.int32)
        digit += (((count >> 20) & 0xFFFFF) >= wanted).to(tl.int32)
        digit += ((count >> 40) >= wanted).to(tl.int32)
        tau += digit * one
    tau += (tl.sum((key > tau).to(tl.int32), 0) >= wanted).to(tl.int32)
    return tau, wanted - tl.sum((key > tau).to(tl.int32), 0)


@triton.jit
def kept(key, wanted):
    """Which keys are the wanted largest, ties to the first, and the place of each among them; int32 both."""
    tau, need = threshold(key, wanted)
    tie = (key == tau).to(tl.int32)
    keep = ((key > tau) | ((tie > 0) & (tl.cumsum(tie, 0) <= need))).to(tl.int32)
    return keep, tl.cumsum(keep, 0) - 1


@triton.jit
def maxima_kernel(
    share_ptr,
    seq_lens_ptr,
    maxima_ptr,
    stride_s_b,
    stride_s_h,
    stride_m_b,
    stride_m_h,
    max_pages,
    window_pages,
    groups,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The largest key of BLOCK_C groups of GROUP pages, -1 where a group has no candidate."""
    off_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    pages = (tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P) + P - 1) // P
    # [BLOCK_C, GROUP]
    off_n = off_c[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    key = load_keys(share_ptr + row * stride_s_b + head * stride_s_h, off_n, pages - window_pages)
    at = maxima_ptr + row * stride_m_b + head * stride_m_h + off_c
    tl.store(at, tl.max(key, 1), mask=off_c < groups)


@triton.jit
def select_groups_kernel(
    share_ptr,
    maxima_ptr,
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    chosen_ptr,
    stride_s_b,
    stride_s_h,
    stride_m_b,
    stride_m_h,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    stride_g_b,
    stride_g_h,
    max_pages,
    window_pages,
    groups,
    P: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """page_ids and count of one (row, KV head); the groups to read first, or with a GROUP of 0 all BLOCK_C pages."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    share_ptr += row * stride_s_b + head * stride_s_h
    ids_ptr += row * stride_i_b + head * stride_i_h
    pages = (tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P) + P - 1) // P
    tl.store(counts_ptr + row * stride_c_b + head, tl.minimum(pages, M))
    off_m = tl.arange(0, BLOCK_M)
    if pages <= M:
        tl.store(ids_ptr + off_m, tl.where(off_m < pages, off_m, -1), mask=off_m < M)
    else:
        last = pages - window_pages
        wanted = M - 1 - window_pages
        off_c = tl.arange(0, BLOCK_C)
        if GROUP == 0:
            page = off_c
        else:
            at = maxima_ptr + row * stride_m_b + head * stride_m_h + off_c
            keep, place = kept(tl.load(at, mask=off_c < groups, other=-1), wanted)
            chosen_ptr += row * stride_g_b + head * stride_g_h
            tl.store(chosen_ptr + place, off_c, mask=keep > 0)
            # The chosen groups change hands between the program's threads, through memory.
            tl.debug_barrier()
            group = tl.load(chosen_ptr + off_m, mask=off_m < tl.sum(keep, 0), other=-1)
            page = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (BLOCK_M * GROUP,))
        keep, place = kept(load_keys(share_ptr, page, last), wanted)
        tl.store(ids_ptr, 0)
        tl.store(ids_ptr + 1 + place, page, mask=keep > 0)
        tl.store(ids_ptr + M - window_pages + off_m, last + off_m, mask=off_m < window_pages)


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
    """page_ids and count of one (row, KV head), by keys read again for each digit of four bits."""
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
    share_kernel[(triton.cdiv(N, 256), num_kv_heads, B)](
        log_mass,
        total,
        out,
        *log_mass.stride()[:2],
        total.stride(0),
        *out.stride()[:2],
        N,
        G=Hq // num_kv_heads,
        BLOCK_N=256,
        num_warps=2,
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
    BLOCK_M = triton.next_power_of_2(pages)
    group = max(16, triton.next_power_of_2(triton.cdiv(N, DIRECT)))
    if N <= DIRECT:
        maxima, chosen, groups, group, BLOCK_C = share, counts, 0, 0, triton.next_power_of_2(N)
    elif BLOCK_M * group <= IN_REGISTERS:
        groups = triton.cdiv(N, group)
        BLOCK_C = triton.next_power_of_2(groups)
        maxima = torch.empty((B, Hkv, groups), dtype=torch.int32, device=share.device)
        chosen = torch.empty((B, Hkv, BLOCK_M), dtype=torch.int32, device=share.device)
        maxima_kernel[(triton.cdiv(groups, 64), Hkv, B)](
            share,
            seq_lens,
            maxima,
            *share.stride()[:2],
            *maxima.stride()[:2],
            N,
            window_pages,
            groups,
            P=page,
            GROUP=group,
            BLOCK_C=64,
        )
    else:
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
            BLOCK_M=BLOCK_M,
            BLOCK_N=1024,
            num_warps=8,
        )
        return ids, counts
    select_groups_kernel[(Hkv, B)](
        share,
        maxima,
        seq_lens,
        ids,
        counts,
        chosen,
        *share.stride()[:2],
        *maxima.stride()[:2],
        *ids.stride()[:2],
        counts.stride(0),
        *(chosen.stride()[:2] if group else (0, 0)),
        N,
        window_pages,
        groups,
        P=page,
        M=pages,
        GROUP=group,
        BLOCK_M=BLOCK_M,
        BLOCK_C=BLOCK_C,
        num_warps=8,
    )
    return ids, counts
