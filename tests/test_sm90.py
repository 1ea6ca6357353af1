"""Every kernel compiles for Hopper without a GPU: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {
    "summarize_kernel",
    "score_kernel",
    "total_kernel",
    "logits_kernel",
    "share_kernel",
    "select_kernel",
    "attend_kernel",
    "merge_kernel",
    "unread_kernel",
    "bound_kernel",
    "cover_kernel",
}


@pytest.mark.parametrize(
    ("shape", "free_of_spills"),
    [
        ({"page": 16, "rank": 4, "head_dim": 128, "group": 8}, KERNELS),
        ({"page": 32, "rank": 8, "head_dim": 80, "group": 3}, KERNELS - {"summarize_kernel"}),
    ],
)
def test_every_stage_compiles_for_hopper(shape: dict[str, int], free_of_spills: set[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, str(ROOT / "tests" / "sm90.py"), json.dumps(shape)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = {one["name"]: one for one in json.loads(run.stdout)}
    assert set(found) == KERNELS
    for name, one in found.items():
        assert one["shared_bytes"] <= 100 * 1024, one
        if name in free_of_spills:
            assert one["stack_bytes"] == 0, one
