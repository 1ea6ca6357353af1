"""Device helpers: the left singular vectors of small matrices, by Gram-Schmidt and one-sided Jacobi, in float32.

`triangular` turns the P rows of a page into P columns of P numbers with the same inner products between rows, without
squaring the singular values as a Gram matrix would; `jacobi` rotates those columns until they are orthogonal, when
they are the left singular vectors times the singular values (Golub and Van Loan, Matrix Computations, 8.6). Taking the
longest remaining row first leaves columns that are nearly sorted and nearly orthogonal, which saves sweeps (Drmac and
Veselic, New fast and accurate Jacobi SVD algorithm, 2008).

A page is held as [BLOCK_N, E, P, 8]: a warp's lanes lie along 4 tokens and 8 parts of the D axis, so a sum over either
costs few shuffles.
"""

import triton
import triton.language as tl

# The slowest pages known take 5 at 16 tokens and 7 at 64.
_MAX_SWEEPS = tl.constexpr(12)
# A pair is orthogonal when its cosine is below this; the sweep that finds so still rotates, and squares what is left:
# of 2^-10 .. 2^-4, the largest that loses less than 1e-4 of the optimum on every page tried.
_COSINE = tl.constexpr(2.0**-6)
# Squared lengths that are rounding of a matrix whose largest entry is about 1: of a column, and of a row to divide by.
_NULL = tl.constexpr(2.0**-40)
_NULL_ROW = tl.constexpr(2.0**-60)


@triton.jit
def power_of_two(x):
    """The power of two not above x >= 0, kept within 2^-100 .. 2^100, and its reciprocal."""
    kept = tl.minimum(tl.maximum(x, 2.0**-100), 2.0**100)
    exponent = kept.to(tl.int32, bitcast=True) & 0x7F800000
    # The biased exponent of 2^-e is 254 minus that of 2^e.
    reciprocal = (254 << 23) - exponent
    return exponent.to(tl.float32, bitcast=True), reciprocal.to(tl.float32, bitcast=True)


@triton.jit
def inverse_sqrt(x):
    """1 / sqrt(x) for a normal x > 0, to the last bit or two: the device's own is good to 22 bits."""
    y = tl.rsqrt(x)
    return y * (1.5 - 0.5 * x * y * y)


@triton.jit
def sum_d(x):
    """Sum over the D axis of x [BLOCK_N, E, ROWS, 8], [BLOCK_N, ROWS]."""
    return tl.sum(tl.sum(x, 1), 2)


