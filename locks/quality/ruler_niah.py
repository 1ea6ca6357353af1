"""RULER's needle tasks: facts hidden in noise, in prose, or among facts of the same kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from locks.quality.text import first_words, sentences, words


class Niah(NamedTuple):
    """One of the eight tasks: what the haystack is, what keys and values are, how many of each, how many asked."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        """Needles planted: every query has a key of its own."""
        return max(self.keys, self.queries) * self.values

    @property
    def least(self) -> int:
        """The fewest units of haystack (words of prose, lines else) that have a place for every needle."""
        return self.needles * (40 if self.haystack == "essay" else 1)


TASKS = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", queries=4),
}

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# Needles stand at depths of this grid, in percent.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))


def _word(rng: Random) -> str:
    return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"


DRAWS: dict[str, Callable[[Random], str]] = {
    "words": _word,
    "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def needle(spec: Niah, key: str, value: str) -> str:
    """The sentence that hides a value under a key."""
    return _NEEDLE.format(kind=spec.value, key=key, value=value)


def plant(spec: Niah, rng: Random, units: int, hay: tuple[str, ...], planted: list[str]) -> str:
    """The haystack of so many units (words of prose, lines else) with the planted sentences in it."""
    if spec.haystack == "essay":
        prose = sentences(first_words(hay, units))
        places = sorted(int(len(prose) * depth / 100) for depth in rng.sample(DEPTHS, len(planted)))
        for place, sentence in zip(reversed(places), reversed(planted), strict=True):
            prose.insert(place, sentence)
        return " ".join(prose)
    if spec.haystack == "noise":
        lines = [NOISE] * units
    else:
        lines = [needle(spec, DRAWS[spec.key](rng), DRAWS[spec.value](rng)) for _ in range(units)]
    for place, sentence in zip(sorted(rng.sample(range(units), len(planted)))[::-1], planted, strict=True):
        lines.insert(place, sentence)
    return "\n".join(lines)


def build(spec: Niah, rng: Random, units: int, hay: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    """The user's words, how the answer begins, and the values asked for."""
    count = max(spec.keys, spec.queries)
    hidden: dict[str, list[str]] = {}
    while len(hidden) < count:
        hidden[DRAWS[spec.key](rng)] = [DRAWS[spec.value](rng) for _ in range(spec.values)]
    planted = [needle(spec, key, value) for key, values in hidden.items() for value in values]
    rng.shuffle(planted)
    context = plant(spec, rng, units, hay, planted)
    asked = rng.sample(list(hidden), spec.queries)
    text, prefix = frame(spec, context, asked)
    return text, prefix, tuple(value for key in asked for value in hidden[key])


def frame(spec: Niah, context: str, asked: list[str]) -> tuple[str, str]:
    """The template around a context: the user's words and how the answer begins."""
    one = spec.queries * spec.values == 1
    kind = spec.value.removesuffix("s") if one else spec.value
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    opening = f"{'A' if one else 'Some'} special magic {kind} {'is' if one else 'are'} hidden"
    text = (
        f"{opening} within the following text. Make sure to memorize it. I will quiz you about the {kind} "
        f"afterwards.\n{context}\n"
        f"What {'is the' if one else 'are all the'} special magic {kind} for {query} mentioned in the provided text?"
    )
    verb = "is" if one else "are"
    return text, f" The special magic {kind} for {query} mentioned in the provided text {verb}"
