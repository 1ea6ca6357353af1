"""All analyses and one page that shows them: every figure, the table behind it, the command and the commit.

    make analysis                                             # reduced size, CPU, into analysis/out
    python analysis/report.py --size full --device cuda --workers 14 --tables analysis/results/full
    python analysis/report.py --tables analysis/results/full --reuse   # the page from tables that are there

The page is self-contained: analysis/out/report.html.
"""

from __future__ import annotations

import base64
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import blindness
import capture_keys
import contexts
import findings
import group_combine
import jinja2
import key_rank
import layer_rank
import outputs
import pandas as pd
import quantisation
import selection
import torch
import typer
from matplotlib.figure import Figure
from sections import SECTIONS, intro
from selection import Size

DPI = 110


class Scale(StrEnum):
    """How much is measured."""

    reduced = "reduced"
    full = "full"


@dataclass(frozen=True)
class Plan:
    """The sizes of every analysis."""

    key_tokens: int
    ablations: Size
    selection: Size
    trials: int
    layers: Layers


@dataclass(frozen=True)
class Layers:
    """The size of layer_rank.py: contexts to choose from and to test on, tokens of each, layers of a group."""

    learn: int
    test: int
    tokens: int
    width: int


def plan(scale: Scale, device: str, model: Path | None) -> Plan:
    """Reduced: minutes on two CPU cores. Full: 104 questions at 4,000 tokens, minutes on a GPU."""
    if scale is Scale.reduced:
        size = Size(2, 1200, (64, 128, 256), False, model, device)
        return Plan(2048, size, size, 15, Layers(1, 1, 800, 10))
    ablations = Size(6, 4000, (128, 256, 512), False, model, device)
    choices = Size(13, 4000, selection.BUDGETS, True, model, device)
    return Plan(4096, ablations, choices, 30, Layers(4, 13, 4000, 3))


def measure(sizes: Plan, tables: Path, workers: int, device: str, model: Path | None) -> None:
    """Runs everything; each table is written as soon as it is there.

    With workers the selection, which takes longest, runs in them beside the rest.
    """
    began = time.perf_counter()

    def done(name: str) -> None:
        typer.echo(f"{time.perf_counter() - began:6.0f} s  {name}")

    def select() -> None:
        selection.measure(sizes.selection, tables, workers)
        done("selection")

    # Loaded, and where it is not yet converted kept, before other processes want it.
    contexts.enabled(model, device)
    with ThreadPoolExecutor(1) as side:
        beside = side.submit(select) if workers else None
        keys, held_out = outputs.OUT / "keys", outputs.OUT / "held-out"
        for folder in (keys, held_out):
            capture_keys.capture_text(
                folder,
                tokens=sizes.key_tokens,
                model=model,
                text=None,
                held_out=folder is held_out,
                queries=64,
                device=device,
            )
        done("keys captured")
        # Thousands of small decompositions: not a GPU's work.
        key_rank.measure(keys, held_out, tables)
        done("rank, bases, angles")
        blindness.measure(sizes.ablations, tables, sizes.trials)
        done("blindness")
        group_combine.measure(sizes.ablations, tables)
        done("group combine")
        quantisation.measure(sizes.ablations, tables)
        done("quantisation")
        some = sizes.layers
        seeds = layer_rank.seeds_of(some.learn, some.test)
        layer_rank.measure(model, device, seeds, some.tokens, 64, (2, 4, 8), some.width, tables)
        done("ranks by layer")
        if beside is not None:
            beside.result()
        else:
            select()


def _picture(figure: Figure, alt: str) -> dict[str, Any]:
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=DPI)
    return {
        "data": base64.b64encode(held.getvalue()).decode(),
        "width": round(figure.get_figwidth() * DPI),
        "alt": alt,
    }


def _notes(tables: Path) -> dict[str, Any]:
    path = tables / outputs.NOTES
    if not path.is_file():
        raise outputs.InputError(f"{path}: expected the note of how the tables were made, got none")
    return json.loads(path.read_text())


