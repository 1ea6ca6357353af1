"""Certify: what is certain about the share of the attention mass that a list's pages hold.

    high[n] = est[n] + |scale| |q| residual_norm[n] + rounding      est = log_mass without its residual term
    upper   = log sum over pages n that are not listed of exp(high[n])
    low     = lse over the listed pages - rounding
    share   = exp(low) / (exp(low) + exp(upper)),  the least of a group's heads

The roundings and their proofs are in `locks/certificate.py`. `unread_kernel` takes a fixed chunk of pages of
one (row, KV head), `bound_kernel` adds the chunks up to the row's own length in page order: no result depends
on the batch around a row or on the width of the table. No key or value of a page that is not listed is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from locks.certificate import (
    ADDITION_ROUNDING,
    PAGE_ROUNDING,
    UNIT,
    WIDTH_ROUNDING,
    kept_rounding,
    logit_rounding,
    output_rounding,
    size_factors,
    spread_rounding,
)
from locks.format import BF16_MAX

from .records import load_bf16, page_bases
from .score import log_sum

# Pages of one program: fixed, because the cut decides the order of additions.
CHUNK = 64

_ADDITION = tl.constexpr(ADDITION_ROUNDING)
_PAGE = tl.constexpr(PAGE_ROUNDING)
_UNIT = tl.constexpr(UNIT)
_WIDTH = tl.constexpr(1.0 + WIDTH_ROUNDING)
_BF16_MAX = tl.constexpr(BF16_MAX)


@triton.jit
def norm(x):
    """Euclidean norm of the finite elements of each row of x [ROWS, WIDTH]; no square overflows."""
    x = tl.abs(x.to(tl.float32))
    x = tl.where(x < float("inf"), x, 0.0)
    top = tl.max(x, 1)
    unit = x / tl.where(top > 0.0, top, 1.0)[:, None]
    return top * tl.sqrt(tl.sum(unit * unit, 1))


@triton.jit
def load_numbers(
    rec16_ptr,
    base,
    mask,
    R: tl.constexpr,
    VARIANCE_AT: tl.constexpr,
    NORM_AT: tl.constexpr,
    MEAN_SCALE_AT: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    MEAN_FACTOR: tl.constexpr,
    VECTOR_FACTOR: tl.constexpr,
):
    """Variance, residual norm (inf where it is too large to store) and the size of a key's parts, float32."""
    variance = load_bf16(rec16_ptr, base + VARIANCE_AT, mask)
    residual = load_bf16(rec16_ptr, base + NORM_AT, mask)
    residual = tl.where(residual >= _BF16_MAX, float("inf"), residual)
    vectors = load_bf16(rec16_ptr, base + VECTORS_AT, mask)
    for r in tl.static_range(1, R):
        vectors += load_bf16(rec16_ptr, base + VECTORS_AT + 2 * r, mask)
    size = load_bf16(rec16_ptr, base + MEAN_SCALE_AT, mask) * MEAN_FACTOR + vectors * VECTOR_FACTOR
    return variance, residual, size


@triton.jit
def interval(log_mass, weight, variance, residual, size, LOGIT: tl.constexpr, SPREAD: tl.constexpr):
    """Ends of the interval of a page's exact log-mass; (-inf, inf) where nothing finite is known."""
    known = (tl.abs(log_mass) < float("inf")) & (variance < float("inf")) & (residual < float("inf"))
    spread = 0.5 * weight * weight * tl.where(known, variance, 0.0)
    center = tl.where(known, log_mass, 0.0) - spread
    width = weight * tl.where(known, residual, 0.0) * _WIDTH + _PAGE + LOGIT * weight * size
    width += SPREAD * spread + _ADDITION * tl.abs(center)
    # A comparison with nan is false.
    known = known & (tl.abs(center) < float("inf")) & (width < float("inf"))
    center = tl.where(known, center, 0.0)
    width = tl.where(known, width, float("inf"))
    return center - width, center + width


