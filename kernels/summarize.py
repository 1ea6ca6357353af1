"""Summarize: the record of every full page in a range, from its keys.

    x = keys / unit - mean,  x x^T = U diag(w) U^T,  basis = U_R^T x normalised,  coef = U_R |U_R^T x|

quantised and packed as `locks.format.encode` specifies. One program makes BLOCK_N pages of one (row, KV
head). Keys are read again in every pass over D (from cache) a chunk at a time, so no program holds whole
pages. The eigenproblem is solved twice: x x^T squares the singular values, which drowns the small ones in
rounding; the Gram matrix of the turned keys U^T x is nearly diagonal, and rounds each row at that row's own
scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from locks.format import SummaryFormat, mixed
from locks.types import Factors

from .config import KernelConfig
from .eigh import descending, jacobi, orthogonalise, power_of_two
from .encode import chunk_axis, divide, load_keys, page_mean, project, rotate, write_record

# A direction this much below the longest one is rounding, not a direction.
_DIRECTION = tl.constexpr(2.0**-20)


@triton.jit
def leading_directions(
    token_ptr,
    mask_n,
    reciprocal,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """turn [BLOCK_N, P, P] and pick [BLOCK_N, R, P].

    The rows of pick turn x are the R longest orthogonal combinations of the centred keys x, longest first.
    """
    gram = tl.zeros((BLOCK_N, P, P), tl.float32)
    for c in range(D // (2 * W)):
        keys = load_keys(token_ptr, mask_n, c, D, W) * reciprocal[:, None, None]
        x = keys - page_mean(keys, P)[:, None, :]
        gram = tl.dot(x, tl.permute(x, (0, 2, 1)), gram, input_precision="ieee")
    squares, vectors = jacobi(gram, 2.0**-8, 2.0**-13, BLOCK_N, P)
    # The rounding of hundreds of rotations would show in the coefficients.
    turn = tl.permute(orthogonalise(vectors), (0, 2, 1))
    gram = tl.zeros((BLOCK_N, P, P), tl.float32)
    for c in range(D // (2 * W)):
        keys = load_keys(token_ptr, mask_n, c, D, W) * reciprocal[:, None, None]
        x = keys - page_mean(keys, P)[:, None, :]
        # [BLOCK_N, P, 2 W]
        y = tl.dot(turn, x, input_precision="ieee")
        gram = tl.dot(y, tl.permute(y, (0, 2, 1)), gram, input_precision="ieee")
    squares, vectors = jacobi(gram, 2.0**-12, 2.0**-40, BLOCK_N, P)
    # [BLOCK_N, R, P], one 1 a row: the product picks columns of `vectors` and is exact.
    chosen = descending(squares, P)[:, None, :] == tl.arange(0, R)[None, :, None]
    pick = tl.dot(chosen.to(tl.float32), tl.permute(vectors, (0, 2, 1)), input_precision="ieee")
    return turn, pick


@triton.jit
def write_factors(
    mean_ptr,
    basis_ptr,
    coef_ptr,
    page,
    live,
    token_ptr,
    mask_n,
    unit,
    reciprocal,
    turn,
    pick,
    norm,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
):
    """Writes mean, basis and coefficients, unquantised, at flat page numbers [BLOCK_N]."""
    off_r = tl.arange(0, R)[None, :, None]
    for c in range(D // (2 * W)):
        off_d = chunk_axis(c, D, W)
        keys = load_keys(token_ptr, mask_n, c, D, W) * reciprocal[:, None, None]
        mean = page_mean(keys, P)
        tl.store(mean_ptr + page[:, None] * D + off_d[None, :], mean * unit[:, None], mask=live[:, None])
        basis = divide(project(turn, pick, keys - mean[:, None, :]), norm[:, :, None])
        at = (page[:, None, None] * R + off_r) * D + off_d[None, None, :]
        tl.store(basis_ptr + at, basis, mask=live[:, None, None])
    coef = tl.dot(pick, turn, input_precision="ieee") * norm[:, :, None] * unit[:, None, None]
    at = (page[:, None, None] * P + tl.arange(0, P)[None, None, :]) * R + off_r
    tl.store(coef_ptr + at, coef, mask=live[:, None, None])


@triton.jit(do_not_specialize=["count", "total"])
def summarize_kernel(
    k_ptr,
    block_table_ptr,
    seq_lens_ptr,
    start_ptr,
    rec_ptr,
    rec16_ptr,
    mean_ptr,
    basis_ptr,
    coef_ptr,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_t_b,
    stride_r_b,
    stride_r_h,
    stride_r_p,
    count,
    total,
    per_block,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    MEAN_BITS: tl.constexpr,
    BASIS_BITS: tl.constexpr,
    COEF_BITS: tl.constexpr,
    BASIS_AT: tl.constexpr,
    COEF_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    NBYTES: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Records, or with FACTORS the unquantised factors, of up to BLOCK_N pages of one row and KV head."""
    pid_n = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    first = 0
    if start_ptr is not None:
        first = tl.load(start_ptr + row) // P
    end = tl.minimum(tl.load(seq_lens_ptr + row) // P, tl.minimum(total, first + count))
    if first + pid_n * BLOCK_N >= end:
        return
    page = first + pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    live = page < end
    block = tl.load(block_table_ptr + row * stride_t_b + page // per_block, mask=live, other=0).to(tl.int64)
    slot = (page % per_block).to(tl.int64)
    # [BLOCK_N, P, 1]
    token = slot[:, None] * P + tl.arange(0, P)[None, :]
    token_ptr = k_ptr + (block[:, None] * stride_k_b + head * stride_k_h + token * stride_k_t)[:, :, None]

    # [BLOCK_N]: the largest |key| and the count of non-finite ones.
    largest = tl.zeros((BLOCK_N,), tl.float32)
    strange = tl.zeros((BLOCK_N,), tl.int32)
    for c in range(D // (2 * W)):
        size = tl.abs(load_keys(token_ptr, live, c, D, W))
        finite = size < float("inf")
        largest = tl.maximum(largest, tl.max(tl.max(tl.where(finite, size, 0.0), 2), 1))
        strange += tl.sum(tl.sum(tl.where(finite, 0, 1), 2), 1)
    mask_n = live & (strange == 0)
    unit, reciprocal = power_of_two(largest)

    turn, pick = leading_directions(token_ptr, mask_n, reciprocal, P, R, D, W, BLOCK_N)
    # Length and largest entry, once rotated, of each direction, [BLOCK_N, R], and of the mean, [BLOCK_N].
    square = tl.zeros((BLOCK_N, R), tl.float32)
    peak = tl.zeros((BLOCK_N, R), tl.float32)
    mean_peak = tl.zeros((BLOCK_N,), tl.float32)
    for c in range(D // (2 * W)):
        keys = load_keys(token_ptr, mask_n, c, D, W) * reciprocal[:, None, None]
        mean = page_mean(keys, P)[:, None, :]
        y = project(turn, pick, keys - mean)
        square += tl.sum(y * y, 2)
        peak = tl.maximum(peak, tl.max(tl.abs(rotate(y, W)), 2))
        mean_peak = tl.maximum(mean_peak, tl.max(tl.max(tl.abs(rotate(mean, W)), 2), 1))
    norm = tl.sqrt_rn(square)
    norm = tl.where(norm > tl.max(norm, 1)[:, None] * _DIRECTION, norm, 0.0)

    if FACTORS:
        write_factors(
            mean_ptr,
            basis_ptr,
            coef_ptr,
            (row * tl.num_programs(1) + head) * total + page,
            live,
            token_ptr,
            mask_n,
            unit,
            reciprocal,
            turn,
            pick,
            norm,
            P,
            R,
            D,
            W,
        )
    else:
        write_record(
            rec_ptr,
            rec16_ptr,
            block * stride_r_b + head * stride_r_h + slot * stride_r_p,
            live,
            token_ptr,
            mask_n,
            unit,
            reciprocal,
            turn,
            pick,
            norm,
            peak,
            mean_peak,
            P,
            R,
            D,
            MEAN_BITS,
            BASIS_BITS,
            COEF_BITS,
            BASIS_AT,
            COEF_AT,
            SCALES_AT,
            NBYTES,
            W,
            BLOCK_N,
        )


def default_config(page: int, pages: int, *, interpreted: bool) -> KernelConfig:
    """Pages a program and warps, untuned; one program for all pages of a row is fastest interpreted."""
    if interpreted:
        return KernelConfig(block_n=min(triton.next_power_of_2(pages), 64), num_warps=1)
    return KernelConfig(block_n=1, num_warps={16: 1, 32: 4, 64: 8}[page])


def _launch(
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    start: Tensor | None,
    max_new_pages: int | None,
    fmt: SummaryFormat,
    out: Tensor | None,
    factors: Factors | None,
    config: KernelConfig | None,
) -> None:
    heads, D = k_cache.shape[1], k_cache.shape[3]
    per_block = k_cache.shape[2] // fmt.page
    total = block_table.shape[1] * per_block
    count = total if max_new_pages is None else min(max_new_pages, total)
    if config is None:
        config = default_config(fmt.page, count, interpreted=not k_cache.is_cuda)
    at = fmt.layout(D)
    grid = (triton.cdiv(count, config.block_n), heads, block_table.shape[0])
    summarize_kernel[grid](
        k_cache,
        block_table,
        seq_lens,
        start,
        None if out is None else out.view(torch.int8),
        None if out is None else out.view(torch.int16),
        *((None, None, None) if factors is None else factors),
        *k_cache.stride()[:3],
        block_table.stride(0),
        *((0, 0, 0) if out is None else out.stride()[:3]),
        count,
        total,
        per_block,
        P=fmt.page,
        R=fmt.rank,
        D=D,
        MEAN_BITS=fmt.mean_bits,
        BASIS_BITS=fmt.basis_bits,
        COEF_BITS=fmt.coef_bits,
        BASIS_AT=at.basis,
        COEF_AT=at.coef,
        SCALES_AT=at.scales,
        NBYTES=at.nbytes,
        W=mixed(D),
        BLOCK_N=config.block_n,
        FACTORS=factors is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def summarize(
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    start: Tensor | None,
    max_new_pages: int | None,
    out: Tensor,
    config: KernelConfig | None = None,
) -> Tensor:
    """Writes the record of every page whose last slot lies in [start, seq_len) of its row and returns `out`.

    Args:
        k_cache: [num_blocks, Hkv, block, D] bf16, fp16 or fp32.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32, tokens; above the table's room it counts as the room.
        fmt: the records' format.
        start: [B] int32, tokens that were summarised before; None for 0.
        max_new_pages: at most so many pages a row, from start // P on; None for no bound.
        out: [num_blocks, Hkv, block / P, record bytes] uint8, even strides.
        config: launch shape; None for the default.
    """
    _launch(k_cache, block_table, seq_lens, start, max_new_pages, fmt, out, None, config)
    return out


def factors(
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    rank: int,
    page: int,
    config: KernelConfig | None = None,
) -> Factors:
    """Mean, basis and coefficients of every full page before quantisation, from the same kernel.

    Args:
        k_cache: [num_blocks, Hkv, block, D] bf16, fp16 or fp32.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32.
        rank: R.
        page: P.
        config: launch shape; None for the default.

    Returns:
        Factors: mean [B, Hkv, N, D], basis [B, Hkv, N, R, D], coef [B, Hkv, N, P, R] float32, N the pages
        that the table can hold; zeros for a page that is not full or has a non-finite key.
    """
    total = block_table.shape[1] * (k_cache.shape[2] // page)
    lead, D = (block_table.shape[0], k_cache.shape[1], total), k_cache.shape[3]
    result = Factors(
        *(
            torch.zeros((*lead, *tail), dtype=torch.float32, device=k_cache.device)
            for tail in ((D,), (rank, D), (page, rank))
        )
    )
    _launch(
        k_cache, block_table, seq_lens, None, None, SummaryFormat(page=page, rank=rank), None, result, config
    )
    return result
