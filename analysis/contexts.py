"""Contexts with needles and questions: prefilled once in one batch, asked many times, and looked at layer by layer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from outputs import InputError
from torch import Tensor
from transformers import AttentionInterface

from locks import hf
from locks.baselines import PageState, SharedBasis, SharedFactors, fit_shared
from locks.models import load_model, load_smollm2
from locks.needles import NeedleTask, build_needles, python_prose

# Of the prose, what no context is made of: a shared basis that is fitted offline learns from it.
HELD_OUT = 0.25


class Rows(NamedTuple):
    """One layer as the answers of one context see it; row = (question, digit), all on the context's blocks.

    q [B, Hq, D] of the position that predicts the digit, k_cache and v_cache [num_blocks, Hkv, block, D],
    block_table [B, max_blocks] int32, seq_lens [B] int32.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scale: float

    @property
    def keys_args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k_cache, self.block_table, self.seq_lens

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_cache, self.v_cache, self.block_table, self.seq_lens

    @property
    def heads(self) -> int:
        return self.k_cache.shape[1]


@dataclass(frozen=True)
class Batch:
    """Contexts prefilled densely in one batch, padded on the left, one cache row each."""

    model: Any
    tasks: Sequence[NeedleTask]
    cache: hf.PagedCache
    # [contexts, columns] bool
    real: Tensor

    @property
    def questions(self) -> list[Any]:
        """All contexts' questions, in order."""
        return [q for task in self.tasks for q in task.questions]

    @property
    def answers(self) -> Tensor:
        """[questions, digits] the tokens that are right."""
        return torch.tensor([q.answer_ids for q in self.questions], device=self.model.device)


@functools.cache
def prose() -> tuple[str, str]:
    """Prose that is installed with Python: what contexts are made of, and what is held out."""
    sentences = list(python_prose())
    cut = round(len(sentences) * (1 - HELD_OUT))
    return "\n\n".join(sentences[:cut]), "\n\n".join(sentences[cut:])


def load(path: Path | None, device: str) -> tuple[Any, Any]:
    """Model and tokenizer at a path, SmolLM2 for None, in float32: tables then agree across devices."""
    if path is None:
        return load_smollm2(dtype=torch.float32, device=device)
    return load_model(path, dtype=torch.float32, device=device)


def model_facts(path: Path | None) -> dict[str, Any]:
    """What names a model wherever it lies: its name, its weights' hash, and the recipe it was trained by."""
    if path is None:
        return {"model": "SmolLM2-135M-Instruct"}
    weights = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    facts: dict[str, Any] = {"model": path.name, "weights_sha256": {w.name: _sha256(w) for w in weights}}
    recipe = path / "recipe.json"
    if recipe.is_file():
        facts["recipe_sha256"] = _sha256(recipe)
        facts["recipe"] = {
            k: v for k, v in json.loads(recipe.read_text()).items() if not isinstance(v, list | dict)
        }
    return facts


@functools.cache
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def enabled(path: Path | None, device: str) -> tuple[Any, Any]:
    """The same, prepared for paged caches, once a process, on one thread: equal seeds then give equal tables."""
    torch.set_num_threads(1)
    model, tokenizer = load(path, device)
    return hf.enable(model, hf.LocksConfig(budget=None)), tokenizer


def make_tasks(tokenizer: Any, tokens: int, seeds: Sequence[int]) -> list[NeedleTask]:
    """One context of eight questions a seed."""
    return [build_needles(tokenizer, tokens=tokens, seed=seed, text=prose()[0]) for seed in seeds]


