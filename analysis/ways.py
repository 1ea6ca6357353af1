"""The ways to rank pages that are compared, and each one's scores for the rows of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from contexts import FittedBasis, Rows
from outputs import InputError
from spectra import page_factors
from torch import Tensor

from locks import SummaryFormat, api, reference, torch_impl
from locks.baselines import SharedBasis, fit_shared
from locks.format import encode
from locks.pages import by_page, scored
from locks.selectors import Selector, make_selector
from locks.types import Factors, PageMass

# Mean, basis, coefficients.
DEFAULT, COARSE_BASIS, EIGHT = (8, 4, 4), (8, 4, 8), (8, 8, 8)


def make_format(page: int, rank: int, bits: tuple[int, int, int] = DEFAULT) -> SummaryFormat:
    """A record's format from its page, rank and bits."""
    return SummaryFormat(page, rank, *bits)


@dataclass(frozen=True)
class Way:
    """A selector by name; `fmt` is its format, the bytes it matches or its page alone; `fit` is a shared basis's:
    "cache" (the context it serves) or "held-out" (other prose).
    """

    name: str
    fmt: SummaryFormat
    fit: str = ""

    def cells(self, head_dim: int, tokens: int) -> dict[str, object]:
        """What a table says of it; bytes are of one KV head in a context of so many tokens."""
        fmt, sized = self.fmt, self.name in ("locks", "shared")
        pages = tokens // fmt.page
        nbytes = self.selector(head_dim).resident_bytes(head_dim, pages) / (pages * fmt.page)
        return {
            "selector": self.name,
            "fit": self.fit,
            "page": fmt.page,
            "rank": fmt.rank if sized else "",
            "bits": f"{fmt.mean_bits}/{fmt.basis_bits}/{fmt.coef_bits}" if sized else "",
            "shared_rank": SharedBasis.matching(fmt, head_dim).rank if self.name == "shared" else "",
            "bytes_a_token": nbytes,
            "share_of_kv": nbytes / (4 * head_dim),
        }

    def selector(self, head_dim: int, held_out: Sequence[Tensor] | None = None) -> Selector:
        """The selector itself, for decoding; `held_out` are the layers' keys a shared basis is fitted to."""
        if self.name == "shared":
            given = held_out if self.fit == "held-out" else None
            return FittedBasis(SharedBasis.matching(self.fmt, head_dim), given)
        return make_selector(self.name, self.fmt, head_dim)


def locks_ways(full: bool) -> list[Way]:
    """Page-local summaries: every page and rank, and more bits at pages of 16; or a few."""
    pages, ranks = ((16, 32, 64), (1, 2, 4, 8, 16)) if full else ((16, 64), (2, 4, 8))
    every = [(p, r, DEFAULT) for p in pages for r in ranks if r < p]
    if full:
        every += [(16, r, bits) for r in ranks if r < 16 for bits in (COARSE_BASIS, EIGHT)]
    return [Way("locks", make_format(*parts)) for parts in every]


def shared_ways(full: bool) -> list[Way]:
    """A shared basis at the bytes and bits of every page-local format of the default bits, fitted either way."""
    formats = [way.fmt for way in locks_ways(full) if way.fmt == make_format(way.fmt.page, way.fmt.rank)]
    return [Way("shared", fmt, fit) for fmt in formats for fit in ("cache", "held-out")]


def plain_ways(full: bool) -> list[Way]:
    """Everything without a rank."""
    pages = (16, 32, 64) if full else (16, 64)
    names = ("oracle", "quest", "arkvale", "mean", "random")
    return [
        Way(name, SummaryFormat(page))
        for name in names
        for page in pages
        if full or page == 16 or name == "oracle"
    ]


