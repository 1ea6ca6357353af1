"""Device helpers: reading a packed record.

Mean and basis are kept rotated (`locks.format.rotate`), so the query is rotated before it meets them. Records come as
two views of one storage: `rec_ptr` int8 and `rec16_ptr` int16, with one set of byte offsets. A vector of codes is read
in two halves, because 4-bit codes hold the first half of the axis in low nibbles and the second half in high nibbles.
"""

import triton
import triton.language as tl

from .eigh import power_of_two


@triton.jit
def load_codes(
    rec_ptr,
    rec16_ptr,
    base,
    index,
    stride,
    mask,
    LENGTH: tl.constexpr,
    SECOND: tl.constexpr,
    BITS: tl.constexpr,
):
    """One half of a vector of LENGTH signed codes as int32, 0 where masked.

    Args:
        rec_ptr: int8 records.
        rec16_ptr: int16 view of the same storage.
        base: int64 byte offset of the vector's first code, broadcast against index.
        index: int32 element of the half, 0 .. LENGTH / 2 - 1.
        stride: codes from one element to the next (bytes at 4 bits).
        mask: which elements exist.
        LENGTH: codes of the whole vector.
        SECOND: 0 for the first half, 1 for the second.
        BITS: 4, 8 or 16.
    """
    if BITS == 4:
        pair = tl.load(rec_ptr + base + index * stride, mask=mask, other=0).to(tl.int32)
        code = pair >> 4 if SECOND == 1 else (pair << 28) >> 28
    elif BITS == 8:
        at = base + (index + SECOND * (LENGTH // 2)) * stride
        code = tl.load(rec_ptr + at, mask=mask, other=0).to(tl.int32)
    else:
        at = base // 2 + (index + SECOND * (LENGTH // 2)) * stride
        code = tl.load(rec16_ptr + at, mask=mask, other=0).to(tl.int32)
    return code


@triton.jit
def load_bf16(rec16_ptr, base, mask):
    """The bfloat16 at byte offset base as float32, 0 where masked."""
    bits = tl.load(rec16_ptr + base // 2, mask=mask, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def hadamard(x, AXIS: tl.constexpr, BLOCK: tl.constexpr):
    """x float32, every BLOCK elements (a power of two, at most 32) of its last axis, AXIS, times a Hadamard matrix."""
    lane = tl.arange(0, x.shape[AXIS])
    lane = lane[None, :] if AXIS == 1 else lane[None, None, :]
    lane += tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(5):
        if 2**bit < BLOCK:
            other = tl.gather(x, lane ^ 2**bit, AXIS)
            x = tl.where((lane & 2**bit) == 0, x + other, other - x)
    return x


@triton.jit
def digits(x):
    """x [BLOCK_G, BLOCK_H] float32 whole numbers below 2**23 in size as three int8: x = 65536 a + 256 b + c."""
    x = x.to(tl.int32)
    c = ((x + 128) & 255) - 128
    x = (x - c) >> 8
    b = ((x + 128) & 255) - 128
    return ((x - b) >> 8).to(tl.int8), b.to(tl.int8), c.to(tl.int8)


@triton.jit
def dot_codes(q, codes, BITS: tl.constexpr):
    """q, `digits` of [BLOCK_G, BLOCK_H], times codes [BLOCK_N, BLOCK_H], transposed: [BLOCK_G, BLOCK_N] float32.

    Codes of up to 8 bits are summed exactly, on the integer matrix unit.
    """
    a, b, c = q
    if BITS <= 8:
        turned = tl.trans(codes.to(tl.int8))
        high = tl.dot(a, turned, out_dtype=tl.int32)
        middle = tl.dot(b, turned, out_dtype=tl.int32)
        low = tl.dot(c, turned, out_dtype=tl.int32)
        return high.to(tl.float32) * 65536.0 + (middle.to(tl.float32) * 256.0 + low.to(tl.float32))
    whole = (a.to(tl.int32) * 65536 + b.to(tl.int32) * 256 + c.to(tl.int32)).to(tl.float32)
    return tl.dot(whole, tl.trans(codes.to(tl.float32)), input_precision="ieee")


@triton.jit
def page_bases(block_table_ptr, row, pages, mask, stride_t_b, stride_r_b, stride_r_p, per_block):
    """int64 byte offsets of the pages' records, [BLOCK_N]; `row` is the batch row, `per_block` pages a block."""
    block = tl.load(block_table_ptr + row * stride_t_b + pages // per_block, mask=mask, other=0).to(tl.int64)
    return block * stride_r_b + (pages % per_block).to(tl.int64) * stride_r_p


@triton.jit
def page_logits(
    q_first,
    q_second,
    q_unit,
    rec_ptr,
    rec16_ptr,
    base,
    mask_n,
    scale,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    MEAN_BITS: tl.constexpr,
    BASIS_BITS: tl.constexpr,
    COEF_BITS: tl.constexpr,
    BASIS_AT: tl.constexpr,
    COEF_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Logits of a tile of pages, in two halves of the tokens, [BLOCK_G, BLOCK_N, P / 2] each, and variances [BLOCK_N].

    logit[t] = scale * (q . mean + sum_r coef[t, r] (q . basis[r])).
    """
    H: tl.constexpr = D // 2
    # [BLOCK_G, 1]
    weight = (q_unit * scale)[:, None]
    off_h = tl.arange(0, BLOCK_H)
    off_t = tl.arange(0, P // 2)
    # [BLOCK_N, BLOCK_H]
    mask_h = mask_n[:, None] & (off_h < H)[None, :]
    # [BLOCK_N, P / 2]
    mask_t = mask_n[:, None] & (off_t >= 0)[None, :]

    first = load_codes(rec_ptr, rec16_ptr, base[:, None], off_h[None, :], 1, mask_h, D, 0, MEAN_BITS)
    second = load_codes(rec_ptr, rec16_ptr, base[:, None], off_h[None, :], 1, mask_h, D, 1, MEAN_BITS)
    # [BLOCK_G, BLOCK_N]
    center = dot_codes(q_first, first, MEAN_BITS) + dot_codes(q_second, second, MEAN_BITS)
    center = center * load_bf16(rec16_ptr, base + SCALES_AT + 2 * R, mask_n)[None, :] * weight
    variance = load_bf16(rec16_ptr, base + SCALES_AT + 2 * R + 2, mask_n)

    # [BLOCK_G, BLOCK_N, P / 2]
    logits_first = center[:, :, None] + tl.zeros((P // 2,), tl.float32)[None, None, :]
    logits_second = logits_first
    for r in tl.static_range(R):
        at = base + BASIS_AT + r * (D * BASIS_BITS // 8)
        first = load_codes(rec_ptr, rec16_ptr, at[:, None], off_h[None, :], 1, mask_h, D, 0, BASIS_BITS)
        second = load_codes(rec_ptr, rec16_ptr, at[:, None], off_h[None, :], 1, mask_h, D, 1, BASIS_BITS)
        # [BLOCK_G, BLOCK_N]
        along = dot_codes(q_first, first, BASIS_BITS) + dot_codes(q_second, second, BASIS_BITS)
        along = along * load_bf16(rec16_ptr, base + SCALES_AT + 2 * r, mask_n)[None, :] * weight
        # One code is at least a byte of the stride over tokens.
        at = base + COEF_AT + r * (2 if COEF_BITS == 16 else 1)
        first = load_codes(rec_ptr, rec16_ptr, at[:, None], off_t[None, :], R, mask_t, P, 0, COEF_BITS)
        second = load_codes(rec_ptr, rec16_ptr, at[:, None], off_t[None, :], R, mask_t, P, 1, COEF_BITS)
        logits_first += along[:, :, None] * first.to(tl.float32)[None, :, :]
        logits_second += along[:, :, None] * second.to(tl.float32)[None, :, :]
    return logits_first, logits_second, variance


@triton.jit
def load_query(
    q_ptr,
    row,
    head,
    stride_q_b,
    stride_q_h,
    G: tl.constexpr,
    D: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The group's rotated queries: `digits` of two halves of D, their unit [BLOCK_G], and |q|^2 [BLOCK_G].

    Padding is 0; a query that is not finite has a unit of nan.
    """
    off_g = tl.arange(0, BLOCK_G)
    off_h = tl.arange(0, BLOCK_H)
    mask = (off_g < G)[:, None] & (off_h < D // 2)[None, :]
    at = q_ptr + row * stride_q_b + (head * G + off_g)[:, None] * stride_q_h + off_h[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + D // 2, mask=mask, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    norm = tl.sum(a * a + b * b, 1)
    first = hadamard(a + b, 1, MIXED) * ((2 * MIXED) ** -0.5)
    second = hadamard(a - b, 1, MIXED) * ((2 * MIXED) ** -0.5)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    unit, reciprocal = power_of_two(largest)
    finite = norm < float("inf")
    # Below 2**22 in size.
    reciprocal = tl.where(finite, reciprocal * 2.0**21, 0.0)[:, None]
    unit = tl.where(finite, unit * 2.0**-21, float("nan"))
    return digits(tl.floor(first * reciprocal + 0.5)), digits(tl.floor(second * reciprocal + 0.5)), unit, norm
