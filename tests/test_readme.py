"""The README's tables are those that the code and the committed results give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_tables_are_current() -> None:
    command = [sys.executable, str(ROOT / "bench" / "readme.py"), "--check"]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
