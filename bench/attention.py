"""Device time of every stage of a decode step and of the whole, beside dense attention: `make bench` on a GPU machine.

    python bench/attention.py --only glm-4-9b-1m --out bench/results/h200/attention.json

Each shape first passes its gate: pages and outputs as PyTorch's on the same records. Times are graph replays over
layers whose buffers exceed the L2 cache. Rows are written as they are measured.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from locks import SummaryFormat, api, torch_impl, triton_impl
from locks.baselines import Quest
from locks.kernels import score_hopper
from locks.kernels import seal as seal_op

BUDGET = 2048
# Layers whose pages are sealed in one launch.
SEALED = 40


@dataclass(frozen=True)
class Shape:
    """A model's attention at one context length and batch."""

    model: str
    T: int
    B: int
    Hq: int
    Hkv: int
    D: int
    ranks: tuple[int, ...]
    blocks: tuple[int, ...] = (64,)
    budget: int = BUDGET

    @property
    def kv_bytes(self) -> int:
        """K and V of one layer."""
        return 4 * self.B * self.T * self.Hkv * self.D


SHAPES = [
    Shape("glm-4-9b-1m", 2**17, 1, 32, 4, 128, (8, 4), (64, 16)),
    Shape("glm-4-9b-1m", 2**20, 1, 32, 4, 128, (8, 4), (64, 16)),
    Shape("glm-4-9b-1m", 2**11, 1, 32, 4, 128, (4,)),
    Shape("llama-3.1-8b", 2**17, 1, 32, 8, 128, (8,)),
    Shape("llama-3.1-8b", 2**17, 16, 32, 8, 128, (8,)),
    Shape("qwen3-4b", 2**15, 32, 32, 8, 128, (4,)),
    Shape("smollm2-135m", 2**13, 64, 9, 3, 64, (4,)),
]


