"""Which layers want rank: the choice in the bytes that there are, and its name."""

from typing import Any

import layer_rank
import pytest

from locks.quality.methods import parse_methods


def test_groups_that_gain_most_come_first_in_the_bytes_that_there_are():
    gains = {0: 0.1, 3: 0.5, 6: -0.1, 9: 0.3}
    # Of twelve layers (6 - 2) * 12 / (10 - 2) = 6 can have the high rank, of eleven 5.
    assert layer_rank.affordable(gains, 3, 12, (2.0, 6.0, 10.0)) == [3, 4, 5, 9, 10, 11]
    assert layer_rank.affordable(gains, 3, 11, (2.0, 6.0, 10.0)) == [3, 4, 5, 9, 10]


@pytest.mark.parametrize(
    ("chosen", "name"),
    [([], "locks-r2"), ([4], "locks-r2+8@4-4"), ([9, 3, 5, 4, 11, 10], "locks-r2+8@3-5+8@9-11")],
)
def test_a_choice_has_the_name_that_evaluations_take(chosen: list[int], name: str):
    assert layer_rank.named(2, 8, chosen) == name
    (method,) = parse_methods(name)
    made: Any = method.make(64, 12)
    ranks = [one.fmt.rank for one in made] if chosen else [made.fmt.rank] * 12
    assert ranks == [8 if layer in chosen else 2 for layer in range(12)]
