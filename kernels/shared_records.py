"""Records on their way: Hopper's bulk copies of whole records into a program's shared memory, and loads from there.

A program is one warp. Its buffer has two halves of 8 records each; while it works on one, the other fills. A copy is an
instruction of one lane, takes no registers, and says at a barrier of its half when its bytes are there. So the loads of
a step, which the assembler would move behind the step's arithmetic for want of registers, are under way a step ahead.

Without ASM nothing is copied, and the same elements are loaded from where the records are, which the interpreter runs.
A record's place is then a pointer, not an address in shared memory. Both are found by a step's `source`: the address of
its half, the pointer to the head's records, its row of the block table, its first page, the last block that may be
read, and a block's and a record's stride in units of 16 bytes.
"""

import triton
import triton.language as tl


@triton.jit
def buffer_address(zero, NBYTES: tl.constexpr, ASM: tl.constexpr):
    """The address of the buffer, its barriers made ready; `zero` is any number."""
    address = zero
    if ASM:
        address = tl.inline_asm_elementwise(
            f"""{{ .shared .align 128 .b8 records[{16 * NBYTES + 16}]; .reg .pred p; .reg .u32 t;
            mov.u32 $0, records;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p mbarrier.init.shared::cta.b64 [$0+{16 * NBYTES}], 1;
            @p mbarrier.init.shared::cta.b64 [$0+{16 * NBYTES + 8}], 1;
            @p fence.mbarrier_init.release.cluster;
            bar.warp.sync 0xffffffff; }}""",
            "=&r,r",
            [zero],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return address


@triton.jit
def load_block(block_table_ptr, n, k, last_block, PER_BLOCK: tl.constexpr):
    """The block of page n + k, and for a page behind the last block's that one."""
    return tl.load(block_table_ptr + tl.minimum((n + k) // PER_BLOCK, last_block))


@triton.jit
def load_blocks(
    block_table_ptr, n, last_block, EACH: tl.constexpr, PER_BLOCK: tl.constexpr, ASM: tl.constexpr
):
    """The blocks of pages n .. n + 7, EACH of them in one."""
    blocks = ()
    if ASM:
        for k in tl.static_range(0, 8, EACH):
            blocks = blocks + (load_block(block_table_ptr, n, k, last_block, PER_BLOCK),)
    return blocks


@triton.jit
def slot_of(n, k, PER_BLOCK: tl.constexpr):
    """Where in its block page n + k stands; n is a multiple of 8, k < 8."""
    if PER_BLOCK & (PER_BLOCK - 1) != 0:
        slot = (n + k) % PER_BLOCK
    elif PER_BLOCK > 8:
        slot = n % PER_BLOCK + k
    else:
        # Known before the loop.
        slot = k % PER_BLOCK
    return slot


@triton.jit
def copy_step(
    buffer,
    half,
    rec_ptr,
    blocks,
    n,
    stride_r_b,
    stride_r_p,
    NBYTES: tl.constexpr,
    EACH: tl.constexpr,
    RUN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):
    """Starts the copies of the records of pages n .. n + 7 into a half of the buffer, RUN neighbours at once."""
    if ASM:
        barrier = buffer + 16 * NBYTES + half * 8
        tl.inline_asm_elementwise(
            f"""{{ .reg .pred p; elect.sync _|p, 0xffffffff;
            @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {8 * NBYTES};
            mov.b32 $0, 0; }}""",
            "=r,r",
            [barrier],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        for k in tl.static_range(0, 8, RUN):
            unit = blocks[k // EACH] * stride_r_b + slot_of(n, k, PER_BLOCK) * stride_r_p
            tl.inline_asm_elementwise(
                f"""{{ .reg .pred p; .reg .b64 policy;
                createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
                elect.sync _|p, 0xffffffff;
                @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
                [$1], [$2], {RUN * NBYTES}, [$3], policy;
                mov.b32 $0, 0; }}""",
                "=r,r,l,r",
                [
                    buffer + half * (8 * NBYTES) + k * NBYTES,
                    (rec_ptr + unit.to(tl.int64) * 16).to(tl.int64),
                    barrier,
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def wait_for_copies(buffer, half, parity, NBYTES: tl.constexpr, ASM: tl.constexpr):
    """Until the records of a half are there; `parity` of how often it was filled before."""
    if ASM:
        tl.inline_asm_elementwise(
            """{ .reg .pred p;
            AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;
            @!p bra AGAIN;
            mov.b32 $0, 0; }""",
            "=r,r,r",
            [buffer + 16 * NBYTES + half * 8, parity],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def let_go(zero, ASM: tl.constexpr):
    """Behind all loads of a step: its half may be filled again."""
    if ASM:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def record_place(
    source,
    first: tl.constexpr,
    more,
    offset,
    NBYTES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):
    """Where in the record of the step's page first + more [32] the bytes from `offset` [32] on are, for loads."""
    at, rec_ptr, block_table_ptr, n, last_block, stride_r_b, stride_r_p = source
    if ASM:
        # What lanes differ in is known before the loop, and the rest at compile time.
        place = (at + (more * NBYTES + offset)) + first * NBYTES
    else:
        block = load_block(block_table_ptr, n, first + more, last_block, PER_BLOCK).to(tl.int64)
        place = (
            rec_ptr + (block * stride_r_b + slot_of(n, first + more, PER_BLOCK) * stride_r_p) * 16 + offset
        )
    return place


@triton.jit
def load_words(place, offset, W: tl.constexpr, ASM: tl.constexpr):
    """W = 1, 2 or 4 words, offset bytes behind a record's place; a tuple of [32] int32."""
    if not ASM:
        words = ()
        for w in tl.static_range(W):
            words = words + (tl.load((place + offset).to(tl.pointer_type(tl.int32)) + w),)
    elif W == 4:
        words = tl.inline_asm_elementwise(
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,r",
            [place + offset],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    elif W == 2:
        words = tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];",
            "=r,=r,r",
            [place + offset],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        words = (
            tl.inline_asm_elementwise(
                "ld.shared.b32 $0, [$1];", "=r,r", [place + offset], dtype=tl.int32, is_pure=False, pack=1
            ),
        )
    return words


@triton.jit
def load_half_word(place, offset, ASM: tl.constexpr):
    """Two bytes, offset behind a record's place, [32] int32 from 0 on."""
    if ASM:
        word = tl.inline_asm_elementwise(
            "{ .reg .u16 h; ld.shared.u16 h, [$1]; cvt.u32.u16 $0, h; }",
            "=r,r",
            [place + offset],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load((place + offset).to(tl.pointer_type(tl.int16))).to(tl.int32) & 0xFFFF
    return word


@triton.jit
def load_pair(
    source,
    lane,
    PAIR: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    COEF_BITS: tl.constexpr,
    VECTORS_AT: tl.constexpr,
    NBYTES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Basis, coefficient codes and vector scales of pages 2 PAIR and 2 PAIR + 1 of a step, as `hopper_asm` has them.

    Lane 4 g + j has of basis vector g 16 bytes (8 at D = 64), a tuple of words [32]; of token g (and g + 8 in the high
    nibbles) the codes of ranks 2 j and 2 j + 1, or with 8 bits a code of token g in the low half and g + 8 in the high
    one; and two scales a word. At R = 8 there are three of each page; at R = 4 one tensor holds both pages: 8 vectors,
    4 and 4, and lanes with j < 2 have the first page's ranks.
    """
    g, j = lane // 4, lane % 4
    pair = j % (R // 2)
    row = D + g % R * (D // 2) + j * (D // 8)
    codes = D + R * D // 2 + (g * (R // 2) + pair) * 2
    loaded = ()
    for page in tl.static_range(R // 4):
        of_row = record_place(
            source, 2 * PAIR + page, g // 4 if R == 4 else g * 0, row, NBYTES, PER_BLOCK, ASM
        )
        of_rank = j // 2 if R == 4 else j * 0
        of_code = record_place(source, 2 * PAIR + page, of_rank, codes, NBYTES, PER_BLOCK, ASM)
        of_scale = record_place(source, 2 * PAIR + page, of_rank, pair * 4, NBYTES, PER_BLOCK, ASM)
        both = load_half_word(of_code, 0, ASM)
        if COEF_BITS == 8:
            # Tokens 8 .. 15.
            both = both | (load_half_word(of_code, 8 * R, ASM) << 16)
        (scales,) = load_words(of_scale, VECTORS_AT, 1, ASM)
        loaded = loaded + (load_words(of_row, 0, D // 32, ASM), both, scales)
    return loaded
