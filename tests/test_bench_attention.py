"""The benchmark without its clock: shapes and their memory, layers, gates, which rows there are, what is kept."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer import Typer
from typer.testing import CliRunner

from bench import attention, flash3, peers, timing
from bench.attention import Report
from bench.layers import L2_BYTES, MAX_LAYERS, MEMORY, SHAPES, Layer, Shape
from locks import SummaryFormat, torch_impl, triton_impl
from locks.baselines import Quest
from locks.types import Attended, PageList, PageMass
from tests.helpers import DEVICE, HAS_CUDA

TINY = Shape("tiny", 160, 2, 4, 2, 64, (4,), (32, 16), budget=48, rest=64)
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float16
FMT = SummaryFormat(rank=4)


def named(shape: Shape) -> str:
    return f"{shape.model}-{shape.T}-{shape.B}"


def once(calls: list[Callable[[], Any]]) -> tuple[float, float, float]:
    """In place of a clock: every call is made, each in turn."""
    for call in calls:
        call()
    return 1.0, 2.0, 4.0


def report(path: Path, **more: Any) -> Report:
    return Report(path, 1000.0, {"GPU": "none", "commit": "0123"}, once, **more)


def layer(shape: Shape = TINY, block: int = 16) -> Layer:
    return Layer(shape, block, 0, device=DEVICE, dtype=DTYPE)


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_layers_fit_memory_and_exceed_the_cache(shape: Shape) -> None:
    assert shape.layers >= 2
    # Of the 141 GB of an H200, which also holds what the stages write, and the bounds of Quest.
    assert shape.layers * shape.layer_bytes <= MEMORY
    all_that_there_is = shape.layers == MAX_LAYERS or (shape.layers + 1) * shape.layer_bytes > MEMORY
    assert shape.layers * shape.least_bytes >= 4 * L2_BYTES or all_that_there_is
    # Even then each stage reads more than the cache holds.
    assert shape.layers * shape.least_bytes > L2_BYTES


def test_every_shape_that_the_targets_name_is_measured() -> None:
    have = {
        (one.model, one.T, one.B, rank, block) for one in SHAPES for rank in one.ranks for block in one.blocks
    }
    wanted = {
        ("glm-4-9b-1m", tokens, 1, rank, block)
        for tokens in (2**17, 2**20)
        for rank in (4, 8)
        for block in (16, 64)
    }
    wanted |= {("llama-3.1-8b", 2**17, rows, 8, 64) for rows in (1, 16)}
    wanted |= {("qwen3-4b", 2**15, 32, 4, 64), ("smollm2-135m", 2**13, 64, 4, 64)}
    assert wanted <= have
    assert any(one.budget >= one.T for one in SHAPES)
    assert any(one.T == 2**20 and one.B == 64 and one.lengths[1:] == [one.rest] * 63 for one in SHAPES)


def test_a_ragged_shape_counts_its_own_tokens() -> None:
    assert TINY.lengths == [160, 64]
    assert TINY.runs == [(1, 160), (1, 64)]
    assert TINY.described == "160, 1 of 64"
    assert TINY.scored_pages == 14
    assert TINY.kv_bytes == 2 * 2 * (160 + 64) * 2 * 64
    assert TINY.kept_bytes == 2 * 2 * (48 + 48) * 2 * 64
    equal = Shape("equal", 160, 3, 4, 2, 64, (4,))
    assert (equal.described, equal.runs) == ("equal", [(3, 160)])


@pytest.mark.parametrize("block", [16, 32])
def test_a_layers_rows_own_every_block_once(block: int) -> None:
    x = layer(block=block)
    own = [-(-tokens // block) for tokens in TINY.lengths]
    ids = torch.cat([row[:count] for row, count in zip(x.table, own, strict=True)])
    assert sorted(ids.tolist()) == list(range(x.k.shape[0]))
    assert x.lens.tolist() == TINY.lengths


def test_pytorch_gets_a_part_for_each_length() -> None:
    x = layer()
    parts = x.contiguous(TINY)
    assert [tuple(k.shape) for _, k, _ in parts] == [(1, 2, 160, 64), (1, 2, 64, 64)]
    assert [tuple(q.shape) for q, _, _ in parts] == [(1, 4, 1, 64)] * 2
    assert torch.equal(torch.cat([q for q, _, _ in parts])[:, :, 0], x.q)
    assert sum(k.numel() for _, k, _ in parts) == x.k.numel()


@pytest.fixture(scope="module")
def records() -> Tensor:
    """Of `layer()`."""
    return layer().records(FMT, "torch")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run over the tiny shape writes."""
    out = tmp_path_factory.mktemp("bench") / "attention.json"
    attention.measure(report(out), TINY, count=1, sealed=2, device=DEVICE, dtype=DTYPE)
    written = json.loads(out.read_text())
    assert written["read_gb_per_s"] == 1000.0
    return written["rows"]


