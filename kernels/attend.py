"""Attend: softmax(scale * q K^T) V over the listed pages, split over pages and merged by log-sum-exp.

One program attends to PAGES pages of one (row, KV head) for all query heads of its group and writes a normalised
partial output with its lse; `merge` adds the partials in page order, so the sum's order is fixed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import KernelConfig, device_name, tuned
from .dependent import dependent, release, wait


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
    P: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Partial output and lse of one split; a split without tokens gives 0 and -inf."""
    wait(DEPENDENT)
    release(DEPENDENT)
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    BLOCK_T: tl.constexpr = PAGES * P
    off_t = tl.arange(0, BLOCK_T)
    off_g = tl.arange(0, BLOCK_G)
    off_d = tl.arange(0, BLOCK_D)
    off_v = tl.arange(0, BLOCK_DV)
    mask_g = off_g < G
    q_head = head * G + off_g
    length = tl.minimum(tl.load(seq_lens_ptr + row), room)
    count = tl.load(counts_ptr + row * stride_c_b + head)
    slot = split * PAGES + off_t // P
    # Does not wait for the count; what is listed behind it is left out below.
    page = tl.load(ids_ptr + row * stride_i_b + head * stride_i_h + slot, mask=slot < most, other=-1)
    out_at = (
        row * stride_o_b + q_head[:, None] * stride_o_h + split.to(tl.int64) * stride_o_s + off_v[None, :]
    )
    out_mask = mask_g[:, None] & (off_v < DV)[None, :]
    lse_at = lse_ptr + row * stride_l_b + q_head * stride_l_h + split
    if split * PAGES >= count:
        tl.store(out_ptr + out_at, tl.zeros((BLOCK_G, BLOCK_DV), tl.float32), mask=out_mask)
        tl.store(lse_at, tl.full((BLOCK_G,), -float("inf"), tl.float32), mask=mask_g)
    else:
        token = page * P + off_t % P
        mask_t = (slot < count) & (page >= 0) & (token < length)
        block_table_ptr += row // q_len * stride_t_b
        block = tl.load(block_table_ptr + token // block_size, mask=mask_t, other=0).to(tl.int64)
        place = (token % block_size).to(tl.int64)
        mask = mask_t[:, None] & (off_d < D)[None, :]
        at = block * stride_k_b + head * stride_k_h + place * stride_k_t
        # [BLOCK_T, BLOCK_D]
        k = tl.load(k_ptr + at[:, None] + off_d[None, :], mask=mask, other=0.0)
        at = block * stride_v_b + head * stride_v_h + place * stride_v_t
        # [BLOCK_T, BLOCK_DV]
        v = tl.load(
            v_ptr + at[:, None] + off_v[None, :], mask=mask_t[:, None] & (off_v < DV)[None, :], other=0.0
        )
        # [BLOCK_G, BLOCK_D]
        q = tl.load(
            q_ptr + row * stride_q_b + q_head[:, None] * stride_q_h + off_d[None, :],
            mask=mask_g[:, None] & (off_d < D)[None, :],
            other=0.0,
        )
        # [BLOCK_G, BLOCK_T]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(mask_t[None, :], logits, -float("inf"))
        top = tl.max(logits, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp(logits - top[:, None])
        mass = tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        # A split whose tokens all lie behind the row's end has no mass.
        safe = tl.where(mass == 0.0, 1.0, mass)
        tl.store(out_ptr + out_at, out / safe[:, None], mask=out_mask)
        lse = tl.where(mass == 0.0, -float("inf"), top + tl.log(safe))
        tl.store(lse_at, lse, mask=mask_g)


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
    BLOCK_DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = sum_s exp(lse_s - lse) part_s, BLOCK_S splits at a time in order; nan in a part stays nan."""
    wait(DEPENDENT)
    release(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    off_v = tl.arange(0, BLOCK_DV)
    best = tl.full((1,), -float("inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    out = tl.zeros((BLOCK_DV,), tl.float32)
    for s in range(0, num_splits, BLOCK_S):
        off_s = s + tl.arange(0, BLOCK_S)
        mask_s = off_s < num_splits
        lse = tl.load(
            lse_ptr + row * stride_l_b + head * stride_l_h + off_s, mask=mask_s, other=-float("inf")
        )
        at = row * stride_p_b + head * stride_p_h + off_s[:, None].to(tl.int64) * stride_p_s + off_v[None, :]
        # [BLOCK_S, BLOCK_DV]
        part = tl.load(part_ptr + at, mask=mask_s[:, None] & (off_v < DV)[None, :], other=0.0)
        new = tl.maximum(best, tl.max(lse, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        keep = tl.exp(best - safe)
        weight = tl.exp(lse - safe)
        mass = mass * keep + tl.sum(weight, 0)
        out = out * keep + tl.sum(part * weight[:, None], 0)
        best = new
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


class Workspace(NamedTuple):
    """What the splits leave for `merge_kernel`, float32; its contents before a call do not matter."""

    # [B, Hq, splits, Dv]
    part: Tensor
    # [B, Hq, splits]
    lse: Tensor


def workspace(
    B: int,
    Hq: int,
    M: int,
    page: int,
    head_dim: int,
    value_dim: int,
    device: torch.device | str,
    config: KernelConfig | None = None,
) -> Workspace:
    """Buffers for lists of M pages: one set is enough for all layers."""
    config = config or default_config(page, max(head_dim, value_dim), device)
    shape = (B, Hq, triton.cdiv(M, config.block_n))
    return Workspace(
        torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
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
        BLOCK_DV=triton.next_power_of_2(DV),
        **dependent(merge_kernel, result.device),
    )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    page_ids: Tensor,
    counts: Tensor,
    *,
    page: int,
    scale: float,
    config: KernelConfig | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    work: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out [B, Hq, Dv] in q's dtype and lse [B, Hq] float32; arguments as in `locks.api.sparse_attention`.

    block_table may have B / q_len rows: q_len rows, one behind the other, then share one of them. With `out` and `work`
    (see `workspace`) nothing is allocated.

    Raises:
        ValueError: a buffer of `work` that is too small.
    """
    B, Hq, D = q.shape
    Hkv, block_size, DV = v_cache.shape[1:]
    M = page_ids.shape[2]
    config = config or default_config(page, max(D, DV), q.device)
    splits = triton.cdiv(M, config.block_n)
    if work is None:
        work = workspace(B, Hq, M, page, D, DV, q.device, config)
    part, part_lse = work
    if part.shape[0] < B or part.shape[1:] != (Hq, splits, DV):
        raise ValueError(f"work.part: expected at least {[B, Hq, splits, DV]}, got {list(part.shape)}")
    result, lse = out or (
        torch.empty((B, Hq, DV), dtype=q.dtype, device=q.device),
        torch.empty((B, Hq), dtype=torch.float32, device=q.device),
    )
    attend_kernel[(splits, Hkv, B)](
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
        *page_ids.stride()[:2],
        counts.stride(0),
        *part.stride()[:3],
        *part_lse.stride()[:2],
        scale,
        M,
        block_table.shape[1] * block_size,
        block_size,
        B // block_table.shape[0],
        P=page,
        G=Hq // Hkv,
        D=D,
        DV=DV,
        PAGES=config.block_n,
        BLOCK_G=max(16, triton.next_power_of_2(Hq // Hkv)),
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_DV=triton.next_power_of_2(DV),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent(attend_kernel, q.device),
    )
    merge(work, (result, lse))
    return result, lse
