"""Seal: the records of the pages that a decode step filled, of every layer in one launch.

A row fills a page when seq_len // P passes a whole number within its new tokens; its program for each layer and KV
head makes that page's record, and the others end at once. Which rows those are is read on the device alone, so a
launch can be captured in a CUDA graph and replayed at every step. The layers' caches are separate tensors, so the
kernel takes their addresses from a table that is made once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from locks.format import SummaryFormat

from .config import KernelConfig
from .summarize import launch_config, make_pages, record_constants


@triton.jit(do_not_specialize=["new_tokens", "total"])
def seal_kernel(
    pointers_ptr,
    k_ptr,
    rec_ptr,
    rec16_ptr,
    block_table_ptr,
    seq_lens_ptr,
    new_tokens_ptr,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_t_b,
    stride_r_b,
    stride_r_h,
    stride_r_p,
    new_tokens,
    total,
    per_block,
    P: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    MEAN_BITS: tl.constexpr,
    BASIS_BITS: tl.constexpr,
    COEF_BITS: tl.constexpr,
    BASIS_AT: tl.constexpr,
    COEF_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    NBYTES: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
):
    """The record of the page that one row filled, in one KV head of one layer; k_ptr .. rec16_ptr lend their types."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2)
    length = tl.load(seq_lens_ptr + row)
    if new_tokens_ptr is not None:
        new_tokens = tl.load(new_tokens_ptr + row)
    filled = length // P
    if (filled > total) | (filled <= tl.maximum(length - new_tokens, 0) // P):
        return
    k_at = tl.multiple_of(tl.load(pointers_ptr + 2 * layer).to(k_ptr.dtype), 16)
    rec_at = tl.load(pointers_ptr + 2 * layer + 1)
    # [1]
    page = filled - 1 + tl.arange(0, 1)
    block = tl.load(block_table_ptr + row * stride_t_b + page // per_block).to(tl.int64)
    slot = (page % per_block).to(tl.int64)
    # [1, P]
    token = slot[:, None] * P + tl.arange(0, P)[None, :]
    make_pages(
        k_at + (block[:, None] * stride_k_b + head * stride_k_h + token * stride_k_t),
        page >= 0,
        tl.multiple_of(rec_at.to(rec_ptr.dtype), 16),
        tl.multiple_of(rec_at.to(rec16_ptr.dtype), 16),
        block * stride_r_b + head * stride_r_h + slot * stride_r_p,
        None,
        None,
        None,
        page,
        P,
        R,
        D,
        MEAN_BITS,
        BASIS_BITS,
        COEF_BITS,
        BASIS_AT,
        COEF_AT,
        SCALES_AT,
        NBYTES,
        W,
        E,
        1,
        False,
    )


def layer_pointers(k_caches: Sequence[Tensor], records: Sequence[Tensor]) -> Tensor:
    """The addresses of every layer's keys and records, [layers, 2] int64 on their device, for `seal`.

    It holds no reference: whoever keeps it keeps the tensors.

    Args:
        k_caches: a layer's keys each, [num_blocks, Hkv, block, D], last axis contiguous.
        records: a layer's records each, [num_blocks, Hkv, block / P, record bytes] uint8, last axis contiguous.

    Raises:
        ValueError: no layer, other numbers of keys and records, an address that is no multiple of 16 bytes, or a layer
            whose shape, strides, dtype or device is not the first one's.
    """
    if not k_caches or len(k_caches) != len(records):
        raise ValueError(
            f"records: expected one tensor a layer, got {len(records)} for {len(k_caches)} layers' keys"
        )
    for name, tensors in (("k_caches", k_caches), ("records", records)):
        first = tensors[0]
        for i, tensor in enumerate(tensors):
            for what, want, got in (
                ("shape", list(first.shape), list(tensor.shape)),
                ("strides", first.stride(), tensor.stride()),
                ("dtype", first.dtype, tensor.dtype),
                ("device", k_caches[0].device, tensor.device),
            ):
                if want != got:
                    raise ValueError(f"{name}[{i}]: expected {what} {want}, got {got}")
            if tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name}[{i}]: expected a contiguous last axis, got stride {tensor.stride(-1)}"
                )
            if tensor.data_ptr() % 16:
                raise ValueError(
                    f"{name}[{i}]: expected an address that is a multiple of 16, got {tensor.data_ptr()}"
                )
    table = [[k.data_ptr(), r.data_ptr()] for k, r in zip(k_caches, records, strict=True)]
    return torch.tensor(table, dtype=torch.int64, device=k_caches[0].device)


def seal(
    pointers: Tensor,
    k_cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: SummaryFormat,
    *,
    new_tokens: Tensor | int = 1,
    config: KernelConfig | None = None,
) -> None:
    """Writes, in every layer, the record of the newest page that each row filled with its new tokens.

    Args:
        pointers: [layers, 2] int64, what `layer_pointers` made of the layers' keys and records.
        k_cache: one layer's keys, [num_blocks, Hkv, block, D]: only shape, strides and dtype are read.
        records: the same layer's records, [num_blocks, Hkv, block / P, record bytes] uint8, likewise.
        block_table: [B, max_blocks] int32, the layers' common one.
        seq_lens: [B] int32, tokens, the new ones counted; a row of 0 fills nothing, nor one above the table's room.
        fmt: the records' format.
        new_tokens: [B] int32 or one number, tokens that each row gained since the last launch; at most P of them, or
            pages before the newest are left out.
        config: launch shape, of which the pages a program are always 1; None for the default.
    """
    heads, D = k_cache.shape[1], k_cache.shape[3]
    per_block = k_cache.shape[2] // fmt.page
    several = isinstance(new_tokens, Tensor)
    if config is None:
        config = launch_config(fmt, 1, D, k_cache.device)
    seal_kernel[(block_table.shape[0], heads, pointers.shape[0])](
        pointers,
        k_cache,
        records.view(torch.int8),
        records.view(torch.int16),
        block_table,
        seq_lens,
        new_tokens if several else None,
        *k_cache.stride()[:3],
        block_table.stride(0),
        *records.stride()[:3],
        0 if several else new_tokens,
        block_table.shape[1] * per_block,
        per_block,
        **record_constants(fmt, D),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
