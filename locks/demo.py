"""`locks demo`: eight needles in real prose, answered on one prefilled cache with every way to rank pages."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from locks import api, doctor, hf, plot, progress, torch_impl
from locks.baselines import SharedBasis
from locks.format import SummaryFormat
from locks.models import load_smollm2
from locks.needles import NeedleTask, Question, build_needles, digits_right, mean_kl
from locks.selectors import Selector, make_selector

TITLES = {
    "dense": "dense attention",
    "locks": "LOCKS",
    "oracle": "exact-LSE oracle",
    "quest": "Quest",
    "shared": "shared basis",
}

# Tokens kept free behind the context for a question and its answer.
QUESTION_ROOM = 128


@dataclass(frozen=True)
class Prepared:
    """A model with its task, and what was asked for."""

    model: Any
    tokenizer: Any
    task: NeedleTask
    fmt: SummaryFormat
    seed: int
    tokens: int
    budget: int
    load_seconds: float


class Answers(NamedTuple):
    """The questions answered under one selector (None: dense attention).

    logits: [questions, A, V] fp32, of the answers' digits, teacher-forced; stats: of all decode steps;
    build_seconds: to summarise the context; answer_seconds: to read the questions with their answers.
    """

    selector: Selector | None
    logits: Tensor
    stats: hf.Stats
    build_seconds: float
    answer_seconds: float


def prepare(*, seed: int, tokens: int, budget: int) -> Prepared:
    """Loads SmolLM2 and builds the task.

    Raises:
        SetupError: a package is missing.
        ValueError: a length that the model or the prose cannot serve.
    """
    began = time.perf_counter()
    model, tokenizer = load_smollm2()
    most = model.config.max_position_embeddings - QUESTION_ROOM
    if tokens > most:
        raise ValueError(
            f"tokens: expected at most {most}, what the model holds beside a question, got {tokens}"
        )
    task = build_needles(tokenizer, tokens=tokens, seed=seed)
    return Prepared(
        model, tokenizer, task, SummaryFormat(), seed, tokens, budget, time.perf_counter() - began
    )


def run(prepared: Prepared, out: Path) -> dict[str, Any]:
    """Answers the questions with every selector; returns demo.json, which it writes in `out` with demo.png.

    The context is prefilled once, densely. Each selector summarises those keys; then all questions run as one
    batch whose rows share the context's blocks, a token a step, every layer sparse.
    """
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    model, task, fmt = prepared.model, prepared.task, prepared.fmt
    watch = Watch(task.questions, fmt.page)
    answers = {}
    hf.enable(model, hf.LocksConfig(budget=None))
    try:
        context = prefill(model, task.context_ids)
        prefill_seconds = _now(model) - began
        for name, title in TITLES.items():
            selector = None if name == "dense" else make_selector(name, fmt, model.config.head_dim)
            see = watch.see if name == "locks" else None
            budget = None if selector is None else prepared.budget
            config = hf.LocksConfig(budget=budget, selector=selector, on_step=see)
            answers[name] = ask(model, task.questions, context, config, title, watch)
    finally:
        hf.disable(model)
    best = watch.found()
    seconds = time.perf_counter() - began
    result = {
        "rows": [_row(prepared, name, answers) for name in TITLES],
        "settings": {
            "seed": prepared.seed,
            "tokens": prepared.tokens,
            "budget": prepared.budget,
            **asdict(fmt),
            "shared_rank": SharedBasis.matching(fmt, model.config.head_dim).rank,
            "model": "SmolLM2-135M-Instruct",
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "context_tokens": len(task.context_ids),
        "questions": [{"key": q.key, "value": q.value, "depth": round(q.depth, 4)} for q in task.questions],
        "picture": best.summary(),
        "device": doctor.device_facts(model.device),
        "impl": api.resolve_impl(None, model.device, model.dtype),
        "versions": doctor.versions(),
        "seconds": {
            "load": prepared.load_seconds,
            "prefill": prefill_seconds,
            "total": prepared.load_seconds + seconds,
        },
    }
    (out / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    plot.page_mass(best, out / "demo.png", page=fmt.page)
    return result


def prefill(model: Any, context_ids: Sequence[int]) -> hf.PagedCache:
    """The context in a paged cache without summaries, with a bar."""
    cache = hf.PagedCache(model.config, hf.LocksConfig(budget=None))
    ids = torch.tensor([context_ids], device=model.device)
    with progress.layers(model, f"prefill of {ids.shape[1]} tokens"), torch.inference_mode():
        model(ids, **hf.cache_argument(model, cache), logits_to_keep=1)
    return cache


def ask(
    model: Any,
    questions: Sequence[Question],
    context: hf.PagedCache,
    config: hf.LocksConfig,
    title: str,
    watch: Watch,
) -> Answers:
    """Reads all questions and, teacher-forced, their answers behind a prefilled context, in one batch."""
    began = _now(model)
    with torch.inference_mode():
        cache = hf.fork(context, config)
        built = _now(model)
        cache.batch_repeat_interleave(len(questions))
        hf.reset_stats(model)
        width = max(len(q.input_ids) for q in questions)
        # What stands behind a shorter question is read and not looked at.
        ids = torch.tensor(
            [[*q.input_ids, *[0] * (width - len(q.input_ids))] for q in questions], device=model.device
        )
        # Dense attention gives one token and many the same logits.
        chunk = width if config.budget is None else 1
        parts = []
        with progress.bar(width, title, "token") as shown:
            for column in range(0, width, chunk):
                watch.column = column
                tokens = ids[:, column : column + chunk]
                parts.append(model(tokens, **hf.cache_argument(model, cache)).logits.float())
                shown.update(chunk)
        logits = torch.cat(parts, 1)
        kept = [
            logits[row, len(q.input_ids) - len(q.answer_ids) : len(q.input_ids)]
            for row, q in enumerate(questions)
        ]
    selector = None if config.budget is None else config.ranker
    return Answers(selector, torch.stack(kept), hf.stats(model), built - began, _now(model) - built)


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _row(prepared: Prepared, name: str, answers: dict[str, Answers]) -> dict[str, Any]:
    """One selector's row of demo.json. A step is one token of one sequence through all layers."""
    mine, dense = answers[name], answers["dense"]
    config, task = prepared.model.config, prepared.task
    expected = torch.tensor([q.answer_ids for q in task.questions], device=mine.logits.device)
    # Every sparse run walks the same tokens: any of them tells what dense attention reads.
    stats = answers["locks"].stats if mine.selector is None else mine.stats
    steps = stats.sparse_rows / config.num_hidden_layers
    if mine.selector is None:
        resident, summaries, pages = 0.0, 0.0, stats.dense_bytes / steps
    else:
        sealed = len(task.context_ids) // prepared.fmt.page
        kv = 2 * 2 * config.head_dim * sealed * prepared.fmt.page
        resident = mine.selector.resident_bytes(config.head_dim, sealed) / kv
        summaries, pages = stats.summary_bytes / steps, stats.page_bytes / steps
    return {
        "selector": name,
        "digits_right": digits_right(mine.logits, expected),
        "digits_total": expected.numel(),
        "kl": mean_kl(dense.logits, mine.logits),
        "resident_share": resident,
        "bytes_per_step": summaries + pages,
        "summary_bytes_per_step": summaries,
        "page_bytes_per_step": pages,
        "dense_bytes_per_step": stats.dense_bytes / steps,
        "decode_rows": mine.stats.decode_rows,
        "sparse_rows": mine.stats.sparse_rows,
        "answers": [prepared.tokenizer.decode(ids) for ids in mine.logits.argmax(-1)],
        "build_seconds": mine.build_seconds,
        "answer_seconds": mine.answer_seconds,
    }


