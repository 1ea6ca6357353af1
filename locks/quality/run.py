"""The run: every task's examples in batches, one prefill a batch, every selector and budget on it, rows to the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from locks.models import SetupError, head_dim, num_layers
from locks.quality import engine
from locks.quality.evictors import Evictor
from locks.quality.example import Example, Task, draw
from locks.quality.log import Key, Log, Row
from locks.quality.methods import FULL, Method

# Of a generated text, what a row keeps.
KEPT = 2000


class Config(NamedTuple):
    """One line of the comparison: a method at a budget; None and None for full attention."""

    method: Method | None
    budget: int | None

    def facts(self, page: int) -> dict[str, Any]:
        """Its columns of a row."""
        if self.method is None:
            return {"selector": FULL, "rank": None, "page": page, "bits": None, "budget": None}
        return {**self.method.facts(), "budget": self.budget}


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        tasks: all of them.
        methods: selectors.
        budgets: of each, in tokens.
        full: whether full attention is a line too.
        page: tokens in a page.
        batch: rows that are answered at once.
        tail: tokens of a prompt that are read a step at a time, at least 1.
        seed: of what is drawn while answering.
        least: where full attention's score of a batch lies below it, the batch has no other line.
        replays: as of `engine.Session`.
    """

    tasks: Sequence[Task]
    methods: Sequence[Method]
    budgets: Sequence[int]
    full: bool
    page: int
    batch: int = 1
    tail: int = 1
    seed: int = 42
    least: float = 0.0
    replays: bool | None = None

    @property
    def configs(self) -> list[Config]:
        """Every line, full attention first."""
        lines = [Config(method, budget) for method in self.methods for budget in self.budgets]
        return [Config(None, None), *lines] if self.full else lines

    def keys(self, task: Task) -> Iterator[Key]:
        """The places of all rows of a task."""
        for index in task.indices:
            for sample in range(task.samples):
                for config in self.configs:
                    yield self.key(task, index, sample, config)

    def key(self, task: Task, index: int, sample: int, config: Config) -> Key:
        """The place of one row."""
        facts = config.facts(self.page)
        return (task.name, task.length, index, sample, facts["selector"], facts["page"], facts["budget"])


