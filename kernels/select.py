"""Select: shares of the group's mass, and the M pages of a KV head that are attended to, in two launches.

    share[n] = sum over the group's heads of exp(log_mass[n] - total)

A share is not negative, so the bits of its float32 are ordered as it is: they are the page's key, -1 where a page is
no candidate. A search by counting narrows [low, stop) until it holds the K-th largest key and either K keys are at or
above `low`, or `low` is the only value left; then the keys from `stop` on are kept, and the lowest pages of the
interval. No sort, no atomic: ids come out ascending, and equal inputs give equal ids.

`keys_kernel`, many programs, writes the keys and the largest key of every group of pages. One program of
`select_kernel` then selects for one (row, KV head), so what it reads is what counts:

* up to `DIRECT` pages, and in a longer table a row of no more pages than it has groups: all keys at once, in registers;
* more: the groups' largest keys first. The K first groups, by their largest keys and then by number, hold the K first
  pages, by key and then by number: before a page of any other group come K pages, one of each. So only their keys are
  read, and of a few groups more, where the search ends early;
* where K groups are too many for registers: keys in tiles, again for each digit of the threshold (`select_tiles.py`).

Neither reads nor writes further than the block of pages, and of four groups, in which a row's own candidates end.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .balance import row_of_slot
from .dependent import dependent, release, wait
from .select_tiles import tiles_kernel

# Most keys that one program keeps in registers at once: pages without groups, groups, pages of the chosen groups.
DIRECT = 4096
MAX_GROUPS = 4096
IN_REGISTERS = 8192
# Programs of `keys_kernel` at most, about: one wave of those that an H200 runs at once. Longer tables are looped over.
PROGRAMS = 4096


@triton.jit
def group_share(
    log_mass_ptr,
    total_ptr,
    stride_m_h,
    off_n,
    mask_n,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """share of pages off_n: +inf for a marked page, 0 where nothing was scored; waits for the totals alone."""
    off_g = tl.arange(0, BLOCK_G)
    mask_g = off_g < G
    # [BLOCK_G, BLOCK_N]
    at = log_mass_ptr + off_g.to(tl.int64)[:, None] * stride_m_h + off_n[None, :]
    x = tl.load(at, mask=mask_g[:, None] & mask_n[None, :], other=-float("inf"))
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.load(total_ptr + off_g, mask=mask_g, other=-float("inf"))[:, None]
    # Without a finite candidate the total is -inf, and only marked pages have a share.
    known = tl.abs(total) < float("inf")
    part = tl.where(known, tl.exp(x - tl.where(known, total, 0.0)), 0.0)
    return tl.sum(tl.where(x == float("inf"), float("inf"), part), 0)


@triton.jit
def share_kernel(
    log_mass_ptr,
    total_ptr,
    share_ptr,
    stride_m_b,
    stride_m_h,
    stride_t_b,
    stride_s_b,
    stride_s_h,
    max_pages,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """share of BLOCK_N pages."""
    off_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    mask_n = off_n < max_pages
    log_mass_ptr += row * stride_m_b + head * G * stride_m_h
    total_ptr += row * stride_t_b + head * G
    share = group_share(log_mass_ptr, total_ptr, stride_m_h, off_n, mask_n, G, BLOCK_G)
    tl.store(share_ptr + row * stride_s_b + head * stride_s_h + off_n, share, mask=mask_n)


@triton.jit
def keyed_pages(length, max_pages, window_pages, P: tl.constexpr, M: tl.constexpr):
    """Where a row's candidates end; 0 for one that fits its budget, which needs no key."""
    pages = (tl.minimum(length, max_pages * P) + P - 1) // P
    return tl.where(pages > M, pages - window_pages, 0)


