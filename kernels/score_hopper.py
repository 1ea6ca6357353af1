"""Score, the fast path: Hopper's tensor cores, for 4-bit bases, pages of 16, R 4 or 8, D 64 or 128, G up to 16.

`score.py` has the formula; here the operands of its products are quantised: the query to 15 bits, projections and the
tokens' weights to 11. What is different, and why:

* One warp is a program and takes 8 pages a step. What a step has used of them is loaded for the next step at once, into
  the same registers; 16 programs a multiprocessor cover the rest of the latency.
* The query is written as two int8 digits (15 bits). Rows 0-7 of the matrix unit's 16 hold the high digits of up to
  8 query heads, rows 8-15 the low ones: the padding to 16 rows does useful work. Integer products are exact.
* A nibble x is used as the int8 16 x: the low nibbles of four bytes are one shift and one mask away, the high ones one
  mask. The 16 is folded into the scale.
* Every tensor is a register of the warp's lanes, as `hopper_asm.py` says, so that nothing moves between lanes but the
  maximum over a page's tokens. The order of d inside a product is free: a lane's 16 bytes of a vector are used as they
  lie.
* Logits: coefficients become fp16 and multiply the projections of two pages at a time, block-diagonally. Logits are
  kept as multiples of 256, so fp16 saturates only where one is beyond 10**7. The mean's share of a logit is the same
  for all tokens of a page, and is added to the page's log-mass.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .balance import row_of_slot
from .config import KernelConfig, device_name, tuned
from .dependent import dependent, release, wait
from .hopper_asm import (
    bf16_pair,
    coefs,
    exp2,
    finite_bf16,
    log2,
    pack_halves,
    pair_logits,
    project,
    quad_max,
    quad_sum,
    sum_tokens,
)
from .quantise import quantise

# A chunk of a row has one log-sum-exp: 8 pages, and more where that would make more chunks than these.
MAX_CHUNKS = 1024

# By rank: registers of a program (a warp), and programs a multiprocessor that they leave room for.
REGISTERS = {4: 128, 8: 128}
PROGRAMS = {4: 16, 8: 16}

# In tables of no more pages, whose scan is one short wave, the next launch costs more beside it than behind it.
SHORT = 16384

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
# What one is in a logit's fp16 operands: their range in logits is 256 times that of fp16.
UNIT = tl.constexpr(2.0**-8)
# The high nibble of each byte of a word.
NIBBLES = tl.constexpr(-0x0F0F0F10)


@triton.jit
def load_block(block_table_ptr, n, k, last_block, PER_BLOCK: tl.constexpr):
    """The block of page n + k, and for a page behind the row the row's last one."""
    return tl.load(block_table_ptr + tl.minimum((n + k) // PER_BLOCK, last_block))


@triton.jit
def record_unit(block, n, k, stride_r_b, stride_r_p, PER_BLOCK: tl.constexpr):
    """Where the record of page n + k starts, in units of 16 bytes; n is a multiple of 8, k < 8."""
    if PER_BLOCK & (PER_BLOCK - 1) != 0:
        slot = (n + k) % PER_BLOCK
    elif PER_BLOCK > 8:
        slot = n % PER_BLOCK + k
    else:
        # Known before the loop.
        slot = k % PER_BLOCK
    return (block * stride_r_b + slot * stride_r_p).to(tl.int64)


@triton.jit
def load_places(block_table_ptr, n, last_block, lane, EACH: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The blocks of pages n .. n + 7, EACH of them in one; and in lane 4 g + j of pages n + g, n + 2 j, n + 2 j + 1."""
    blocks = ()
    for k in tl.static_range(0, 8, EACH):
        blocks = blocks + (load_block(block_table_ptr, n, k, last_block, PER_BLOCK),)
    of_row = load_block(block_table_ptr, n, lane // 4, last_block, PER_BLOCK)
    even = load_block(block_table_ptr, n, lane % 4 * 2, last_block, PER_BLOCK)
    odd = even
    if EACH == 1:
        odd = load_block(block_table_ptr, n, lane % 4 * 2 + 1, last_block, PER_BLOCK)
    return blocks, of_row, even, odd


@triton.jit
def load_bases(
    rec_ptr,
    unit,
    other_unit,
    lane,
    R: tl.constexpr,
    D: tl.constexpr,
    COEF_BITS: tl.constexpr,
    VECTORS_AT: tl.constexpr,
):
    """Basis, coefficient codes and vector scales of a pair of pages, as `hopper_asm` has them.

    Lane 4 g + j has of basis vector g 16 bytes (8 at D = 64), [32, W] words; of token g (and g + 8 in the high nibbles)
    the codes of ranks 2 j and 2 j + 1, or with 8 bits a code of token g in the low half and g + 8 in the high one; and
    two scales a word. At R = 8 there are three of each page; at R = 4 one tensor holds both pages: 8 vectors, 4 and 4,
    and lanes with j < 2 have the first page's ranks.
    """
    first = load_basis(rec_ptr, tl.where(lane < 16, unit, other_unit) if R == 4 else unit, lane, R, D)
    half = load_coefs(
        rec_ptr,
        tl.where(lane % 4 < 2, unit, other_unit) if R == 4 else unit,
        lane,
        R,
        D + R * D // 2,
        COEF_BITS,
        VECTORS_AT,
    )
    if R == 4:
        loaded = (first,) + half
    else:
        other = load_basis(rec_ptr, other_unit, lane, R, D)
        other_half = load_coefs(rec_ptr, other_unit, lane, R, D + R * D // 2, COEF_BITS, VECTORS_AT)
        loaded = (first,) + half + (other,) + other_half
    return loaded


@triton.jit
def load_basis(rec_ptr, unit, lane, R: tl.constexpr, D: tl.constexpr):
    """Words [32, W] of 8 basis vectors."""
    W: tl.constexpr = D // 32
    rec32 = rec_ptr.to(tl.pointer_type(tl.int32))
    at = rec32 + (D // 4 + lane // 4 % R * (D // 8) + lane % 4 * W) + unit * 4
    return tl.load(at[:, None] + tl.arange(0, W), eviction_policy="evict_first")


@triton.jit
def load_coefs(
    rec_ptr,
    unit,
    lane,
    R: tl.constexpr,
    COEF_AT: tl.constexpr,
    COEF_BITS: tl.constexpr,
    VECTORS_AT: tl.constexpr,
):
    """Codes and vector scales, [32] int32 each."""
    pair = lane % 4 % (R // 2)
    at = rec_ptr.to(tl.pointer_type(tl.int16)) + (COEF_AT // 2 + lane // 4 * (R // 2) + pair) + unit * 8
    codes = tl.load(at, eviction_policy="evict_first").to(tl.int32)
    if COEF_BITS == 8:
        # Tokens 8 .. 15.
        later = tl.load(at + 4 * R, eviction_policy="evict_first").to(tl.int32)
        codes = (codes & 0xFFFF) | (later << 16)
    scales = tl.load(rec_ptr.to(tl.pointer_type(tl.int32)) + (VECTORS_AT // 4 + pair) + unit * 4)
    return codes, scales


@triton.jit
def load_pair(
    rec_ptr,
    places,
    n,
    lane,
    stride_r_b,
    stride_r_p,
    PAIR: tl.constexpr,
    EACH: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    COEF_BITS: tl.constexpr,
    VECTORS_AT: tl.constexpr,
):
    """`load_bases` of pages n + 2 PAIR and n + 2 PAIR + 1."""
    K: tl.constexpr = 2 * PAIR
    unit = record_unit(places[0][K // EACH], n, K, stride_r_b, stride_r_p, PER_BLOCK)
    other_unit = record_unit(places[0][(K + 1) // EACH], n, K + 1, stride_r_b, stride_r_p, PER_BLOCK)
    return load_bases(rec_ptr, unit, other_unit, lane, R, D, COEF_BITS, VECTORS_AT)


@triton.jit
def load_means(
    rec_ptr,
    places,
    n,
    lane,
    stride_r_b,
    stride_r_p,
    R: tl.constexpr,
    D: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
):
    """Means of pages n .. n + 7, a row a page, as halves [32, W]; scale and variance of pages n + 2 j, n + 2 j + 1."""
    W: tl.constexpr = D // 32
    rec32 = rec_ptr.to(tl.pointer_type(tl.int32))
    unit = record_unit(places[1], n, lane // 4, stride_r_b, stride_r_p, PER_BLOCK)
    at = (rec32 + lane % 4 * W + unit * 4)[:, None] + tl.arange(0, W)
    first = tl.load(at, eviction_policy="evict_first")
    second = tl.load(at + D // 8, eviction_policy="evict_first")
    of_mean = rec32 + (VECTORS_AT + 2 * R) // 4
    even = record_unit(places[2], n, lane % 4 * 2, stride_r_b, stride_r_p, PER_BLOCK)
    odd = record_unit(places[3], n, lane % 4 * 2 + 1, stride_r_b, stride_r_p, PER_BLOCK)
    return first, second, tl.load(of_mean + even * 4), tl.load(of_mean + odd * 4)


@triton.jit
def project_basis(basis, scales, query, step, ASM: tl.constexpr):
    """Projections of 8 queries onto 8 basis vectors in multiples of 1 / UNIT, two fp16 a word, [32]."""
    x, y = project((basis << 4) & NIBBLES, basis & NIBBLES, query, ASM)
    # Where no record was written the bits are any; what is not finite would spread to the other pages of a product.
    first, second = bf16_pair(finite_bf16(scales, ASM))
    return pack_halves(x * (first * step), y * (second * step), ASM)


@triton.jit
def token_weights(l0, l1, l2, l3, ASM: tl.constexpr):
    """The largest of 16 tokens' logits [32], and their weights beside it as two words of two fp16."""
    top = quad_max(tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)), ASM)
    scale = 1.0 / UNIT
    shift = -top * scale
    w0 = pack_halves(exp2(l0 * scale + shift, ASM), exp2(l1 * scale + shift, ASM), ASM)
    w1 = pack_halves(exp2(l2 * scale + shift, ASM), exp2(l3 * scale + shift, ASM), ASM)
    return top, w0, w1


@triton.jit
def weigh_pair(pair, query, step, R: tl.constexpr, COEF_BITS: tl.constexpr, ASM: tl.constexpr):
    """Largest logits, less the center, of a pair's first and second page, and weights as `sum_tokens` takes them."""
    z = project_basis(pair[0], pair[2], query, step, ASM)
    early, late = coefs(pair[1], COEF_BITS, ASM)
    if R == 8:
        other_z = project_basis(pair[3], pair[5], query, step, ASM)
        other_early, other_late = coefs(pair[4], COEF_BITS, ASM)
    else:
        other_z, other_early, other_late = z, early, late
    # A letter a token, a digit a page of the pair.
    a0, b0, a1, b1, c0, d0, c1, d1 = pair_logits(z, other_z, early, other_early, late, other_late, R, ASM)
    top_0, w0, w2 = token_weights(a0, b0, c0, d0, ASM)
    top_1, w1, w3 = token_weights(a1, b1, c1, d1, ASM)
    return top_0, top_1, w0, w1, w2, w3


@triton.jit
def accumulate(x, y, best, mass, ASM: tl.constexpr):
    """best and mass [32] of a running log2-sum-exp, with x and y in it; +inf, a marked page, is left out."""
    x = tl.where(x < float("inf"), x, -float("inf"))
    y = tl.where(y < float("inf"), y, -float("inf"))
    new = tl.maximum(best, tl.maximum(x, y))
    safe = tl.maximum(new, -1e30)
    mass = mass * exp2(best - safe, ASM) + (exp2(x - safe, ASM) + exp2(y - safe, ASM))
    return new, mass


@triton.jit
def scored_chunks(length, max_pages):
    """The newest page of rows of `length` tokens, the binary logarithm of a chunk's steps of 8 pages, and chunks.

    A chunk is 8 pages, and more where that would make over 1024 of them: a matter of the row's own length alone.
    """
    newest = (tl.minimum(length, max_pages * 16) + 15) // 16 - 1
    log_steps = newest * 0
    for bound in tl.static_range(13, 24):
        log_steps += (newest > (1 << bound)).to(tl.int32)
    return newest, log_steps, (newest + (8 << log_steps) - 1) >> (3 + log_steps)


@triton.jit(do_not_specialize=["zero", "window_pages", "num_rows", "slots"])
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
    num_rows,
    slots,
    q_len,
    R: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    COEF_BITS: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FILL: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RELEASE: tl.constexpr,
):
    """log_mass of chunks pid, pid + programs, ... of one (row, KV head), and each chunk's log-sum-exp."""
    head = tl.program_id(1).to(tl.int64)
    if BLOCK_B > 1:
        off_b = tl.arange(0, BLOCK_B)
        lengths = tl.load(seq_lens_ptr + off_b, mask=off_b < num_rows, other=0)
        _, _, work = scored_chunks(lengths, max_pages)
        row, pid, programs = row_of_slot(work, tl.program_id(0), slots, num_rows)
        if row >= num_rows:
            wait(DEPENDENT)
            return
    else:
        row, pid, programs = 0, tl.program_id(0), tl.num_programs(0)
    newest, log_steps, chunks = scored_chunks(tl.load(seq_lens_ptr + row), max_pages)
    row = tl.cast(row, tl.int64)
    limit = newest + 1 - window_pages
    last_block = (newest - 1) // PER_BLOCK
    steps = 1 << log_steps
    H: tl.constexpr = D // 2
    W: tl.constexpr = D // 32
    TILES: tl.constexpr = (G + 7) // 8
    # One load a block where blocks of a power of two of pages meet every step alike.
    EACH: tl.constexpr = tl.constexpr(1 if PER_BLOCK & (PER_BLOCK - 1) != 0 else min(PER_BLOCK, 8))
    item = (row * tl.num_programs(1) + head) * TILES
    # Opaque to the compiler, which would otherwise give a lane several neighbours' loads.
    lane = tl.arange(0, 32) ^ zero
    g = lane // 4
    j = lane % 4
    rec_ptr += head * stride_r_h
    block_table_ptr += row // q_len * stride_t_b
    log_mass_ptr += row * stride_m_b + head * G * stride_m_h
    partial_ptr += row * stride_p_b + head * G * stride_p_h
    if pid < chunks:
        for first in range(0, G, 8):
            rounds = (chunks - pid + programs - 1) // programs * steps
            best = tl.full((32,), -float("inf"), tl.float32)
            mass = tl.zeros((32,), tl.float32)
            n = pid * 8 * steps
            places = load_places(block_table_ptr, n, last_block, lane, EACH, PER_BLOCK)
            pairs = ()
            for pair in tl.static_range(4):
                pairs = pairs + (
                    load_pair(
                        rec_ptr,
                        places,
                        n,
                        lane,
                        stride_r_b,
                        stride_r_p,
                        pair,
                        EACH,
                        PER_BLOCK,
                        R,
                        D,
                        COEF_BITS,
                        VECTORS_AT,
                    ),
                )
            means = load_means(rec_ptr, places, n, lane, stride_r_b, stride_r_p, R, D, VECTORS_AT, PER_BLOCK)
            # The first records are on their way while the query is quantised.
            wait(DEPENDENT)
            release(RELEASE)
            # [32, W]
            digits = (digits_ptr + (item + first // 8) * (32 * H)).to(tl.pointer_type(tl.int32))
            digits += (lane * W)[:, None] + tl.arange(0, W)
            first_high, first_low = tl.load(digits), tl.load(digits + 2 * H)
            second_high, second_low = tl.load(digits + 4 * H), tl.load(digits + 6 * H)
            unit = tl.load(numbers_ptr + (item + first // 8) * 16 + g)
            norm = tl.load(numbers_ptr + (item + first // 8) * 16 + 8 + g)
            # An infinite variance stays infinite whatever the query is.
            norm = tl.maximum(norm, 1e-30) * (0.5 * LN2)
            query = (first_high, first_low, second_high, second_low)
            step = unit * (0.0625 * UNIT)
            next_n = ((pid + (1 >> log_steps) * programs) * steps + (1 & (steps - 1))) * 8
            places = load_places(block_table_ptr, next_n, last_block, lane, EACH, PER_BLOCK)
            # What a step has used is loaded for the next one at once, into the same registers; block numbers are
            # loaded another step ahead.
            for i in tl.range(0, rounds, num_stages=1):
                center_0, center_1 = project(means[0], means[1], query, ASM)
                mean_scale_0, variance_0 = bf16_pair(means[2])
                mean_scale_1, variance_1 = bf16_pair(means[3])
                center_0 = center_0 * (mean_scale_0 * unit) + variance_0 * norm
                center_1 = center_1 * (mean_scale_1 * unit) + variance_1 * norm
                means = load_means(
                    rec_ptr, places, next_n, lane, stride_r_b, stride_r_p, R, D, VECTORS_AT, PER_BLOCK
                )
                sums = (tl.zeros((32,), tl.float32),) * 4
                top_0 = tl.zeros((32,), tl.float32)
                top_1 = top_0
                next_pairs = ()
                for pair in tl.static_range(4):
                    first_top, second_top, w0, w1, w2, w3 = weigh_pair(
                        pairs[pair], query, step, R, COEF_BITS, ASM
                    )
                    top_0 = tl.where(j == pair, first_top, top_0)
                    top_1 = tl.where(j == pair, second_top, top_1)
                    sums = sum_tokens(w0, w1, w2, w3, sums, pair, ASM)
                    next_pairs = next_pairs + (
                        load_pair(
                            rec_ptr,
                            places,
                            next_n,
                            lane,
                            stride_r_b,
                            stride_r_p,
                            pair,
                            EACH,
                            PER_BLOCK,
                            R,
                            D,
                            COEF_BITS,
                            VECTORS_AT,
                        ),
                    )
                pairs = next_pairs
                log_mass_0 = top_0 * (1.0 / UNIT) + (log2(sums[0], ASM) + center_0)
                log_mass_1 = top_1 * (1.0 / UNIT) + (log2(sums[2], ASM) + center_1)
                after = i + 2
                next_n = ((pid + (after >> log_steps) * programs) * steps + (after & (steps - 1))) * 8
                places = load_places(block_table_ptr, next_n, last_block, lane, EACH, PER_BLOCK)
                page = ((pid + (i >> log_steps) * programs) * steps + (i & (steps - 1))) * 8 + 2 * j
                log_mass_0 = tl.where(page < newest, log_mass_0, -float("inf"))
                log_mass_1 = tl.where(page + 1 < newest, log_mass_1, -float("inf"))
                at = log_mass_ptr + (first + g)[:, None] * stride_m_h + page[:, None] + tl.arange(0, 2)
                mask = (first + g < G)[:, None] & (page[:, None] + tl.arange(0, 2) < max_pages)
                tl.store(at, tl.join(log_mass_0, log_mass_1) * LN2, mask=mask)
                best, mass = accumulate(
                    tl.where((page > 0) & (page < limit), log_mass_0, -float("inf")),
                    tl.where(page + 1 < limit, log_mass_1, -float("inf")),
                    best,
                    mass,
                    ASM,
                )
                if (i & (steps - 1)) == steps - 1:
                    top = quad_max(best, ASM)
                    total = quad_sum(mass * exp2(best - tl.maximum(top, -1e30), ASM), ASM)
                    total = tl.where(total > 0.0, top + log2(total, ASM), -float("inf")) * LN2
                    chunk = pid + (i >> log_steps) * programs
                    to_partial = partial_ptr + (first + g) * stride_p_h + chunk
                    tl.store(to_partial, total, mask=(first + g < G) & (j == 0))
                    best = tl.full((32,), -float("inf"), tl.float32)
                    mass = tl.zeros((32,), tl.float32)
    wait(DEPENDENT)
    # What lies behind the scored pages.
    page = tl.arange(0, FILL)
    for start in range(chunks + pid * FILL, max_chunks, programs * FILL):
        for h in range(G):
            at = partial_ptr + h * stride_p_h + start + page
            tl.store(at, tl.full((FILL,), -float("inf"), tl.float32), mask=start + page < max_chunks)
    # Where nobody reads them, the masses of a wide table would be most of what is written.
    filled = max_pages if WHOLE else 0
    for start in range((chunks * steps + pid * (FILL // 8)) * 8, filled, programs * FILL):
        for h in range(G):
            at = log_mass_ptr + h * stride_m_h + start + page
            tl.store(at, tl.full((FILL,), -float("inf"), tl.float32), mask=start + page < max_pages)


def num_chunks(pages: int) -> int:
    """Most chunks of a row of so many pages."""
    return min(MAX_CHUNKS, -(-pages // 8))


def default_config(rank: int, group: int, head_dim: int, device: torch.device) -> KernelConfig:
    """Registers and programs a multiprocessor: what was the fastest on the device, else by rank alone."""
    found = tuned(device_name(device), "score_hopper", rank=rank, group=group, head_dim=head_dim)
    return found or KernelConfig(8, 1, registers=REGISTERS[rank], programs=PROGRAMS[rank])


@functools.cache
def programs_that_fit(device: torch.device, programs: int) -> int:
    """Programs that run at once, of so many a multiprocessor."""
    if device.type == "cpu":
        return 4
    return programs * torch.cuda.get_device_properties(device).multi_processor_count


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
    digits: Tensor,
    numbers: Tensor,
    whole: bool = True,
    config: KernelConfig | None = None,
) -> None:
    """Writes log_mass [B, Hq, N] and each chunk's log-sum-exp [B, Hq, `num_chunks(N)`].

    Unless `whole`, log_mass of pages that are not scored is left as it is. `digits` and `numbers` are buffers by
    `quantise.query_buffers`.
    """
    B, Hq, D = q.shape
    Hkv, per_block = records.shape[1], records.shape[2]
    at = fmt.layout(D)
    # Not where Triton's interpreter runs it.
    compiled = isinstance(score_hopper_kernel, triton.JITFunction)
    config = config or default_config(fmt.rank, Hq // Hkv, D, q.device)
    programs = PROGRAMS[fmt.rank] if config.programs is None else config.programs
    slots = max(1, min(B * partial.shape[2], programs_that_fit(q.device, programs) // Hkv))
    quantise(q, scale * LOG2E, digits, numbers)
    waits = dependent(score_hopper_kernel, q.device)
    # More rows than one share their programs out by length: one long row has as many as if it were alone.
    score_hopper_kernel[(slots if B == 1 else slots + B, Hkv)](
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
        B,
        slots,
        B // block_table.shape[0],
        R=fmt.rank,
        D=D,
        G=Hq // Hkv,
        COEF_BITS=fmt.coef_bits,
        VECTORS_AT=at.vector_scales,
        PER_BLOCK=per_block,
        FILL=256,
        WHOLE=whole,
        BLOCK_B=triton.next_power_of_2(B),
        ASM=compiled,
        num_warps=1,
        num_stages=1,
        **waits,
        RELEASE=waits["DEPENDENT"] and log_mass.shape[2] > SHORT,
        **({"maxnreg": config.registers} if compiled and config.registers is not None else {}),
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
