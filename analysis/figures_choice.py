"""The report's figures of what a choice of pages keeps; see figures.py for those of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import seaborn as sns
from figures import MARKERS, PALETTE, legend, lines, panels, powers
from matplotlib.figure import Figure
from outputs import Table

BUDGET = "budget: tokens a KV head attends to"


def dots(table: Table, y: str, x: str, by: str, panel: str, labels: dict[str, str]) -> Figure:
    """A dot and its interval for every variant, a panel for each part."""
    parts = list(dict.fromkeys(table[panel]))
    figure, axes = panels(-(-len(parts) // 2), 2, (5.6, 3.9))
    for ax in axes[len(parts) :]:
        ax.set_axis_off()
    for ax, part in zip(axes, parts, strict=False):
        data = table[table[panel] == part]
        names, groups = list(dict.fromkeys(data[y])), sorted(set(data[by]))
        step = 0.6 / len(groups)
        place = data[by].map(groups.index) - (len(groups) - 1) / 2
        data = data.assign(at=data[y].map(names.index) + step * place, group=by + " " + data[by].astype(str))
        look: dict[str, Any] = {"palette": PALETTE[: len(groups)], "markers": MARKERS[: len(groups)]}
        sns.scatterplot(data, x=x, y="at", hue="group", style="group", s=45, ax=ax, **look)
        ends = np.abs(data[[f"{x}_low", f"{x}_high"]].to_numpy().T - data[x].to_numpy())
        ax.errorbar(
            data[x], data["at"], xerr=ends, fmt="none", ecolor="#606060", capsize=2, elinewidth=1, zorder=1
        )
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set(title=str(part), xlabel=labels[x], ylabel="")
    legend(figure, axes, 4)
    return figure


WHO = {
    ("locks", ""): "page-local",
    ("shared", "cache"): "shared, fitted to the cache",
    ("shared", "held-out"): "shared, fitted to other text",
    ("quest", ""): "Quest",
    ("arkvale", ""): "ArkVale ball",
    ("mean", ""): "mean key",
    ("random", ""): "random",
    ("oracle", ""): "oracle",
}


def named(table: Table) -> Table:
    """Selection's table with a column `who`, without dense attention."""
    some = table[table["selector"] != "dense"].copy()
    some["who"] = [WHO[name, fit] for name, fit in zip(some["selector"], some["fit"].fillna(""), strict=True)]
    return some


def pareto(table: Table, page: int, wanted: Sequence[int]) -> Figure:
    """What is kept against what is resident, at the default bits and those of the wanted budgets that were measured."""
    data = named(table)
    data = data[data["of_oracle"].notna()]
    every = sorted({int(b) for b in data["budget"]})
    budgets = [b for b in wanted if b in every] or every[:1]
    data = data[(data["page"] == page) & data["bits"].fillna("8/4/4").eq("8/4/4")]
    order = [name for name in WHO.values() if name in set(data["who"]) and name not in ("random", "oracle")]
    shown = {
        "of_oracle": "candidates' mass, of the oracle's",
        "carriers": "share of carriers kept",
        "output_error": "output error, relative",
    }
    figure, axes = panels(len(budgets), 3)
    for row, budget in enumerate(budgets):
        for column, (name, label) in enumerate(shown.items()):
            ax, some = axes[3 * row + column], data[data["budget"] == budget]
            lines(ax, some[some["who"].isin(order)], "bytes_a_token", name, "who", order)
            best = some[some["who"] == "oracle"][name]
            ax.axhline(
                float(best.iloc[0]), color="#9a9a9a", linewidth=2, zorder=0, label="oracle (reads every key)"
            )
            ax.set(
                title=f"budget {budget}, P = {page}",
                xlabel="resident bytes a token and KV head",
                ylabel=label,
            )
    legend(figure, axes)
    return figure


def decoded(table: Table) -> Figure:
    """KL to dense and digits right by budget, at default bits and P = 16; a column for each of the highest ranks."""
    data = named(table)
    data = data[data["kl"].notna() & data["page"].eq(16) & data["bits"].fillna("8/4/4").eq("8/4/4")]
    ranks = sorted({int(r) for r in data["rank"].dropna()})[-3:]
    ways = ("page-local", "shared, fitted to the cache", "shared, fitted to other text", "Quest", "oracle")
    order = [name for name in ways if name in set(data["who"])]
    shown = {"kl": "KL to dense, nats a token", "digits": "share of digits right"}
    figure, axes = panels(len(shown), len(ranks))
    dense = table[table["selector"] == "dense"]["digits"]
    for row, (name, label) in enumerate(shown.items()):
        for column, rank in enumerate(ranks):
            ax = axes[len(ranks) * row + column]
            # Quest and the oracle have no rank: they stand in every column.
            some = data[data["who"].isin(order) & data["rank"].fillna(rank).eq(rank)]
            lines(ax, some, "budget", name, "who", order, shift=0.04)
            powers(ax, sorted({int(b) for b in data["budget"]}))
            ax.set(title=f"R = {rank}, and the shared rank of its bytes", xlabel=BUDGET, ylabel=label)
            if name == "kl":
                ax.set_yscale("log")
                # A few questions decide small means: their intervals reach down to nothing.
                ax.set_ylim(bottom=float(some.loc[some["kl"] > 0, "kl"].min()) / 3)
            else:
                ax.axhline(
                    float(dense.iloc[0]), color="#9a9a9a", linewidth=2, zorder=0, label="dense attention"
                )
    legend(figure, axes[::-1], 3)
    return figure


def layers(table: Table) -> Figure:
    """What each group of layers saves with a higher rank, and the choice beside uniform ranks on other contexts."""
    figure, axes = panels(1, 2, (6.4, 4.2))
    groups = table[(table["part"] == "group") & table["saved"].notna()]
    names = groups["selector"].str.partition("@")[2]
    ends = np.abs(groups[["saved_low", "saved_high"]].to_numpy().T - groups["saved"].to_numpy())
    axes[0].errorbar(
        range(len(names)), groups["saved"], ends, fmt="o", color=PALETTE[0], capsize=2, markersize=6
    )
    axes[0].axhline(0, color="#9a9a9a", linewidth=1, zorder=0)
    axes[0].set_xticks(range(len(names)), names, rotation=45)
    axes[0].set(xlabel="layers with the higher rank", ylabel="KL saved, nats a token")
    tested = table[table["part"].isin(["uniform", "by layer"])]
    for i, (part, some) in enumerate(tested.groupby("part", sort=False)):
        ends = np.abs(some[["kl_low", "kl_high"]].to_numpy().T - some["kl"].to_numpy())
        look = {"color": PALETTE[2 * i], "marker": MARKERS[2 * i], "linestyle": "-" if i == 0 else ""}
        name = {"uniform": "one rank in all layers"}.get(str(part), "ranks by layer")
        axes[1].errorbar(some["bytes_a_token"], some["kl"], ends, capsize=2, markersize=6, label=name, **look)
    best = table[table["part"] == "oracle"]["kl"]
    axes[1].axhline(float(best.iloc[0]), color="#9a9a9a", linewidth=2, zorder=0, label="oracle")
    axes[1].set(
        xlabel="resident bytes a token and KV head, mean over layers", ylabel="KL to dense, nats a token"
    )
    axes[1].set_ylim(bottom=0)
    legend(figure, axes[::-1], 3)
    return figure
