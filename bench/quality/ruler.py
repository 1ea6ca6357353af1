"""RULER on a trained retriever, many examples at once in several processes: one prefill, every selector and budget.

    python bench/quality/ruler.py --model out/retriever --length 16384 --examples 100 --minutes 4

Jobs are parts of a task's examples; the first parts of all tasks come first. Each job keeps a log of its own, which a
later call goes on from; calls at the same time share the jobs, each passing over those that another one does. The
result file is written anew from all logs every minute and at the end, so a run that is cut (or interrupted) leaves what
it has; it exits with 1, as does one that lacks examples. A task whose full-attention score is below --least is named
and is in no selector's mean. The rows of a batch share a step's launches, so few processes with large batches launch
less than many with small ones (not timed against each other). With --rope a model is tried beyond the length that it
was trained at.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import result
import torch
import typer
from tqdm import tqdm

from locks.models import load_model
from locks.quality import command, ruler, run, summary
from locks.quality.example import Task
from locks.quality.log import BusyError, Log, Row
from locks.quality.methods import parse_budgets, parse_methods
from locks.quality.text import read_prose

SELECTORS = "oracle,locks-r8,locks-r4,quest,shared-r8"
BUDGETS = "64,128,512,2048,full"
# Between two writings of the result file.
SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every job is made from."""

    model: Path
    logs: Path
    length: int
    count: int
    selectors: str
    budgets: str
    least: float
    batch: int
    seed: int
    haystack: Path | None
    deadline: float
    rope: str = ""
    replays: bool | None = None


class OutOfTimeError(Exception):
    """A job's time is up; its log has what it did."""


def plan_of(setup: Setup, tasks: Sequence[Task]) -> run.Plan:
    """The lines of the comparison over some tasks."""
    budgets, full = parse_budgets(setup.budgets)
    return run.Plan(
        tasks=tasks,
        methods=parse_methods(setup.selectors),
        budgets=budgets,
        full=full,
        page=16,
        batch=setup.batch,
        seed=setup.seed,
        # A batch far below the bar is spared; what lies near it is decided by all of a task's examples.
        least=max(0.0, setup.least / 100 - 0.25),
        replays=setup.replays,
    )


def tasks_of(setup: Setup, names: Sequence[str], tokenizer: Any) -> list[Task]:
    """The named tasks; a tokenizer is needed only to make their examples."""
    return ruler.tasks(
        tokenizer,
        names,
        setup.length,
        count=setup.count,
        seed=setup.seed,
        prose=read_prose(setup.haystack),
        chat=False,
    )


