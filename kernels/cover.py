"""Cover: the least of a list of pages that reaches a coverage of every head's attention mass.

    estimated:  exp(low) + sum over kept of exp(log_mass) >= coverage (exp(low) + exp(total))
    certified:  exp(low) + sum over kept of exp(least) >= coverage / (1 - coverage) sum over left of exp(most)

least and most are the ends of a page's interval (`certify.py`), low is the exact log-mass of the always kept
pages, or its lower end. Pages are kept in the order of their share, ties to the lower page. A list of up to
4096 pages is sorted in registers by one program; ids come out ascending, and nothing depends on the batch
around a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from locks.certificate import MAX_COVER_PAGES, odds

from .certify import certificate_constants, interval, load_numbers, query_weight
from .records import page_bases


@triton.jit
def cover_kernel(
    share_ptr,
    log_mass_ptr,
    total_ptr,
    low_ptr,
    upper_ptr,
    q_ptr,
    rec16_ptr,
    block_table_ptr,
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    out_ids_ptr,
    out_counts_ptr,
    stride_s_b,
    stride_s_h,
    stride_m_b,
    stride_m_h,
    stride_o_b,
    stride_l_b,
    stride_u_b,
    stride_q_b,
    stride_q_h,
    stride_r_b,
    stride_r_h,
    stride_r_p,
    stride_t_b,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    stride_j_b,
    stride_j_h,
    stride_d_b,
    scale,
    wanted,
    max_pages,
    window_pages,
    per_block,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    VARIANCE_AT: tl.constexpr,
    NORM_AT: tl.constexpr,
    MEAN_SCALE_AT: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    MEAN_FACTOR: tl.constexpr,
    VECTOR_FACTOR: tl.constexpr,
    LOGIT: tl.constexpr,
    SPREAD: tl.constexpr,
    CERTIFIED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The first of a list's candidates, by share, that reach the coverage, and its other pages, ascending.

    low is of the always kept pages, upper of the pages outside the list; wanted is the coverage, or with
    CERTIFIED its odds.
    """
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    last = (tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P) + P - 1) // P - window_pages
    count = tl.load(counts_ptr + row * stride_c_b + head)
    off_m = tl.arange(0, BLOCK_M)
    ids = tl.load(ids_ptr + row * stride_i_b + head * stride_i_h + off_m, mask=off_m < count, other=-1)
    candidate = (ids > 0) & (ids < last)
    ids_or_0 = tl.where(candidate, ids, 0)
    share = tl.load(share_ptr + row * stride_s_b + head * stride_s_h + ids_or_0, mask=candidate, other=0.0)
    share = tl.where(share == share, tl.maximum(share, 0.0), float("inf"))
    # Descending by share, ties to the lower page: a share is not negative, so its bits are ordered as it is.
    key = (share.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - ids_or_0).to(tl.int64)
    key = tl.where(candidate, key, -1)
    ranked = tl.sort(key, descending=True)
    valid = ranked >= 0
    marked = valid & (ranked >= (0x7F800000 << 32))
    useful = valid & ~marked
    page = tl.where(useful, 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32), 0)
    candidates = tl.sum(candidate.to(tl.int32), 0)
    needed = tl.sum(marked.to(tl.int32), 0)
    if CERTIFIED:
        base = page_bases(block_table_ptr, row, page, useful, stride_t_b, stride_r_b, stride_r_p, per_block)
        variance, residual, size = load_numbers(
            rec16_ptr,
            base + head * stride_r_h,
            useful,
            R,
            VARIANCE_AT,
            NORM_AT,
            MEAN_SCALE_AT,
            VECTORS_AT,
            MEAN_FACTOR,
            VECTOR_FACTOR,
        )
        after = tl.minimum(off_m + 1, BLOCK_M - 1)
    for g in range(G):
        q_head = head * G + g
        at = log_mass_ptr + row * stride_m_b + q_head * stride_m_h + page
        x = tl.load(at, mask=useful, other=-float("inf"))
        low = tl.load(low_ptr + row * stride_l_b + q_head)
        # With a mass that is infinite or nan nothing is ever enough: no comparison with nan is true.
        low = tl.where(low < float("inf"), low, float("nan"))
        if CERTIFIED:
            at = q_ptr + row * stride_q_b + q_head * stride_q_h
            weight = tl.sum(query_weight(at, stride_q_h, scale, 1, D, 1, BLOCK_D), 0)
            least, most = interval(x, weight, variance, residual, size, LOGIT, SPREAD)
            least = tl.where(useful, least, -float("inf"))
            most = tl.where(useful, most, -float("inf"))
            rest = tl.load(upper_ptr + row * stride_u_b + q_head)
            # An upper end that is not known stays infinite, and what is left with it.
            top = tl.max(tl.where(most < float("inf"), most, -float("inf")), 0)
            top = tl.maximum(tl.maximum(top, low), tl.where(rest < float("inf"), rest, -float("inf")))
            top = tl.where(top > -float("inf"), top, 0.0)
            first = tl.exp(low - top)
            kept = first + tl.cumsum(tl.exp(least - top), 0)
            # What is left with a page kept: the ones behind it. Subtracting it from the sum would cancel.
            behind = tl.cumsum(tl.exp(most - top), 0, reverse=True)
            outside = tl.exp(rest - top)
            left = tl.where(off_m + 1 < BLOCK_M, tl.gather(behind, after, 0), 0.0) + outside
            every = tl.sum(tl.where(off_m == 0, behind, 0.0), 0) + outside
            enough = kept >= wanted * left
        else:
            total = tl.load(total_ptr + row * stride_o_b + q_head)
            top = tl.maximum(low, total)
            top = tl.where(top > -float("inf"), top, 0.0)
            first = tl.exp(low - top)
            kept = first + tl.cumsum(tl.exp(x - top), 0)
            every = first + tl.exp(total - top)
            enough = kept >= wanted * every
        at_once = first >= wanted * every
        short = (valid & ~enough).to(tl.int32)
        needed = tl.maximum(needed, tl.where(at_once, 0, 1 + tl.sum(short, 0)))
    needed = tl.minimum(needed, candidates)
    least_key = tl.min(tl.where(off_m < needed, ranked, 0x7FFFFFFFFFFFFFFF), 0)
    keep = ((ids >= 0) & (~candidate | (key >= least_key))).to(tl.int32)
    kept_count = tl.sum(keep, 0)
    out = out_ids_ptr + row * stride_j_b + head * stride_j_h
    tl.store(out + tl.cumsum(keep, 0) - 1, ids, mask=keep > 0)
    tl.store(out + off_m, tl.full((BLOCK_M,), -1, tl.int32), mask=(off_m >= kept_count) & (off_m < M))
    tl.store(out_counts_ptr + row * stride_d_b + head, kept_count)


