"""What every way to rank pages keeps: mass, carriers, the oracle's pages, the output, KL to dense, the digits.

    python analysis/selection.py --device cuda --questions 104 --out analysis/results
    python analysis/selection.py --full --part decoded --only shared:cache,locks::16:1 --out analysis/results/full

The second puts a part into the table that is there: some columns, some ways.
Contexts of real prose with eight hidden numbers each. Mass, carriers, overlap and output error come from the layers'
keys, values and queries at the answers' digits under dense attention, a context at a time, without decoding. KL and
digits come from decoding all contexts in one batch, teacher-forced, every layer sparse. Budgets are tokens a KV head
attends to, the first and the newest page included.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import attention
import contexts
import numpy as np
import outputs
import pandas as pd
import parts
import torch
import typer
from ablation import QUESTIONS, by_question
from attention import MEASURES
from outputs import InputError
from tqdm import tqdm
from ways import Scorer, Way, locks_ways, make_format, plain_ways, shared_ways

from locks import PageList, hf, models
from locks.pages import least_budget

BUDGETS = (64, 128, 256, 512, 1024, 2048)
# What tells a table's rows apart.
KEYS = ("selector", "fit", "page", "rank", "bits", "budget")
KEPT, DECODED = ("questions", *MEASURES), ("answered", "digits", "kl")
# Per question: each way and budget to its values.
Found = dict[tuple[Way, int], np.ndarray]


class Part(StrEnum):
    """Which columns are measured."""

    all = "all"
    kept = "kept"
    decoded = "decoded"

    @property
    def columns(self) -> tuple[str, ...]:
        """Without the intervals' ends."""
        return {Part.kept: KEPT, Part.decoded: DECODED}.get(self, (*KEPT, *DECODED))


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    contexts: int
    tokens: int
    budgets: tuple[int, ...]
    full: bool
    model: Path | None = None
    device: str = "cpu"
    seed: int = 0

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.contexts)

    def look(self, seed: int) -> tuple[list[contexts.Rows], list[torch.Tensor]]:
        """Every layer of one context, and the keys of the held-out prose."""
        layers = contexts.look(self.model, self.device, self.tokens, seed)
        return layers, contexts.held_out_keys(self.model, self.device, self.tokens)

    def budgets_of(self, way: Way) -> list[int]:
        """Those that leave a way's pages a choice."""
        page = way.fmt.page
        return [b for b in self.budgets if least_budget(page) <= b < self.tokens and b % page == 0]


def offline_ways(full: bool) -> list[Way]:
    """What is measured without decoding."""
    return [*plain_ways(full), *locks_ways(full), *shared_ways(full)]


def decoded_ways(full: bool) -> list[Way]:
    """What is decoded too."""
    default = make_format(16, 4)
    few = [Way("oracle", default), Way("locks", default), Way("quest", default)]
    few += [Way("shared", default, fit) for fit in ("cache", "held-out")]
    if not full:
        return [*few, Way("locks", make_format(16, 8))]
    more = [(16, 8), (16, 2), (16, 1), (32, 4), (32, 8), (64, 8)]
    few += [Way("locks", make_format(p, r)) for p, r in more]
    few += [Way("locks", make_format(16, 4, (8, 4, 8))), Way("locks", make_format(16, 4, (8, 8, 8)))]
    few += [Way("shared", make_format(16, r), fit) for r in (2, 8) for fit in ("cache", "held-out")]
    return [*few, *(Way(name, default) for name in ("arkvale", "mean", "random"))]


def chosen(way: Way, only: str) -> bool:
    """Whether a list NAME[:FIT[:PAGE[:RANK[:BITS]]]], by commas, names a way; an empty field fits all, as "" does."""
    fmt = way.fmt
    bits = f"{fmt.mean_bits}/{fmt.basis_bits}/{fmt.coef_bits}"
    own = (way.name, way.fit, str(fmt.page), str(fmt.rank), bits)
    return any(
        all(wanted in ("", mine) for wanted, mine in zip(one.split(":"), own, strict=False))
        for one in only.split(",")
    )


