"""Device helpers of the fast path: Hopper's instructions by inline assembly, each beside its plain twin.

A tensor here is one register of each lane of the program's one warp, [32], or a few, [32, W]: of one dimension, its
element l belongs to lane l. So an instruction of the whole warp, such as a matrix product or a shuffle, is an
elementwise operation. With ASM it is emitted; without, the twin computes the same numbers from the whole tensors, which
the interpreter runs.

A product's operands lie as `mma.m16n8k*` wants them: lane l = 4 g + j holds of the left operand rows g and g + 8, of
the right one column g, both along k in places that j names; of the result rows g and g + 8, columns 2 j and 2 j + 1.
"""

import triton
import triton.language as tl


@triton.jit
def uniform(x, ASM: tl.constexpr):
    """An int32 that is the same in all lanes, so that the compiler knows it: kept once for the warp."""
    if ASM:
        return tl.inline_asm_elementwise(
            "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """2**x by the special function unit; subnormals flush to 0."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def log2(x, ASM: tl.constexpr):
    """The logarithm of x to the base 2, by the special function unit."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def bf16_pair(words):
    """The two bfloat16 of each word as float32."""
    first = (words << 16).to(tl.float32, bitcast=True)
    second = (words & -65536).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def finite_bf16(words, ASM: tl.constexpr):
    """Words of two bfloat16 that are not negative; infinite, nan and negative ones become the largest finite one."""
    if ASM:
        return tl.inline_asm_elementwise(
            "min.u16x2 $0, $1, $2;",
            "=r,r,r",
            [words, tl.full(words.shape, 0x7F7F7F7F, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    low = tl.minimum(words & 0xFFFF, 0x7F7F)
    return low | (tl.minimum((words >> 16) & 0xFFFF, 0x7F7F) << 16)


@triton.jit
def half_pair(words):
    """The two fp16 of each word as float32."""
    first = words.to(tl.int16).to(tl.float16, bitcast=True)
    second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def as_words(first, second):
    """fp16 first and second in one word."""
    low = first.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (second.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pack_halves(first, second, ASM: tl.constexpr):
    """float32 first and second as two fp16 in one word, clamped to their range."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [first, second],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    first = tl.minimum(tl.maximum(first, -65504.0), 65504.0).to(tl.float16)
    second = tl.minimum(tl.maximum(second, -65504.0), 65504.0).to(tl.float16)
    return as_words(first, second)


@triton.jit
def coefs_4(codes, ASM: tl.constexpr):
    """Two bytes of 4-bit codes as fp16: a word of the low nibbles, a word of the high ones.

    A nibble ^ 8 is the low mantissa of 1032 + nibble.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, p, q, m, s;
            prmt.b32 x, $2, $2, 0x1100;
            and.b32 p, x, 0x000F000F;
            xor.b32 p, p, 0x64086408;
            and.b32 q, x, 0x00F000F0;
            xor.b32 q, q, 0x64806480;
            mov.b32 m, 0xE408E408;
            add.rn.f16x2 $0, p, m;
            mov.b32 s, 0x2C002C00;
            mov.b32 m, 0xD480D480;
            fma.rn.f16x2 $1, q, s, m; }""",
            "=&r,=&r,r",
            [codes],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    low = as_words(((codes << 28) >> 28).to(tl.float16), ((codes << 20) >> 28).to(tl.float16))
    high = as_words(((codes << 24) >> 28).to(tl.float16), ((codes << 16) >> 28).to(tl.float16))
    return low, high


@triton.jit
def coefs_8(codes, ASM: tl.constexpr):
    """Two bytes of 8-bit codes as a word of two fp16: byte ^ 0x80 is the low mantissa of 1024 + 128 + byte."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, m;
            xor.b32 x, $1, 0x8080;
            prmt.b32 x, x, 0x64646464, 0x4140;
            mov.b32 m, 0xE480E480;
            add.rn.f16x2 $0, x, m; }""",
            "=r,r",
            [codes],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return as_words(((codes << 24) >> 24).to(tl.float16), ((codes << 16) >> 24).to(tl.float16))


@triton.jit
def coefs(codes, BITS: tl.constexpr, ASM: tl.constexpr):
    """Codes of two tokens as fp16, two a word: of the first token, and of the second."""
    if BITS == 4:
        first, second = coefs_4(codes, ASM)
    else:
        first, second = coefs_8(codes, ASM), coefs_8(codes >> 16, ASM)
    return first, second


@triton.jit
def quad_max(x, ASM: tl.constexpr):
    """The largest of the four lanes 4 g .. 4 g + 3, in each of them."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y, z;
            shfl.sync.bfly.b32 y, $1, 1, 0x1f, 0xffffffff;
            max.f32 y, y, $1;
            shfl.sync.bfly.b32 z, y, 2, 0x1f, 0xffffffff;
            max.f32 $0, y, z; }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    most = tl.max(tl.reshape(x, (8, 4)), 1)
    return tl.reshape(tl.broadcast_to(most[:, None], (8, 4)), (32,))


@triton.jit
def quad_sum(x, ASM: tl.constexpr):
    """The sum of the four lanes 4 g .. 4 g + 3, in each of them."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y, z;
            shfl.sync.bfly.b32 y, $1, 1, 0x1f, 0xffffffff;
            add.f32 y, y, $1;
            shfl.sync.bfly.b32 z, y, 2, 0x1f, 0xffffffff;
            add.f32 $0, y, z; }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    total = tl.sum(tl.reshape(x, (8, 4)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (8, 4)), (32,))


