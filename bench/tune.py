"""Finds the fastest launch shapes on a GPU and writes the table that kernels look their default up in.

    python bench/tune.py                                    on a GPU: every operation, to kernels/tuned.json
    python bench/tune.py --dry-run --arch 90 --op attend    anywhere: what is feasible, best estimate first

Every candidate is compiled for the GPU's architecture first; one that spills, or does not fit a multiprocessor, is out.
The rest are ordered by an estimate from occupancy, and the first few are timed, each once its result is the default's.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from torch import Tensor

from bench import resources
from bench.layers import SHAPES, Shape
from bench.operations import OPERATIONS, Inputs, Operation
from bench.resources import Resources
from bench.timing import commit_of, device_times
from locks import SummaryFormat
from locks.kernels.config import TABLE, KernelConfig, table_key

# Of an H200: what estimates reckon with, which order candidates and are never reported. µs, and bytes a µs.
LATENCY = 0.8
BYTES_A_US = 4.5e6
H200_MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A launch shape that fits, what it takes, how many programs a multiprocessor runs at once, and estimated µs."""

    config: KernelConfig
    used: Resources
    at_once: int
    estimate: float


def estimate(
    op: Operation, shape: Shape, fmt: SummaryFormat, used: Resources, at_once: int, config: KernelConfig
) -> float:
    """µs that the waves of programs wait for their dependent reads, and the bytes take; spills make both dearer."""
    programs = op.programs(shape, config, at_once)
    waves = max(1.0, programs / at_once)
    time = waves * op.steps(shape, config, at_once) * LATENCY + op.nbytes(shape, fmt) / BYTES_A_US
    return time * (1 + used.stack_bytes / 256)


def small(shape: Shape) -> Shape:
    """The same heads and widths at a size that costs nothing to allocate."""
    return dataclasses.replace(shape, T=4096, B=min(shape.B, 2), rest=None)


def compile_all(
    op: Operation, shape: Shape, fmt: SummaryFormat, arch: int
) -> list[tuple[KernelConfig, Resources]]:
    """Every candidate that compiles, with what it takes."""
    x = Inputs(small(shape), fmt, shape.blocks[0], 0, device="cpu")
    found = []
    for config in op.candidates(shape):
        try:
            with resources.capture(arch) as done:
                op.launch(x, config)
        except triton.runtime.errors.OutOfResources:
            continue
        found.append((config, next(one for one in done if one.name == op.kernel)))
    return found


def feasible(
    op: Operation,
    shapes: list[Shape],
    fmt: SummaryFormat,
    compiled: Iterable[tuple[KernelConfig, Resources]],
    arch: int,
    multiprocessors: int,
) -> list[Candidate]:
    """The candidates that fit and spill no more than they may, by the geometric mean of estimates over the shapes."""
    found, seen = [], set()
    for config, used in compiled:
        fit = resources.occupancy(used, arch)
        # A looser limit of registers that changes nothing is the same program.
        same = (config.block_n, config.num_warps, used)
        if not fit or used.stack_bytes > op.spills or same in seen:
            continue
        seen.add(same)
        if config.registers is not None:
            config = dataclasses.replace(config, programs=fit)
        times = [estimate(op, shape, fmt, used, fit * multiprocessors, config) for shape in shapes]
        found.append(Candidate(config, used, fit, geometric_mean(times)))
    return sorted(found, key=lambda one: one.estimate)


