"""The query of the fast path: rotated, and written as two int8 digits, in the lanes that `hopper_asm.project` wants."""

import triton
import triton.language as tl

from .hopper_asm import bf16_pair, half_pair, quad_max, quad_sum, words_of

# The largest magnitude of 128 high + low.
MOST = tl.constexpr(16256.0)


@triton.jit
def neighbour(x, ASM: tl.constexpr):
    """x of lane l ^ 1, [32] float32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    even, odd = tl.split(tl.reshape(x, (16, 2)))
    return tl.reshape(tl.join(odd, even), (32,))


@triton.jit
def load_half(at, scale, TILES: tl.constexpr):
    """8 TILES consecutive elements of each lane's 16-bit query at `at` [32], times scale: a tuple of [32] float32."""
    words = at.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 4)
    elements = ()
    for tile in tl.static_range(TILES):
        w = words_of(tl.load(words + 4 * tile))
        for k in tl.static_range(4):
            if at.dtype.element_ty == tl.bfloat16:
                first, second = bf16_pair(w[k])
            else:
                first, second = half_pair(w[k])
            elements = elements + (first * scale, second * scale)
    return elements


@triton.jit
def hadamard_16(x, TILES: tl.constexpr, ASM: tl.constexpr):
    """The Hadamard transform of 16 elements, those of a lane, or with 8 a lane those of lanes l and l ^ 1."""
    E: tl.constexpr = 8 * TILES
    for bit in tl.static_range(2 + TILES):
        turned = ()
        for i in tl.static_range(E):
            other = x[i ^ (1 << bit)]
            # pyright takes the tuples to be empty.
            turned = turned + (other - x[i] if i & (1 << bit) else other + x[i],)  # pyright: ignore[reportOperatorIssue]
        x = turned
    if TILES == 1:
        turned = ()
        second = (tl.arange(0, 32) & 1) > 0
        for i in tl.static_range(E):
            other = neighbour(x[i], ASM)
            turned = turned + (tl.where(second, other - x[i], other + x[i]),)
        x = turned
    return x


@triton.jit
def digits_of(x, inverse, E: tl.constexpr):
    """High and low digits of x / unit, a tuple of E [32], four a word: two tuples of E / 4."""
    high_words, low_words = (), ()
    for word in tl.static_range(E // 4):
        high_word = tl.zeros((32,), tl.int32)
        low_word = high_word
        for k in tl.static_range(4):
            code = tl.floor(x[4 * word + k] * inverse + 0.5).to(tl.int32)
            high = (code + 64) >> 7
            high_word |= (high & 255) << (8 * k)
            low_word |= ((code - high * 128) & 255) << (8 * k)
        high_words, low_words = high_words + (high_word,), low_words + (low_word,)
    return high_words, low_words


@triton.jit
def load_query(at, scale, D: tl.constexpr, ASM: tl.constexpr):
    """The digits of 8 queries as `project` takes them, the value of their unit, and |scale q|^2, [32] each.

    Args:
        at: [32] pointers: in lanes 4 g + j, to element j D / 8 of head g.
        scale: of the logits, in log2.
        D: 64 or 128.
        ASM: whether it is compiled.
    """
    TILES: tl.constexpr = D // 64
    E: tl.constexpr = 8 * TILES
    a = load_half(at, scale, TILES)
    b = load_half(at + D // 2, scale, TILES)
    norm = tl.zeros((32,), tl.float32)
    sums, differences = (), ()
    for i in tl.static_range(E):
        norm += a[i] * a[i] + b[i] * b[i]
        # `locks.format.rotate`, whose blocks are 16 elements of each half.
        sums = sums + ((a[i] + b[i]) * 32**-0.5,)
        differences = differences + ((a[i] - b[i]) * 32**-0.5,)
    first = hadamard_16(sums, TILES, ASM)
    second = hadamard_16(differences, TILES, ASM)
    most = tl.zeros((32,), tl.float32)
    for i in tl.static_range(E):
        most = tl.maximum(most, tl.maximum(tl.abs(first[i]), tl.abs(second[i])))
    unit = tl.maximum(quad_max(most, ASM), 1e-30) * (1.0 / MOST)
    inverse = 1.0 / unit
    first_high, first_low = digits_of(first, inverse, E)
    second_high, second_low = digits_of(second, inverse, E)
    return (first_high, first_low, second_high, second_low), unit, quad_sum(norm, ASM)