def test_every_stage_has_its_rows(rows: list[dict[str, Any]]) -> None:
    found = {(row["op"], row["impl"], row["layout"]) for row in rows}
    shuffled = {
        (op, impl, f"block {block}, shuffled")
        for op, impl in (
            ("score", "hopper"),
            ("score", "general"),
            ("select", "locks"),
            ("attend", "locks"),
            ("merge", "locks"),
            ("chain", "locks"),
        )
        for block in (32, 16)
    }
    once_only = {
        ("dense", "locks"),
        ("summarize", "locks"),
        ("seal", "2 layers, page fills"),
        ("seal", "2 layers, none fills"),
        ("score", "quest"),
        ("chain", "quest"),
        ("score", "exact mass"),
        ("chain", "exact mass"),
    }
    assert shuffled | {(*one, "block 32, shuffled") for one in once_only} <= found
    # Which of PyTorch's there are depends on the device.
    assert {one[:2] for one in found - shuffled} - once_only <= {
        ("dense", "torch flash"),
        ("dense", "torch cudnn"),
    }
    assert len({attention._identity(row) for row in rows}) == len(rows)


def test_a_row_says_what_was_moved_in_what_time(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert (row["p20_us"], row["p50_us"], row["p80_us"]) == (1.0, 2.0, 4.0)
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / 2e3, abs=0.06)
        assert row["share_of_read"] == pytest.approx(row["bytes"] / 2e6, abs=6e-4)
        assert row["lengths"] == "160, 1 of 64"
        assert (row["R"], row["bits"]) == (None, None) or (row["R"], row["bits"]) == (4, [8, 4, 4])
    nbytes = {(row["op"], row["impl"]): row["bytes"] for row in rows}
    records, masses = 14 * 2 * FMT.layout(64).nbytes, 14 * 4 * 4
    assert nbytes["score", "hopper"] == nbytes["score", "general"] == records + masses
    assert nbytes["chain", "locks"] == records + masses + TINY.kept_bytes
    # One split of 3 pages: float32, then 16 bits, and the log-sum-exps of both.
    assert nbytes["merge", "locks"] == 2 * 4 * (4 * 65 + 2 * 64 + 4)
    assert nbytes["dense", "locks"] == TINY.kv_bytes
    assert nbytes["summarize", "locks"] == TINY.kv_bytes // 2 + records
    assert nbytes["seal", "2 layers, page fills"] == 2 * 2 * 2 * (16 * 64 * 2 + FMT.layout(64).nbytes)
    assert nbytes["seal", "2 layers, none fills"] == 0
    # The least and the greatest key of every page.
    assert nbytes["score", "quest"] == 14 * 2 * 2 * 64 * 2 + masses
    assert nbytes["score", "exact mass"] == TINY.kv_bytes // 2 + masses


