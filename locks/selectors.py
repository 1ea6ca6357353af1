"""Ways to rank pages, behind one protocol: page-local summaries, the exact oracle and the baselines.

Each returns a log-mass per page and query head; what follows (the group's sum of shares, the top M,
attention) is the same for all of them, so that they differ in nothing but the summary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from locks import api, checks
from locks.baselines import ArkVale, MeanKey, Quest, RandomPages, SharedBasis
from locks.format import SummaryFormat
from locks.types import PageMass


class Selector(Protocol):
    """Ranks pages. `state` is what it keeps resident for one layer's paged key cache."""

    name: str
    page: int

    def allocate(self, k_cache: Tensor, carry: Any = None) -> Any:
        """State for a key cache [num_blocks, Hkv, block, D]; `carry` is the state of its first blocks."""
        ...

    def seal(
        self,
        state: Any,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        start: Tensor | None = None,
        max_new_pages: int | None = None,
    ) -> None:
        """Summarises, in place, every page whose last slot lies in [start, seq_len) of its row."""
        ...

    def page_mass(
        self,
        q: Tensor,
        state: Any,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window_pages: int = 1,
    ) -> PageMass:
        """Returns log_mass [B, Hq, N] and total [B, Hq] for q [B, Hq, D]."""
        ...

    def resident_bytes(self, head_dim: int, pages: int) -> float:
        """Bytes kept for `pages` pages of one KV head, beside K and V."""
        ...

    def scan_bytes(self, head_dim: int, pages: int) -> float:
        """Bytes read to rank `pages` pages of one KV head."""
        ...


class Locks:
    """Page-local rank-R summaries."""

    def __init__(self, fmt: SummaryFormat | None = None, impl: str | None = None) -> None:
        self.fmt = SummaryFormat() if fmt is None else fmt
        self.name, self.page, self.impl = "locks", self.fmt.page, impl

    def allocate(self, k_cache: Tensor, carry: Tensor | None = None) -> Tensor:
        """Returns records [num_blocks, Hkv, block / P, record bytes] uint8."""
        records = api.allocate_records(k_cache, self.fmt)
        if carry is not None:
            records[: carry.shape[0]] = carry
        return records

    def seal(
        self,
        state: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        start: Tensor | None = None,
        max_new_pages: int | None = None,
    ) -> None:
        """Writes the records of the pages that filled."""
        api.summarize(
            k_cache,
            block_table,
            seq_lens,
            self.fmt,
            start=start,
            max_new_pages=max_new_pages,
            out=state,
            impl=self.impl,
        )

    def page_mass(
        self,
        q: Tensor,
        state: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window_pages: int = 1,
    ) -> PageMass:
        """Log-sum-exp of the reconstructed logits; reads records only."""
        return api.page_mass(
            q,
            state,
            block_table,
            seq_lens,
            self.fmt,
            scale=scale,
            window_pages=window_pages,
            exact=False,
            impl=self.impl,
        )

    def resident_bytes(self, head_dim: int, pages: int) -> float:
        """Record bytes, scales and padding counted."""
        return pages * self.fmt.layout(head_dim).nbytes

    def scan_bytes(self, head_dim: int, pages: int) -> float:
        """Every record, once."""
        return self.resident_bytes(head_dim, pages)


class KeepsNothing:
    """The part of a selector that has no state."""

    def __init__(self, page: int = 16) -> None:
        self.page = page

    def allocate(self, k_cache: Tensor, carry: None = None) -> None:
        """Keeps nothing."""

    def seal(
        self,
        state: None,
        k_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        start: Tensor | None = None,
        max_new_pages: int | None = None,
    ) -> None:
        """Has nothing to keep."""

    def resident_bytes(self, head_dim: int, pages: int) -> float:
        """0."""
        return 0.0


class Oracle(KeepsNothing):
    """Exact log-sum-exp of every page: reads every key. The upper line for any summary."""

    name = "oracle"

    def __init__(self, page: int = 16, impl: str | None = None) -> None:
        checks.page(page)
        super().__init__(page)
        self.impl = impl

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
        """True log-mass of every scored page.

        Raises:
            TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.
        """
        dims: dict[str, int] = {}
        checks.tensor("q", q, ("B", "Hq", "D"), dims, dtypes=checks.FLOATS)
        axes = ("num_blocks", "Hkv", "block", "D")
        checks.tensor("k_cache", k_cache, axes, dims, dtypes=[q.dtype], device=q.device)
        checks.block(dims, self.page)
        checks.groups(dims)
        for name, value, axes in (
            ("block_table", block_table, ("B", "max_blocks")),
            ("seq_lens", seq_lens, ("B",)),
        ):
            checks.tensor(name, value, axes, dims, dtypes=[torch.int32], device=q.device)
        work = api.load_impl(api.resolve_impl(self.impl, q.device, q.dtype))
        with api.on_device(q.device):
            return work.exact_page_mass(
                q, k_cache, block_table, seq_lens, page=self.page, scale=scale, window_pages=window_pages
            )

    def scan_bytes(self, head_dim: int, pages: int) -> float:
        """Every key at 2 bytes an element."""
        return 2.0 * pages * self.page * head_dim


SELECTORS = ("locks", "oracle", "quest", "mean", "arkvale", "shared", "random")


def make_selector(
    name: str, fmt: SummaryFormat | None = None, head_dim: int | None = None, impl: str | None = None
) -> Selector:
    """The selector of that name, with pages of `fmt.page` tokens.

    Args:
        name: one of `SELECTORS`.
        fmt: the record's format for "locks", the bytes and bits to match for "shared", the page size for all.
        head_dim: D; "shared" needs it to match bytes.
        impl: "triton", "torch" or None, for "locks" and "oracle"; the others are plain PyTorch.

    Raises:
        ValueError: another name, or "shared" without a head width.
    """
    fmt = SummaryFormat() if fmt is None else fmt
    if name == "locks":
        return Locks(fmt, impl)
    if name == "oracle":
        return Oracle(fmt.page, impl)
    if name == "shared":
        if head_dim is None:
            raise ValueError("head_dim: expected the key width for 'shared', got None")
        return SharedBasis.matching(fmt, head_dim)
    plain = {kind.name: kind for kind in (Quest, MeanKey, ArkVale, RandomPages)}
    if name not in plain:
        raise ValueError(f"name: expected one of {SELECTORS}, got {name!r}")
    return plain[name](fmt.page)
