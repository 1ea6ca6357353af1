"""A paged key/value cache for transformers: written in place, its pages summarised once, as they fill.

A `PagedLayer` stands where transformers has a `DynamicLayer`. Row b's tokens lie in the blocks that row b of
`block_table` lists, padding left out: pages start at the row's first real token. What a row may still write
to (its last, partly filled block and the blocks behind it) belongs to it alone; full blocks may be shared by
rows that come from one (beam search, repeated prompts).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from locks import api, checks
from locks.format import SummaryFormat
from locks.pages import budget_pages
from locks.selectors import Locks, Selector
from locks.types import PageList, PageMass

# Tokens of a block: a multiple of every page size, small enough that moving a row's open block is cheap.
BLOCK = 64


class Step(NamedTuple):
    """One decode step of one layer: what a `LocksConfig.on_step` callback sees.

    q: [B, Hq, D], after its position encoding; scale: of the logits; mass: of every page; pages: those
    attended to; layer: where they lie (`k_cache`, `v_cache`, `table`, `seq_lens`), the new token included.
    """

    layer_idx: int
    q: Tensor
    scale: float
    mass: PageMass
    pages: PageList
    layer: PagedLayer


@dataclass(frozen=True)
class LocksConfig:
    """How a model decodes.

    Args:
        budget: tokens that a KV head attends to at a decode step, a multiple of the page, first and newest
            page included; None for all of them (dense decoding on the same cache, for comparison).
        fmt: the summaries' format, where no selector is given.
        selector: another way to rank pages, or one for each of the model's layers; None for page-local summaries in
            `fmt`.
        window_pages: how many of the newest pages are always kept.
        impl: "triton", "torch" or None (Triton on a GPU).
        on_step: called with a `Step` after every sparse step of every layer.
        debug: check lengths, block ids, page ids and padding at every step, which waits for the device.

    Raises:
        TypeError, ValueError: a value that is not possible, by name.
    """

    budget: int | None = 2048
    fmt: SummaryFormat = field(default_factory=SummaryFormat)
    selector: Selector | Sequence[Selector] | None = None
    window_pages: int = 1
    impl: str | None = None
    on_step: Callable[[Step], None] | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        checks.summary_format(self.fmt)
        checks.window(self.window_pages)
        if self.selector is not None and self.fmt != SummaryFormat():
            raise ValueError("fmt: expected the default beside a selector, which has its own format")
        if self.impl is not None and self.impl not in api.IMPLS:
            raise ValueError(f"impl: expected one of {api.IMPLS} or None, got {self.impl!r}")
        for ranker in self.selector if isinstance(self.selector, Sequence) else (self.ranker,):
            if BLOCK % ranker.page:
                raise ValueError(f"selector: expected a page that divides {BLOCK}, got {ranker.page}")
            if self.budget is not None:
                budget_pages(self.budget, ranker.page, self.window_pages)

    @cached_property
    def ranker(self) -> Selector:
        """The selector in use, of a config that has one for all layers."""
        if isinstance(self.selector, Sequence):
            raise TypeError(
                "selector: expected one for all layers, got one for each; `of_layer` takes a layer's"
            )
        return Locks(self.fmt, self.impl) if self.selector is None else self.selector

    def of_layer(self, index: int) -> LocksConfig:
        """The config of one layer of the model."""
        if not isinstance(self.selector, Sequence):
            return self
        return dataclasses.replace(self, selector=self.selector[index])


class PagedLayer(CacheLayerMixin):
    """One layer's keys, values and summaries.

    `expect` must announce a forward pass before `update` takes its keys: a model that was not enabled never
    does, and would attend to the new tokens alone.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    # Lengths before the last update.
    start: Tensor
    state: Any

    def __init__(self, config: LocksConfig) -> None:
        super().__init__()
        self.config = config
        # Tokens taken in so far, padding included: what transformers calls the length. No row holds more, and
        # it is known without asking the device.
        self.columns = 0
        # [B, columns] bool, which of them are real; None: all.
        self.mask: Tensor | None = None
        self._shared = False
        self._expected: tuple[Tensor | None] | None = None

    def expect(self, mask: Tensor | None) -> None:
        """Announces a forward pass: mask [B, columns + new] bool, which tokens are real; None for all."""
        self._expected = (mask,)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for the prompt at hand and some more."""
        rows, heads, new, width = key_states.shape
        blocks = _with_room(new)
        self.k_cache = key_states.new_empty((rows * blocks, heads, BLOCK, width))
        self.v_cache = value_states.new_empty((rows * blocks, heads, BLOCK, value_states.shape[-1]))
        device = key_states.device
        self.block_table = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.state = None if self.config.budget is None else self.config.ranker.allocate(self.k_cache)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values [B, Hkv, new, D], summarises the pages that fill, returns what came."""
        if self._expected is None:
            raise RuntimeError(
                "past_key_values: a paged cache takes keys only from a model that locks.hf.enable prepared"
            )
        (mask,), self._expected = self._expected, None
        new = key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.reserve(self.columns + new)
        real = None if mask is None else mask[:, self.columns :].to(self.seq_lens.device)
        self.start = self.seq_lens.clone()
        self._write(key_states, value_states, real)
        self.seq_lens += new if real is None else real.sum(1, dtype=torch.int32)
        self.columns += new
        self.mask = mask
        self._seal(self.start, new)
        return key_states, value_states

    def _write(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        new = keys.shape[2]
        at = self.start.long()[:, None]
        if real is None or new == 1:
            # A lone padding token lands in the slot that the row's next real one overwrites.
            at = at + torch.arange(new, device=at.device)
            blocks = self.block_table.long().gather(1, at // BLOCK)
            chosen: Any = slice(None)
        else:
            chosen = real.nonzero(as_tuple=True)
            at = (at + real.cumsum(1) - 1)[chosen]
            blocks = self.block_table[chosen[0], at // BLOCK].long()
        self.k_cache[blocks, :, at % BLOCK] = keys.detach().transpose(1, 2)[chosen]
        self.v_cache[blocks, :, at % BLOCK] = values.detach().transpose(1, 2)[chosen]

    def _seal(self, start: Tensor, new: int) -> None:
        page = self.config.ranker.page
        if self.config.budget is None:
            return
        # Asking a CPU costs nothing; a GPU is not made to wait.
        if start.device.type == "cpu" and torch.equal(start // page, self.seq_lens // page):
            return
        self.config.ranker.seal(
            self.state,
            self.k_cache,
            self.table,
            self.seq_lens,
            start=start,
            max_new_pages=max(1, -(-new // page)),
        )

    @property
    def table(self) -> Tensor:
        """[B, blocks in use] int32: the part of `block_table` that rows can have reached."""
        return self.block_table[:, : -(-self.columns // BLOCK)]

    def dense(self) -> tuple[Tensor, Tensor]:
        """Copies of all keys and values in order, [B, Hkv, columns, D], 0 behind a row's last token."""
        blocks = self.table.long()
        live = torch.arange(self.columns, device=blocks.device) < self.seq_lens[:, None]
        keys, values = (
            torch.where(
                live[:, None, :, None], cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, : self.columns], 0
            )
            for cache in (self.k_cache, self.v_cache)
        )
        return keys, values

    def causal_mask(self, new: int) -> Tensor:
        """[B, 1, new, columns] bool: which tokens of `dense` each of the last `new` columns may attend to."""
        device = self.start.device
        ahead = torch.arange(new, device=device)
        if self.mask is not None:
            ahead = self.mask[:, -new:].to(device).cumsum(1) - 1
        # Padding attends to the first token: its output is nobody's, but must not be nan.
        position = (self.start[:, None] + ahead).clamp(min=0)
        return (torch.arange(self.columns, device=device) <= position[..., None])[:, None]

    def get_seq_length(self) -> int:
        """Tokens taken in, padding included."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the mask that transformers makes for the next `query_length` tokens."""
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        """-1: grows without end."""
        return -1

    def reset(self) -> None:
        """Forgets everything; the next prompt may have another batch size."""
        self.is_initialized = False
        self.columns = 0
        self.mask = None
        self._shared = False

    def offload(self) -> None:
        """Refused: blocks are written in place where the kernels read them."""
        raise NotImplementedError("offloading: a paged cache stays on its device; use the default cache")

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove columns; a positive number is the length to keep.

        The stale summary of a page that is cut is never read: the page is the newest one, which is not
        ranked, until it fills again and is summarised again.
        """
        # Assisted generation counts on the device.
        removed = int(tokens_to_remove)
        keep = max(0, self.columns + removed if removed < 0 else removed)
        if removed == 0 or keep >= self.columns:
            return
        if keep == 0:
            self.reset()
            return
        self.columns = keep
        if self.mask is None:
            self.seq_lens.fill_(keep)
        else:
            self.mask = self.mask[:, :keep]
            self.seq_lens.copy_(self.mask.sum(1))
        self._own_tails()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] was."""
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, in that order."""
        if self.is_initialized:
            self._take(torch.arange(len(self.seq_lens), device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.is_initialized:
            self._take(torch.arange(len(self.seq_lens)).repeat_interleave(repeats))

    def fork(self, config: LocksConfig) -> PagedLayer:
        """A copy that decodes by another config: same keys and values, summaries made anew."""
        twin = PagedLayer(config)
        twin.columns, twin.mask, twin._shared = self.columns, self.mask, self._shared
        if not self.is_initialized:
            return twin
        for name in ("k_cache", "v_cache", "block_table", "seq_lens"):
            setattr(twin, name, getattr(self, name).clone())
        twin.state = None
        if config.budget is not None:
            twin.state = config.ranker.allocate(twin.k_cache)
            twin._seal(torch.zeros_like(twin.seq_lens), twin.columns)
        twin.is_initialized = True
        return twin

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of `tokens` tokens."""
        rows, width = self.block_table.shape
        if tokens <= width * BLOCK:
            return
        extra = _with_room(tokens) - width
        first = self._grow(rows * extra)
        fresh = torch.arange(first, first + rows * extra, dtype=torch.int32, device=self.block_table.device)
        self.block_table = torch.cat([self.block_table, fresh.view(rows, extra)], 1)

    def _grow(self, extra: int) -> int:
        """Adds blocks to the pool; returns the first one's id."""
        first = self.k_cache.shape[0]
        for name in ("k_cache", "v_cache"):
            old = getattr(self, name)
            pool = old.new_empty((first + extra, *old.shape[1:]))
            pool[:first] = old
            setattr(self, name, pool)
        if self.config.budget is not None:
            self.state = self.config.ranker.allocate(self.k_cache, carry=self.state)
        return first

    def _take(self, parents: Tensor) -> None:
        """Makes row b what row parents[b] was; waits for the device."""
        if not self.is_initialized:
            return
        parents = parents.to(self.block_table.device).long()
        self.block_table, self.seq_lens = self.block_table[parents], self.seq_lens[parents]
        if self.mask is not None:
            self.mask = self.mask[parents.to(self.mask.device)]
        self._shared = True
        self._own_tails()

    def _own_tails(self) -> None:
        """Gives every row blocks of its own to write to: a free copy for one that other rows hold."""
        if not self._shared:
            return
        table, lengths = self.block_table.tolist(), self.seq_lens.tolist()
        full = [length // BLOCK for length in lengths]
        taken = {block for row, n in zip(table, full, strict=True) for block in row[:n]}
        # Full blocks stay shared; everything behind them is a row's own.
        own = sum(len(row) - n for row, n in zip(table, full, strict=True))
        missing = own - (self.k_cache.shape[0] - len(taken))
        if missing > 0:
            self._grow(missing)
        held = {block for row in table for block in row}
        free = iter([block for block in range(self.k_cache.shape[0]) if block not in held])
        start, moves = list(lengths), []
        for b, row in enumerate(table):
            for column in range(full[b], len(row)):
                if row[column] in taken:
                    fresh = next(free)
                    if column == full[b] and lengths[b] % BLOCK:
                        moves.append((row[column], fresh))
                        start[b] = column * BLOCK
                    row[column] = fresh
                taken.add(row[column])
        self.block_table.copy_(torch.tensor(table, dtype=torch.int32))
        if moves:
            source, target = torch.tensor(moves, device=self.block_table.device).T
            for cache in (self.k_cache, self.v_cache):
                cache[target] = cache[source]
            self._seal(self.seq_lens.new_tensor(start), BLOCK)


def _with_room(tokens: int) -> int:
    """Blocks to allocate for rows of `tokens` tokens: a quarter more, so that they seldom have to grow."""
    blocks = -(-tokens // BLOCK)
    return blocks + blocks // 4 + 1


class PagedCache(Cache):
    """A cache for one batch, to pass as `past_key_values`; an enabled model makes one where none is given.

    It keeps the config it was made with, whatever the model's is. Layers with a sliding window keep
    transformers' own dense storage.

    Args:
        model_config: the model's `config`.
        config: how its rows are decoded.

    Raises:
        ValueError: selectors by layer, but not as many as the model has layers.
    """

    def __init__(self, model_config: PreTrainedConfig, config: LocksConfig) -> None:
        cache = DynamicCache(config=model_config)
        page_layers(cache, model_config, config)
        super().__init__(layers=cache.layers)


def page_layers(cache: DynamicCache, model_config: PreTrainedConfig, config: LocksConfig) -> None:
    """Puts a `PagedLayer` in the place of every layer without a sliding window of an empty cache.

    In place, since whoever made the cache may go on with it.
    """
    cache.layers = cache.layers or DynamicCache(config=model_config).layers
    layers = len(cache.layers)
    if isinstance(config.selector, Sequence) and len(config.selector) != layers:
        raise ValueError(
            f"selector: expected one, or one for each of {layers} layers, got {len(config.selector)}"
        )
    cache.layers = [
        layer if sliding else PagedLayer(config.of_layer(i))
        for i, (layer, sliding) in enumerate(zip(cache.layers, cache.is_sliding, strict=True))
    ]


CacheT = TypeVar("CacheT", bound=Cache)


def fork(cache: CacheT, config: LocksConfig) -> CacheT:
    """A copy of a paged cache that decodes by another config: one prefill serves several.

    Args:
        cache: a `PagedCache`, or the cache that `generate` returned from an enabled model.
        config: of the copy.
    """
    twin = copy.copy(cache)
    # Dense layers replace their tensors and never write into them: sharing those is safe.
    twin.layers = [
        layer.fork(config.of_layer(i)) if isinstance(layer, PagedLayer) else copy.copy(layer)
        for i, layer in enumerate(cache.layers)
    ]
    return twin
