"""Exact: log-mass of every page from its keys, and each head's log-sum-exp over the candidates.

    log_mass[n] = log sum_t exp(scale * q . k[n, t])
    total       = log sum over finite candidates n of exp(log_mass[n])

A page with a key that is not finite has +inf, one that is not scored -inf. One program reads the keys of CHUNK pages of
one (row, KV head) once, for all query heads of its group; chunks and their sum are those of `score`.

Source: LOCKS (arXiv 2607.24555), the oracle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import KernelConfig
from .dependent import dependent
from .score import CHUNK, add_candidates, log_sum, total_kernel

# Bytes of keys that a program reads at once, at widths up to 128: what stays in registers.
TILE = 2**15


@triton.jit
def load_queries(
    q_ptr,
    row,
    head,
    stride_q_b,
    stride_q_h,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Queries of a group, [BLOCK_G, BLOCK_D], 0 behind them."""
    off_g = tl.arange(0, BLOCK_G)
    off_d = tl.arange(0, BLOCK_D)
    at = q_ptr + row * stride_q_b + (head * G + off_g)[:, None] * stride_q_h + off_d[None, :]
    return tl.load(at, mask=(off_g < G)[:, None] & (off_d < D)[None, :], other=0.0)


@triton.jit
def exact_pages(
    q,
    k_ptr,
    first,
    stride_k_t,
    live,
    scale,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Log-masses of BLOCK_N pages whose keys begin at `first`, [BLOCK_G, BLOCK_N]."""
    off_d = tl.arange(0, BLOCK_D)
    off_t = tl.arange(0, P).to(tl.int64)
    # [BLOCK_N P]
    at = tl.reshape(first[:, None] + off_t[None, :] * stride_k_t, (BLOCK_N * P,))
    mask_t = tl.reshape(tl.broadcast_to(live[:, None], (BLOCK_N, P)), (BLOCK_N * P,))
    # [BLOCK_N P, BLOCK_D]
    k = tl.load(k_ptr + at[:, None] + off_d[None, :], mask=mask_t[:, None] & (off_d < D)[None, :], other=0.0)
    # [BLOCK_G, BLOCK_N, P]
    logits = tl.reshape(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, (BLOCK_G, BLOCK_N, P))
    top = tl.max(logits, 2)
    # Finite keys may have a logit that is not.
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    log_mass = top + tl.log(tl.sum(tl.exp(logits - top[:, :, None]), 2))
    bad = tl.max((tl.abs(k.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1)
    marked = tl.max(tl.reshape(bad, (BLOCK_N, P)), 1) > 0
    return tl.where(marked[None, :], float("inf"), log_mass)


@triton.jit
def exact_kernel(
    q_ptr,
    k_ptr,
    block_table_ptr,
    seq_lens_ptr,
    log_mass_ptr,
    partial_ptr,
    stride_q_b,
    stride_q_h,
    stride_k_b,
    stride_k_h,
    stride_k_t,
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
    q = load_queries(q_ptr, row, head, stride_q_b, stride_q_h, D, G, BLOCK_G, BLOCK_D)
    best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK_G,), tl.float32)
    for n in range(pid_c * CHUNK, tl.minimum(pid_c * CHUNK + CHUNK, max_pages), BLOCK_N):
        off_n = n + tl.arange(0, BLOCK_N)
        live = off_n < newest
        # [BLOCK_G, BLOCK_N]
        log_mass = tl.full((BLOCK_G, BLOCK_N), -float("inf"), tl.float32)
        if n < newest:
            block = tl.load(block_table_ptr + row * stride_t_b + off_n // per_block, mask=live, other=0)
            slot = (off_n % per_block).to(tl.int64)
            first = block.to(tl.int64) * stride_k_b + head * stride_k_h + slot * P * stride_k_t
            log_mass = exact_pages(q, k_ptr, first, stride_k_t, live, scale, P, D, BLOCK_G, BLOCK_N, BLOCK_D)
            log_mass = tl.where(live[None, :], log_mass, -float("inf"))
            best, mass = add_candidates(log_mass, off_n, last, best, mass)
        at = log_mass_ptr + row * stride_m_b + q_head[:, None] * stride_m_h + off_n[None, :]
        tl.store(at, log_mass, mask=mask_g[:, None] & (off_n < max_pages)[None, :])
    partial_at = partial_ptr + row * stride_p_b + q_head * stride_p_h + pid_c
    tl.store(partial_at, log_sum(best, mass), mask=mask_g)


def default_config(page: int, head_dim: int, itemsize: int) -> KernelConfig:
    """Tile and warps for a shape: 128 tokens at 2 bytes an element and widths up to 128."""
    tokens = TILE // (itemsize * max(128, triton.next_power_of_2(head_dim)))
    return KernelConfig(block_n=max(1, tokens // page), num_warps=4)


def exact(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    scale: float,
    window_pages: int,
    config: KernelConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log_mass [B, Hq, N] and total [B, Hq], float32; every key is read once.

    Args:
        q: [B, Hq, D] in the cache's dtype.
        k_cache: [num_blocks, Hkv, block, D].
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32.
        page: P, tokens.
        scale: of the logits.
        window_pages: newest pages that are no candidates.
        config: launch shape; None for the default.

    Raises:
        ValueError: a tile of more than CHUNK pages.
    """
    (B, Hq, D), (Hkv, block_size) = q.shape, k_cache.shape[1:3]
    per_block, G = block_size // page, Hq // Hkv
    N = block_table.shape[1] * per_block
    config = config or default_config(page, D, q.element_size())
    if config.block_n > CHUNK:
        raise ValueError(f"config: block_n: expected at most {CHUNK} pages, got {config.block_n}")
    log_mass = torch.empty((B, Hq, N), dtype=torch.float32, device=q.device)
    partial = torch.empty((B, Hq, triton.cdiv(N, CHUNK)), dtype=torch.float32, device=q.device)
    total = torch.empty((B, Hq), dtype=torch.float32, device=q.device)
    exact_kernel[(partial.shape[2], Hkv, B)](
        q,
        k_cache,
        block_table,
        seq_lens,
        log_mass,
        partial,
        *q.stride()[:2],
        *k_cache.stride()[:3],
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
        BLOCK_N=config.block_n,
        BLOCK_G=max(16, triton.next_power_of_2(G)),
        BLOCK_D=triton.next_power_of_2(D),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    total_kernel[(Hq, B)](
        partial,
        total,
        *partial.stride()[:2],
        total.stride(0),
        partial.shape[2],
        BLOCK_C=512,
        num_warps=1,
        **dependent(total_kernel, q.device),
    )
    return log_mass, total
