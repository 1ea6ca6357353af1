"""Words and prose that haystacks are made of."""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from pathlib import Path

from locks.models import SetupError
from locks.needles import python_prose as python_prose


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """RULER's words: "noun", "adjective" or "verb", in the order of the package `wonderwords`."""
    listed = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(dict.fromkeys(word.strip() for word in listed.splitlines() if word.strip()))


@functools.cache
def all_words() -> tuple[str, ...]:
    """Every noun, adjective and verb once, sorted."""
    return tuple(sorted({word for kind in ("noun", "adjective", "verb") for word in words(kind)}))


def read_prose(path: Path | None) -> str:
    """A text file's words; where none is given, the reference prose that CPython ships (about 24,000 words).

    RULER's own haystack, Paul Graham's essays, may not be passed on: give it as a file.

    Raises:
        SetupError: there is no such file, or no prose in it.
    """
    if path is None:
        return " ".join(python_prose())
    if not path.is_file():
        raise SetupError(f"haystack: no text file at {path}")
    try:
        prose = " ".join(path.read_text(encoding="utf-8").split())
    except UnicodeDecodeError as error:
        raise SetupError(f"haystack: {path} is not text in UTF-8: {error.reason}") from error
    if not prose:
        raise SetupError(f"haystack: {path} is empty")
    return prose


def sentences(prose: str) -> list[str]:
    """The prose cut behind the marks that end a sentence."""
    return re.split(r"(?<=[.!?]) (?=\S)", prose)


def first_words(prose: tuple[str, ...], count: int, start: int = 0) -> str:
    """`count` words of the prose from word `start` on, going round as often as that takes."""
    start %= len(prose)
    laps = -(-(start + count) // len(prose))
    return " ".join((prose * laps)[start : start + count])
