"""How the heads of a group agree on one list of pages: the sum of their shares, the largest, the mean of their logs.

    python analysis/group_combine.py --contexts 2 --tokens 1500 --out analysis/out

The same scores, of exact masses and of default records, combined three ways; what the choice keeps, over questions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import ablation
import attention
import outputs
import pandas as pd
import typer
from ablation import Ablation
from contexts import Rows
from selection import Size
from torch import Tensor
from ways import Scorer, make_format

from locks import PageList, api
from locks.types import PageMass

PAGE = 16
BUDGETS = (128, 256, 512)


def sum_of_shares(logs: Tensor) -> Tensor:
    """[B, Hkv, G, N] logs of shares to [B, Hkv, N]: what the library does."""
    return logs.exp().sum(2)


def largest_share(logs: Tensor) -> Tensor:
    """The head that wants a page most decides."""
    return logs.exp().amax(2)


def mean_of_logs(logs: Tensor) -> Tensor:
    """The product of the shares, to the power 1 / G."""
    return logs.mean(2).exp()


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of shares": sum_of_shares,
    "largest share": largest_share,
    "mean of logs": mean_of_logs,
}


def choose(rule: str, mass: PageMass, rows: Rows, budget: int) -> PageList:
    """The first M pages by a rule."""
    logs = (mass.log_mass - mass.total[..., None]).unflatten(1, (rows.heads, -1))
    return api.select_pages(RULES[rule](logs), rows.seq_lens, page=PAGE, budget=budget, impl="torch")


def layer_cells(rows: Rows, size: Size) -> Ablation:
    """What every rule keeps of one layer under every budget."""
    truth, found = attention.exact(rows, PAGE), {}
    masses = {"exact": truth.scores, "records": Scorer(rows).locks(make_format(PAGE, 4))}
    for scores, mass in masses.items():
        for budget in BUDGETS:
            if budget >= size.tokens:
                continue
            best = attention.choose(truth.scores, rows, PAGE, budget)
            for rule in RULES:
                pages = choose(rule, mass, rows, budget)
                found[scores, rule, budget] = attention.kept(truth, rows, PAGE, pages, best)
    return found


def measure(size: Size, out: Path) -> pd.DataFrame:
    """Writes group_combine.csv."""
    return ablation.measure("group_combine", ("scores", "rule", "budget"), layer_cells, size, out)


def main(
    number: Annotated[int, typer.Option("--contexts", help="of eight questions each")] = 1,
    tokens: Annotated[int, typer.Option(help="of a context")] = 1500,
    model: Annotated[Path | None, typer.Option(help="model directory or .gguf; SmolLM2 without")] = None,
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option(help="the first context's")] = 0,
    out: Annotated[Path, typer.Option(help="folder of tables")] = outputs.OUT,
) -> None:
    """Measures the rules."""
    typer.echo(measure(Size(number, tokens, BUDGETS, False, model, device, seed), out).to_string())


if __name__ == "__main__":
    outputs.run(main)
