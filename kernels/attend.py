"""Attend: softmax(scale * q K^T) V over the listed pages, split over pages and merged by log-sum-exp.

One program attends to a tile of PAGES pages of one (row, KV head), or to several tiles of a long row, for all query
heads of its group and writes a normalised partial output with its lse; `merge` adds the partials in the order of their
programs, so the sum's order is fixed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend_steps import attend_steps
from .config import KernelConfig, device_name, tuned
from .dependent import dependent, release, wait

# So many partial outputs of a list are added up in little more time than one; and the most of a whole row.
MAX_SPLITS = 64
WHOLE_SPLITS = 66


@triton.jit
def locate(block_table_ptr, page, place, live, length, block_size, P: tl.constexpr):
    """Which of the slots, P to a page, hold a token: and its block, and its place in there."""
    token = page * P + place
    live = live & (page >= 0) & (token < length)
    block = tl.load(block_table_ptr + token // block_size, mask=live, other=0)
    return live, block.to(tl.int64), (token % block_size).to(tl.int64)


@triton.jit
def read(ptr, block, place, live, stride_b, stride_t, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Keys or values, 0 where no token is."""
    off = tl.arange(0, BLOCK)
    at = block * stride_b + place * stride_t
    return tl.load(ptr + at[:, None] + off[None, :], mask=live[:, None] & (off < WIDTH)[None, :], other=0.0)


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    stride_q_b,
    stride_q_h,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_t_b,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    stride_o_b,
    stride_o_h,
    stride_o_s,
    stride_l_b,
    stride_l_h,
    scale,
    most,
    room,
    block_size,
    q_len,
    dense_below,
    P: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    DENSE: tl.constexpr,
    PAIRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Partial output and lse of one split; a split without tokens writes nothing but an lse of -inf.

    Split s takes tiles s, s + S, s + 2 S and so on of PAGES pages, so that a row's length alone decides its cut. One
    tile is read at once; several (STEP > 0) by STEP tokens, whose reads overlap.
    """
    wait(DEPENDENT)
    release(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    # The slowest axis: programs without tokens come last and fill up what the others leave.
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    BLOCK_T: tl.constexpr = PAGES * P
    off_t = tl.arange(0, BLOCK_T)
    off_g = tl.arange(0, BLOCK_G)
    off_d = tl.arange(0, BLOCK_D)
    off_v = tl.arange(0, BLOCK_DV)
    mask_g = off_g < G
    q_head = head * G + off_g
    length = tl.minimum(tl.load(seq_lens_ptr + row), room)
    slot = split * PAGES + off_t // P
    whole = length < dense_below
    if LISTED:
        count = tl.minimum(tl.load(counts_ptr + row * stride_c_b + head), most)
        ids_ptr += row * stride_i_b + head * stride_i_h
        # Does not wait for the count; what is listed behind it is left out below.
        page = tl.load(ids_ptr + slot, mask=slot < most, other=-1)
        if DENSE:
            count = tl.where(whole, tl.cdiv(length, P), count)
            page = tl.where(whole, slot, page)
    else:
        count = tl.cdiv(length, P)
        page = slot
    out_at = (
        out_ptr
        + row * stride_o_b
        + q_head[:, None] * stride_o_h
        + split.to(tl.int64) * stride_o_s
        + off_v[None, :]
    )
    out_mask = mask_g[:, None] & (off_v < DV)[None, :]
    lse_at = lse_ptr + row * stride_l_b + q_head * stride_l_h + split
    if split * PAGES >= count:
        tl.store(lse_at, tl.full((BLOCK_G,), -float("inf"), tl.float32), mask=mask_g)
    else:
        block_table_ptr += row // q_len * stride_t_b
        k_ptr += head * stride_k_h
        v_ptr += head * stride_v_h
        q_at = q_ptr + row * stride_q_b + q_head[:, None] * stride_q_h + off_d[None, :]
        mask_q = mask_g[:, None] & (off_d < D)[None, :]
        if STEP == 0 or (split + splits) * PAGES >= count:
            live, block, place = locate(block_table_ptr, page, off_t % P, slot < count, length, block_size, P)
            # [BLOCK_T, BLOCK_D], [BLOCK_T, BLOCK_DV]
            k = read(k_ptr, block, place, live, stride_k_b, stride_k_t, D, BLOCK_D)
            v = read(v_ptr, block, place, live, stride_v_b, stride_v_t, DV, BLOCK_DV)
            # [BLOCK_G, BLOCK_D]
            q = tl.load(q_at, mask=mask_q, other=0.0)
            # [BLOCK_G, BLOCK_T]
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            logits = tl.where(live[None, :], logits, -float("inf"))
            top = tl.max(logits, 1)
            top = tl.where(top == -float("inf"), 0.0, top)
            weights = tl.exp(logits - top[:, None])
            mass = tl.sum(weights, 1)
            out = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            top, mass, out = attend_steps(
                tl.load(q_at, mask=mask_q, other=0.0),
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
                P,
                D,
                DV,
                PAGES,
                PER_BLOCK,
                BLOCK_G,
                BLOCK_D,
                BLOCK_DV,
                STEP,
                STAGES,
                LISTED,
                PAIRED,
            )
        # A split whose tokens all lie behind the row's end has no mass.
        safe = tl.where(mass == 0.0, 1.0, mass)
        tl.store(out_at, out / safe[:, None], mask=out_mask)
        tl.store(lse_at, tl.where(mass == 0.0, -float("inf"), top + tl.log(safe)), mask=mask_g)


@triton.jit
def add_parts(
    best,
    mass,
    out,
    part_ptr,
    lse_ptr,
    first,
    num_splits,
    stride_p_s,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Largest lse, mass and sum with BLOCK_S splits more; what lies where a split wrote no part is left out."""
    off_s = first + tl.arange(0, BLOCK_S)
    off_v = tl.arange(0, BLOCK_DV)
    mask_s = off_s < num_splits
    lse = tl.load(lse_ptr + off_s, mask=mask_s, other=-float("inf"))
    at = off_s[:, None].to(tl.int64) * stride_p_s + off_v[None, :]
    # [BLOCK_S, BLOCK_DV]
    part = tl.load(part_ptr + at, mask=mask_s[:, None] & (off_v < DV)[None, :], other=0.0)
    # Not by the load's mask, which would make it wait for the lse.
    part = tl.where((lse == -float("inf"))[:, None], 0.0, part)
    new = tl.maximum(best, tl.max(lse, 0))
    safe = tl.where(new == -float("inf"), 0.0, new)
    keep = tl.exp(best - safe)
    weight = tl.exp(lse - safe)
    mass = mass * keep + tl.sum(weight, 0)
    out = out * keep + tl.sum(part * weight[:, None], 0)
    return new, mass, out


