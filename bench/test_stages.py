"""A benchmark of every stage on a GPU, each behind its gate: pytest bench/test_stages.py

pytest-benchmark times replays of one graph of all layers' calls, synchronised; `extra_info` has the device time of one
call, as in the rows of bench/attention.py.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.attention import Stages, chosen_shapes, dense, dense_gate, gate, timed
from bench.layers import Layer
from bench.timing import device_times
from locks import SummaryFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

# One row and many, both widths of a head.
SHAPES = [*chosen_shapes("glm-4-9b-1m", "32K"), *chosen_shapes("smollm2-135m", "8K")]
STAGES = ("score", "select", "attend", "merge", "chain", "summarize", "seal")


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape.model}-{shape.T}-{shape.B}")
def stages(request: pytest.FixtureRequest) -> Stages:
    """Those of a shape, gated."""
    shape = request.param
    layers = [Layer(shape, shape.blocks[0], seed) for seed in range(shape.layers)]
    found = Stages(shape, layers, SummaryFormat(rank=4))
    gate(shape, layers[0], found.records[0], found.fmt)
    return found


@pytest.mark.parametrize("op", [*STAGES, "dense"])
def test_stage(op: str, stages: Stages, benchmark: BenchmarkFixture) -> None:
    shape, layers = stages.shape, stages.layers
    if op == "dense":
        stage = dense(shape, layers)
        dense_gate(shape, layers[0], op, stage.calls[0]().out)
    else:
        stage = getattr(stages, op)()
    times = device_times(stage.calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in stage.calls:
            call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.group = f"{shape.model}, T {shape.T}, B {shape.B}"
    benchmark.extra_info |= {"impl": stage.impl, "calls": len(stage.calls), **timed(times, stage.nbytes)}
    benchmark.pedantic(replay, rounds=50, warmup_rounds=2)
    assert 0 < times[0] <= times[1] <= times[2]
