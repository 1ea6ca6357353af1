"""Ranks of single layers, written RANK@FIRST-LAST: "8@3-4,8@18-20" is rank 8 in layers 3, 4 and 18 to 20."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class LayerRank(NamedTuple):
    """A rank, and the first and the last layer that have it."""

    rank: int
    first: int
    last: int

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.rank}@{self.first}-{self.last}"


def parse(text: str, separator: str = ",") -> tuple[LayerRank, ...]:
    """What is written in `text`; nothing where it is empty.

    Raises:
        ValueError: another form, or a last layer before the first.
    """
    found = []
    for part in text.split(separator) if text else ():
        matched = re.fullmatch(r"(\d+)@(\d+)-(\d+)", part.strip())
        if matched is None or int(matched[2]) > int(matched[3]):
            raise ValueError(f"expected ranks and layers such as 8@18-20, got {text!r}")
        found.append(LayerRank(*map(int, matched.groups())))
    return tuple(found)


def rank_of(layer: int, others: Sequence[LayerRank], rank: int) -> int:
    """The rank of a layer: the last of `others` that names it, else `rank`."""
    return next((o.rank for o in reversed(others) if o.first <= layer <= o.last), rank)


def check_layers(others: Sequence[LayerRank], layers: int) -> None:
    """Raises ValueError where they name a layer that a model of so many layers does not have."""
    last = max((o.last for o in others), default=-1)
    if last >= layers:
        raise ValueError(f"expected layers of 0 to {layers - 1}, got {last}")
