"""From a log to the result rows: means with 95 % bootstrap intervals, and paired differences from full and oracle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from scipy import stats

from locks.quality.example import Task
from locks.quality.log import Row
from locks.quality.methods import FULL
from locks.quality.run import Config, Plan

RESAMPLES = 2000
MEAN = "mean"

# Of a task under one config: a number for each example, its samples' mean.
Values = dict[int, float]


class Interval(NamedTuple):
    """An estimate and where it lies with 95 %."""

    value: float
    low: float
    high: float

    def map(self, scale: Callable[[float], float]) -> Interval:
        """In other units; `scale` is increasing."""
        return Interval(*(scale(number) for number in self))


def interval(groups: Sequence[np.ndarray]) -> Interval:
    """The mean of the groups' means, its interval by drawing examples anew within every group."""
    value = float(np.mean([group.mean() for group in groups]))
    if all(np.ptp(group) == 0 for group in groups):
        return Interval(value, value, value)

    def mean(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.mean([sample.mean(axis) for sample in samples], axis=0)

    found = stats.bootstrap(
        groups, mean, n_resamples=RESAMPLES, method="percentile", vectorized=True, paired=False, rng=0
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))


class _Cell(NamedTuple):
    """One task under one config."""

    values: Values
    rows: list[Row]


def summarize(plan: Plan, rows: Sequence[Row]) -> list[Row]:
    """A row for each task, length, selector and budget, and one for the tasks' mean.

    `score` is in points (0 to 100), or a perplexity; `minus_full` and `minus_oracle` pair examples (points; of
    perplexities, percent). `n` counts examples, `expected` those that there are: fewer means that the run was cut.
    """
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["task"], row["length"], row["selector"], row["page"], row["budget"]].append(row)

    def cell(task: Task, config: Config) -> _Cell:
        facts = config.facts(plan.page)
        mine = found.get((task.name, task.length, facts["selector"], facts["page"], facts["budget"]), [])
        samples: dict[int, list[float]] = defaultdict(list)
        for row in mine:
            samples[row["index"]].append(row["score"])
        # An example counts when all its samples are there.
        whole = {i: float(np.mean(s)) for i, s in samples.items() if len(s) == task.samples}
        return _Cell(whole, [row for row in mine if row["index"] in whole])

    summary = []
    for length in dict.fromkeys(task.length for task in plan.tasks):
        tasks = [task for task in plan.tasks if task.length == length]
        cells = {(task.name, config): cell(task, config) for task in tasks for config in plan.configs}
        for task in tasks:
            summary += [_row(plan, [task], config, cells) for config in plan.configs]
        if len(tasks) > 1:
            # A task that some config has not reached is in no config's mean.
            shared = [task for task in tasks if all(cells[task.name, c].values for c in plan.configs)]
            names = [task.name for task in shared]
            summary += [
                {**_row(plan, shared, config, cells), "task": MEAN, "tasks": names}
                for config in plan.configs
                if shared
            ]
    return [row for row in summary if row["n"]]


def _row(plan: Plan, tasks: list[Task], config: Config, cells: dict[Any, _Cell]) -> Row:
    facts = config.facts(plan.page)
    mine = [cells[task.name, config] for task in tasks]
    count = sum(len(cell.values) for cell in mine)
    row = {
        "task": tasks[0].name,
        "length": tasks[0].length,
        **facts,
        "n": count,
        "expected": sum(len(task.indices) for task in tasks),
        "unit": tasks[0].unit,
    }
    if not count:
        return row
    perplexity = tasks[0].unit == "perplexity"
    score = interval([_array(cell.values) for cell in mine]).map(
        math.exp if perplexity else lambda share: 100 * share
    )
    row |= {"score": score.value, "ci_low": score.low, "ci_high": score.high}
    relative = (lambda nll: 100 * math.expm1(nll)) if perplexity else (lambda share: 100 * share)
    others = {
        "full": Config(None, None),
        "oracle": next(
            (
                c
                for c in plan.configs
                if c.method and c.method.selector == "oracle" and c.budget == config.budget
            ),
            None,
        ),
    }
    for name, other in others.items():
        if other is None or other not in plan.configs or facts["selector"] in (FULL, name):
            continue
        pairs = [(cells[task.name, config].values, cells[task.name, other].values) for task in tasks]
        differences = [np.array([a[i] - b[i] for i in sorted(a) if i in b]) for a, b in pairs]
        if all(len(group) for group in differences):
            minus = interval(differences).map(relative)
            row |= {
                f"minus_{name}": minus.value,
                f"minus_{name}_low": minus.low,
                f"minus_{name}_high": minus.high,
            }
    every = [one for cell in mine for one in cell.rows]
    row |= {
        "bytes_per_step": float(np.mean([one["bytes_per_step"] for one in every])),
        "dense_bytes_per_step": float(np.mean([one["dense_bytes_per_step"] for one in every])),
    }
    return row


def _array(values: Values) -> np.ndarray:
    return np.array([values[index] for index in sorted(values)])


def missing(plan: Plan, rows: Sequence[Row]) -> int:
    """How many answers the log lacks."""
    expected = sum(len(task.indices) * task.samples * len(plan.configs) for task in plan.tasks)
    keys = {key for task in plan.tasks for key in plan.keys(task)}
    held = sum(
        (row["task"], row["length"], row["index"], row["sample"], row["selector"], row["page"], row["budget"])
        in keys
        for row in rows
    )
    return expected - held


def cut_short(plan: Plan, summary: Sequence[Row]) -> list[Row]:
    """The lines of a summary that lack examples, those without any too: where they are, `n` and `expected`."""
    counts = {(row["task"], row["length"], row["selector"], row["budget"]): row["n"] for row in summary}
    lines = []
    for task in plan.tasks:
        for config in plan.configs:
            facts = config.facts(plan.page)
            place = {"task": task.name, "length": task.length}
            place |= {name: facts[name] for name in ("selector", "budget")}
            count = counts.get(tuple(place.values()), 0)
            if count < len(task.indices):
                lines.append({**place, "n": count, "expected": len(task.indices)})
    return lines


def table(summary: Sequence[Row]) -> Table:
    """The summary for a terminal."""
    shown = Table(
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        caption="score: points, or perplexity; differences pair examples (points; of perplexities, percent); "
        "behind ±: half of the 95 % interval; read: bytes a step, of dense attention's",
    )
    shown.add_column("task", no_wrap=True)
    shown.add_column("selector", no_wrap=True)
    for heading in ("length", "budget", "score", "- full", "- oracle", "read, %", "examples"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in summary:
        short = row["n"] < row["expected"]
        shown.add_row(
            row["task"],
            row["selector"],
            str(row["length"]),
            str(row["budget"] or ""),
            _shown(row, "score", "ci_low", "ci_high"),
            *(
                _shown(row, f"minus_{o}", f"minus_{o}_low", f"minus_{o}_high", "+")
                for o in ("full", "oracle")
            ),
            f"{100 * row['bytes_per_step'] / row['dense_bytes_per_step']:.1f}",
            f"{row['n']} of {row['expected']}" if short else str(row["n"]),
        )
    return shown


def _shown(row: Row, value: str, low: str, high: str, sign: str = "") -> str:
    if value not in row:
        return ""
    digits = 2 if row["unit"] == "perplexity" and not sign else 1
    return f"{row[value]:{sign}.{digits}f} ±{(row[high] - row[low]) / 2:.{digits}f}"
