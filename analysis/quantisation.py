"""What each part of a record costs and brings: its bits, the exact eigenproblem, the mean, the residual term.

    python analysis/quantisation.py --contexts 2 --tokens 1500 --out analysis/out

Each variant changes one thing of the default record (P = 16, R = 4); what its choice of pages keeps, over questions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import ablation
import attention
import outputs
import pandas as pd
import torch
import typer
from ablation import Ablation
from contexts import Rows
from selection import Size
from spectra import iterated_factors, page_factors
from ways import Scorer, make_format

from locks import SummaryFormat
from locks.format import encode
from locks.types import Factors, PageMass

PAGE, RANK = 16, 4
BUDGETS = (128, 256)
BITS = {
    "default": (8, 4, 4),
    "all 16": (16, 16, 16),
    "mean 16": (16, 4, 4),
    "mean 4": (4, 4, 4),
    "basis 8": (8, 8, 4),
    "basis 16": (8, 16, 4),
    "coefficients 8": (8, 4, 8),
    "coefficients 16": (8, 4, 16),
}


def _of_factors(scorer: Scorer, make: Callable[..., Factors], fmt: SummaryFormat, spread: bool) -> PageMass:
    keys = scorer.keys(PAGE)
    return scorer.records(encode(keys, make(keys), fmt), fmt, spread=spread)


def variants(scorer: Scorer, seed: int) -> dict[tuple[str, str], Callable[[], PageMass]]:
    """What is varied, and how, to the scores."""
    default = make_format(PAGE, RANK)
    # Differences of factors show best where nothing is rounded.
    fine = make_format(PAGE, RANK, (16, 16, 16))

    def exact(fmt: SummaryFormat, *, centre: bool = True, spread: bool = True) -> Callable[[], PageMass]:
        return lambda: _of_factors(scorer, lambda keys: page_factors(keys, RANK, centre=centre), fmt, spread)

    def iterated(steps: int) -> Callable[[], PageMass]:
        generator = torch.Generator().manual_seed(seed)
        return lambda: _of_factors(
            scorer, lambda keys: iterated_factors(keys, RANK, steps, generator), fine, True
        )

    found = {("bits", name): exact(make_format(PAGE, RANK, bits)) for name, bits in BITS.items()}
    found |= {("basis, 16 bits", f"{n} iteration{'s' * (n > 1)}"): iterated(n) for n in (1, 2, 3)}
    found["basis, 16 bits", "exact"] = exact(fine)
    for bits, fmt in (("default bits", default), ("16 bits", fine)):
        found[f"mean, residual, {bits}", "as it is"] = exact(fmt)
        found[f"mean, residual, {bits}", "not centred"] = exact(fmt, centre=False)
        found[f"mean, residual, {bits}", "no residual term"] = exact(fmt, spread=False)
    return found


def layer_cells(rows: Rows, size: Size) -> Ablation:
    """What every variant keeps of one layer under every budget."""
    truth, found = attention.exact(rows, PAGE), {}
    for (part, variant), scores in variants(Scorer(rows), size.seed).items():
        mass = scores()
        for budget in BUDGETS:
            if budget >= size.tokens:
                continue
            best = attention.choose(truth.scores, rows, PAGE, budget)
            pages = attention.choose(mass, rows, PAGE, budget)
            found[part, variant, budget] = attention.kept(truth, rows, PAGE, pages, best)
    return found


def measure(size: Size, out: Path) -> pd.DataFrame:
    """Writes quantisation.csv."""
    return ablation.measure("quantisation", ("part", "variant", "budget"), layer_cells, size, out)


def main(
    number: Annotated[int, typer.Option("--contexts", help="of eight questions each")] = 1,
    tokens: Annotated[int, typer.Option(help="of a context")] = 1500,
    model: Annotated[Path | None, typer.Option(help="model directory or .gguf; SmolLM2 without")] = None,
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option(help="the first context's")] = 0,
    out: Annotated[Path, typer.Option(help="folder of tables")] = outputs.OUT,
) -> None:
    """Measures the parts."""
    typer.echo(measure(Size(number, tokens, BUDGETS, False, model, device, seed), out).to_string())


if __name__ == "__main__":
    outputs.run(main)