@functools.cache
def load(path: Path, rope: str, length: int) -> tuple[Any, Any]:
    """The model, once a process; the processes take turns at the devices."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        (number, *_) = multiprocessing.current_process()._identity  # pyright: ignore[reportAttributeAccessIssue]
        torch.cuda.set_device(number % torch.cuda.device_count())
    model, tokenizer = load_model(path)
    if rope:
        extend(model, parse_rope(rope, path), length)
    return model, tokenizer


def parse_rope(text: str, path: Path) -> dict[str, Any]:
    """transformers' `rope_parameters` for "theta=FLOAT" or "yarn=FACTOR", of a model directory.

    YaRN starts from the length that the recipe says the model was trained at, else from its config's.

    Raises:
        ValueError: something else.
    """
    kind, _, said = text.partition("=")
    if kind not in ("theta", "yarn") or not re.fullmatch(r"\d+(\.\d+)?", said) or not float(said):
        raise ValueError(f"rope: expected theta=FLOAT or yarn=FACTOR, got {text!r}")
    if kind == "theta":
        return {"rope_type": "default", "rope_theta": float(said)}
    config = json.loads((path / "config.json").read_text())
    recipe = path / "recipe.json"
    trained = json.loads(recipe.read_text()) if recipe.is_file() else {}
    return {
        "rope_type": "yarn",
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "factor": float(said),
        "original_max_position_embeddings": trained.get("length", config["max_position_embeddings"]),
    }


def extend(model: Any, rope: dict[str, Any], length: int) -> None:
    """Gives the model other rotary positions, in place, and room for `length` tokens; nothing is trained."""
    config, decoder = model.config, model.get_decoder()
    config.rope_parameters = rope
    config.max_position_embeddings = max(length, config.max_position_embeddings)
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(model.device)


def job(setup: Setup, name: str, first: int, last: int) -> None:
    """Answers examples first..last-1 of one task, as far as the time allows."""
    if time.time() > setup.deadline:
        return
    model, tokenizer = load(setup.model, setup.rope, setup.length)
    (task,) = tasks_of(setup, [name], tokenizer)
    part = dataclasses.replace(task, first=first, count=last)

    def done() -> None:
        if time.time() > setup.deadline:
            raise OutOfTimeError

    header = {
        "weights": command.fingerprint(model),
        "length": setup.length,
        "seed": setup.seed,
        "haystack": None if setup.haystack is None else setup.haystack.name,
        # Logs of models as they are have no word of it.
        **({"rope": setup.rope} if setup.rope else {}),
    }
    # Whether the time is up, or another call does the job.
    with (
        contextlib.suppress(OutOfTimeError, BusyError),
        Log(setup.logs / f"{name}-{first}.jsonl", header) as log,
    ):
        run.run(model, tokenizer, plan_of(setup, [part]), log, done)


def collect(setup: Setup, names: Sequence[str]) -> tuple[list[Row], list[str], list[str]]:
    """The summary's rows, the tasks that full attention answers well enough, and those that it does not."""
    rows = []
    for file in sorted(setup.logs.glob("*-*.jsonl")):
        # A running job may be in the middle of a line; its last one counts when it is whole.
        whole = file.read_bytes().rpartition(b"\n")[0].splitlines()
        rows += [json.loads(line) for line in whole[1:]]
    tasks = tasks_of(setup, names, None)
    scores = {
        row["task"]: row["score"]
        for row in summary.summarize(plan_of(setup, tasks), rows)
        if row["selector"] == "full" and row["task"] != summary.MEAN
    }
    learnt = [name for name in names if scores.get(name, 0.0) >= setup.least]
    kept = summary.summarize(plan_of(setup, [task for task in tasks if task.name in learnt]), rows)
    left = summary.summarize(plan_of(setup, [task for task in tasks if task.name not in learnt]), rows)
    return (
        kept + [row for row in left if row["task"] != summary.MEAN],
        learnt,
        [n for n in scores if n not in learnt],
    )


def write(setup: Setup, names: Sequence[str], said: str, out: Path) -> tuple[list[Row], list[str]]:
    """The result file, whole or not at all, and its picture; returns its rows and the tasks that were learnt."""
    rows, learnt, left_out = collect(setup, names)
    recipe = setup.model / "recipe.json"
    facts = {
        "command": said,
        "model": setup.model.name,
        "recipe": json.loads(recipe.read_text()) if recipe.is_file() else None,
        "learnt": learnt,
        "left_out": left_out,
        "least": setup.least,
        "rope": parse_rope(setup.rope, setup.model) if setup.rope else None,
        "seed": setup.seed,
    }
    result.write(out, facts, rows)
    return rows, learnt


