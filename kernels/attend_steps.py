"""Attend to a long row in steps: the keys and values of the next ones are on their way while one is worked on.

Page numbers and blocks are scalars, since Triton would copy tensors of them ahead too, and then nothing behind them.
"""

import triton
import triton.language as tl


@triton.jit
def find_pages(block_table_ptr, pages, length, P: tl.constexpr, PAGES: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The first token of each page, negative or behind the row's end where it is none of the row's; and its block."""
    starts = ()
    blocks = ()
    for n in tl.static_range(PAGES):
        live = (pages[n] >= 0) & (pages[n] * P < length)
        starts = starts + (pages[n] * P,)
        blocks = blocks + (tl.load(block_table_ptr + pages[n] // PER_BLOCK, mask=live, other=0),)
    return starts, blocks


@triton.jit
def live_tokens(starts, length, P: tl.constexpr, PAGES: tl.constexpr):
    """Which slots of the pages hold a token of the row."""
    off_t = tl.arange(0, PAGES * P)
    start = tl.zeros((PAGES * P,), tl.int32)
    for n in tl.static_range(PAGES):
        start = tl.where(off_t // P == n, starts[n], start)
    return (start >= 0) & (start + off_t % P < length)


@triton.jit
def read_pages(
    ptr,
    starts,
    blocks,
    live,
    stride_b,
    stride_t,
    P: tl.constexpr,
    PAGES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys or values of the pages, 0 where no token is."""
    off = tl.arange(0, BLOCK)
    off_t = tl.arange(0, PAGES * P)
    block = tl.zeros((PAGES * P,), tl.int32)
    place = off_t % P
    for n in tl.static_range(PAGES):
        here = off_t // P == n
        block = tl.where(here, blocks[n], block)
        if PER_BLOCK > 1:
            place = tl.where(here, place + starts[n] % (PER_BLOCK * P), place)
    at = block.to(tl.int64) * stride_b + place.to(tl.int64) * stride_t
    return tl.load(ptr + at[:, None] + off[None, :], mask=live[:, None] & (off < WIDTH)[None, :], other=0.0)


@triton.jit
def parts_of_step(
    ids_ptr,
    step,
    split,
    splits,
    count,
    whole,
    PAGES: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The SLOTS parts, PARTS to a page, of step number `step` of a split's tiles; negative behind a list's end."""
    steps: tl.constexpr = PAGES * PARTS // SLOTS
    first = (split + step // steps * splits) * (PAGES * PARTS) + step % steps * SLOTS
    parts = ()
    for n in tl.static_range(SLOTS):
        slot = (first + n) // PARTS
        page = slot
        if LISTED:
            page = tl.where(whole, slot, tl.load(ids_ptr + slot, mask=(slot < count) & ~whole, other=-1))
        # Of a page that is none, negative; what lies behind a whole row does so by its length, too.
        parts = parts + (page * PARTS + (first + n) % PARTS,)
    return parts


@triton.jit
def attend_steps(
    q,
    k_ptr,
    v_ptr,
    block_table_ptr,
    ids_ptr,
    stride_k_b,
    stride_k_t,
    stride_v_b,
    stride_v_t,
    scale,
    split,
    splits,
    count,
    whole,
    length,
    P: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    LISTED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Largest logit, mass and sum of a split's tiles, STEP tokens at a time.

    A step is of whole pages, or of one of a page's parts; the steps that STAGES reads ahead are on their way.
    """
    if PAIRED:
        # One set of addresses.
        stride_v_b = stride_k_b
        stride_v_t = stride_k_t
    # A part is a page, or what a step takes of it.
    PART: tl.constexpr = min(P, STEP)
    PARTS: tl.constexpr = P // PART
    SLOTS: tl.constexpr = STEP // PART
    IN_BLOCK: tl.constexpr = PER_BLOCK * PARTS
    # All tiles before the last are full.
    full = (tl.cdiv(count, PAGES) - 1 - split) // splits
    pages = full * PAGES + tl.minimum(PAGES, count - (split + full * splits) * PAGES)
    top = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK_G,), tl.float32)
    out = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    parts = parts_of_step(ids_ptr, 0, split, splits, count, whole, PAGES, PARTS, SLOTS, LISTED)
    starts, blocks = find_pages(block_table_ptr, parts, length, PART, SLOTS, IN_BLOCK)
    parts = parts_of_step(ids_ptr, 1, split, splits, count, whole, PAGES, PARTS, SLOTS, LISTED)
    for step in tl.range(0, tl.cdiv(pages * P, STEP), num_stages=STAGES):
        live = live_tokens(starts, length, PART, SLOTS)
        # [STEP, BLOCK_D], [STEP, BLOCK_DV]
        k = read_pages(k_ptr, starts, blocks, live, stride_k_b, stride_k_t, PART, SLOTS, IN_BLOCK, D, BLOCK_D)
        v = read_pages(
            v_ptr, starts, blocks, live, stride_v_b, stride_v_t, PART, SLOTS, IN_BLOCK, DV, BLOCK_DV
        )
        starts, blocks = find_pages(block_table_ptr, parts, length, PART, SLOTS, IN_BLOCK)
        parts = parts_of_step(ids_ptr, step + 2, split, splits, count, whole, PAGES, PARTS, SLOTS, LISTED)
        # [BLOCK_G, STEP]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(live[None, :], logits, -float("inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        keep = tl.exp(top - safe)
        weights = tl.exp(logits - safe[:, None])
        mass = mass * keep + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * keep[:, None], input_precision="ieee")
        top = new
    return top, mass, out
