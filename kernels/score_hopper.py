"""Score, the fast path: Hopper's tensor cores, for 4-bit bases, pages of 16, R 4 or 8, D 64 or 128, G up to 16.

`score.py` has the formula; here the operands of its products are quantised: the query to 15 bits, projections and the
tokens' weights to 11. What is different, and why:

* One warp is a program and takes 8 pages a step. Records come by bulk copies into shared memory, two steps ahead
  (`shared_records.py`): no load waits for a register, and whole records are read once.
* The query is written as two int8 digits (15 bits), by every program anew while its first records are on their way
  (`quantise.py`). Rows 0-7 of the matrix unit's 16 hold the high digits of up to 8 query heads, rows 8-15 the low ones:
  the padding to 16 rows does useful work. Integer products are exact.
* Up to four heads stand there twice, so that a lane has a head of one of two pages: products of logits are then of four
  pages in place of two, and what is done for each of their results is done half as often.
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
    halves_max,
    halves_sum,
    log2,
    pack_halves,
    pair_logits,
    project,
    quad_logits,
    quad_max,
    quad_sum,
    sum_tokens,
    uniform,
)
from .quantise import load_elements, quantise
from .shared_records import (
    buffer_address,
    copy_step,
    let_go,
    load_blocks,
    load_pair,
    load_words,
    record_place,
    wait_for_copies,
)

# A chunk of a row has one log-sum-exp: 8 pages, and more where that would make more chunks than these, or in rows of no
# more than 8,192 pages than half of them.
MAX_CHUNKS = 1024

# By rank: registers of a program (a warp), and programs a multiprocessor that they leave room for.
REGISTERS = {4: 128, 8: 128}
PROGRAMS = {4: 16, 8: 16}

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
# What one is in a logit's fp16 operands: their range in logits is 256 times that of fp16.
UNIT = tl.constexpr(2.0**-8)
# The high nibble of each byte of a word.
NIBBLES = tl.constexpr(-0x0F0F0F10)


@triton.jit
def load_centers(
    source,
    lane,
    query,
    unit,
    norm,
    FOUR: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    NBYTES: tl.constexpr,
    ASM: tl.constexpr,
):
    """The means' logits and the variances' share, lane 4 g + j of pages 2 j and 2 j + 1, with FOUR of 2 j + g // 4."""
    g, j = lane // 4, lane % 4
    of_row = record_place(source, 0, g, j * (D // 8), NBYTES, PER_BLOCK, ASM)
    first, second = load_words(of_row, 0, D // 32, ASM), load_words(of_row, D // 2, D // 32, ASM)
    x, y = project(first, second, query, ASM)
    dots = (tl.where(g < 4, x, y),) if FOUR else (x, y)
    centers = ()
    for k in tl.static_range(len(dots)):
        at = record_place(source, k, 2 * j + g // 4 if FOUR else 2 * j, j * 0, NBYTES, PER_BLOCK, ASM)
        (both,) = load_words(at, VECTORS_AT + 2 * R, 1, ASM)
        scale, variance = bf16_pair(both)
        centers = centers + (dots[k] * (scale * unit) + variance * norm,)
    return centers


@triton.jit
def project_basis(basis, scales, query, step, ASM: tl.constexpr):
    """Projections of 8 queries onto 8 basis vectors in multiples of 1 / UNIT, two fp16 a word, [32]."""
    low, high = (), ()
    for w in tl.static_range(len(basis)):
        low = low + ((basis[w] << 4) & NIBBLES,)
        high = high + (basis[w] & NIBBLES,)
    x, y = project(low, high, query, ASM)
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
def weigh_quad(pair, other, query, step, R: tl.constexpr, COEF_BITS: tl.constexpr, ASM: tl.constexpr):
    """The same of two pairs for four heads: lane 4 g + j has head g % 4 and page g // 4 of a pair.

    step: 0 where a projection is of another page than the lane's; at R = 8 two, of first and of second pages.
    """
    if R == 8:
        z, early, late = (), (), ()
        loaded = pair + other
        for k in tl.static_range(4):
            z = z + (project_basis(loaded[3 * k], loaded[3 * k + 2], query, step[k % 2], ASM),)
            of_page = coefs(loaded[3 * k + 1], COEF_BITS, ASM)
            early, late = early + (of_page[0],), late + (of_page[1],)
        a0, b0, a1, b1, c0, d0, c1, d1 = quad_logits(z, early, late, ASM)
    else:
        z = project_basis(pair[0], pair[2], query, step[0], ASM)
        other_z = project_basis(other[0], other[2], query, step[0], ASM)
        early, late = coefs(pair[1], COEF_BITS, ASM)
        other_early, other_late = coefs(other[1], COEF_BITS, ASM)
        # Eight ranks are four of two pages.
        a0, b0, a1, b1, c0, d0, c1, d1 = pair_logits(z, other_z, early, other_early, late, other_late, 8, ASM)
    top_0, w0, w2 = token_weights(a0, b0, c0, d0, ASM)
    top_1, w1, w3 = token_weights(a1, b1, c1, d1, ASM)
    return top_0, top_1, w0, w1, w2, w3


@triton.jit
def accumulate(x, best, mass, ASM: tl.constexpr):
    """best and mass [32] of a running log2-sum-exp, with the masses of x in it; +inf, a marked page, is left out."""
    new = best
    for k in tl.static_range(len(x)):
        new = tl.maximum(new, tl.where(x[k] < float("inf"), x[k], -float("inf")))
    safe = tl.maximum(new, -1e30)
    mass = mass * exp2(best - safe, ASM)
    for k in tl.static_range(len(x)):
        mass += exp2(tl.where(x[k] < float("inf"), x[k], -float("inf")) - safe, ASM)
    return new, mass


@triton.jit
def scored_chunks(length, max_pages):
    """The newest page of rows of `length` tokens, the binary logarithm of a chunk's steps of 8 pages, and chunks.

    A chunk is 8 pages, and more where that would make over 512 of them, or from 8,192 pages on over 1,024: a matter of
    the row's own length alone.
    """
    newest = (tl.minimum(length, max_pages * 16) + 15) // 16 - 1
    # By the exponent of a float: 0 up to 4,096 pages, and one more each time that they double.
    log_steps = (tl.maximum(newest - 1, 4095).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - (127 + 11)
    log_steps -= (log_steps > 1).to(tl.int32)
    return newest, log_steps, (newest + (8 << log_steps) - 1) >> (3 + log_steps)


@triton.jit(do_not_specialize=["zero", "window_pages", "num_rows", "slots"])
def score_hopper_kernel(
    q_ptr,
    rec_ptr,
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
    NBYTES: tl.constexpr,
    PACKED: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """log_mass of neighbouring chunks of one (row, KV head), and each chunk's log-sum-exp; scale is in log2."""
    # The barriers are made while what was launched before ends.
    buffer = buffer_address(zero, NBYTES, ASM)
    wait(DEPENDENT)
    head = tl.program_id(1).to(tl.int64)
    if BLOCK_B > 1:
        off_b = tl.arange(0, BLOCK_B)
        lengths = tl.load(seq_lens_ptr + off_b, mask=off_b < num_rows, other=0)
        _, steps_of, chunks_of = scored_chunks(lengths, max_pages)
        row, pid, programs = row_of_slot(chunks_of, steps_of, tl.program_id(0), slots, num_rows)
        if row >= num_rows:
            return
        row, pid, programs = uniform(row, ASM), uniform(pid, ASM), uniform(programs, ASM)
    else:
        row, pid, programs = 0, tl.program_id(0), tl.num_programs(0)
    newest, log_steps, chunks = scored_chunks(uniform(tl.load(seq_lens_ptr + row), ASM), max_pages)
    table_row = uniform(row // q_len, ASM).to(tl.int64)
    row = tl.cast(row, tl.int64)
    limit = newest + 1 - window_pages
    # Neighbouring chunks: their blocks' numbers are neighbours too, and most of them are loaded before.
    first_chunk, end_chunk = pid * chunks // programs, (pid + 1) * chunks // programs
    start = uniform(first_chunk, ASM) << log_steps
    end = uniform(end_chunk, ASM) << log_steps
    last_block = (tl.minimum(newest, end * 8) - 1) // PER_BLOCK
    last_step = (1 << log_steps) - 1
    # One load a block where blocks of a power of two of pages meet every step alike.
    EACH: tl.constexpr = tl.constexpr(1 if PER_BLOCK & (PER_BLOCK - 1) != 0 else min(PER_BLOCK, 8))
    # One copy of neighbours.
    RUN: tl.constexpr = tl.constexpr(EACH if PACKED else 1)
    # Opaque to the compiler, which would otherwise give a lane several neighbours' loads.
    lane = tl.arange(0, 32) ^ zero
    g = lane // 4
    j = lane % 4
    # Of up to four heads a lane has one page a step, else two pages.
    FOUR: tl.constexpr = G <= 4
    own = g % 4 if FOUR else g
    q_ptr += row * stride_q_b + head * G * stride_q_h
    rec_ptr += head * stride_r_h
    block_table_ptr += table_row * stride_t_b
    log_mass_ptr += row * stride_m_b + head * G * stride_m_h
    partial_ptr += row * stride_p_b + head * G * stride_p_h
    if start < end:
        for first in range(0, G, 8):
            best = tl.full((32,), -float("inf"), tl.float32)
            mass = tl.zeros((32,), tl.float32)
            # The number of a step, counted on from one set of heads to the next, says which half it takes.
            turns = first // 8 * (end - start) - start
            # Rows of absent heads repeat the last one; their results are not stored.
            of_lane = q_ptr + tl.minimum(first + own, G - 1) * stride_q_h + j * (D // 8)
            lower, upper = load_elements(of_lane, D // 8), load_elements(of_lane + D // 2, D // 8)
            now = load_blocks(block_table_ptr, start * 8, last_block, EACH, PER_BLOCK, ASM)
            soon = load_blocks(block_table_ptr, start * 8 + 8, last_block, EACH, PER_BLOCK, ASM)
            blocks = load_blocks(block_table_ptr, start * 8 + 16, last_block, EACH, PER_BLOCK, ASM)
            half = (start + turns) & 1
            copy_step(
                buffer,
                half,
                rec_ptr,
                now,
                start * 8,
                stride_r_b,
                stride_r_p,
                NBYTES,
                EACH,
                RUN,
                PER_BLOCK,
                ASM,
            )
            if start + 1 < end:
                copy_step(
                    buffer,
                    1 - half,
                    rec_ptr,
                    soon,
                    start * 8 + 8,
                    stride_r_b,
                    stride_r_p,
                    NBYTES,
                    EACH,
                    RUN,
                    PER_BLOCK,
                    ASM,
                )
            # The first records are on their way while the query is quantised.
            query, unit, norm = quantise(lower, upper, scale, lane, ASM)
            # An infinite variance stays infinite whatever the query is.
            norm = tl.maximum(norm, 1e-30) * (0.5 * LN2)
            step = unit * (0.0625 * UNIT)
            if FOUR and R == 8:
                steps = (tl.where(g < 4, step, 0.0), tl.where(g < 4, 0.0, step))
            elif FOUR:
                steps = (tl.where(g // 4 == j // 2, step, 0.0),)
            for i in tl.range(start, end, num_stages=1):
                n = i * 8
                half = (i + turns) & 1
                wait_for_copies(buffer, half, ((i + turns) >> 1) & 1, NBYTES, ASM)
                # The next launch starts beside the last step: not sooner, when it would be in the way.
                if (i + 1 == end) & (first + 8 >= G):
                    release(DEPENDENT)
                at = buffer + half * (8 * NBYTES)
                source = (at, rec_ptr, block_table_ptr, n, last_block, stride_r_b, stride_r_p)
                sums = (tl.zeros((32,), tl.float32),) * 4
                tops = (tl.zeros((32,), tl.float32),) * 2
                if FOUR:
                    for quad in tl.static_range(2):
                        loaded = ()
                        for pair in tl.static_range(2):
                            loaded = loaded + (
                                load_pair(
                                    source,
                                    lane,
                                    2 * quad + pair,
                                    PER_BLOCK,
                                    R,
                                    D,
                                    COEF_BITS,
                                    VECTORS_AT,
                                    NBYTES,
                                    ASM,
                                ),
                            )
                        first_top, second_top, w0, w1, w2, w3 = weigh_quad(
                            loaded[0], loaded[1], query, steps, R, COEF_BITS, ASM
                        )
                        top = tl.where(
                            j == 2 * quad, first_top, tl.where(j == 2 * quad + 1, second_top, tops[0])
                        )
                        tops = (top, top)
                        sums = sum_tokens(w0, w1, w2, w3, sums, 2 * quad, 2 * quad + 1, ASM)
                else:
                    for pair in tl.static_range(4):
                        loaded = load_pair(
                            source, lane, pair, PER_BLOCK, R, D, COEF_BITS, VECTORS_AT, NBYTES, ASM
                        )
                        first_top, second_top, w0, w1, w2, w3 = weigh_pair(
                            loaded, query, step, R, COEF_BITS, ASM
                        )
                        tops = (
                            tl.where(j == pair, first_top, tops[0]),
                            tl.where(j == pair, second_top, tops[1]),
                        )
                        sums = sum_tokens(w0, w1, w2, w3, sums, pair, pair, ASM)
                centers = load_centers(
                    source, lane, query, unit, norm, FOUR, PER_BLOCK, R, D, VECTORS_AT, NBYTES, ASM
                )
                let_go(zero, ASM)
                if i + 2 < end:
                    copy_step(
                        buffer,
                        half,
                        rec_ptr,
                        blocks,
                        n + 16,
                        stride_r_b,
                        stride_r_p,
                        NBYTES,
                        EACH,
                        RUN,
                        PER_BLOCK,
                        ASM,
                    )
                blocks = load_blocks(block_table_ptr, n + 24, last_block, EACH, PER_BLOCK, ASM)
                if FOUR:
                    page = n + 2 * j + g // 4
                    x = tops[0] * (1.0 / UNIT) + (
                        log2(tl.where(j % 2 == 0, sums[0], sums[2]), ASM) + centers[0]
                    )
                    x = tl.where(page < newest, x, -float("inf"))
                    to = log_mass_ptr + (first + own) * stride_m_h + page
                    tl.store(to, x * LN2, mask=(first + own < G) & (page < max_pages))
                    masses = (tl.where((page > 0) & (page < limit), x, -float("inf")),)
                else:
                    page = n + 2 * j
                    x = tops[0] * (1.0 / UNIT) + (log2(sums[0], ASM) + centers[0])
                    y = tops[1] * (1.0 / UNIT) + (log2(sums[2], ASM) + centers[1])
                    x = tl.where(page < newest, x, -float("inf"))
                    y = tl.where(page + 1 < newest, y, -float("inf"))
                    to = log_mass_ptr + (first + g)[:, None] * stride_m_h + page[:, None] + tl.arange(0, 2)
                    mask = (first + g < G)[:, None] & (page[:, None] + tl.arange(0, 2) < max_pages)
                    tl.store(to, tl.join(x, y) * LN2, mask=mask)
                    masses = (
                        tl.where((page > 0) & (page < limit), x, -float("inf")),
                        tl.where(page + 1 < limit, y, -float("inf")),
                    )
                best, mass = accumulate(masses, best, mass, ASM)
                if (i & last_step) == last_step:
                    top = quad_max(halves_max(best, ASM) if FOUR else best, ASM)
                    total = quad_sum(mass * exp2(best - tl.maximum(top, -1e30), ASM), ASM)
                    total = halves_sum(total, ASM) if FOUR else total
                    total = tl.where(total > 0.0, top + log2(total, ASM), -float("inf")) * LN2
                    to_partial = partial_ptr + (first + g) * stride_p_h + (i >> log_steps)
                    tl.store(to_partial, total, mask=(g < G - first) & (j == 0))
                    best = tl.full((32,), -float("inf"), tl.float32)
                    mass = tl.zeros((32,), tl.float32)
    # What lies behind the scored pages.
    page = tl.arange(0, FILL)
    for start in range(chunks + pid * FILL, max_chunks, programs * FILL):
        for h in range(G):
            at = partial_ptr + h * stride_p_h + start + page
            tl.store(at, tl.full((FILL,), -float("inf"), tl.float32), mask=start + page < max_chunks)
    # Where nobody reads them, the masses of a wide table would be most of what is written.
    filled = max_pages if WHOLE else 0
    for start in range((chunks << (3 + log_steps)) + pid * FILL, filled, programs * FILL):
        for h in range(G):
            at = log_mass_ptr + h * stride_m_h + start + page
            tl.store(at, tl.full((FILL,), -float("inf"), tl.float32), mask=start + page < max_pages)


def num_chunks(pages: int) -> int:
    """Most chunks of a row of so many pages."""
    # The newest page is not scored.
    return min(MAX_CHUNKS if pages > 8193 else MAX_CHUNKS // 2, -(-pages // 8))


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
    whole: bool = True,
    config: KernelConfig | None = None,
) -> None:
    """Writes log_mass [B, Hq, N] and each chunk's log-sum-exp [B, Hq, `num_chunks(N)`].

    Unless `whole`, log_mass of pages that are not scored is left as it is.
    """
    B, Hq, D = q.shape
    Hkv, per_block = records.shape[1], records.shape[2]
    at = fmt.layout(D)
    # Not where Triton's interpreter runs it.
    compiled = isinstance(score_hopper_kernel, triton.JITFunction)
    config = config or default_config(fmt.rank, Hq // Hkv, D, q.device)
    programs = PROGRAMS[fmt.rank] if config.programs is None else config.programs
    slots = max(1, min(B * partial.shape[2], programs_that_fit(q.device, programs) // Hkv))
    # More rows than one share their programs out by length: one long row has as many as if it were alone.
    score_hopper_kernel[(slots if B == 1 else slots + B, Hkv)](
        q,
        records.view(torch.int8),
        block_table,
        seq_lens,
        log_mass,
        partial,
        *q.stride()[:2],
        records.stride(0) // 16,
        records.stride(1),
        records.stride(2) // 16,
        block_table.stride(0),
        *log_mass.stride()[:2],
        *partial.stride()[:2],
        scale * LOG2E,
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
        NBYTES=at.nbytes,
        PACKED=records.stride(2) == at.nbytes,
        ASM=compiled,
        num_warps=1,
        num_stages=1,
        **dependent(score_hopper_kernel, q.device),
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
        # A bulk copy's address is a multiple of 16 bytes.
        and all(stride % 16 == 0 for stride in (*records.stride()[:3], records.data_ptr()))
        # Where a record starts is kept as 32 bits of units of 16 bytes.
        and records.shape[0] * records.stride(0) < 2**35
        and (records.device.type == "cpu" or torch.cuda.get_device_capability(records.device) >= (9, 0))
    )