def test_stages_are_those_of_the_step() -> None:
    x = layer()
    stages = attention.Stages(TINY, [x], FMT, sealed=2)
    ((whole,), (selected,), (attended,), (general,)) = (
        [call() for call in stage.calls]
        for stage in (stages.chain(), stages.select(), stages.attend(), stages.score(exact=True))
    )
    assert all(map(torch.equal, selected, whole.pages))
    assert torch.equal(attended.out, whole.out)
    options = {"scale": 0.125, "window_pages": 1}
    exact, fast = (
        triton_impl.page_mass(x.q, stages.records[0], x.table, x.lens, FMT, exact=exact, **options)
        for exact in (True, False)
    )
    assert torch.equal(general.total, exact.total)
    assert not torch.equal(general.total, fast.total)


def test_a_seal_writes_the_pages_that_fill_and_no_other() -> None:
    stages = attention.Stages(TINY, [layer()], FMT, sealed=2)
    full, none = stages.seal(), stages.seal(full=False)
    written = stages.records[0].clone()
    stages.records[0].zero_()
    none.calls[0]()
    assert not stages.records[0].any()
    full.calls[0]()
    # Each row's last page, in both heads.
    at = stages.records[0].any(-1).bool()
    assert int(at.sum()) == 2 * 2
    assert torch.equal(stages.records[0][at], written[at])


def test_a_step_scores_where_one_row_is_longer_than_the_budget() -> None:
    shape = Shape("mixed", 160, 2, 4, 2, 64, (4,), (16,), budget=96, rest=64)
    chain = attention.Stages(shape, [], FMT).chain()
    assert chain.nbytes == shape.record_bytes(FMT) + shape.mass_bytes + shape.kept_bytes


def test_within_the_budget_a_step_scores_nothing(tmp_path: Path) -> None:
    shape, out = Shape("short", 48, 1, 2, 1, 64, (4,), (16,), budget=48), tmp_path / "attention.json"
    attention.measure(report(out), shape, with_peers=False, count=2, sealed=1, device=DEVICE, dtype=DTYPE)
    nbytes = {(row["op"], row["impl"]): row["bytes"] for row in json.loads(out.read_text())["rows"]}
    assert nbytes["chain", "locks"] == shape.kept_bytes == shape.kv_bytes
    assert not any(impl in ("quest", "exact mass") for _, impl in nbytes)


def off(mass: PageMass, page: int) -> PageMass:
    changed = mass.log_mass.clone()
    changed[..., page] += 0.5
    return PageMass(changed, mass.total)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("page_mass", lambda got: off(got, 3), "score, exact=True: off by 0.5"),
        (
            "select_pages",
            lambda got: PageList(got.page_ids.flip(-1), got.counts),
            "select: other pages than PyTorch's",
        ),
        ("select_from_mass", lambda got: PageList(got.page_ids.flip(-1), got.counts), "of the same shares"),
        ("sparse_attention", lambda got: Attended(got.out * 1.5, got.lse), "attend: another output"),
    ],
)
def test_the_gate_stops_a_wrong_stage(
    name: str, wrong: Callable[[Any], Any], message: str, records: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, right = layer(), getattr(triton_impl, name)
    monkeypatch.setattr(triton_impl, name, lambda *args, **more: wrong(right(*args, **more)))
    with pytest.raises(RuntimeError, match=message):
        attention.gate(TINY, x, records, FMT)


def test_the_gate_stops_a_wrong_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    x, quest = layer(), Quest(16)
    state = quest.allocate(x.k)
    quest.seal(state, x.k, x.table, x.lens)
    attention.peers_gate(TINY, x, state)
    with monkeypatch.context() as patch:
        right = torch_impl.exact_page_mass
        patch.setattr(torch_impl, "exact_page_mass", lambda *args, **more: off(right(*args, **more), 5))
        with pytest.raises(RuntimeError, match=r"exact mass: off by 0\.5"):
            attention.peers_gate(TINY, x, state)
    bound = peers.quest_mass
    monkeypatch.setattr(peers, "quest_mass", lambda *args, **more: off(bound(*args, **more), 5))
    with pytest.raises(RuntimeError, match=r"quest: off by 0\.5"):
        attention.peers_gate(TINY, x, state)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_the_gate_stops_wrong_dense_attention(error: float) -> None:
    x = layer()
    out = attention.dense(TINY, [x]).calls[0]().out
    attention.dense_gate(TINY, x, "dense", out)
    for row in range(TINY.B):
        wrong = out.clone()
        wrong[row] *= 1 + error
        with pytest.raises(ArithmeticError, match=f"dense, row {row}: off by {error}"):
            attention.dense_gate(TINY, x, "dense", wrong)


class PagedFlash:
    """In place of vLLM's FlashAttention 3, which needs a Hopper GPU: by its documented layouts, in PyTorch."""

    def __init__(self) -> None:
        self.scheduled: list[dict[str, Any]] = []
        self.error, self.once, self.spent = 0.0, False, False

    def fa_version_unsupported_reason(self, version: int) -> str | None:
        return None if version == 3 else f"version {version}"

    def get_scheduler_metadata(self, *, batch_size: int, **more: Any) -> Tensor:
        self.scheduled.append(more)
        return torch.full((batch_size,), more["num_splits"])

    def flash_attn_varlen_func(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        seqused_k: Tensor,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        block_table: Tensor,
        scheduler_metadata: Tensor,
        num_splits: int,
        fa_version: int,
    ) -> Tensor:
        if fa_version != 3 or k.shape[-1] % 8:
            raise RuntimeError("another version or width")
        assert max_seqlen_q == 1
        assert max_seqlen_k == int(seqused_k.max())
        assert scheduler_metadata.tolist() == [num_splits] * len(seqused_k)
        if self.spent:
            return out
        self.spent = self.once
        for row, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
            # [tokens, Hkv, D], from [blocks, block, Hkv, D].
            keys, values = (x[block_table[row]].flatten(0, 1)[: seqused_k[row]].float() for x in (k, v))
            out[begin:end] = torch.nn.functional.scaled_dot_product_attention(
                q[begin:end].float().transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                scale=softmax_scale,
                enable_gqa=True,
            ).transpose(0, 1)
        return out.mul_(1 + self.error)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> PagedFlash:
    found = PagedFlash()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.26.0"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", found)
    return found