def geometric_mean(times: list[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(sum(map(math.log, times)) / len(times))


def agrees(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> bool:
    """Whether all tensors are close, a tenth of the tolerance near 0, with infinities at the same places."""
    return all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance / 10)
        for a, b in zip(got, want, strict=True)
    )


def timed(
    op: Operation, shape: Shape, fmt: SummaryFormat, configs: list[KernelConfig], layers: int | None = None
) -> dict[KernelConfig, float]:
    """µs of each launch shape: graph replays over layers beyond the L2 cache.

    Raises:
        RuntimeError: one computes something else than the default.
    """
    inputs = [
        Inputs(shape, fmt, shape.blocks[0], seed, device="cuda")
        for seed in range(shape.layers if layers is None else layers)
    ]
    want = tuple(one.clone() for one in op.result(inputs[0], None))
    found = {}
    for config in configs:
        if not agrees(op.result(inputs[0], config), want, op.tolerance):
            raise RuntimeError(f"{op.name}: {config} computes something else than the default")

        def call(x: Inputs, config: KernelConfig = config) -> Callable[[], Any]:
            return lambda: op.launch(x, config)

        found[config] = device_times([call(x) for x in inputs])[1]
    return found


def row_of(
    op: Operation,
    shapes: list[Shape],
    fmt: SummaryFormat,
    times: dict[KernelConfig, list[float]],
    *,
    device: str,
    commit: str,
) -> dict[str, Any]:
    """The table's row: the launch shape whose times have the least geometric mean, and the mean of the next."""
    means = {config: geometric_mean(every) for config, every in times.items()}
    best, *others = sorted(means, key=means.__getitem__)
    return {
        "device": device,
        "op": op.name,
        "shape": dict(sorted(op.key(shapes[0], fmt).items())),
        "config": {name: value for name, value in dataclasses.asdict(best).items() if value is not None},
        "us": round(means[best], 3),
        "runner_up_us": round(means[others[0]], 3) if others else None,
        "measured": [{"model": one.model, "T": one.T, "B": one.B, "block": one.blocks[0]} for one in shapes],
        "triton": triton.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def write_row(row: dict[str, Any], path: Path) -> None:
    """Puts a row in its place in the table, which is there as it was or as it will be, never half written."""
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    kept = {table_key(one["device"], one["op"], one["shape"]): one for one in rows}
    kept[table_key(row["device"], row["op"], row["shape"])] = row
    beside = path.with_suffix(".unfinished")
    beside.write_text(json.dumps({"rows": [kept[key] for key in sorted(kept)]}, indent=1) + "\n")
    beside.replace(path)


def by_key(op: Operation, shapes: list[Shape]) -> list[tuple[list[Shape], SummaryFormat]]:
    """The shapes of each row of the table, with a format that has its key."""
    found: dict[tuple[tuple[str, int], ...], tuple[list[Shape], SummaryFormat]] = {}
    for shape in shapes:
        for rank in shape.ranks:
            fmt = SummaryFormat(rank=rank)
            if op.fits(shape, fmt):
                key = tuple(sorted(op.key(shape, fmt).items()))
                same = found.setdefault(key, ([], fmt))[0]
                if shape not in same:
                    same.append(shape)
    return list(found.values())


def describe(candidates: list[Candidate]) -> str:
    """One line a candidate."""
    lines = [f"{'block_n':>7} {'warps':>5} {'limit':>5} {'registers':>9} {'spilled':>7} {'shared':>6} "]
    lines[0] += f"{'at once':>7} {'estimate, us':>12}"
    for one in candidates:
        lines.append(
            f"{one.config.block_n:7d} {one.config.num_warps:5d} {one.config.registers or '-':>5} "
            f"{one.used.registers:9d} {one.used.stack_bytes:7d} {one.used.shared_bytes:6d} {one.at_once:7d} "
            f"{one.estimate:12.1f}"
        )
    return "\n".join(lines)


def main(
    op: Annotated[str, typer.Option(help="operations, by commas; all if empty")] = "",
    only: Annotated[str, typer.Option(help="models, by commas; all if empty")] = "",
    dry_run: Annotated[bool, typer.Option(help="print what is feasible, time nothing")] = False,
    arch: Annotated[
        int | None, typer.Option(help="compute capability, 90 for 9.0; the GPU's if not given")
    ] = None,
    multiprocessors: Annotated[
        int | None, typer.Option(help="the GPU's if not given, an H200's without one")
    ] = None,
    best: Annotated[int, typer.Option(help="launch shapes to time, by estimate", min=1)] = 6,
    commit: Annotated[str, typer.Option(help="to note for a copy of the tree; else what git says")] = "",
    out: Annotated[Path, typer.Option(help="the table")] = TABLE,
) -> None:
    """Enumerates, times and writes; or with --dry-run enumerates only."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET: expected none, got '1': the interpreter compiles nothing")
    chosen = op.split(",") if op else list(OPERATIONS)
    unknown = set(chosen) - set(OPERATIONS)
    if unknown:
        raise typer.BadParameter(f"op: expected of {', '.join(OPERATIONS)}, got {', '.join(sorted(unknown))}")
    shapes = [one for one in SHAPES if one.rest is None and (not only or one.model in only.split(","))]
    if not shapes:
        models = ", ".join(dict.fromkeys(one.model for one in SHAPES))
        raise typer.BadParameter(f"only: expected of {models}, got {only!r}")
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    if gpu is None and not dry_run:
        raise typer.BadParameter("needs a CUDA device, and torch sees none; --dry-run does without")
    if gpu is not None:
        arch = arch or 10 * gpu.major + gpu.minor
        multiprocessors = multiprocessors or gpu.multi_processor_count
    if arch not in resources.LIMITS:
        raise typer.BadParameter(f"arch: expected one of {sorted(resources.LIMITS)}, got {arch}")
    multiprocessors = multiprocessors or H200_MULTIPROCESSORS
    for name in chosen:
        operation = OPERATIONS[name]
        for same, fmt in by_key(operation, shapes):
            found = feasible(
                operation, same, fmt, compile_all(operation, same[0], fmt, arch), arch, multiprocessors
            )
            key = ", ".join(f"{what} {size}" for what, size in operation.key(same[0], fmt).items())
            typer.echo(f"{name}: {key}: {len(found)} of {len(operation.candidates(same[0]))} are feasible")
            typer.echo(describe(found))
            if dry_run or not found:
                continue
            few = [one.config for one in found[:best]]
            every = [timed(operation, shape, fmt, few) for shape in same]
            row = row_of(
                operation,
                same,
                fmt,
                {one: [times[one] for times in every] for one in few},
                device=torch.cuda.get_device_name(),
                commit=commit or commit_of(),
            )
            write_row(row, out)
            typer.echo(f"fastest: {row['config']}, {row['us']} us; the next {row['runner_up_us']} us\n")


if __name__ == "__main__":
    typer.run(main)
