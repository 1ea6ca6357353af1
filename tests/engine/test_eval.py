"""`locks eval` through vLLM: transformers' answers, the plugin's traffic, and logs that are gone on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from locks.models import SetupError
from locks.quality import run, vllm_run
from locks.quality.example import Example, Task, draw
from locks.quality.log import Log, Row
from locks.quality.methods import parse_methods
from tests.quality_model import save_model

# Of the three prompts of a task and the most tokens of an answer.
LENGTHS, NEW = (300, 150, 420), 24
LAYERS, HEADS, WIDTH = 2, 2, 64
# Of the tokens of bytes, the one behind them all.
END = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("eval"))


def example(index: int) -> Example:
    ids = draw("eval", index).choices(range(256), k=LENGTHS[index])
    return Example(index, ids, ("a",), NEW)


def tasks(stop: int) -> list[Task]:
    """Greedy answers, the same that end at a token, and drawn ones."""

    def score(_: Example, text: str) -> dict[str, float]:
        return {"long": float(len(text) > 3)}

    return [
        Task("greedy", 512, 3, example, score),
        Task("stopped", 512, 2, example, score, stop_ids=(stop,)),
        Task("drawn", 512, 1, example, score, samples=3),
    ]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What transformers generates, its end of text left out."""
    language_model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    made = []
    for index in range(3):
        ids = torch.tensor([example(index).ids])
        out = language_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        made.append([token for token in out[0, ids.shape[1] :].tolist() if token != END])
    return made


def answered(model: Path, plan: run.Plan, path: Path) -> list[Row]:
    config, tokenizer = vllm_run.load(model)
    with Log(path, {"family": "test"}) as log:
        vllm_run.run(model, config, tokenizer, plan, log)
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


@pytest.fixture(scope="module")
def plan(expected: list[list[int]]) -> run.Plan:
    # A token of the first answer that is none of its first four.
    stop = next(token for token in expected[0][4:] if token not in expected[0][:4])
    return run.Plan(tasks(stop), parse_methods("locks-r8"), [64, 512], True, 16, batch=4)


@pytest.fixture(scope="module")
def rows(model: Path, plan: run.Plan, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return answered(model, plan, tmp_path_factory.mktemp("log") / "eval.jsonl")


def texts(rows: list[Row], task: str, budget: int | None) -> list[str]:
    return [row["answer"] for row in rows if (row["task"], row["budget"]) == (task, budget)]


def test_full_attention_says_what_transformers_says(model: Path, rows: list[Row], expected: list[list[int]]):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert texts(rows, "greedy", None) == [tokenizer.decode(ids) for ids in expected]


def test_a_covering_budget_says_the_same_and_a_small_one_does_not(rows: list[Row]):
    for task in ("greedy", "stopped", "drawn"):
        assert texts(rows, task, 512) == texts(rows, task, None)
    assert texts(rows, "greedy", 64) != texts(rows, "greedy", None)


def test_answers_end_before_a_stop_token_and_samples_differ(
    model: Path, plan: run.Plan, rows: list[Row], expected: list[list[int]]
):
    tokenizer = AutoTokenizer.from_pretrained(model)
    (stop,) = plan.tasks[1].stop_ids
    whole = expected[0]
    first = next(row for row in rows if (row["task"], row["budget"], row["index"]) == ("stopped", None, 0))
    assert first["answer"] == tokenizer.decode(whole[: whole.index(stop)])
    assert first["tokens"] == whole.index(stop)
    assert len(set(texts(rows, "drawn", None))) == 3


def test_every_row_is_there_once_with_its_traffic(plan: run.Plan, rows: list[Row]):
    keys = [
        tuple(row[name] for name in ("task", "length", "index", "sample", "selector", "page", "budget"))
        for row in rows
    ]
    assert sorted(keys, key=str) == sorted((key for task in plan.tasks for key in plan.keys(task)), key=str)
    token = 2 * 2 * LAYERS * HEADS * WIDTH
    for budget in (None, 64, 512):
        mine = [row for row in rows if (row["task"], row["budget"]) == ("greedy", budget)]
        # Every token but the prompt's and an answer's last one is a step that sees it; a stop token is no answer's.
        seen = [
            row["prompt_tokens"] + step
            for row in mine
            for step in range(1, row["tokens"] + (row["tokens"] < NEW))
        ]
        dense, read = token * sum(seen) / len(seen), mine[0]["bytes_per_step"]
        assert [row["dense_bytes_per_step"] for row in mine] == pytest.approx([dense] * 3, abs=1)
        # A record of rank 8 is a tenth to a sixth of its page.
        if budget == 64:
            assert 48 * token + dense / 10 - token * 16 < read < 64 * token + dense / 6
        else:
            assert dense - 1 <= read <= (dense + 1 if budget is None else dense * 7 / 6)


def test_a_log_that_was_cut_is_gone_on_from(model: Path, plan: run.Plan, rows: list[Row], tmp_path: Path):
    path = tmp_path / "eval.jsonl"
    kept = [row for row in rows if row["budget"] != 64] + [row for row in rows if row["budget"] == 64][:2]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"family": "test"}, *kept]) + '{"task": "gr')
    again = answered(model, plan, path)

    def said(some: list[Row]) -> list[tuple[Any, ...]]:
        return sorted((r["task"], r["index"], r["sample"], str(r["budget"]), r["answer"]) for r in some)

    assert again[: len(kept)] == kept
    assert said(again) == said(rows)


def test_what_this_engine_cannot_do_is_refused(model: Path):
    with pytest.raises(ValueError, match=r"in the engine vllm, got 'h2o'; the engine hf has the others"):
        vllm_run.check(parse_methods("locks,h2o"), model, 1)
    with pytest.raises(ValueError, match="tail: expected 1 in the engine vllm"):
        vllm_run.check(parse_methods("locks"), model, 3)
    for path in (None, model / "none"):
        with pytest.raises(SetupError, match=f"expected a model directory for the engine vllm, got {path}"):
            vllm_run.check(parse_methods("locks"), path, 1)
    vllm_run.check(parse_methods("locks-r2"), model, 1)


def test_a_lines_method_is_the_engines_settings(model: Path):
    plan = run.Plan([], parse_methods("locks-r8c8", 32), [96], False, 32, batch=3)
    found = vllm_run.settings(model, plan, plan.configs[0], 700)
    assert found["additional_config"]["locks"] == {
        "budget": 96,
        "page": 32,
        "rank": 8,
        "mean_bits": 8,
        "basis_bits": 4,
        "coef_bits": 8,
    }
    assert (found["max_model_len"], found["max_num_seqs"], found["dtype"]) == (700, 3, "float32")
