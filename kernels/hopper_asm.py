"""Device helpers of the fast path: single instructions by inline assembly, each beside its plain twin.

With ASM the instruction is emitted; without, the twin computes the same numbers in Triton's own operations, which the
interpreter runs. The order in which packed values leave an instruction is what the callers' layouts rest on.
"""

import triton
import triton.language as tl


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
def copies(words):
    """Four copies of each word of [ROWS, WORDS], [ROWS, WORDS, 4]: one packed asm then emits the word's four bytes."""
    pair = tl.join(words, words)
    return tl.reshape(tl.join(pair, pair), (words.shape[0], words.shape[1], 4))


@triton.jit
def bytes_of(words, ASM: tl.constexpr):
    """The words' bytes as int8, [ROWS, 4 * WORDS]."""
    four = copies(words)
    if ASM:
        out = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        out = (four >> (8 * tl.arange(0, 4))[None, None, :]).to(tl.int8)
    return tl.reshape(out, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def low_nibbles(words, ASM: tl.constexpr):
    """16 times the signed low nibble of each byte, int8, [ROWS, 4 * WORDS]."""
    four = copies(words)
    if ASM:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }",
            "=r,r,r,r,r",
            [four],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        out = ((four >> (8 * tl.arange(0, 4))[None, None, :]) << 4).to(tl.int8)
    return tl.reshape(out, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def high_nibbles(words, ASM: tl.constexpr):
    """16 times the signed high nibble of each byte, int8, [ROWS, 4 * WORDS]."""
    four = copies(words)
    if ASM:
        out = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xF0F0F0F0;", "=r,r,r,r,r", [four], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        out = ((four >> (8 * tl.arange(0, 4))[None, None, :]) & 0xF0).to(tl.int8)
    return tl.reshape(out, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def coefs_8(words, ASM: tl.constexpr):
    """The four int8 of each word as fp16: byte ^ 0x80 is the low mantissa of 1024 + 128 + byte."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, p, q, m;
            xor.b32 x, $4, 0x80808080;
            prmt.b32 p, x, 0x64646464, 0x4140;
            prmt.b32 q, x, 0x64646464, 0x4342;
            mov.b32 m, 0xE480E480;
            add.rn.f16x2 p, p, m;
            add.rn.f16x2 q, q, m;
            mov.b32 {$0, $1}, p;
            mov.b32 {$2, $3}, q; }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return (
        ((words << 24) >> 24).to(tl.float16),
        ((words << 16) >> 24).to(tl.float16),
        ((words << 8) >> 24).to(tl.float16),
        (words >> 24).to(tl.float16),
    )


@triton.jit
def coefs_4(words, ASM: tl.constexpr):
    """The low nibbles of bytes 0 and 2, then the high ones, as fp16: nibble ^ 8 is the low mantissa of 1032 + it."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, m, s;
            and.b32 p, $4, 0x000F000F;
            xor.b32 p, p, 0x64086408;
            and.b32 q, $4, 0x00F000F0;
            xor.b32 q, q, 0x64806480;
            mov.b32 m, 0xE408E408;
            add.rn.f16x2 p, p, m;
            mov.b32 s, 0x2C002C00;
            mov.b32 m, 0xD480D480;
            fma.rn.f16x2 q, q, s, m;
            mov.b32 {$0, $1}, p;
            mov.b32 {$2, $3}, q; }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return (
        ((words << 28) >> 28).to(tl.float16),
        ((words << 12) >> 28).to(tl.float16),
        ((words << 24) >> 28).to(tl.float16),
        ((words << 8) >> 28).to(tl.float16),
    )


@triton.jit
def spread_bytes(words, ASM: tl.constexpr):
    """Bytes 0 and 1 of each word, moved to bytes 0 and 2; the others are undefined."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1100;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    return (words & 0xFF) | ((words & 0xFF00) << 8)


@triton.jit
def take_bytes(first, second, which, ASM: tl.constexpr):
    """Byte `which` (0 or 1) of first and of second, as bytes 0 and 2; the others are undefined."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [first, second, which * 0x0101 + 0x0400],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return ((first >> (8 * which)) & 0xFF) | (((second >> (8 * which)) & 0xFF) << 16)


@triton.jit
def join_bytes(first, second, ASM: tl.constexpr):
    """Bytes 0 and 2 of first, then of second, as the bytes of one word."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    first = (first & 0xFF) | ((first >> 8) & 0xFF00)
    second = (second & 0xFF) | ((second >> 8) & 0xFF00)
    return first | (second << 16)


@triton.jit
def bf16_pair(words):
    """The two bfloat16 of each word as float32."""
    first = (words << 16).to(tl.float32, bitcast=True)
    second = (words & -65536).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def saturate(x, ASM: tl.constexpr):
    """float32 to fp16, clamped to its range."""
    if ASM:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def keep_branch(x, ASM: tl.constexpr):
    """x, by an assembly that must not be moved: what depends on it stays behind its branch."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        ).to(tl.int1)
    return x