@triton.jit(do_not_specialize=["num_rows", "slots"])
def keys_kernel(
    source_ptr,
    total_ptr,
    seq_lens_ptr,
    keys_ptr,
    maxima_ptr,
    stride_x_b,
    stride_x_h,
    stride_t_b,
    stride_k_b,
    stride_k_h,
    stride_m_b,
    stride_m_h,
    max_pages,
    window_pages,
    num_rows,
    slots,
    P: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Keys of the pages, of log-masses or with a G of 0 of shares, and the largest of each GROUP, if that is not 0."""
    if not EARLY:
        wait(DEPENDENT)
        release(DEPENDENT)
    head = tl.program_id(1).to(tl.int64)
    if BLOCK_B > 1:
        off_b = tl.arange(0, BLOCK_B)
        lengths = tl.load(seq_lens_ptr + off_b, mask=off_b < num_rows, other=0)
        blocks = (keyed_pages(lengths, max_pages, window_pages, P, M) + BLOCK_N - 1) // BLOCK_N
        row, pid, programs = row_of_slot(blocks, blocks * 0, tl.program_id(0), slots, num_rows)
        if row >= num_rows:
            wait(DEPENDENT)
            return
    else:
        row, pid, programs = 0, tl.program_id(0), tl.num_programs(0)
    last = keyed_pages(tl.load(seq_lens_ptr + row), max_pages, window_pages, P, M)
    row = tl.cast(row, tl.int64)
    # A multiple of 16, so that four pages have one mask and are loaded as one.
    limit = (last + 15) // 16 * 16
    keys_ptr += row * stride_k_b + head * stride_k_h
    maxima_ptr += row * stride_m_b + head * stride_m_h
    source_ptr += row * stride_x_b + (head * G if G > 0 else head) * stride_x_h
    for n in tl.range(pid * BLOCK_N, last, programs * BLOCK_N, num_stages=1):
        off_n = n + tl.arange(0, BLOCK_N)
        mask_n = (off_n < limit) & (off_n < max_pages)
        if G > 0:
            totals = total_ptr + row * stride_t_b + head * G
            x = group_share(source_ptr, totals, stride_x_h, off_n, mask_n, G, BLOCK_G, DEPENDENT and EARLY)
        else:
            x = tl.load(source_ptr + off_n, mask=mask_n, other=0.0)
        # nan counts as +inf.
        x = tl.where(x == x, tl.maximum(x, 0.0), float("inf"))
        key = tl.where((off_n > 0) & (off_n < last), x.to(tl.int32, bitcast=True), -1)
        tl.store(keys_ptr + off_n, key)
        if GROUP > 0:
            groups = tl.reshape(key, (BLOCK_N // GROUP, GROUP))
            off_c = n // GROUP + tl.arange(0, BLOCK_N // GROUP)
            tl.store(maxima_ptr + off_c, tl.max(groups, 1))
    # Programs without a page.
    wait(DEPENDENT)


@triton.jit
def larger(a, b, c, x, y, z):
    """The larger of each two."""
    return tl.maximum(a, x), tl.maximum(b, y), tl.maximum(c, z)


@triton.jit
def added(a, b, c, d, w, x, y, z):
    """The sum of each two."""
    return a + w, b + x, c + y, d + z


@triton.jit
def ends(key, M: tl.constexpr, WARPS: tl.constexpr):
    """A bound from below of the M-th largest key, or of all that are not -1, and one above the largest."""
    # [rounds, warps, threads, keys loaded as one]
    cells = tl.reshape(key, (key.shape[0] // (128 * WARPS), WARPS, 32, 4))
    top = tl.max(tl.max(cells, 3), 0)
    bottom = tl.min(tl.min(tl.where(cells < 0, 0x7FFFFFFF, cells), 3), 0)
    high, most, least = tl.reduce((tl.max(top, 1), tl.max(-top, 1), tl.max(-bottom, 1)), 0, larger)
    # M threads whose largest keys are not less: a close bound.
    close = (32 * WARPS >= M) & (most <= 0)
    return tl.where(close, -most, -least), high + 1


@triton.jit
def counts_above(key, low, shift, WARPS: tl.constexpr):
    """How many keys are at least low + (i << shift), i = 1 .. 7: four words, of 1 and 5, 2 and 6, 3 and 7, 4.

    Counts wait in seven digits of four bits, which the eight keys that a thread takes cannot fill. Within a warp a sum
    of int32 is one instruction; between warps all four words go together.
    """
    digit = tl.minimum(tl.maximum((key - low) >> shift, 0), 7)
    ones = 0x1111111 >> (28 - 4 * digit)
    # [rounds, 2 rounds, warps, threads, keys loaded as one]
    ones = tl.reshape(ones, (key.shape[0] // (256 * WARPS), 2, WARPS, 32, 4))
    # [rounds, warps, threads]
    digits = tl.sum(tl.sum(ones, 4), 1)
    a = tl.sum(tl.sum(digits & 0x000F000F, 0), 1)
    b = tl.sum(tl.sum((digits >> 4) & 0x000F000F, 0), 1)
    c = tl.sum(tl.sum((digits >> 8) & 0x000F000F, 0), 1)
    d = tl.sum(tl.sum((digits >> 12) & 0x0000000F, 0), 1)
    return tl.reduce((a, b, c, d), 0, added)


@triton.jit
def search(key, low, stop, at_low, wanted, most, WARPS: tl.constexpr):
    """[low, stop), the keys of the interval to keep, and the keys to keep in all: between `wanted` and `most`.

    Of at least `wanted` keys (fewer are all kept), the wanted-th largest is in [low, stop) at first and after each
    step; no key is at or above the first stop. at_low: how many are at or above the first low, or any number above
    `most` for more than that.
    """
    above = low * 0
    held = above - 1
    # Three bits a step: eleven steps at the most.
    while (at_low > most) & (stop - low > 1):
        # The least shift that leaves three bits of the interval, by the exponent of its width, never rounded up.
        width = stop - low - 1
        width = (width & ~(width >> 24)).to(tl.float32)
        exponent = (width.to(tl.int32, bitcast=True) >> 23) - 127
        shift = tl.maximum(exponent - 2, 0)
        a, b, c, d = counts_above(key, low, shift, WARPS)
        # The counts fall: the last that reaches `wanted` is found by halving, and the next is short of it.
        bit = d >= wanted
        digit = bit.to(tl.int32) << 2
        at_low = tl.where(bit, d, at_low)
        short = tl.where(bit, 0, d)
        a = tl.where(bit, a >> 16, a & 0xFFFF)
        b = tl.where(bit, b >> 16, b & 0xFFFF)
        c = tl.where(bit, c >> 16, c & 0xFFFF)
        bit = b >= wanted
        digit += bit.to(tl.int32) << 1
        at_low = tl.where(bit, b, at_low)
        short = tl.where(bit, short, b)
        a = tl.where(bit, c, a)
        bit = a >= wanted
        digit += bit.to(tl.int32)
        at_low = tl.where(bit, a, at_low)
        above = tl.maximum(above, tl.where(bit, short, a))
        low += digit << shift
        stop = low + tl.minimum(1 << shift, stop - low)
        # A step that parts no keys meets few values, far from each other: close in on those that are there.
        if at_low - above == held:
            low, stop = ends(tl.where((key >= low) & (key < stop), key, -1), 1 << 30, WARPS)
        held = at_low - above
    total = tl.where(at_low > most, wanted, at_low)
    return low, stop, total - above, total


@triton.jit
def places(key, low, stop, need):
    """The place of each key among those kept, from stop on and the first `need` of [low, stop); -1 if it is not."""
    sure = (key >= stop).to(tl.int32)
    maybe = (key >= low).to(tl.int32) - sure
    # Two counts in one scan.
    so_far = tl.cumsum(sure + (maybe << 16), 0)
    rank = so_far >> 16
    keep = (sure > 0) | ((maybe > 0) & (rank <= need))
    place = tl.where(keep, (so_far & 0xFFFF) + tl.minimum(rank, need) - 1, -1)
    # Four bytes a key change threads for the scattered store, not a pointer and a mask: the compiler moves the
    # exchange in front of a widening.
    return place.to(tl.int64)


@triton.jit
def choose(ids_ptr, page, key, low, stop, wanted, WARPS: tl.constexpr):
    """Writes the pages of the `wanted` largest keys, behind page 0."""
    low, stop, need, _ = search(key, low, stop, wanted + 1, wanted, wanted, WARPS)
    place = places(key, low, stop, need)
    tl.store(ids_ptr + 1 + place, page, mask=place >= 0)


@triton.jit
def select_kernel(
    keys_ptr,
    maxima_ptr,
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    chosen_ptr,
    stride_k_b,
    stride_k_h,
    stride_m_b,
    stride_m_h,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    stride_g_b,
    stride_g_h,
    max_pages,
    window_pages,
    P: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """page_ids and count of one (row, KV head); of BLOCK_C groups, or of BLOCK_C pages in a row that has no more."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(seq_lens_ptr + row)
    wait(DEPENDENT)
    release(DEPENDENT)
    keys_ptr += row * stride_k_b + head * stride_k_h
    ids_ptr += row * stride_i_b + head * stride_i_h
    pages = (tl.minimum(length, max_pages * P) + P - 1) // P
    tl.store(counts_ptr + row * stride_c_b + head, tl.minimum(pages, M))
    off_m = tl.arange(0, BLOCK_M)
    if pages <= M:
        tl.store(ids_ptr + off_m, tl.where(off_m < pages, off_m, -1), mask=off_m < M)
    else:
        last = pages - window_pages
        wanted = M - 1 - window_pages
        tl.store(ids_ptr, 0)
        tl.store(ids_ptr + M - window_pages + off_m, last + off_m, mask=off_m < window_pages)
        off_c = tl.arange(0, BLOCK_C)
        if (GROUP == 0) | (last <= BLOCK_C):
            every = tl.load(keys_ptr + off_c, mask=off_c < (last + 15) // 16 * 16, other=-1)
            low, stop = ends(every, M, WARPS)
            choose(ids_ptr, off_c, every, low, stop, wanted, WARPS)
        elif GROUP > 0:
            groups = (last + GROUP - 1) // GROUP
            at = maxima_ptr + row * stride_m_b + head * stride_m_h + off_c
            most = tl.load(at, mask=off_c < (groups + 3) // 4 * 4, other=-1)
            low, top = ends(most, M, WARPS)
            at_low = tl.minimum(groups, SLOTS + 1)
            low = tl.where(at_low > SLOTS, low, 0)
            low, stop, need, count = search(most, low, top, at_low, wanted, SLOTS, WARPS)
            place = places(most, low, stop, need)
            chosen_ptr += row * stride_g_b + head * stride_g_h
            tl.store(chosen_ptr + place, off_c, mask=place >= 0)
            # The chosen groups change hands between the program's threads, through memory.
            tl.debug_barrier()
            off_s = tl.arange(0, SLOTS)
            group = tl.load(chosen_ptr + off_s, mask=off_s < count, other=0)
            # [SLOTS, GROUP]
            page = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            key = tl.load(keys_ptr + page, mask=(off_s < count)[:, None], other=-1)
            page = tl.reshape(page, (SLOTS * GROUP,))
            key = tl.reshape(key, (SLOTS * GROUP,))
            # Where K groups reach `low`, so do K pages; fewer groups are all of them.
            choose(ids_ptr, page, key, tl.where(count < wanted, 0, low), top, wanted, WARPS)


class Plan(NamedTuple):
    """How a table of N pages is read for M: pages a group (0: no groups) and the blocks.

    `slots` are the groups that may be chosen, at least M. Tiles, where no size of group fits, have a `block_c` of 0.
    """

    group: int
    slots: int
    block_n: int
    block_c: int
    warps: int


@functools.cache
def plan(N: int, M: int) -> Plan:
    """The groups whose search costs least.

    A step of the search is reckoned as 400 cycles and one for 8 keys. Random keys take about 3.5 steps to tell M from
    M + 1 pages, 3 to choose M groups, and 1.5 where up to 2 M may be chosen.
    """
    # Eight keys a thread of four warps.
    fewest = 1024
    block_n = max(128, min(512, triton.next_power_of_2(N) // 128))
    if N <= DIRECT:
        block_c = max(fewest, triton.next_power_of_2(N))
        return Plan(0, 0, 128, block_c, 8 if block_c > 2048 else 4)
    best, least = Plan(0, 0, 128, 0, 8), float("inf")
    for group in (2**i for i in range(3, 14)):
        block_c = max(fewest, triton.next_power_of_2(triton.cdiv(N, group)))
        for more, steps in ((1, 3.0), (2, 1.5)):
            slots = max(fewest // group, more * triton.next_power_of_2(M))
            cost = steps * (400 + block_c / 8) + 3.5 * (400 + slots * group / 8)
            if block_c <= MAX_GROUPS and slots * group <= IN_REGISTERS and cost < least:
                few, many = sorted((block_c, slots * group))
                best = Plan(group, slots, max(block_n, 4 * group), block_c, 8 if many > 2048 <= few else 4)
                least = cost
    return best


class Workspace(NamedTuple):
    """What the two kernels hand on, all int32; its contents before a call do not matter."""

    # [B, Hkv, N rounded up to whole blocks]
    keys: Tensor
    # [B, Hkv, groups in as many pages]
    maxima: Tensor
    # [B, Hkv, slots of the plan]
    chosen: Tensor


def widths(N: int, M: int) -> tuple[int, int, int]:
    """The last axes of a workspace's keys, maxima and chosen."""
    shape = plan(N, M)
    keys = -(-N // shape.block_n) * shape.block_n
    return keys, keys // shape.group if shape.group else 0, shape.slots


def workspace(B: int, Hkv: int, N: int, M: int, device: torch.device | str) -> Workspace:
    """Buffers for selections of M pages by a table of N: one set is enough for all layers."""
    return Workspace(
        *(torch.empty((B, Hkv, width), dtype=torch.int32, device=device) for width in widths(N, M))
    )


def share(log_mass: Tensor, total: Tensor, num_kv_heads: int, *, out: Tensor | None = None) -> Tensor:
    """Returns share [B, Hkv, N] float32 from log_mass [B, Hq, N] and total [B, Hq]."""
    B, Hq, N = log_mass.shape
    if out is None:
        out = torch.empty((B, num_kv_heads, N), dtype=torch.float32, device=log_mass.device)
    share_kernel[(triton.cdiv(N, 128), num_kv_heads, B)](
        log_mass,
        total,
        out,
        *log_mass.stride()[:2],
        total.stride(0),
        *out.stride()[:2],
        N,
        G=Hq // num_kv_heads,
        BLOCK_G=triton.next_power_of_2(Hq // num_kv_heads),
        BLOCK_N=128,
        num_warps=1,
    )
    return out


def select(
    share: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    pages: int,
    window_pages: int,
    out: tuple[Tensor, Tensor] | None = None,
    work: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns page_ids [B, Hkv, M] int32, ascending, -1 behind the last, and counts [B, Hkv] int32; M = `pages`."""
    return _select(share, None, seq_lens, share.shape[1], page, pages, window_pages, False, out, work)


def select_from_mass(
    log_mass: Tensor,
    total: Tensor,
    seq_lens: Tensor,
    num_kv_heads: int,
    *,
    page: int,
    pages: int,
    window_pages: int,
    early: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    work: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what `select` does for the shares of log_mass [B, Hq, N] and total [B, Hq], which are not stored.

    `early`: the launch right before wrote neither log_mass nor seq_lens, as it is behind `score.score`; they are read
    while it runs. With `out` and `work` (see `workspace`) nothing is allocated.

    Raises:
        ValueError: a buffer of `work` that is too small.
    """
    return _select(log_mass, total, seq_lens, num_kv_heads, page, pages, window_pages, early, out, work)


def _select(
    source: Tensor,
    total: Tensor | None,
    seq_lens: Tensor,
    num_kv_heads: int,
    page: int,
    pages: int,
    window_pages: int,
    early: bool,
    out: tuple[Tensor, Tensor] | None,
    work: Workspace | None,
) -> tuple[Tensor, Tensor]:
    """Both launches, from shares, or with a total from log-masses."""
    B, heads, N = source.shape
    device = source.device
    ids, counts = out or (
        torch.empty((B, num_kv_heads, pages), dtype=torch.int32, device=device),
        torch.empty((B, num_kv_heads), dtype=torch.int32, device=device),
    )
    shape, group = plan(N, pages), 0 if total is None else heads // num_kv_heads
    if work is None:
        work = workspace(B, num_kv_heads, N, pages, device)
    for name, buffer, width in zip(work._fields, work, widths(N, pages), strict=True):
        room = (B, num_kv_heads, width)
        if any(have < need for have, need in zip(buffer.shape, room, strict=True)):
            raise ValueError(f"work.{name}: expected at least {list(room)}, got {list(buffer.shape)}")
    keys, maxima, chosen = work
    slots = max(1, min(B * triton.cdiv(N, shape.block_n), triton.cdiv(PROGRAMS, num_kv_heads)))
    keys_kernel[(slots if B == 1 else slots + B, num_kv_heads)](
        source,
        total,
        seq_lens,
        keys,
        maxima,
        *source.stride()[:2],
        0 if total is None else total.stride(0),
        *keys.stride()[:2],
        *maxima.stride()[:2],
        N,
        window_pages,
        B,
        slots,
        P=page,
        M=pages,
        G=group,
        BLOCK_G=triton.next_power_of_2(group),
        GROUP=shape.group,
        BLOCK_N=shape.block_n,
        BLOCK_B=triton.next_power_of_2(B),
        EARLY=early,
        num_warps=min(8, shape.block_n // 128),
        **dependent(keys_kernel, device),
    )
    if not shape.block_c:
        tiles_kernel[(num_kv_heads, B)](
            keys,
            seq_lens,
            ids,
            counts,
            *keys.stride()[:2],
            *ids.stride()[:2],
            counts.stride(0),
            N,
            window_pages,
            P=page,
            M=pages,
            BLOCK_M=triton.next_power_of_2(pages),
            BLOCK_N=1024,
            num_warps=8,
        )
        return ids, counts
    select_kernel[(num_kv_heads, B)](
        keys,
        maxima,
        seq_lens,
        ids,
        counts,
        chosen,
        *keys.stride()[:2],
        *maxima.stride()[:2],
        *ids.stride()[:2],
        counts.stride(0),
        *chosen.stride()[:2],
        N,
        window_pages,
        P=page,
        M=pages,
        GROUP=shape.group,
        BLOCK_M=triton.next_power_of_2(pages),
        BLOCK_C=shape.block_c,
        SLOTS=shape.slots,
        WARPS=shape.warps,
        num_warps=shape.warps,
        # Few programs: registers limit none, but for more of them at once the assembler would spill.
        maxnreg=255,
        **dependent(select_kernel, device),
    )
    return ids, counts
