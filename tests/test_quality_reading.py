"""Perplexity and long generation by processes: one result of all, also of a run that was cut."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.quality_model import save_model

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[1]


def test_every_selector_has_a_process_and_all_one_result(tmp_path: Path):
    save_model(tmp_path / "model")
    out, logs = tmp_path / "perplexity.json", tmp_path / "logs"
    command = [sys.executable, str(ROOT / "bench" / "quality" / "reading.py"), "perplexity"]
    command += ["--model", str(tmp_path / "model"), "--length", "400", "--examples", "2", "--batch", "2"]
    command += ["--selectors", "locks-r8,h2o", "--budgets", "64,full", "--workers", "1"]
    command += ["--logs", str(logs), "--out", str(out)]

    def call(*more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=580)
        return done, json.loads(out.read_text())

    # No time: processes end, and the result says that it is not whole.
    cut, result = call("--minutes", "0")
    assert cut.returncode == 1
    assert "cut short: 6 answers are missing" in cut.stderr
    assert result["rows"] == []
    assert result["cut_short"] == [
        {"task": "perplexity", "length": 400, "selector": name, "budget": budget, "n": 0, "expected": 2}
        for name, budget in (("full", None), ("locks-r8", 64), ("h2o", 64))
    ]
    whole, result = call()
    assert whole.returncode == 0, whole.stderr
    assert result["command"].endswith(
        "--length 400 --selectors locks-r8,h2o --budgets 64,full --examples 2 --batch 2 "
        f"--model {tmp_path / 'model'}"
    )
    assert [(row["selector"], row["budget"], row["n"]) for row in result["rows"]] == [
        ("full", None, 2),
        ("locks-r8", 64, 2),
        ("h2o", 64, 2),
    ]
    assert result["cut_short"] == []
    assert {"score", "ci_low", "ci_high", "rank", "page", "bits", "model", "task"} <= set(result["rows"][0])
    assert all("minus_full" in row for row in result["rows"][1:])
    # What is logged is not answered again, and a line that was cut off does not count.
    log = logs / "h2o" / "perplexity.jsonl"
    text = log.read_text()
    log.write_text(text + text.splitlines()[-1][:20])
    again, same = call("--minutes", "0")
    assert again.returncode == 0, again.stderr
    assert same["rows"] == result["rows"]
    # Another run's log is refused.
    header, *rows = text.splitlines()
    log.write_text("\n".join([json.dumps({**json.loads(header), "seed": 7}), *rows]) + "\n")
    mixed, _ = call("--minutes", "0")
    assert mixed.returncode != 0
    assert "logs: expected" in mixed.stderr
