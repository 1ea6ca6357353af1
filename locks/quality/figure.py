"""The picture of a run: score against budget, and against bytes read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from locks.quality.log import Row
from locks.quality.methods import FULL
from locks.quality.summary import MEAN

# Told apart without colour too.
MARKERS = "osD^vPX*<>hpd8H"


def scores(summary: Sequence[Row], path: Path) -> None:
    """Writes one row of two panels for each length: the tasks' mean, or every task where there is none.

    A task that only full attention has answered compares nothing: it has panels only where all are like that.
    """
    chosen = [row for row in summary if row["task"] == MEAN]
    lengths = {row["length"] for row in chosen}
    chosen += [row for row in summary if row["length"] not in lengths]
    compared = [row for row in chosen if row["selector"] != FULL]
    panels = list(dict.fromkeys((row["length"], row["task"]) for row in compared or chosen))
    names = [name for name in dict.fromkeys(row["selector"] for row in chosen) if name != FULL]
    colors = sns.color_palette("colorblind", len(names))
    looks = dict(zip(names, zip(colors, itertools.cycle(MARKERS), strict=False), strict=True))
    with sns.axes_style("whitegrid", {"grid.color": "#e4e4e4"}), sns.plotting_context("notebook"):
        figure = Figure(figsize=(13, 5 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    for (length, task), (left, right) in zip(panels, axes, strict=True):
        rows = [row for row in chosen if (row["length"], row["task"]) == (length, task)]
        for name in names:
            mine = [row for row in rows if row["selector"] == name]
            # A line without points would leave a panel without limits, which no logarithm can be taken of.
            if mine:
                _line(left, [row["budget"] for row in mine], mine, name, looks[name])
                _line(right, [_share(row) for row in mine], mine, name, looks[name])
        for panel in (left, right):
            for row in rows:
                if row["selector"] == FULL:
                    panel.axhline(
                        row["score"], color="black", linestyle="--", linewidth=1, label="full attention"
                    )
            panel.set_xscale("log", base=2)
            panel.set_title(f"{task}, {length} tokens")
        left.set(
            xlabel="budget, tokens a KV head attends to",
            ylabel="perplexity" if rows[0]["unit"] == "perplexity" else "score, points",
        )
        right.set(xlabel="bytes read a step, % of dense attention's")
        budgets = sorted({row["budget"] for row in rows if row["budget"]})
        left.set_xticks(budgets, [str(budget) for budget in budgets])
        shares = [_share(row) for row in rows]
        marks = [2.0**power for power in range(-3, 9) if min(shares) / 2 <= 2.0**power <= 2 * max(shares)]
        right.set_xticks(marks, [f"{mark:g}" for mark in marks])
        left.legend(framealpha=1)
    figure.savefig(path, dpi=130)


def _share(row: Row) -> float:
    return 100 * row["bytes_per_step"] / row["dense_bytes_per_step"]


def _line(axes: Axes, x: list[float], rows: list[Row], name: str, look: tuple[Any, str]) -> None:
    # A bootstrap's percentiles may miss the mean of a few equal examples by rounding.
    ends = [
        [max(0.0, sign * (row["score"] - row[end])) for row in rows]
        for sign, end in ((1, "ci_low"), (-1, "ci_high"))
    ]
    color, marker = look
    axes.errorbar(
        x,
        [row["score"] for row in rows],
        yerr=ends,
        label=name,
        color=color,
        marker=marker,
        capsize=3,
        linewidth=1.5,
    )
