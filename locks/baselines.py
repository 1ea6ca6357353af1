"""What page-local summaries are compared with: other ways to rank pages, in plain PyTorch on any device.

All keep something for every full page of a paged key cache and score pages in float32. A page that holds nan
or inf keeps nan in its last part, which marks it: it ranks first. No baseline reads a key once its page is
sealed. Numbers kept in the cache's dtype count 2 bytes an element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from locks import checks
from locks.format import (
    BITS,
    PAGES,
    SummaryFormat,
    bf16_value,
    code_max,
    pack_codes,
    round_up_bf16,
    unpack_codes,
)
from locks.pages import by_page, gather_pages, scored
from locks.torch_impl import total_mass
from locks.types import PageMass


class Part(NamedTuple):
    """`width` numbers a page; dtype None is the cache's own."""

    width: int
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes a page, at 2 bytes an element of the cache's dtype."""
        return self.width * (2 if self.dtype is None else self.dtype.itemsize)


class SharedFactors(NamedTuple):
    """One low-rank model of all keys of a layer: keys ~ mean + coefficients @ basis.

    mean: [Hkv, D]; basis: [Hkv, R, D], orthogonal rows, each as long as the square root of its standard
    deviation.
    """

    mean: Tensor
    basis: Tensor


@dataclass
class PageState:
    """What one layer keeps resident: parts [num_blocks, Hkv, block / P, width], and what its pages share."""

    parts: tuple[Tensor, ...]
    factors: SharedFactors | None = None


