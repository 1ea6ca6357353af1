"""One page turned out of a shared basis's span: where a selector ranks it, and where the theorem says.

`sweep` moves a carrier page along a direction that turns from inside the span to a right angle with it, at a true
logit that stays the same, and ranks it by shared, Quest and page-local scores, beside what `fixed_sketch_misses`
(proofs/) predicts from what a fixed basis sees of it. Run by blindness.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import outputs
import pandas as pd
import torch
from scipy import special, stats
from torch import Tensor
from ways import make_format

from locks.baselines import Quest, SharedBasis, SharedFactors
from locks.selectors import Locks, Selector

# Pages of PAGE tokens, the background's dimensions, a carrier's logit in standard deviations of the background's.
PAGE, PAGES, SPAN, LIFT = 16, 256, 24, 8.0
TURNS = 16
FIXED = "shared, fixed"


class Sweep(NamedTuple):
    """Keys [1, N * P + 1, D] with a carrier page, the query [D], the shared basis [SPAN, D], logit scale."""

    keys: Tensor
    query: Tensor
    basis: Tensor
    carrier: int
    scale: float


def sweep_case(turn: float, width: int, generator: torch.Generator) -> Sweep:
    """Pages scattered in a span, one of them moved along a direction turned out of it by `turn` radians.

    The query lies half inside the span; the carrier's true logit is LIFT above the background's mean whatever the
    turn, in units of the background's deviation, which is 1.
    """
    frame = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    basis, inside, outside = frame[:SPAN], frame[0], frame[SPAN]
    scale = width**-0.5
    # Equal parts inside and outside; the background's logits then deviate by 1.
    query = (inside + outside) / scale
    centers = torch.randn(PAGES, SPAN, generator=generator, dtype=torch.float64) @ basis
    carrier = int(torch.randint(1, PAGES - 1, (), generator=generator))
    direction = math.cos(turn) * inside + math.sin(turn) * outside
    centers[carrier] += LIFT / (scale * float(query @ direction)) * direction
    keys = centers[:, None] + 0.05 * torch.randn(PAGES, PAGE, width, generator=generator, dtype=torch.float64)
    # The newest page is a lone token.
    keys = torch.cat([keys.flatten(0, 1), centers[:1]])[None]
    return Sweep(keys.float(), query.float(), basis.float().contiguous(), carrier, scale)


def predicted_rank(turn: float) -> float:
    """The carrier's expected rank among the candidates under a sketch that is the span.

    Of the carrier's lift the sketch sees cos(turn) / (cos(turn) + sin(turn)); beside it the carrier scores as any
    page, so another page of the N - 2 scores higher with the probability that a difference of two standard normals
    exceeds what is seen. At a right angle nothing is seen and the rank is that of a page drawn at random.
    """
    lift = LIFT * math.cos(turn) / (math.cos(turn) + math.sin(turn))
    return 1 + (PAGES - 2) * float(special.ndtr(-lift / math.sqrt(2)))


def measured_rank(selector: Selector, case: Sweep) -> int:
    """The carrier's rank among the candidates by a selector's scores."""
    k_cache = torch.nn.functional.pad(case.keys, (0, 0, 0, PAGE - 1)).unflatten(1, (-1, PAGE)).transpose(0, 1)
    args = (
        k_cache.contiguous(),
        torch.arange(len(k_cache), dtype=torch.int32)[None],
        torch.tensor([case.keys.shape[1]], dtype=torch.int32),
    )
    state = selector.allocate(args[0])
    selector.seal(state, *args)
    score = selector.page_mass(case.query[None, None], state, *args, scale=case.scale).log_mass[0, 0, 1:PAGES]
    return 1 + int((score > score[case.carrier - 1]).sum())


def sweep_selectors(case: Sweep) -> dict[str, Selector]:
    """Who ranks: a shared basis that is the span, one fitted to the cache, carrier and all, Quest, page-local.

    The theorem speaks of the first alone: the second is not chosen before the page is seen.
    """
    factors = SharedFactors(
        torch.zeros(1, case.basis.shape[1]).bfloat16(), case.basis[None].bfloat16().contiguous()
    )
    return {
        FIXED: SharedBasis(PAGE, SPAN, coef_bits=16, factors=factors),
        "shared, fitted to the cache": SharedBasis(PAGE, SPAN, coef_bits=16),
        "Quest": Quest(PAGE),
        "page-local, R = 4": Locks(make_format(PAGE, 4), "torch"),
    }


def sweep(trials: int, seed: int, widths: tuple[int, ...] = (64, 128)) -> pd.DataFrame:
    """blind_sweep.csv: mean rank over trials with its interval, and the prediction."""
    table = []
    for width in widths:
        for turn in np.linspace(0, math.pi / 2, TURNS):
            ranks: dict[str, list[int]] = {}
            for trial in range(trials):
                case = sweep_case(turn, width, torch.Generator().manual_seed(seed * 10**6 + trial))
                for name, selector in sweep_selectors(case).items():
                    ranks.setdefault(name, []).append(measured_rank(selector, case))
            for name, found in ranks.items():
                row = {"D": width, "degrees": math.degrees(turn), "scores": name, "trials": trials}
                row |= outputs.columns("rank", found)
                row["predicted"] = predicted_rank(turn) if name == FIXED else ""
                table.append(row)
    return pd.DataFrame(table)


def correlations(frame: pd.DataFrame) -> pd.DataFrame:
    """Pearson's correlation of the measured and the predicted rank over the sweep, a row a width."""
    some = frame[frame["scores"] == FIXED]
    rows = [
        {"D": width, "correlation": stats.pearsonr(g["rank"], g["predicted"].astype(float))[0]}
        for width, g in some.groupby("D", sort=True)
    ]
    return pd.DataFrame(rows)
