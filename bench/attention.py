"""Device time of every stage of a decode step and of the whole, beside dense attention and peers: `make bench`.

    python bench/attention.py --only glm-4-9b-1m --contexts 128K,1M --minutes 10 --out bench/results/h200/attention.json

Each shape first passes its gate: pages and outputs as PyTorch's on the same records. Times are graph replays over
layers whose buffers exceed the L2 cache. Rows are written as they are measured.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import peers
from bench.layers import PAGE, SHAPES, Layer, Shape
from bench.timing import device_times, facts, read_bandwidth
from locks import SummaryFormat, api, torch_impl, triton_impl
from locks.baselines import Quest
from locks.kernels import attend as attend_op
from locks.kernels import score_hopper
from locks.kernels import seal as seal_op
from locks.types import PageMass

# Layers whose pages are sealed in one launch.
SEALED = 40
# Our own dense attention keeps a partial output for every 8 pages of the longest row; beyond this it is left out.
MAX_PARTIAL_BYTES = 4e9
# What tells rows apart: a later run's row takes the place of an equal one.
IDENTITY = ("op", "impl", "model", "T", "B", "lengths", "R", "bits", "layout")

Calls = list[Callable[[], Any]]


class Report:
    """Rows, written after each one; `kept` are those of an earlier run."""

    def __init__(
        self,
        out: Path,
        bandwidth: float,
        machine: dict[str, Any],
        timer: Callable[[Calls], tuple[float, float, float]] = device_times,
        kept: list[dict[str, Any]] | None = None,
    ) -> None:
        self.out, self.bandwidth, self.machine, self.timer = out, bandwidth, machine, timer
        self.kept, self.rows = kept or [], []

    def add(self, shape: Shape, op: str, impl: str, calls: Calls, nbytes: float, **more: Any) -> None:
        p20, p50, p80 = self.timer(calls)
        row = {
            "op": op,
            "impl": impl,
            "model": shape.model,
            "T": shape.T,
            "B": shape.B,
            "lengths": shape.described,
            "Hq": shape.Hq,
            "Hkv": shape.Hkv,
            "D": shape.D,
            "P": PAGE,
            "budget": shape.budget,
            "dtype": "bfloat16",
            "R": None,
            "bits": None,
            "config": "",
            **more,
            "p20_us": round(p20, 3),
            "p50_us": round(p50, 3),
            "p80_us": round(p80, 3),
            "bytes": int(nbytes),
            "gb_per_s": round(nbytes / p50 / 1e3, 1),
            "share_of_read": round(nbytes / p50 / 1e3 / self.bandwidth, 3),
            **self.machine,
        }
        self.rows.append(row)
        typer.echo(
            f"{shape.model:13s} T {shape.T:8d} B {shape.B:3d} R {row['R'] or '-'!s:3s} {row['layout']:19s} "
            f"{op:10s} {impl:12s} {p50:9.2f} us {row['gb_per_s']:7.0f} GB/s"
        )
        self.write()

    def write(self) -> None:
        measured = {_identity(row) for row in self.rows}
        rows = [row for row in self.kept if _identity(row) not in measured] + self.rows
        self.out.parent.mkdir(parents=True, exist_ok=True)
        beside = self.out.with_suffix(".unfinished")
        beside.write_text(
            json.dumps({"read_gb_per_s": round(self.bandwidth, 1), "rows": rows}, indent=1) + "\n"
        )
        beside.replace(self.out)


def _identity(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row.get(name, "equal" if name == "lengths" else None)) for name in IDENTITY)


def _compare(name: str, got: PageMass, want: PageMass, most: float) -> None:
    live = want.log_mass.isfinite()
    error = float((got.log_mass - want.log_mass)[live].abs().max()) if live.any() else 0.0
    if error > most or not torch.equal(live, got.log_mass.isfinite()):
        raise RuntimeError(f"{name}: off by {error} of PyTorch's")


def gate(shape: Shape, layer: Layer, records: Tensor, fmt: SummaryFormat) -> None:
    """Raises where scores, pages or the output of the first row are not PyTorch's."""
    q, table, lens = layer.row(0)
    options = {"scale": shape.D**-0.5, "window_pages": 1}
    want = torch_impl.page_mass(q, records, table, lens, fmt, exact=True, **options)
    for exact, most in ((True, 1e-4), (False, 2e-2)):
        got = triton_impl.page_mass(q, records, table, lens, fmt, exact=exact, **options)
        _compare(f"score, exact={exact}", got, want, most)
    got = triton_impl.page_mass(q, records, table, lens, fmt, exact=False, **options)
    share = triton_impl.page_share(got, shape.Hkv)
    chosen = {"page": PAGE, "budget": shape.budget, "window_pages": 1}
    pages = triton_impl.select_pages(share, lens, **chosen)
    if not all(map(torch.equal, pages, torch_impl.select_pages(share, lens, **chosen))):
        raise RuntimeError("select: other pages than PyTorch's")
    if not all(map(torch.equal, pages, triton_impl.select_from_mass(got, lens, shape.Hkv, **chosen))):
        raise RuntimeError("select: other pages than those of the same shares")
    step = (q, layer.k, layer.v, table, lens, pages)
    mine, plain = (
        one.sparse_attention(*step, page=PAGE, scale=shape.D**-0.5) for one in (triton_impl, torch_impl)
    )
    if not torch.allclose(mine.out, plain.out, rtol=2e-2, atol=2e-3):
        raise RuntimeError("attend: another output than PyTorch's")


