"""What a shared basis cannot see, on a model's keys and in a sweep that turns one page out of its span.

    python analysis/blindness.py --contexts 2 --tokens 1500 --out analysis/out

blind.csv: for a shared basis of growing rank, the pages whose top direction lies mostly outside of it, the attention
mass they hold, and the carriers that a selector of exact logits within the basis keeps; the same for page-local bases.
blind_sweep.csv: see blind_sweep.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import attention
import blind_sweep
import contexts
import outputs
import pandas as pd
import torch
import typer
from contexts import Rows
from selection import Size
from spectra import centred, paged, project, top_basis
from torch import Tensor
from ways import Scorer

PAGE = 16
SHARED_RANKS = (1, 2, 4, 8, 16, 24, 32, 48, 56, 64, 96, 112, 128)
LOCAL_RANKS = (1, 2, 4, 8)
BUDGET = 256


class Seen(NamedTuple):
    """What a basis sees of one layer's pages and keeps of its carriers.

    outside: [Hkv] share of pages whose top direction has less than half of its square within the basis; mass_outside:
    [Hq] share of attention mass in them; carriers, carriers_outside: [Hq] share of all carriers, and of those on such
    pages, that are kept, nan where there are none.
    """

    outside: Tensor
    mass_outside: Tensor
    carriers: Tensor
    carriers_outside: Tensor


def _kept(scorer: Scorer, truth: attention.Exact, pages: Tensor, blind: Tensor) -> tuple[Tensor, Tensor]:
    """Of each head's carriers, and of those on blind pages [Hkv, N], the share that other keys' scores keep, [Hq]."""
    rows = scorer.rows
    mass = scorer.exact(pages.flatten(2, 3), PAGE)
    group, total = rows.q.shape[1] // rows.heads, truth.log_mass.shape[-1]
    chosen = attention.listed(attention.choose(mass, rows, PAGE, BUDGET), total).repeat_interleave(group, 1)
    heavy = attention.carriers(truth, rows, PAGE, BUDGET // PAGE)
    # The question's own pages are of no interest here.
    hidden = torch.nn.functional.pad(blind, (0, total - blind.shape[1])).repeat_interleave(group, 0) & heavy
    return (heavy & chosen).sum((0, 2)) / heavy.sum((0, 2)), (hidden & chosen).sum((0, 2)) / hidden.sum(
        (0, 2)
    )


def layer_rows(rows: Rows, held_out: Tensor) -> Iterator[tuple[tuple[str, str, int], Seen]]:
    """What shared bases of every rank, fitted to the context and to other text, and page-local ones see."""
    scorer, truth = Scorer(rows), attention.exact(rows, PAGE)
    pages, group = scorer.keys(PAGE), rows.q.shape[1] // rows.heads
    own = scorer.context(PAGE).float()
    full = paged(own, PAGE)
    # Mass of every full page but the first, mean over rows, [Hq, N - 1].
    mass = (truth.log_mass - truth.lse[..., None]).exp().mean(0)[:, 1 : full.shape[1]]
    for fit, keys in (("cache", own), ("held-out", held_out.float())):
        mean, basis = keys.mean(1), top_basis(centred(keys), keys.shape[-1])
        # A page's first direction about the mean that the basis has for nothing.
        top = top_basis(full - mean[:, None, None], 1)[:, :, 0]
        for rank in (r for r in SHARED_RANKS if r <= keys.shape[-1]):
            blind = (top @ basis[:, :rank].mT).square().sum(-1) < 0.5
            unseen = (mass * blind[:, 1:].repeat_interleave(group, 0)).sum(1) / mass.sum(1)
            offset, within = mean[:, None, None], basis[:, None, :rank]
            found = offset + project(pages - offset, within)
            yield (
                ("shared", fit, rank),
                Seen(blind[:, 1:].float().mean(1), unseen, *_kept(scorer, truth, found, blind)),
            )
    factors = scorer.factors(PAGE, max(LOCAL_RANKS))
    # A page's own basis holds its own first direction.
    none = torch.zeros((rows.heads, full.shape[1]), dtype=torch.bool, device=mass.device)
    for rank in LOCAL_RANKS:
        found = factors.mean[..., None, :] + factors.coef[..., :rank] @ factors.basis[..., :rank, :]
        kept = _kept(scorer, truth, found, none)
        yield ("page-local", "", rank), Seen(none.float().mean(1), torch.zeros_like(mass[:, 0]), *kept)


def on_model(size: Size) -> pd.DataFrame:
    """blind.csv: intervals over layers, heads and contexts."""
    found: dict[tuple[str, str, int], list[Seen]] = {}
    with torch.inference_mode():
        for seed in size.seeds:
            for rows, keys in zip(*size.look(seed), strict=True):
                for key, seen in layer_rows(rows, keys):
                    found.setdefault(key, []).append(seen)
    table = []
    for (name, fit, rank), parts in found.items():
        row: dict[str, Any] = {"basis": name, "fit": fit, "rank": rank}
        for measure in Seen._fields:
            values = torch.cat([getattr(part, measure) for part in parts]).double().cpu().numpy()
            row |= outputs.columns(measure, values)
        table.append(row)
    return pd.DataFrame(table)


def measure(size: Size, out: Path, trials: int) -> None:
    """Writes blind.csv and blind_sweep.csv."""
    swept = blind_sweep.sweep(trials, size.seed)
    outputs.publish(out, {"blind_sweep": swept}, device="cpu", dtype="float32")
    model, _ = contexts.enabled(size.model, size.device)
    facts = outputs.device_facts(model.device, model.dtype) | contexts.model_facts(size.model)
    frame = on_model(size)
    outputs.publish(out, {"blind": frame}, tokens=size.tokens, contexts=size.contexts, budget=BUDGET, **facts)


def main(
    number: Annotated[int, typer.Option("--contexts", help="of eight questions each")] = 1,
    tokens: Annotated[int, typer.Option(help="of a context")] = 1500,
    trials: Annotated[int, typer.Option(help="of the sweep, at every angle")] = 20,
    model: Annotated[Path | None, typer.Option(help="model directory or .gguf; SmolLM2 without")] = None,
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path, typer.Option(help="folder of tables")] = outputs.OUT,
) -> None:
    """Measures blindness."""
    measure(Size(number, tokens, (BUDGET,), False, model, device, seed), out, trials)


if __name__ == "__main__":
    outputs.run(main)