class _Baseline:
    """Allocation, sealing and masking; a baseline adds what it keeps of a page and how it scores it."""

    name: str

    def __init__(self, page: int = 16) -> None:
        if page not in PAGES:
            raise ValueError(f"page: expected one of {PAGES}, got {page!r}")
        self.page = page

    def _parts(self, head_dim: int) -> tuple[Part, ...]:
        """What a page keeps. The last part is of floating dtype: nan there marks a page."""
        raise NotImplementedError

    def _encode(self, state: PageState, keys: Tensor) -> tuple[Tensor, ...]:
        """Parts [n, Hkv, width] of pages [n, Hkv, P, D] in float32; a non-finite page's may be anything."""
        raise NotImplementedError

    def _score(self, state: PageState, query: Tensor, parts: tuple[Tensor, ...], pages: Tensor) -> Tensor:
        """Log-mass [B, Hkv, G, N]: scaled query [B, Hkv, G, D], parts [B, Hkv, N, width], pages [B, N]."""
        raise NotImplementedError

    def _of_rows(self, state: PageState, row: Tensor) -> PageState:
        """What pages of the rows [n] are encoded by: of one context's factors, all by the same."""
        return state

    def _settled(self, state: PageState) -> bool:
        """Whether encoding a page changes nothing but what is kept of it."""
        return True

    def allocate(self, k_cache: Tensor, carry: PageState | None = None) -> PageState:
        """State for a key cache [num_blocks, Hkv, block, D]; `carry` is the state of its first blocks."""
        dims: dict[str, int] = {}
        checks.tensor("k_cache", k_cache, ("num_blocks", "Hkv", "block", "D"), dims, dtypes=checks.FLOATS)
        checks.block(dims, self.page)
        shape = (dims["num_blocks"], dims["Hkv"], dims["block"] // self.page)
        parts = tuple(
            k_cache.new_zeros((*shape, part.width), dtype=part.dtype) for part in self._parts(dims["D"])
        )
        if carry is not None:
            for part, old in zip(parts, carry.parts, strict=True):
                part[: old.shape[0]] = old
        return PageState(parts, None if carry is None else carry.factors)

    def seal(
        self,
        state: PageState,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        start: Tensor | None = None,
        max_new_pages: int | None = None,
    ) -> None:
        """Summarises, in place, every page whose last slot lies in [start, seq_len) of its row."""
        paged = by_page(k_cache, self.page)
        total = block_table.shape[1] * paged.shape[2]
        first = torch.zeros_like(seq_lens) if start is None else start // self.page
        count = total if max_new_pages is None else min(max_new_pages, total)
        pages = first.long()[:, None] + torch.arange(count, device=seq_lens.device)
        filled = (pages < (seq_lens // self.page)[:, None]) & (pages < total)
        # A decode step does not wait for the device to learn which rows have filled a page: the others do what the
        # first of those does, and where there is none all write what is there.
        waits = max_new_pages != 1 or total == 0 or not self._settled(state)
        if waits:
            row, column = filled.nonzero(as_tuple=True)
        else:
            row, column = torch.arange(len(seq_lens), device=seq_lens.device), 0
            row = torch.where(filled[:, 0], row, filled[:, 0].int().argmax()) if len(row) else row
            pages = pages.clamp(max=total - 1)
        if row.numel() == 0:
            return
        page = pages[row, column]
        block, slot = block_table.long()[row, page // paged.shape[2]], page % paged.shape[2]
        # [n, Hkv, P, D]
        keys = paged[block, :, slot].to(torch.float32)
        finite = keys.isfinite().all(-1).all(-1)
        fresh = self._encode(self._of_rows(state, row), keys)
        fresh = (*fresh[:-1], torch.where(finite[..., None], fresh[-1], math.nan))
        for part, rows in zip(state.parts, fresh, strict=True):
            made = rows.to(part.dtype)
            part[block, :, slot] = made if waits else torch.where(filled.any(), made, part[block, :, slot])

    def page_mass(
        self,
        q: Tensor,
        state: PageState,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window_pages: int = 1,
    ) -> PageMass:
        """Returns log_mass [B, Hq, N] and total [B, Hq], float32; reads what was kept only."""
        query = q.unflatten(1, (state.parts[0].shape[1], -1)).to(torch.float32) * scale
        log_mass = self._of_blocks(state, query, block_table).flatten(1, 2)
        live = scored(seq_lens, self.page, log_mass.shape[2])[:, None]
        log_mass = torch.where(live, log_mass, -math.inf)
        return PageMass(log_mass, total_mass(log_mass, seq_lens, page=self.page, window_pages=window_pages))

    def _of_blocks(self, state: PageState, query: Tensor, block_table: Tensor) -> Tensor:
        """Log-mass [B, Hkv, G, N] of every page of the rows' blocks, inf for marked ones."""
        pages = torch.arange(block_table.shape[1] * state.parts[0].shape[2], device=query.device)
        pages = pages.expand(query.shape[0], -1)
        parts = tuple(gather_pages(part, block_table, pages) for part in state.parts)
        log_mass = self._score(state, query, parts, pages)
        return torch.where(parts[-1][..., 0].isnan()[:, :, None], math.inf, log_mass)

    def resident_bytes(self, head_dim: int, pages: int) -> float:
        """Every part of every page."""
        return float(pages * sum(part.nbytes for part in self._parts(head_dim)))

    def scan_bytes(self, head_dim: int, pages: int) -> float:
        """All that is resident, once."""
        return self.resident_bytes(head_dim, pages)


def _dot(query: Tensor, rows: Tensor) -> Tensor:
    """query [B, Hkv, G, D] . rows [B, Hkv, N, D], float32 [B, Hkv, G, N]."""
    return query @ rows.to(torch.float32).transpose(-1, -2)


class Quest(_Baseline):
    """Upper bound of a page's largest logit: sum_d max(q_d min_d, q_d max_d), min and max over its keys.

    Source: Quest (arXiv 2406.10774).
    """

    name = "quest"

    def _parts(self, head_dim: int) -> tuple[Part, ...]:
        return Part(head_dim), Part(head_dim)

    def _encode(self, state: PageState, keys: Tensor) -> tuple[Tensor, ...]:
        return keys.amin(-2), keys.amax(-2)

    def _score(self, state: PageState, query: Tensor, parts: tuple[Tensor, ...], pages: Tensor) -> Tensor:
        low, high = parts
        return _dot(query.clamp(max=0), low) + _dot(query.clamp(min=0), high)


class MeanKey(_Baseline):
    """log P + q . mean: every key of the page taken for its mean."""

    name = "mean"

    def _parts(self, head_dim: int) -> tuple[Part, ...]:
        return (Part(head_dim),)

    def _encode(self, state: PageState, keys: Tensor) -> tuple[Tensor, ...]:
        return (keys.mean(-2),)

    def _score(self, state: PageState, query: Tensor, parts: tuple[Tensor, ...], pages: Tensor) -> Tensor:
        return math.log(self.page) + _dot(query, parts[0])


class ArkVale(_Baseline):
    """Upper bound of a page's largest logit: q . c + |q| r, the page within radius r of its centre c.

    The centre is the mean as stored; the radius is rounded up to bfloat16, so the bound holds for what is
    stored.

    Source: ArkVale (NeurIPS 2024), the bounding ball.
    """

    name = "arkvale"

    def _parts(self, head_dim: int) -> tuple[Part, ...]:
        return Part(head_dim), Part(1, torch.bfloat16)

    def _encode(self, state: PageState, keys: Tensor) -> tuple[Tensor, ...]:
        center = keys.mean(-2).to(state.parts[0].dtype)
        radius = (keys - center.to(torch.float32)[..., None, :]).norm(dim=-1).amax(-1)
        return center, round_up_bf16(radius).view(torch.bfloat16)[..., None]

    def _score(self, state: PageState, query: Tensor, parts: tuple[Tensor, ...], pages: Tensor) -> Tensor:
        center, radius = parts
        return (
            _dot(query, center) + query.norm(dim=-1)[..., None] * radius[..., 0].to(torch.float32)[:, :, None]
        )


class RandomPages(_Baseline):
    """A pseudo-random log-mass in -log 2^24 .. 0, a function of seed, row, query head and page alone."""

    name = "random"

    def __init__(self, page: int = 16, *, seed: int = 0) -> None:
        super().__init__(page)
        self.seed = seed

    def _parts(self, head_dim: int) -> tuple[Part, ...]:
        # Nothing but the mark of a non-finite page.
        return (Part(1, torch.bfloat16),)

    def _encode(self, state: PageState, keys: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(keys[..., 0, :1]),)

    def _score(self, state: PageState, query: Tensor, parts: tuple[Tensor, ...], pages: Tensor) -> Tensor:
        rows, heads, group = query.shape[:3]
        head = torch.arange(heads * group, device=query.device).unflatten(0, (heads, group))
        x = _mix(torch.arange(rows, device=query.device)[:, None, None] + (self.seed << 20))
        x = _mix(_mix(x + head)[..., None] + pages[:, None, None])
        return ((x % 2**24 + 1).to(torch.float32) / 2**24).log()


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers in int64 that scatters neighbours (the finaliser of MurmurHash3)."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        # The product of two 32-bit numbers wraps in int64, which leaves its low 32 bits right.
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def fit_shared(keys: Tensor, rank: int) -> SharedFactors:
    """Principal directions of the finite ones of keys [Hkv, tokens, D], largest first, in bfloat16."""
    live = keys.isfinite().all(-1, keepdim=True)
    count = live.sum(1, keepdim=True).clamp(min=1)
    clean = torch.where(live, keys, 0).to(torch.float32)
    # Squares of normalised keys cannot overflow; the basis may be as long as it likes.
    unit = clean.abs().amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    clean = clean / unit
    mean = clean.sum(1, keepdim=True) / count
    centred = torch.where(live, clean - mean, 0)
    variance, vectors = torch.linalg.eigh(centred.mT @ centred / count)
    # [Hkv, R, D]
    basis = vectors.mT.flip(1)[:, :rank]
    # Columns of equal deviation would spend the codes of one scale on noise, unscaled ones would round small
    # columns to nothing: the square root is between.
    root = variance.flip(1)[:, :rank].clamp(min=1e-12).pow(0.25)
    return SharedFactors((mean * unit)[:, 0].to(torch.bfloat16), (basis * root[..., None]).to(torch.bfloat16))


def _in_float32(factors: SharedFactors) -> tuple[Tensor, Tensor]:
    return factors.mean.to(torch.float32), factors.basis.to(torch.float32)


class SharedBasis(_Baseline):
    """Log-sum-exp of a page's logits, its keys reconstructed in one basis for the whole layer and KV head.

    Each token keeps `rank` coefficients of `coef_bits` bits, each page one bfloat16 scale. Of the ways tried
    to spend the same bytes (a scale a token, a scale a column and page with and without an offset, one a
    page, each at the rank that the bytes then leave) this one recalls most mass. A residual term changes
    nothing here, so there is none.

    Args:
        page: tokens in a page, P.
        rank: basis vectors; see `matching`.
        coef_bits: bits of a coefficient: 4, 8 or 16.
        factors: fitted offline (`fit_shared`), for caches of one layer; None fits them to the first pages
            that are sealed, and keeps them for the life of the state.

    Source: Loki (arXiv 2406.02542), one principal basis a head; there the keys stay whole and the
    coefficients choose tokens, here they are all that scoring reads.
    """

    name = "shared"

    def __init__(
        self, page: int = 16, rank: int = 31, *, coef_bits: int = 4, factors: SharedFactors | None = None
    ) -> None:
        super().__init__(page)
        if coef_bits not in BITS:
            raise ValueError(f"coef_bits: expected one of {BITS}, got {coef_bits!r}")
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank: expected at least 1, got {rank!r}")
        self.rank, self.coef_bits, self.factors = rank, coef_bits, factors

    @classmethod
    def matching(cls, fmt: SummaryFormat, head_dim: int) -> SharedBasis:
        """The one whose pages take the bytes of a `fmt` record, or as little less as whole ranks allow."""
        bits = (fmt.layout(head_dim).nbytes - torch.bfloat16.itemsize) * 8
        rank = bits // (fmt.coef_bits * fmt.page)
        return cls(fmt.page, min(rank, head_dim), coef_bits=fmt.coef_bits)

    def _parts(self, head_dim: int) -> tuple[Part, ...]:
        codes = self.page * self.rank * self.coef_bits // 8
        return Part(codes, torch.uint8), Part(1, torch.bfloat16)

    def allocate(self, k_cache: Tensor, carry: PageState | None = None) -> PageState:
        """State for a key cache [num_blocks, Hkv, block, D]; `carry` is the state of its first blocks."""
        state = super().allocate(k_cache, carry)
        heads, width = k_cache.shape[1], k_cache.shape[3]
        if self.rank > width:
            raise ValueError(f"rank: expected at most D = {width}, got {self.rank}")
        if self.factors is not None:
            dims = {"Hkv": heads, "R": self.rank, "D": width}
            for name, axes in (("mean", ("Hkv", "D")), ("basis", ("Hkv", "R", "D"))):
                value = getattr(self.factors, name)
                checks.tensor(name, value, axes, dims, dtypes=[torch.bfloat16], device=k_cache.device)
            state.factors = self.factors
        return state

    def _settled(self, state: PageState) -> bool:
        return state.factors is not None

    def _encode(self, state: PageState, keys: Tensor) -> tuple[Tensor, ...]:
        if state.factors is None:
            state.factors = fit_shared(keys.transpose(0, 1).flatten(1, 2), self.rank)
        clean = torch.where(keys.isfinite(), keys, 0)
        mean, basis = _in_float32(state.factors)
        # [n, Hkv, P, R]
        dual = basis / basis.square().sum(-1, keepdim=True)
        coef = (clean - mean[..., None, :]) @ dual.mT
        scale = round_up_bf16(coef.abs().amax(dim=(-1, -2)) / code_max(self.coef_bits))
        value = bf16_value(scale, torch.float32)[..., None, None]
        codes = torch.where(value > 0, torch.floor(coef / torch.where(value > 0, value, 1) + 0.5), 0)
        return pack_codes(codes.flatten(-2), self.coef_bits), scale.view(torch.bfloat16)[..., None]

    def _score(self, state: PageState, query: Tensor, parts: tuple[Tensor, ...], pages: Tensor) -> Tensor:
        if state.factors is None:
            # Nothing was sealed, so nothing is scored.
            return query.new_zeros((*query.shape[:3], pages.shape[1]))
        mean, basis = _in_float32(state.factors)
        codes, scale = parts
        coef = unpack_codes(codes, self.coef_bits).to(torch.float32).unflatten(-1, (self.page, self.rank))
        # [B, Hkv, G, R], [B, Hkv, G, N, P]
        along = query @ basis.mT
        logits = (along @ coef.flatten(2, 3).transpose(-1, -2)).unflatten(-1, (-1, self.page))
        logits = logits * scale.to(torch.float32)[:, :, None]
        return (query @ mean[..., None]) + logits.logsumexp(-1)

    def shared_bytes(self, head_dim: int) -> int:
        """The basis and the mean of one KV head, bfloat16."""
        return 2 * head_dim * (self.rank + 1)

    def resident_bytes(self, head_dim: int, pages: int) -> float:
        """The pages' coefficients and scales, and the basis and the mean once."""
        return super().resident_bytes(head_dim, pages) + self.shared_bytes(head_dim)
