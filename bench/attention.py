"""Device time of every stage of a decode step and of the whole, beside dense attention and peers: `make bench`.

    python bench/attention.py --only glm-4-9b-1m --contexts 128K,1M --minutes 10 --out bench/results/h200/attention.json

Where vLLM is, its FlashAttention 3 is measured too; a second run in its environment, with `--only-dense --add`, puts
such rows beside those of a first one.

Each shape first passes its gate: pages and outputs as PyTorch's on the same records. Times are graph replays over
layers whose buffers exceed the L2 cache. Rows are written as they are measured.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import flash3, peers
from bench.layers import PAGE, SHAPES, Layer, Shape
from bench.timing import device_times, facts, read_bandwidth
from locks import SummaryFormat, api, torch_impl, triton_impl
from locks.baselines import Quest
from locks.kernels import attend as attend_op
from locks.kernels import score_hopper
from locks.kernels import seal as seal_op
from locks.kernels import select as select_op
from locks.types import PageList, PageMass

# Layers whose pages are sealed in one launch.
SEALED = 40
# What tells rows apart: a later run's row takes the place of an equal one.
IDENTITY = ("op", "impl", "model", "T", "B", "lengths", "R", "bits", "layout")

Calls = list[Callable[[], Any]]


def timed(times: tuple[float, float, float], nbytes: float) -> dict[str, Any]:
    """What every measurement says: p20, p50 and p80 of one call's device time in µs, its bytes, and bytes over p50."""
    p20, p50, p80 = times
    return {
        "p20_us": round(p20, 3),
        "p50_us": round(p50, 3),
        "p80_us": round(p80, 3),
        "bytes": int(nbytes),
        "gb_per_s": round(nbytes / p50 / 1e3, 1),
    }


def chosen(shape: Shape) -> dict[str, int]:
    """How pages are selected."""
    return {"page": PAGE, "budget": shape.budget, "window_pages": 1}


