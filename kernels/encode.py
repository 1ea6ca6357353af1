"""Device helpers: a page's keys in registers, and the parts of its record: the arithmetic of `locks.format.encode`.

A page is [BLOCK_N, E, P, 8]. Each half of the D axis, padded to a power of two, is 8 parts of J elements, which are
the last axis; E = 2 J holds the first half's elements of a part and then the second half's. So what a rotation mixes
and what shares a byte of 4-bit codes lies mostly along E, within one lane.
"""

import triton
import triton.language as tl

from locks.format import BF16_MAX

_BF16_MAX = tl.constexpr(BF16_MAX)


@triton.jit
def d_axis(D: tl.constexpr, E: tl.constexpr):
    """Elements of the D axis that a page holds, int32 [E, 8], and which of them exist."""
    J: tl.constexpr = E // 2
    off_e = tl.arange(0, E)[:, None]
    within = tl.arange(0, 8)[None, :] * J + off_e % J
    return (off_e // J) * (D // 2) + within, within < D // 2


@triton.jit
def load_half(at, mask_n, D: tl.constexpr, J: tl.constexpr):
    """D / 2 elements of the keys at pointers [BLOCK_N, P], [BLOCK_N, P, 8, J] float32.

    Loaded as rows of 8 J, the 8 lanes that read a row's run of memory, of 4 tokens at once, are those that compute
    with it.
    """
    off_d = tl.arange(0, 8 * J)[None, None, :]
    mask = mask_n[:, None, None] & (off_d < D // 2)
    rows = tl.load(at[:, :, None] + off_d, mask=mask, other=0.0).to(tl.float32)
    return tl.reshape(rows, (rows.shape[0], rows.shape[1], 8, J))


@triton.jit
def load_pages(token_ptr, mask_n, D: tl.constexpr, E: tl.constexpr):
    """Keys at token_ptr [BLOCK_N, P], [BLOCK_N, E, P, 8] float32, 0 for padding and for masked pages."""
    first = load_half(token_ptr, mask_n, D, E // 2)
    second = load_half(token_ptr + D // 2, mask_n, D, E // 2)
    # [BLOCK_N, P, 8, J, 2]
    keys = tl.permute(tl.join(first, second), (0, 4, 3, 1, 2))
    return tl.reshape(keys, (keys.shape[0], E, keys.shape[3], 8))


@triton.jit
def butterfly(x, STEP: tl.constexpr):
    """a + b and a - b in place of a and b, the elements of x [BLOCK_N, E, ROWS, 8] that lie STEP apart along E."""
    N: tl.constexpr = x.shape[0]
    E: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = x.shape[2]
    x = tl.reshape(x, (N, E // (2 * STEP), 2, STEP, ROWS, 8))
    a, b = tl.split(tl.permute(x, (0, 1, 3, 4, 5, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 5, 2, 3, 4)), (N, E, ROWS, 8))


@triton.jit
def rotate(x, W: tl.constexpr):
    """x [BLOCK_N, E, ROWS, 8] as `locks.format.rotate` turns it, W = `locks.format.mixed(D)`."""
    J: tl.constexpr = x.shape[1] // 2
    x = butterfly(x, J)
    lane = tl.arange(0, 8)[None, None, None, :] + tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(4):
        if 2**bit < W:
            if 2**bit < J:
                x = butterfly(x, 2**bit)
            else:
                other = tl.gather(x, lane ^ (2**bit // J), 3)
                x = tl.where((lane & (2**bit // J)) == 0, x + other, other - x)
    return x * ((2 * W) ** -0.5)


@triton.jit
def inverse(x):
    """1 / x for x > 0, rounded to nearest, and 0 for x = 0."""
    return tl.where(x > 0.0, tl.div_rn(1.0, tl.where(x > 0.0, x, 1.0)), 0.0)


@triton.jit
def to_codes(x, inverse_scale):
    """x times the inverse of its scale to the nearest integer, halves up."""
    return tl.floor(x * inverse_scale + 0.5)


@triton.jit
def low_bits(codes):
    """int32 whose low 22 bits are those of the whole numbers codes: one addition, where a conversion takes eight."""
    return (codes + 1.5 * 2.0**23).to(tl.int32, bitcast=True)


@triton.jit
def times_unit(x, unit, reciprocal):
    """x * unit, at most the largest bfloat16 and never an overflow on the way."""
    return tl.minimum(x, tl.minimum(reciprocal, 1.0) * _BF16_MAX) * unit


@triton.jit
def round_up_bf16(x):
    """Bits of the least bfloat16 not below x >= 0, at most the largest finite one."""
    return (tl.minimum(x, _BF16_MAX).to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def stored_scale(scale, unit, reciprocal):
    """The bits that a record keeps of a scale of normalised keys, and the scale that they stand for."""
    bits = round_up_bf16(times_unit(scale, unit, reciprocal))
    return bits, (bits << 16).to(tl.float32, bitcast=True) * reciprocal


@triton.jit
def store_vector(rec_ptr, rec16_ptr, base, codes, mask_n, D: tl.constexpr, BITS: tl.constexpr):
    """Writes a D-wide vector: codes [BLOCK_N, E, 8], `low_bits`, at byte offsets base [BLOCK_N]."""
    N: tl.constexpr = codes.shape[0]
    E: tl.constexpr = codes.shape[1]
    off_d, mask_d = d_axis(D, E)
    if BITS == 4:
        # [BLOCK_N, 2, J, 8]
        halves = tl.reshape(codes & 15, (N, 2, E // 2, 8)) << (4 * tl.arange(0, 2))[None, :, None, None]
        within = tl.arange(0, 8)[None, :] * (E // 2) + tl.arange(0, E // 2)[:, None]
        mask = mask_n[:, None, None] & (within < D // 2)[None, :, :]
        tl.store(rec_ptr + base[:, None, None] + within[None, :, :], tl.sum(halves, 1).to(tl.int8), mask=mask)
    else:
        mask = mask_n[:, None, None] & mask_d[None, :, :]
        if BITS == 8:
            tl.store(rec_ptr + base[:, None, None] + off_d[None, :, :], codes.to(tl.int8), mask=mask)
        else:
            at = base[:, None, None] // 2 + off_d[None, :, :]
            tl.store(rec16_ptr + at, codes.to(tl.int16), mask=mask)


@triton.jit
def store_coef(rec_ptr, rec16_ptr, base, codes, r, mask_n, R: tl.constexpr, BITS: tl.constexpr):
    """Writes rank r's coefficients: codes [BLOCK_N, P], `low_bits`; a token's R codes lie together."""
    N: tl.constexpr = codes.shape[0]
    P: tl.constexpr = codes.shape[1]
    if BITS == 4:
        # [BLOCK_N, 2, P / 2]
        halves = tl.reshape(codes & 15, (N, 2, P // 2)) << (4 * tl.arange(0, 2))[None, :, None]
        at = base[:, None] + tl.arange(0, P // 2)[None, :] * R + r
        tl.store(rec_ptr + at, tl.sum(halves, 1).to(tl.int8), mask=mask_n[:, None])
    else:
        at = tl.arange(0, P)[None, :] * R + r
        if BITS == 8:
            tl.store(rec_ptr + base[:, None] + at, codes.to(tl.int8), mask=mask_n[:, None])
        else:
            tl.store(rec16_ptr + base[:, None] // 2 + at, codes.to(tl.int16), mask=mask_n[:, None])
