"""The vLLM benchmarks at a size for a CPU, in real engines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import vllm_needles
from locks.needles import NeedleTask, build_needles
from locks.vllm import stats
from tests.engine.engines import engine

ROOT = Path(__file__).resolve().parents[2]


def rows_of(script: str, out: Path, arguments: str) -> list[dict[str, Any]]:
    """The rows that a run writes."""
    command = [sys.executable, f"bench/{script}", *arguments.split(), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return json.loads(out.read_text())["rows"]


def test_first_token_times_of_batches(tmp_path: Path):
    arguments = "--model tiny --ttft --contexts 128 --batch 1 2 --ranks 4 --budget 64 --rounds 1 --repeats 2"
    rows = rows_of("vllm_tpot.py", tmp_path / "rows.json", f"{arguments} --block-size 64 --commit abc")
    assert [(row["impl"], row["batch"], row["rank"]) for row in rows] == [
        ("dense", 1, None),
        ("dense", 2, None),
        ("locks", 1, 4),
        ("locks", 2, 4),
    ]
    for row in rows:
        assert 0 < row["ttft_ms_min"] <= row["ttft_ms"] <= row["ttft_ms_max"]
        assert (row["samples"], row["commit"], row["model"]) == (2, "abc", "tiny")
    # The one token of an answer comes of the prompt, whose pages are summarised.
    assert all(row["decode_rows"] == 0 < row["seal_s_a_request"] for row in rows[2:])


def test_parity_and_a_mixed_load(tiny: Path, tmp_path: Path):
    arguments = (
        f"parity mixed --model {tiny} --prompts 5 --longest 250 --answer 60 --minutes 0.1 --dense-minutes 0 "
        "--outstanding 8 --cache-tokens 1024 --batched-tokens 256 --budget 64 --solo 4 --abort-share 0.1"
    )
    mixed, parity = rows_of("vllm_serving.py", tmp_path / "rows.json", arguments)
    assert (parity["measure"], parity["budget"]) == ("parity", 320)
    for part in (parity, parity["dense_reordered"]):
        assert part["compared"] == 5
        assert part["equal"] + len(part["first_differences"]) == 5
        assert all(parting["lead_nats"] < 2e-3 for parting in part["first_differences"])
    assert mixed["measure"] == "mixed"
    assert mixed["finished"] + mixed["aborted"] == mixed["requests"]
    assert min(mixed[name] for name in ("aborted", "preempted", "prefix_hit_tokens", "finished")) > 0
    assert mixed["eligible_rows"] == mixed["sparse_rows"] > mixed["covered_rows"]
    assert parity["not_finite"] == mixed["not_finite"] == 0
    assert mixed["solo"]["compared"] == 4
    assert all(parting["lead_nats"] < 2e-3 for parting in mixed["solo"]["first_differences"])


@pytest.fixture(scope="module")
def task(smollm2: Path) -> NeedleTask:
    from transformers import AutoTokenizer

    return build_needles(AutoTokenizer.from_pretrained(smollm2), tokens=600, needles=4, seed=0)


@torch.inference_mode()
def likeliest(model: Path, task: NeedleTask) -> Tensor:
    """Which digits [questions, digits] are a Hugging Face model's likeliest tokens, each behind the right ones."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model)
    right = []
    for question in task.questions:
        wanted = torch.tensor(question.answer_ids)
        ids = torch.tensor([[*task.context_ids, *question.input_ids]])
        right.append(llama(ids, logits_to_keep=len(wanted)).logits[0].argmax(-1) == wanted)
    return torch.stack(right)


def test_needles_are_judged_by_the_models_own_logits_behind_the_right_history(
    smollm2: Path, task: NeedleTask
):
    right, sparse = {}, {}
    settings = vllm_needles.settings(len(task.context_ids)) | {"max_num_batched_tokens": 1024}
    for name, locks in (("full", None), ("locks", {"budget": 128})):
        before = stats.totals()
        with engine(smollm2, locks, **settings) as llm:
            right[name] = torch.tensor(vllm_needles.ask(llm, task))
        sparse[name] = stats.totals().sparse_rows - before.sparse_rows
    want = likeliest(smollm2, task)
    assert right["full"].shape == want.shape == (4, 4)
    # Likeliest tokens may tie.
    assert int((right["full"] != want).sum()) <= 1
    assert int(want.sum()) >= 12
    # Every token behind the context but the last, which is never fed back.
    assert sparse == {"full": 0, "locks": sum(len(q.input_ids) for q in task.questions)}
    assert int(right["locks"].sum()) >= int(want.sum()) - 3
