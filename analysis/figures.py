"""The report's figures: each takes tables and returns a figure, with 95 % intervals where a table has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from outputs import Table

# From dark to light, told apart without colour, and by their marks.
PALETTE = ["#000000", "#0b559f", "#b5460f", "#2b9f78", "#cc79a7", "#8fbce6", "#c9b037", "#9a9a9a"]
MARKERS: list[Any] = ["o", "s", "D", "^", "v", "P", "X", "*"]
DASHES = ["", (4, 1.5), (1, 1), (5, 1, 1, 1), (2, 1), (6, 2), (1, 2), (3, 1, 1, 1)]


def panels(
    rows: int, columns: int, size: tuple[float, float] = (4.4, 3.7), *, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    with sns.axes_style("whitegrid", {"grid.color": "#e4e4e4"}), sns.plotting_context("notebook", 0.85):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    return figure, list(axes.flatten())


def lines(
    ax: Axes, data: Table, x: str, y: str, by: str, order: Sequence[str], *, shift: float = 0.0
) -> None:
    """Lines by `by` with the intervals that the table has; `shift` moves lines apart, as a factor of x."""
    data = data.copy()
    place = data[by].map({name: i for i, name in enumerate(order)})
    data[x] = data[x].astype(float) * (1 + shift * (place - (len(order) - 1) / 2))
    look = {
        "palette": PALETTE[: len(order)],
        "markers": MARKERS[: len(order)],
        "dashes": DASHES[: len(order)],
    }
    sns.lineplot(
        data,
        x=x,
        y=y,
        hue=by,
        style=by,
        hue_order=order,
        style_order=order,
        errorbar=None,
        ax=ax,
        markersize=6,
        **look,
    )
    if f"{y}_low" in data:
        for name, color in zip(order, PALETTE, strict=False):
            some = data[data[by] == name]
            ends = np.abs(some[[f"{y}_low", f"{y}_high"]].to_numpy().T - some[y].to_numpy())
            ax.errorbar(some[x], some[y], ends, fmt="none", ecolor=color, elinewidth=1, capsize=2, zorder=1)


def powers(ax: Axes, values: Sequence[int]) -> None:
    """A logarithmic x axis labelled at the values that were measured."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [str(v) for v in values])
    ax.minorticks_off()


def legend(figure: Figure, axes: Sequence[Axes], columns: int = 4) -> None:
    """One legend under all panels."""
    handles, labels = axes[0].get_legend_handles_labels()
    for ax in axes:
        if ax.get_legend() is not None:
            ax.get_legend().remove()  # pyright: ignore[reportOptionalMemberAccess]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def rank(table: Table) -> Figure:
    """Rank of pages and of the whole, mean over layers and heads."""
    data = table.copy()
    data["kind"] = data["keys"] + np.where(data["centred"], ", less the mean", "")
    order = ["after RoPE", "after RoPE, less the mean", "before RoPE", "before RoPE, less the mean"]
    data["page"] = data["page"].astype(str)
    scopes = [s for s in ("16", "32", "64", "128", "all") if s in set(data["page"])]
    figure, axes = panels(1, 3)
    titles = {
        "entropy_rank": "entropy rank",
        "stable_rank": "stable rank",
        "dims_95": "dimensions for 95 % of the energy",
    }
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        sns.pointplot(
            data,
            x="page",
            y=name,
            hue="kind",
            order=scopes,
            hue_order=order,
            palette=PALETTE[:4],
            markers=MARKERS[:4],
            linestyles=["-", "--", ":", "-."],
            errorbar=("ci", 95),
            seed=0,
            markersize=5,
            linewidth=1.3,
            ax=ax,
        )
        ax.set(xlabel="tokens taken together", ylabel=title)
    legend(figure, axes)
    return figure


def _sides(table: Table, value: str) -> Table:
    """Page-local and every rival as lines of one table, with their intervals."""

    def side(some: Table, name: str, prefix: str, nbytes: str) -> Table:
        cells = {f"value{end}": some[f"{prefix}{value}{end}"] for end in ("", "_low", "_high")}
        return some.assign(side=name, bytes=some[nbytes], **cells)

    own = table[(table["rival"] == "shared") & (table["fit"] == "cache")]
    parts = [side(own, "page-local", "", "bytes_a_page")]
    for (rival, fit), some in table.groupby(["rival", "fit"], sort=True):
        name = f"{rival}, fitted to " + ("the cache" if fit == "cache" else "other text")
        parts.append(side(some, name, "rival_", "rival_bytes"))
    return pd.concat(parts)


SIDES = [
    "page-local",
    "shared, fitted to the cache",
    "shared, fitted to other text",
    "page mean + shared, fitted to the cache",
    "page mean + shared, fitted to other text",
]