def operands(x: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What attention reads of a layer, in its order."""
    return x.q, x.k, x.v, x.table, x.lens


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
        measured = timed(self.timer(calls), nbytes)
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
            **measured,
            "share_of_read": round(nbytes / measured["p50_us"] / 1e3 / self.bandwidth, 3),
            **self.machine,
        }
        self.rows.append(row)
        typer.echo(
            f"{shape.model:13s} T {shape.T:8d} B {shape.B:3d} R {row['R'] or '-'!s:3s} {row['layout']:19s} "
            f"{op:10s} {impl:14s} {row['p50_us']:9.2f} us {row['gb_per_s']:7.0f} GB/s"
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
    pages = triton_impl.select_pages(share, lens, **chosen(shape))
    if not all(map(torch.equal, pages, torch_impl.select_pages(share, lens, **chosen(shape)))):
        raise RuntimeError("select: other pages than PyTorch's")
    if not all(map(torch.equal, pages, triton_impl.select_from_mass(got, lens, shape.Hkv, **chosen(shape)))):
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
    got, want = (
        one.exact_page_mass(q, layer.k, table, lens, page=PAGE, scale=scale)
        for one in (triton_impl, torch_impl)
    )
    _compare("exact mass", got, want, 1e-3)


def dense_gate(shape: Shape, layer: Layer, name: str, out: Tensor) -> None:
    """Raises where dense attention's first or last row is not PyTorch's.

    Means of many values are small: their error is taken relative to their norm.

    Raises:
        ArithmeticError: another output; not what a kernel raises that does not know the shape.
    """
    for index in sorted({0, shape.B - 1}):
        q, table, lens = layer.row(index)
        # Not the table's other columns: PyTorch gathers what they name, too.
        table = table[:, : -(-shape.lengths[index] // layer.k.shape[2])]
        want = torch_impl.sparse_attention(
            q, layer.k, layer.v, table, lens, None, page=PAGE, scale=shape.D**-0.5
        ).out.float()
        error = float((out[index] - want[0]).norm() / want.norm())
        # Not the other way round: nan is no less than anything.
        if not error <= 1e-2:
            raise ArithmeticError(f"{name}, row {index}: off by {error:.2g} of PyTorch's")


class Stage(NamedTuple):
    """What a row measures: calls, one a layer, and the bytes that a call has to move."""

    op: str
    impl: str
    calls: Calls
    nbytes: float


def each(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], **same: Any) -> Calls:
    """A call of `function` for each of the arguments."""
    return [partial(function, *one, **same) for one in arguments]


class Stages:
    """The stages of a step, and the step, on a shape's layers and their records."""

    def __init__(self, shape: Shape, layers: list[Layer], fmt: SummaryFormat, sealed: int = SEALED) -> None:
        self.shape, self.layers, self.fmt, self.sealed = shape, layers, fmt, sealed
        self.records = [x.records(fmt, "triton") for x in layers]
        self.both = list(zip(layers, self.records, strict=True))
        self.attention = {"page": PAGE, "scale": shape.D**-0.5}
        self.scanned = shape.record_bytes(fmt) + shape.mass_bytes
        self.fast = score_hopper.shape_fits(fmt, shape.D, shape.Hq // shape.Hkv)

    @cached_property
    def masses(self) -> list[PageMass]:
        """What `select` reads."""
        return [call() for call in self.score().calls]

    @cached_property
    def lists(self) -> list[PageList]:
        """What `attend` reads."""
        return [PageList(*call()) for call in self.select().calls]

    def score(self, exact: bool = False) -> Stage:
        """The query's kernel, the scan and the totals; with `exact` by the general path on every shape."""
        arguments = ((x.q, records, x.table, x.lens, self.fmt) for x, records in self.both)
        options = {"scale": self.shape.D**-0.5, "window_pages": 1, "exact": exact}
        calls = each(triton_impl.page_mass, arguments, **options)
        return Stage("score", "hopper" if self.fast and not exact else "general", calls, self.scanned)

    def select(self) -> Stage:
        """As in a step, where what is selected from is there before the launch in front of it."""
        pairs = zip(self.layers, self.masses, strict=True)
        arguments = ((*mass, x.lens, self.shape.Hkv) for x, mass in pairs)
        options = {"page": PAGE, "pages": self.shape.budget // PAGE, "window_pages": 1, "early": True}
        calls = each(select_op.select_from_mass, arguments, **options)
        return Stage("select", "locks", calls, self.shape.mass_bytes)

    def attend(self) -> Stage:
        """Attention over the selected pages, the merge included."""
        arguments = ((*operands(x), ids) for x, ids in zip(self.layers, self.lists, strict=True))
        calls = each(triton_impl.sparse_attention, arguments, **self.attention)
        return Stage("attend", "locks", calls, self.shape.kept_bytes)

    def merge(self) -> Stage:
        """One set of partial outputs for all layers, as in a step, where they have just been written."""
        shape, x = self.shape, self.layers[0]
        config = attend_op.default_config(PAGE, shape.D, x.k.device)
        plan = attend_op.default_plan(
            shape.budget // PAGE, 0, page=PAGE, head_dim=shape.D, num_kv_heads=shape.Hkv, config=config
        )
        work = attend_op.workspace(shape.B, shape.Hq, plan.splits, shape.D, x.k.device)
        out = (torch.empty_like(x.q), x.q.new_empty(x.q.shape[:2], dtype=torch.float32))
        attend_op.attend(*operands(x), *self.lists[0], **self.attention, out=out, work=work)
        nbytes = sum(one.numel() * one.element_size() for one in (*work, *out))
        return Stage("merge", "locks", [partial(attend_op.merge, work, out)], nbytes)

    def chain(self) -> Stage:
        """The step: nothing is scored where no row can be longer than the budget."""
        arguments = ((x.q, x.k, x.v, records, x.table, x.lens, self.fmt) for x, records in self.both)
        calls = each(api.decode, arguments, budget=self.shape.budget, impl="triton")
        scanned = self.scanned if max(self.shape.lengths) > self.shape.budget else 0
        return Stage("chain", "locks", calls, scanned + self.shape.kept_bytes)

    def summarize(self) -> Stage:
        calls: Calls = [
            partial(api.summarize, x.k, x.table, x.lens, self.fmt, out=records, impl="triton")
            for x, records in self.both
        ]
        nbytes = self.shape.kv_bytes // 2 + self.shape.record_bytes(self.fmt)
        return Stage("summarize", "locks", calls, nbytes)

    def seal(self, full: bool = True) -> Stage:
        """All layers of a model in one launch, here the same few again and again; `full`: every row fills a page."""
        shape, x = self.shape, self.layers[0]
        pointers = seal_op.layer_pointers([one.k for one in self.layers], self.records)
        pointers = pointers.repeat(self.sealed, 1)[: self.sealed]
        lens = x.lens if full else x.lens - 1
        call = partial(seal_op.seal, pointers, x.k, self.records[0], x.table, lens, self.fmt)
        # A page's keys, and its record.
        page = 2 * PAGE * shape.D + self.fmt.layout(shape.D).nbytes
        impl = f"{self.sealed} layers, {'page fills' if full else 'none fills'}"
        return Stage("seal", impl, [call], full * self.sealed * shape.B * shape.Hkv * page)

    def every(self, once: bool) -> Iterator[Stage]:
        """All of them, each built when it is asked for; `once`: those, too, that no other block size needs."""
        if self.fast:
            yield self.score()
        yield self.score(exact=True)
        yield from (build() for build in (self.select, self.attend, self.merge, self.chain))
        if once:
            yield from (self.summarize(), self.seal(), self.seal(full=False))


def dense(shape: Shape, layers: list[Layer]) -> Stage:
    """Our split kernel over all pages, without a list of them."""
    arguments = ((*operands(x), None) for x in layers)
    calls = each(triton_impl.sparse_attention, arguments, page=PAGE, scale=shape.D**-0.5)
    return Stage("dense", "locks", calls, shape.kv_bytes)


def torch_dense(shape: Shape, layers: list[Layer], backend: SDPBackend) -> Stage:
    """PyTorch's attention on contiguous memory."""

    def attend(*parts: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        with sdpa_kernel(backend):
            return [
                torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                for q, k, v in parts
            ]

    calls = each(attend, (tuple(x.contiguous(shape)) for x in layers))
    return Stage("dense", f"torch {backend.name.split('_')[0].lower()}", calls, shape.kv_bytes)


@contextlib.contextmanager
def _unless_refused(name: str) -> Iterator[None]:
    """Says what was raised and goes on: not every implementation knows every shape."""
    try:
        yield
    except RuntimeError as error:
        typer.echo(f"left out: {name}: {error}")


def measure_dense(report: Report, shape: Shape, layers: list[Layer], block: int) -> None:
    """Dense attention: our split kernel, PyTorch's, and vLLM's where it is."""
    layout = f"block {block}, shuffled"
    ours = dense(shape, layers)
    dense_gate(shape, layers[0], "dense", ours.calls[0]().out)
    report.add(shape, *ours, layout=layout)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with _unless_refused(backend.name):
            report.add(shape, *torch_dense(shape, layers, backend), layout="contiguous")
    if flash3.unavailable() is None:
        measure_flash3(report, shape, layers, block)


def measure_flash3(report: Report, shape: Shape, layers: list[Layer], block: int) -> None:
    """Dense attention by vLLM's FlashAttention 3 on the same paged cache."""
    for impl in flash3.SPLITS:
        with _unless_refused(impl):
            calls = flash3.calls(shape, layers, impl)
            # The second call: a schedule counts tiles, and a call that left it counted would do nothing, fast.
            calls[0]().fill_(float("nan"))
            dense_gate(shape, layers[0], impl, calls[0]())
            stage = Stage("dense", impl, calls, shape.kv_bytes)
            report.add(shape, *stage, layout=f"block {block}, shuffled", config=flash3.config(impl))


def measure_rank(
    report: Report, shape: Shape, layers: list[Layer], block: int, rank: int, sealed: int
) -> None:
    """Every stage of a step, and the step."""
    fmt = SummaryFormat(rank=rank)
    stages = Stages(shape, layers, fmt, sealed)
    gate(shape, layers[0], stages.records[0], fmt)
    bits = [fmt.mean_bits, fmt.basis_bits, fmt.coef_bits]
    for stage in stages.every(once=block == shape.blocks[0]):
        report.add(shape, *stage, R=rank, bits=bits, layout=f"block {block}, shuffled")


def measure_peers(report: Report, shape: Shape, layers: list[Layer], block: int) -> None:
    """Quest's bound and exact mass: the scan, and the step with the same selection and attention."""
    quest, scale = Quest(PAGE), shape.D**-0.5
    states = {id(x): quest.allocate(x.k) for x in layers}
    for x in layers:
        quest.seal(states[id(x)], x.k, x.table, x.lens)
    peers_gate(shape, layers[0], states[id(layers[0])])

    def by_quest(x: Layer) -> PageMass:
        return peers.quest_mass(x.q, states[id(x)], x.table, x.lens, page=PAGE, scale=scale)

    def exactly(x: Layer) -> PageMass:
        return triton_impl.exact_page_mass(x.q, x.k, x.table, x.lens, page=PAGE, scale=scale)

    for impl, mass, nbytes in (
        ("quest", by_quest, quest.scan_bytes(shape.D, shape.scored_pages) * shape.Hkv),
        ("exact mass", exactly, shape.kv_bytes // 2),
    ):

        def step(x: Layer, mass: Callable[[Layer], PageMass] = mass) -> Any:
            pages = triton_impl.select_from_mass(mass(x), x.lens, shape.Hkv, **chosen(shape))
            return triton_impl.sparse_attention(*operands(x), pages, page=PAGE, scale=scale)

        scanned, layout = nbytes + shape.mass_bytes, f"block {block}, shuffled"
        report.add(shape, "score", impl, each(mass, zip(layers)), scanned, layout=layout)
        step_bytes = scanned + shape.kept_bytes
        report.add(shape, "chain", impl, each(step, zip(layers)), step_bytes, layout=layout)


def measure(
    report: Report,
    shape: Shape,
    *,
    with_peers: bool = True,
    only_dense: bool = False,
    count: int | None = None,
    sealed: int = SEALED,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """All rows of a shape, or those of dense attention alone.

    On `count` layers of it, or as many as exceed the L2 cache, of which `sealed` are sealed.
    """
    count = shape.layers if count is None else count
    for block in shape.blocks[:1] if only_dense else shape.blocks:
        layers = [Layer(shape, block, seed, device=device, dtype=dtype) for seed in range(count)]
        if block == shape.blocks[0]:
            measure_dense(report, shape, layers, block)
        for rank in () if only_dense else shape.ranks:
            measure_rank(report, shape, layers, block, rank, sealed)
        if with_peers and not only_dense and block == shape.blocks[0]:
            measure_peers(report, shape, layers, block)
        del layers
        torch.cuda.empty_cache()


def expected_seconds(shape: Shape, with_peers: bool, only_dense: bool = False) -> float:
    """About what a shape takes: memory is filled at 20 GB/s; a row takes 2 s to compile and replay, and 12 passes.

    A pass over all layers is reckoned at 500 GB/s of the cache, which is between dense attention and the summaries.
    """
    ranks, blocks, dense_rows = len(shape.ranks), len(shape.blocks), 3 + len(flash3.SPLITS)
    rows = 0 if only_dense else (6 * blocks + 3) * ranks + 4 * with_peers
    fills = 1 if only_dense else blocks
    of_pass = shape.layers * shape.kv_bytes / 500e9
    return fills * shape.layers * shape.layer_bytes / 20e9 + (dense_rows + rows) * (2 + 12 * of_pass)


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
    only_dense: Annotated[bool, typer.Option("--only-dense", help="nothing but dense attention")] = False,
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
    if reason := flash3.unavailable():
        typer.echo(f"left out: {', '.join(flash3.SPLITS)}: {reason}")
    for shape in shapes:
        begun, expected = time.monotonic(), expected_seconds(shape, with_peers, only_dense)
        name = f"{shape.model}, T {shape.T}, B {shape.B}"
        if minutes is not None and begun - started + slower * expected > 60 * minutes:
            typer.echo(f"left out: {name}, about {slower * expected:.0f} s")
            continue
        measure(report, shape, with_peers=with_peers, only_dense=only_dense)
        took = time.monotonic() - begun
        # What was reckoned too low once is for the next shapes too.
        slower = max(slower, took / expected)
        typer.echo(f"{name}: {took:.0f} s, {expected:.0f} s expected\n")


if __name__ == "__main__":
    typer.run(main)