class Watch:
    """Looks, while questions are read, for the head that puts most of its mass on the asked needle's page.

    `column` is the question's token that a step reads; a step counts for a row when it predicts the first
    digit.
    """

    def __init__(self, questions: Sequence[Question], page: int) -> None:
        self.questions, self.page = questions, page
        self.column = 0
        self.best: plot.Retrieval | None = None

    def found(self) -> plot.Retrieval:
        """The best so far.

        Raises:
            RuntimeError: no step counted.
        """
        if self.best is None:
            raise RuntimeError("expected sparse steps that predict a first digit, got none")
        return self.best

    def see(self, step: hf.Step) -> None:
        """An `on_step` callback."""
        rows = [row for row, q in enumerate(self.questions) if len(q.question_ids) - 1 == self.column]
        if not rows:
            return
        layer = step.layer
        exact = torch_impl.exact_page_mass(
            step.q[rows],
            layer.k_cache,
            layer.table[rows],
            layer.seq_lens[rows],
            page=self.page,
            scale=step.scale,
        )
        # [rows, Hq, N]
        true, estimated = exact.log_mass.softmax(-1), step.mass.log_mass[rows].softmax(-1)
        for i, row in enumerate(rows):
            question = self.questions[row]
            first, last = (position // self.page for position in (question.needle[0], question.needle[1] - 1))
            share, head = true[i, :, first : last + 1].amax(-1).max(0)
            if self.best is not None and share <= self.best.true[self.best.needle]:
                continue
            kv_head = int(head) // (step.q.shape[1] // layer.k_cache.shape[1])
            ids = step.pages.page_ids[row, kv_head, : int(step.pages.counts[row, kv_head])]
            self.best = plot.Retrieval(
                layer=step.layer_idx,
                head=int(head),
                key=question.key,
                true=true[i, head].cpu(),
                estimated=estimated[i, head].cpu(),
                picked=ids.tolist(),
                needle=first + int(true[i, head, first : last + 1].argmax()),
                pages=-(-int(layer.seq_lens[row]) // self.page),
            )


def table(result: dict[str, Any]) -> Table:
    """The rows of demo.json for a terminal."""
    settings = result["settings"]
    shown = Table(
        box=box.SIMPLE,
        padding=0,
        title=f"{len(result['questions'])} needles in {result['context_tokens']} tokens, "
        f"{settings['budget']} tokens attended to by each KV head",
        caption="KL to dense over the answers' tokens; resident: share of K+V; "
        "summaries, pages, read: MB a step, through all layers",
    )
    shown.add_column("answer", no_wrap=True)
    for heading in ("digits right", "KL, nats", "resident, %", "summaries", "pages", "read", "of dense, %"):
        shown.add_column(heading, justify="right")
    for row in result["rows"]:
        read, full = row["bytes_per_step"], row["dense_bytes_per_step"]
        shown.add_row(
            TITLES[row["selector"]],
            f"{row['digits_right']}/{row['digits_total']}",
            f"{row['kl']:.3f}",
            f"{100 * row['resident_share']:.1f}",
            f"{row['summary_bytes_per_step'] / 1e6:.2f}",
            f"{row['page_bytes_per_step'] / 1e6:.2f}",
            f"{read / 1e6:.2f}",
            f"{100 * read / full:.1f}",
        )
    return shown