def prefill(model: Any, tasks: Sequence[NeedleTask]) -> Batch:
    """The contexts in one paged cache without summaries."""
    width = max(len(task.context_ids) for task in tasks)
    ids = torch.zeros((len(tasks), width), dtype=torch.long)
    real = torch.zeros((len(tasks), width), dtype=torch.bool)
    for row, task in enumerate(tasks):
        ids[row, width - len(task.context_ids) :] = torch.tensor(task.context_ids)
        real[row, width - len(task.context_ids) :] = True
    ids, real = ids.to(model.device), real.to(model.device)
    cache = hf.PagedCache(model.config, hf.LocksConfig(budget=None))
    position = (real.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        model(
            ids,
            attention_mask=real,
            position_ids=position,
            **hf.cache_argument(model, cache),
            logits_to_keep=1,
        )
    return Batch(model, tasks, cache, real)


def prepared(model: Any, tokenizer: Any, tokens: int, seeds: Sequence[int]) -> tuple[Batch, Tensor]:
    """A context of each seed, and dense attention's log-probabilities of their answers."""
    batch = prefill(model, make_tasks(tokenizer, tokens, seeds))
    return batch, ask(batch, hf.LocksConfig(budget=None)).log_softmax(-1)


def ask(batch: Batch, config: hf.LocksConfig) -> Tensor:
    """Logits [questions, digits, V] of the answers, teacher-forced, a token a step, all questions in one batch."""
    questions, each = batch.questions, len(batch.tasks[0].questions)
    width = max(len(q.input_ids) for q in questions)
    # Dense attention gives one token and many the same logits.
    chunk = width if config.budget is None else 1
    kept: list[list[Tensor]] = [[] for _ in questions]
    with torch.inference_mode():
        cache = hf.fork(batch.cache, config)
        cache.batch_repeat_interleave(each)
        mask = batch.real.repeat_interleave(each, 0)
        position = mask.sum(1)[:, None] + torch.arange(width, device=mask.device)
        # What stands behind a shorter question is read and not looked at.
        ids = torch.tensor([[*q.input_ids, *[0] * (width - len(q.input_ids))] for q in questions])
        ids = ids.to(mask.device)
        for column in range(0, width, chunk):
            new = slice(column, column + chunk)
            mask = torch.cat([mask, torch.ones_like(position[:, new], dtype=torch.bool)], 1)
            logits = batch.model(
                ids[:, new],
                attention_mask=mask,
                position_ids=position[:, new],
                **hf.cache_argument(batch.model, cache),
            ).logits
            for row, q in enumerate(questions):
                digits = range(len(q.input_ids) - len(q.answer_ids), len(q.input_ids))
                kept[row] += [logits[row, i].float() for i in range(logits.shape[1]) if column + i in digits]
    return torch.stack([torch.stack(rows) for rows in kept])


def answered(batch: Batch, dense: Tensor, found: Tensor) -> np.ndarray:
    """[questions, 2]: share of digits right and KL to dense in nats, from log-probabilities [questions, digits, V]."""
    digits = (found.argmax(-1) == batch.answers).double().mean(1)
    divergence = (dense.double().exp() * (dense.double() - found.double())).sum(-1).mean(1)
    return torch.stack([digits, divergence], -1).cpu().numpy()


@contextmanager
def _watched() -> Iterator[dict[int, tuple[Tensor, hf.PagedLayer, float]]]:
    """By layer, what attention last got: queries [B, Hq, new, D] after their rotation, the cache, the logits' scale."""
    attend, seen = AttentionInterface()[hf.NAME], {}

    def see(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        seen[module.layer_idx] = query, kwargs["locks"][1][module.layer_idx], scale
        return attend(module, query, *args, **kwargs)

    AttentionInterface.register(hf.NAME, see)
    try:
        yield seen
    finally:
        AttentionInterface.register(hf.NAME, attend)


def observe(model: Any, task: NeedleTask) -> list[Rows]:
    """Every layer of one context as its answers see it under dense attention."""
    batch = prefill(model, [task])
    length, questions = len(task.context_ids), task.questions
    digits = len(questions[0].answer_ids)
    first = [len(q.question_ids) - 1 for q in questions]
    with _watched() as seen:
        ask(batch, hf.LocksConfig(budget=None))
    order = [(row, digit) for row in range(len(questions)) for digit in range(digits)]
    lengths = [length + first[row] + digit + 1 for row, digit in order]
    layers = []
    for index in sorted(seen):
        queries, layer, scale = seen[index]
        q = torch.stack([queries[row, :, first[row] + digit] for row, digit in order])
        # The blocks in use alone, numbered anew: what lies in the others was never written.
        table = layer.table.long()[[row for row, _ in order]]
        blocks, numbers = table.unique(return_inverse=True)
        k_cache, v_cache = layer.k_cache[blocks], layer.v_cache[blocks]
        # The end of a last block was never written.
        end = layer.columns % k_cache.shape[2]
        if end:
            k_cache[numbers[:, -1], :, end:] = 0
            v_cache[numbers[:, -1], :, end:] = 0
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=q.device)
        layers.append(Rows(q, k_cache, v_cache, numbers.int(), seq_lens, scale))
    return layers


# A context's questions are asked for four analyses in a row.
@functools.lru_cache(maxsize=16)
def look(path: Path | None, device: str, tokens: int, seed: int) -> list[Rows]:
    """`observe` of the context of a seed."""
    model, tokenizer = enabled(path, device)
    (task,) = make_tasks(tokenizer, tokens, [seed])
    return observe(model, task)


@functools.cache
def held_out_keys(path: Path | None, device: str, tokens: int) -> list[Tensor]:
    """Every layer's keys [Hkv, T, D] of a context of the held-out prose."""
    model, tokenizer = enabled(path, device)
    task = build_needles(tokenizer, tokens=tokens, needles=1, seed=0, text=prose()[1])
    cache = prefill(model, [task]).cache
    return [layer.dense()[0][0] for layer in cache.layers]  # pyright: ignore[reportAttributeAccessIssue]


class FittedBasis(SharedBasis):
    """A shared basis for every layer: given in the layers' order, or fitted to each row's own context."""

    def __init__(self, like: SharedBasis, given: Sequence[Tensor] | None = None) -> None:
        super().__init__(like.page, like.rank, coef_bits=like.coef_bits)
        self.given: Iterator[Tensor] | None = None if given is None else iter(given)

    def allocate(self, k_cache: Tensor, carry: PageState | None = None) -> PageState:
        """As `SharedBasis.allocate`, with the next layer's basis."""
        state = super().allocate(k_cache, carry)
        if carry is None and self.given is not None:
            state.factors = fit_shared(next(self.given), self.rank)
        return state

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
        """As `SharedBasis.seal`, with a context's own basis for its rows; rows of a context stand together."""
        if self.given is not None:
            super().seal(state, k_cache, block_table, seq_lens, start=start, max_new_pages=max_new_pages)
            return
        if state.factors is not None:
            own = _each_row(state, len(seq_lens))
            super().seal(own, k_cache, block_table, seq_lens, start=start, max_new_pages=max_new_pages)
            return
        fitted = []
        for row in range(len(seq_lens)):
            one, own = slice(row, row + 1), PageState(state.parts)
            since = None if start is None else start[one]
            super().seal(
                own, k_cache, block_table[one], seq_lens[one], start=since, max_new_pages=max_new_pages
            )
            if own.factors is None:
                raise InputError("context: expected at least one full page, got a shorter one")
            fitted.append(own.factors)
        state.factors = SharedFactors(*(torch.stack(parts) for parts in zip(*fitted, strict=True)))

    def _of_rows(self, state: PageState, row: Tensor) -> PageState:
        # A context's own are fitted to the first pages that come.
        fixed = self.given is not None or state.factors is None
        return state if fixed else _with_factors(state, lambda x: x[row])

    def _of_blocks(self, state: PageState, query: Tensor, block_table: Tensor) -> Tensor:
        """As `SharedBasis._of_blocks`; blocks that all rows of a context share are unpacked once for all of them."""
        rows = len(query)
        each = int((block_table[:, 0] == block_table[0, 0]).sum())
        table = block_table.unflatten(0, (-1, each if rows % each == 0 else 1))
        common = int((table == table[:, :1]).all(1).all(0).cumprod(0).sum())
        own = state if self.given is not None else _each_row(state, rows)
        if table.shape[1] == 1 or not common:
            return super()._of_blocks(own, query, block_table)
        # The rows' queries as one row of more query heads, [contexts, Hkv, each * G, D].
        together = query.unflatten(0, table.shape[:2]).transpose(1, 2).flatten(2, 3)
        first = own if self.given is not None else _with_factors(own, lambda x: x[::each])
        found = super()._of_blocks(first, together, table[:, 0, :common])
        found = found.unflatten(2, (each, -1)).transpose(1, 2).flatten(0, 1)
        return torch.cat([found, super()._of_blocks(own, query, block_table[:, common:])], -1)


def _with_factors(state: PageState, take: Callable[[Tensor], Tensor]) -> PageState:
    """The same pages, of other factors: mean [Hkv, D] and basis [Hkv, R, D] with the contexts' or rows' axis before."""
    return PageState(state.parts, None if state.factors is None else SharedFactors(*map(take, state.factors)))


def _each_row(state: PageState, rows: int) -> PageState:
    """A context's factors for each of its rows, which stand together."""
    return _with_factors(state, lambda x: x.repeat_interleave(rows // len(x), 0))
