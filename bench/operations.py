"""What `bench/tune.py` tunes: each operation's launch shapes, how many programs they start, and a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.layers import PAGE, Layer, Shape
from locks import SummaryFormat, api
from locks.kernels import attend, score, score_hopper, summarize
from locks.kernels.config import KernelConfig

# Dependent reads of a program of `attend`: the page's number, its block, keys and values.
ATTEND_READS = 3
# A thread has 255, and a tile is not all that it holds.
HALF_OF_REGISTERS = 128


class Inputs:
    """One layer with records and, for `attend`, a list of pages drawn at random."""

    def __init__(self, shape: Shape, fmt: SummaryFormat, block: int, seed: int, *, device: str) -> None:
        self.fmt, self.scale = fmt, shape.D**-0.5
        self.layer = Layer(shape, block, seed, device=device)
        self.records = api.allocate_records(self.layer.k, fmt)
        if device == "cuda":
            api.summarize(self.layer.k, self.layer.table, self.layer.lens, fmt, out=self.records)
        gen = torch.Generator(device).manual_seed(seed)
        size = (shape.B, shape.Hkv, shape.budget // PAGE)
        self.ids = torch.full(size, -1, dtype=torch.int32, device=device)
        self.counts = torch.empty(size[:2], dtype=torch.int32, device=device)
        for row, tokens in enumerate(shape.lengths):
            kept = min(size[2], -(-tokens // PAGE))
            self.counts[row] = kept
            for head in range(shape.Hkv):
                drawn = torch.randperm(-(-tokens // PAGE), device=device, generator=gen)[:kept]
                self.ids[row, head, :kept] = drawn.sort().values.int()


class Operation(NamedTuple):
    """One operation.

    kernel: the jit function whose resources decide what is feasible. key: the shape as the table has it. candidates:
    launch shapes worth compiling. programs: that a launch starts, with so many of them at once. steps: dependent reads
    of a program, one after the other. nbytes: read and written. launch: a call, which is timed. result: what a call
    computes. tolerance: by which that may differ from the default's. spills: bytes that a thread may spill.
    """

    name: str
    kernel: str
    key: Callable[[Shape, SummaryFormat], dict[str, int]]
    candidates: Callable[[Shape], list[KernelConfig]]
    programs: Callable[[Shape, KernelConfig, int], int]
    steps: Callable[[Shape, KernelConfig, int], float]
    nbytes: Callable[[Shape, SummaryFormat], int]
    launch: Callable[[Inputs, KernelConfig | None], Any]
    result: Callable[[Inputs, KernelConfig | None], tuple[Tensor, ...]]
    tolerance: float
    spills: int = 0
    fits: Callable[[Shape, SummaryFormat], bool] = lambda shape, fmt: True


def _in_registers(words: int, pages: tuple[int, ...]) -> list[KernelConfig]:
    """Launch shapes whose tile, of so many 32-bit words a page, takes at most half of the registers of a thread."""
    return [
        KernelConfig(count, warps)
        for count in pages
        for warps in (1, 2, 4, 8)
        if count * words <= HALF_OF_REGISTERS * 32 * warps
    ]


def _splits(shape: Shape, config: KernelConfig) -> int:
    return -(-(shape.budget // PAGE) // config.block_n)


def _attend(x: Inputs, config: KernelConfig | None) -> tuple[Tensor, ...]:
    layer = x.layer
    return attend.attend(
        layer.q,
        layer.k,
        layer.v,
        layer.table,
        layer.lens,
        x.ids,
        x.counts,
        page=PAGE,
        scale=x.scale,
        config=config,
    )


ATTEND = Operation(
    name="attend",
    kernel="attend_kernel",
    # All that a caller knows who makes buffers for the splits.
    key=lambda shape, fmt: {"page": fmt.page, "head_dim": shape.D},
    # Keys and values, 16 bits each.
    candidates=lambda shape: _in_registers(PAGE * shape.D, (2, 4, 8, 16, 32)),
    programs=lambda shape, config, _: _splits(shape, config) * shape.Hkv * shape.B,
    # The merge reads 16 splits at a time.
    steps=lambda shape, config, _: ATTEND_READS + -(-_splits(shape, config) // 16),
    nbytes=lambda shape, _: shape.kept_bytes,
    launch=_attend,
    result=_attend,
    tolerance=2e-2,
)


def _score(x: Inputs, config: KernelConfig | None, exact: bool = True) -> tuple[Tensor, ...]:
    layer = x.layer
    return score.score(
        layer.q,
        x.records,
        layer.table,
        layer.lens,
        x.fmt,
        scale=x.scale,
        window_pages=1,
        exact=exact,
        config=config,
    )


SCORE = Operation(
    name="score",
    kernel="score_kernel",
    key=lambda shape, fmt: {
        "page": fmt.page,
        "rank": fmt.rank,
        "group": shape.Hq // shape.Hkv,
        "head_dim": shape.D,
    },
    # Logits, of at least 16 heads.
    candidates=lambda shape: _in_registers(PAGE * max(16, shape.Hq // shape.Hkv), (16, 32, 64)),
    programs=lambda shape, config, _: -(-shape.T // (PAGE * score.CHUNK)) * shape.Hkv * shape.B,
    # Block numbers, then the records.
    steps=lambda shape, config, _: 2.0 * (score.CHUNK // config.block_n),
    nbytes=lambda shape, fmt: shape.record_bytes(fmt) + shape.mass_bytes,
    launch=_score,
    result=_score,
    tolerance=1e-4,
)


def _score_hopper(x: Inputs, config: KernelConfig | None) -> tuple[Tensor, ...]:
    return _score(x, config, exact=False)


# Chunks stay as they are: they decide the order of the total's additions.
SCORE_HOPPER = Operation(
    name="score_hopper",
    kernel="score_hopper_kernel",
    key=lambda shape, fmt: {
        "rank": fmt.rank,
        "group": shape.Hq // shape.Hkv,
        "head_dim": shape.D,
    },
    candidates=lambda shape: [
        KernelConfig(8, 1, registers=registers) for registers in (96, 104, 112, 120, 128, 144, 168, 200)
    ],
    programs=lambda shape, config, at_once: min(at_once, shape.scored_pages // 8 * shape.Hkv),
    # Every step of 8 pages waits for what was asked for a step before.
    steps=lambda shape, config, at_once: max(1.0, shape.scored_pages / 8 * shape.Hkv / at_once),
    nbytes=lambda shape, fmt: shape.record_bytes(fmt) + shape.mass_bytes,
    launch=_score_hopper,
    result=_score_hopper,
    tolerance=2e-2,
    spills=64,
    fits=lambda shape, fmt: score_hopper.shape_fits(fmt, shape.D, shape.Hq // shape.Hkv),
)


def _summarize(x: Inputs, config: KernelConfig | None) -> Tensor:
    layer = x.layer
    return summarize.summarize(
        layer.k, layer.table, layer.lens, x.fmt, start=None, max_new_pages=None, out=x.records, config=config
    )


def _summarized(x: Inputs, config: KernelConfig | None) -> tuple[Tensor, ...]:
    """What the records say: the codes of sums in another order may differ."""
    layer, records = x.layer, _summarize(x, config)
    return (api.page_mass(layer.q, records, layer.table, layer.lens, x.fmt).log_mass,)


# One page a program: `seal` takes the same launch shape, so that both make the same bits, and seals single pages.
SUMMARIZE = Operation(
    name="summarize",
    kernel="summarize_kernel",
    key=lambda shape, fmt: {
        "page": fmt.page,
        "rank": fmt.rank,
        "head_dim": shape.D,
    },
    candidates=lambda shape: [KernelConfig(1, warps) for warps in (1, 2, 4, 8)],
    programs=lambda shape, config, _: shape.scored_pages * shape.Hkv,
    steps=lambda shape, config, _: 2,
    nbytes=lambda shape, fmt: shape.kv_bytes // 2 + shape.record_bytes(fmt),
    launch=_summarize,
    result=_summarized,
    tolerance=2e-2,
)

OPERATIONS = {one.name: one for one in (ATTEND, SCORE, SCORE_HOPPER, SUMMARIZE)}
