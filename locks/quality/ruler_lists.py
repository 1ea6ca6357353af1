"""RULER's tracing and aggregation: a chain of variables (vt), common words (cwe), frequent coded words (fwe)."""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable, Sequence
from random import Random

from locks.quality.example import Encode, fit
from locks.quality.ruler_niah import NOISE
from locks.quality.text import all_words, words

Built = tuple[str, str, tuple[str, ...]]

# Below this length cwe counts fewer words.
SHORT = 4096
HOPS = 4
COMMON = 10
ALPHA = 2.0
# zeta(2).
ZETA = math.pi**2 / 6


def _letters(rng: Random, alphabet: str, width: int, count: int) -> list[str]:
    """`count` different strings."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(alphabet, k=width))] = None
    return list(found)


def chain(rng: Random, width: int) -> tuple[list[str], list[str], str]:
    """One chain of `HOPS` hops: its variables, its statements in order, and the value they all get."""
    names = _letters(rng, string.ascii_uppercase, width, HOPS + 1)
    value = str(rng.randint(10_000, 99_999))
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {later} = VAR {earlier} " for earlier, later in itertools.pairwise(names)]
    return names, statements, value


def tracking_frame(context: str, value: str, count: int) -> tuple[str, str]:
    """vt's template: the user's words and how the answer begins."""
    text = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
    )
    return text, (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{count} variables are assigned the value {value}, they are: "
    )


def _tracking(rng: Random, units: int, width: int) -> Built:
    names, statements, value = chain(rng, width)
    lines = [NOISE] * units
    places = sorted(rng.sample(range(units), len(statements)))
    for place, statement in zip(reversed(places), reversed(statements), strict=True):
        lines.insert(place, statement)
    return *tracking_frame("\n".join(lines), value, len(names)), tuple(names)


def variable_tracking(rng: Random, length: int, units: int, encode: Encode) -> Built:
    """vt: an answered example of 500 tokens with names of three letters, then the question."""

    def shown(size: int) -> str:
        # Equal draws whatever the size.
        text, prefix, names = _tracking(Random(seed), size, 3)
        return f"{text}{prefix} {' '.join(names)}\n"

    seed = rng.getrandbits(32)
    # An example is as long as lines of noise allow.
    size = fit(15, HOPS + 1, lambda n: len(encode(shown(n))), 500)
    text, prefix, names = _tracking(rng, units, 5)
    return f"{shown(size)}\n{text}", prefix, names


def numbered(entries: Sequence[str]) -> str:
    """Entries with their numbers, from 1 on, in one line."""
    return " ".join(f"{i}. {entry}" for i, entry in enumerate(entries, start=1))


def listed(rng: Random, count: int, often: int, seldom: int) -> tuple[list[str], list[str]]:
    """Entries of which `COMMON` stand `often` times and the others `seldom` times, and the common ones."""
    some = all_words()
    if count <= len(some):
        drawn = rng.sample(some, count)
    else:
        # RULER's own long list of English words cannot be had from a package: pairs of words fill up.
        pairs: dict[str, None] = dict.fromkeys(rng.sample(some, len(some)))
        while len(pairs) < count:
            pairs[f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"] = None
        drawn = list(pairs)
    common, others = drawn[:COMMON], drawn[COMMON:]
    repeated = common * often + others * seldom
    rng.shuffle(repeated)
    return repeated, common


def common_frame(context: str) -> tuple[str, str]:
    """cwe's template: the user's words and how the answer begins."""
    text = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{context}\n"
        f"Question: What are the {COMMON} most common words in the above list?"
    )
    return text, f" Answer: The top {COMMON} words that appear most often in the list are:"


def common_words(rng: Random, length: int, units: int, encode: Encode) -> Built:
    """cwe: an answered example of 40 words (10 and 3 times), then `units` words, 10 of them 30 times, the rest 3."""
    shot, sizes = ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))
    entries, common = listed(rng, *shot)
    text, prefix = common_frame(numbered(entries))
    example = f"{text}{prefix} {numbered(common)}"
    entries, common = listed(rng, units, *sizes)
    text, prefix = common_frame(numbered(entries))
    return f"{example}\n{text}", prefix, tuple(common)


def zipf_counts(total: int, kinds: int) -> list[int]:
    """How often each of so many words stands among about `total`: total k^-alpha / zeta(alpha), rounded down."""
    return [int(total * k**-ALPHA / ZETA) for k in range(1, kinds + 1)]


def coded(rng: Random, total: int, kinds: int) -> tuple[list[str], list[str]]:
    """About `total` coded words of so many kinds in a drawn order, the commonest dots; and the next three."""
    words = _letters(rng, string.ascii_lowercase, 6, kinds)
    words[0] = "..."
    text = [word for word, count in zip(words, zipf_counts(total, kinds), strict=True) for _ in range(count)]
    rng.shuffle(text)
    return text, words[1:4]


def frequent_frame(context: str) -> tuple[str, str]:
    """fwe's template: the user's words and how the answer begins."""
    text = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text?"
    )
    return text, " Answer: According to the coded text above, the three most frequently appeared words are:"


def frequent_words(rng: Random, length: int, units: int, encode: Encode) -> Built:
    """fwe: `units` coded words by Zipf's law, the most frequent of them dots; the next three are the answer."""
    text, answers = coded(rng, units, max(4, (length - TASKS["fwe"][2]) // 50))
    return *frequent_frame(" ".join(text)), tuple(answers)


# What builds a task, the fewest units of its haystack, and how many tokens its answer may take.
TASKS: dict[str, tuple[Callable[[Random, int, int, Encode], Built], int, int]] = {
    "vt": (variable_tracking, HOPS + 1, 30),
    "cwe": (common_words, COMMON + 1, 120),
    # Fewer words do not tell the third from the fourth.
    "fwe": (frequent_words, 120, 50),
}
