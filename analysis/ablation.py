"""From what each layer of each context keeps to a table with intervals over questions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import outputs
import pandas as pd
import torch
from attention import MEASURES
from torch import Tensor

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