def peers_gate(shape: Shape, layer: Layer, state: Any) -> None:
    """Raises where the peers' log-masses of the first row are not PyTorch's."""
    (q, table, lens), scale = layer.row(0), shape.D**-0.5
    got = peers.quest_mass(q, state, table, lens, page=PAGE, scale=scale)
    _compare("quest", got, Quest(PAGE).page_mass(q, state, layer.k, table, lens, scale=scale), 1e-3)
    got = peers.exact_mass(q, layer.k, table, lens, page=PAGE, scale=scale)
    _compare(
        "exact mass", got, torch_impl.exact_page_mass(q, layer.k, table, lens, page=PAGE, scale=scale), 1e-3
    )


def measure_dense(report: Report, shape: Shape, layers: list[Layer], block: int) -> None:
    """Dense attention: our split kernel over all pages, and PyTorch's on contiguous memory."""
    scale, width, device = shape.D**-0.5, -(-shape.T // PAGE), layers[0].k.device
    every = torch.arange(width, dtype=torch.int32, device=device).expand(shape.B, shape.Hkv, -1).contiguous()
    pages = torch.tensor([-(-tokens // PAGE) for tokens in shape.lengths], dtype=torch.int32, device=device)
    whole = api.PageList(every, pages[:, None].expand(-1, shape.Hkv).contiguous())

    def ours(x: Layer) -> Callable[[], Any]:
        return lambda: triton_impl.sparse_attention(
            x.q, x.k, x.v, x.table, x.lens, whole, page=PAGE, scale=scale
        )

    if shape.B * shape.Hq * -(-width // 8) * 4 * shape.D <= MAX_PARTIAL_BYTES:
        calls = [ours(x) for x in layers]
        report.add(shape, "dense", "locks", calls, shape.kv_bytes, layout=f"block {block}, shuffled")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def theirs(x: Layer, backend: SDPBackend = backend) -> Callable[[], Any]:
            parts = x.contiguous(shape)

            def call() -> list[Tensor]:
                with sdpa_kernel(backend):
                    return [
                        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                        for q, k, v in parts
                    ]

            return call

        # Not every backend knows every shape.
        with contextlib.suppress(RuntimeError):
            name = f"torch {backend.name.split('_')[0].lower()}"
            report.add(shape, "dense", name, [theirs(x) for x in layers], shape.kv_bytes, layout="contiguous")


def measure_rank(
    report: Report, shape: Shape, layers: list[Layer], block: int, rank: int, sealed: int
) -> None:
    """Every stage of a step, and the step."""
    fmt, scale = SummaryFormat(rank=rank), shape.D**-0.5
    records = [x.records(fmt, "triton") for x in layers]
    gate(shape, layers[0], records[0], fmt)
    chosen = {"page": PAGE, "budget": shape.budget, "window_pages": 1}
    both = list(zip(layers, records, strict=True))

    def score(x: Layer, r: Tensor, exact: bool) -> Callable[[], Any]:
        return lambda: triton_impl.page_mass(
            x.q, r, x.table, x.lens, fmt, scale=scale, window_pages=1, exact=exact
        )

    def select(x: Layer, m: Any) -> Callable[[], Any]:
        return lambda: triton_impl.select_from_mass(m, x.lens, shape.Hkv, **chosen)

    def attend(x: Layer, ids: Any) -> Callable[[], Any]:
        return lambda: triton_impl.sparse_attention(
            x.q, x.k, x.v, x.table, x.lens, ids, page=PAGE, scale=scale
        )

    def merge(x: Layer, ids: Any) -> Callable[[], Any]:
        attend_op.attend(x.q, x.k, x.v, x.table, x.lens, *ids, page=PAGE, scale=scale, out=merged, work=work)
        return lambda: attend_op.merge(work, merged)

    def step(x: Layer, r: Tensor) -> Callable[[], Any]:
        return lambda: api.decode(x.q, x.k, x.v, r, x.table, x.lens, fmt, budget=shape.budget, impl="triton")

    def summarize(x: Layer, r: Tensor) -> Callable[[], Any]:
        return lambda: api.summarize(x.k, x.table, x.lens, fmt, out=r, impl="triton")

    def seal(full: bool) -> Callable[[], Any]:
        first, lens = layers[0], layers[0].lens if full else layers[0].lens - 1
        return lambda: seal_op.seal(pointers, first.k, records[0], first.table, lens, fmt)

    def add(op: str, impl: str, calls: Calls, nbytes: float) -> None:
        bits = [fmt.mean_bits, fmt.basis_bits, fmt.coef_bits]
        report.add(shape, op, impl, calls, nbytes, R=rank, bits=bits, layout=f"block {block}, shuffled")

    # A model's layers, here the same few again and again.
    pointers = seal_op.layer_pointers([x.k for x in layers], records).repeat(sealed, 1)[:sealed]
    scanned = shape.record_bytes(fmt) + shape.mass_bytes
    masses = [score(*one, False)() for one in both]
    lists = [select(x, m)() for x, m in zip(layers, masses, strict=True)]
    if score_hopper.shape_fits(fmt, shape.D, shape.Hq // shape.Hkv):
        add("score", "hopper", [score(*one, False) for one in both], scanned)
    add("score", "general", [score(*one, True) for one in both], scanned)
    add("select", "locks", [select(x, m) for x, m in zip(layers, masses, strict=True)], shape.mass_bytes)
    add("attend", "locks", [attend(x, ids) for x, ids in zip(layers, lists, strict=True)], shape.kept_bytes)
    # One set of partial outputs for all layers, as in a step, where they have just been written.
    first, M = layers[0], shape.budget // PAGE
    work = attend_op.workspace(shape.B, shape.Hq, M, PAGE, shape.D, shape.D, first.k.device)
    merged = (torch.empty_like(first.q), first.q.new_empty(first.q.shape[:2], dtype=torch.float32))
    nbytes = sum(x.numel() * x.element_size() for x in (*work, *merged))
    add("merge", "locks", [merge(first, lists[0])], nbytes)
    # Nothing is scored where no row can be longer than the budget.
    scanned = scanned if max(shape.lengths) > shape.budget else 0
    add("chain", "locks", [step(*one) for one in both], scanned + shape.kept_bytes)
    if block == shape.blocks[0]:
        nbytes = shape.kv_bytes // 2 + shape.record_bytes(fmt)
        add("summarize", "locks", [summarize(*one) for one in both], nbytes)
        # A page's keys, and its record.
        nbytes = sealed * shape.B * shape.Hkv * (2 * PAGE * shape.D + fmt.layout(shape.D).nbytes)
        for full in (True, False):
            name = f"{sealed} layers, {'page fills' if full else 'none fills'}"
            add("seal", name, [seal(full)], nbytes * full)


def measure_peers(report: Report, shape: Shape, layers: list[Layer], block: int) -> None:
    """Quest's bound and exact mass: the scan, and the step with the same selection and attention."""
    quest, scale = Quest(PAGE), shape.D**-0.5
    chosen = {"page": PAGE, "budget": shape.budget, "window_pages": 1}
    states = {id(x): quest.allocate(x.k) for x in layers}
    for x in layers:
        quest.seal(states[id(x)], x.k, x.table, x.lens)
    peers_gate(shape, layers[0], states[id(layers[0])])

    def by_quest(x: Layer) -> PageMass:
        return peers.quest_mass(x.q, states[id(x)], x.table, x.lens, page=PAGE, scale=scale)

    def exactly(x: Layer) -> PageMass:
        return peers.exact_mass(x.q, x.k, x.table, x.lens, page=PAGE, scale=scale)

    for impl, mass, nbytes in (
        ("quest", by_quest, quest.scan_bytes(shape.D, shape.scored_pages) * shape.Hkv),
        ("exact mass", exactly, shape.kv_bytes // 2),
    ):

        def score(x: Layer, mass: Callable[[Layer], PageMass] = mass) -> Callable[[], Any]:
            return lambda: mass(x)

        def step(x: Layer, mass: Callable[[Layer], PageMass] = mass) -> Callable[[], Any]:
            def call() -> Any:
                pages = triton_impl.select_from_mass(mass(x), x.lens, shape.Hkv, **chosen)
                return triton_impl.sparse_attention(
                    x.q, x.k, x.v, x.table, x.lens, pages, page=PAGE, scale=scale
                )

            return call

        scanned, layout = nbytes + shape.mass_bytes, f"block {block}, shuffled"
        report.add(shape, "score", impl, [score(x) for x in layers], scanned, layout=layout)
        report.add(shape, "chain", impl, [step(x) for x in layers], scanned + shape.kept_bytes, layout=layout)


def measure(
    report: Report,
    shape: Shape,
    *,
    with_peers: bool = True,
    count: int | None = None,
    sealed: int = SEALED,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """All rows of a shape, on `count` layers of it, or as many as exceed the L2 cache, of which `sealed` are sealed."""
    count = shape.layers if count is None else count
    for block in shape.blocks:
        layers = [Layer(shape, block, seed, device=device, dtype=dtype) for seed in range(count)]
        if block == shape.blocks[0]:
            measure_dense(report, shape, layers, block)
        for rank in shape.ranks:
            measure_rank(report, shape, layers, block, rank, sealed)
        if with_peers and block == shape.blocks[0]:
            measure_peers(report, shape, layers, block)
        del layers
        torch.cuda.empty_cache()


def expected_seconds(shape: Shape, with_peers: bool) -> float:
    """About what a shape takes: memory is filled at 20 GB/s; a row takes 2 s to compile and replay, and 12 passes.

    A pass over all layers is reckoned at 500 GB/s of the cache, which is between dense attention and the summaries.
    """
    rows = sum(3 + 6 * len(shape.ranks) for _ in shape.blocks) + 3 * len(shape.ranks) + 4 * with_peers
    of_pass = shape.layers * shape.kv_bytes / 500e9
    return len(shape.blocks) * shape.layers * shape.layer_bytes / 20e9 + rows * (2 + 12 * of_pass)


def parse_tokens(text: str) -> int:
    """Tokens of "131072", "128K" or "1M".

    Raises:
        ValueError: anything else.
    """
    unit = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal():
        raise ValueError(f"contexts: expected tokens like 131072, 128K or 1M, got {text!r}")
    return int(number) * unit


def chosen_shapes(only: str, contexts: str) -> list[Shape]:
    """The shapes of some models, by commas, at some context lengths; all where either is empty.

    Raises:
        ValueError: no shape is left, or a length that cannot be read.
    """
    models, lengths = only.split(","), [parse_tokens(one) for one in contexts.split(",") if one]
    found = [one for one in SHAPES if (not only or one.model in models) and (not lengths or one.T in lengths)]
    if not found:
        known = ", ".join(f"{one.model} {one.T}" for one in SHAPES)
        raise ValueError(f"only, contexts: expected of {known}; got {only!r}, {contexts!r}")
    return found


def main(
    only: Annotated[str, typer.Option(help="models to measure, by commas; all if empty")] = "",
    contexts: Annotated[str, typer.Option(help="context lengths, by commas, like 128K; all if empty")] = "",
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Quest and exact mass too")] = True,
    minutes: Annotated[float | None, typer.Option(help="leave out shapes that would take longer")] = None,
    add: Annotated[bool, typer.Option(help="keep the file's rows that are not measured again")] = False,
    commit: Annotated[str, typer.Option(help="to note for a copy of the tree; else what git says")] = "",
    out: Annotated[Path, typer.Option(help="file to write")] = Path("bench/results/h200/attention.json"),
) -> None:
    """Measures the shapes and writes one JSON file."""
    try:
        shapes = chosen_shapes(only, contexts)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a CUDA device, and torch sees none")
    started, slower = time.monotonic(), 1.0
    machine = facts() | ({"commit": commit} if commit else {})
    kept = json.loads(out.read_text())["rows"] if add and out.is_file() else []
    report = Report(out, read_bandwidth(), machine, kept=kept)
    for shape in shapes:
        begun, expected = time.monotonic(), expected_seconds(shape, with_peers)
        name = f"{shape.model}, T {shape.T}, B {shape.B}"
        if minutes is not None and begun - started + slower * expected > 60 * minutes:
            typer.echo(f"left out: {name}, about {slower * expected:.0f} s")
            continue
        measure(report, shape, with_peers=with_peers)
        took = time.monotonic() - begun
        # What was reckoned too low once is for the next shapes too.
        slower = max(slower, took / expected)
        typer.echo(f"{name}: {took:.0f} s, {expected:.0f} s expected\n")


if __name__ == "__main__":
    typer.run(main)
