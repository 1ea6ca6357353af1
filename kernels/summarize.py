"""Summarize: the record of every full page in a range, from its keys.

    x = keys / unit - mean,  x = U diag(s) V^T,  basis = U_R^T x orthonormalised

then quantised and packed as `locks.format.encode` specifies. One program makes BLOCK_N pages of one (row, KV head). It
holds them in registers and reads them twice: for U, and for the basis and the rest. U comes from `eigh` in float32,
which tells directions apart down to about 1e-6 of the longest one. A short direction U_r^T x may still hold more of a
longer one than of its own, since U_r is exact to rounding alone: what it shares with those before is taken out of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from locks.format import ROUNDING, SummaryFormat, mixed
from locks.types import Factors

from .config import KernelConfig, device_name, tuned
from .eigh import (
    inverse_sqrt,
    jacobi,
    length_keys,
    power_of_two,
    square_of_key,
    sum_d,
    take_longest,
    triangular,
)
from .encode import (
    d_axis,
    inverse,
    load_pages,
    low_bits,
    rotate,
    round_up_bf16,
    store_coef,
    store_vector,
    stored_scale,
    times_unit,
    to_codes,
)

_ROUNDING = tl.constexpr(ROUNDING)
# A squared singular value this much below the largest one is rounding, not a direction.
_DIRECTION = tl.constexpr(2.0**-38)


@triton.jit
def load_normalised(token_ptr, live, finite, reciprocal, D: tl.constexpr, E: tl.constexpr):
    """Keys at token_ptr [BLOCK_N, P] times reciprocal [BLOCK_N], and 0 where a page is not finite."""
    keys = load_pages(token_ptr, live, D, E)
    return tl.where(finite[:, None, None, None], keys * reciprocal[:, None, None, None], 0.0)


@triton.jit
def largest_entry(x):
    """Largest |x| of each page of x [BLOCK_N, E, ROWS, 8], [BLOCK_N]."""
    return tl.max(tl.max(tl.max(tl.abs(x), 1), 2), 1)


@triton.jit
def next_direction(x, column, basis, BLOCK_N: tl.constexpr):
    """column^T x [BLOCK_N, E, 8] without what lies along the rows of basis [BLOCK_N, E, R, 8], of length 1 or 0.

    Taking it out once leaves rounding of what was taken, so where that was most of the vector it is done again.
    """
    y = tl.sum(x * column[:, None, :, None], 2)
    square = tl.zeros((BLOCK_N,), tl.float32)
    # [BLOCK_N]
    again = tl.full((BLOCK_N,), 1, tl.int32)
    left = 2
    while left > 0:
        # [BLOCK_N, R]
        shared = tl.where(again[:, None] > 0, sum_d(basis * y[:, :, None, :]), 0.0)
        y -= tl.sum(basis * shared[:, None, :, None], 2)
        square = tl.sum(tl.sum(y * y, 1), 1)
        again = (tl.sum(shared * shared, 1) > 64.0 * square).to(tl.int32)
        left = tl.where(tl.max(again, 0) > 0, left - 1, 0)
    scale = tl.where(square > 0.0, inverse_sqrt(tl.maximum(square, 2.0**-120)), 0.0)
    return y * scale[:, None, None]


@triton.jit
def find_basis(x, left, right, BLOCK_N: tl.constexpr, E: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    """The R longest orthogonal directions of x [BLOCK_N, E, P, 8], of length 1 or 0, [BLOCK_N, E, R, 8].

    left and right are what `jacobi` leaves of x.
    """
    off_r = tl.arange(0, R)[None, None, :, None]
    left_keys = length_keys(left, 0)
    right_keys = length_keys(right, P // 2)
    shortest = square_of_key(tl.max(tl.maximum(left_keys, right_keys), 1)) * _DIRECTION
    basis = tl.zeros((BLOCK_N, E, R, 8), tl.float32)
    for r in range(R):
        column, key, left_keys, right_keys = take_longest(left, right, left_keys, right_keys)
        square = square_of_key(key)
        column *= tl.where(square > shortest, inverse_sqrt(tl.maximum(square, 2.0**-120)), 0.0)[:, None]
        basis = tl.where(off_r == r, next_direction(x, column, basis, BLOCK_N)[:, :, None, :], basis)
    return basis


@triton.jit
def make_pages(
    token_ptr,
    live,
    rec_ptr,
    rec16_ptr,
    base,
    mean_ptr,
    basis_ptr,
    coef_ptr,
    page,
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
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Writes the records of pages, or with FACTORS their unquantised factors.

    Args:
        token_ptr: [BLOCK_N, P] pointers to the pages' keys.
        live: [BLOCK_N] which pages exist.
        rec_ptr: int8 records.
        rec16_ptr: int16 view of the same storage.
        base: [BLOCK_N] int64 byte offset of each record.
        mean_ptr: float32 means, read with FACTORS alone, as the next three are.
        basis_ptr: float32 bases.
        coef_ptr: float32 coefficients.
        page: [BLOCK_N] int64 place of each page's factors.
        P: tokens of a page.
        R: rank.
        D: key width.
        MEAN_BITS: bits of a mean code.
        BASIS_BITS: bits of a basis code.
        COEF_BITS: bits of a coefficient code.
        BASIS_AT: byte offset of the basis in a record.
        COEF_AT: of the coefficients.
        SCALES_AT: of the numbers.
        NBYTES: size of a record, padding included.
        W: `locks.format.mixed(D)`.
        E: D, padded, over 8.
        BLOCK_N: pages of the tile.
        FACTORS: what to write.
    """
    off_r = tl.arange(0, R)[None, None, :, None]
    off_p = tl.arange(0, P)
    keys = load_pages(token_ptr, live, D, E)
    # As integers, sizes of numbers are in order, infinity above them and nan above that.
    bits = tl.abs(keys).to(tl.int32, bitcast=True)
    bits = tl.max(tl.max(tl.max(bits, 1), 2), 1)
    finite = bits < 0x7F800000
    unit, reciprocal = power_of_two(tl.where(finite, bits, 0).to(tl.float32, bitcast=True))
    keys = tl.where(finite[:, None, None, None], keys * reciprocal[:, None, None, None], 0.0)
    # [BLOCK_N, E, 8]
    mean = tl.sum(keys, 2) * (1.0 / P)
    x = keys - mean[:, :, None, :]
    _, enlarge = power_of_two(largest_entry(x))
    left, right = triangular(x * enlarge[:, None, None, None], BLOCK_N, P)
    left, right = jacobi(left, right, BLOCK_N, P)

    centre = mean
    if FACTORS:
        off_d, mask_d = d_axis(D, E)
        mask = live[:, None, None] & mask_d[None, :, :]
        tl.store(
            mean_ptr + page[:, None, None] * D + off_d[None, :, :], mean * unit[:, None, None], mask=mask
        )
    else:
        mean = tl.reshape(rotate(mean[:, :, None, :], W), (BLOCK_N, E, 8))
        peak = tl.max(tl.max(tl.abs(mean), 1), 1)
        scale = tl.div_rn(peak, 2.0 ** (MEAN_BITS - 1) - 1.0)
        mean_bits, scale = stored_scale(scale, unit, reciprocal)
        codes = to_codes(mean, inverse(scale)[:, None, None])
        store_vector(rec_ptr, rec16_ptr, base, low_bits(codes), live, D, MEAN_BITS)
        scales = rec16_ptr + (base + SCALES_AT) // 2
        tl.store(scales + R, mean_bits.to(tl.int16), mask=live)
        mean -= codes * scale[:, None, None]

    # Read again rather than kept: registers decide how many pages a multiprocessor works on at once.
    keys = load_normalised(token_ptr, live, finite, reciprocal, D, E)
    key_square = sum_d(keys * keys)
    x = keys - centre[:, :, None, :]
    if not FACTORS:
        # A sum rounds at the size of its terms, so the mean was taken off before x is rotated.
        x = rotate(x, W)
    basis = find_basis(x, left, right, BLOCK_N, E, P, R)
    if not FACTORS:
        x += mean[:, :, None, :]
    for r in range(R):
        # [BLOCK_N, E, 8]
        vector = tl.sum(basis * (off_r == r).to(tl.float32), 2)
        if FACTORS:
            vector_at = (page[:, None, None] * R + r) * D + off_d[None, :, :]
            tl.store(basis_ptr + vector_at, vector, mask=mask)
            coef = sum_d(x * vector[:, :, None, :]) * unit[:, None]
            tl.store(coef_ptr + (page[:, None] * P + off_p[None, :]) * R + r, coef, mask=live[:, None])
        else:
            peak = tl.max(tl.max(tl.abs(vector), 1), 1)
            step = tl.div_rn(peak, 2.0 ** (BASIS_BITS - 1) - 1.0)
            codes = to_codes(vector, inverse(step)[:, None, None])
            at = base + BASIS_AT + r * (D * BASIS_BITS // 8)
            store_vector(rec_ptr, rec16_ptr, at, low_bits(codes), live, D, BASIS_BITS)
            # Fitted to what the mean and the ranks before leave: a rank takes up rounding of the earlier ones.
            square = tl.sum(tl.sum(codes * codes, 1), 1)
            # [BLOCK_N, P]
            coef = sum_d(x * codes[:, :, None, :]) * inverse(square)[:, None]
            scale = tl.div_rn(tl.max(tl.abs(coef), 1), 2.0 ** (COEF_BITS - 1) - 1.0)
            vector_bits, scale = stored_scale(scale, unit, reciprocal)
            coef_codes = to_codes(coef, inverse(scale)[:, None])
            store_coef(rec_ptr, rec16_ptr, base + COEF_AT, low_bits(coef_codes), r, live, R, COEF_BITS)
            tl.store(scales + r, vector_bits.to(tl.int16), mask=live)
            x -= (coef_codes * scale[:, None])[:, None, :, None] * codes[:, :, None, :]

    if not FACTORS:
        left_square = sum_d(x * x)
        variance = tl.sum(left_square, 1) * (1.0 / P) / D
        variance = times_unit(times_unit(variance, unit, reciprocal), unit, reciprocal)
        bound = tl.sqrt_rn(tl.max(left_square, 1)) + tl.sqrt_rn(tl.max(key_square, 1)) * _ROUNDING
        bound = times_unit(bound, unit, reciprocal)
        tl.store(scales + R + 1, tl.where(finite, round_up_bf16(variance), 0x7F80).to(tl.int16), mask=live)
        tl.store(scales + R + 2, tl.where(finite, round_up_bf16(bound), 0x7F80).to(tl.int16), mask=live)
        pad = SCALES_AT + 2 * (3 + R) + tl.arange(0, 32)[None, :]
        zero = tl.zeros((BLOCK_N, 32), tl.int8)
        tl.store(rec_ptr + base[:, None] + pad, zero, mask=live[:, None] & (pad < NBYTES))


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
    E: tl.constexpr,
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
    # [BLOCK_N, P]
    token = slot[:, None] * P + tl.arange(0, P)[None, :]
    make_pages(
        k_ptr + (block[:, None] * stride_k_b + head * stride_k_h + token * stride_k_t),
        live,
        rec_ptr,
        rec16_ptr,
        block * stride_r_b + head * stride_r_h + slot * stride_r_p,
        mean_ptr,
        basis_ptr,
        coef_ptr,
        (row * tl.num_programs(1) + head) * total + page,
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
        E,
        BLOCK_N,
        FACTORS,
    )


def record_constants(fmt: SummaryFormat, head_dim: int) -> dict[str, int]:
    """What `make_pages` has to know of a format and a key width D = `head_dim`, by its arguments' names."""
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
        "NBYTES": at.nbytes,
        "W": mixed(head_dim),
        # Of the next power of two.
        "E": (1 << (max(head_dim, 16) - 1).bit_length()) // 8,
    }


def default_config(page: int, pages: int, *, head_dim: int, interpreted: bool) -> KernelConfig:
    """Pages a program and warps: as many as keep a page in registers; all pages of a row is fastest interpreted."""
    if interpreted:
        return KernelConfig(block_n=min(triton.next_power_of_2(pages), 64), num_warps=1)
    warps = {16: 1, 32: 4, 64: 8}[page]
    return KernelConfig(block_n=1, num_warps=2 if page == 16 and head_dim > 128 else warps)


def launch_config(fmt: SummaryFormat, pages: int, head_dim: int, device: torch.device) -> KernelConfig:
    """What was the fastest on the device, else the default; `seal` takes the same, so that both make the same bits."""
    found = tuned(device_name(device), "summarize", page=fmt.page, rank=fmt.rank, head_dim=head_dim)
    return found or default_config(
        fmt.page, pages, head_dim=head_dim, interpreted=not isinstance(summarize_kernel, triton.JITFunction)
    )


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
        config = launch_config(fmt, count, D, k_cache.device)
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
        **record_constants(fmt, D),
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