def test_flash_attention_3_gets_the_paged_cache(flash: PagedFlash, tmp_path: Path) -> None:
    one, layers = report(tmp_path / "attention.json"), [layer(block=32), layer(block=32)]
    attention.measure_flash3(one, TINY, layers, 32)
    assert [(row["op"], row["impl"], row["config"]) for row in one.rows] == [
        ("dense", "vllm fa3", "vllm 0.26.0, num_splits 32"),
        ("dense", "vllm fa3 free", "vllm 0.26.0, num_splits 0"),
    ]
    assert {(row["layout"], row["bytes"]) for row in one.rows} == {("block 32, shuffled", TINY.kv_bytes)}
    # Once for all layers.
    assert [more["num_splits"] for more in flash.scheduled] == [32, 0]
    sizes = ("page_size", "max_seqlen_k", "headdim", "num_heads_q", "num_heads_kv")
    assert {tuple(more[name] for name in sizes) for more in flash.scheduled} == {(32, 160, 64, 4, 2)}


@pytest.mark.parametrize(
    ("name", "value", "off_by"), [("error", 0.05, r"0\.05"), ("once", True, "nan")], ids=["wrong", "once"]
)
def test_flash_attention_3_passes_its_gate_first(
    name: str, value: Any, off_by: str, flash: PagedFlash, tmp_path: Path
) -> None:
    setattr(flash, name, value)
    one = report(tmp_path / "attention.json")
    with pytest.raises(ArithmeticError, match=f"vllm fa3, row 0: off by {off_by}"):
        attention.measure_flash3(one, TINY, [layer()], 16)
    assert not one.rows