def cover(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt,
    share: Tensor,
    log_mass: Tensor,
    total: Tensor,
    page_ids: Tensor,
    counts: Tensor,
    low: Tensor,
    upper: Tensor | None,
    *,
    coverage: float,
    scale: float,
    window_pages: int,
) -> tuple[Tensor, Tensor]:
    """Returns the page_ids [B, Hkv, M] and counts [B, Hkv] of the least of a list that reaches the coverage.

    Args:
        q: [B, Hq, D].
        records: [num_blocks, Hkv, block / P, record bytes] uint8.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32.
        fmt: SummaryFormat of the records.
        share: [B, Hkv, N] float32, what candidates are ordered by.
        log_mass: [B, Hq, N] float32.
        total: [B, Hq] float32, log-sum-exp of the finite log_mass of all candidates.
        page_ids: [B, Hkv, M] int32, ascending: the always kept pages and the greatest shares.
        counts: [B, Hkv] int32.
        low: [B, Hq] float32, log-mass of the always kept pages, or with `upper` its lower end.
        upper: [B, Hq] float32, upper end of the log-mass of all pages outside the list; None for an estimated
            coverage.
        coverage: share of the mass to reach, between 0 and 1.
        scale: of the logits.
        window_pages: newest pages that are always kept.
    """
    B, Hkv, M = page_ids.shape
    if M > MAX_COVER_PAGES:
        raise ValueError(f"budget: expected at most {MAX_COVER_PAGES} pages with a coverage, got {M}")
    D, certified, BLOCK_M = q.shape[2], upper is not None, triton.next_power_of_2(M)
    out, out_counts = torch.empty_like(page_ids), torch.empty_like(counts)
    cover_kernel[(Hkv, B)](
        share,
        log_mass,
        total,
        low,
        upper if certified else low,
        q,
        records.view(torch.int16),
        block_table,
        seq_lens,
        page_ids,
        counts,
        out,
        out_counts,
        *share.stride()[:2],
        *log_mass.stride()[:2],
        total.stride(0),
        low.stride(0),
        low.stride(0) if upper is None else upper.stride(0),
        *q.stride()[:2],
        *records.stride()[:3],
        block_table.stride(0),
        *page_ids.stride()[:2],
        counts.stride(0),
        *out.stride()[:2],
        out_counts.stride(0),
        scale,
        odds(coverage) if certified else coverage,
        log_mass.shape[2],
        window_pages,
        records.shape[2],
        **certificate_constants(fmt, D),
        G=q.shape[1] // Hkv,
        M=M,
        CERTIFIED=certified,
        BLOCK_M=BLOCK_M,
        # At most 256 keys a warp: more of them spill out of registers.
        num_warps=max(4, min(16, BLOCK_M // 256)),
    )
    return out, out_counts
