"""The engine of transformers: one dense prefill of a batch, then answers under one selector and budget after another.

Everything behind the prefill runs a token a step, so that no token of an answer comes from dense attention: the
prefill leaves out the last `tail` tokens of a prompt, one at the least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locks import hf
from locks.quality.evictors import Evictor
from locks.quality.example import Forced, Read
from locks.quality.held import Watch, hold, watched
from locks.quality.replay import Replay

# The sampling of the reasoning tasks.
TEMPERATURE, TOP_P, TOP_K = 0.6, 0.95, 20


@dataclass
class Prefilled:
    """A batch's prompts in a cache, but for their last tokens.

    cache: without summaries, a row a prompt, shorter rows padded behind their end; lengths: [B] tokens of a row;
    width: of the longest; watch: what evictors have to know of them, where there are some; real: [B, width] bool, what
    is no padding, None where nothing is.
    """

    cache: hf.PagedCache
    lengths: Tensor
    width: int
    watch: Watch | None = None
    real: Tensor | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes that a row's step reads through all layers, on average, and what dense attention would read."""

    read: float
    dense: float


@contextmanager
def enabled(model: Any) -> Iterator[None]:
    """The model with a paged cache, dense unless a cache says otherwise."""
    hf.enable(model, hf.LocksConfig(budget=None))
    try:
        yield
    finally:
        hf.disable(model)


def pads(model: Any) -> bool:
    """Whether prompts of different lengths can share a batch: where no layer has a sliding window."""
    cache = hf.PagedCache(model.config, hf.LocksConfig(budget=None))
    return len(_paged(cache)) == len(cache.layers)


def _numbered(cache: hf.PagedCache) -> list[tuple[int, hf.PagedLayer]]:
    return [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(layer, hf.PagedLayer)]


def _paged(cache: hf.PagedCache) -> list[hf.PagedLayer]:
    return [layer for _, layer in _numbered(cache)]


@torch.inference_mode()
def prefill(
    model: Any,
    rows: Sequence[Sequence[int]],
    evictors: Sequence[Evictor] = (),
    tails: Sequence[Sequence[int]] | None = None,
) -> Prefilled:
    """The rows' keys and values by dense attention, in one pass.

    Args:
        model: that `enabled` prepared.
        rows: prompts without their tails.
        evictors: that the batch has to serve; they watch the whole prompts in a pass of its own.
        tails: the prompts' last tokens, equally many; None where there are none.
    """
    watch = None
    if evictors:
        tails = [()] * len(rows) if tails is None else tails
        prompts = [[*row, *tail] for row, tail in zip(rows, tails, strict=True)]
        watch = watched(model, prompts, len(tails[0]), any(evictor.sums for evictor in evictors))
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    cache = hf.PagedCache(model.config, hf.LocksConfig(budget=None))
    # Padding behind a row's end is seen by no token before it, so the pass needs no mask ...
    model(ids, **hf.cache_argument(model, cache), logits_to_keep=1)
    real = None
    if min(map(len, rows)) < width:
        # ... and is forgotten: the row's next token takes its place.
        real = torch.arange(width, device=model.device) < lengths[:, None]
        for layer in _paged(cache):
            layer.mask = real
            layer.seq_lens.copy_(lengths)
    return Prefilled(cache, lengths, width, watch, real)