def _made(notes: dict[str, Any], name: str) -> str:
    """How a table was made, and where it was in parts, each of them."""
    note = notes.get(name, {})
    if "parts" in note:
        return ". ".join(
            f"{', '.join(part['columns'])} of {part['rows']}: {_made_one(part)}" for part in note["parts"]
        )
    return _made_one(note)


def _made_one(note: dict[str, Any]) -> str:
    size = ", ".join(f"{k} {note[k]}" for k in ("contexts", "tokens", "budget") if k in note)
    device = note.get("device", {})
    device = device if isinstance(device, str) else device.get("name", device.get("device", "cpu"))
    command, commit = (note.get(part, "unknown") for part in ("command", "commit"))
    return f"{command}; commit {commit}; {device}, {note.get('dtype', '')}; {size}"


def page(tables: Path, compared: Path | None = None) -> str:
    """The report as HTML, of the tables that are there."""
    sections = []
    notes = _notes(tables)
    for section in SECTIONS:
        frames = {name: outputs.read_table(tables, name) for name in section.tables}
        first = frames[section.tables[0]]
        sections.append(
            {
                "title": section.title,
                "about": section.about,
                "findings": section.findings(first),
                "summary": _html(section.summary(first)) if section.summary else "",
                "figures": [_picture(make(first), section.title) for make in section.figures],
                "tables": [_table(name, frame, _made(notes, name)) for name, frame in frames.items()],
            }
        )
    if compared is not None:
        sections.append(_agreement(tables, compared))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(outputs.HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        intro=intro(notes["rank"]["keys"]), sections=sections
    )


def _table(name: str, frame: outputs.Table, made: str) -> dict[str, Any]:
    return {"name": name, "rows": len(frame), "html": _html(frame), "made": made}


def _html(frame: outputs.Table) -> str:
    return frame.to_html(index=False, na_rep="", float_format=lambda x: f"{x:.4g}", border=0)


def _agreement(tables: Path, compared: Path) -> dict[str, Any]:
    """A section on the same tables made on another device."""
    names = [name for section in SECTIONS for name in section.tables if (compared / f"{name}.csv").is_file()]
    found = []
    for name in names:
        frame = findings.agreement(outputs.read_table(tables, name), outputs.read_table(compared, name))
        found.append(frame.assign(table=name))
    whole: outputs.Table = pd.concat(found)[
        ["table", "number", "rows", "intervals_meet", "largest_difference"]
    ]
    rows = int(whole["rows"].sum())
    met = float((whole["rows"] * whole["intervals_meet"]).sum() / rows)
    other = _notes(compared)
    return {
        "title": "The same tables from another device",
        "about": "Every number with an interval, against the same size measured elsewhere.",
        "summary": "",
        "findings": [f"Of {rows} numbers {met:.2%} have intervals that meet."],
        "figures": [],
        "tables": [_table("agreement", whole, f"against: {_made(other, names[0])}")],
    }


def main(
    size: Annotated[Scale, typer.Option(help="how much is measured")] = Scale.reduced,
    tables: Annotated[Path, typer.Option(help="folder of tables")] = outputs.OUT,
    out: Annotated[Path, typer.Option(help="the page to write")] = outputs.OUT / "report.html",
    reuse: Annotated[
        bool, typer.Option(help="make the page of tables that are there, measure nothing")
    ] = False,
    device: Annotated[str, typer.Option()] = "cpu",
    workers: Annotated[int, typer.Option(help="processes beside this one; 0 for none")] = 2,
    model: Annotated[Path | None, typer.Option(help="model directory or .gguf; SmolLM2 without")] = None,
    compare: Annotated[Path | None, typer.Option(help="tables of the same size from another device")] = None,
) -> None:
    """Measures everything, or reads the tables, and writes the page."""
    torch.set_num_threads(1)
    if not reuse:
        measure(plan(size, device, model), tables, workers, device, model)
    outputs.write_text(out, page(tables, compare))
    typer.echo(out)


if __name__ == "__main__":
    outputs.run(main)
