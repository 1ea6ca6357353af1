"""The rank of keys, globally and by page, and what page-local and shared bases keep of them.

    python analysis/key_rank.py --keys analysis/out/keys --held-out analysis/out/held-out --out analysis/out

Reads what capture_keys.py wrote, a layer at a time. Writes rank.csv (entropy rank, stable rank, dimensions for 90, 95
and 99 % of the energy, a layer and head a row), bases.csv (page-local against shared at equal rank and at equal bytes
and bits) and angles.csv (principal angles between pages' subspaces, and to the shared one).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import outputs
import pandas as pd
import torch
import typer
from capture_keys import Capture
from outputs import InputError
from reconstruct import Fitted, shared_keys, stored_keys
from spectra import (
    MEASURES,
    centred,
    energies,
    logit_error,
    page_factors,
    paged,
    principal_angles,
    project,
    top_basis,
)
from torch import Tensor
from ways import COARSE_BASIS, DEFAULT, EIGHT, make_format

PAGES = (16, 32, 64, 128)
RANKS = (1, 2, 4, 8, 16)
BITS = (DEFAULT, COARSE_BASIS, EIGHT)
RIVALS = ("shared", "page mean + shared")
GAINS = ("energy", "rival_energy", "energy_gain", "error_nats", "rival_error_nats", "error_gain")
# Sample rows of pairs of pages.
PAIRS = 200


def rank_rows(keys: Tensor, layer: int, kind: str) -> Iterator[dict[str, Any]]:
    """Every measure of one layer's keys [Hkv, T, D]: all of them as one, and the mean over pages with its interval."""
    for page in (None, *PAGES):
        if page is not None and keys.shape[1] < 2 * page:
            continue
        for less_mean in (False, True):
            # A GPU takes small eigenproblems one by one.
            x = keys.double().cpu()
            x = x[:, None] if page is None else paged(x, page)
            spectrum = energies(centred(x) if less_mean else x)
            # [measures, Hkv, N]
            values = torch.stack([measure(spectrum).double() for measure in MEASURES.values()])
            mean, low, high = outputs.interval(values.numpy())
            for head in range(keys.shape[0]):
                cells = {
                    "keys": kind,
                    "layer": layer,
                    "head": head,
                    "page": page or "all",
                    "centred": less_mean,
                }
                for i, name in enumerate(MEASURES):
                    cells |= {name: mean[i, head], f"{name}_low": low[i, head], f"{name}_high": high[i, head]}
                yield cells


