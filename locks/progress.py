"""Progress bars on standard error, for what takes longer than a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from tqdm import tqdm

from locks.models import num_layers

# Seconds before a bar shows.
DELAY = 0.5


def bar(total: int, description: str, unit: str) -> tqdm:
    """A bar of `total` steps."""
    return tqdm(total=total, desc=description, unit=unit, delay=DELAY, leave=False)


@contextlib.contextmanager
def layers(model: Any, description: str) -> Iterator[None]:
    """A bar that steps as the first forward pass of a transformers model leaves each decoder layer."""
    count = num_layers(model.config)
    stack = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    with bar(count, description, "layer") as shown:

        def step(*_: Any) -> None:
            if shown.n < count:
                shown.update()
            if shown.n == count:
                shown.close()

        hooks = [layer.register_forward_hook(step) for layer in stack]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
