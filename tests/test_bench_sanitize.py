"""What runs under compute-sanitizer: every kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench import sanitize
from tests.test_sm90 import FAST, KERNELS

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.gpu
def test_the_workloads_run():
    for _, work in sanitize.every("cuda", torch.bfloat16):
        work()
    torch.cuda.synchronize()


def test_every_kernel_is_among_them():
    """Compiled in place of being run, which says what would be launched."""
    script = (
        "import torch\n"
        "from bench import resources, sanitize\n"
        "from locks import api\n"
        "api.resolve_impl = lambda *_: 'triton'\n"
        "with resources.capture() as done:\n"
        "    for _, work in sanitize.every('cpu', torch.bfloat16):\n"
        "        work()\n"
        "print(*{one.name for one in done})\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == KERNELS | FAST


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is there")
def test_no_gpu_is_said_in_one_line():
    app = sanitize.typer.Typer()
    app.command()(sanitize.main)
    found = CliRunner().invoke(app, [])
    assert found.exit_code == 2
    assert "needs a CUDA device" in found.output
