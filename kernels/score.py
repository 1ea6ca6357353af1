"""Score: log-mass of every page from its record, and each head's log-sum-exp over the candidates.

    log_mass[n] = log sum_t exp(logit[n, t]) + 0.5 scale^2 |q|^2 variance[n]
    total       = log sum over finite candidates n of exp(log_mass[n])

One program scores CHUNK pages of one (row, KV head) for all query heads of its group; logits stay in registers. The
chunks are cut by page number alone, and their partial totals are added in page order, so a row's result does not
depend on the batch around it or on the width of the table.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from locks.format import mixed

from . import score_hopper
from .config import KernelConfig, device_name, tuned
from .dependent import dependent, release, wait
from .records import load_query, page_bases, page_logits

# Pages a program scores: fixed, because the cut decides the order of the total's additions.
CHUNK = 64


@triton.jit
def log_sum(best, mass):
    """best + log(mass), and -inf where there is no mass."""
    return tl.where(mass == 0.0, -float("inf"), best + tl.log(tl.where(mass == 0.0, 1.0, mass)))


@triton.jit
def add_candidates(log_mass, off_n, last, best, mass):
    """best and mass [BLOCK_G] of a running log-sum-exp, with the finite candidates of log_mass [BLOCK_G, BLOCK_N]."""
    counts = ((off_n > 0) & (off_n < last))[None, :] & (tl.abs(log_mass) < float("inf"))
    counted = tl.where(counts, log_mass, -float("inf"))
    new = tl.maximum(best, tl.max(counted, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    return new, mass * tl.exp(best - safe) + tl.sum(tl.exp(counted - safe[:, None]), 1)


@triton.jit
def score_kernel(
    q_ptr,
    rec_ptr,
    rec16_ptr,
    block_table_ptr,
    seq_lens_ptr,
    log_mass_ptr,
    partial_ptr,
    stride_q_b,
    stride_q_h,
    stride_r_b,
    stride_r_h,
    stride_r_p,
    stride_t_b,
    stride_m_b,
    stride_m_h,
    stride_p_b,
    stride_p_h,
    scale,
    max_pages,
    window_pages,
    per_block,
    q_len,
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
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """log_mass of CHUNK pages and the log-sum-exp of the candidates among them."""
    pid_c = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P)
    # The newest page is not scored: scored pages are 0 .. newest - 1.
    newest = (length + P - 1) // P - 1
    last = newest + 1 - window_pages
    off_g = tl.arange(0, BLOCK_G)
    mask_g = off_g < G
    q_head = head * G + off_g
    best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK_G,), tl.float32)
    q_first, q_second, q_unit, q_norm = load_query(
        q_ptr, row, head, stride_q_b, stride_q_h, G, D, MIXED, BLOCK_G, BLOCK_H
    )
    for n in range(pid_c * CHUNK, tl.minimum(pid_c * CHUNK + CHUNK, max_pages), BLOCK_N):
        off_n = n + tl.arange(0, BLOCK_N)
        live = off_n < newest
        # [BLOCK_G, BLOCK_N]
        log_mass = tl.full((BLOCK_G, BLOCK_N), -float("inf"), tl.float32)
        if n < newest:
            base = page_bases(
                block_table_ptr, row // q_len, off_n, live, stride_t_b, stride_r_b, stride_r_p, per_block
            )
            first, second, variance = page_logits(
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
            top = tl.maximum(tl.max(first, 2), tl.max(second, 2))
            summed = tl.sum(tl.exp(first - top[:, :, None]), 2) + tl.sum(tl.exp(second - top[:, :, None]), 2)
            spread = (0.5 * scale * scale) * q_norm[:, None] * variance[None, :]
            # An infinite variance marks a page with a non-finite key.
            marked = (variance == float("inf"))[None, :]
            log_mass = tl.where(marked, float("inf"), top + tl.log(summed) + spread)
            log_mass = tl.where(live[None, :], log_mass, -float("inf"))
            best, mass = add_candidates(log_mass, off_n, last, best, mass)
        at = log_mass_ptr + row * stride_m_b + q_head[:, None] * stride_m_h + off_n[None, :]
        tl.store(at, log_mass, mask=mask_g[:, None] & (off_n < max_pages)[None, :])
    partial = log_sum(best, mass)
    tl.store(partial_ptr + row * stride_p_b + q_head * stride_p_h + pid_c, partial, mask=mask_g)


@triton.jit
def total_kernel(
    partial_ptr,
    total_ptr,
    stride_p_b,
    stride_p_h,
    stride_t_b,
    num_chunks,
    BLOCK_C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Log-sum-exp of one head's partial totals, BLOCK_C at a time in page order."""
    wait(DEPENDENT)
    release(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    best = tl.full((1,), -float("inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    for c in range(0, num_chunks, BLOCK_C):
        off_c = c + tl.arange(0, BLOCK_C)
        at = partial_ptr + row * stride_p_b + head * stride_p_h + off_c
        x = tl.load(at, mask=off_c < num_chunks, other=-float("inf"))
        new = tl.maximum(best, tl.max(x, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        mass = mass * tl.exp(best - safe) + tl.sum(tl.exp(x - safe), 0)
        best = new
    total = log_sum(best, mass)
    tl.store(total_ptr + row * stride_t_b + head + tl.arange(0, 1), total)


def default_config(page: int, group: int, head_dim: int) -> KernelConfig:
    """Tile and warps for a shape: about 2**13 logits a program in flight, at least 16 pages for the matrix unit."""
    return KernelConfig(block_n=16, num_warps=4 if page * max(16, group) <= 256 and head_dim <= 128 else 8)


def record_constants(fmt, head_dim: int) -> dict[str, int]:
    """The constexprs that describe a record to a kernel."""
    at = fmt.layout(head_dim)
    return {
        "P": fmt.page,
        "R": fmt.rank,
        "D": head_dim,
        "MEAN_BITS": fmt.mean_bits,
        "BASIS_BITS": fmt.basis_bits,
        "COEF_BITS": fmt.coef_bits,
        "BASIS_AT": at.basis,
        "COEF_AT": at.coef,
        "SCALES_AT": at.scales,
        "MIXED": mixed(head_dim),
        # The integer matrix unit sums at least 32 products.
        "BLOCK_H": max(32, int(triton.next_power_of_2(head_dim // 2))),
    }


class Workspace(NamedTuple):
    """What the kernels hand on; its contents before a call do not matter."""

    # [B, Hq, chunks] float32
    partial: Tensor
    # whether the chunks are those of the fast path
    fast: bool


def workspace(q: Tensor, records: Tensor, pages: int, fmt, *, exact: bool = True) -> Workspace:
    """Buffers for queries and records like these and tables of so many pages: one set is enough for all layers."""
    B, Hq, _ = q.shape
    fast = not exact and score_hopper.fits(q, records, fmt)
    chunks = score_hopper.num_chunks(pages) if fast else triton.cdiv(pages, CHUNK)
    return Workspace(torch.empty((B, Hq, chunks), dtype=torch.float32, device=q.device), fast)


def score(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt,
    *,
    scale: float,
    window_pages: int,
    exact: bool = True,
    whole: bool = True,
    config: KernelConfig | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    work: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log_mass [B, Hq, N] and total [B, Hq], float32; arguments as in `locks.api.page_mass`, already checked.

    Args:
        q: [B, Hq, D].
        records: [num_blocks, Hkv, block / P, record bytes] uint8.
        block_table: [B / q_len, max_blocks] int32: q_len rows, one behind the other, share one of its rows.
        seq_lens: [B] int32.
        fmt: SummaryFormat of the records.
        scale: of the logits.
        window_pages: newest pages that are no candidates.
        exact: not by the fast path, whose operands are quantised.
        whole: write -inf for pages that are not scored; else they may keep any value.
        config: launch shape; None for the default.
        out: log_mass and total to write into.
        work: `workspace` of these arguments; with it and `out` nothing is allocated.
    """
    B, Hq, D = q.shape
    Hkv, per_block = records.shape[1], records.shape[2]
    G, N = Hq // Hkv, block_table.shape[1] * per_block
    log_mass, total = out or (
        torch.empty((B, Hq, N), dtype=torch.float32, device=q.device),
        torch.empty((B, Hq), dtype=torch.float32, device=q.device),
    )
    partial, fast = work or workspace(q, records, N, fmt, exact=exact)
    if fast:
        score_hopper.score_hopper(
            q,
            records,
            block_table,
            seq_lens,
            fmt,
            scale=scale,
            window_pages=window_pages,
            log_mass=log_mass,
            partial=partial,
            whole=whole,
            config=config,
        )
    else:
        shape = {"page": fmt.page, "rank": fmt.rank, "group": G, "head_dim": D}
        config = config or tuned(device_name(q.device), "score", **shape) or default_config(fmt.page, G, D)
        if config.block_n > CHUNK:
            raise ValueError(f"config: block_n: expected at most {CHUNK} pages, got {config.block_n}")
        _general(q, records, block_table, seq_lens, fmt, scale, window_pages, config, log_mass, partial)
    total_kernel[(Hq, B)](
        partial,
        total,
        *partial.stride()[:2],
        total.stride(0),
        partial.shape[2],
        # A row's chunks on the fast path, up to 8,192 pages; one warp, whose lanes need no shared memory to add up.
        BLOCK_C=512,
        num_warps=1,
        **dependent(total_kernel, partial.device),
    )
    return log_mass, total


def _general(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt,
    scale: float,
    window_pages: int,
    config: KernelConfig,
    log_mass: Tensor,
    partial: Tensor,
) -> None:
    B, Hq, D = q.shape
    Hkv, per_block = records.shape[1], records.shape[2]
    G, N = Hq // Hkv, log_mass.shape[2]
    score_kernel[(partial.shape[2], Hkv, B)](
        q,
        records.view(torch.int8),
        records.view(torch.int16),
        block_table,
        seq_lens,
        log_mass,
        partial,
        q.stride(0),
        q.stride(1),
        *records.stride()[:3],
        block_table.stride(0),
        *log_mass.stride()[:2],
        *partial.stride()[:2],
        scale,
        N,
        window_pages,
        per_block,
        B // block_table.shape[0],
        **record_constants(fmt, D),
        G=G,
        CHUNK=CHUNK,
        BLOCK_N=config.block_n,
        BLOCK_G=max(16, triton.next_power_of_2(G)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
