"""Draws the committed times of `bench/attention.py`: python bench/figures.py

roofline.png  bandwidth of every operation against the bytes it has to move, below the measured read bandwidth
latency.png   a decode step's attention against the context, beside the fastest dense attention of the run
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import seaborn as sns
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

RESULTS = Path(__file__).resolve().parent / "results" / "h200" / "attention.json"

DENSE = "dense, fastest"
# Series by (colour, marker, size): the colours go from dark to light, and the markers differ, where none are seen.
OPERATIONS = {
    DENSE: ("#000000", "s", 110),
    "chain": ("#3b0f70", "*", 190),
    "score": ("#0072b2", "o", 60),
    "score, general path": ("#0072b2", "X", 60),
    "select": ("#8c2981", "^", 60),
    "attend": ("#de4968", "D", 45),
    "merge": ("#e8795a", "p", 60),
    "summarize": ("#fe9f6d", "P", 70),
    "seal": ("#b8b8b8", "v", 60),
}
STEPS = {
    DENSE: ("#000000", "s"),
    "LOCKS, r = 8": ("#0072b2", "o"),
    "LOCKS, r = 4": ("#e69f00", "D"),
}
# Times whose diagonals the roofline shows, µs.
DIAGONALS = {1: "1 µs", 10: "10 µs", 100: "100 µs", 1_000: "1 ms", 10_000: "10 ms"}


Row = dict[str, Any]


def load(path: Path) -> tuple[list[Row], float]:
    """Rows of a result file, and the read bandwidth of its run in GB/s.

    Raises:
        FileNotFoundError: no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `make bench` on a GPU machine writes it")
    result = json.loads(path.read_text())
    return result["rows"], float(result["read_gb_per_s"])


def shape_of(row: Row) -> tuple[Any, ...]:
    """What dense attention and a step have to have in common to be compared."""
    return row["model"], row["T"], row["B"], row.get("lengths", "equal")


