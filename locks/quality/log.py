"""The log of a run: one JSON line for each example, sample, selector and budget; a killed run goes on from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from locks.models import SetupError

# What tells rows apart.
KEYS = ("task", "length", "index", "sample", "selector", "page", "budget")
Key = tuple[Any, ...]
Row = dict[str, Any]


def key_of(row: Row) -> Key:
    """The row's place: no two rows of a log have the same."""
    return tuple(row[name] for name in KEYS)


class BusyError(SetupError):
    """Another run writes to the log."""


class Log:
    """Rows on disk, in the order they came; open it with `with`.

    The first line holds what all rows have in common. A run that goes on must have the same; what stands behind
    the last line break was cut off by a kill and is dropped.

    Args:
        path: of the file, made where there is none.
        header: what the rows have in common.

    Raises:
        BusyError: another run writes to the file.
        SetupError: its header differs, or a line is damaged.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path, self.header = path, header
        self.rows: dict[Key, Row] = {}
        self._lock = FileLock(f"{path}.lock", timeout=0)

    def __enter__(self) -> Log:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise BusyError(f"{self.path}: another run writes to it") from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _open(self) -> None:
        self.path.touch()
        with self.path.open("rb+") as file:
            text = file.read()
            whole = text.rfind(b"\n") + 1
            file.truncate(whole)
        lines = text[:whole].splitlines()
        if not lines:
            self._write([self.header])
            return
        header, *rows = (self._parse(number, line) for number, line in enumerate(lines, start=1))
        # As JSON gives it back.
        wanted = json.loads(json.dumps(self.header))
        other = [name for name in sorted({*header, *wanted}) if header.get(name) != wanted.get(name)]
        if other:
            name = other[0]
            raise SetupError(
                f"{self.path}: made with {name} {header.get(name)!r}, asked for {wanted.get(name)!r}: name another "
                "directory with --out"
            )
        for row in rows:
            self.rows.setdefault(key_of(row), row)

    def _parse(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or (number > 1 and not set(KEYS) <= set(row)):
                raise ValueError("not a row")
        except ValueError as error:
            raise SetupError(f"{self.path}: line {number} is damaged: {error}") from error
        return row

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def append(self, rows: Iterable[Row]) -> None:
        """Adds the rows whose place is free, in one write."""
        fresh = {key_of(row): row for row in rows}
        fresh = {key: row for key, row in fresh.items() if key not in self.rows}
        if fresh:
            self._write(list(fresh.values()))
            self.rows.update(fresh)

    def _write(self, rows: list[Row]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            written = os.write(descriptor, text)
            if written != len(text):
                raise OSError(f"{self.path}: wrote {written} of {len(text)} bytes")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
