"""Perplexity and long generation under every selector and evictor, a process for each, and their logs in one result.

    python bench/quality/reading.py longgen --length 2048 --selectors locks-r8,snapkv --budgets 128,256,512,full

Every token of these tasks is read in a step of its own, which the host of a small model takes longer to launch than
the device to do. So full attention and every selector have a process of `locks eval` and a log each, which a later call
goes on from. A run that is cut (or interrupted) writes what it has; it exits with 1, as does one that lacks examples.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import result
import torch
import typer

from locks.quality import summary
from locks.quality.example import Task
from locks.quality.log import Row
from locks.quality.methods import FULL, parse_budgets, parse_methods
from locks.quality.run import Plan

UNITS = {"perplexity": "perplexity", "longgen": "points", "needles": "points"}
# Seconds that a process gets to end in.
PATIENCE = 20.0


class Processes:
    """Commands in processes of their own, some at a time, which end together."""

    def __init__(self, workers: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._over = False
        self._devices = itertools.cycle(_devices())

    def run(self, commands: dict[Path, Sequence[str]], seconds: float) -> None:
        """Runs them with their output in files, as far as the time allows; an interrupt ends it early."""
        running = [self._pool.submit(self._one, *each) for each in commands.items()]
        try:
            concurrent.futures.wait(running, timeout=seconds)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
        self._end()
        self._pool.shutdown()

    def _one(self, output: Path, command: Sequence[str]) -> None:
        with output.open("ab") as file:
            with self._lock:
                if self._over:
                    return
                environment = {**os.environ, **next(self._devices)}
                child = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
                self._running.append(child)
            child.wait()

    def _end(self) -> None:
        with self._lock:
            self._over = True
        until = time.monotonic() + PATIENCE
        for child in self._running:
            # Of one that has ended this does nothing.
            child.send_signal(signal.SIGINT)
        for child in self._running:
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


def _devices() -> list[dict[str, str]]:
    """What gives a process one GPU, for each of them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in named.split(",")] if count > 1 else [{}]


def joined(logs: Path, family: str) -> tuple[Row, list[Row]]:
    """What all logs of a directory have in common, and their rows.

    Raises:
        ValueError: they have not.
    """
    common: Row = {}
    rows: list[Row] = []
    for file in sorted(logs.glob(f"*/{family}.jsonl")):
        # A line that was cut off does not count.
        lines = [json.loads(line) for line in file.read_bytes().rpartition(b"\n")[0].splitlines()]
        if not lines:
            continue
        header, *more = lines
        if header != (common or header):
            raise ValueError(f"logs: expected {common} in all of {logs}, got {header} in {file}")
        common = header
        rows += more
    return common, rows


def _none(*_: Any) -> Any:
    raise NotImplementedError("a summary asks for no example")


def plan_of(family: str, length: int, examples: int, selectors: str, budgets: str) -> Plan:
    """The lines of the comparison, for its summary."""
    sizes, full = parse_budgets(budgets)
    task = Task(family, length, examples, _none, _none, unit=UNITS[family])
    return Plan([task], parse_methods(selectors), sizes, full, 16)


def main(
    family: Annotated[str, typer.Argument(help="perplexity, longgen or needles")],
    length: Annotated[int, typer.Option(help="tokens; of longgen those that are decoded")],
    selectors: Annotated[str, typer.Option(help="and evictors, by commas")],
    budgets: Annotated[str, typer.Option(help="by commas")],
    examples: Annotated[int, typer.Option(help="in all")] = 32,
    batch: Annotated[int, typer.Option(help="answers at once")] = 32,
    model: Annotated[Path | None, typer.Option(help="a directory; SmolLM2 where none is given")] = None,
    workers: Annotated[int, typer.Option(help="processes at once")] = 4,
    minutes: Annotated[float, typer.Option(help="after which the processes end")] = 60.0,
    logs: Annotated[Path | None, typer.Option(help="directory of the logs; out/FAMILY")] = None,
    out: Annotated[Path | None, typer.Option(help="bench/results/quality/FAMILY.json")] = None,
) -> None:
    """Runs the processes and writes one JSON file."""
    if family not in UNITS:
        raise typer.BadParameter(f"expected one of {', '.join(UNITS)}, got {family!r}")
    plan = plan_of(family, length, examples, selectors, budgets)
    logs = logs or Path("out") / family
    out = out or Path("bench/results/quality") / f"{family}.json"
    sizes = ",".join(map(str, plan.budgets))
    commands: dict[Path, Sequence[str]] = {}
    # Full attention first, since everything is compared with it.
    for name, own in [(FULL, FULL)] * plan.full + [(method.spec, sizes) for method in plan.methods]:
        (logs / name).mkdir(parents=True, exist_ok=True)
        commands[logs / name / "output.txt"] = [
            *(sys.executable, "-m", "locks", "eval", family, "--out", str(logs / name)),
            *("--selector", "" if name == FULL else name, "--budgets", own),
            *("--lengths", str(length), "--examples", str(examples), "--batch", str(batch)),
            *([] if model is None else ["--model", str(model)]),
        ]
    Processes(workers).run(commands, 60 * minutes)
    common, log = joined(logs, family)
    rows = summary.summarize(plan, log)
    said = f"python bench/quality/reading.py {family} --length {length} --selectors {selectors} --budgets {budgets}"
    said += f" --examples {examples} --batch {batch}" + (f" --model {model}" if model else "")
    result.write(out, {"command": said, **common, "cut_short": summary.cut_short(plan, rows)}, rows)
    for row in rows:
        typer.echo(
            f"{row['selector']:10s} {row['budget'] or '':>5} {row['score']:6.2f} [{row['ci_low']:.2f}, "
            f"{row['ci_high']:.2f}] n {row['n']}"
        )
    lacking = summary.missing(plan, log)
    if lacking:
        typer.echo(f"cut short: {lacking} answers are missing; the same command goes on", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
