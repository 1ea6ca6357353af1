"""Tables made in parts: rows or columns that were measured alone, put in their places in the table that is there."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import outputs
import pandas as pd
from outputs import Table


def _read_back(frame: pd.DataFrame) -> Table:
    """As it reads from its file: every cell of the type it then has."""
    return pd.read_csv(io.StringIO(outputs.as_csv(frame)), **outputs.AS_WRITTEN)


def name_of(cells: Sequence[Any]) -> str:
    """Cells as one text: whole numbers the same as any type, nan and None as nothing."""
    return "|".join("" if x is None or x != x else x if isinstance(x, str) else f"{x:g}" for x in cells)


def names_of(frame: Table, keys: Sequence[str]) -> list[str]:
    """Every row's `name_of` those columns; a missing column's cells are nothing."""
    return [name_of(row) for row in frame.reindex(columns=list(keys)).itertuples(index=False)]


def merged(old: Table, new: Table, keys: Sequence[str], measured: Sequence[str]) -> Table:
    """The old table with the new one's rows: its `measured` columns replace theirs, other cells stay.

    Rows are the same where their `keys` are. New ones come last.
    """
    old, new = (_read_back(frame) for frame in (old, new))
    for frame in (old, new):
        frame.index = pd.Index(names_of(frame, keys))
        if not frame.index.is_unique:
            raise ValueError(f"keys: expected rows that differ in {', '.join(keys)}, got two alike")
    fresh = new.index.difference(old.index, sort=False)
    columns = [*old.columns, *(name for name in new.columns if name not in old.columns)]
    whole = pd.concat([old, new.loc[fresh]]).reindex(columns=columns)
    own = [name for name in new.columns if name.removesuffix("_low").removesuffix("_high") in measured]
    whole.loc[new.index, own] = new[own]
    # Whole numbers are written as such whatever was missing meanwhile.
    return _read_back(whole)


def publish(
    folder: Path,
    name: str,
    frame: pd.DataFrame,
    *,
    keys: Sequence[str],
    measured: Sequence[str],
    rows: str,
    order: Callable[[Table], Table],
    **facts: Any,
) -> Table:
    """Writes the table of that name with the part in it, and into its note which part was made how.

    Args:
        folder: of tables.
        name: of the table; it may be missing.
        frame: the rows of the part.
        keys: columns that tell rows apart.
        measured: columns of the part, without their intervals' ends.
        rows: which rows these are, in words.
        order: puts the whole table's rows in order.
        **facts: of the note; they go before what is true of this process.
    """
    there = (folder / f"{name}.csv").is_file()
    old = outputs.read_table(folder, name) if there else frame.iloc[:0]
    whole = order(merged(old, frame, keys, measured))
    outputs.write_table(whole, folder / f"{name}.csv")
    part = {"rows": rows, "columns": list(measured), **outputs.made(**facts)}
    with outputs.noting(folder) as notes:
        before = notes.get(name, {}) if there else {}
        known = before.get("parts") or [{"rows": "all", "columns": ["all"], **before}] * bool(before)
        same = [p for p in known if (p["rows"], p["columns"]) != (part["rows"], part["columns"])]
        notes[name] = {"parts": [*same, part]}
    return whole
