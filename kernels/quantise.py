"""Quantise: a query as the fast score kernel takes it, rotated as records are (`locks.format.rotate`), in 15 bits.

Tensors are registers of the warp's lanes, as `hopper_asm.py` has them. What a lane holds of a query, 16 elements of
each half of D or at D = 64 eight, is a block of the rotation or half of one: little moves between lanes.
"""

import triton
import triton.language as tl

from .hopper_asm import columns_of, neighbour, quad_max, quad_sum


@triton.jit
def load_elements(q_ptr, LENGTH: tl.constexpr):
    """LENGTH elements from q_ptr [32] on, in as many of [32]."""
    elements = ()
    for first in tl.static_range(0, LENGTH, 8):
        elements = elements + columns_of(tl.load(q_ptr[:, None] + first + tl.arange(0, 8)))
    return elements


@triton.jit
def hadamard_16(x, lane, ASM: tl.constexpr):
    """x, 16 of [32], times a Hadamard matrix; of eight, the other eight are those of lane l ^ 1."""
    for bit in tl.static_range(4):
        turned = ()
        for i in tl.static_range(len(x)):
            if 2**bit < len(x):
                a, b = x[i & ~(2**bit)], x[i | 2**bit]
                turned = turned + (a + b if i & 2**bit == 0 else a - b,)  # pyright: ignore[reportOperatorIssue]
            else:
                other = neighbour(x[i], ASM)
                turned = turned + (tl.where(lane % 2 == 0, x[i] + other, other - x[i]),)
        x = turned
    return x


@triton.jit
def digits_of(x, reciprocal):
    """x times reciprocal, below 2**14 in size, rounded, in words of four int8: high digits, of 128, and low ones."""
    high, low = (), ()
    for first in tl.static_range(0, len(x), 4):
        pairs = ()
        for k in tl.static_range(2):
            # The bits of 2**23 + n are those of 2**23, and n. 2**15 more keep it from below 0 and out of the digits.
            one = (x[first + k] * reciprocal + (2.0**23 + 2.0**15)).to(tl.int32, bitcast=True)
            other = (x[first + k + 2] * reciprocal + (2.0**23 + 2.0**15)).to(tl.int32, bitcast=True)
            pairs = pairs + (one - 0x4B000000 + (other << 16),)
        high = high + (((pairs[0] >> 7) & 0x00FF00FF) | ((pairs[1] << 1) & -0x00FF0100),)
        low = low + ((pairs[0] & 0x007F007F) | ((pairs[1] << 8) & 0x7F007F00),)
    return high, low


@triton.jit
def quantise(first, second, scale, lane, ASM: tl.constexpr):
    """scale * q, rotated, as `project` takes it, the value of one unit, and |scale q|^2.

    Args:
        first: of the query's first half what a lane holds, 16 of [32] or 8.
        second: of its second half.
        scale: of the query.
        lane: [32], its number.
        ASM: whether it is compiled.
    """
    sums, differences, norm = (), (), tl.zeros((32,), tl.float32)
    for i in tl.static_range(len(first)):
        a, b = first[i].to(tl.float32), second[i].to(tl.float32)
        norm = norm + a * a + b * b
        sums, differences = sums + (a + b,), differences + (a - b,)
    # The scale and the 32**-0.5 that makes a rotation of this are left to the unit.
    sums, differences = hadamard_16(sums, lane, ASM), hadamard_16(differences, lane, ASM)
    largest = tl.full((32,), 1e-30, tl.float32)
    for i in tl.static_range(len(sums)):
        largest = tl.maximum(largest, tl.maximum(tl.abs(sums[i]), tl.abs(differences[i])))
    unit = quad_max(largest, ASM) * (1.0 / 16256.0)
    query = digits_of(sums, 1.0 / unit) + digits_of(differences, 1.0 / unit)
    return query, unit * (scale * 32**-0.5), quad_sum(norm, ASM) * (scale * scale)