def test_a_shape_that_flash_attention_3_refuses_has_no_row(
    flash: PagedFlash, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, one = Shape("odd", 16, 1, 1, 1, 60, (4,), (16,)), report(tmp_path / "attention.json")
    attention.measure_flash3(one, shape, [layer(shape)], 16)
    assert not one.rows
    assert capsys.readouterr().out.splitlines() == [
        f"left out: {impl}: another version or width" for impl in ("vllm fa3", "vllm fa3 free")
    ]


def test_without_vllm_it_is_said_what_is_missing(flash: PagedFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash3.unavailable() is None
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)
    assert "vllm" in str(flash3.unavailable())


def test_dense_attention_can_be_measured_alone(tmp_path: Path) -> None:
    one = report(tmp_path / "attention.json")
    attention.measure(one, TINY, only_dense=True, count=1, device=DEVICE, dtype=DTYPE)
    assert {row["op"] for row in one.rows} == {"dense"}
    assert {row["layout"] for row in one.rows} == {"block 32, shuffled", "contiguous"}
    assert attention.expected_seconds(TINY, True, only_dense=True) < attention.expected_seconds(TINY, False)


def test_rows_of_an_earlier_run_stay_unless_measured_again(tmp_path: Path) -> None:
    # Rows from before lengths were noted are of equal lengths.
    old = {
        "op": "score",
        "impl": "general",
        "model": "m",
        "T": 64,
        "B": 1,
        "R": None,
        "bits": None,
        "layout": "block 16",
    }
    other = old | {"T": 128}
    shape = Shape("m", 64, 1, 4, 2, 64, (4,))
    one = report(tmp_path / "attention.json", kept=[old, other])
    one.add(shape, "score", "general", [], 2e6, layout="block 16")
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert rows[0] == other
    assert [row.get("p50_us") for row in rows] == [None, 2.0]
    assert (rows[1]["gb_per_s"], rows[1]["share_of_read"]) == (1000.0, 1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["attention.json"]


@pytest.mark.parametrize(
    ("text", "tokens"), [("131072", 131072), ("128K", 131072), ("1m", 1048576), ("2k", 2048)]
)
def test_context_lengths_are_read(text: str, tokens: int) -> None:
    assert attention.parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "1.5K", "-4", "many"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="contexts: expected tokens like 131072, 128K or 1M"):
        attention.parse_tokens(text)


def test_shapes_are_chosen_by_model_and_length() -> None:
    assert attention.chosen_shapes("", "") == SHAPES
    chosen = attention.chosen_shapes("glm-4-9b-1m,qwen3-4b", "32K,2K")
    assert {(one.model, one.T) for one in chosen} == {
        ("glm-4-9b-1m", 2048),
        ("glm-4-9b-1m", 32768),
        ("qwen3-4b", 32768),
    }
    with pytest.raises(
        ValueError, match=r"only, contexts: expected of glm-4-9b-1m 131072, .*; got 'gpt-2', ''"
    ):
        attention.chosen_shapes("gpt-2", "")


def test_larger_shapes_are_expected_to_take_longer() -> None:
    long, short = (attention.expected_seconds(SHAPES[i], True) for i in (1, 0))
    assert long > short > attention.expected_seconds(SHAPES[0], False) > 0
    # All of them in the time that one machine is had for.
    assert sum(attention.expected_seconds(one, True) for one in SHAPES) < 20 * 60


def test_times_are_divided_by_the_calls() -> None:
    assert timing.per_call([10.0, 20.0, 30.0, 40.0], 10) == (1.0, 2.5, 4.0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--contexts", "some"], "contexts: expected tokens like 131072, 128K or 1M, got 'some'"),
        (["--only", "gpt-2"], "got 'gpt-2', ''"),
        pytest.param([], "needs a CUDA device", marks=pytest.mark.skipif(HAS_CUDA, reason="a GPU is there")),
    ],
)
def test_refused(args: list[str], message: str) -> None:
    app = Typer()
    app.command()(attention.main)
    result = CliRunner().invoke(app, args, env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.gpu
def test_device_times_are_ordered_and_grow_with_the_work() -> None:
    x = torch.zeros(2**26, device="cuda")
    small, large = (timing.device_times([lambda n=n: x[:n].amax()], seconds=0.02) for n in (2**20, 2**26))
    for p20, p50, p80 in (small, large):
        assert 0 < p20 <= p50 <= p80
    assert large[1] > 2 * small[1]
