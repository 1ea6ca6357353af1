"""From what each layer of each context keeps to a table with intervals over questions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contexts
import numpy as np
import outputs
import pandas as pd
import torch
from attention import MEASURES
from contexts import Rows
from torch import Tensor

if TYPE_CHECKING:
    # At run time selection imports from here.
    from selection import Size

# Questions of a context, of which each has the same number of rows, its digits.
QUESTIONS = 8
# The cells that name a variant, to its `attention.kept`.
Ablation = dict[tuple[Hashable, ...], dict[str, Tensor]]


def by_question(layers: Sequence[Tensor]) -> np.ndarray:
    """Layers' numbers [rows, ...] as each question's mean over layers and digits; nan says nothing."""
    values = torch.stack(list(layers)).unflatten(1, (QUESTIONS, -1))
    return values.double().nanmean((0, 2)).cpu().numpy()


def collect(every: Sequence[Sequence[Ablation]], names: tuple[str, ...]) -> pd.DataFrame:
    """One row a variant, from a list of layers a context."""
    rows = []
    for key in every[0][0]:
        row: dict[str, Any] = dict(zip(names, key, strict=True))
        parts = [
            by_question([torch.stack([found[key][name] for name in MEASURES], -1) for found in layers])
            for layers in every
        ]
        values = np.concatenate(parts)
        rows.append(row | {"questions": len(values)} | outputs.cells(MEASURES, values))
    return pd.DataFrame(rows)


def measure(
    table: str, names: tuple[str, ...], cells: Callable[[Rows, Size], Ablation], size: Size, out: Path
) -> pd.DataFrame:
    """Writes the table of what `cells` finds in every layer of every context; `names` are those of its keys."""
    with torch.inference_mode():
        every = [[cells(rows, size) for rows in size.look(seed)[0]] for seed in size.seeds]
    frame = collect(every, names)
    model, _ = contexts.enabled(size.model, size.device)
    facts = outputs.device_facts(model.device, model.dtype) | contexts.model_facts(size.model)
    outputs.publish(out, {table: frame}, tokens=size.tokens, contexts=size.contexts, **facts)
    return frame
