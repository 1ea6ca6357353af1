"""What the report shows, in order: each question's text, tables, sentences and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import figures
import figures_choice
import findings
from matplotlib.figure import Figure
from outputs import Table

LABELS = {"of_oracle": "candidates' mass kept, of the oracle's"}


def intro(keys: dict[str, Any]) -> str:
    """Whose keys were measured, from the manifest of their capture."""
    recipe = keys.get("recipe", {})
    origin = (
        f" (trained from {recipe['base']}, seed {recipe['seed']})"
        if {"base", "seed"} <= recipe.keys()
        else ""
    )
    return (
        f"One model: {keys['model']}{origin}, {keys['layers']} layers of {keys['kv_heads']} KV heads of width "
        f"{keys['head_dim']}, on {keys['tokens']} tokens of prose for what is of keys alone and on contexts with "
        "hidden numbers for what is of answers. The sweep needs no model and has D = 64 and 128."
    )


@dataclass(frozen=True)
class Section:
    """What the page says of one question; figures, sentences and summary come from the first table."""

    title: str
    about: str
    tables: list[str]
    findings: Callable[..., list[str]]
    figures: list[Callable[..., Figure]]
    summary: Callable[..., Table] | None = None


SECTIONS = [
    Section(
        "The rank of a page and of the whole",
        "Singular values of a KV head's keys, of all tokens taken together and of pages of 16 to 128 "
        "tokens. Entropy rank: exp of the entropy of the energies. Stable rank: all energy over the "
        "largest.",
        ["rank"],
        findings.rank,
        [figures.rank],
    ),
    Section(
        "Page-local against shared bases",
        "Energy is that of the keys about their mean over the cache, which either side has for nothing. "
        "Logit error is the root mean square of scale q (k - k') over the last 64 queries. First at equal "
        "rank, nothing quantised; then at equal bytes and bits, each side quantised as it is stored (the "
        "shared basis and its mean are not counted: they are paid once a context). Last the gain of "
        "page-local: above 0 it wins.",
        ["bases"],
        findings.bases,
        [
            lambda t: figures.bases(t, "rank", ""),
            lambda t: figures.bases(t, "bytes", "8/4/4"),
            lambda t: figures.gains(t, "8/4/4"),
        ],
        findings.verdicts,
    ),
    Section(
        "Principal angles",
        "Between the subspaces of centred pages, and between a page's and the shared one: the mean square "
        "cosine is the share of one subspace that lies in the other. Ticks mark what random subspaces "
        "would share.",
        ["angles"],
        findings.angles,
        [figures.angles],
    ),
    Section(
        "Blindness: the theorem in numbers",
        "A shared basis of 24 dimensions that spans 254 background pages, and one carrier page whose "
        "direction turns out of the span while its true logit stays 8 deviations above the background's. "
        "The broad line is the rank that the theorem on fixed sketches predicts. Of a basis fitted to the "
        "cache with the carrier in it the theorem says nothing.",
        ["blind_sweep"],
        findings.sweep,
        [figures.sweep],
    ),
    Section(
        "Blindness on a model's cache",
        "Pages of 16 tokens whose first direction (about the mean of the cache) has less than half of its "
        "square within a shared basis, the attention mass in them at the answers' digits, and the carriers "
        "(pages with at least 1/M of a head's mass) that exact scores within a basis keep at a budget of "
        "256 tokens. Nothing is quantised.",
        ["blind"],
        findings.blind,
        [figures.blind],
    ),
    Section(
        "What a choice of pages keeps, by what is resident",
        "Of the oracle: exact attention mass of the candidates that are attended to, over that of the "
        "oracle's choice. Carriers: pages with at least 1/M of a query head's mass. Output error: |out - "
        "dense| / |dense|. Resident bytes count scales and padding and, for the shared basis, the basis "
        "itself. KL and digits are of decoding, all layers sparse. Bits 8/4/4: mean, basis, coefficients.",
        ["selection"],
        findings.selection,
        [lambda t: figures_choice.pareto(t, 16, (64, 256)), figures_choice.decoded],
    ),
    Section(
        "Which layers want rank",
        "Every layer has a low rank; a group of neighbours at a time gets a higher one "
        "(name-rank+rank@first-last). The groups that save most get it in the end, as many as the bytes of a "
        "rank between allow. Left: contexts to choose from. Right: other contexts. Needles, all layers sparse.",
        ["layer_rank"],
        findings.layers,
        [figures_choice.layers],
    ),
    Section(
        "How a group's heads agree",
        "Three rules on the same scores: of exact masses and of default records (P = 16, R = 4).",
        ["group_combine"],
        lambda t: findings.variants(t, "scores", "rule", "sum of shares"),
        [lambda t: figures_choice.dots(t, "rule", "of_oracle", "budget", "scores", LABELS)],
    ),
    Section(
        "What each part of a record brings",
        "The default record (P = 16, R = 4) with one thing changed: bits of a part (default: mean 8, basis "
        "4, coefficients 4), the exact eigenproblem against subspace iterations from a random start, the "
        "mean, the residual term.",
        ["quantisation"],
        lambda t: findings.variants(t, "part", "variant", ("default", "exact", "as it is")),
        [lambda t: figures_choice.dots(t, "variant", "of_oracle", "budget", "part", LABELS)],
    ),
]