@torch.inference_mode()
def offline(size: Size, seed: int, only: str = "") -> Found:
    """`MEASURES` [questions, measures] of one context under every way and budget, mean over layers and digits."""
    layers, held_out = size.look(seed)
    sums: dict[tuple[Way, int], list[torch.Tensor]] = {}
    for rows, keys in zip(layers, held_out, strict=True):
        scorer = Scorer(rows, keys)
        truths: dict[int, attention.Exact] = {}
        best: dict[tuple[int, int], PageList] = {}
        # The oracle of a page size comes before the other ways of that size.
        for way in offline_ways(size.full):
            page = way.fmt.page
            if way.name != "oracle" and not chosen(way, only):
                continue
            if way.name == "oracle":
                truths[page] = attention.exact(rows, page)
            mass = truths[page].scores if way.name == "oracle" else scorer.mass(way)
            for budget in size.budgets_of(way):
                pages = attention.choose(mass, rows, page, budget)
                if way.name == "oracle":
                    best[page, budget] = pages
                found = attention.kept(truths[page], rows, page, pages, best[page, budget])
                sums.setdefault((way, budget), []).append(torch.stack([found[name] for name in MEASURES], -1))
    return {key: by_question(layers) for key, layers in sums.items() if chosen(key[0], only)}


@functools.cache
def _prepared(size: Size) -> tuple[contexts.Batch, torch.Tensor]:
    """All contexts, and dense attention's log-probabilities of their answers."""
    model, tokenizer = contexts.enabled(size.model, size.device)
    return contexts.prepared(model, tokenizer, size.tokens, size.seeds)


@torch.inference_mode()
def decode(size: Size, way: Way | None) -> Found:
    """Share of digits right and KL to dense [questions, 2] under every budget; None is dense attention."""
    batch, dense = _prepared(size)
    found: Found = {}
    for budget in [0] if way is None else size.budgets_of(way):
        logits = dense
        if way is not None:
            held_out = contexts.held_out_keys(size.model, size.device, size.tokens)
            selector = way.selector(models.head_dim(batch.model.config), held_out)
            logits = contexts.ask(batch, hf.LocksConfig(budget=budget, selector=selector)).log_softmax(-1)
        found[way or DENSE, budget] = contexts.answered(batch, dense, logits)
    return found


DENSE = Way("dense", make_format(16, 4))


def all_ways(full: bool) -> list[Way]:
    """Dense attention and what is measured either way, in a table's order."""
    return list(dict.fromkeys([DENSE, *offline_ways(full), *decoded_ways(full)]))


def table(size: Size, head_dim: int, kept: Sequence[Found], decoded: Found) -> pd.DataFrame:
    """One row a way and budget, over the questions that are done."""
    rows = []
    for way in all_ways(size.full):
        cells = {"selector": "dense"} if way is DENSE else way.cells(head_dim, size.tokens)
        for budget in [0] if way is DENSE else size.budgets_of(way):
            every = [found[way, budget] for found in kept if (way, budget) in found]
            if not every and (way, budget) not in decoded:
                continue
            row: dict[str, Any] = {**cells, "budget": budget or ""}
            if every:
                values = np.concatenate(every)
                row |= {"questions": len(values)} | outputs.cells(MEASURES, values)
            if (way, budget) in decoded:
                values = decoded[way, budget]
                row |= {"answered": len(values)} | outputs.cells(("digits", "kl"), values)
            rows.append(row)
    return pd.DataFrame(rows)


def _finished(jobs: Sequence[Callable[[], Found]], workers: int) -> Iterator[tuple[int, Found]]:
    """Results as they come, with their job's number; without workers in this process, one after the other."""
    if not workers:
        yield from ((i, job()) for i, job in enumerate(jobs))
        return
    # A small model's decode steps are bound by the host: on a GPU machine several processes share the device.
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        numbers = {pool.submit(job): i for i, job in enumerate(jobs)}
        for done in concurrent.futures.as_completed(numbers):
            yield numbers[done], done.result()