class Session:
    """A prefilled batch under one selector; budgets follow each other on it.

    Sessions of a batch follow each other too: each summarises the same keys anew, in place, since a copy of a long
    batch's cache would halve what fits. Where several rows follow a prompt they get a copy of their own; so does
    every budget of a model with sliding windows, which forget what they slide over, and every budget of an evictor.

    Args:
        model: that `enabled` prepared.
        prefilled: the batch, watched if the selector is an evictor.
        selector: a selector, one for each of the model's layers, or an evictor; None for full attention.
        repeats: rows that follow each prompt.
        replays: whether answers are decoded by a `Replay`, where layers are all paged and a row follows each prompt, or
            the selector is an evictor; None for on a GPU.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,
        prefilled: Prefilled,
        selector: Any,
        repeats: int = 1,
        *,
        replays: bool | None = None,
    ) -> None:
        self.model, self.selector = model, selector
        self.prefilled, self.repeats = prefilled, repeats
        self.cache = prefilled.cache
        self.width, self.lengths = prefilled.width, prefilled.lengths.repeat_interleave(repeats)
        self.evicts = isinstance(selector, Evictor)
        # An evictor's rows are as long as what they hold, and know it.
        self.ragged = not self.evicts and bool((self.lengths < self.width).any())
        self.taken = 0
        self._replay: Replay | None = None
        self._replays = self.lengths.is_cuda if replays is None else replays
        if self.evicts:
            return
        if repeats > 1:
            self.cache = hf.fork(self.cache, hf.LocksConfig(budget=None))
            self.cache.batch_repeat_interleave(repeats)
        self.source = None if len(_paged(self.cache)) == len(self.cache.layers) else self.cache
        if self.source is not None:
            return
        self._back()
        config = hf.LocksConfig(budget=None, selector=selector)
        for index, layer in _numbered(self.cache):
            layer.state = None
            if selector is not None:
                own = config.of_layer(index).ranker
                layer.state = own.allocate(layer.k_cache)
                own.seal(layer.state, layer.k_cache, layer.table, layer.seq_lens)

    @torch.inference_mode()
    def rewind(self, budget: int | None) -> None:
        """Back to the prompts, from now on with another budget; None is full attention's."""
        hf.reset_stats(self.model)
        # Its graph's memory is free for the next one.
        self._replay = None
        if self.evicts:
            self._hold(budget)
            return
        config = hf.LocksConfig(budget=budget, selector=self.selector)
        if self.source is not None:
            self.cache = hf.fork(self.source, config)
        else:
            self._back()
        self.taken = 0
        for index, layer in _numbered(self.cache):
            layer.config = config.of_layer(index)

    def _back(self) -> None:
        """The rows' cache as it was behind the prompts."""
        if self.repeats > 1:
            # Rows of a prompt share blocks.
            if self.cache.get_seq_length() > self.width:
                self.cache.crop(self.width)
            return
        for layer in _paged(self.cache):
            layer.columns, layer.mask = self.width, self.prefilled.real
            layer.seq_lens.copy_(self.lengths)

    def _hold(self, budget: int | None) -> None:
        batch = self.prefilled
        if budget is None or batch.watch is None:
            raise ValueError(f"budget: expected a budget and a watched batch for an evictor, got {budget}")
        lengths = batch.lengths.tolist()
        self.cache = hold(batch.cache, lengths, batch.watch, self.selector, budget, self.repeats)
        self.taken = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token [B] of every row; the next step may overwrite them."""
        if self._replay is not None:
            self.taken += 1
            return self._replay.step(tokens)
        mask = None
        if self.ragged:
            columns = torch.arange(self.width + self.taken + 1, device=tokens.device)
            mask = (columns < self.lengths[:, None]) | (columns >= self.width)
        out = self.model(
            tokens[:, None],
            attention_mask=mask,
            position_ids=(self.lengths + self.taken)[:, None],
            **hf.cache_argument(self.model, self.cache),
        )
        self.taken += 1
        return out.logits[:, -1]

    def traffic(self) -> Traffic:
        """Of the steps since `rewind`."""
        paged = _paged(self.cache)
        stats = hf.stats(self.model)
        read = None
        if stats.sparse_rows:
            steps = self.taken * len(self.lengths)
            read = (stats.summary_bytes + stats.page_bytes) / steps
            if not self.evicts:
                return Traffic(read, stats.dense_bytes / steps)
        token = sum(
            2 * layer.k_cache.shape[1] * (layer.k_cache.shape[3] + layer.v_cache.shape[3]) for layer in paged
        )
        # The mean length over the steps.
        dense = token * (float(self.lengths.double().mean()) + (self.taken + 1) / 2)
        return Traffic(dense if read is None else read, dense)

    def _expect(self, steps: int) -> None:
        """Gets ready for at most so many steps from the prompts' end."""
        own = self.evicts or self.repeats == 1
        if self._replays and own and not self.taken and len(_paged(self.cache)) == len(self.cache.layers):
            self._replay = Replay(self.model, self.cache, self.lengths, steps)

    @torch.inference_mode()
    def generate(
        self,
        tails: Sequence[Sequence[int]],
        limits: Sequence[int],
        stop_ids: Sequence[int],
        uniforms: np.ndarray | None = None,
    ) -> list[list[int]]:
        """The rows' new tokens, the one that stops a row left out.

        Args:
            tails: what is left of the prompts, equally long.
            limits: most tokens of each row's answer.
            stop_ids: tokens that end an answer.
            uniforms: [B, max(limits)] numbers in [0, 1) that a token is drawn by; greedy where there are none.
        """
        device = self.lengths.device
        fed = torch.tensor([list(tail) for tail in tails], device=device)
        self._expect(fed.shape[1] + max(limits))
        for column in fed.unbind(1):
            logits = self.step(column)
        most = torch.tensor(limits, device=device)
        stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.long, device=device)
        given = None if uniforms is None else torch.tensor(uniforms, device=device)
        done = most <= 0
        new, alive = [], []
        for count in range(max(limits)):
            token = logits.argmax(-1) if given is None else sampled(logits, given[:, count])
            done = done | torch.isin(token, stops)
            new.append(token)
            alive.append(~done)
            done = done | (most <= count + 1)
            if bool(done.all()):
                break
            logits = self.step(token)
        if not new:
            return [[] for _ in limits]
        tokens, kept = torch.stack(new, 1).tolist(), torch.stack(alive, 1).sum(1).tolist()
        return [row[:n] for row, n in zip(tokens, kept, strict=True)]

    @torch.inference_mode()
    def read(self, texts: Sequence[Forced]) -> list[Read]:
        """What the model made of a text a row, teacher-forced."""
        device = self.lengths.device
        width = max(len(text.feed) for text in texts)
        # What stands behind a shorter text is read and not looked at.
        fed = torch.tensor([text.feed + [0] * (width - len(text.feed)) for text in texts], device=device)
        wants = [text.targets for text in texts]
        target = torch.tensor([want + [-1] * (width - len(want)) for want in wants], device=device)
        self._expect(width)
        right = torch.zeros(len(texts), dtype=torch.long, device=device)
        loss = torch.zeros(len(texts), dtype=torch.float64, device=device)
        for column, wanted in zip(fed.unbind(1), target.unbind(1), strict=True):
            logits = self.step(column)
            counts = wanted >= 0
            right += counts & (logits.argmax(-1) == wanted)
            log_p = logits.double().log_softmax(-1).gather(1, wanted.clamp(min=0)[:, None])[:, 0]
            loss -= torch.where(counts, log_p, 0)
        totals = [sum(token >= 0 for token in want) for want in wants]
        return [
            Read(hits, total, nll / total)
            for hits, total, nll in zip(right.tolist(), totals, loss.tolist(), strict=True)
        ]


def sampled(logits: Tensor, uniform: Tensor) -> Tensor:
    """[B] tokens: the `uniform`-quantile [B] of what temperature, top-k and top-p leave of logits [B, V]."""
    top, ids = (logits.double() / TEMPERATURE).topk(min(TOP_K, logits.shape[-1]))
    share = top.softmax(-1)
    before = share.cumsum(-1) - share
    # The likeliest stays whatever top-p is.
    share = torch.where(before < TOP_P, share, 0)
    reached = share.cumsum(-1)
    at = (reached <= uniform[:, None] * reached[:, -1:]).sum(-1).clamp(max=ids.shape[-1] - 1)
    return ids.gather(1, at[:, None])[:, 0]