@triton.jit
def query_weight(
    q_ptr,
    stride_q_h,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """|scale| |q| of G heads from q_ptr on, [BLOCK_G]."""
    off_g = tl.arange(0, BLOCK_G)
    off_d = tl.arange(0, BLOCK_D)
    mask = (off_g < G)[:, None] & (off_d < D)[None, :]
    q = tl.load(q_ptr + off_g[:, None] * stride_q_h + off_d[None, :], mask=mask, other=0.0)
    return norm(q) * tl.abs(scale)


@triton.jit
def unread_kernel(
    log_mass_ptr,
    q_ptr,
    rec16_ptr,
    block_table_ptr,
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    partial_ptr,
    longest_ptr,
    stride_m_b,
    stride_m_h,
    stride_q_b,
    stride_q_h,
    stride_r_b,
    stride_r_h,
    stride_r_p,
    stride_t_b,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    stride_p_b,
    stride_p_h,
    stride_l_b,
    stride_l_h,
    scale,
    max_pages,
    per_block,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    VARIANCE_AT: tl.constexpr,
    NORM_AT: tl.constexpr,
    MEAN_SCALE_AT: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    MEAN_FACTOR: tl.constexpr,
    VECTOR_FACTOR: tl.constexpr,
    LOGIT: tl.constexpr,
    SPREAD: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """log sum of exp(high) over a chunk's pages that are not listed, and the longest key in a listed one."""
    pid_c = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    pages = (tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P) + P - 1) // P
    if pid_c * CHUNK >= pages:
        return
    off_n = pid_c * CHUNK + tl.arange(0, CHUNK)
    exists = off_n < pages
    # The newest page has no record.
    recorded = off_n < pages - 1
    # How many listed ids lie below each page, by bisection: ids ascend.
    ids_ptr += row * stride_i_b + head * stride_i_h
    count = tl.load(counts_ptr + row * stride_c_b + head)
    below = tl.zeros((CHUNK,), tl.int32)
    for i in tl.static_range(STEPS):
        probe = below + (1 << (STEPS - 1 - i))
        found = tl.load(ids_ptr + probe - 1, mask=probe <= count, other=0x7FFFFFFF)
        below = tl.where(found < off_n, probe, below)
    listed = tl.load(ids_ptr + below, mask=below < count, other=-1) == off_n

    base = page_bases(block_table_ptr, row, off_n, recorded, stride_t_b, stride_r_b, stride_r_p, per_block)
    variance, residual, size = load_numbers(
        rec16_ptr,
        base + head * stride_r_h,
        recorded,
        R,
        VARIANCE_AT,
        NORM_AT,
        MEAN_SCALE_AT,
        VECTORS_AT,
        MEAN_FACTOR,
        VECTOR_FACTOR,
    )
    longest = tl.max(tl.where(listed & recorded, residual + size, 0.0), 0)
    tl.store(longest_ptr + row * stride_l_b + head * stride_l_h + pid_c, longest)
    q_ptr += row * stride_q_b + head * G * stride_q_h
    weight = query_weight(q_ptr, stride_q_h, scale, G, D, BLOCK_G, BLOCK_D)
    off_g = tl.arange(0, BLOCK_G)
    mask_g = off_g < G
    # [BLOCK_G, CHUNK]
    at = log_mass_ptr + row * stride_m_b + (head * G + off_g)[:, None] * stride_m_h + off_n[None, :]
    log_mass = tl.load(at, mask=mask_g[:, None] & recorded[None, :], other=-float("inf"))
    _, high = interval(
        log_mass, weight[:, None], variance[None, :], residual[None, :], size[None, :], LOGIT, SPREAD
    )
    high = tl.where((exists & ~listed)[None, :], high, -float("inf"))
    top = tl.max(high, 1)
    safe = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    partial = log_sum(safe, tl.sum(tl.exp(high - safe[:, None]), 1))
    tl.store(partial_ptr + row * stride_p_b + (head * G + off_g) * stride_p_h + pid_c, partial, mask=mask_g)


@triton.jit
def bound_kernel(
    partial_ptr,
    longest_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    block_table_ptr,
    seq_lens_ptr,
    low_ptr,
    upper_ptr,
    share_ptr,
    error_ptr,
    stride_p_b,
    stride_p_h,
    stride_l_b,
    stride_l_h,
    stride_s_b,
    stride_q_b,
    stride_q_h,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_t_b,
    stride_o_b,
    stride_u_b,
    stride_c_b,
    scale,
    max_pages,
    per_block,
    kept_error,
    output_error,
    P: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    LOGIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """low and upper of a group's heads, and the group's share and output error."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P)
    pages = (length + P - 1) // P
    chunks = (pages + CHUNK - 1) // CHUNK
    off_g = tl.arange(0, BLOCK_G)
    mask_g = off_g < G
    off_d = tl.arange(0, BLOCK_D)
    q_head = head * G + off_g

    # The newest page's longest key, from its keys.
    newest = tl.maximum(pages - 1, 0)
    token = newest * P + tl.arange(0, P)
    entry = block_table_ptr + row * stride_t_b + newest // per_block
    block = tl.load(entry, mask=pages > 0, other=0).to(tl.int64)
    place = (newest % per_block).to(tl.int64) * P + tl.arange(0, P)
    key_at = k_ptr + block * stride_k_b + head * stride_k_h + place[:, None] * stride_k_t + off_d[None, :]
    keys = tl.load(key_at, mask=(token < length)[:, None] & (off_d < D)[None, :], other=0.0)
    longest = tl.max(norm(keys), 0)

    best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK_G,), tl.float32)
    for c in range(0, chunks, BLOCK_C):
        off_c = c + tl.arange(0, BLOCK_C)
        mask_c = off_c < chunks
        reach = tl.load(longest_ptr + row * stride_l_b + head * stride_l_h + off_c, mask=mask_c, other=0.0)
        longest = tl.maximum(longest, tl.max(reach, 0))
        # [BLOCK_G, BLOCK_C]
        at = partial_ptr + row * stride_p_b + q_head[:, None] * stride_p_h + off_c[None, :]
        x = tl.load(at, mask=mask_g[:, None] & mask_c[None, :], other=-float("inf"))
        new = tl.maximum(best, tl.max(x, 1))
        safe = tl.where(tl.abs(new) < float("inf"), new, 0.0)
        mass = mass * tl.exp(tl.where(mass == 0.0, 0.0, best - safe)) + tl.sum(tl.exp(x - safe[:, None]), 1)
        best = tl.where(new == float("inf"), 0.0, new)
    upper = log_sum(best, mass)
    whole = upper == -float("inf")
    end = tl.where(whole, 0.0, upper)
    end += (pages.to(tl.float32) * (1.0 / 64) + 512.0) * _UNIT + _ADDITION * tl.abs(end)

    q_ptr += row * stride_q_b + head * G * stride_q_h
    weight = query_weight(q_ptr, stride_q_h, scale, G, D, BLOCK_G, BLOCK_D)
    lse = tl.load(lse_ptr + row * stride_s_b + q_head, mask=mask_g, other=0.0)
    finite = tl.abs(lse) < float("inf")
    lse = tl.where(finite, lse, 0.0)
    error = LOGIT * weight * longest + kept_error + _ADDITION * tl.abs(lse)
    low = tl.where(finite, lse - error, float("nan"))
    # The roundings of the difference, of exp and of what follows.
    x = end - low + _ADDITION * (tl.abs(end) + tl.abs(low)) + 2.0**-16
    lost = 1.0 / (1.0 + tl.exp(-x)) * (1.0 + 2.0**-20) + 2.0**-22
    lost = tl.where(lost == lost, tl.minimum(lost, 1.0), 1.0)
    # Logits that are off by y / 2 move the weights, and so the output, by at most exp(y) - 1 <= y + y^2
    # for y < 1, and by at most 2.
    moved = tl.where(error < 0.5, 2.0 * error, 1.0)
    moved += moved * moved + output_error
    counts = mask_g & ~whole
    lost_most = tl.max(tl.where(counts, lost, 0.0), 0)
    error_most = tl.max(tl.where(counts, 2.0 * lost + moved, 0.0), 0) * (1.0 + 2.0**-20)
    out = row * stride_c_b + head
    tl.store(share_ptr + out, 1.0 - lost_most)
    tl.store(error_ptr + out, error_most)
    tl.store(low_ptr + row * stride_o_b + q_head, low, mask=mask_g)
    tl.store(upper_ptr + row * stride_u_b + q_head, tl.where(whole, upper, end), mask=mask_g)


def certificate_constants(fmt, head_dim: int) -> dict[str, int | float]:
    """The constexprs that say where a record's numbers are and how much its logits round."""
    at = fmt.layout(head_dim)
    mean, vectors = size_factors(fmt, head_dim)
    return {
        "P": fmt.page,
        "R": fmt.rank,
        "D": head_dim,
        "VARIANCE_AT": at.variance,
        "NORM_AT": at.residual_norm,
        "MEAN_SCALE_AT": at.mean_scale,
        "VECTORS_AT": at.vector_scales,
        "MEAN_FACTOR": mean,
        "VECTOR_FACTOR": vectors,
        "LOGIT": logit_rounding(head_dim, fmt.rank),
        "SPREAD": spread_rounding(head_dim),
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
    }


def certify(
    q: Tensor,
    k_cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt,
    log_mass: Tensor,
    page_ids: Tensor,
    counts: Tensor,
    lse: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns share and output error [B, Hkv], low and upper [B, Hq], float32.

    Args:
        q: [B, Hq, D] in the cache's dtype.
        k_cache: [num_blocks, Hkv, block, D]; of it the newest page is read.
        records: [num_blocks, Hkv, block / P, record bytes] uint8.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32.
        fmt: SummaryFormat of the records.
        log_mass: [B, Hq, N] float32, of `score.score`: the roundings are those of its arithmetic.
        page_ids: [B, Hkv, M] int32, ascending, the newest page among them.
        counts: [B, Hkv] int32.
        lse: [B, Hq] float32, over listed pages.
        scale: of the logits.
    """
    B, Hq, D = q.shape
    Hkv, per_block = records.shape[1], records.shape[2]
    G, N, M = Hq // Hkv, log_mass.shape[2], page_ids.shape[2]
    chunks = triton.cdiv(N, CHUNK)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    partial, longest = floats(B, Hq, chunks), floats(B, Hkv, chunks)
    share, error, low, upper = floats(B, Hkv), floats(B, Hkv), floats(B, Hq), floats(B, Hq)
    constants = certificate_constants(fmt, D)
    unread_kernel[(chunks, Hkv, B)](
        log_mass,
        q,
        records.view(torch.int16),
        block_table,
        seq_lens,
        page_ids,
        counts,
        partial,
        longest,
        *log_mass.stride()[:2],
        *q.stride()[:2],
        *records.stride()[:3],
        block_table.stride(0),
        *page_ids.stride()[:2],
        counts.stride(0),
        *partial.stride()[:2],
        *longest.stride()[:2],
        scale,
        N,
        per_block,
        **constants,
        G=G,
        STEPS=M.bit_length(),
        CHUNK=CHUNK,
        BLOCK_G=triton.next_power_of_2(G),
        num_warps=4,
    )
    bound_kernel[(Hkv, B)](
        partial,
        longest,
        lse,
        q,
        k_cache,
        block_table,
        seq_lens,
        low,
        upper,
        share,
        error,
        *partial.stride()[:2],
        *longest.stride()[:2],
        lse.stride(0),
        *q.stride()[:2],
        *k_cache.stride()[:3],
        block_table.stride(0),
        low.stride(0),
        upper.stride(0),
        share.stride(0),
        scale,
        N,
        per_block,
        kept_rounding(M * fmt.page),
        output_rounding(M * fmt.page, q.dtype),
        P=fmt.page,
        D=D,
        G=G,
        LOGIT=constants["LOGIT"],
        CHUNK=CHUNK,
        BLOCK_C=128,
        BLOCK_G=triton.next_power_of_2(G),
        BLOCK_D=constants["BLOCK_D"],
        num_warps=4,
    )
    return share, error, low, upper
