"""What a choice of pages keeps of exact attention: mass, carriers, the oracle's choice, the output."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from contexts import Rows
from torch import Tensor

from locks import PageList, api, torch_impl
from locks.pages import by_page, candidates, gather_pages, scored
from locks.types import PageMass

# What `kept` tells of a choice, each a number a row.
MEASURES = ("mass", "of_oracle", "carriers", "overlap", "output_error")


class Exact(NamedTuple):
    """Exact attention of rows, page by page.

    log_mass [B, Hq, N] of every page, the newest included, -inf behind it; lse [B, Hq]; page_out [B, Hq, N, Dv] of
    each page alone; out [B, Hq, Dv] of all; scores: what the oracle ranks by.
    """

    log_mass: Tensor
    lse: Tensor
    page_out: Tensor
    out: Tensor
    scores: PageMass


def exact(rows: Rows, page: int) -> Exact:
    """Exact attention of every row over its own tokens."""
    total = rows.block_table.shape[1] * rows.k_cache.shape[2] // page
    pages = torch.arange(total, device=rows.q.device).expand(len(rows.q), -1)
    keys, values = (
        gather_pages(by_page(cache, page), rows.block_table, pages).float() for cache in rows[1:3]
    )
    live = pages[..., None] * page + torch.arange(page, device=pages.device) < rows.seq_lens[:, None, None]
    # What stands behind a row's last token belongs to another position.
    keys, values = (torch.where(live[:, None, ..., None], x, 0) for x in (keys, values))
    query = rows.q.unflatten(1, (rows.heads, -1)).float() * rows.scale
    logits = (query @ keys.flatten(2, 3).mT).unflatten(-1, (-1, page))
    logits = torch.where(live[:, None, None], logits, -math.inf)
    # [B, Hkv, G, N]
    log_mass = logits.logsumexp(-1)
    weights = torch.where(log_mass[..., None].isfinite(), logits.softmax(-1), 0)
    page_out = torch.einsum("bhgnp,bhnpd->bhgnd", weights, values)
    lse = log_mass.logsumexp(-1)
    out = torch.einsum("bhgn,bhgnd->bhgd", (log_mass - lse[..., None]).exp(), page_out)
    log_mass, lse, page_out, out = (x.flatten(1, 2) for x in (log_mass, lse, page_out, out))
    # The newest page is never scored.
    scores = torch.where(scored(rows.seq_lens, page, total)[:, None], log_mass, -math.inf)
    totals = torch_impl.total_mass(scores, rows.seq_lens, page=page, window_pages=1)
    return Exact(log_mass, lse, page_out, out, PageMass(scores, totals))


def choose(mass: PageMass, rows: Rows, page: int, budget: int) -> PageList:
    """The group's sum of shares and the first M pages by it."""
    share = api.page_share(mass, rows.heads, impl="torch")
    return api.select_pages(share, rows.seq_lens, page=page, budget=budget, impl="torch")


def listed(pages: PageList, total: int) -> Tensor:
    """[B, Hkv, N] bool: which pages a list names."""
    ids = torch.where(pages.page_ids >= 0, pages.page_ids, total).long()
    mask = torch.zeros((*ids.shape[:2], total + 1), dtype=torch.bool, device=ids.device)
    return mask.scatter(2, ids, True)[..., :total]


def carriers(truth: Exact, rows: Rows, page: int, kept: int) -> Tensor:
    """[B, Hq, N] bool: candidates that hold at least 1/M of a query head's exact mass, M = `kept`."""
    able = candidates(rows.seq_lens, page, truth.log_mass.shape[-1])[:, None]
    return able & (truth.log_mass - truth.lse[..., None] >= -math.log(kept))


def kept(truth: Exact, rows: Rows, page: int, pages: PageList, best: PageList) -> dict[str, Tensor]:
    """`MEASURES` of a choice, [B] each; `best` is the oracle's.

    mass: share of a query head's mass that the attended pages hold, mean over heads; of_oracle: mass of the
    candidates they hold, over that of the oracle's; carriers: share of all heads' carriers that are attended to, nan
    where there is none; overlap: share of the oracle's candidates; output_error: |out - dense| / |dense|, mean over
    heads.
    """
    total, group = truth.log_mass.shape[-1], rows.q.shape[1] // rows.heads
    mine, oracle = listed(pages, total), listed(best, total)
    able = candidates(rows.seq_lens, page, total)[:, None]
    share = (truth.log_mass - truth.lse[..., None]).exp()
    heads, heads_oracle = (x.repeat_interleave(group, 1) for x in (mine, oracle))
    weight = torch.where(heads, share, 0)
    mass = weight.sum(-1)
    out = torch.einsum("bhn,bhnd->bhd", weight, truth.page_out) / mass[..., None]
    gained, possible = ((share * (x & able)).sum((1, 2)) for x in (heads, heads_oracle))
    heavy = carriers(truth, rows, page, pages.page_ids.shape[-1])
    return {
        "mass": mass.mean(1),
        "of_oracle": gained / possible,
        "carriers": (heavy & heads).sum((1, 2)) / heavy.sum((1, 2)),
        "overlap": (mine & oracle & able).sum((1, 2)) / (oracle & able).sum((1, 2)),
        "output_error": ((out - truth.out).norm(dim=-1) / truth.out.norm(dim=-1)).mean(1),
    }