def run(model: Any, tokenizer: Any, plan: Plan, log: Log, done: Callable[[], None] = lambda: None) -> None:
    """Answers what the log does not hold yet; `done` is called after every batch.

    A batch that does not fit into the GPU's memory is halved, and so are those behind it.

    Raises:
        SetupError: one example alone does not fit.
    """
    missing = {task: [key for key in plan.keys(task) if key not in log.rows] for task in plan.tasks}
    total = sum(len(task.indices) * task.samples * len(plan.configs) for task in plan.tasks)
    left = sum(map(len, missing.values()))
    with engine.enabled(model), tqdm(total=total, initial=total - left, unit="answer") as bar:
        size = plan.batch if engine.pads(model) else 1
        for task in plan.tasks:
            bar.set_description(f"{task.name} {task.length}")
            wanted = set(missing[task])
            indices = sorted({key[2] for key in wanted})
            while indices:
                some = indices[: max(1, size // task.samples)]
                try:
                    _answer(model, tokenizer, plan, task, some, wanted, log, bar)
                except torch.OutOfMemoryError as error:
                    if len(some) == 1:
                        raise SetupError(
                            f"{task.name}: one example of {task.length} tokens does not fit into memory alone"
                        ) from error
                else:
                    del indices[: len(some)]
                    done()
                    continue
                # Here, since what the exception holds is free only now.
                torch.cuda.empty_cache()
                size = max(1, len(some) // 2 * task.samples)
                bar.write(
                    f"{task.name}: {len(some)} examples at once do not fit into memory, now half as many"
                )
                wanted -= log.rows.keys()


def batches(indices: list[int], size: int) -> Iterator[list[int]]:
    """The numbers in their order, `size` at a time."""
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


def _answer(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    task: Task,
    indices: list[int],
    wanted: set[Key],
    log: Log,
    bar: tqdm,
) -> None:
    """One batch of examples under every config that lacks one of their rows."""
    examples = [task.make(index) for index in indices]
    repeats = len(examples[0].forced) or task.samples
    # Forced texts bring their own last tokens of the prompt.
    tail = 0 if examples[0].forced else plan.tail
    lines = {
        method: [
            config
            for config in plan.configs
            if config.method is method
            and any(plan.key(task, i, s, config) in wanted for i in indices for s in range(task.samples))
        ]
        for method in [None, *plan.methods]
    }
    makers = {
        method: None if method is None else method.make(head_dim(model.config), num_layers(model.config))
        for method, mine in lines.items()
        if mine
    }
    evictors = [maker for maker in makers.values() if isinstance(maker, Evictor)]
    cuts = [len(example.ids) - tail for example in examples]
    prefilled = engine.prefill(
        model,
        [example.ids[:cut] for example, cut in zip(examples, cuts, strict=True)],
        evictors,
        [example.ids[cut:] for example, cut in zip(examples, cuts, strict=True)],
    )
    for method, mine in lines.items():
        if mine:
            session = engine.Session(model, prefilled, makers[method], repeats, replays=plan.replays)
        for config in mine:
            began = time.perf_counter()
            session.rewind(config.budget)
            answers = _answers(session, tokenizer, plan, task, examples, tail)
            traffic = session.traffic()
            seconds = (time.perf_counter() - began) / len(examples) / task.samples
            facts = {
                **config.facts(plan.page),
                "bytes_per_step": round(traffic.read),
                "dense_bytes_per_step": round(traffic.dense),
                "seconds": round(seconds, 4),
            }
            rows = [
                row
                for example, made in zip(examples, answers, strict=True)
                for row in result_rows(task, example, made, facts)
                if plan.key(task, row["index"], row["sample"], config) in wanted
            ]
            log.append(rows)
            bar.update(len(rows))
        if method is None and _full_score(plan, task, indices, log) < plan.least:
            return


def _full_score(plan: Plan, task: Task, indices: list[int], log: Log) -> float:
    """Full attention's mean score over a batch; 1 where it is no line."""
    keys = [plan.key(task, i, s, Config(None, None)) for i in indices for s in range(task.samples)]
    scores = [log.rows[key]["score"] for key in keys if key in log.rows]
    return float(np.mean(scores)) if scores else 1.0


def _answers(
    session: engine.Session, tokenizer: Any, plan: Plan, task: Task, examples: list[Example], tail: int
) -> list[list[Any]]:
    """For each example what was generated for each sample: (text, tokens), or what was made of its forced texts."""
    if examples[0].forced:
        read = session.read([text for example in examples for text in example.forced])
        count = len(examples[0].forced)
        return [[read[i * count : (i + 1) * count]] for i in range(len(examples))]
    rows = [example for example in examples for _ in range(task.samples)]
    limits = [example.max_new_tokens for example in rows]
    uniforms = None
    if task.samples > 1:
        uniforms = np.array(
            [
                [rng.random() for _ in range(max(limits))]
                for example in examples
                for sample in range(task.samples)
                # Equal for every selector and budget.
                for rng in [draw(plan.seed, "sample", task.name, example.index, sample)]
            ]
        )
    stops = {*task.stop_ids, *stop_ids(session.model.generation_config, tokenizer)}
    new = session.generate([row.ids[len(row.ids) - tail :] for row in rows], limits, sorted(stops), uniforms)
    made = [(tokenizer.decode(ids, skip_special_tokens=True), len(ids)) for ids in new]
    return [made[i * task.samples : (i + 1) * task.samples] for i in range(len(examples))]


def most_tokens(example: Example) -> int:
    """How long a row can get: the prompt and its answer, or the longest of the forced texts."""
    read = max((len(text.feed) for text in example.forced), default=0)
    return len(example.ids) + example.max_new_tokens + read


def stop_ids(generation_config: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text, by the model's generation config and the tokenizer."""
    ends = getattr(generation_config, "eos_token_id", None)
    listed = ends if isinstance(ends, list) else [ends]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}


def result_rows(task: Task, example: Example, made: list[Any], facts: Row) -> Iterator[Row]:
    """A row for each sample of an example.

    Args:
        task: that it is of.
        example: the prompt.
        made: for each sample the text and how many tokens it has, or what was made of the forced texts.
        facts: the columns that the line and its traffic give.
    """
    for sample, answer in enumerate(made):
        row = {"task": task.name, "length": task.length, "index": example.index, "sample": sample, **facts}
        if example.forced:
            scores = task.score(example, answer)
            prompt = most_tokens(example)
            more: Row = {"tokens": sum(text.total for text in answer)}
        else:
            text, count = answer
            scores = task.score(example, text)
            prompt = len(example.ids)
            more = {"tokens": count, "answer": text[:KEPT]}
        yield {**row, "score": next(iter(scores.values())), "scores": scores, "prompt_tokens": prompt, **more}
