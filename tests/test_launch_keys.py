"""The launchers ask the table with the keys that the tuner writes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.layers import Shape
from bench.operations import OPERATIONS, Inputs
from locks import SummaryFormat
from locks.kernels import attend, config, score, score_hopper, seal, summarize

SMALL = Shape("small", 128, 1, 2, 1, 64, (4,), (16,), budget=48)
FMT = SummaryFormat(rank=4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_launch_asks_with_the_tuners_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, dict[str, int]]] = []

    def tuned(device_name: str, op: str, **shape: int) -> Any:
        asked.append((device_name, op, shape))
        raise LookupError

    for module in (attend, score, score_hopper, summarize):
        monkeypatch.setattr(module, "tuned", tuned)
    x = Inputs(SMALL, FMT, 16, 0, device="cpu")
    with pytest.raises(LookupError):
        OPERATIONS[name].launch(x, None)
    assert asked == [("cpu", name, OPERATIONS[name].key(SMALL, FMT))]


def test_pages_are_sealed_with_the_launch_shape_of_summarize(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(seal, "launch_config", lambda *args: seen.append(args) or config.KernelConfig(1, 1))
    x = Inputs(SMALL, FMT, 16, 0, device="cpu")
    pointers = seal.layer_pointers([x.layer.k], [x.records])
    seal.seal(pointers, x.layer.k, x.records, x.layer.table, x.layer.lens * 0, FMT)
    assert seen == [(FMT, 1, 64, x.layer.k.device)]
