"""Score, the fast path: Hopper's tensor cores, for 4-bit bases, pages of 16, R 4 or 8, D 64 or 128, G up to 16.

`score.py` has the formula; here the operands of its products are quantised: the query to 15 bits, projections and the
tokens' weights to 11. What is different, and why:

* One warp is a program and takes 8 pages a step. The next step's records are loaded while this one's are computed, so
  a warp always has about 4 KB in flight; several programs a multiprocessor cover the rest of the latency.
* The query is written as two int8 digits (15 bits). Rows 0-7 of the matrix unit's 16 hold the high digits of up to
  8 query heads, rows 8-15 the low ones: the padding to 16 rows does useful work. Integer products are exact.
* A nibble x is used as the int8 16 x: the low nibbles of four bytes are one shift and one mask away, the high ones one
  mask. The 16 is folded into the scale.
* The order of d inside a product is free. The query is loaded in the order in which a 16-byte load of the basis leaves
  the elements in registers, so no element of a record moves between lanes.
* Logits: coefficients become fp16 and multiply the projections of two pages at a time, block-diagonally. Logits are
  kept as multiples of 256, so fp16 saturates only where one is beyond 10**7.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hopper_asm import (
    bf16_pair,
    bytes_of,
    coefs_4,
    coefs_8,
    exp2,
    high_nibbles,
    join_bytes,
    keep_branch,
    log2,
    low_nibbles,
    saturate,
    spread_bytes,
    take_bytes,
)
from .records import hadamard

# A chunk of a row has one log-sum-exp: 16 pages, and more where that would make more chunks than these.
MAX_CHUNKS = 1024

# By rank: registers of a program (a warp), and programs a multiprocessor that they leave room for.
REGISTERS = {4: 128, 8: 168}
PROGRAMS = {4: 16, 8: 12}

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
# What one is in a logit's fp16 operands: their range in logits is 256 times that of fp16.
UNIT = tl.constexpr(2.0**-8)


@triton.jit
def as_operand(x, D: tl.constexpr):
    """Bytes [ROWS, D / 2] of vectors as the product's second operand [D / 2, ROWS], ordered as the query's digits."""
    STEPS: tl.constexpr = D // 64
    x = tl.reshape(x, (x.shape[0], 4, STEPS, 8))
    x = tl.permute(x, (0, 2, 1, 3))
    return tl.trans(tl.reshape(x, (x.shape[0], D // 2)))


@triton.jit
def quantise_kernel(
    q_ptr,
    digits_ptr,
    numbers_ptr,
    stride_q_b,
    stride_q_h,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """Two int8 digits of up to 8 queries of a group, rotated, in the order of `as_operand`.

    Of both halves of D there are 16 rows, 8 of high digits and 8 of low ones; the numbers are the value of one unit
    and |scale q|^2, scale in log2.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    H: tl.constexpr = D // 2
    STEPS: tl.constexpr = D // 64
    off_g = tl.arange(0, 8)
    d = tl.arange(0, H)
    # Rows of absent heads repeat the last one; their results are not stored.
    q_head = head * G + tl.minimum(tile * 8 + off_g, G - 1)
    at = q_ptr + row * stride_q_b + q_head[:, None] * stride_q_h + d[None, :]
    a = tl.load(at).to(tl.float32) * scale
    b = tl.load(at + H).to(tl.float32) * scale
    norm = tl.sum(a * a + b * b, 1)
    # `locks.format.rotate`, whose blocks are 16 elements of each half.
    first = hadamard(a + b, 1, 16) * 32**-0.5
    second = hadamard(a - b, 1, 16) * 32**-0.5
    unit = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
    unit = tl.maximum(unit, 1e-30) * (1.0 / 16256.0)
    # The place of element d in a product.
    k = (d // (8 * STEPS)) * 8 + (d // 8) % STEPS * 32 + d % 8
    item = (row * tl.num_programs(1) + head) * tl.num_programs(0) + tile
    at = digits_ptr + item * (32 * H) + off_g[:, None] * H + k[None, :]
    for half in tl.static_range(2):
        x = first if half == 0 else second
        x = tl.floor(x * (1.0 / unit)[:, None] + 0.5).to(tl.int32)
        high = (x + 64) >> 7
        tl.store(at + half * (16 * H), high.to(tl.int8))
        tl.store(at + half * (16 * H) + 8 * H, (x - high * 128).to(tl.int8))
    tl.store(numbers_ptr + item * 16 + off_g, unit)
    tl.store(numbers_ptr + item * 16 + 8 + off_g, norm)


@triton.jit
def join_digits(acc, COLUMNS: tl.constexpr):
    """high * 128 + low of a product of digits [16, COLUMNS], [8, COLUMNS] float32."""
    high, low = tl.split(tl.permute(tl.reshape(acc, (2, 8, COLUMNS)), (1, 2, 0)))
    return (high * 128 + low).to(tl.float32)


@triton.jit
def record_unit(block_table_ptr, page, last, stride_r_b, stride_r_p, PER_BLOCK: tl.constexpr):
    """Where each page's record starts, in units of 16 bytes; a page at or behind `last` reads the last one."""
    page = tl.minimum(page, last - 1)
    block = tl.load(block_table_ptr + page // PER_BLOCK)
    if PER_BLOCK == 1:
        return block * stride_r_b
    return block * stride_r_b + page % PER_BLOCK * stride_r_p


@triton.jit
def load_places(block_table_ptr, n, last, stride_r_b, stride_r_p, zero, PER_BLOCK: tl.constexpr):
    """Where the records of pages n .. n + 7 start: a scalar each, and again in the order in which lanes need them."""
    u0 = record_unit(block_table_ptr, n, last, stride_r_b, stride_r_p, PER_BLOCK)
    u1 = record_unit(block_table_ptr, n + 1, last, stride_r_b, stride_r_p, PER_BLOCK)
    u2 = record_unit(block_table_ptr, n + 2, last, stride_r_b, stride_r_p, PER_BLOCK)
    u3 = record_unit(block_table_ptr, n + 3, last, stride_r_b, stride_r_p, PER_BLOCK)
    u4 = record_unit(block_table_ptr, n + 4, last, stride_r_b, stride_r_p, PER_BLOCK)
    u5 = record_unit(block_table_ptr, n + 5, last, stride_r_b, stride_r_p, PER_BLOCK)
    u6 = record_unit(block_table_ptr, n + 6, last, stride_r_b, stride_r_p, PER_BLOCK)
    u7 = record_unit(block_table_ptr, n + 7, last, stride_r_b, stride_r_p, PER_BLOCK)
    # [8] for the mean; [32] twice for the numbers of pages 2 j and 2 j + 1 in lane (head, j)
    by_page = record_unit(block_table_ptr, n + tl.arange(0, 8), last, stride_r_b, stride_r_p, PER_BLOCK)
    j = (tl.arange(0, 32) ^ zero) % 4
    even = record_unit(block_table_ptr, n + j * 2, last, stride_r_b, stride_r_p, PER_BLOCK)
    odd = record_unit(block_table_ptr, n + j * 2 + 1, last, stride_r_b, stride_r_p, PER_BLOCK)
    return u0, u1, u2, u3, u4, u5, u6, u7, by_page, even, odd


@triton.jit
def of_page(page, u0, u1, u2, u3, u4, u5, u6, u7):
    """units[page]; where the page is known to the compiler from the register alone, nothing is left of it."""
    low = tl.where(page % 4 < 2, tl.where(page % 2 == 0, u0, u1), tl.where(page % 2 == 0, u2, u3))
    high = tl.where(page % 4 < 2, tl.where(page % 2 == 0, u4, u5), tl.where(page % 2 == 0, u6, u7))
    return tl.where(page < 4, low, high).to(tl.int64)


@triton.jit
def load_records(
    rec_ptr,
    places,
    zero,
    R: tl.constexpr,
    D: tl.constexpr,
    COEF_BITS: tl.constexpr,
    VECTORS_AT: tl.constexpr,
):
    """Everything a step needs of 8 pages, as it lies in memory."""
    ROWS: tl.constexpr = 8 * R
    WORDS: tl.constexpr = D // 8
    COEF_AT: tl.constexpr = D + R * D // 2
    rec32 = rec_ptr.to(tl.pointer_type(tl.int32))
    rec16 = rec_ptr.to(tl.pointer_type(tl.int16))
    u0, u1, u2, u3, u4, u5, u6, u7, by_page, even, odd = places
    row = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    # [ROWS, WORDS]: 16 bytes (8 at D = 64) a lane, four lanes a basis vector. At R = 4 the vectors of two pages
    # alternate, so that a lane of the product holds one rank of both.
    if R == 8:
        page_of_row = row // 8
        vector = row % 8
    else:
        page_of_row = row // 8 * 2 + row % 2
        vector = row % 8 // 2
    units = of_page(page_of_row, u0, u1, u2, u3, u4, u5, u6, u7)
    at = (rec32 + D // 4 + vector[:, None] * WORDS + word[None, :]) + (units * 4)[:, None]
    basis = tl.load(at, eviction_policy="evict_first")
    # [8, WORDS] twice
    at = (rec32 + word[None, :]) + (by_page.to(tl.int64) * 4)[:, None]
    mean_first = tl.load(at, eviction_policy="evict_first")
    mean_second = tl.load(at + WORDS, eviction_policy="evict_first")
    even = tl.load(rec32 + (VECTORS_AT + 2 * R) // 4 + even.to(tl.int64) * 4)
    odd = tl.load(rec32 + (VECTORS_AT + 2 * R) // 4 + odd.to(tl.int64) * 4)
    # Page i / 32, lane i % 32: tokens lane / 4 and lane / 4 + 8, ranks 2 j and 2 j + 1 (R = 8) or rank j (R = 4).
    i = tl.arange(0, 256)
    units = of_page(i // 32, u0, u1, u2, u3, u4, u5, u6, u7)
    lane = i % 32
    if R == 8:
        at = (rec16 + COEF_AT // 2 + (lane ^ zero)) + units * 8
        vectors = tl.load((rec32 + VECTORS_AT // 4 + (lane % 4 ^ zero)) + units * 4)
    else:
        at = (rec16 + COEF_AT // 2 + (lane // 2 ^ zero)) + units * 8
        vectors = tl.load((rec16 + VECTORS_AT // 2 + (lane % 4 ^ zero)) + units * 8)
    # Tokens 8 .. 15 of 8-bit coefficients lie 8 R bytes on.
    coef_first = tl.load(at, eviction_policy="evict_first")
    coef_second = coef_first
    if COEF_BITS == 8:
        coef_second = tl.load(at + 4 * R, eviction_policy="evict_first")
    return basis, mean_first, mean_second, even, odd, coef_first, coef_second, vectors


@triton.jit
def score_pages(
    q_first,
    q_second,
    unit,
    norm,
    basis,
    mean_first,
    mean_second,
    even,
    odd,
    coef_first,
    coef_second,
    vectors,
    one,
    R: tl.constexpr,
    D: tl.constexpr,
    COEF_BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """log2 of the mass of 8 pages for 8 query heads, [8, 8]."""
    ROWS: tl.constexpr = 8 * R
    acc = tl.dot(q_first, as_operand(low_nibbles(basis, ASM), D), out_dtype=tl.int32)
    acc = tl.dot(q_second, as_operand(high_nibbles(basis, ASM), D), acc, out_dtype=tl.int32)
    mean_acc = tl.dot(q_first, as_operand(bytes_of(mean_first, ASM), D), out_dtype=tl.int32)
    mean_acc = tl.dot(q_second, as_operand(bytes_of(mean_second, ASM), D), mean_acc, out_dtype=tl.int32)
    # [head, j, parity] -> [8 heads, 8 pages]
    mean_scale, variance = bf16_pair(tl.reshape(tl.join(even, odd), (8, 8)))
    # An infinite variance stays infinite whatever the query is.
    spread = variance * (tl.maximum(norm, 1e-30) * (0.5 * LN2 * UNIT))[:, None]
    center = join_digits(mean_acc, 8) * (mean_scale * (unit * UNIT)[:, None]) + spread
    if R == 8:
        # page, head, j, parity -> head, page, j, parity
        first, second = bf16_pair(vectors)
        scale = tl.reshape(tl.join(first, second), (8, 8, 4, 2))
        scale = tl.reshape(tl.permute(scale, (1, 0, 2, 3)), (8, ROWS))
        if COEF_BITS == 4:
            c0, c1, c2, c3 = coefs_4(spread_bytes(coef_first.to(tl.int32), ASM), ASM)
        else:
            c0, c1, c2, c3 = coefs_8(
                (coef_first.to(tl.int32) & 0xFFFF) | (coef_second.to(tl.int32) << 16), ASM
            )
    else:
        # two pages, parity, head, j -> head, two pages, j, parity
        scale = (vectors.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        scale = tl.permute(tl.reshape(scale, (4, 2, 8, 4)), (2, 0, 3, 1))
        scale = tl.reshape(scale, (8, ROWS))
        # The parity of the R = 8 case becomes the page: this lane's rank of two pages.
        rank = (tl.arange(0, 32) % 2)[None, :]
        first, second = tl.split(tl.permute(tl.reshape(coef_first.to(tl.int32), (4, 2, 32)), (0, 2, 1)))
        words = take_bytes(first, second, rank, ASM)
        if COEF_BITS == 4:
            c0, c1, c2, c3 = coefs_4(words, ASM)
        else:
            first, second = tl.split(tl.permute(tl.reshape(coef_second.to(tl.int32), (4, 2, 32)), (0, 2, 1)))
            c0, c1, c2, c3 = coefs_8(join_bytes(words, take_bytes(first, second, rank, ASM), ASM), ASM)
    # [8, ROWS]
    z = saturate(join_digits(acc, ROWS) * (scale * (unit * (0.0625 * UNIT))[:, None]), ASM)
    # The center enters the same product: the lane of the mean's accumulator that holds it writes it, as two fp16 that
    # add up to 22 bits, against ones. head, page or pair of pages, j, page of the pair, digit
    # What is beyond fp16's range is infinite, as a marked page's center is; below it, the least fp16.
    high = saturate(center, ASM)
    low = tl.maximum(center - high.to(tl.float32), -65504.0).to(tl.float16)
    center = tl.reshape(tl.join(high, low), (8, 4, 2, 2))
    pair = tl.arange(0, 4)
    here = (pair[:, None] == pair[None, :])[None, :, :, None, None]
    # head, pair of pages, j, digit, page of the row
    center = tl.where(here, tl.permute(center, (0, 1, 3, 2))[:, None, :, :, :], 0.0)
    # page or pair of pages, 32 lanes, token half, parity
    c = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    two = tl.arange(0, 2)
    if R == 8:
        # head, pair of pages, page of the product, j, parity, page of the row
        z = tl.reshape(z, (8, 4, 2, 4, 2))
        zero_first = (two == 0)[None, None, :, None, None]
        z = tl.join(tl.where(zero_first, z, 0.0), tl.where(zero_first, 0.0, z))
        # pair of pages, (page, head) x (j, page, parity)
        left = tl.reshape(tl.permute(z, (1, 5, 0, 3, 2, 4)), (4, 16, 16))
        # pair of pages, page, token, j, half, parity -> (j, page, parity) x (half, token)
        c = tl.reshape(c, (4, 2, 8, 4, 2, 2))
        right = tl.reshape(tl.permute(c, (0, 3, 1, 5, 4, 2)), (4, 16, 16))
        # pair of pages, (page, head) x (j, zero, digit)
        center = tl.join(center, tl.zeros_like(center))
        center = tl.reshape(tl.permute(center, (1, 4, 0, 2, 5, 3)), (4, 16, 16))
        logits = tl.dot(center, tl.zeros((4, 16, 16), tl.float16) + one)
        logits = tl.dot(left, right, logits)
    else:
        # head, pair of pages, j, page of the product, page of the row
        z = tl.reshape(z, (8, 4, 4, 2))
        z = tl.join(tl.where(two == 0, z, 0.0), tl.where(two == 1, z, 0.0))
        z = tl.join(z, center)
        # pair of pages, (page, head) x (j, center, page)
        left = tl.reshape(tl.permute(z, (1, 4, 0, 2, 5, 3)), (4, 16, 16))
        # pair of pages, token, j, half, page, center -> (j, center, page) x (half, token)
        c = tl.reshape(tl.join(c, tl.zeros(c.shape, tl.float16) + one), (4, 8, 4, 2, 2, 2))
        right = tl.reshape(tl.permute(c, (0, 2, 5, 4, 3, 1)), (4, 16, 16))
        # [pairs of pages, 16 rows, 16 tokens]
        logits = tl.dot(left, right)
    # Finite, so that an infinite logit stays infinite and is no nan.
    top = tl.minimum(tl.max(logits, 2), 1e30)
    # The sum over tokens is a product with ones: every lane of a row gets it, without a shuffle.
    weights = exp2((logits - top[:, :, None]) * (1.0 / UNIT), ASM).to(tl.float16)
    summed = tl.dot(weights, tl.zeros((weights.shape[0], 16, 8), tl.float16) + one)
    # Of the 8 equal columns a lane holds two: one stays. [.., 16 rows, 4 lanes]
    summed, _ = tl.split(tl.reshape(summed, (weights.shape[0], 16, 4, 2)))
    mass = top[:, :, None] * (1.0 / UNIT) + log2(summed, ASM)
    # rows -> [head, page, lane]
    return tl.reshape(tl.permute(tl.reshape(mass, (4, 2, 8, 4)), (2, 0, 1, 3)), (8, 8, 4))


@triton.jit
def accumulate(
    x,
    n,
    first,
    newest,
    limit,
    max_pages,
    log_mass_ptr,
    stride_m_h,
    best,
    mass,
    G: tl.constexpr,
    ASM: tl.constexpr,
):
    """Stores the log-mass of pages n .. n + 7 and adds the candidates among them to the running log-sum-exp."""
    head = first + tl.arange(0, 8)
    lane = tl.arange(0, 4)
    pages = n + tl.arange(0, 8)
    counted = x
    if (n == 0) | (n + 8 > limit):
        x = tl.where(keep_branch(pages < newest, ASM)[None, :, None], x, -float("inf"))
        counted = tl.where(((pages > 0) & (pages < limit))[None, :, None], x, -float("inf"))
    # Lane j of the four that hold the same numbers writes pages 2 j and 2 j + 1.
    mine = (tl.arange(0, 8)[:, None] // 2 == lane[None, :])[None, :, :]
    out = tl.sum(tl.reshape(tl.where(mine, x, 0.0), (8, 4, 2, 4)), 1) * LN2
    # [head, parity, lane]
    page = n + 2 * lane[None, None, :] + tl.arange(0, 2)[None, :, None]
    at = log_mass_ptr + head[:, None, None] * stride_m_h + page
    tl.store(at, out, mask=(head < G)[:, None, None] & (page < max_pages))
    # A marked page has no share in the total.
    counted = tl.where(counted < float("inf"), counted, -float("inf"))
    new = tl.maximum(best, tl.max(counted, 1))
    safe = tl.maximum(new, -1e30)
    mass = mass * exp2(best - safe, ASM) + tl.sum(exp2(counted - safe[:, None, :], ASM), 1)
    return new, mass


@triton.jit(do_not_specialize=["zero", "window_pages"])
def score_hopper_kernel(
    digits_ptr,
    numbers_ptr,
    rec_ptr,
    block_table_ptr,
    seq_lens_ptr,
    log_mass_ptr,
    partial_ptr,
    stride_r_b,
    stride_r_h,
    stride_r_p,
    stride_t_b,
    stride_m_b,
    stride_m_h,
    stride_p_b,
    stride_p_h,
    max_pages,
    max_chunks,
    window_pages,
    zero,
    R: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    COEF_BITS: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FILL: tl.constexpr,
    ASM: tl.constexpr,
):
    """log_mass of chunks pid, pid + programs, ... of one (row, KV head), and each chunk's log-sum-exp."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + row), max_pages * 16)
    newest = (length + 15) // 16 - 1
    limit = newest + 1 - window_pages
    # A chunk is 16 pages, and more where that would make over 1024 of them: a matter of the row's own length alone.
    log_rounds = 0
    for bound in tl.static_range(14, 24):
        log_rounds += (newest > (1 << bound)).to(tl.int32)
    per_chunk = 1 << log_rounds
    chunks = (newest + 16 * per_chunk - 1) // (16 * per_chunk)
    H: tl.constexpr = D // 2
    TILES: tl.constexpr = (G + 7) // 8
    item = (row * tl.num_programs(1) + head) * TILES
    digit = tl.arange(0, 16)[:, None] * H + tl.arange(0, H)[None, :]
    rec_ptr += head * stride_r_h
    block_table_ptr += row * stride_t_b
    log_mass_ptr += row * stride_m_b + head * G * stride_m_h
    partial_ptr += row * stride_p_b + head * G * stride_p_h
    off_g = tl.arange(0, 8)
    # A constant pair of fp16 ones never reaches the product (seen with triton 3.6): a run-time one does.
    one = (zero + 1).to(tl.float16)
    if pid < chunks:
        for first in tl.static_range(0, G, 8):
            q_at = digits_ptr + (item + first // 8) * (32 * H) + digit
            q_first = tl.load(q_at)
            q_second = tl.load(q_at + 16 * H)
            unit = tl.load(numbers_ptr + (item + first // 8) * 16 + off_g)
            norm = tl.load(numbers_ptr + (item + first // 8) * 16 + 8 + off_g)
            rounds = (chunks - pid + programs - 1) // programs * per_chunk
            best = tl.full((8, 4), -float("inf"), tl.float32)
            mass = tl.zeros((8, 4), tl.float32)
            n = pid * 16 * per_chunk
            places = load_places(block_table_ptr, n, newest, stride_r_b, stride_r_p, zero, PER_BLOCK)
            b0, m0, n0, e0, o0, c0, d0, v0 = load_records(rec_ptr, places, zero, R, D, COEF_BITS, VECTORS_AT)
            # Two steps a round: the records of one are loaded while the other's are computed, and no register is
            # copied.
            for i in tl.range(0, rounds, num_stages=1):
                chunk = pid + (i >> log_rounds) * programs
                n = (chunk * per_chunk + (i & (per_chunk - 1))) * 16
                after = i + 1
                next_n = (
                    (pid + (after >> log_rounds) * programs) * per_chunk + (after & (per_chunk - 1))
                ) * 16
                places = load_places(block_table_ptr, n + 8, newest, stride_r_b, stride_r_p, zero, PER_BLOCK)
                b1, m1, n1, e1, o1, c1, d1, v1 = load_records(
                    rec_ptr, places, zero, R, D, COEF_BITS, VECTORS_AT
                )
                x = score_pages(
                    q_first, q_second, unit, norm, b0, m0, n0, e0, o0, c0, d0, v0, one, R, D, COEF_BITS, ASM
                )
                best, mass = accumulate(
                    x, n, first, newest, limit, max_pages, log_mass_ptr, stride_m_h, best, mass, G, ASM
                )
                places = load_places(block_table_ptr, next_n, newest, stride_r_b, stride_r_p, zero, PER_BLOCK)
                b0, m0, n0, e0, o0, c0, d0, v0 = load_records(
                    rec_ptr, places, zero, R, D, COEF_BITS, VECTORS_AT
                )
                x = score_pages(
                    q_first, q_second, unit, norm, b1, m1, n1, e1, o1, c1, d1, v1, one, R, D, COEF_BITS, ASM
                )
                best, mass = accumulate(
                    x, n + 8, first, newest, limit, max_pages, log_mass_ptr, stride_m_h, best, mass, G, ASM
                )
                if (after & (per_chunk - 1)) == 0:
                    total = (
                        tl.where(mass > 0.0, best + log2(tl.maximum(mass, 1e-30), ASM), -float("inf")) * LN2
                    )
                    at = (
                        partial_ptr
                        + (first + off_g)[:, None] * stride_p_h
                        + chunk
                        + tl.zeros((8, 4), tl.int32)
                    )
                    tl.store(at, total, mask=(first + off_g < G)[:, None] & (tl.arange(0, 4) == 0)[None, :])
                    best = tl.full((8, 4), -float("inf"), tl.float32)
                    mass = tl.zeros((8, 4), tl.float32)
    # What lies behind the scored pages.
    page = tl.arange(0, FILL)
    for start in range(chunks + pid * FILL, max_chunks, programs * FILL):
        for g in range(G):
            at = partial_ptr + g * stride_p_h + start + page
            tl.store(at, tl.full((FILL,), -float("inf"), tl.float32), mask=start + page < max_chunks)
    for start in range((chunks * per_chunk + pid * (FILL // 16)) * 16, max_pages, programs * FILL):
        for g in range(G):
            at = log_mass_ptr + g * stride_m_h + start + page
            tl.store(at, tl.full((FILL,), -float("inf"), tl.float32), mask=start + page < max_pages)


def num_chunks(pages: int) -> int:
    """Most chunks of a row of so many pages."""
    return min(MAX_CHUNKS, -(-pages // 16))


@functools.cache
def programs_that_fit(device: torch.device, rank: int) -> int:
    """Programs that run at once."""
    if device.type == "cpu":
        return 4
    return PROGRAMS[rank] * torch.cuda.get_device_properties(device).multi_processor_count


def score_hopper(
    q: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt,
    *,
    scale: float,
    window_pages: int,
    log_mass: Tensor,
    partial: Tensor,
) -> None:
    """Writes log_mass [B, Hq, N] and each chunk's log-sum-exp [B, Hq, `num_chunks(N)`]."""
    B, Hq, D = q.shape
    Hkv, per_block = records.shape[1], records.shape[2]
    at = fmt.layout(D)
    # Not where Triton's interpreter runs it.
    compiled = isinstance(score_hopper_kernel, triton.JITFunction)
    programs = max(1, min(partial.shape[2], programs_that_fit(q.device, fmt.rank) // (Hkv * B)))
    group, tiles = Hq // Hkv, triton.cdiv(Hq // Hkv, 8)
    digits = torch.empty((B, Hkv, tiles, 2, 16, D // 2), dtype=torch.int8, device=q.device)
    numbers = torch.empty((B, Hkv, tiles, 2, 8), dtype=torch.float32, device=q.device)
    quantise_kernel[(tiles, Hkv, B)](
        q, digits, numbers, *q.stride()[:2], scale * LOG2E, G=group, D=D, num_warps=1
    )
    score_hopper_kernel[(programs, Hkv, B)](
        digits,
        numbers,
        records.view(torch.int8),
        block_table,
        seq_lens,
        log_mass,
        partial,
        records.stride(0) // 16,
        records.stride(1),
        records.stride(2) // 16,
        block_table.stride(0),
        *log_mass.stride()[:2],
        *partial.stride()[:2],
        log_mass.shape[2],
        partial.shape[2],
        window_pages,
        0,
        R=fmt.rank,
        D=D,
        G=group,
        COEF_BITS=fmt.coef_bits,
        VECTORS_AT=at.vector_scales,
        PER_BLOCK=per_block,
        FILL=256,
        ASM=compiled,
        num_warps=1,
        num_stages=1,
        **({"maxnreg": REGISTERS[fmt.rank]} if compiled else {}),
    )


def shape_fits(fmt, head_dim: int, group: int) -> bool:
    """Whether the fast path knows the shape."""
    return (
        fmt.page == 16
        and fmt.rank in (4, 8)
        and (fmt.mean_bits, fmt.basis_bits) == (8, 4)
        and fmt.coef_bits in (4, 8)
        and head_dim in (64, 128)
        and group <= 16
    )


def fits(q: Tensor, records: Tensor, fmt) -> bool:
    """Whether the fast path serves these tensors: 15 bits of a query are enough only where it has no more itself."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and shape_fits(fmt, q.shape[2], q.shape[1] // records.shape[1])
        and records.stride(0) % 16 == 0
        and records.stride(2) % 16 == 0
        # Where a record starts is kept as 32 bits of units of 16 bytes.
        and records.shape[0] * records.stride(0) < 2**35
        and (records.device.type == "cpu" or torch.cuda.get_device_capability(records.device) >= (9, 0))
    )
