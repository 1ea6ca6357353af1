"""Device helpers: chunks of keys, and the packed record of pages whose directions are known.

A chunk of the D axis is W elements of its first half and the W that lie half an axis later: 4-bit codes pair
them in one byte, and a rotation mixes them with each other and with nothing else. The arithmetic and the bytes are
those of `locks.format.encode`.
"""

import triton
import triton.language as tl

from locks.format import BF16_MAX, ROUNDING

from .records import hadamard

_BF16_MAX = tl.constexpr(BF16_MAX)
_ROUNDING = tl.constexpr(ROUNDING)


@triton.jit
def chunk_axis(c, D: tl.constexpr, W: tl.constexpr):
    """Elements of chunk c of the D axis, [2 W]."""
    lane = tl.arange(0, 2 * W)
    return (lane // W) * (D // 2) + c * W + lane % W


@triton.jit
def load_keys(token_ptr, mask_n, c, D: tl.constexpr, W: tl.constexpr):
    """Chunk c of the keys at token_ptr [BLOCK_N, P, 1], [BLOCK_N, P, 2 W] float32, 0 for masked pages."""
    at = token_ptr + chunk_axis(c, D, W)[None, None, :]
    return tl.load(at, mask=mask_n[:, None, None], other=0.0).to(tl.float32)


@triton.jit
def rotate(x, W: tl.constexpr):
    """x [BLOCK_N, ROWS, 2 W], a chunk of rows, rotated.

    What is short beside other rows is rotated after it was told apart from them, by the mean's subtraction or by
    `project`: a sum rounds at the size of its terms.
    """
    return hadamard(x, 2, 2 * W) * ((2 * W) ** -0.5)


@triton.jit
def project(turn, pick, x):
    """pick [BLOCK_N, R, P] times turn [BLOCK_N, P, P] times x [BLOCK_N, P, 2 W].

    Right to left: turned rows are nearly orthogonal, and pick mixes hardly anything of a long one into a
    short one.
    """
    return tl.dot(pick, tl.dot(turn, x, input_precision="ieee"), input_precision="ieee")


@triton.jit
def page_mean(x, P: tl.constexpr):
    """Mean over the tokens of x [BLOCK_N, P, 2 W], [BLOCK_N, 2 W]."""
    return tl.sum(x, 1) * (1.0 / P)


@triton.jit
def divide(x, y):
    """x / y rounded to nearest, 0 where y is 0."""
    return tl.where(y > 0.0, tl.div_rn(x, tl.where(y > 0.0, y, 1.0)), 0.0)


@triton.jit
def to_codes(x, scale):
    """x / scale to the nearest integer, halves up."""
    return tl.floor(divide(x, scale) + 0.5)


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
def store_vectors(
    rec_ptr,
    rec16_ptr,
    base,
    codes,
    c,
    mask_n,
    D: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes chunk c of D-wide vectors: codes [BLOCK_N, ROWS, 2 W] at byte offsets base [BLOCK_N, ROWS]."""
    off_d = chunk_axis(c, D, W)[None, None, :]
    if BITS == 4:
        # [BLOCK_N, ROWS, 2, W]
        halves = tl.reshape(codes & 15, (BLOCK_N, ROWS, 2, W))
        packed = tl.sum(halves << (4 * tl.arange(0, 2))[None, None, :, None], 2)
        at = base[:, :, None] + c * W + tl.arange(0, W)[None, None, :]
        tl.store(rec_ptr + at, packed.to(tl.int8), mask=mask_n[:, None, None])
    elif BITS == 8:
        tl.store(rec_ptr + base[:, :, None] + off_d, codes.to(tl.int8), mask=mask_n[:, None, None])
    else:
        tl.store(rec16_ptr + base[:, :, None] // 2 + off_d, codes.to(tl.int16), mask=mask_n[:, None, None])


@triton.jit
def store_coefs(
    rec_ptr,
    rec16_ptr,
    base,
    codes,
    mask_n,
    P: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes coefficient codes [BLOCK_N, P, R] int32 at byte offsets base [BLOCK_N], token after token."""
    off_r = tl.arange(0, R)[None, None, :]
    off_t = tl.arange(0, P)[None, :, None]
    mask = mask_n[:, None, None]
    at = base[:, None, None]
    if BITS == 4:
        # [BLOCK_N, 2, P / 2, R]
        halves = tl.reshape(codes & 15, (BLOCK_N, 2, P // 2, R))
        packed = tl.sum(halves << (4 * tl.arange(0, 2))[None, :, None, None], 1)
        off_t = tl.arange(0, P // 2)[None, :, None]
        tl.store(rec_ptr + at + off_t * R + off_r, packed.to(tl.int8), mask=mask)
    elif BITS == 8:
        tl.store(rec_ptr + at + off_t * R + off_r, codes.to(tl.int8), mask=mask)
    else:
        tl.store(rec16_ptr + at // 2 + off_t * R + off_r, codes.to(tl.int16), mask=mask)


@triton.jit
def write_record(
    rec_ptr,
    rec16_ptr,
    rec_base,
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
):
    """Quantises, packs and writes the records of `live` pages; those outside `mask_n` have a non-finite key.

    Args:
        rec_ptr: int8 records.
        rec16_ptr: int16 view of the same storage.
        rec_base: [BLOCK_N] int64 byte offset of each record.
        live: [BLOCK_N] pages to write.
        token_ptr: [BLOCK_N, P, 1] pointers to the pages' keys.
        mask_n: [BLOCK_N] pages to summarise; live ones that are masked get zero codes and the mark.
        unit: [BLOCK_N] the power of two that keys are divided by.
        reciprocal: [BLOCK_N] 1 / unit.
        turn: [BLOCK_N, P, P] as `project` takes it.
        pick: [BLOCK_N, R, P] as `project` takes it.
        norm: [BLOCK_N, R] length of each projected row, 0 for one that is no direction.
        peak: [BLOCK_N, R] largest entry of each projected row, rotated.
        mean_peak: [BLOCK_N] largest entry of the mean, rotated, in normalised keys.
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
        W: half of a chunk of the D axis, `locks.format.mixed(D)`.
        BLOCK_N: pages of the tile.
    """
    off_r = tl.arange(0, R)
    mean_bits, mean_scale = stored_scale(tl.div_rn(mean_peak, 2.0 ** (MEAN_BITS - 1) - 1.0), unit, reciprocal)
    # [BLOCK_N, R]
    step = tl.div_rn(divide(peak, norm), 2.0 ** (BASIS_BITS - 1) - 1.0)
    vector_at = rec_base[:, None] + BASIS_AT + off_r[None, :] * (D * BASIS_BITS // 8)

    # Basis codes, their products with each other and with what the mean leaves of the keys.
    inner = tl.zeros((BLOCK_N, R, R), tl.float32)
    along = tl.zeros((BLOCK_N, P, R), tl.float32)
    for c in range(D // (2 * W)):
        keys = load_keys(token_ptr, mask_n, c, D, W) * reciprocal[:, None, None]
        mean = page_mean(keys, P)[:, None, :]
        x = keys - mean
        # [BLOCK_N, 1, 2 W]
        mean = rotate(mean, W)
        mean_codes = to_codes(mean, mean_scale[:, None, None])
        store_vectors(
            rec_ptr,
            rec16_ptr,
            rec_base[:, None],
            mean_codes.to(tl.int32),
            c,
            live,
            D,
            W,
            MEAN_BITS,
            BLOCK_N,
            1,
        )
        # [BLOCK_N, R, 2 W]
        basis = divide(rotate(project(turn, pick, x), W), norm[:, :, None])
        codes = to_codes(basis, step[:, :, None])
        store_vectors(
            rec_ptr, rec16_ptr, vector_at, codes.to(tl.int32), c, live, D, W, BASIS_BITS, BLOCK_N, R
        )
        left = rotate(x, W) + (mean - mean_codes * mean_scale[:, None, None])
        turned = tl.permute(codes, (0, 2, 1))
        inner = tl.dot(codes, turned, inner, input_precision="ieee")
        along = tl.dot(left, turned, along, input_precision="ieee")

    # Coefficients, one rank after the other: what a rank takes is subtracted from the later ones' products.
    coef_codes = tl.zeros((BLOCK_N, P, R), tl.float32)
    coefs = tl.zeros((BLOCK_N, P, R), tl.float32)
    vector_bits = tl.zeros((BLOCK_N, R), tl.int32)
    for r in tl.static_range(R):
        # [BLOCK_N, R], [BLOCK_N], [BLOCK_N, P]
        products = tl.sum(tl.where((off_r == r)[None, :, None], inner, 0.0), 1)
        square = tl.sum(tl.where((off_r == r)[None, :], products, 0.0), 1)
        fitted = divide(tl.sum(tl.where((off_r == r)[None, None, :], along, 0.0), 2), square[:, None])
        largest = tl.max(tl.abs(fitted), 1)
        bits, scale = stored_scale(tl.div_rn(largest, 2.0 ** (COEF_BITS - 1) - 1.0), unit, reciprocal)
        code = to_codes(fitted, scale[:, None])
        coef = code * scale[:, None]
        along -= coef[:, :, None] * products[:, None, :]
        here = (off_r == r)[None, None, :]
        coef_codes = tl.where(here, code[:, :, None], coef_codes)
        coefs = tl.where(here, coef[:, :, None], coefs)
        vector_bits = tl.where((off_r == r)[None, :], bits[:, None], vector_bits)
    store_coefs(
        rec_ptr, rec16_ptr, rec_base + COEF_AT, coef_codes.to(tl.int32), live, P, R, COEF_BITS, BLOCK_N
    )

    # Squared norms of the keys and of what the record leaves of them, [BLOCK_N, P].
    key_square = tl.zeros((BLOCK_N, P), tl.float32)
    left_square = tl.zeros((BLOCK_N, P), tl.float32)
    for c in range(D // (2 * W)):
        keys = load_keys(token_ptr, mask_n, c, D, W) * reciprocal[:, None, None]
        mean = page_mean(keys, P)[:, None, :]
        x = keys - mean
        basis = divide(rotate(project(turn, pick, x), W), norm[:, :, None])
        codes = to_codes(basis, step[:, :, None])
        mean = rotate(mean, W)
        mean -= to_codes(mean, mean_scale[:, None, None]) * mean_scale[:, None, None]
        left = rotate(x, W) + mean
        for r in tl.static_range(R):
            vector = tl.sum(tl.where((off_r == r)[None, :, None], codes, 0.0), 1)
            coef = tl.sum(tl.where((off_r == r)[None, None, :], coefs, 0.0), 2)
            left -= coef[:, :, None] * vector[:, None, :]
        key_square += tl.sum(keys * keys, 2)
        left_square += tl.sum(left * left, 2)
    variance = tl.sum(left_square, 1) * (1.0 / P) / D
    variance = times_unit(times_unit(variance, unit, reciprocal), unit, reciprocal)
    bound = tl.sqrt_rn(tl.max(left_square, 1)) + tl.sqrt_rn(tl.max(key_square, 1)) * _ROUNDING
    bound = times_unit(bound, unit, reciprocal)

    scales = rec16_ptr + (rec_base + SCALES_AT) // 2
    tl.store(scales[:, None] + off_r[None, :], vector_bits.to(tl.int16), mask=live[:, None])
    tl.store(scales + R, mean_bits.to(tl.int16), mask=live)
    tl.store(scales + R + 1, tl.where(mask_n, round_up_bf16(variance), 0x7F80).to(tl.int16), mask=live)
    tl.store(scales + R + 2, tl.where(mask_n, round_up_bf16(bound), 0x7F80).to(tl.int16), mask=live)
    pad = SCALES_AT + 2 * (3 + R) + tl.arange(0, 32)[None, :]
    zero = tl.zeros((BLOCK_N, 32), tl.int8)
    tl.store(rec_ptr + rec_base[:, None] + pad, zero, mask=live[:, None] & (pad < NBYTES))
