"""The vLLM benchmarks at a size for a CPU, in real engines."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import vllm_needles
from bench.vllm_serving import Answer, Load, alone, answer
from locks.needles import NeedleTask, build_needles
from locks.vllm import stats
from tests.engine.engines import TIE, engine

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


LOAD = (
    "--dense-minutes 0 --longest 250 --answer 60 --outstanding 8 --cache-tokens 1024 --batched-tokens 256 --budget 64 "
    "--abort-share 0.1"
)


def test_parity_and_a_mixed_load(tiny: Path, tmp_path: Path):
    arguments = f"parity mixed --model {tiny} --prompts 5 --minutes 0.1 --drain-seconds 3 --solo 4 {LOAD}"
    mixed, parity = rows_of("vllm_serving.py", tmp_path / "rows.json", arguments)
    assert (parity["measure"], parity["budget"]) == ("parity", 320)
    for part in (parity, parity["dense_reordered"]):
        assert part["compared"] == 5
        assert part["equal"] + len(part["first_differences"]) == 5
        assert all(parting["lead_nats"] < 2e-3 for parting in part["first_differences"])
    assert (mixed["measure"], mixed["whole"], mixed["minutes_asked"]) == ("mixed", True, 0.1)
    assert mixed["finished"] + mixed["aborted"] + mixed["left"] == mixed["requests"]
    assert min(mixed[name] for name in ("aborted", "preempted", "prefix_hit_tokens", "finished")) > 0
    assert mixed["eligible_rows"] == mixed["sparse_rows"] > mixed["covered_rows"]
    assert parity["not_finite"] == mixed["not_finite"] == 0
    assert mixed["solo"]["compared"] == mixed["solo"]["sampled"] == 4
    assert all(parting["lead_nats"] < 2e-3 for parting in mixed["solo"]["first_differences"])


def test_answers_with_drafts_are_those_without(tiny: Path, tmp_path: Path):
    arguments = f"speculation --model {tiny} --prompts 4 --solo 2 --longest 250 --answer 40 --budget 64 --outstanding 4"
    (row,) = rows_of("vllm_serving.py", tmp_path / "rows.json", arguments)
    for part, count in ((row, 4), (row["reordered"], 4), (row["solo"], 2)):
        assert part["compared"] == count
        assert all(parting["lead_nats"] < 2e-3 for parting in part["first_differences"])
    assert 0 <= row["accepted"] < row["drafted"]
    # Each drafted token is a row; all prompts are longer than the budget.
    assert row["sparse_rows"] == row["decode_rows"] > 4 * 39
    assert sum(row["steps"]["one by one"].values()) <= 2 * 40
    assert not any("FULL" in kind for kind in row["steps"]["together"])


def test_a_load_ends_with_its_time_and_leaves_an_engine_that_serves(tiny: Path):
    options = Namespace(impl="locks", longest=250, answer=200, outstanding=8, abort_share=0.05)
    rng = random.Random(0)
    ids = [rng.randrange(3, 512) for _ in range(2000)]
    settings = {"max_model_len": 451, "num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    with engine(tiny, {"budget": 64, "rank": 4, "page": 16}, **settings) as llm:
        load, cut = Load(llm, ids, 64, options), threading.Event()
        load.run(3, 0.2, cut)
        # A step or two longer: the one under way when requests stop coming, and the last.
        assert 3 <= load.coming_seconds < 4
        assert 3.2 <= load.coming_seconds + load.drain_seconds < 5
        # Sixteen answers take longer than the drain; none of them is live any more.
        assert load.left > 0 == len(load.live)
        assert len(load.finished) + load.aborted + load.left == len(load.every)

        want = answer(llm, [ids[:100], ids[:90]], [20, 30])
        end = time.monotonic() + 60
        got = alone(llm, want, lambda: time.monotonic() >= end)
        assert [len(one.tokens) for one in got] == [20, 30]
        for one, other in zip(got, want, strict=True):
            differ = [i for i in range(len(one.tokens)) if one.tokens[i] != other.tokens[i]]
            assert all(other.leads[i] < TIE for i in differ[:1])

        # The second is stopped in the middle.
        steps = iter(range(10**6))
        long = Answer(ids[:100], [0] * 200)
        assert len(alone(llm, [want[0], long], lambda: next(steps) > 60)) == 1
        assert not llm.llm_engine.has_unfinished_requests()

        cut.set()
        before = load.steps
        load.run(60, 1, cut)
        assert load.steps == before


def test_an_interrupted_load_is_written_as_such(tiny: Path, tmp_path: Path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "bench/vllm_serving.py", "mixed", "--model", str(tiny), "--minutes", "30"]
    process = subprocess.Popen(
        [*command, *LOAD.split(), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        said = iter(process.stderr or ())
        assert any("mixed, locks: ready after" in line for line in said)
        time.sleep(6)
        # To the program alone, which passes it on.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
        rest = "".join(said)
    assert process.returncode == 1, rest
    assert "expected a whole run" in rest
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["whole"], row["minutes_asked"]) == (False, 30)
    assert 0.08 < row["minutes"] < 0.5
    assert row["drain_seconds"] < 1
    assert row["finished"] + row["aborted"] + row["left"] == row["requests"]
    assert min(row["finished"], row["left"], row["tokens"]) > 0
    assert row["eligible_rows"] == row["sparse_rows"] > 0
    assert row["solo"]["compared"] == 0 < row["solo"]["sampled"]


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