def _quality(keys: Tensor, found: Tensor, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Energy captured and logit error of reconstructed pages [Hkv, N, P, D], [Hkv] each.

    Energy is that of the keys about their mean over the whole cache, which either side has for nothing.
    """
    residual = (keys - found).flatten(1, 2)
    energy = centred(keys.flatten(1, 2)).square().sum((1, 2))
    return 1 - residual.square().sum((1, 2)) / energy, logit_error(residual, queries, scale)


def compare(keys: Tensor, held_out: Tensor, queries: Tensor, scale: float) -> dict[tuple[Any, ...], Tensor]:
    """Both sides' energy and logit error, [4, Hkv], for every comparison of one layer.

    Keys: comparison, rival, fit, page, rank, bits, the rival's rank, bytes a page of either.
    """
    heads, _, width = keys.shape
    queries = queries.unflatten(0, (heads, -1)).flatten(1, 2)
    found: dict[tuple[Any, ...], Tensor] = {}
    for page in (16, 32, 64):
        pages = paged(keys, page)
        fits = {"cache": Fitted(pages), "held-out": Fitted(paged(held_out, page))}
        factors = page_factors(pages, min(16, page - 1))
        own_mean = pages.mean(-2, keepdim=True)
        for rank in (r for r in RANKS if r < page):
            local = own_mean + factors.coef[..., :rank] @ factors.basis[..., :rank, :]
            mine = _quality(pages, local, queries, scale)
            for fit, fitted in fits.items():
                mean, basis = fitted.mean[:, None, None], fitted.basis[:, None, :rank]
                within = fitted.within[:, None, :rank]
                rivals = (mean + project(pages - mean, basis), own_mean + project(pages - own_mean, within))
                for rival, other in zip(RIVALS, rivals, strict=True):
                    key = ("rank", rival, fit, page, rank, "", rank, "", "")
                    found[key] = torch.stack([*mine, *_quality(pages, other, queries, scale)])
            for bits in BITS:
                fmt = make_format(page, rank, bits)
                mine = _quality(pages, stored_keys(pages, factors, fmt), queries, scale)
                text, size = "/".join(map(str, bits)), fmt.layout(width).nbytes
                for fit, fitted in fits.items():
                    for rival in RIVALS:
                        other = shared_keys(pages, fitted, fmt, page_mean=rival != "shared")
                        key = ("bytes", rival, fit, page, rank, text, other.rank, size, other.nbytes)
                        theirs = _quality(pages, other.keys, queries, scale)
                        found[key] = torch.stack([*mine, *theirs])
    return found


def _verdict(low: float, high: float) -> str:
    """Whose the difference is: page-local's where the whole interval is above 0."""
    return "win" if low > 0 else "loss" if high < 0 else "even"


def bases_table(layers: list[dict[tuple[Any, ...], Tensor]]) -> pd.DataFrame:
    """One row a comparison, intervals over layers and heads, paired.

    energy_gain: page-local less rival; error_gain: log of the rival's logit error over page-local's.
    """
    names = (
        "comparison",
        "rival",
        "fit",
        "page",
        "rank",
        "bits",
        "rival_rank",
        "bytes_a_page",
        "rival_bytes",
    )
    rows = []
    for key in layers[0]:
        # [4, layers * heads]
        values = torch.cat([found[key] for found in layers], 1).double().cpu().numpy()
        row: dict[str, Any] = dict(zip(names, key, strict=True))
        measured = [
            values[0],
            values[2],
            values[0] - values[2],
            values[1],
            values[3],
            np.log(values[3] / values[1]),
        ]
        row |= outputs.cells(GAINS, np.stack(measured, -1))
        for name in ("energy", "error"):
            row[f"{name}_verdict"] = _verdict(row[f"{name}_gain_low"], row[f"{name}_gain_high"])
        rows.append(row)
    return pd.DataFrame(rows).sort_values(list(names[:6]), kind="stable", ignore_index=True)


def angles(keys: Tensor, generator: torch.Generator) -> dict[tuple[Any, ...], Tensor]:
    """Mean square cosine, smallest and largest angle in degrees, [3, Hkv], of every kind of pair of one layer."""
    found: dict[tuple[Any, ...], Tensor] = {}
    # A GPU takes small singular value problems one by one.
    keys = keys.double().cpu()
    width = keys.shape[-1]
    shared = top_basis(centred(keys), width)
    for page in (16, 64):
        pages = paged(keys, page)
        count = pages.shape[1]
        first = torch.randint(count - 1, (PAIRS,), generator=generator)
        other = (first + torch.randint(1, count, (PAIRS,), generator=generator)) % count
        every = top_basis(centred(pages), 8)
        for rank in (2, 4, 8):
            own = every[:, :, :rank]
            fmt = make_format(page, rank)
            wide = Fitted.matching_rank(fmt, width)
            pairs = {
                ("next page", rank): (own[:, first], own[:, first + 1]),
                ("another page", rank): (own[:, first], own[:, other]),
                ("shared, equal rank", rank): (
                    own[:, first],
                    shared[:, None, :rank].expand(-1, PAIRS, -1, -1),
                ),
                ("shared, equal bytes", wide): (
                    own[:, first],
                    shared[:, None, :wide].expand(-1, PAIRS, -1, -1),
                ),
            }
            for (kind, size), (a, b) in pairs.items():
                angle = principal_angles(a, b)
                degrees = angle.rad2deg()
                values = (angle.cos().square().mean(-1), degrees[..., 0], degrees[..., -1])
                found[page, rank, kind, size, size / width] = torch.stack([v.mean(-1) for v in values])
    return found


def angles_table(layers: list[dict[tuple[Any, ...], Tensor]]) -> pd.DataFrame:
    """One row a kind of pair, intervals over layers and heads; random subspaces overlap by other_rank / D."""
    rows = []
    for key in layers[0]:
        values = torch.cat([found[key] for found in layers], 1).numpy()
        row = dict(zip(("page", "rank", "pair", "other_rank", "random_overlap"), key, strict=True))
        rows.append(row | outputs.cells(("overlap", "smallest_degrees", "largest_degrees"), values.T))
    return pd.DataFrame(rows)


def measure(keys: Path, held_out: Path, out: Path, device: str = "cpu", seed: int = 0) -> None:
    """Writes rank.csv, bases.csv and angles.csv."""
    main_keys, other = Capture(keys), Capture(held_out)
    if main_keys.manifest["model"] != other.manifest["model"]:
        raise InputError(
            f"held_out: expected keys of {main_keys.manifest['model']}, got {other.manifest['model']}"
        )
    generator = torch.Generator().manual_seed(seed)
    ranks, bases, turned = [], [], []
    for layer in range(main_keys.layers):
        after = main_keys.read(layer, "keys", device)
        ranks += rank_rows(after, layer, "after RoPE")
        ranks += rank_rows(main_keys.read(layer, "keys_before", device), layer, "before RoPE")
        queries = main_keys.read(layer, "queries", device)
        bases.append(compare(after, other.read(layer, "keys", device), queries, main_keys.scale))
        turned.append(angles(after, generator))
    frames = {"rank": pd.DataFrame(ranks), "bases": bases_table(bases), "angles": angles_table(turned)}
    facts = outputs.device_facts(torch.device(device), torch.float32) | {"keys": main_keys.manifest}
    outputs.publish(out, frames, **facts)


def main(
    keys: Annotated[Path, typer.Option(help="folder of capture_keys.py")] = outputs.OUT / "keys",
    held_out: Annotated[Path, typer.Option(help="the same of other text")] = outputs.OUT / "held-out",
    out: Annotated[Path, typer.Option(help="folder of tables")] = outputs.OUT,
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option(help="of the pairs of pages")] = 0,
) -> None:
    """Measures ranks, bases and angles."""
    measure(keys, held_out, out, device, seed)


if __name__ == "__main__":
    outputs.run(main)
