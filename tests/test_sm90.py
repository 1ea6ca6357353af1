"""Every kernel compiles for Hopper without a GPU: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import json

import pytest

from bench.resources import SHARED_RESERVED, Resources, occupancy
from locks import SummaryFormat
from tests.helpers import ROOT, run_compiled
from tests.ptx import faults

KERNELS = {
    "append_kernel",
    "summarize_kernel",
    "seal_kernel",
    "score_kernel",
    "total_kernel",
    "logits_kernel",
    "share_kernel",
    "select_kernel",
    "keys_kernel",
    "every_kernel",
    "exact_kernel",
    "tiles_kernel",
    "attend_kernel",
    "merge_kernel",
    "unread_kernel",
    "bound_kernel",
    "cover_kernel",
}


FAST = {"score_hopper_kernel"}
# Launched before the kernel in front of them has ended.
DEPENDENT = FAST | {"total_kernel", "keys_kernel", "select_kernel", "attend_kernel", "merge_kernel"}


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        ({"page": 16, "rank": 4, "head_dim": 128, "group": 8}, KERNELS | FAST),
        ({"page": 32, "rank": 8, "head_dim": 80, "group": 3}, KERNELS),
    ],
)
def test_every_stage_compiles_for_hopper(shape: dict[str, int], kernels: set[str]) -> None:
    found = json.loads(run_compiled(str(ROOT / "tests" / "sm90.py"), json.dumps(shape)))
    assert {one["name"] for one in found} == kernels
    ranks, head_dim = {shape["rank"], 12 - shape["rank"]}, shape["head_dim"]
    buffers = {16 * SummaryFormat(shape["page"], rank).layout(head_dim).nbytes + 16 for rank in ranks}
    # Two halves of 8 records and their barriers, and nothing that goes from lane to lane through memory.
    scans = {one["shared_bytes"] for one in found if one["name"] == "score_hopper_kernel"}
    assert scans == (buffers if kernels >= FAST else set())
    for one in found:
        assert one["shared_bytes"] <= 100 * 1024, one
        assert one["stack_bytes"] == 0, one
        if one["name"] in DEPENDENT:
            early = one["name"] in {"keys_kernel", "select_kernel"}
            assert set(one["unwaited"]) <= ({"reads"} if early else set()), one
        if one["name"] == "score_hopper_kernel":
            # 16 programs of one warp a multiprocessor.
            assert one["registers"] <= 128, one
            assert 16 * (one["shared_bytes"] + SHARED_RESERVED) <= 227 * 1024, one
            used = Resources(
                *(one[key] for key in ("name", "warps", "registers", "stack_bytes", "shared_bytes"))
            )
            assert occupancy(used, 90) >= 16, one


KERNEL = """.visible .entry kernel(
	.param .u64 p
)
{
	.reg .pred 	%p<3>;
START
	ret;
END
}
"""
WAIT = "griddepcontrol.wait; // dummy %r1"


@pytest.mark.parametrize(
    ("start", "end", "want"),
    [
        pytest.param(WAIT, "", [], id="waits at once"),
        pytest.param("mov.u32 %r1, 0;", "", ["ends"], id="never waits"),
        pytest.param(f"@%p1 {WAIT}", "", ["ends"], id="waits under a guard"),
        pytest.param(f"@%p1 bra $L__A;\n{WAIT}\n$L__A:", "", ["ends"], id="a way around"),
        pytest.param(f"@%p1 bra $L__A;\n{WAIT}\nret;\n$L__A:\n{WAIT}", "", [], id="both ways wait"),
        pytest.param(f"@%p1 ret;\n{WAIT}", "", ["ends"], id="a guarded end"),
        pytest.param(f"bra.uni $L__A;\n$L__B:\n{WAIT}", "$L__A:\nbra.uni $L__B;", [], id="backwards"),
        pytest.param(f"griddepcontrol.launch_dependents;\n{WAIT}", "", ["releases"], id="lets go too early"),
        pytest.param(f"{WAIT}\ngriddepcontrol.launch_dependents;", "", [], id="lets go behind it"),
        pytest.param(
            f"@p cp.async.bulk.global.shared::cta [%rd1], [%r1];\n{WAIT}", "", ["writes"], id="copies out"
        ),
        pytest.param(
            f"@p cp.async.bulk.shared::cluster.global [%r1], [%rd1];\n{WAIT}", "", ["reads"], id="copies in"
        ),
        pytest.param(f"@%p1 st.global.b32 [%rd1], %r1;\n{WAIT}", "", ["writes"], id="writes too early"),
        pytest.param(f"ld.global.nc.v4.b32 %r1, [%rd1];\n{WAIT}", "", ["reads"], id="reads early"),
        pytest.param(
            f"st.shared.b32 [%r2], %r1;\n{WAIT}\nst.global.b32 [%rd1], %r1;", "", [], id="its own memory"
        ),
    ],
)
def test_what_a_kernel_does_before_it_waits(start: str, end: str, want: list[str]) -> None:
    assert faults(KERNEL.replace("START", start).replace("END", end)) == want
