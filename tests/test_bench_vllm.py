"""The vLLM benchmarks' own arithmetic: answers compared, rows kept, intervals. Their engines: tests/engine."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import vllm_needles, vllm_rows, vllm_serving
from bench.vllm_serving import Answer


def likely(**logprobs: float) -> dict[int, Any]:
    return {int(token[1:]): SimpleNamespace(logprob=value) for token, value in logprobs.items()}


def test_an_answer_takes_what_is_new_of_an_output():
    one = Answer([1, 2])
    output = SimpleNamespace(token_ids=[7], logprobs=[likely(t7=-0.25, t9=-1.5)])
    assert (one.take(output), one.take(output)) == (1, 0)
    output.token_ids.append(8)
    # Of the three the two likeliest count: the token itself need not be one of them.
    output.logprobs.append(likely(t8=float("nan"), t3=-1.0, t4=-3.0))
    output.token_ids.append(5)
    output.logprobs.append(likely(t5=-4.0, t3=-1.0, t4=-1.5))
    assert one.take(output) == 2
    assert one.tokens == [7, 8, 5]
    assert one.leads[0] == 1.25
    assert one.leads[2] == 0.5
    assert one.not_finite == 1


def test_answers_part_where_they_first_differ():
    want = [Answer([1] * 5, [3, 4, 5], [0.5, 0.25, 1.0]), Answer([1], [6, 7, 8], [1.0, 1.0, 1.0])]
    assert vllm_serving.compared([[3, 4, 5], [6, 7, 8]], want) == {
        "compared": 2,
        "equal": 2,
        "first_differences": [],
    }
    assert vllm_serving.compared([[3, 9, 9], [6, 7, 8]], want) == {
        "compared": 2,
        "equal": 1,
        "first_differences": [{"prompt_tokens": 5, "token": 1, "lead_nats": 0.25}],
    }
    # A shorter answer is no equal one.
    with pytest.raises(ValueError, match="longer"):
        vllm_serving.compared([[3, 4], [6, 7, 8]], want)


def test_prompts_are_cut_from_random_ids_where_there_is_no_tokenizer(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    ids = vllm_serving.text(tmp_path)
    assert ids == vllm_serving.text(tmp_path)
    assert set(ids) == set(range(3, 50))


def test_a_row_takes_the_place_of_its_elder_alone(tmp_path: Path):
    out, key = tmp_path / "new" / "rows.json", ("impl", "rank", "batch")
    rows = [
        {"impl": "locks", "rank": 8, "batch": 4, "ms": 1.0},
        {"impl": "dense", "rank": None, "batch": 16, "ms": 2.0},
        {"impl": "locks", "rank": 4, "batch": 16, "ms": 3.0},
        {"impl": "locks", "rank": 8, "batch": 4, "ms": 4.0},
    ]
    for row in rows:
        vllm_rows.keep(row, out, key)
    assert json.loads(out.read_text()) == {"rows": [rows[1], rows[2], rows[3]]}
    assert [path.name for path in out.parent.iterdir()] == ["rows.json"]


def test_a_row_that_is_not_whole_takes_no_whole_ones_place(tmp_path: Path):
    out = tmp_path / "rows.json"

    def kept(*rows: dict[str, Any]) -> list[dict[str, Any]]:
        for row in rows:
            vllm_rows.keep(row, out, vllm_serving.place(row))
        return json.loads(out.read_text())["rows"]

    parity, whole = {"measure": "parity"}, {"measure": "mixed", "impl": "locks", "whole": True}
    cut = [whole | {"whole": False, "minutes": minutes} for minutes in (1, 2)]
    assert kept(parity, cut[0], cut[1]) == [cut[1], parity]
    assert kept(whole) == [whole, parity]
    assert kept(cut[0]) == [whole, cut[0], parity]


def test_a_drain_takes_no_negative_time():
    command = [sys.executable, "bench/vllm_serving.py", "mixed", "--drain-seconds", "-1"]
    done = subprocess.run(
        command, cwd=vllm_rows.ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--drain-seconds: expected 0 or more, got -1" in done.stderr


def test_a_child_says_rows_and_ends_with_its_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom bench.vllm_rows import tell\n"
        "tell({'argument': sys.argv[1]})\nprint('by the way')\ntell([1, None])\nsys.exit(3)\n"
    )
    process = vllm_rows.Child(str(script), ["x y"])
    assert list(process) == [{"argument": "x y"}, [1, None]]
    assert process.code == 3
    assert capfd.readouterr().out == "by the way\n"


def test_a_row_knows_its_commit():
    assert vllm_rows.head("abc")["commit"] == "abc"
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=vllm_rows.ROOT, capture_output=True, text=True)
    assert vllm_rows.head("")["commit"] == (git.stdout.strip() or "unknown")


def test_needles_are_paired_with_full_attention():
    full, right = [4, 4, 2, 0] * 8, [4, 2, 2, 1] * 8
    row = vllm_needles.summary({"rank": 4, "right": right}, full, 4)
    assert (row["rank"], row["questions"], row["digits_right"], row["minus_full"]) == (4, 32, 0.5625, -0.0625)
    for name in ("digits_right", "minus_full"):
        low, high = row[f"{name}_95"]
        assert low < row[name] < high
        # About twice the standard error of 32 questions to each side.
        values = np.array(right) / 4 - (np.array(full) / 4 if name == "minus_full" else 0)
        assert high - low == pytest.approx(4 * values.std() / 32**0.5, rel=0.2)
    assert vllm_needles.summary({"right": full}, full, 4)["minus_full_95"] == [0, 0]


@pytest.mark.parametrize("script", ["vllm_tpot", "vllm_serving", "vllm_needles"])
def test_help_needs_no_engine(script: str):
    command = [sys.executable, f"bench/{script}.py", "--help"]
    done = subprocess.run(
        command, cwd=vllm_rows.ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True
    )
    assert f"PYTHONPATH=. python bench/{script}.py" in done.stdout