@triton.jit
def halves_max(x, ASM: tl.constexpr):
    """The larger of lanes l and l ^ 16, in both."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y;
            shfl.sync.bfly.b32 y, $1, 16, 0x1f, 0xffffffff;
            max.f32 $0, y, $1; }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    most = tl.max(tl.reshape(x, (2, 16)), 0)
    return tl.reshape(tl.broadcast_to(most[None, :], (2, 16)), (32,))


@triton.jit
def halves_sum(x, ASM: tl.constexpr):
    """The sum of lanes l and l ^ 16, in both."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y;
            shfl.sync.bfly.b32 y, $1, 16, 0x1f, 0xffffffff;
            add.f32 $0, y, $1; }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    total = tl.sum(tl.reshape(x, (2, 16)), 0)
    return tl.reshape(tl.broadcast_to(total[None, :], (2, 16)), (32,))


@triton.jit
def neighbour(x, ASM: tl.constexpr):
    """x of lane l ^ 1."""
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
def columns_of(x):
    """The columns of x [32, 8]."""
    even, odd = tl.split(tl.reshape(x, (32, 4, 2)))
    first, third = tl.split(tl.reshape(even, (32, 2, 2)))
    second, fourth = tl.split(tl.reshape(odd, (32, 2, 2)))
    x0, x4 = tl.split(first)
    x1, x5 = tl.split(second)
    x2, x6 = tl.split(third)
    x3, x7 = tl.split(fourth)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def mma_int8(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """16 x 32 times 32 x 8 plus c, of int8, in int32."""
    return tl.inline_asm_elementwise(
        """mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
        {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def mma_rows(x, high, low, c0, c1, c2, c3):
    """The products of rows x with the query's high digits (rows 0 to 7) and low ones, W words each, plus c."""
    for w in tl.static_range(0, len(x), 2):
        c0, c1, c2, c3 = mma_int8(high[w], low[w], high[w + 1], low[w + 1], x[w], x[w + 1], c0, c1, c2, c3)
    return c0, c1, c2, c3


@triton.jit
def codes_of(x):
    """The bytes of W words x as int32, lanes 4 g + j brought together: [8, 16 W]."""
    words = tl.join(x[0], x[1])
    if len(x) == 4:
        # [32, 2 of a pair, 2 pairs]
        words = tl.reshape(tl.permute(tl.join(words, tl.join(x[2], x[3])), (0, 2, 1)), (32, 4))
    data = (words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]).to(tl.int8).to(tl.int32)
    return tl.reshape(data, (8, 16 * len(x)))


@triton.jit
def dot_rows(first, second, first_digits, second_digits):
    """The twin of two `mma_rows` for one of the digits: columns 2 j, and 2 j + 1, of the result."""
    # [8 heads, 8 rows]
    acc = tl.sum(codes_of(first)[None, :, :] * codes_of(first_digits)[:, None, :], 2)
    acc += tl.sum(codes_of(second)[None, :, :] * codes_of(second_digits)[:, None, :], 2)
    return tl.split(tl.reshape(acc, (32, 2)))


@triton.jit
def project(first, second, query, ASM: tl.constexpr):
    """Products of 8 queries with 8 rows, 128 high + low digit, float32.

    Args:
        first: W of [32] int32, the rows' first halves as int8: lane 4 g + j has 4 W elements from 4 W j on of row g.
        second: the same of the second halves.
        query: four of W of [32] int32: high digits of the queries' first halves, low ones; of the second halves, high
            and low. Lane 4 g + j has as many of head g.
        ASM: whether it is compiled.

    Returns:
        Two of [32]: lane 4 g + j has head g and rows 2 j, and 2 j + 1.
    """
    first_high, first_low, second_high, second_low = query
    if ASM:
        zero = tl.zeros((32,), tl.int32)
        c0, c1, c2, c3 = mma_rows(first, first_high, first_low, zero, zero, zero, zero)
        c0, c1, c2, c3 = mma_rows(second, second_high, second_low, c0, c1, c2, c3)
    else:
        c0, c1 = dot_rows(first, second, first_high, second_high)
        c2, c3 = dot_rows(first, second, first_low, second_low)
    return (c0 * 128 + c2).to(tl.float32), (c1 * 128 + c3).to(tl.float32)


@triton.jit
def halves_of(words):
    """The fp16 of words [32] as float32, lanes 4 g + j brought together: [8, 8]."""
    first, second = half_pair(words)
    return tl.reshape(tl.join(first, second), (8, 8))


@triton.jit
def dot_pair(z, other_z, coefs, other_coefs, R: tl.constexpr):
    """The twin of `pair_logits`."""
    z, other_z = halves_of(z), halves_of(other_z)
    coefs, other_coefs = halves_of(coefs), halves_of(other_coefs)
    if R == 4:
        z, other_z = tl.split(tl.permute(tl.reshape(z, (8, 2, 4)), (0, 2, 1)))
        coefs, other_coefs = tl.split(tl.permute(tl.reshape(coefs, (8, 2, 4)), (0, 2, 1)))
    # [8 heads, 8 tokens]
    first = tl.sum(z[:, None, :] * coefs[None, :, :], 2)
    second = tl.sum(other_z[:, None, :] * other_coefs[None, :, :], 2)
    a, b = tl.split(tl.reshape(first, (32, 2)))
    c, d = tl.split(tl.reshape(second, (32, 2)))
    return a, b, c, d


@triton.jit
def pair_logits(z, other_z, early, other_early, late, other_late, R: tl.constexpr, ASM: tl.constexpr):
    """Logits, less the center, of 16 tokens of two pages; both pages in one product.

    Args:
        z: [32], projections onto the first page's basis, two fp16 a word: lane 4 g + j has ranks 2 j and 2 j + 1 of
            head g. At R = 4 lanes with j < 2 have those of the first page, the others ranks 2 j - 4 and 2 j - 3 of the
            second.
        other_z: the same of the second page; not read at R = 4.
        early: coefficients, likewise, lane 4 g + j of token g.
        other_early: of the second page; not read at R = 4.
        late: of token g + 8.
        other_late: of the second page.
        R: rank.
        ASM: whether it is compiled.

    Returns:
        Eight of [32] float32: lane 4 g + j has head g; tokens 2 j and 2 j + 1 of the first page, of the second; then
        2 j + 8 and 2 j + 9 of the first, of the second.
    """
    if not ASM:
        a, b, c, d = dot_pair(z, other_z, early, other_early, R)
        e, f, g, h = dot_pair(z, other_z, late, other_late, R)
        logits = (a, b, c, d, e, f, g, h)
    elif R == 8:
        # The first page's heads are rows 0 to 7 and its ranks k < 8; the second's the other rows, the other k.
        logits = tl.inline_asm_elementwise(
            """{ .reg .b32 o; .reg .f32 z;
            mov.b32 o, 0;
            mov.f32 z, 0f00000000;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$0, $1, $2, $3}, {$8, o, o, $9}, {$10, $11}, {z, z, z, z};
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$4, $5, $6, $7}, {$8, o, o, $9}, {$12, $13}, {z, z, z, z}; }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r",
            [z, other_z, early, other_early, late, other_late],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        second = (tl.arange(0, 32) & 2) > 0
        logits = tl.inline_asm_elementwise(
            """{ .reg .f32 z;
            mov.f32 z, 0f00000000;
            mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32
            {$0, $1, $2, $3}, {$8, $9}, {$10}, {z, z, z, z};
            mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32
            {$4, $5, $6, $7}, {$8, $9}, {$11}, {z, z, z, z}; }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r",
            [tl.where(second, 0, z), tl.where(second, z, 0), early, late],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
    return logits


@triton.jit
def quad_logits(z, early, late, ASM: tl.constexpr):
    """Logits, less the center, of 16 tokens of four pages for four heads, at R = 8.

    Args:
        z: four of [32], projections onto the pages' bases, two fp16 a word: lane 4 g + j has ranks 2 j and 2 j + 1 of
            head g % 4; of the first and third page where g < 4, else 0; of the others where g >= 4, else 0.
        early: four of [32], coefficients, likewise, lane 4 g + j of token g.
        late: of token g + 8.
        ASM: whether it is compiled.

    Returns:
        Eight of [32] float32: lane 4 g + j has head g % 4; tokens 2 j and 2 j + 1 of page g // 4, of page 2 + g // 4;
        then 2 j + 8 and 2 j + 9 of the one, of the other.
    """
    if ASM:
        # Rows 0 to 7 are two pages' heads, and the other rows the other two's.
        logits = tl.inline_asm_elementwise(
            """{ .reg .b32 o; .reg .f32 z;
            mov.b32 o, 0;
            mov.f32 z, 0f00000000;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$0, $1, $2, $3}, {$8, o, $9, o}, {$12, $13}, {z, z, z, z};
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$0, $1, $2, $3}, {o, $10, o, $11}, {$14, $15}, {$0, $1, $2, $3};
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$4, $5, $6, $7}, {$8, o, $9, o}, {$16, $17}, {z, z, z, z};
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$4, $5, $6, $7}, {o, $10, o, $11}, {$18, $19}, {$4, $5, $6, $7}; }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r",
            [z[0], z[1], z[2], z[3]]
            + [early[0], early[1], early[2], early[3]]
            + [late[0], late[1], late[2], late[3]],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = dot_pair(z[0], z[2], early[0], early[2], 8)
        e, f, g, h = dot_pair(z[1], z[3], early[1], early[3], 8)
        logits = (a + e, b + f, c + g, d + h)
        a, b, c, d = dot_pair(z[0], z[2], late[0], late[2], 8)
        e, f, g, h = dot_pair(z[1], z[3], late[1], late[3], 8)
        logits = logits + (a + e, b + f, c + g, d + h)
    return logits


@triton.jit
def sum_tokens(a0, a1, a2, a3, sums, first: tl.constexpr, second: tl.constexpr, ASM: tl.constexpr):
    """Adds sums over 16 tokens of two pages, of one in the lanes with j = first, of the other with j = second.

    Args:
        a0: [32] words of two fp16 weights, lane 4 g + j: tokens 2 j and 2 j + 1 of row g, a head of the first page.
        a1: of the second page.
        a2: tokens 2 j + 8 and 2 j + 9 of the first page.
        a3: of the second.
        sums: four of [32] float32, what is added to: the first is of first pages, the third of second ones.
        first: of four, which lanes.
        second: of four; equal to `first`, or not.
        ASM: whether it is compiled.
    """
    if ASM:
        # A product with ones in columns 2 first and 2 second alone.
        column = tl.arange(0, 32) // 4
        ones = tl.where((column == 2 * first) | (column == 2 * second), 0x3C003C00, 0)
        sums = tl.inline_asm_elementwise(
            """mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $8}, {$9, $10, $11, $12};""",
            "=f,=f,=f,=f,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, ones, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        j = tl.arange(0, 32) & 3
        x0, x1 = half_pair(a0)
        x2, x3 = half_pair(a2)
        y0, y1 = half_pair(a1)
        y2, y3 = half_pair(a3)
        of_first = tl.where(j == first, quad_sum(x0 + x1 + x2 + x3, ASM), 0.0)
        of_second = tl.where(j == second, quad_sum(y0 + y1 + y2 + y3, ASM), 0.0)
        sums = (sums[0] + of_first, sums[1], sums[2] + of_second, sums[3])
    return sums