class Scorer:
    """Scores of one layer's rows in plain PyTorch; a page's factors are found once for all ranks and bits.

    The rows share nearly all of their blocks: every query is scored against every block once, as one row of many
    query heads, and each row then takes its own pages' scores.
    """

    def __init__(self, rows: Rows, held_out: Tensor | None = None) -> None:
        self.rows, self.held_out = rows, held_out
        self._factors: dict[int, Factors] = {}
        blocks, block = rows.k_cache.shape[0], rows.k_cache.shape[2]
        device = rows.q.device
        # The newest page is never scored: a last block of zeros stands behind all.
        self.k_cache = torch.cat([rows.k_cache, torch.zeros_like(rows.k_cache[:1])])
        self.table = torch.arange(blocks + 1, dtype=torch.int32, device=device)[None]
        self.seq_lens = torch.tensor([blocks * block + 1], dtype=torch.int32, device=device)
        # [1, Hkv * B * G, D]
        self.q = rows.q.unflatten(1, (rows.heads, -1)).transpose(0, 1).flatten(0, 2)[None]

    def factors(self, page: int, rank: int) -> Factors:
        """Of every page of the cache, [num_blocks, Hkv, block / P, ...]."""
        if page not in self._factors:
            self._factors[page] = page_factors(by_page(self.k_cache, page).float(), min(16, page - 1))
        mean, basis, coef = self._factors[page]
        return Factors(mean, basis[..., :rank, :], coef[..., :rank])

    def per_row(self, log_mass: Tensor, page: int) -> PageMass:
        """Each row's own pages [B, Hq, N] out of scores [1, Hkv * B * G, pages] of all queries and blocks."""
        rows, per_block = self.rows, self.k_cache.shape[2] // page
        every = log_mass[0].unflatten(0, (rows.heads, len(rows.q), -1)).transpose(0, 1)
        pages = rows.block_table.long()[..., None] * per_block + torch.arange(per_block, device=self.q.device)
        pages = pages.flatten(1)[:, None, None].expand(*every.shape[:3], -1)
        mine = every.gather(3, pages).flatten(1, 2)
        live = scored(rows.seq_lens, page, mine.shape[-1])[:, None]
        mine = torch.where(live, mine, -math.inf)
        return PageMass(mine, torch_impl.total_mass(mine, rows.seq_lens, page=page, window_pages=1))

    def records(self, records: Tensor, fmt: SummaryFormat, *, spread: bool = True) -> PageMass:
        """Of records of `self.k_cache`; without the residual term where `spread` is False."""
        args = (self.q, records, self.table, self.seq_lens, fmt)
        if spread:
            mass = api.page_mass(*args, scale=self.rows.scale, impl="torch").log_mass
        else:
            mass = api.page_logits(*args, scale=self.rows.scale, impl="torch").logsumexp(-1)
        return self.per_row(mass, fmt.page)

    def exact(self, keys: Tensor, page: int) -> PageMass:
        """Of exact attention over other keys [num_blocks, Hkv, block, D] float32 in the places of `self.k_cache`."""
        # [1, Hkv, B * G, D] with [Hkv, D, tokens]
        query = self.q[0].unflatten(0, (self.rows.heads, -1)).float() * self.rows.scale
        logits = query @ keys.transpose(0, 1).flatten(1, 2).mT
        mass = logits.unflatten(-1, (-1, page)).logsumexp(-1)
        return self.per_row(mass.flatten(0, 1)[None], page)

    def locks(self, fmt: SummaryFormat) -> PageMass:
        """Of page-local records."""
        return self.records(encode(self.keys(fmt.page), self.factors(fmt.page, fmt.rank), fmt), fmt)

    def keys(self, page: int) -> Tensor:
        """[num_blocks, Hkv, block / P, P, D] float32."""
        return by_page(self.k_cache, page).float()

    def mass(self, way: Way) -> PageMass:
        """Of any way but the oracle."""
        if way.name == "locks":
            return self.locks(way.fmt)
        head_dim = self.q.shape[-1]
        selector = way.selector(head_dim)
        if way.name == "shared":
            like = SharedBasis.matching(way.fmt, head_dim)
            own = self.held_out if way.fit == "held-out" else self.context(way.fmt.page)
            if own is None:
                raise InputError("held_out: expected keys to fit a shared basis to, got none")
            factors = fit_shared(own, like.rank)
            selector = SharedBasis(like.page, like.rank, coef_bits=like.coef_bits, factors=factors)
        state = selector.allocate(self.k_cache)
        selector.seal(state, self.k_cache, self.table, self.seq_lens)
        mass = selector.page_mass(
            self.q, state, self.k_cache, self.table, self.seq_lens, scale=self.rows.scale
        )
        return self.per_row(mass.log_mass, way.fmt.page)

    def context(self, page: int) -> Tensor:
        """The keys [Hkv, T, D] of the first row's full pages."""
        keys = reference.row_tokens(*self.rows.keys_args, 0)
        return keys[:, : keys.shape[1] // page * page]
