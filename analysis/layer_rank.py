"""Which layers want rank: the KL to dense that a few layers of a higher rank save, and all at a uniform rank's bytes.

    python analysis/layer_rank.py --contexts 2 --test-contexts 5 --tokens 1000 --budget 64 --out analysis/out

Every layer has rank `low`; a group of neighbours at a time gets rank `high`. Then the groups that save most get it,
as many as the bytes of rank `middle` in all layers allow, and that choice meets uniform ranks and the exact oracle on
contexts that it was not made from. All layers decode sparsely, teacher-forced; needles in prose. The last rows' name is
what `locks eval --selector` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import contexts
import numpy as np
import outputs
import pandas as pd
import typer
from outputs import InputError
from tqdm import tqdm
from ways import make_format

from locks import hf, models
from locks.layer_ranks import LayerRank
from locks.selectors import Locks, Oracle, Selector

PAGE = 16
# The first context's: no other analysis's.
SEED = 100


class Questions:
    """Contexts under a budget, and dense attention's answers to their questions.

    Args:
        model: that is enabled.
        tokenizer: its own.
        tokens: of a context.
        seeds: a context each.
        budget: tokens that a KV head attends to.
    """

    def __init__(
        self, model: object, tokenizer: object, tokens: int, seeds: Sequence[int], budget: int
    ) -> None:
        self.batch, self.dense = contexts.prepared(model, tokenizer, tokens, seeds)
        self.budget = budget

    def under(self, selector: Selector | Sequence[Selector]) -> np.ndarray:
        """[questions, 2]: share of digits right, KL to dense in nats."""
        found = contexts.ask(self.batch, hf.LocksConfig(budget=self.budget, selector=selector))
        return contexts.answered(self.batch, self.dense, found.log_softmax(-1))


def by_rank(ranks: Sequence[int]) -> list[Selector]:
    """Page-local selectors, one a layer."""
    return [Locks(make_format(PAGE, rank)) for rank in ranks]


def named(low: int, high: int, chosen: Sequence[int]) -> str:
    """What `locks eval --selector` calls rank `high` in the chosen layers and `low` in the others."""
    runs: list[list[int]] = []
    for layer in sorted(chosen):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return f"locks-r{low}" + "".join(f"+{LayerRank(high, first, last)}" for first, last in runs)


def affordable(
    gains: dict[int, float], width: int, layers: int, nbytes: tuple[float, float, float]
) -> list[int]:
    """The layers of the groups that gain most, in the bytes that are left; the last group may lack its end.

    Args:
        gains: of each group, by its first layer.
        width: layers of a group.
        layers: of the model.
        nbytes: of a page at the low, the middle and the high rank.
    """
    low, middle, high = nbytes
    count = int(layers * (middle - low) // (high - low))
    order = sorted(gains, key=lambda first: -gains[first])
    return [layer for first in order for layer in range(first, min(first + width, layers))][:count]


def measure(
    model_path: Path | None,
    device: str,
    seeds: tuple[Sequence[int], Sequence[int]],
    tokens: int,
    budget: int,
    ranks: tuple[int, int, int],
    width: int,
    out: Path,
) -> pd.DataFrame:
    """Writes layer_rank.csv: `part` "group" (chosen from), "uniform", "by layer" and "oracle" (tested on others)."""
    model, tokenizer = contexts.enabled(model_path, device)
    layers, head_dim = models.num_layers(model.config), models.head_dim(model.config)
    low, middle, high = ranks
    nbytes = {rank: Locks(make_format(PAGE, rank)).resident_bytes(head_dim, 1) for rank in ranks}
    rows, gains = [], {}

    def keep(part: str, name: str, values: np.ndarray, given: Sequence[int], **more: float) -> None:
        size = sum(nbytes[rank] for rank in given) / layers / PAGE
        cells = outputs.cells(("digits", "kl"), values)
        rows.append(
            {"part": part, "selector": name, "bytes_a_token": size, "questions": len(values), **more, **cells}
        )

    learn = Questions(model, tokenizer, tokens, seeds[0], budget)
    base = learn.under(by_rank([low] * layers))
    keep("group", named(low, high, []), base, [low] * layers)
    for first in tqdm(range(0, layers, width), "groups of layers"):
        group = range(first, min(first + width, layers))
        given = [high if layer in group else low for layer in range(layers)]
        values = learn.under(by_rank(given))
        saved = base[:, 1] - values[:, 1]
        gains[first] = float(saved.mean())
        keep("group", named(low, high, group), values, given, **outputs.columns("saved", saved))
    chosen = affordable(gains, width, layers, (nbytes[low], nbytes[middle], nbytes[high]))
    mixed = [high if layer in chosen else low for layer in range(layers)]
    test = Questions(model, tokenizer, tokens, seeds[1], budget)
    keep("oracle", "oracle", test.under(Oracle(PAGE)), [])
    for rank in ranks:
        keep("uniform", named(rank, high, []), test.under(by_rank([rank] * layers)), [rank] * layers)
    keep("by layer", named(low, high, chosen), test.under(by_rank(mixed)), mixed)
    frame = pd.DataFrame(rows)
    facts = outputs.device_facts(model.device, model.dtype) | contexts.model_facts(model_path)
    outputs.publish(out, {"layer_rank": frame}, tokens=tokens, budget=budget, **facts)
    return frame


def seeds_of(number: int, test: int, first: int = SEED) -> tuple[range, range]:
    """Seeds of the contexts to choose from and of those to test on, none twice."""
    return range(first, first + number), range(first + number, first + number + test)


def main(
    number: Annotated[int, typer.Option("--contexts", help="to choose from, of eight questions each")] = 2,
    test_contexts: Annotated[int, typer.Option(help="to test the choice on")] = 3,
    tokens: Annotated[int, typer.Option(help="of a context")] = 1000,
    budget: Annotated[int, typer.Option(help="tokens a KV head attends to")] = 64,
    low: Annotated[int, typer.Option(help="rank of most layers")] = 2,
    middle: Annotated[int, typer.Option(help="rank whose bytes are to be spent")] = 4,
    high: Annotated[int, typer.Option(help="rank of some layers")] = 8,
    width: Annotated[int, typer.Option(help="layers of a group")] = 3,
    model: Annotated[Path | None, typer.Option(help="model directory or .gguf; SmolLM2 without")] = None,
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option(help="the first context's")] = SEED,
    out: Annotated[Path, typer.Option(help="folder of tables")] = outputs.OUT,
) -> None:
    """Finds the layers, and tests the choice."""
    if not low < middle < high:
        raise InputError(f"low, middle, high: expected ascending ranks, got {low}, {middle}, {high}")
    if min(number, test_contexts, width) < 1:
        raise InputError("contexts, test-contexts, width: expected 1 or more each")
    seeds = seeds_of(number, test_contexts, seed)
    frame = measure(model, device, seeds, tokens, budget, (low, middle, high), width, out)
    typer.echo(frame.to_string())


if __name__ == "__main__":
    outputs.run(main)