def fastest_dense(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    """The fastest dense row of each shape."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["op"] == "dense":
            key = shape_of(row)
            found[key] = min(found.get(key, row), row, key=lambda one: one["p50_us"])
    return found


def _operation(row: Row) -> str | None:
    if row["op"] == "score":
        return {"hopper": "score", "general": "score, general path"}.get(row["impl"])
    return row["op"] if row["op"] in OPERATIONS and (row["impl"] == "locks" or row["op"] == "seal") else None


def roofline_frame(rows: list[Row]) -> pd.DataFrame:
    """What the roofline shows: operation, bytes a call in MB, GB/s, µs a call.

    Left out: calls that move nothing (`seal` where no page fills), dense attention that is not the fastest of its
    shape, and peers.
    """
    named = [(DENSE, row) for row in fastest_dense(rows).values()]
    named += [(name, row) for row in rows if (name := _operation(row)) is not None]
    return pd.DataFrame(
        [
            (name, row["bytes"] / 1e6, row["gb_per_s"], row["p50_us"])
            for name, row in named
            if row["bytes"] > 0
        ],
        columns=["operation", "megabytes", "gb_per_s", "microseconds"],
    )


def _block(row: Row) -> int:
    found = re.search(r"block (\d+)", row["layout"])
    if found is None:
        raise ValueError(f"layout: expected one that names its block, got {row['layout']!r}")
    return int(found[1])


def latency_frame(rows: list[Row]) -> pd.DataFrame:
    """What the latency picture shows: p20, p50 and p80 in µs by model, batch, context and series; dense / step.

    Of the chain's rows, those of the largest block. Left out: rows of unequal lengths, steps without dense attention
    beside them, and models and batches of one context alone, which make no line.
    """
    dense = {key: row for key, row in fastest_dense(rows).items() if key[3] == "equal"}
    chains: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["op"] == "chain" and row["impl"] == "locks" and shape_of(row) in dense:
            key = (*shape_of(row), row["R"])
            chains[key] = max(chains.get(key, row), row, key=_block)
    series = [(DENSE, row) for row in dense.values()]
    series += [(f"LOCKS, r = {row['R']}", row) for row in chains.values()]
    contexts: dict[tuple[str, int], set[int]] = {}
    for _, row in series:
        contexts.setdefault((row["model"], row["B"]), set()).add(row["T"])
    times = ["p20_us", "p50_us", "p80_us"]
    return pd.DataFrame(
        [
            (row["model"], row["B"], row["T"], name)
            + (*(row[time] for time in times), dense[shape_of(row)]["p50_us"] / row["p50_us"])
            for name, row in sorted(series, key=lambda one: one[1]["T"])
            if name in STEPS and len(contexts[row["model"], row["B"]]) > 1
        ],
        columns=["model", "B", "T", "series", *times, "dense_by_step"],
    )


def machine(rows: list[Row]) -> str:
    """The line below a picture."""
    commits = ", ".join(sorted({row["commit"][:7] for row in rows}))
    first = rows[0]
    return f"{first['GPU']}, torch {first['torch']}, triton {first['triton']}, commit {commits}"


def _save(figure: Figure, path: Path, note: str) -> None:
    figure.supxlabel(note, fontsize=8, color="#606060", x=0.99, ha="right")
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})


def draw_roofline(rows: list[Row], bandwidth: float, path: Path) -> None:
    """Writes the roofline: one point a row, below the read bandwidth and on diagonals of equal time."""
    frame = roofline_frame(rows)
    shown = [name for name in OPERATIONS if name in set(frame["operation"])]
    with sns.axes_style("whitegrid", {"grid.color": "#ececec"}), sns.plotting_context("notebook"):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        axes = figure.subplots()
    of_name = {name: OPERATIONS[name] for name in shown}
    sns.scatterplot(
        frame,
        x="megabytes",
        y="gb_per_s",
        hue="operation",
        style="operation",
        size="operation",
        palette={name: color for name, (color, _, _) in of_name.items()},
        markers={name: marker for name, (_, marker, _) in of_name.items()},
        sizes={name: size for name, (_, _, size) in of_name.items()},
        hue_order=shown,
        style_order=shown,
        size_order=shown,
        edgecolor="white",
        linewidth=0.6,
        zorder=3,
        ax=axes,
    )
    moved = frame["megabytes"].tolist()
    x = (min(moved) / 2, max(moved) * 3)
    axes.set(xscale="log", yscale="log", xlim=x, ylim=(frame["gb_per_s"].min() / 2, 2 * bandwidth))
    axes.axhline(bandwidth, color="black", linewidth=1.2, zorder=1)
    measured = f"read bandwidth, measured: {bandwidth:,.0f} GB/s"
    axes.text(x[0] * 1.1, bandwidth * 1.08, measured, fontsize=10, va="bottom")
    for time, label in DIAGONALS.items():
        # MB a µs are 1000 GB/s.
        axes.plot(
            x, [1e3 * end / time for end in x], color="#9a9a9a", linewidth=0.8, linestyle="--", zorder=1
        )
        _label_diagonal(axes, time, label, bandwidth)
    axes.set(xlabel="bytes that a call has to move, MB", ylabel="bytes over time, GB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title("Bandwidth of every operation at every shape; dashed: equal time")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _save(figure, path, machine(rows))


def _label_diagonal(axes: Axes, time: float, label: str, bandwidth: float) -> None:
    """The name of a diagonal, where it meets the lower or the left edge."""
    x, y = axes.get_xlim(), axes.get_ylim()
    at = (y[0] * 1.25 * time / 1e3, y[0] * 1.25)
    if at[0] < x[0] * 1.4:
        at = (x[0] * 1.4, 1e3 * x[0] * 1.4 / time)
    if at[0] < x[1] and at[1] < bandwidth:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(*at, label, fontsize=9, color="#606060", ha="center", va="center", bbox=box, zorder=2)


def _tokens(tokens: float) -> str:
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if tokens >= unit:
            return f"{tokens / unit:g}{letter}"
    return f"{tokens:g}"


def draw_latency(rows: list[Row], path: Path) -> None:
    """Writes time against context, a panel a model and batch; bands from p20 to p80."""
    frame = latency_frame(rows)
    panels = list(dict.fromkeys(zip(frame["model"], frame["B"], strict=True)))
    if not panels:
        raise ValueError("rows: expected a chain at two contexts or more of one model and batch, got none")
    with sns.axes_style("whitegrid", {"grid.color": "#e4e4e4"}), sns.plotting_context("notebook"):
        figure = Figure(figsize=(max(7.0, 5.2 * len(panels)), 5.2), layout="constrained")
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (model, batch) in zip(every, panels, strict=True):
        _panel(axes, frame[(frame["model"] == model) & (frame["B"] == batch)])
        axes.set_title(f"{model}, batch {batch}")
    every[0].set_ylabel("device time of a layer's attention, µs")
    legend = every[0].legend(loc="upper left", framealpha=1, title="band: p20 to p80; ×: dense / LOCKS")
    legend.set_alignment("left")
    _save(figure, path, machine(rows))


def _panel(axes: Axes, frame: Any) -> None:
    shown = [name for name in STEPS if name in set(frame["series"])]
    sns.lineplot(
        frame,
        x="T",
        y="p50_us",
        hue="series",
        style="series",
        palette={name: STEPS[name][0] for name in shown},
        markers={name: STEPS[name][1] for name in shown},
        dashes=False,
        hue_order=shown,
        style_order=shown,
        markeredgecolor="white",
        ax=axes,
    )
    axes.set(xscale="log", yscale="log")
    for name in shown:
        of = frame[frame["series"] == name]
        axes.fill_between(of["T"], of["p20_us"], of["p80_us"], color=STEPS[name][0], alpha=0.3, linewidth=0)
    # Below all markers of a context, so that no label lies on one; in the legend's order.
    for tokens, of in frame.groupby("T"):
        by_series = of.set_index("series")["dense_by_step"]
        ratios = [f"{by_series[name]:.1f}×" for name in shown if name != DENSE and name in by_series]
        axes.annotate(
            "\n".join(ratios),
            (tokens, of["p50_us"].min()),
            xytext=(0, -9),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=10,
            color="#202020",
        )
    contexts = sorted(frame["T"].unique())
    axes.set_xlim(contexts[0] / 1.6, contexts[-1] * 1.6)
    low, high = frame["p50_us"].min(), frame["p50_us"].max()
    axes.set_ylim(low / 3, high * 4)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("context, tokens")


def main(
    results: Annotated[Path, typer.Option(help="what bench/attention.py wrote")] = RESULTS,
    out: Annotated[
        Path | None, typer.Option(help="folder of the pictures; where the results are if not given")
    ] = None,
) -> None:
    """Draws both pictures from the results alone."""
    try:
        rows, bandwidth = load(results)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    out = results.parent if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    draw_roofline(rows, bandwidth, out / "roofline.png")
    draw_latency(rows, out / "latency.png")


if __name__ == "__main__":
    typer.run(main)
