"""The pictures of the benchmark: what is in them, in what unit, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

pytest.importorskip("seaborn")

from matplotlib.figure import Figure
from matplotlib.text import Annotation

from bench import figures

COMMITTED = figures.RESULTS


def row(op: str, impl: str = "locks", *, p50: float = 10.0, **more: Any) -> dict[str, Any]:
    one = {
        "op": op,
        "impl": impl,
        "model": "a model",
        "T": 4096,
        "B": 1,
        "R": 8,
        "layout": "block 64, shuffled",
    }
    one |= {"p20_us": p50 - 1, "p50_us": p50, "p80_us": p50 + 2, "bytes": 5_000_000, "commit": "0123456789"}
    one |= {"GPU": "a GPU", "torch": "2", "triton": "3"} | more
    return one | {"gb_per_s": one["bytes"] / p50 / 1e3}


def both_contexts() -> list[dict[str, Any]]:
    """A model at two contexts."""
    return [
        one
        for tokens in (4096, 8192)
        for one in (
            row("dense", "torch flash", p50=40, T=tokens, R=None),
            row("dense", "torch cudnn", p50=30, T=tokens, R=None, layout="contiguous"),
            row("chain", p50=10, T=tokens),
            row("chain", p50=11, T=tokens, layout="block 16, shuffled"),
            row("chain", p50=8, T=tokens, R=4),
        )
    ]


def test_roofline_is_in_megabytes_and_microseconds() -> None:
    frame = figures.roofline_frame([row("select", p50=10.0)])
    assert frame.to_dict("records") == [
        {"operation": "select", "megabytes": 5.0, "gb_per_s": 500.0, "microseconds": 10.0}
    ]


def test_roofline_tells_the_ways_to_score_apart_and_leaves_peers_out() -> None:
    rows = [row("score", impl) for impl in ("hopper", "general", "quest", "exact mass")] + [
        row("chain", "quest")
    ]
    assert figures.roofline_frame(rows)["operation"].tolist() == ["score", "score, general path"]


def test_roofline_has_the_fastest_dense_attention_of_each_shape_only() -> None:
    rows = [
        row("dense", "locks", p50=50),
        row("dense", "torch cudnn", p50=20),
        row("dense", "locks", p50=9, B=2),
    ]
    frame = figures.roofline_frame(rows)
    assert frame["operation"].tolist() == ["dense, fastest"] * 2
    assert frame["microseconds"].tolist() == [20, 9]


def test_roofline_leaves_out_a_call_that_moves_nothing() -> None:
    rows = [row("seal", "40 layers, page fills"), row("seal", "40 layers, none fills", bytes=0)]
    assert figures.roofline_frame(rows)["megabytes"].tolist() == [5.0]


def test_latency_has_one_layout_and_the_ratio_to_the_fastest_dense() -> None:
    frame = figures.latency_frame(both_contexts())
    at = frame[frame["T"] == 8192].set_index("series")
    assert sorted(at.index) == ["LOCKS, r = 4", "LOCKS, r = 8", "dense, fastest"]
    assert at["dense_by_step"].to_dict() == {
        "dense, fastest": 1.0,
        "LOCKS, r = 8": 3.0,
        "LOCKS, r = 4": 30 / 8,
    }
    assert at.loc["LOCKS, r = 8", ["p20_us", "p50_us", "p80_us"]].tolist() == [9, 10, 12]
    assert len(frame) == 6


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(row("chain", p50=1, B=3), id="one context alone"),
        pytest.param(row("chain", p50=1, T=16384), id="no dense attention beside it"),
        pytest.param(row("chain", "quest", p50=1), id="a peer"),
        pytest.param(row("chain", p50=1, R=2), id="another rank"),
        pytest.param(row("chain", p50=1, lengths="one row of 1M"), id="unequal lengths"),
    ],
)
def test_latency_leaves_out(left_out: dict[str, Any]) -> None:
    rows = both_contexts()
    assert figures.latency_frame([*rows, left_out]).equals(figures.latency_frame(rows))


def test_a_panel_names_the_ratios_below_the_lowest_marker_of_each_context() -> None:
    axes = Figure().subplots()
    figures._panel(axes, figures.latency_frame(both_contexts()))
    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    assert [(label.get_text(), *label.get_position(), *label.xy) for label in labels] == [
        ("3.0×\n3.8×", 0, -9, tokens, 8) for tokens in (4096, 8192)
    ]


def test_a_layout_without_its_block_is_refused() -> None:
    rows = [*both_contexts(), row("chain", layout="contiguous")]
    with pytest.raises(ValueError, match="layout: expected one that names its block, got 'contiguous'"):
        figures.latency_frame(rows)


def test_no_line_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a chain at two contexts or more"):
        figures.draw_latency([row("dense"), row("chain")], tmp_path / "latency.png")


def command(*args: str) -> tuple[int, str]:
    app = Typer()
    app.command()(figures.main)
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def test_a_missing_file_says_what_makes_it(tmp_path: Path) -> None:
    code, output = command("--results", str(tmp_path / "no.json"))
    assert code == 2
    assert "no.json: no such file; `make bench` on a GPU machine writes it" in " ".join(output.split())


def test_the_committed_results_are_drawn(tmp_path: Path) -> None:
    code, output = command("--out", str(tmp_path))
    assert code == 0, output
    for name in ("roofline.png", "latency.png"):
        drawn = (tmp_path / name).read_bytes()
        assert drawn.startswith(b"\x89PNG")
        assert len(drawn) < 100_000
        assert (COMMITTED.parent / name).is_file()


def test_every_committed_row_that_moves_bytes_is_shown_or_named() -> None:
    """Nothing falls out of the roofline because its name is not known."""
    rows = json.loads(COMMITTED.read_text())["rows"]
    shown = len(figures.roofline_frame(rows))
    named = [
        one
        for one in rows
        if one["op"] == "dense" or one["bytes"] == 0 or "quest" in one["impl"] or "exact" in one["impl"]
    ]
    assert shown == len(rows) - len(named) + len(figures.fastest_dense(rows))
