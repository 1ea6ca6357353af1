"""What runs under compute-sanitizer: every kernel."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from bench import sanitize
from tests.helpers import run_compiled
from tests.test_sm90 import FAST, KERNELS


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
    assert set(run_compiled("-c", script).split()) == KERNELS | FAST


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is there")
def test_no_gpu_is_said_in_one_line():
    app = sanitize.typer.Typer()
    app.command()(sanitize.main)
    found = CliRunner().invoke(app, [])
    assert found.exit_code == 2
    assert "needs a CUDA device" in found.output