def bases(table: Table, comparison: str, bits: str) -> Figure:
    """Energy and logit error by rank or by bytes."""
    some = table[(table["comparison"] == comparison) & (table["bits"].fillna("") == bits)]
    figure, axes = panels(2, 3)
    for column, page in enumerate((16, 32, 64)):
        data = some[some["page"] == page]
        for row, (value, label) in enumerate(
            (("energy", "share of energy captured"), ("error_nats", "logit error, nats (rms)"))
        ):
            ax = axes[3 * row + column]
            sides = _sides(data, value)
            x = "rank" if comparison == "rank" else "bytes"
            lines(ax, sides, x, "value", "side", SIDES)
            most = data["bytes_a_page"].max()
            powers(
                ax,
                sorted(set(data["rank"])) if x == "rank" else [b for b in (128, 256, 512, 1024) if b < most],
            )
            ax.set(
                title=f"P = {page}", xlabel="rank" if comparison == "rank" else "bytes a page", ylabel=label
            )
    legend(figure, axes, 3)
    return figure


def gains(table: Table, bits: str) -> Figure:
    """What page-local gains at equal bytes and bits, with its interval: above 0 it wins."""
    some = table[(table["comparison"] == "bytes") & (table["bits"] == bits)].copy()
    some["against"] = (
        some["rival"] + ", fitted to " + np.where(some["fit"] == "cache", "the cache", "other text")
    )
    figure, axes = panels(2, 3)
    for column, page in enumerate((16, 32, 64)):
        data = some[some["page"] == page]
        for row, (name, label) in enumerate(
            (("energy_gain", "energy captured, gain"), ("error_gain", "log of logit errors' ratio"))
        ):
            ax = axes[3 * row + column]
            lines(ax, data, "rank", name, "against", SIDES[1:], shift=0.04)
            ax.axhline(0, color="black", linewidth=1)
            powers(ax, sorted(set(data["rank"])))
            ax.set(title=f"P = {page}", xlabel="rank R of the page-local record", ylabel=label)
    legend(figure, axes, 2)
    return figure


def angles(table: Table) -> Figure:
    """How much of one subspace lies in another; ticks are what random subspaces would share."""
    order = ["next page", "another page", "shared, equal rank", "shared, equal bytes"]
    figure, axes = panels(1, 2, (5.6, 3.9), share_y=True)
    for ax, page in zip(axes, (16, 64), strict=True):
        data = table[table["page"] == page]
        lines(ax, data, "rank", "overlap", "pair", order, shift=0.03)
        for name, color in zip(order[2:], ("#606060", PALETTE[3]), strict=True):
            some = data[data["pair"] == name]
            ax.plot(
                some["rank"], some["random_overlap"], "_", color=color, markersize=16, markeredgewidth=1.5
            )
        powers(ax, sorted(set(data["rank"])))
        ax.set(
            title=f"P = {page}",
            xlabel="rank of the page's subspace",
            ylabel="mean square cosine of the angles",
            ylim=(0, 1.04),
        )
    legend(figure, axes)
    return figure


def blind(table: Table) -> Figure:
    """Pages outside a shared basis, the mass in them, and the carriers that are found."""
    data = table.copy()
    fits = {"cache": "shared, fitted to the cache", "held-out": "shared, fitted to other text"}
    data["who"] = data["fit"].map(fits).fillna("page-local")
    order = [*fits.values(), "page-local"]
    figure, axes = panels(1, 3)
    shown = {
        "outside": "share of pages whose top direction\nlies mostly outside the basis",
        "mass_outside": "share of attention mass in them",
        "carriers": "share of all carriers kept",
    }
    for ax, (name, label) in zip(axes, shown.items(), strict=True):
        some = data if name == "carriers" else data[data["basis"] == "shared"]
        lines(ax, some, "rank", name, "who", order, shift=0.03)
        powers(ax, [2**i for i in range(8) if 2**i <= some["rank"].max()])
        ax.set(xlabel="rank of the basis (not quantised)", ylabel=label)
    legend(figure, axes[::-1], 3)
    return figure


def sweep(table: Table) -> Figure:
    """The carrier's rank as its direction turns, and the theorem's."""
    order = list(dict.fromkeys(table["scores"]))
    figure, axes = panels(1, 2, (5.6, 4.2), share_y=True)
    for ax, width in zip(axes, sorted(set(table["D"])), strict=True):
        data = table[table["D"] == width]
        lines(ax, data, "degrees", "rank", "scores", order)
        fixed = data[data["predicted"].notna()]
        ax.plot(fixed["degrees"], fixed["predicted"].astype(float), color="#e69f00", linewidth=4, alpha=0.55, zorder=0,
                label="shared, fixed: predicted by the theorem")  # fmt: skip
        ax.set(title=f"D = {width}", yscale="log", xlabel="angle between the carrier's direction and the span, degrees",
               ylabel="rank of the carrier (1 is found first)", xticks=range(0, 91, 15))  # fmt: skip
    legend(figure, axes, 3)
    return figure
