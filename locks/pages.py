"""Page arithmetic: which pages a row has, which are always kept, which compete, and how many a budget buys.

A row of T tokens has N = ceil(T / P) pages. Page 0 and the newest `window_pages` (the last one holds position T - 1,
full or not) are always attended. The pages between are the candidates: each is full and has a record.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_pages(seq_lens: Tensor, page: int) -> Tensor:
    """N = ceil(T / P) of every row."""
    return (seq_lens + (page - 1)) // page


def least_budget(page: int, window_pages: int = 1) -> int:
    """The least budget in tokens: the first page, the newest ones and one candidate."""
    return (window_pages + 2) * page


def budget_pages(budget: int, page: int, window_pages: int = 1) -> int:
    """M = budget / P, the pages a KV head attends to, always kept ones included.

    Raises:
        ValueError: the budget is no multiple of the page or below `least_budget`.
    """
    least = least_budget(page, window_pages)
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget: expected a number of tokens (int), got {budget!r}")
    if budget < least:
        raise ValueError(
            f"budget: expected at least {least} tokens (first page, {window_pages} newest, one candidate, "
            f"{page} tokens each), got {budget}"
        )
    if budget % page:
        raise ValueError(f"budget: expected a multiple of the page ({page} tokens), got {budget}")
    return budget // page


def scored(seq_lens: Tensor, page: int, max_pages: int) -> Tensor:
    """[B, max_pages] bool: pages that get a log-mass, all but the newest."""
    ids = torch.arange(max_pages, device=seq_lens.device)
    return ids < (num_pages(seq_lens, page).clamp(max=max_pages) - 1)[:, None]


def candidates(seq_lens: Tensor, page: int, max_pages: int, window_pages: int = 1) -> Tensor:
    """[B, max_pages] bool: pages that compete for the budget."""
    ids = torch.arange(max_pages, device=seq_lens.device)
    return (ids > 0) & (ids < (num_pages(seq_lens, page).clamp(max=max_pages) - window_pages)[:, None])


def by_page(cache: Tensor, page: int) -> Tensor:
    """A cache [num_blocks, Hkv, block, D] viewed as [num_blocks, Hkv, block / P, P, D]."""
    return cache.unflatten(2, (-1, page))


def gather_pages(paged: Tensor, block_table: Tensor, pages: Tensor) -> Tensor:
    """Rows' pages out of a tensor that has one entry per (block, KV head, page of the block).

    Args:
        paged: [num_blocks, Hkv, block / P, ...].
        block_table: [B, max_blocks] int32.
        pages: [B, K] (the same pages for every KV head) or [B, Hkv, K] page ids; ids outside the table read its
            nearest entry.

    Returns:
        [B, Hkv, K, ...].
    """
    heads, per_block = paged.shape[1], paged.shape[2]
    if pages.dim() == 2:
        pages = pages[:, None].expand(-1, heads, -1)
    pages = pages.long().clamp(0, block_table.shape[1] * per_block - 1)
    # [B, Hkv, K]
    blocks = block_table.long()[:, None].expand(-1, heads, -1).gather(2, pages // per_block)
    head = torch.arange(heads, device=paged.device)[None, :, None]
    return paged[blocks, head, pages % per_block]