@triton.jit
def triangular(x, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """left and right [BLOCK_N, P, P / 2]: [left right] [left right]^T = x x^T for centred x [BLOCK_N, E, P, 8].

    Modified Gram-Schmidt on the rows, the longest remaining one first. Rows of a centred page are dependent, so P - 1
    steps are all. The largest entry of x is 0 or about 1.
    """
    off_p = tl.arange(0, P)[None, :]
    # [BLOCK_N, P, P / 2]
    col = tl.arange(0, P // 2)[None, None, :] + tl.zeros((BLOCK_N, P, P // 2), tl.int32)
    left = tl.zeros((BLOCK_N, P, P // 2), tl.float32)
    right = left
    for k in range(P - 1):
        # [BLOCK_N, P]
        square = sum_d(x * x)
        longest = tl.max(square, 1)
        # As numbers: a product with them is cheaper than a choice.
        pivot = (off_p == tl.argmax(square, 1)[:, None]).to(tl.float32)
        scale = tl.where(longest > _NULL_ROW, inverse_sqrt(tl.maximum(longest, _NULL_ROW)), 0.0)
        # [BLOCK_N, E, 8]
        q = tl.sum(x * pivot[:, None, :, None], 2) * scale[:, None, None]
        # [BLOCK_N, P]
        along = sum_d(x * q[:, :, None, :])
        x -= along[:, None, :, None] * q[:, :, None, :]
        left = tl.where(col == k, along[:, :, None], left)
        right = tl.where(col == k - P // 2, along[:, :, None], right)
    return left, right


@triton.jit
def jacobi(left, right, BLOCK_N: tl.constexpr, P: tl.constexpr):
    """The columns of left and right [BLOCK_N, P, P / 2] rotated until orthogonal, in no order.

    Column i of left and column i of right are a pair, and the P / 2 pairs are rotated at once; then the columns move
    on as in a round robin, so P - 1 rounds, a sweep, meet every pair. A matrix is done after a sweep that met no
    cosine above _COSINE, where a squared length counts as at least _NULL. A done matrix changes no more: its result
    does not depend on the others of the tile.
    """
    H: tl.constexpr = P // 2
    # [BLOCK_N, P, P / 2]
    col = tl.arange(0, H)[None, None, :] + tl.zeros((BLOCK_N, P, H), tl.int32)
    before = tl.maximum(col - 1, 0)
    behind = tl.minimum(col + 1, H - 1)
    # [BLOCK_N]
    active = tl.full((BLOCK_N,), 1, tl.int32)
    busy = 1
    sweep = 0
    while (sweep < _MAX_SWEEPS) & (busy > 0):
        # [BLOCK_N, P / 2]
        met = tl.zeros((BLOCK_N, H), tl.int32)
        for _ in range(P - 1):
            alpha = tl.sum(left * left, 1)
            beta = tl.sum(right * right, 1)
            gamma = tl.sum(left * right, 1)
            limit = tl.maximum(alpha, _NULL) * tl.maximum(beta, _NULL) * (_COSINE * _COSINE)
            met |= (gamma * gamma > limit).to(tl.int32)
            # tan(2 theta) = 2 gamma / gap: the half angle by way of cos(2 theta), in two inverse square roots. Where
            # both are 0 there is nothing to turn.
            gap = beta - alpha
            square = gap * gap + 4.0 * gamma * gamma
            turns = square > 2.0**-100
            if BLOCK_N > 1:
                turns = turns & (active[:, None] > 0)
            scale = tl.rsqrt(tl.maximum(square, 2.0**-100))
            half = tl.where(turns, 0.5 + 0.5 * tl.abs(gap) * scale, 1.0)
            scale = tl.where(turns, tl.where(gap < 0.0, -scale, scale), 0.0)
            secant = tl.rsqrt(half)
            cosine = (half * secant)[:, None, :]
            sine = (gamma * scale * secant)[:, None, :]
            turned = cosine * left - sine * right
            right = sine * left + cosine * right
            # The first column of left stays; the others go round: right, from its first on, is left's second.
            shifted = tl.gather(tl.where(col == 0, right, turned), before, 2)
            left = tl.where(col == 0, turned, shifted)
            right = tl.where(col == H - 1, turned, tl.gather(right, behind, 2))
        active = tl.where(tl.max(met, 1) > 0, active, 0)
        busy = tl.max(active, 0)
        sweep += 1
    return left, right


@triton.jit
def length_keys(columns, FIRST: tl.constexpr):
    """int32 keys of the columns [BLOCK_N, P, COLS], numbered from FIRST: in the order of their lengths, no two equal.

    A key is a squared length to 17 bits, then what is left to 63 of the column's number.
    """
    square = tl.sum(columns * columns, 1)
    number = FIRST + tl.arange(0, columns.shape[2])[None, :]
    return (square.to(tl.int32, bitcast=True) & -64) | (63 - number)


@triton.jit
def square_of_key(key):
    """The squared length that a key stands for."""
    return (key & -64).to(tl.float32, bitcast=True)


@triton.jit
def take_longest(left, right, left_keys, right_keys):
    """The longest column [BLOCK_N, P], its key [BLOCK_N], and both sides' keys without it."""
    best = tl.max(tl.maximum(left_keys, right_keys), 1)
    here_left = left_keys == best[:, None]
    here_right = right_keys == best[:, None]
    column = left * here_left.to(tl.float32)[:, None, :] + right * here_right.to(tl.float32)[:, None, :]
    return tl.sum(column, 2), best, tl.where(here_left, -1, left_keys), tl.where(here_right, -1, right_keys)
