"""Caches that really drop tokens: what an evictor needs to see of a prompt, and the compact cache that it decodes on.

A `HeldLayer` is a paged layer of at most `budget` tokens a KV head, each head with tokens of its own, in the order of
their positions; their keys keep the rotation of those positions. All of it is attended to at every step, by the same
sparse step as everything else.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer

from locks import hf
from locks.hf_cache import BLOCK
from locks.quality.evictors import CHUNK, Evictor, Seen, attention

NAME = "locks_watched"
# The most queries that an evictor looks back on.
LAST = 32


@dataclass
class Watch:
    """What the queries of whole prompts look at under dense attention, the last `tail` tokens included.

    The tail is decoded later, once what is held of the rest is settled: its queries vote on that, as a prompt's last
    ones do in the papers, until their own decode step takes their place.

    lengths: [B] tokens of a row without its tail; sums: whether every query counts; scale: of the logits. For each
    layer: last: [B, Hq, LAST, D], queries of a row's last tokens, its very last one behind, undefined in front of its
    first; mass: [B, Hkv, T], the weights that a key got from all queries but the tail's.
    """

    lengths: Tensor
    sums: bool
    tail: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.last: dict[int, Tensor] = {}
        self.mass: dict[int, Tensor] = {}

    def see(self, layer: int, q: Tensor, keys: Tensor, scale: float) -> None:
        """Takes in one layer's queries [B, Hq, T, D] and keys [B, Hkv, T, D]."""
        self.scale = scale
        ends = self.lengths[:, None] + self.tail
        at = (ends - LAST + torch.arange(LAST, device=q.device)).clamp(min=0)
        self.last[layer] = q.gather(2, at[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        if not self.sums:
            return
        tokens = torch.arange(q.shape[2], device=q.device)
        mass = torch.zeros(keys.shape[:3], device=q.device)
        for some in tokens.split(max(1, CHUNK // q[..., 0].numel())):
            live = (tokens <= some[:, None]) & (some < self.lengths[:, None])[..., None]
            mass += attention(q[:, :, some], keys, live, scale).sum(2)
        self.mass[layer] = mass

    def of_row(self, layer: int, row: int, keys: Tensor, evictor: Evictor, budget: int) -> Tensor:
        """[Hkv, S, T], what the evictor knows of one row's keys [Hkv, T, D], those of its tail left out."""
        count, rows = keys.shape[1], evictor.rows(budget)
        if evictor.sums:
            return self.mass[layer][row, :, None, :count]
        place = torch.arange(count - rows, count, device=keys.device) + self.tail
        live = torch.arange(count, device=keys.device) <= place[:, None]
        return attention(
            self.last[layer][row : row + 1, :, LAST - rows :], keys[None], live[None], self.scale
        )[0]


def _watched(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    locks_watch: tuple[Watch, set[int]] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' SDPA; what the queries of the layers asked for look at is noted."""
    if locks_watch is None:
        raise ValueError(f"{type(module).__name__}: its attention got no watch")
    watch, layers = locks_watch
    index = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    if index in layers:
        watch.see(index, query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(NAME, _watched)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])


def watched(model: Any, rows: Sequence[Sequence[int]], tail: int, sums: bool) -> Watch:
    """What evictors have to know of prompts, by a pass of its own.

    Args:
        model: that `locks.hf.enable` prepared, which it is again afterwards.
        rows: whole prompts.
        tail: tokens at the end of each that are decoded later.
        sums: whether every query counts.
    """
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)
    watch = Watch(torch.tensor([len(row) - tail for row in rows], device=model.device), sums, tail)
    cache = hf.PagedCache(model.config, hf.LocksConfig(budget=None))
    paged = {index for index, layer in enumerate(cache.layers) if isinstance(layer, hf.PagedLayer)}
    base = model.get_decoder()
    hf.disable(model)
    previous = base.config._attn_implementation or "sdpa"
    base.set_attn_implementation(NAME)
    try:
        # Padding behind a row's end is seen by no token before it.
        model(ids, use_cache=False, logits_to_keep=1, locks_watch=(watch, paged))
    finally:
        base.set_attn_implementation(previous)
        hf.enable(model, hf.LocksConfig(budget=None))
    return watch


class HeldLayer(hf.PagedLayer):
    """One layer's held tokens, and the evictor's state of it.

    Args:
        evictor: which tokens stay.
        budget: the most tokens that a KV head holds.
        columns: tokens taken in so far.
        keys, values: a row each, [Hkv, n, D], n below the budget.
        seen: a row each, [Hkv, S, n].
        tail: how many of the last queries in `seen` are still to be decoded.
    """

    is_croppable = False
    state: Seen

    def __init__(
        self,
        evictor: Evictor,
        budget: int,
        columns: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        seen: Sequence[Tensor],
        tail: int = 0,
    ) -> None:
        super().__init__(hf.LocksConfig(budget=budget, selector=evictor))
        self.evictor, self.budget, self.columns = evictor, budget, columns
        # How many a row holds, known without asking the device.
        self.held = [row.shape[1] for row in keys]
        rows, blocks = len(keys), -(-budget // BLOCK)
        device = keys[0].device
        self.seq_lens = torch.tensor(self.held, dtype=torch.int32, device=device)
        self.block_table = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        self.k_cache, self.v_cache = (
            some[0].new_zeros((rows * blocks, some[0].shape[0], BLOCK, some[0].shape[2]))
            for some in (keys, values)
        )
        # What the selector is handed at every step.
        weights = seen[0].new_zeros((rows, *seen[0].shape[:2], blocks * BLOCK))
        self.state = Seen(evictor, weights, torch.full((), -tail, dtype=torch.long, device=device))
        self.is_initialized = True
        for row in range(rows):
            some = torch.tensor([row], device=device)
            self._put(some, keys[row][None], values[row][None], seen[row][None])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one token a row, in the place of what the evictor lets go where a row is full."""
        if self._expected is None or key_states.shape[2] != 1:
            raise RuntimeError(
                f"past_key_values: expected one token of an enabled model, got {key_states.shape[2]}"
            )
        self._expected = None
        self._evict()
        at = self.seq_lens.long()
        blocks = self.block_table.long().gather(1, at[:, None] // BLOCK)[:, 0]
        self.k_cache[blocks, :, at % BLOCK] = key_states[:, :, 0]
        self.v_cache[blocks, :, at % BLOCK] = value_states[:, :, 0]
        # No earlier query saw it. A number in place of a tensor would come from the host, which no graph may wait for.
        weights = self.state.weights
        weights[torch.arange(len(at), device=at.device), :, :, at] = weights.new_zeros(())
        self.seq_lens += 1
        self.held = [count + 1 for count in self.held]
        self.columns += 1
        return key_states, value_states

    def _evict(self) -> None:
        full = [row for row, count in enumerate(self.held) if count == self.budget]
        if not full:
            return
        device = self.seq_lens.device
        # Where all are full, as rows of one length are, nothing waits for the device.
        every = len(full) == len(self.held)
        rows = torch.arange(len(full), device=device) if every else torch.tensor(full, device=device)
        keys, values = self._tokens(self.k_cache, rows), self._tokens(self.v_cache, rows)
        seen = self.state.weights[rows, :, :, : self.budget]
        kept = self.evictor.keep(seen, keys, self.budget)
        self._put(rows, *_taken(kept, keys, values, seen))
        self.seq_lens[rows] = torch.full_like(self.seq_lens[rows], kept.shape[-1])
        self.held = [kept.shape[-1] if count == self.budget else count for count in self.held]

    @property
    def kind(self) -> bool | None:
        """Whether the next step evicts in every row; None where it does in some."""
        full = {count == self.budget for count in self.held}
        return full.pop() if len(full) == 1 else None

    def follow(self) -> None:
        """Counts a step that only the device has done."""
        less = self.evictor.buffer(self.budget)
        self.held = [count + 1 - (less if count == self.budget else 0) for count in self.held]

    def _tokens(self, cache: Tensor, rows: Tensor) -> Tensor:
        """[R, Hkv, budget, D], a copy of full rows' tokens."""
        return cache[self.block_table[rows].long()].transpose(1, 2).flatten(2, 3)[:, :, : self.budget]

    def _put(self, rows: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        """Makes [R, Hkv, n, D] and [R, Hkv, S, n] the first tokens of the rows."""
        place = torch.arange(keys.shape[2], device=rows.device)
        blocks = self.block_table[rows].long()[:, place // BLOCK]
        self.k_cache[blocks, :, place % BLOCK] = keys.transpose(1, 2)
        self.v_cache[blocks, :, place % BLOCK] = values.transpose(1, 2)
        self.state.weights[rows, :, :, : len(place)] = seen

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("past_key_values: what was evicted cannot come back; make a new cache")

    crop = reset = reorder_cache = batch_select_indices = batch_repeat_interleave = fork = _refused


def _taken(kept: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens `kept` [R, Hkv, K] of keys and values [R, Hkv, n, D] and of seen [R, Hkv, S, n]."""
    index = kept[..., None]
    return (
        keys.gather(2, index.expand(-1, -1, -1, keys.shape[3])),
        values.gather(2, index.expand(-1, -1, -1, values.shape[3])),
        seen.gather(3, kept[:, :, None].expand(-1, -1, seen.shape[2], -1)),
    )


def hold(
    cache: hf.PagedCache, lengths: Sequence[int], watch: Watch, evictor: Evictor, budget: int, repeats: int
) -> hf.PagedCache:
    """A cache that holds what the evictor keeps of a batch's prompts; the batch's own stays as it is.

    Args:
        cache: that the prompts were read into.
        lengths: tokens of each prompt.
        watch: what was seen then.
        evictor: which tokens stay.
        budget: the most tokens that a KV head holds.
        repeats: rows that follow each prompt.
    """
    made = copy.copy(cache)
    made.layers = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, hf.PagedLayer):
            rows = [_held(layer, index, row, n, watch, evictor, budget) for row, n in enumerate(lengths)]
            keys, values, seen = zip(*(row for row in rows for _ in range(repeats)), strict=True)
            made.layers.append(HeldLayer(evictor, budget, max(lengths), keys, values, seen, watch.tail))
        else:
            # Windows slide by making new tensors: the batch's own stay.
            windows = copy.copy(cast(DynamicLayer, layer))
            windows.batch_repeat_interleave(repeats)
            made.layers.append(windows)
    return made


def _held(
    layer: hf.PagedLayer, index: int, row: int, count: int, watch: Watch, evictor: Evictor, budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [Hkv, n, D] and `seen` [Hkv, S, n] of what stays of one row's first `count` tokens."""
    blocks = layer.block_table[row, : -(-count // BLOCK)].long()
    keys, values = (
        some[blocks].transpose(0, 1).flatten(1, 2)[:, :count] for some in (layer.k_cache, layer.v_cache)
    )
    seen = watch.of_row(index, row, keys, evictor, budget)
    if count < budget:
        return keys, values, seen
    kept = evictor.keep(seen[None], keys[None], budget)
    keys, values, seen = _taken(kept, keys[None], values[None], seen[None])
    return keys[0], values[0], seen[0]