class Layer:
    """One layer's paged cache, shuffled over its blocks, with a query."""

    def __init__(self, shape: Shape, block: int, seed: int) -> None:
        gen = torch.Generator("cuda").manual_seed(seed)
        per_row = shape.T // block
        size = (shape.B * per_row, shape.Hkv, block, shape.D)
        self.k, self.v = (
            torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=gen) for _ in range(2)
        )
        self.table = torch.randperm(size[0], device="cuda", generator=gen).int().view(shape.B, per_row)
        self.lens = torch.full((shape.B,), shape.T, dtype=torch.int32, device="cuda")
        self.q = torch.randn(shape.B, shape.Hq, shape.D, device="cuda", dtype=torch.bfloat16, generator=gen)

    def records(self, fmt: SummaryFormat) -> Tensor:
        out = api.allocate_records(self.k, fmt)
        return api.summarize(self.k, self.table, self.lens, fmt, out=out)

    def contiguous(self, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """The same memory as q [B, Hq, 1, D] and keys and values [B, Hkv, T, D], for PyTorch's kernels."""
        size = (shape.B, shape.Hkv, shape.T, shape.D)
        return self.q[:, :, None], self.k.view(size), self.v.view(size)


def device_times(calls: list[Callable[[], Any]], *, seconds: float = 0.25) -> tuple[float, float, float]:
    """p20, p50 and p80 of the device time of one call, µs: replays of a graph of all calls, each in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Short calls are repeated so that a replay's own start does not show.
    repeats = max(1, 8 // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    times: list[float] = []
    for _ in range(2):
        graph.replay()
    while sum(times) < seconds * 1e6 or len(times) < 7:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    quintiles = statistics.quantiles(times, n=5)
    count = repeats * len(calls)
    return quintiles[0] / count, statistics.median(times) / count, quintiles[3] / count


def read_bandwidth() -> float:
    """GB/s of reading 4 GB once."""
    x = torch.zeros(2**30, dtype=torch.int32, device="cuda")
    return 4 * x.numel() / device_times([lambda: torch.amax(x)])[1] / 1e3


def facts() -> dict[str, Any]:
    """What every row says of the machine and the code."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "GPU": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


class Report:
    """Rows, written after each one."""

    def __init__(self, out: Path, commit: str) -> None:
        self.out, self.facts, self.rows = out, facts(), []
        if commit:
            self.facts["commit"] = commit
        self.bandwidth = read_bandwidth()

    def add(
        self, shape: Shape, op: str, impl: str, calls: list[Callable[[], Any]], nbytes: float, **more: Any
    ) -> None:
        p20, p50, p80 = device_times(calls)
        row = {
            "op": op,
            "impl": impl,
            "model": shape.model,
            "T": shape.T,
            "B": shape.B,
            "Hq": shape.Hq,
            "Hkv": shape.Hkv,
            "D": shape.D,
            "P": 16,
            "budget": shape.budget,
            "dtype": "bfloat16",
            **more,
            "p20_us": round(p20, 3),
            "p50_us": round(p50, 3),
            "p80_us": round(p80, 3),
            "bytes": int(nbytes),
            "gb_per_s": round(nbytes / p50 / 1e3, 1),
            "share_of_read": round(nbytes / p50 / 1e3 / self.bandwidth, 3),
            **self.facts,
        }
        self.rows.append(row)
        typer.echo(
            f"{shape.model:13s} T {shape.T:8d} B {shape.B:3d} R {more.get('R') or '-'!s:3s} {more['layout']:12s} "
            f"{op:10s} {impl:12s} {p50:9.2f} us {row['gb_per_s']:7.0f} GB/s"
        )
        self.write()

    def write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        beside = self.out.with_suffix(".unfinished")
        beside.write_text(
            json.dumps({"read_gb_per_s": round(self.bandwidth, 1), "rows": self.rows}, indent=1) + "\n"
        )
        beside.replace(self.out)


def gate(shape: Shape, layer: Layer, records: Tensor, fmt: SummaryFormat) -> None:
    """Raises where scores, pages or the output are not PyTorch's."""
    args = (layer.q[:1], records, layer.table[:1], layer.lens[:1], fmt)
    options = {"scale": shape.D**-0.5, "window_pages": 1}
    want = torch_impl.page_mass(*args, exact=True, **options)
    live = want.log_mass.isfinite()
    for exact in (True, False):
        got = triton_impl.page_mass(*args, exact=exact, **options)
        error = float((got.log_mass - want.log_mass)[live].abs().max()) if live.any() else 0.0
        if error > (1e-4 if exact else 2e-2) or not torch.equal(live, got.log_mass.isfinite()):
            raise RuntimeError(f"score, exact={exact}: off by {error} of PyTorch's")
    share = triton_impl.page_share(got, shape.Hkv)
    chosen = {"page": 16, "budget": shape.budget, "window_pages": 1}
    pages = triton_impl.select_pages(share, args[3], **chosen)
    if not all(map(torch.equal, pages, torch_impl.select_pages(share, args[3], **chosen))):
        raise RuntimeError("select: other pages than PyTorch's")
    if not all(map(torch.equal, pages, triton_impl.select_from_mass(got, args[3], shape.Hkv, **chosen))):
        raise RuntimeError("select: other pages than those of the same shares")
    step = (layer.q[:1], layer.k, layer.v, layer.table[:1], layer.lens[:1], pages)
    mine, plain = (
        one.sparse_attention(*step, page=16, scale=shape.D**-0.5) for one in (triton_impl, torch_impl)
    )
    if not torch.allclose(mine.out, plain.out, rtol=2e-2, atol=2e-3):
        raise RuntimeError("attend: another output than PyTorch's")


def measure_dense(report: Report, shape: Shape, layers: list[Layer], block: int) -> None:
    """Dense attention: our split kernel over all pages, and PyTorch's on contiguous memory."""
    pages = shape.T // 16
    every = torch.arange(pages, dtype=torch.int32, device="cuda").expand(shape.B, shape.Hkv, -1).contiguous()
    count = torch.full((shape.B, shape.Hkv), pages, dtype=torch.int32, device="cuda")
    whole = api.PageList(every, count)
    scale = shape.D**-0.5
    more = {"R": None, "bits": None, "config": "", "layout": f"block {block}"}

    def ours(x: Layer) -> Callable[[], Any]:
        return lambda: triton_impl.sparse_attention(
            x.q, x.k, x.v, x.table, x.lens, whole, page=16, scale=scale
        )

    report.add(shape, "dense", "locks", [ours(x) for x in layers], shape.kv_bytes, **more)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def theirs(x: Layer, backend: SDPBackend = backend) -> Callable[[], Any]:
            q, k, v = x.contiguous(shape)

            def call() -> Tensor:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

            return call

        # Not every backend knows every shape.
        with contextlib.suppress(RuntimeError):
            name = f"torch {backend.name.split('_')[0].lower()}"
            report.add(
                shape,
                "dense",
                name,
                [theirs(x) for x in layers],
                shape.kv_bytes,
                **{**more, "layout": "contiguous"},
            )


def measure_rank(report: Report, shape: Shape, layers: list[Layer], block: int, rank: int) -> None:
    """Every stage of a step, and the step."""
    fmt, scale = SummaryFormat(rank=rank), shape.D**-0.5
    records = [x.records(fmt) for x in layers]
    gate(shape, layers[0], records[0], fmt)
    more = {
        "R": rank,
        "bits": [fmt.mean_bits, fmt.basis_bits, fmt.coef_bits],
        "config": "",
        "layout": f"block {block}, shuffled",
    }
    pages, group = shape.T // 16, shape.Hq // shape.Hkv
    record_bytes = records[0].numel()
    mass_bytes = 4 * shape.B * shape.Hq * pages
    kept = min(shape.budget, shape.T)
    page_bytes = shape.kv_bytes * kept // shape.T
    masses = [
        triton_impl.page_mass(x.q, r, x.table, x.lens, fmt, scale=scale, window_pages=1, exact=False)
        for x, r in zip(layers, records, strict=True)
    ]
    chosen = {"page": 16, "budget": shape.budget, "window_pages": 1}
    lists = [
        triton_impl.select_from_mass(m, x.lens, shape.Hkv, **chosen)
        for x, m in zip(layers, masses, strict=True)
    ]

    def score(x: Layer, r: Tensor, exact: bool) -> Callable[[], Any]:
        return lambda: triton_impl.page_mass(
            x.q, r, x.table, x.lens, fmt, scale=scale, window_pages=1, exact=exact
        )

    def select(x: Layer, m: Any) -> Callable[[], Any]:
        return lambda: triton_impl.select_from_mass(m, x.lens, shape.Hkv, **chosen)

    def attend(x: Layer, ids: Any) -> Callable[[], Any]:
        return lambda: triton_impl.sparse_attention(x.q, x.k, x.v, x.table, x.lens, ids, page=16, scale=scale)

    def step(x: Layer, r: Tensor) -> Callable[[], Any]:
        return lambda: api.decode(x.q, x.k, x.v, r, x.table, x.lens, fmt, budget=shape.budget)

    def summarize(x: Layer, r: Tensor) -> Callable[[], Any]:
        return lambda: api.summarize(x.k, x.table, x.lens, fmt, out=r)

    def seal(full: bool) -> Callable[[], Any]:
        first, lens = layers[0], layers[0].lens if full else layers[0].lens - 1
        return lambda: seal_op.seal(pointers, first.k, records[0], first.table, lens, fmt)

    # A model's layers, here the same few again and again.
    pointers = seal_op.layer_pointers([x.k for x in layers], records).repeat(SEALED, 1)[:SEALED]
    both = list(zip(layers, records, strict=True))
    if score_hopper.shape_fits(fmt, shape.D, group):
        report.add(
            shape,
            "score",
            "hopper",
            [score(*one, False) for one in both],
            record_bytes + mass_bytes,
            **more,
        )
    report.add(
        shape, "score", "general", [score(*one, True) for one in both], record_bytes + mass_bytes, **more
    )
    report.add(
        shape,
        "select",
        "locks",
        [select(*one) for one in zip(layers, masses, strict=True)],
        mass_bytes,
        **more,
    )
    report.add(
        shape,
        "attend",
        "locks",
        [attend(*one) for one in zip(layers, lists, strict=True)],
        page_bytes,
        **more,
    )
    report.add(
        shape,
        "chain",
        "locks",
        [step(*one) for one in both],
        record_bytes + mass_bytes + page_bytes,
        **more,
    )
    if block == shape.blocks[0]:
        report.add(
            shape,
            "summarize",
            "locks",
            [summarize(*one) for one in both],
            shape.kv_bytes // 2 + record_bytes,
            **more,
        )
        for full in (True, False):
            report.add(
                shape,
                "seal",
                f"{SEALED} layers, {'page fills' if full else 'none fills'}",
                [seal(full)],
                # A page's keys, and its record.
                SEALED * shape.B * (shape.kv_bytes // shape.T * 8 + fmt.layout(shape.D).nbytes) * full,
                **more,
            )


def measure_quest(report: Report, shape: Shape, layers: list[Layer], block: int) -> None:
    """Quest's bound at pages of 16, by PyTorch: the peer that quality is compared with."""
    quest = Quest(16)
    states = [quest.allocate(x.k) for x in layers]
    for x, state in zip(layers, states, strict=True):
        quest.seal(state, x.k, x.table, x.lens)

    def score(x: Layer, state: Any) -> Callable[[], Any]:
        return lambda: quest.page_mass(x.q, state, x.k, x.table, x.lens, scale=shape.D**-0.5)

    nbytes = quest.scan_bytes(shape.D, shape.T // 16) * shape.Hkv * shape.B
    calls = [score(*one) for one in zip(layers, states, strict=True)]
    report.add(
        shape,
        "score",
        "quest, torch",
        calls,
        nbytes,
        R=None,
        bits=None,
        config="",
        layout=f"block {block}, shuffled",
    )


def main(
    only: Annotated[str, typer.Option(help="models to measure, by commas; all if empty")] = "",
    tokens: Annotated[str, typer.Option(help="context lengths to measure, by commas; all if empty")] = "",
    quest: Annotated[bool, typer.Option(help="Quest's scoring beside ours")] = False,
    commit: Annotated[str, typer.Option(help="to note for a copy of the tree; else what git says")] = "",
    out: Annotated[Path, typer.Option(help="file to write")] = Path("bench/results/h200/attention.json"),
) -> None:
    """Measures every shape and writes one JSON file."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a CUDA device, and torch sees none")
    report = Report(out, commit)
    for shape in SHAPES:
        if (only and shape.model not in only.split(",")) or (
            tokens and str(shape.T) not in tokens.split(",")
        ):
            continue
        # Together at least four times the L2 cache, or all that fits.
        count = max(2, min(16, int(2**28 // shape.kv_bytes) + 1, int(60e9 // shape.kv_bytes)))
        for block in shape.blocks:
            layers = [Layer(shape, block, seed) for seed in range(count)]
            if block == shape.blocks[0]:
                measure_dense(report, shape, layers, block)
            for rank in shape.ranks:
                measure_rank(report, shape, layers, block, rank)
            if quest and block == shape.blocks[0]:
                measure_quest(report, shape, layers, block)
            del layers
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
