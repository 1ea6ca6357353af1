"""Another way to score a page as a kernel: what LOCKS is measured beside, on the same machine.

    quest   sum_d max(q_d min_d, q_d max_d) from the least and the greatest key of a page, elementwise

It writes log-masses and the total of the candidates as `locks.kernels.score` and `locks.kernels.exact` do, so that
selection and attention are the same for all. A page with a key that is not finite has +inf.

Source: Quest (arXiv 2406.10774).
"""

# triton's types know no launch options, and take a constexpr parameter for a constexpr argument.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from locks.baselines import PageState
from locks.kernels.dependent import dependent
from locks.kernels.exact import load_queries
from locks.kernels.score import CHUNK, add_candidates, log_sum, total_kernel
from locks.types import PageMass


@triton.jit
def quest_pages(
    q, low_ptr, high_ptr, at, live, scale, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Upper bounds of the largest logit of BLOCK_N pages, [BLOCK_G, BLOCK_N]; scale is positive."""
    off_d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (off_d < D)[None, :]
    # [BLOCK_N, BLOCK_D]
    low = tl.load(low_ptr + at[:, None] + off_d[None, :], mask=mask, other=0.0)
    high = tl.load(high_ptr + at[:, None] + off_d[None, :], mask=mask, other=0.0)
    zero = tl.zeros(q.shape, q.dtype)
    bound = tl.dot(tl.where(q > 0.0, q, zero), tl.trans(high), input_precision="ieee")
    bound += tl.dot(tl.where(q < 0.0, q, zero), tl.trans(low), input_precision="ieee")
    # The mark of a page that has a key that is not finite.
    mark = tl.load(high_ptr + at, mask=live, other=0.0).to(tl.float32)
    return tl.where((mark != mark)[None, :], float("inf"), bound * scale)


@triton.jit
def quest_kernel(
    q_ptr,
    low_ptr,
    high_ptr,
    block_table_ptr,
    seq_lens_ptr,
    log_mass_ptr,
    partial_ptr,
    stride_q_b,
    stride_q_h,
    stride_x_b,
    stride_x_h,
    stride_x_p,
    stride_t_b,
    stride_m_b,
    stride_m_h,
    stride_p_b,
    stride_p_h,
    scale,
    max_pages,
    window_pages,
    per_block,
    P: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """log_mass of CHUNK pages of one (row, KV head) and their total."""
    pid_c = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P)
    newest = (length + P - 1) // P - 1
    last = newest + 1 - window_pages
    off_g = tl.arange(0, BLOCK_G)
    mask_g = off_g < G
    q = load_queries(q_ptr, row, head, stride_q_b, stride_q_h, D, G, BLOCK_G, BLOCK_D)
    best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK_G,), tl.float32)
    for n in range(pid_c * CHUNK, tl.minimum(pid_c * CHUNK + CHUNK, max_pages), BLOCK_N):
        off_n = n + tl.arange(0, BLOCK_N)
        live = off_n < newest
        log_mass = tl.full((BLOCK_G, BLOCK_N), -float("inf"), tl.float32)
        if n < newest:
            block = tl.load(block_table_ptr + row * stride_t_b + off_n // per_block, mask=live, other=0)
            slot = (off_n % per_block).to(tl.int64)
            at = block.to(tl.int64) * stride_x_b + head * stride_x_h + slot * stride_x_p
            log_mass = quest_pages(q, low_ptr, high_ptr, at, live, scale, D, BLOCK_N, BLOCK_D)
            log_mass = tl.where(live[None, :], log_mass, -float("inf"))
            best, mass = add_candidates(log_mass, off_n, last, best, mass)
        at = log_mass_ptr + row * stride_m_b + (head * G + off_g)[:, None] * stride_m_h + off_n[None, :]
        tl.store(at, log_mass, mask=mask_g[:, None] & (off_n < max_pages)[None, :])
    partial_at = partial_ptr + row * stride_p_b + (head * G + off_g) * stride_p_h + pid_c
    tl.store(partial_at, log_sum(best, mass), mask=mask_g)


def quest_mass(
    q: Tensor,
    state: PageState,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    scale: float,
    window_pages: int = 1,
) -> PageMass:
    """Returns what `locks.baselines.Quest.page_mass` does: log_mass [B, Hq, N] and total [B, Hq], float32.

    Args:
        q: [B, Hq, D].
        state: what `Quest.seal` made: least and greatest keys, [num_blocks, Hkv, block / P, D] each.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32, tokens.
        page: P, tokens.
        scale: of the logits, above 0.
        window_pages: newest pages that are no candidates.

    Raises:
        ValueError: a scale that is not above 0.
    """
    if scale <= 0:
        raise ValueError(f"scale: expected one above 0, got {scale}")
    low, high = state.parts
    B, Hq, D = q.shape
    heads, per_block = low.shape[1:3]
    N, G = block_table.shape[1] * per_block, Hq // heads
    chunks = triton.cdiv(N, CHUNK)
    log_mass = torch.empty((B, Hq, N), dtype=torch.float32, device=q.device)
    partial = torch.empty((B, Hq, chunks), dtype=torch.float32, device=q.device)
    total = torch.empty((B, Hq), dtype=torch.float32, device=q.device)
    quest_kernel[(chunks, heads, B)](
        q,
        low,
        high,
        block_table,
        seq_lens,
        log_mass,
        partial,
        *q.stride()[:2],
        *low.stride()[:3],
        block_table.stride(0),
        *log_mass.stride()[:2],
        *partial.stride()[:2],
        scale,
        N,
        window_pages,
        per_block,
        P=page,
        D=D,
        G=G,
        CHUNK=CHUNK,
        BLOCK_N=32,
        BLOCK_G=max(16, triton.next_power_of_2(G)),
        BLOCK_D=triton.next_power_of_2(D),
        num_warps=4,
    )
    total_kernel[(Hq, B)](
        partial,
        total,
        *partial.stride()[:2],
        total.stride(0),
        chunks,
        BLOCK_C=1024,
        num_warps=4,
        **dependent(total_kernel, q.device),
    )
    return PageMass(log_mass, total)