def in_order(head_dim: int, frame: outputs.Table) -> outputs.Table:
    """The rows of a table in `all_ways`'s order, by budget within a way."""
    names = KEYS[:-1]
    ways = [{"selector": "dense"}, *(way.cells(head_dim, 1 << 16) for way in all_ways(True)[1:])]
    order = {parts.name_of([cells.get(k) for k in names]): i for i, cells in enumerate(ways)}
    at = [order[name] for name in parts.names_of(frame, names)]
    return frame.assign(at=at).sort_values(["at", "budget"], ignore_index=True).drop(columns="at")


def measure(size: Size, out: Path, workers: int = 0, part: Part = Part.all, only: str = "") -> outputs.Table:
    """Writes selection.csv after every job, and returns it when all are done.

    A part or some ways alone are put into the table that is there.
    """
    model, _ = contexts.enabled(size.model, size.device)
    head_dim = models.head_dim(model.config)
    facts = outputs.device_facts(model.device, model.dtype) | contexts.model_facts(size.model)
    facts |= {"tokens": size.tokens, "contexts": size.contexts}
    jobs: list[Callable[[], Found]] = []
    if part is not Part.decoded:
        jobs += [functools.partial(offline, size, seed, only) for seed in size.seeds]
    looks = len(jobs)
    if part is not Part.kept:
        ways = [DENSE, *decoded_ways(size.full)]
        jobs += [
            functools.partial(decode, size, None if way is DENSE else way)
            for way in ways
            if chosen(way, only)
        ]
    results: dict[int, Found] = {}
    frame: outputs.Table = pd.DataFrame()
    for number, found in tqdm(_finished(jobs, workers), "selection", len(jobs)):
        results[number] = found
        kept = [results[i] for i in sorted(results) if i < looks]
        decoded = {key: x for i in sorted(results) if i >= looks for key, x in results[i].items()}
        frame = table(size, head_dim, kept, decoded)
        if part is Part.all and not only:
            outputs.publish(out, {"selection": frame}, **facts)
        else:
            put(out, frame, head_dim, part, only, **facts)
    return frame


def put(out: Path, frame: pd.DataFrame, head_dim: int, part: Part, only: str, **facts: Any) -> None:
    """Puts rows of `table` into the table that is there."""
    parts.publish(
        out,
        "selection",
        frame,
        keys=KEYS,
        measured=part.columns,
        rows=only or "all",
        order=functools.partial(in_order, head_dim),
        **facts,
    )


def main(
    questions: Annotated[int, typer.Option(help="eight a context")] = 8,
    tokens: Annotated[int, typer.Option(help="of a context")] = 1500,
    budgets: Annotated[str, typer.Option(help="tokens a KV head attends to, by commas")] = "64,128,256,512",
    full: Annotated[bool, typer.Option(help="every page, rank and bits")] = False,
    model: Annotated[Path | None, typer.Option(help="model directory or .gguf; SmolLM2 without")] = None,
    device: Annotated[str, typer.Option()] = "cpu",
    workers: Annotated[int, typer.Option(help="processes, each with a model; 0 for this one alone")] = 0,
    seed: Annotated[int, typer.Option(help="the first context's")] = 0,
    part: Annotated[Part, typer.Option(help="columns: without decoding, of decoding")] = Part.all,
    only: Annotated[str, typer.Option(help="ways NAME:FIT:PAGE:RANK:BITS, by commas; all without")] = "",
    out: Annotated[Path, typer.Option(help="folder of tables")] = outputs.OUT,
) -> None:
    """Measures every way."""
    if questions % QUESTIONS:
        raise InputError(f"questions: expected a multiple of {QUESTIONS}, got {questions}")
    numbers = tuple(int(b) for b in budgets.split(","))
    size = Size(questions // QUESTIONS, tokens, numbers, full, model, device, seed)
    if not any(chosen(way, only) for way in all_ways(full)):
        raise InputError(f"only: expected ways such as locks or shared:cache:16:4, got {only!r}")
    typer.echo(measure(size, out, workers, part, only).to_string())


if __name__ == "__main__":
    outputs.run(main)