def run_jobs(
    setup: Setup, parts: Sequence[tuple[str, int, int]], workers: int, write_now: Callable[[], Any]
) -> None:
    """Runs the jobs, telling of those that fail; calls `write_now` now and then.

    Raises:
        KeyboardInterrupt: the workers are ended.
    """
    # A small model's decode steps are bound by the host: several processes share the device.
    pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        running = [pool.submit(job, setup, *each) for each in parts]
        last = time.monotonic()
        for one in tqdm(concurrent.futures.as_completed(running), "jobs", len(running)):
            failed = one.exception()
            if failed is not None:
                # The other jobs' results stand.
                typer.echo(f"a job failed: {type(failed).__name__}: {failed}", err=True)
            if time.monotonic() - last > SECONDS:
                write_now()
                last = time.monotonic()
    except KeyboardInterrupt:
        # Their logs are whole up to the last answer of a batch.
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def main(
    model: Annotated[Path, typer.Option(help="the retriever's directory")],
    length: Annotated[int, typer.Option(help="tokens of a prompt and its answer")] = 16_384,
    examples: Annotated[int, typer.Option(help="of a task")] = 100,
    part: Annotated[int, typer.Option(help="examples of a job")] = 50,
    selectors: Annotated[str, typer.Option(help="by commas")] = SELECTORS,
    budgets: Annotated[str, typer.Option(help="by commas")] = BUDGETS,
    tasks: Annotated[
        str, typer.Option(help="by commas; all that need no data file where none is named")
    ] = "",
    least: Annotated[
        float, typer.Option(help="points of full attention below which a task is in no mean")
    ] = 90.0,
    workers: Annotated[int, typer.Option(help="processes, each with a model of its own")] = 2,
    batch: Annotated[int, typer.Option(help="answers at once")] = 50,
    minutes: Annotated[float, typer.Option(help="after which no further batch is begun")] = 60.0,
    seed: Annotated[int, typer.Option(help="of the examples")] = 42,
    haystack: Annotated[Path | None, typer.Option(help="a text file of prose")] = None,
    rope: Annotated[
        str, typer.Option(help="other rotary positions, untrained: theta=FLOAT or yarn=FACTOR")
    ] = "",
    replays: Annotated[
        bool, typer.Option(help="on a GPU, decode an answer by replays of one CUDA graph")
    ] = True,
    logs: Annotated[Path, typer.Option(help="directory of the logs")] = Path("out/ruler"),
    out: Annotated[Path, typer.Option(help="file to write")] = Path("bench/results/quality/ruler.json"),
) -> None:
    """Runs the jobs and writes one JSON file."""
    names = [name for name in ruler.SYNTHETIC if not tasks or name in tasks.split(",")]
    unknown = set(filter(None, tasks.split(","))) - set(names)
    if unknown:
        raise typer.BadParameter(
            f"expected some of {', '.join(ruler.SYNTHETIC)}, got {', '.join(sorted(unknown))}"
        )
    setup = Setup(
        model,
        logs,
        length,
        examples,
        selectors,
        budgets,
        least,
        batch,
        seed,
        haystack,
        time.time() + 60 * minutes,
        rope,
        None if replays else False,
    )
    try:
        _ = rope and parse_rope(rope, model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    plan_of(setup, [])
    said = f"python bench/quality/ruler.py --model {model} --length {length} --examples {examples} --batch {batch}"
    for name, given, default in (
        ("selectors", selectors, SELECTORS),
        ("budgets", budgets, BUDGETS),
        ("tasks", tasks, ""),
        ("rope", rope, ""),
    ):
        said += f" --{name} {given}" if given != default else ""
    parts = [
        (name, first, min(first + part, examples)) for first in range(0, examples, part) for name in names
    ]
    write_now = functools.partial(write, setup, names, said, out)
    try:
        run_jobs(setup, parts, workers, write_now)
    finally:
        rows, learnt = write_now()
    for row in rows:
        if row["task"] == summary.MEAN or row["selector"] == "full":
            typer.echo(
                f"{row['task']:16s} {row['selector']:10s} {row['budget'] or '':>5} {row['score']:5.1f} "
                f"[{row['ci_low']:.1f}, {row['ci_high']:.1f}] n {row['n']}"
            )
    # Of a task below the bar full attention is all that is asked for.
    wanted = {name: len(plan_of(setup, []).configs) if name in learnt else 1 for name in names}
    whole = [row["task"] for row in rows if row["n"] == row["expected"]]
    short = [name for name in names if whole.count(name) < wanted[name]]
    if short:
        typer.echo(f"cut short: {', '.join(short)}; the same command goes on", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
