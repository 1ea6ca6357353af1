"""What is compared: full attention, ways to choose pages and ways to evict tokens, named as in the results."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locks import checks
from locks.format import PAGES, SummaryFormat
from locks.layer_ranks import LayerRank, check_layers, rank_of
from locks.layer_ranks import parse as parse_layer_ranks
from locks.pages import budget_pages, scored
from locks.quality.evictors import EVICTORS
from locks.selectors import SELECTORS, KeepsNothing, Selector, make_selector
from locks.torch_impl import total_mass
from locks.types import PageMass

FULL = "full"
STREAMING = "streaming"
NAMES = (*SELECTORS, STREAMING, *EVICTORS)
# Those whose size follows a record's format.
SIZED = ("locks", "shared")


class Streaming(KeepsNothing):
    """The first page and the newest ones: what StreamingLLM keeps, at its own positions.

    A page's mass is its number, so that a budget is spent from the end. The first page stands for the paper's
    four sinks; positions stay as they were, since the cache's keys have them already.

    Source: StreamingLLM (arXiv 2309.17453).
    """

    name = STREAMING

    def page_mass(
        self,
        q: Tensor,
        state: None,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window_pages: int = 1,
    ) -> PageMass:
        """log(1 + page number), whatever the query."""
        pages = block_table.shape[1] * k_cache.shape[2] // self.page
        # [N]; a logarithm, so that a share is proportional to the number and none vanishes.
        number = torch.arange(1, pages + 1, device=q.device, dtype=torch.float32).log()
        live = scored(seq_lens, self.page, pages)[:, None]
        log_mass = torch.where(live, number, -torch.inf).expand(-1, q.shape[1], -1)
        total = total_mass(log_mass, seq_lens, page=self.page, window_pages=window_pages)
        return PageMass(log_mass, total)

    def scan_bytes(self, head_dim: int, pages: int) -> float:
        """0."""
        return 0.0


@dataclass(frozen=True)
class Method:
    """A selector or an evictor by name: "quest", "h2o", "locks" (the default record), "locks-r8", "locks-r4c8" (8-bit
    coefficients), "locks-r2+8@18-20" (rank 2, but 8 in layers 18 to 20).

    `spec` is that name; `fmt` the record that it scores with or whose bytes it matches, None for the others; `more`:
    ranks of some layers.
    """

    spec: str
    selector: str
    page: int
    fmt: SummaryFormat | None
    more: tuple[LayerRank, ...] = ()

    def make(self, head_dim: int, layers: int = 0) -> Selector | list[Selector]:
        """The selector, or the evictor, for keys of that width; of several ranks one for each of a model's layers.

        Raises:
            ValueError: a layer that the model does not have.
        """
        if self.selector == STREAMING:
            return Streaming(self.page)
        if self.selector in EVICTORS:
            return EVICTORS[self.selector](self.page)
        fmt = SummaryFormat(page=self.page) if self.fmt is None else self.fmt
        if not self.more:
            return make_selector(self.selector, fmt, head_dim)
        try:
            check_layers(self.more, layers)
        except ValueError as error:
            raise ValueError(f"selector: {self.spec!r}: {error}") from error
        ranks = [rank_of(layer, self.more, fmt.rank) for layer in range(layers)]
        return [make_selector(self.selector, replace(fmt, rank=rank), head_dim) for rank in ranks]

    def facts(self) -> dict[str, Any]:
        """Its columns of a result row."""
        fmt = self.fmt
        return {
            "selector": self.spec,
            "rank": None if fmt is None or self.more else fmt.rank,
            "page": self.page,
            "bits": None if fmt is None else [fmt.mean_bits, fmt.basis_bits, fmt.coef_bits],
        }


def parse_methods(text: str, page: int = 16) -> list[Method]:
    """The methods named in `text`, by commas.

    Raises:
        ValueError: an unknown name, with the choices.
    """
    if page not in PAGES:
        raise ValueError(f"page: expected one of {PAGES}, got {page}")
    return list({method.spec: method for method in (_method(part, page) for part in _parts(text))}.values())


def _method(spec: str, page: int) -> Method:
    matched = re.fullmatch(r"([a-z0-9]+)(?:-r(\d+)(?:c(\d+))?((?:\+\d+@\d+-\d+)*))?", spec)
    name = matched[1] if matched else ""
    if matched is None or name not in NAMES or (matched[2] and name not in SIZED):
        sized = " or ".join(SIZED)
        raise ValueError(
            f"selector: expected {', '.join(NAMES)}, or {sized} with a rank and bits such as locks-r8, locks-r4c8 or "
            f"locks-r2+8@18-20 (rank 8 in layers 18 to 20), got {spec!r}"
        )
    if name not in SIZED:
        return Method(spec, name, page, None)
    plain = SummaryFormat(page=page)
    fmt = SummaryFormat(
        page=page, rank=int(matched[2] or plain.rank), coef_bits=int(matched[3] or plain.coef_bits)
    )
    try:
        more = parse_layer_ranks((matched[4] or "").removeprefix("+"), "+")
    except ValueError as error:
        raise ValueError(f"selector: {error}") from error
    for other in more:
        checks.summary_format(replace(fmt, rank=other.rank))
    return Method(spec, name, page, fmt, more)


def parse_budgets(text: str, page: int = 16) -> tuple[list[int], bool]:
    """The budgets named in `text`, by commas, ascending, and whether "full" is among them.

    Raises:
        ValueError: something that is neither a budget nor "full".
    """
    budgets, full = set(), False
    for part in _parts(text):
        if part == FULL:
            full = True
            continue
        if not part.isdecimal():
            raise ValueError(f"budgets: expected tokens (multiples of {page}) or {FULL!r}, got {part!r}")
        budget_pages(int(part), page)
        budgets.add(int(part))
    return sorted(budgets), full


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
