"""The demo's picture: true against estimated page mass of one head that retrieves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

# Dark, middle and light: told apart without colour, and by their markers.
COLORS = {"passed over": "#a6a6a6", "attended to": "#0072b2", "the needle's page": "#8c2d04"}
MARKERS = {"passed over": "o", "attended to": "s", "the needle's page": "D"}
SIZES = {"passed over": 20, "attended to": 60, "the needle's page": 130}

# Shares below this one are drawn at it.
FLOOR = 1e-6


class Retrieval(NamedTuple):
    """One head at the step that predicts an answer's first digit.

    true, estimated: [N] shares of the head's mass over all pages but the newest; picked: the pages that its
    KV head attends to; needle: the page of the asked needle that holds most; pages: how many there are.
    """

    layer: int
    head: int
    key: str
    true: Tensor
    estimated: Tensor
    picked: list[int]
    needle: int
    pages: int

    def summary(self) -> dict[str, Any]:
        """What demo.json says of it."""
        return {
            "layer": self.layer,
            "head": self.head,
            "key": self.key,
            "needle_page": self.needle,
            "true_share": float(self.true[self.needle]),
            "estimated_share": float(self.estimated[self.needle]),
            "picked_pages": self.picked,
            "pages": self.pages,
        }


def page_mass(seen: Retrieval, path: Path, *, page: int) -> None:
    """Writes the picture: the candidate pages' shares against each other, and along the context."""
    data = pd.DataFrame({"page": range(1, seen.pages - 1)})
    for name in ("true", "estimated"):
        data[name] = getattr(seen, name)[1 : seen.pages - 1].clamp(min=FLOOR).tolist()
    data["state"] = ["attended to" if n in seen.picked else "passed over" for n in data["page"]]
    data.loc[data["page"] == seen.needle, "state"] = "the needle's page"
    # The last drawn lies on top.
    data = data.sort_values("state", key=lambda column: column.map(list(COLORS).index))
    with sns.axes_style("whitegrid", {"grid.color": "#e4e4e4"}), sns.plotting_context("notebook"):
        figure = Figure(figsize=(13, 6), layout="constrained")
        against, along = figure.subplots(1, 2, width_ratios=(1, 1.25))
    low = 0.5 * float(data[["true", "estimated"]].min().min())
    _against(against, data, seen, low)
    _along(along, data, seen, low, page)
    figure.suptitle(
        f"What query head {seen.head} of layer {seen.layer} attends to before it says the number for "
        f"“{seen.key}”:\n{len(seen.picked)} of {seen.pages} pages, chosen together with the query heads that "
        "share its keys"
    )
    figure.savefig(path, dpi=130)


def _against(axes: Axes, data: pd.DataFrame, seen: Retrieval, low: float) -> None:
    ends = (low, 2.0)
    axes.plot(ends, ends, color="black", linewidth=0.8, zorder=1)
    sns.scatterplot(
        data,
        x="true",
        y="estimated",
        hue="state",
        style="state",
        size="state",
        palette=COLORS,
        markers=MARKERS,
        sizes=SIZES,
        hue_order=list(COLORS),
        style_order=list(COLORS),
        size_order=list(COLORS),
        edgecolor="white",
        linewidth=0.5,
        zorder=2,
        ax=axes,
    )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="true share of the head's mass", ylabel="share estimated from the summaries")
    axes.set_title("Every page that competes for the budget")
    axes.legend(title=None, loc="upper left", framealpha=1)
    _label(axes, seen, float(seen.true[seen.needle]), float(seen.estimated[seen.needle]), (-20, -70))


def _along(axes: Axes, data: pd.DataFrame, seen: Retrieval, low: float, page: int) -> None:
    at = data["page"] * page
    axes.vlines(
        at, low, data["true"], color=[COLORS[state] for state in data["state"]], linewidth=1.8, zorder=1
    )
    axes.plot(at, data["estimated"], "_", color="black", markersize=5, zorder=2)
    bar = Line2D([], [], color=COLORS["passed over"], linewidth=1.8, label="true")
    tick = Line2D([], [], color="black", marker="_", linestyle="none", markersize=8, label="estimated")
    axes.legend(handles=[bar, tick], loc="upper left", framealpha=1)
    axes.set(
        yscale="log",
        ylim=(2 * low, 2.0),
        xlabel="position in the context, tokens",
        ylabel="share of the mass",
    )
    axes.set_title("The same pages where they stand")
    _label(axes, seen, seen.needle * page, float(seen.true[seen.needle]), (-60, -50))


def _label(axes: Axes, seen: Retrieval, x: float, y: float, offset: tuple[int, int]) -> None:
    true, estimated = float(seen.true[seen.needle]), float(seen.estimated[seen.needle])
    axes.annotate(
        f"needle, page {seen.needle}\ntrue {true:.2f}, estimated {estimated:.2f}",
        (x, y),
        xytext=offset,
        textcoords="offset points",
        ha="right",
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#808080"},
        arrowprops={"arrowstyle": "-", "color": "black", "linewidth": 0.8},
        zorder=3,
    )