@triton.jit
def merge_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    stride_p_b,
    stride_p_h,
    stride_p_s,
    stride_l_b,
    stride_l_h,
    stride_o_b,
    stride_o_h,
    stride_e_b,
    num_splits,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = sum_s exp(lse_s - lse) part_s, BLOCK_S splits at a time in order; nan in a part stays nan."""
    wait(DEPENDENT)
    release(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    off_v = tl.arange(0, BLOCK_DV)
    off_l = tl.arange(0, BLOCK_L)
    part_ptr += row * stride_p_b + head * stride_p_h
    lse_ptr += row * stride_l_b + head * stride_l_h
    best = tl.full((1,), -float("inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    out = tl.zeros((BLOCK_DV,), tl.float32)
    # The first splits' parts are asked for before it is known how many there are.
    every = tl.load(lse_ptr + off_l, mask=off_l < num_splits, other=-float("inf"))
    best, mass, out = add_parts(
        best, mass, out, part_ptr, lse_ptr, 0, num_splits, stride_p_s, DV, BLOCK_S, BLOCK_DV
    )
    if BLOCK_L > BLOCK_S:
        used = tl.max(tl.where(every == -float("inf"), 0, off_l + 1), 0)
        for first in range(BLOCK_S, used, BLOCK_S):
            best, mass, out = add_parts(
                best, mass, out, part_ptr, lse_ptr, first, num_splits, stride_p_s, DV, BLOCK_S, BLOCK_DV
            )
    safe = tl.where(mass == 0.0, 1.0, mass)
    out = (out / safe).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_o_b + head * stride_o_h + off_v, out, mask=off_v < DV)
    lse = tl.where(mass == 0.0, -float("inf"), best + tl.log(safe))
    tl.store(out_lse_ptr + row * stride_e_b + head + tl.arange(0, 1), lse)


def default_config(page: int, head_dim: int, device: torch.device | str = "cpu") -> KernelConfig:
    """What was the fastest on the device; else 128 tokens a split (64 at D > 128, where K and V fit no registers).

    block_n counts pages.
    """
    found = tuned(device_name(torch.device(device)), "attend", page=page, head_dim=head_dim)
    if found is not None:
        return found
    tokens = 128 if head_dim <= 128 else 64
    return KernelConfig(block_n=max(1, tokens // page), num_warps=4 if head_dim <= 128 else 8)


@dataclass(frozen=True)
class Plan:
    """How rows are cut: `splits` programs a KV head; those with more than one tile read `step` tokens at a time.

    The reads of `stages` steps but one are under way at once; a step of 0 where no program can have more than one tile.
    """

    splits: int
    step: int
    stages: int


def default_plan(
    listed: int, whole: int, *, page: int, head_dim: int, num_kv_heads: int, config: KernelConfig
) -> Plan:
    """The plan for lists of `listed` pages and whole rows of `whole` pages at most.

    A whole row has two programs for each of an H200's multiprocessors; a list one for each tile, as far as
    `merge_kernel` adds them up fast. A row's cut is the same in every plan that has more splits than the row has tiles.
    """
    tile = config.block_n
    tiles = triton.cdiv(listed, tile), triton.cdiv(whole, tile)
    splits = max(
        1, min(tiles[0], MAX_SPLITS), min(tiles[1], max(16, min(WHOLE_SPLITS, 2 * 132 // num_kv_heads)))
    )
    # Measured at 128 (16,384 tokens, 4 KV heads: 66 splits and 3 stages 15.7 us, 2 stages 16.5, 99 splits 17.2); at
    # other widths a step of 64 tokens does not stay in registers.
    step = min(tile * page, 64 if head_dim == 128 else 32)
    return Plan(splits, step if splits < max(tiles) else 0, 3)


class Workspace(NamedTuple):
    """What the splits leave for `merge_kernel`, float32; its contents before a call do not matter."""

    # [B, Hq, splits, Dv]
    part: Tensor
    # [B, Hq, splits]
    lse: Tensor


def workspace(B: int, Hq: int, splits: int, value_dim: int, device: torch.device | str) -> Workspace:
    """Buffers for that many splits: one set is enough for all layers."""
    return Workspace(
        torch.empty((B, Hq, splits, value_dim), dtype=torch.float32, device=device),
        torch.empty((B, Hq, splits), dtype=torch.float32, device=device),
    )


def merge(work: Workspace, out: tuple[Tensor, Tensor]) -> None:
    """Writes the splits' parts added up, and their lse, into out [B, Hq, Dv] and lse [B, Hq]."""
    (part, part_lse), (result, lse) = work, out
    B, Hq, DV = result.shape
    merge_kernel[(Hq, B)](
        part,
        part_lse,
        result,
        lse,
        *part.stride()[:3],
        *part_lse.stride()[:2],
        *result.stride()[:2],
        lse.stride(0),
        part.shape[2],
        DV=DV,
        BLOCK_S=16,
        BLOCK_L=triton.next_power_of_2(part.shape[2]),
        BLOCK_DV=triton.next_power_of_2(DV),
        # A warp adds up without waiting for others.
        num_warps=1,
        **dependent(merge_kernel, result.device),
    )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    page_ids: Tensor | None,
    counts: Tensor | None,
    *,
    page: int,
    scale: float,
    dense_below: int = 0,
    config: KernelConfig | None = None,
    plan: Plan | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    work: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out [B, Hq, Dv] in q's dtype and lse [B, Hq] float32; arguments as in `locks.api.sparse_attention`.

    Rows of fewer than `dense_below` tokens, and all rows where page_ids and counts are None, attend to all their
    pages. block_table may have B / q_len rows: q_len rows, one behind the other, then share one of them. With `out` and
    `work` (see `workspace`) nothing is allocated.

    Raises:
        ValueError: a buffer of `work` that is too small.
    """
    B, Hq, D = q.shape
    Hkv, block_size, DV = v_cache.shape[1:]
    room = block_table.shape[1] * block_size
    config = config or default_config(page, max(D, DV), q.device)
    if page_ids is None or counts is None:
        listed, M, strides, dense_below = False, 0, (0, 0, 0), 2**31 - 1
    else:
        # An empty list is a list.
        listed, M, strides = True, page_ids.shape[2], (*page_ids.stride()[:2], counts.stride(0))
    if plan is None:
        whole = triton.cdiv(max(0, min(room, dense_below - 1)), page)
        width = max(D, DV)
        plan = default_plan(M, whole, page=page, head_dim=width, num_kv_heads=Hkv, config=config)
    if work is None:
        work = workspace(B, Hq, plan.splits, DV, q.device)
    part, part_lse = work
    if part.shape[0] < B or part.shape[1:] != (Hq, plan.splits, DV):
        raise ValueError(f"work.part: expected at least {[B, Hq, plan.splits, DV]}, got {list(part.shape)}")
    result, lse = out or (
        torch.empty((B, Hq, DV), dtype=q.dtype, device=q.device),
        torch.empty((B, Hq), dtype=torch.float32, device=q.device),
    )
    attend_kernel[(Hkv, B, plan.splits)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        page_ids,
        counts,
        part,
        part_lse,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *strides,
        *part.stride()[:3],
        *part_lse.stride()[:2],
        scale,
        M,
        room,
        block_size,
        B // block_table.shape[0],
        dense_below,
        P=page,
        G=Hq // Hkv,
        D=D,
        DV=DV,
        PAGES=config.block_n,
        BLOCK_G=max(16, triton.next_power_of_2(Hq // Hkv)),
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_DV=triton.next_power_of_2(DV),
        STEP=plan.step,
        STAGES=plan.stages,
        PER_BLOCK=block_size // page,
        LISTED=listed,
        DENSE=dense_below > 0,
        PAIRED=k_cache.stride()[:3] == v_cache.stride()[:3],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent(attend_kernel, q.device),
    )
    merge(work, (result, lse))
    return result, lse
