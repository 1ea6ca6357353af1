"""Tables of numbers with intervals, written whole or not at all, and the note of how each was made."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
from scipy import stats

from locks import doctor
from locks.models import SetupError

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
RESULTS = HERE / "results"
NOTES = "made.json"

RESAMPLES = 1000
# How `read_csv` reads what `as_csv` writes.
AS_WRITTEN: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}

# The report measures in two threads.
_noting = threading.Lock()

# A pandas DataFrame: its own annotations make a Series of half of what is done with one.
Table = Any


class InputError(ValueError):
    """Something about the input that an analysis cannot work with, in one line."""


class OutputError(OSError):
    """A file that could not be written, in one line."""


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, file or folder; takes its place when all went well, vanishes when not.

    Raises:
        OutputError: nothing can be written there.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
        yield unfinished
        _remove(path, only=Path.is_dir)
        unfinished.replace(path)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        # What a full disk cut short is no result.
        with contextlib.suppress(OSError):
            _remove(unfinished)


def _remove(path: Path, only: Callable[[Path], bool] = Path.exists) -> None:
    if not only(path):
        return
    if path.is_dir():
        for child in path.iterdir():
            _remove(child)
        path.rmdir()
    else:
        path.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with aside(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Writes a CSV file of six significant digits; nothing in it tells when or where it was made."""
    write_text(path, as_csv(frame))


def as_csv(frame: pd.DataFrame) -> str:
    """A table as text."""
    return frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """The table of that name.

    Raises:
        InputError: it is not there.
    """
    path = folder / f"{name}.csv"
    if not path.is_file():
        raise InputError(f"{path}: no such table; make analysis writes it")
    return pd.read_csv(path, **AS_WRITTEN)


def publish(folder: Path, frames: dict[str, pd.DataFrame], **facts: Any) -> None:
    """Writes tables and, beside them, the note of the command, commit, device and versions that made them."""
    for name, frame in frames.items():
        write_table(frame, folder / f"{name}.csv")
    with noting(folder) as notes:
        notes.update(dict.fromkeys(frames, made(**facts)))


def made(**facts: Any) -> dict[str, Any]:
    """A note: the command, commit and versions of this process, and the facts, which go before them."""
    return {"command": command_line(), "commit": commit(), "versions": doctor.versions(), **facts}


@contextlib.contextmanager
def noting(folder: Path) -> Iterator[dict[str, Any]]:
    """The notes of a folder's tables, by table, to be changed; written when all went well."""
    path = folder / NOTES
    with _noting:
        notes = json.loads(path.read_text()) if path.is_file() else {}
        yield notes
        write_text(path, json.dumps(notes, indent=1, sort_keys=True) + "\n")


def command_line() -> str:
    """The command that runs, as typed from the root of the checkout."""
    name = Path(sys.argv[0])
    if name.resolve().is_relative_to(HERE):
        name = Path("analysis") / name.resolve().relative_to(HERE)
    return " ".join(["python", str(name), *sys.argv[1:]])


@functools.cache
def commit() -> str:
    """The checkout's commit, "-dirty" behind it where files differ from it, "unknown" outside of git."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def device_facts(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Device and dtype of a run."""
    return {"device": doctor.device_facts(device), "dtype": str(dtype).removeprefix("torch.")}


def interval(values: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of the last axis and its 95 % bootstrap interval, each of the other axes' shape.

    The percentile method, from a generator of a fixed seed: equal values give equal intervals.
    """
    x = np.asarray(values, dtype=np.float64)
    mean = x.mean(-1)
    if x.shape[-1] < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    found = stats.bootstrap(
        (x,), np.mean, axis=-1, n_resamples=RESAMPLES, batch=100, method="percentile", rng=0
    ).confidence_interval
    return mean, np.asarray(found.low), np.asarray(found.high)


def columns(name: str, values: Any) -> dict[str, float]:
    """`interval` of one sample as three cells of a row: name, name_low, name_high; nan in it says nothing."""
    x = np.asarray(values, dtype=np.float64)
    x = x[~np.isnan(x)]
    mean, low, high = interval(x) if x.size else [np.nan] * 3
    return {name: float(mean), f"{name}_low": float(low), f"{name}_high": float(high)}


def cells(names: Sequence[str], values: np.ndarray) -> dict[str, float]:
    """`columns` of several samples [n, names] at once."""
    if np.isnan(values).any():
        return {k: v for i, name in enumerate(names) for k, v in columns(name, values[:, i]).items()}
    found = zip(names, *interval(values.T), strict=True)
    return {
        f"{name}{end}": float(x)
        for name, *ends in found
        for end, x in zip(("", "_low", "_high"), ends, strict=True)
    }


def run(function: Callable[..., None]) -> None:
    """Runs a script's function from the command line; what its user did wrong is one line on standard error."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (InputError, OutputError, SetupError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error

    typer.run(checked)
