"""The tuner: occupancy, what is feasible, which is estimated best, and the table it writes; timing needs a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from typer import Typer
from typer.testing import CliRunner

from bench import tune
from bench.layers import SHAPES, Shape
from bench.operations import ATTEND, OPERATIONS, SCORE_HOPPER, SUMMARIZE
from bench.resources import LIMITS, Resources, capture, occupancy
from locks import SummaryFormat
from locks.kernels.config import KernelConfig, read_table, table_key
from tests.helpers import ROOT, run_compiled

FMT = SummaryFormat(rank=8)
GLM = Shape("glm", 2**17, 1, 32, 4, 128, (8, 4))


def used(*, warps: int = 1, registers: int = 32, stack: int = 0, shared: int = 0) -> Resources:
    return Resources("a kernel", warps, registers, stack, shared)


@pytest.mark.parametrize(
    ("one", "arch", "programs"),
    [
        pytest.param(used(), 90, 32, id="programs a multiprocessor"),
        pytest.param(used(warps=4), 90, 16, id="warps"),
        pytest.param(used(warps=4), 86, 12, id="fewer warps"),
        pytest.param(used(registers=128), 90, 16, id="registers"),
        # 89 registers take as much as 96.
        pytest.param(used(registers=89), 90, 20, id="registers by eights"),
        # No quarter of the multiprocessor holds a fifth warp of 104.
        pytest.param(used(registers=104), 90, 16, id="registers of a quarter"),
        pytest.param(used(shared=36864), 90, 6, id="shared memory, 1 KB more a program"),
        pytest.param(used(shared=36864), 89, 2, id="less shared memory"),
        pytest.param(used(shared=200 * 1024), 80, 0, id="none"),
        pytest.param(used(warps=16, registers=255), 90, 0, id="no registers"),
    ],
)
def test_occupancy(one: Resources, arch: int, programs: int) -> None:
    assert occupancy(one, arch) == programs


def feasible(op: Any, *compiled: tuple[KernelConfig, Resources]) -> list[tune.Candidate]:
    return tune.feasible(op, [GLM], FMT, compiled, 90, 132)


def test_what_spills_or_does_not_fit_is_left_out() -> None:
    fits = KernelConfig(8, 4), used(warps=4, registers=128)
    spills = KernelConfig(16, 4), used(warps=4, registers=255, stack=8)
    too_wide = KernelConfig(32, 8), used(warps=8, registers=168, shared=300_000)
    assert [one.config for one in feasible(ATTEND, fits, spills, too_wide)] == [KernelConfig(8, 4)]


def test_the_fast_path_may_spill_a_little_and_learns_its_programs() -> None:
    some = KernelConfig(8, 1, registers=128), used(registers=128, stack=24)
    many = KernelConfig(8, 1, registers=96), used(registers=96, stack=72)
    (only,) = feasible(SCORE_HOPPER, some, many)
    assert only.config == KernelConfig(8, 1, registers=128, programs=16)
    assert only.at_once == 16


def test_a_looser_limit_that_changes_nothing_is_not_tried_again() -> None:
    same = used(registers=161)
    found = feasible(
        SCORE_HOPPER, (KernelConfig(8, 1, registers=168), same), (KernelConfig(8, 1, registers=200), same)
    )
    assert [one.config.registers for one in found] == [168]


def test_more_programs_at_once_are_estimated_faster_and_spills_slower() -> None:
    of = KernelConfig(1, 1)
    few, many = used(registers=255), used(registers=128)
    assert [one.used for one in feasible(SUMMARIZE, (of, few), (KernelConfig(1, 2), many))] == [many, few]
    times = [tune.estimate(SCORE_HOPPER, GLM, FMT, used(stack=stack), 132, of) for stack in (0, 64)]
    assert times[1] == 1.25 * times[0]


def test_shapes_of_one_key_share_a_row() -> None:
    keys = {
        name: [(fmt.rank, [(one.model, one.T) for one in shapes]) for shapes, fmt in tune.by_key(op, SHAPES)]
        for name, op in OPERATIONS.items()
    }
    # Widths of 128 whatever the model, and of 64.
    assert [{model for model, _ in every} for _, every in keys["attend"]] == [
        {"glm-4-9b-1m", "llama-3.1-8b", "qwen3-4b"},
        {"smollm2-135m"},
    ]
    lengths = [one.T for one in SHAPES if one.model == "glm-4-9b-1m"]
    assert [tokens for model, tokens in keys["attend"][0][1] if model == "glm-4-9b-1m"] == lengths
    assert [rank for rank, _ in keys["score_hopper"][:2]] == [8, 4]
    # The fast path's key has no page, which is 16.
    assert all(
        model != "smollm2-135m" or rank == 4 for rank, every in keys["score_hopper"] for model, _ in every
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_key_says_nothing_of_batch_and_length(name: str) -> None:
    long = Shape("a model", 2**20, 64, 32, 4, 128, (8,), rest=2**12)
    assert OPERATIONS[name].key(GLM, FMT) == OPERATIONS[name].key(long, FMT)


def test_results_agree_only_within_the_tolerance_and_with_equal_infinities() -> None:
    x = torch.tensor([1.0, -torch.inf])
    assert tune.agrees((x,), (x + 1e-4,), 1e-3)
    assert not tune.agrees((x,), (x + 1e-1,), 1e-3)
    assert not tune.agrees((x,), (torch.tensor([1.0, 0.0]),), 1e-3)


def test_the_row_has_the_least_geometric_mean_and_the_next() -> None:
    slow, fast, uneven = KernelConfig(4, 4), KernelConfig(8, 4), KernelConfig(16, 4)
    times = {slow: [4.0, 9.0], fast: [4.0, 4.0], uneven: [1.0, 25.0]}
    row = tune.row_of(ATTEND, [GLM, SHAPES[1]], FMT, times, device="a GPU", commit="0123")
    assert (row["us"], row["runner_up_us"]) == (4.0, 5.0)
    assert row["config"] == {"block_n": 8, "num_warps": 4, "num_stages": 1}
    assert [one["T"] for one in row["measured"]] == [2**17, 2**20]
    assert row["shape"] == ATTEND.key(GLM, FMT)


def test_a_row_takes_the_place_of_its_own_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    one = {"device": "a GPU", "op": "attend", "shape": {"page": 16}, "config": {"block_n": 4, "num_warps": 2}}
    tune.write_row(one, path)
    tune.write_row(one | {"shape": {"page": 32}}, path)
    tune.write_row(one | {"config": {"block_n": 8, "num_warps": 4}}, path)
    assert read_table(path) == {
        table_key("a GPU", "attend", {"page": 16}): KernelConfig(8, 4),
        table_key("a GPU", "attend", {"page": 32}): KernelConfig(4, 2),
    }
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]


def test_a_write_that_fails_leaves_the_table_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(TypeError):
        tune.write_row(
            {"device": "a GPU", "op": "attend", "shape": {}, "config": {"block_n": object(), "num_warps": 1}},
            path,
        )
    assert json.loads(path.read_text()) == {"rows": []}


@triton.jit
def shared_kernel(out_ptr, REDUCED: tl.constexpr, DECLARED: tl.constexpr):
    """Takes shared memory of Triton's, of its own declaration, both or none."""
    off = tl.arange(0, 128)
    x = off
    if REDUCED:
        x = x + tl.sum(off, 0)
    if DECLARED:
        x = tl.inline_asm_elementwise(
            """{ .shared .align 16 .b8 own[4096]; .reg .u32 t; mov.u32 t, own;
            st.shared.b32 [t], $1; ld.shared.b32 $0, [t]; }""",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.store(out_ptr + off, x)


@pytest.mark.parametrize("arch", [89, 90])
def test_shared_memory_is_what_a_launch_and_what_the_code_asks_for(arch: int) -> None:
    script = (
        "import torch\n"
        "from tests.test_bench_tune import capture, shared_kernel\n"
        f"with capture({arch}) as done:\n"
        "    for flags in ((False, False), (False, True), (True, False), (True, True)):\n"
        "        shared_kernel[(1,)](torch.zeros(128, dtype=torch.int32), *flags)\n"
        "print(*(one.shared_bytes for one in done))\n"
    )
    none, declared, reduced, both = map(int, run_compiled("-c", script).split())
    assert (none, declared) == (0, 4096)
    assert 0 < reduced < 1024
    assert both == reduced + declared


def test_nothing_is_compiled_in_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET: expected none"), capture():
        pass


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--op", "sort"], "op: expected of attend, score, score_hopper, summarize, got sort"),
        (["--only", "gpt-2"], "only: expected of glm-4-9b-1m,"),
        (["--dry-run", "--arch", "61"], f"arch: expected one of {sorted(LIMITS)}, got 61"),
    ],
)
def test_refused(args: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    app = Typer()
    app.command()(tune.main)
    result = CliRunner().invoke(app, args, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_a_dry_run_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    app = Typer()
    app.command()(tune.main)
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert "needs a CUDA device, and torch sees none; --dry-run does without" in " ".join(
        result.output.split()
    )


def test_the_feasible_launch_shapes_are_found_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    options = ["--dry-run", "--arch", "90", "--op", "summarize", "--only", "smollm2-135m", "--out", str(out)]
    first, header, *lines = run_compiled(str(ROOT / "bench" / "tune.py"), *options).splitlines()
    assert first.startswith("summarize: page 16, rank 4, head_dim 64: ")
    assert header.split()[:4] == ["block_n", "warps", "limit", "registers"]
    assert 1 <= len(lines) <= 4
    assert all(line.split()[4] == "0" for line in lines)
    assert not out.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_launch_shapes_are_timed(name: str) -> None:
    op, shape = OPERATIONS[name], Shape("small", 4096, 2, 16, 2, 128, (8,))
    configs = [KernelConfig(8, 1, registers=128, programs=16), KernelConfig(8, 1, registers=168, programs=12)]
    if name != "score_hopper":
        configs = op.candidates(shape)[:2]
    found = tune.timed(op, shape, FMT, configs, layers=2)
    assert list(found) == configs
    assert all(0 < time < 1e6 for time in found.values())
