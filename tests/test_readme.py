"""The README's tables are those that the code and the committed results give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import readme

ROOT = Path(__file__).resolve().parent.parent


def test_the_tables_are_current() -> None:
    command = [sys.executable, str(ROOT / "bench" / "readme.py"), "--check"]
    run = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def _row(selector: str, budget: int | None, score: float, **more: Any) -> dict[str, Any]:
    row = {"task": "mean", "length": 102400, "selector": selector, "budget": budget, "score": score, "n": 48}
    row |= {"unit": "points", "expected": 48, **more}
    return row


def _write(root: Path, name: str, result: dict[str, Any]) -> None:
    file = root / "bench" / "results" / "quality" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    device = {"name": "one GPU"}
    file.write_text(json.dumps({"device": device, "dtype": "bfloat16", "command": "python it", **result}))


def test_a_table_beyond_the_trained_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    minus = {"minus_full": -0.5, "minus_full_low": -1.25, "minus_full_high": 0.0}
    tasks = {"tasks": ["niah_single_1", "vt"]}
    rows = [
        _row("full", None, 99.0, **tasks),
        _row("locks-r8", 2048, 98.5, **minus, **tasks),
        _row("quest", 2048, 80.0, **minus, **{**tasks, "n": 40}),
        *(_row("full", None, 99.0, task=task, n=24, expected=30) for task in ("niah_single_1", "vt")),
        _row("full", None, 12.0, task="fwe", n=4),
    ]
    recipe = {"length": 16384, "seconds": 120, "head_dim": 128, "group": 4, "layers": 30}
    rope = {"rope_type": "yarn", "factor": 8.0}
    result = {"rows": rows, "learnt": tasks["tasks"], "left_out": ["fwe"], "recipe": recipe, "rope": rope}
    _write(tmp_path, "ruler_long", result)
    made = readme.ruler("ruler_long", "full")
    assert "| locks-r8 | 98.5, -0.5 (-1.2 to 0.0) |" in made
    assert "| quest | 80.0 (n 40), -0.5 (-1.2 to 0.0) |" in made
    assert "mean of 2 tasks at 102,400 tokens, and the paired difference from full attention" in made
    assert "99.0; 48 examples, 24 a task; left out, with full attention's points: fwe (12.0)" in made
    assert "at 16,384 tokens, its rotary positions given YaRN's factor 8 without training" in made
    # One task alone has no mean, and another theta another word.
    alone = [{**row, "task": "vt"} for row in rows[1:2]]
    rope = {"rope_type": "default", "rope_theta": 3.2e6}
    _write(
        tmp_path,
        "ruler_long",
        {**result, "rows": [*alone, *rows[4:]], "learnt": ["vt"], "rope": rope},
    )
    made = readme.ruler("ruler_long", "full")
    assert "Points, vt at 102,400 tokens" in made
    assert "full attention 99.0; 24 of 30 examples, 24 a task" in made
    assert "given theta 3,200,000 without training" in made


def test_tables_of_what_is_read_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    minus = {"minus_full": 0.512, "minus_full_low": 0.25, "minus_full_high": 0.75}
    rows = [
        _row("full", None, 12.344, task="perplexity"),
        _row("locks-r8", 512, 12.4, task="perplexity", **minus),
    ]
    for row in rows:
        row["unit"] = "perplexity"
    _write(tmp_path, "perplexity", {"model": "small", "cut_short": [], "rows": rows})
    made = readme.reading("perplexity")
    assert "| locks-r8 | 12.40, +0.51 % (0.25 to 0.75) |" in made
    assert "from full attention (12.34; in percent); small, 48 examples; one GPU, bfloat16; `bench" in made
    rows = [
        _row("full", None, 90.0, task="longgen"),
        *(_row("locks-r8", budget, 80.0, task="longgen", **minus) for budget in (128, 512)),
        _row("h2o", 512, 10.0, task="longgen", **minus),
    ]
    cut = [
        {"selector": "locks-r8", "budget": 512, "n": 12, "expected": 48},
        {"selector": "h2o", "budget": 64, "n": 0, "expected": 48},
        {"selector": "h2o", "budget": 128, "n": 0, "expected": 48},
    ]
    _write(tmp_path, "longgen", {"model": "small", "cut_short": cut, "rows": rows})
    made = readme.reading("longgen")
    assert "|  | 128 tokens | 512 tokens |" in made
    assert "| locks-r8 | 80.0, +0.5 (0.2 to 0.8) | 80.0, +0.5 (0.2 to 0.8) |" in made
    assert "| h2o | not run | 10.0, +0.5 (0.2 to 0.8) |" in made
    assert (
        "the run was cut before locks-r8 at 512 (12 examples) tokens, h2o at 64 and 128 tokens; `bench"
        in made
    )
    assert "102,400 decoded tokens, and the paired difference from full attention (90.0)" in made
