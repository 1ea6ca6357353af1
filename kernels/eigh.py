"""Device helpers: all eigenvectors of small symmetric matrices, by parallel cyclic Jacobi.

One step of a sweep takes the pairs (i, i ^ m) for one m: they are disjoint, so all their rotations are one
operation on whole tiles, and m = 1 .. P - 1 meets every pair once. A rotation is J = [[c, s], [-s, c]] on
rows and columns i and j = i ^ m, i < j, with t = s / c the smaller root of t^2 + t (a_jj - a_ii) / a_ij = 1
(Golub and Van Loan, Matrix Computations, 8.5).
"""

import triton
import triton.language as tl

# The slowest pages known take 11 (64 tokens, singular values that halve).
_MAX_SWEEPS = tl.constexpr(16)


@triton.jit
def power_of_two(x):
    """The power of two not above x >= 0, kept within 2^-100 .. 2^100, and its reciprocal."""
    kept = tl.minimum(tl.maximum(x, 2.0**-100), 2.0**100)
    exponent = kept.to(tl.int32, bitcast=True) & 0x7F800000
    # The biased exponent of 2^-e is 254 minus that of 2^e.
    reciprocal = (254 << 23) - exponent
    return exponent.to(tl.float32, bitcast=True), reciprocal.to(tl.float32, bitcast=True)


@triton.jit
def jacobi(
    A,
    TOLERANCE: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    P: tl.constexpr,
):
    """w [BLOCK_N, P], unordered, and U [BLOCK_N, P, P] of A = U diag(w) U^T.

    A matrix is done after a sweep that met no |a_ij| > TOLERANCE sqrt(a_ii a_jj), where a diagonal entry
    counts as at least FLOOR times the largest one; that sweep still rotated, so what it leaves is smaller by
    far. The criterion is relative to both entries, so a positive definite matrix whose rows differ by orders
    of magnitude keeps its small eigenvalues. A done matrix changes no more: its result does not depend on the
    others of the tile.
    """
    # [BLOCK_N, P], [BLOCK_N, P, P]
    index = tl.arange(0, P)[None, :] + tl.zeros((BLOCK_N, P), tl.int32)
    row = tl.arange(0, P)[None, :, None] + tl.zeros((BLOCK_N, P, P), tl.int32)
    col = tl.arange(0, P)[None, None, :] + tl.zeros((BLOCK_N, P, P), tl.int32)
    on_diagonal = row == col
    unit, reciprocal = power_of_two(tl.max(tl.sum(tl.where(on_diagonal, A, 0.0), 1), 1))
    A = A * reciprocal[:, None, None]
    U = tl.where(on_diagonal, 1.0, 0.0)
    # [BLOCK_N]
    active = tl.full((BLOCK_N,), 1, tl.int32)
    busy = 1
    sweep = 0
    while (sweep < _MAX_SWEEPS) & (busy > 0):
        # [BLOCK_N, P]
        worst = tl.zeros((BLOCK_N, P), tl.float32)
        for m in range(1, P):
            partner = index ^ m
            row_partner = row ^ m
            col_partner = col ^ m
            # [BLOCK_N, P], indexed by j: a_jj, the same of the partner, and their shared entry, of which both
            # must see one value, whatever rounding did to the symmetry.
            own = tl.sum(tl.where(on_diagonal, A, 0.0), 1)
            other = tl.gather(own, partner, 1)
            shared = tl.sum(tl.where(row == col_partner, A, 0.0), 1)
            shared = 0.5 * (shared + tl.gather(shared, partner, 1))
            geometric = tl.sqrt(tl.maximum(own, FLOOR)) * tl.sqrt(tl.maximum(other, FLOOR))
            worst = tl.maximum(worst, tl.abs(shared) / geometric)

            lower = index < partner
            gap = tl.where(lower, other - own, own - other)
            root = tl.abs(gap) + tl.sqrt(gap * gap + 4.0 * shared * shared)
            tangent = tl.where(gap < 0.0, -2.0, 2.0) * shared / tl.where(root > 0.0, root, 1.0)
            tangent = tl.where(active[:, None] > 0, tangent, 0.0)
            # Their rounding adds up in U, so these two are exact to half a unit.
            cosine = tl.div_rn(1.0, tl.sqrt_rn(1.0 + tangent * tangent))
            sine = tl.where(lower, -tangent, tangent) * cosine

            # [BLOCK_N, P, P]
            A = A * cosine[:, None, :] + tl.gather(A, col_partner, 2) * sine[:, None, :]
            A = A * cosine[:, :, None] + tl.gather(A, row_partner, 1) * sine[:, :, None]
            U = U * cosine[:, None, :] + tl.gather(U, col_partner, 2) * sine[:, None, :]
        active = tl.where(tl.max(worst, 1) > TOLERANCE, active, 0)
        busy = tl.max(active, 0)
        sweep += 1
    return tl.sum(tl.where(on_diagonal, A, 0.0), 1) * unit[:, None], U


@triton.jit
def orthogonalise(U):
    """The orthogonal matrix nearest to an almost orthogonal U [BLOCK_N, P, P]: one Newton-Schulz step."""
    square = tl.dot(tl.permute(U, (0, 2, 1)), U, input_precision="ieee")
    return 1.5 * U - 0.5 * tl.dot(U, square, input_precision="ieee")


@triton.jit
def descending(w, P: tl.constexpr):
    """How many entries of w [BLOCK_N, P] come before each one, largest first, ties to the lower index."""
    off_p = tl.arange(0, P)
    # [BLOCK_N, P, P]: does i come before j
    above = w[:, :, None] > w[:, None, :]
    tied = (w[:, :, None] == w[:, None, :]) & (off_p[:, None] < off_p[None, :])[None, :, :]
    return tl.sum((above | tied).to(tl.int32), 1)
