"""`locks eval` from end to end on a tiny model: resumed runs, damaged logs, summaries, and what is refused when."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from locks.cli import app
from locks.models import SetupError, load_model
from locks.quality import engine, figure, run, summary
from locks.quality.example import Example, Task
from locks.quality.log import Log
from locks.quality.methods import NAMES, parse_methods
from tests.quality_model import save_model

pytest.importorskip("transformers")
pytest.importorskip("wonderwords")

ROOT = Path(__file__).resolve().parents[1]
FAST = ("--selector", "locks,oracle", "--budgets", "64,full", "--examples", "2", "--batch", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def evaluate(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, args)], env={"COLUMNS": "120"})


def refused(*args: str | Path) -> str:
    """The one line that a mistake gets."""
    result = evaluate(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    tasks = ("--tasks", "niah_single_1,niah_multikey_2", "--lengths", "1200")
    result = evaluate("ruler", "--model", model, "--out", out, *FAST, *tasks)
    assert result.exit_code == 0, result.output
    assert "niah_single_1" in result.stdout
    return out


def test_a_row_for_each_example_and_config(finished: Path):
    header, *rows = lines(finished / "ruler.jsonl")
    assert header["family"] == "ruler"
    assert header["seed"] == 42
    places = {(row["task"], row["index"], row["selector"], row["budget"]) for row in rows}
    assert len(rows) == len(places) == 2 * 2 * 3
    assert {row["selector"] for row in rows} == {"full", "locks", "oracle"}
    for row in rows:
        assert row["prompt_tokens"] + 128 <= 1200
        assert row["tokens"] <= 128
        assert 0 <= row["score"] <= 1
        assert row["score"] == row["scores"]["all"]
    locks = next(row for row in rows if row["selector"] == "locks")
    assert (locks["rank"], locks["page"], locks["bits"]) == (4, 16, [8, 4, 4])
    assert 0 < locks["bytes_per_step"] < locks["dense_bytes_per_step"]


def test_the_summary_has_a_row_a_task_and_config_and_their_mean(finished: Path):
    found = json.loads((finished / "summary.json").read_text())
    assert {row["task"] for row in found["rows"]} == {"niah_single_1", "niah_multikey_2", "mean"}
    assert len(found["rows"]) == 3 * 3
    for row in found["rows"]:
        assert row["n"] == row["expected"] == (4 if row["task"] == "mean" else 2)
        assert 0 <= row["ci_low"] <= row["score"] <= row["ci_high"] <= 100
        assert ("minus_full" in row) == (row["selector"] != "full")
        assert ("minus_oracle" in row) == (row["selector"] == "locks")
    assert found["versions"]["torch"] == torch.__version__
    assert (finished / "summary.png").stat().st_size > 10_000


def test_a_finished_run_runs_nothing_again(finished: Path, model: Path):
    before = (finished / "ruler.jsonl").read_bytes()
    tasks = ("--tasks", "niah_single_1,niah_multikey_2", "--lengths", "1200")
    result = evaluate("ruler", "--model", model, "--out", finished, *FAST, *tasks, "--json")
    assert result.exit_code == 0
    assert (finished / "ruler.jsonl").read_bytes() == before
    assert json.loads(result.stdout)["missing"] == 0


def test_a_killed_run_goes_on_where_it_was(finished: Path, model: Path, tmp_path: Path):
    whole = lines(finished / "ruler.jsonl")
    text = (finished / "ruler.jsonl").read_text().splitlines(keepends=True)
    # Killed in the middle of a batch's third write, in the middle of a line.
    (tmp_path / "ruler.jsonl").write_text("".join(text[:6]) + text[6][:40])
    tasks = ("--tasks", "niah_single_1,niah_multikey_2", "--lengths", "1200")
    result = evaluate("ruler", "--model", model, "--out", tmp_path, *FAST, *tasks)
    assert result.exit_code == 0, result.output

    def places(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return sorted((r["task"], r["index"], r["selector"], str(r["answer"])) for r in rows[1:])

    again = lines(tmp_path / "ruler.jsonl")
    assert again[:6] == whole[:6]
    assert places(again) == places(whole)


def test_an_interrupted_process_keeps_what_it_has(model: Path, tmp_path: Path):
    command = [sys.executable, "-m", "locks", "eval", "ruler", "--model", str(model), "--out", str(tmp_path)]
    command += ["--selector", "locks", "--budgets", "64,full", "--examples", "500", "--lengths", "1200"]
    command += ["--tasks", "niah_single_1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    log = tmp_path / "ruler.jsonl"
    # Where the tests run in a shell's background, interrupts are ignored, and a child's would be too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        signal.signal(signal.SIGINT, before)
        try:
            deadline = time.monotonic() + 300
            while not (log.exists() and log.read_bytes().count(b"\n") > 5) and time.monotonic() < deadline:
                time.sleep(0.1)
            running.send_signal(signal.SIGINT)
            # It ends the batch that it is at, which takes minutes on a busy machine.
            out, err = running.communicate(timeout=300)
        finally:
            running.kill()
    assert running.returncode == 1, err
    assert "cut short: " in err
    assert "answers are missing" in err
    assert " of 500" in out
    assert len(lines(log)) > 5
    assert json.loads((tmp_path / "summary.json").read_text())["rows"][0]["expected"] == 500


def test_another_seed_does_not_go_into_the_same_log(finished: Path, model: Path):
    tasks = ("--tasks", "niah_single_1", "--lengths", "1200", "--seed", "1")
    message = refused("ruler", "--model", model, "--out", finished, *FAST, *tasks)
    assert "made with seed 42, asked for 1: name another directory with --out" in message


def test_perplexity_runs(model: Path, tmp_path: Path):
    given = ("--model", model, "--lengths", "1024", "--selector", "locks", "--budgets", "64,1024,full")
    result = evaluate("perplexity", *given, "--examples", "2", "--batch", "2", "--out", tmp_path / "p")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "p" / "summary.json").read_text())["rows"]
    by = {(row["selector"], row["budget"]): row for row in rows}
    full, covering, small = by["full", None], by["locks", 1024], by["locks", 64]
    assert {row["unit"] for row in rows} == {"perplexity"}
    assert covering["score"] == pytest.approx(full["score"], rel=1e-4)
    assert covering["minus_full"] == pytest.approx(0, abs=0.01)
    assert small["minus_full"] == pytest.approx(100 * (small["score"] / full["score"] - 1))
    logged = [
        row["score"] for row in lines(tmp_path / "p" / "perplexity.jsonl")[1:] if row["selector"] == "full"
    ]
    assert full["score"] == pytest.approx(math.exp(np.mean(logged)))


def plan(**changes: Any) -> run.Plan:
    def task(name: str) -> Task:
        return Task(name, 100, 3, lambda index: Example(index, [1]), lambda *_: {})

    given = {
        "tasks": [task("a"), task("b")],
        "methods": parse_methods("locks,oracle"),
        "budgets": [64],
        "full": True,
        "page": 16,
    }
    return run.Plan(**{**given, **changes})


def rows_of(plan: run.Plan, scores: Mapping[tuple[str, str], Sequence[float]]) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "length": 100,
            "index": index,
            "sample": 0,
            **next(c for c in plan.configs if c.facts(16)["selector"] == selector).facts(16),
            "score": score,
            "bytes_per_step": 10,
            "dense_bytes_per_step": 100,
        }
        for (task, selector), values in scores.items()
        for index, score in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("room", "sparse", "dense"),
    [
        (1, [5, 2, 1, 1, 1, 1, 1, 1, 1], [5, 1, 1]),
        # The third batch is one that was answered densely and one that was not.
        (2, [5, 2, 2, 2, 1], [5, 2, 1]),
        (4, [5, 2, 2, 2, 1], [5, 2, 1]),
        (5, [5, 2], [5, 2]),
    ],
)
def test_batches_that_do_not_fit_into_memory_are_halved(
    room: int,
    sparse: list[int],
    dense: list[int],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    asked: dict[bool, list[int]] = {True: [], False: []}

    def generate(session: engine.Session, prompts: Sequence[Any], *more: Any) -> Any:
        """Fails as a GPU does where more than `room` rows decode sparsely: behind the first line of a batch."""
        asked[session.selector is None].append(len(prompts))
        if session.selector is not None and len(prompts) > room:
            raise torch.OutOfMemoryError("no room")
        return real(session, prompts, *more)

    real = engine.Session.generate
    monkeypatch.setattr(engine.Session, "generate", generate)
    loaded, tokenizer = load_model(model)
    with Log(tmp_path / "log.jsonl", {}) as log:
        run.run(loaded, tokenizer, short_plan(7), log)
    _, *rows = lines(tmp_path / "log.jsonl")
    places = sorted((row["selector"], row["index"]) for row in rows)
    assert places == [(selector, index) for selector in ("full", "oracle") for index in range(7)]
    assert asked == {True: dense, False: sparse}


def test_an_example_that_does_not_fit_alone_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def prefill(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine, "prefill", prefill)
    loaded, tokenizer = load_model(model)
    with (
        Log(tmp_path / "log.jsonl", {}) as log,
        pytest.raises(SetupError, match="short: one example of 100 tokens does not fit into memory alone"),
    ):
        run.run(loaded, tokenizer, short_plan(2), log)


def short_plan(count: int) -> run.Plan:
    """Answers of two tokens to prompts of about ninety, five examples at once."""
    task = Task(
        "short",
        100,
        count,
        lambda index: Example(index, [1 + index] * (90 + index % 3), max_new_tokens=2),
        lambda example, answer: {"all": float(len(answer))},
    )
    return plan(tasks=[task], methods=parse_methods("oracle"), batch=5)


def test_summary_pairs_examples_and_averages_tasks():
    mine = plan()
    scores = {
        ("a", "full"): [1, 1, 1],
        ("a", "locks"): [1, 0, 1],
        ("a", "oracle"): [1, 1, 0],
        ("b", "full"): [1, 0, 1],
        ("b", "locks"): [1, 0, 1],
        ("b", "oracle"): [1, 0, 1],
    }
    found = {(row["task"], row["selector"]): row for row in summary.summarize(mine, rows_of(mine, scores))}
    assert found["a", "locks"]["score"] == pytest.approx(200 / 3)
    assert found["a", "locks"]["minus_full"] == pytest.approx(-100 / 3)
    assert found["a", "locks"]["minus_oracle"] == pytest.approx(0)
    assert found["a", "full"]["ci_low"] == found["a", "full"]["ci_high"] == 100
    # Equal answers to every example: no doubt about the difference, whatever the scores' spread.
    assert found["b", "locks"]["minus_full_low"] == found["b", "locks"]["minus_full_high"] == 0
    assert found["b", "locks"]["ci_low"] < found["b", "locks"]["ci_high"]
    assert found["mean", "locks"]["score"] == pytest.approx(200 / 3)
    assert found["mean", "locks"]["n"] == 6
    assert summary.missing(mine, rows_of(mine, scores)) == 0


def test_every_selector_has_a_line_of_its_own_in_the_picture(tmp_path: Path):
    names = [*NAMES, *(f"locks-r{rank}" for rank in (1, 2, 4, 8)), "shared-r2"]
    mine = plan(methods=parse_methods(",".join(names)))
    rows = rows_of(mine, {("a", name): [1, 0, 1] for name in ["full", *names]})
    assert len({row["selector"] for row in rows}) == 1 + len(names) > 15
    figure.scores(summary.summarize(mine, rows), tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "scores",
    [
        {("a", "full"): [1, 0, 1]},
        # Another task that was tried under full attention alone, and a selector that one task lacks.
        {("a", "full"): [1], ("b", "full"): [1], ("b", "locks"): [1, 1]},
        {("a", "full"): [1], ("a", "oracle"): [1], ("b", "full"): [1], ("b", "locks"): [1]},
        {("b", "oracle"): [0, 0, 0]},
    ],
)
def test_a_picture_of_what_a_cut_run_has(tmp_path: Path, scores: dict[tuple[str, str], list[float]]):
    mine = plan()
    made = [row for row in summary.summarize(mine, rows_of(mine, scores)) if row["task"] != summary.MEAN]
    figure.scores(made, tmp_path / "some.png")
    assert (tmp_path / "some.png").stat().st_size > 10_000


def test_a_task_that_some_config_lacks_is_in_no_mean_and_says_so():
    mine = plan()
    scores = {
        ("a", "full"): [1, 1, 1],
        ("a", "locks"): [1, 0],
        ("a", "oracle"): [0, 0, 0],
        ("b", "full"): [1, 0, 1],
    }
    rows = rows_of(mine, scores)
    found = {(row["task"], row["selector"]): row for row in summary.summarize(mine, rows)}
    assert found["mean", "full"]["tasks"] == ["a"]
    assert found["mean", "full"]["score"] == 100
    assert (found["a", "locks"]["n"], found["a", "locks"]["expected"]) == (2, 3)
    # Paired over the two examples that both have.
    assert found["a", "locks"]["minus_full"] == -50
    assert ("b", "locks") not in found
    assert summary.missing(mine, rows) == 18 - 11


def test_intervals_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        groups = [rng.random(60) < chance for chance in (0.3, 0.8)]
        found = summary.interval([group.astype(float) for group in groups])
        covered += found.low <= 0.55 <= found.high
    assert 0.9 <= covered / 200 <= 0.99


def test_samples_of_an_example_are_one_number():
    task = Task("a", 100, 2, lambda index: Example(index, [1]), lambda *_: {}, samples=2)
    mine = plan(tasks=[task], methods=[], budgets=[])
    rows = rows_of(mine, {("a", "full"): [1, 1]})
    rows += [{**row, "sample": 1, "score": 0} for row in rows[:1]]
    (found,) = summary.summarize(mine, rows)
    # The second example lacks a sample.
    assert (found["score"], found["n"], found["expected"]) == (50, 1, 2)
    assert summary.missing(mine, rows) == 1


def row(index: int, **more: Any) -> dict[str, Any]:
    key = {"task": "a", "length": 1, "sample": 0, "selector": "full", "page": 16, "budget": None}
    return {**key, "index": index, **more}


def test_a_log_drops_a_torn_line_and_counts_nothing_twice(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    with Log(path, {"seed": 1}) as log:
        log.append([row(0, score=1.0), row(1, score=0.5)])
        log.append([row(1, score=0.0), row(2, score=0.25)])
    assert [r["score"] for r in lines(path)[1:]] == [1.0, 0.5, 0.25]
    text = path.read_bytes()
    path.write_bytes(text + b'{"task": "a", "index"')
    with Log(path, {"seed": 1}) as log:
        assert len(log.rows) == 3
        assert path.read_bytes() == text
        log.append([row(3, score=0.0)])
    assert len(lines(path)) == 5


def test_a_log_refuses_another_header_a_damaged_line_and_a_second_writer(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    with Log(path, {"seed": 1}) as log:
        log.append([row(0)])
        with pytest.raises(SetupError, match="another run writes to it"), Log(path, {"seed": 1}):
            pass
    with pytest.raises(SetupError, match="made with seed 1, asked for 2"), Log(path, {"seed": 2}):
        pass
    path.write_text(path.read_text() + "{}\n" + json.dumps(row(1)) + "\n")
    with pytest.raises(SetupError, match=r"log.jsonl: line 3 is damaged"), Log(path, {"seed": 1}):
        pass


def test_mistakes_are_named_before_a_weight_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("locks.quality.command.load_model", loaded)
    given = ("--model", model)
    assert refused("rule", *given).startswith("task: expected one of ruler, needles, perplexity")
    assert "got 'niah'" in refused("ruler", *given, "--tasks", "niah")
    assert refused("ruler", *given, "--tasks", "niah").startswith("task: expected some of niah_single_1")
    assert refused("ruler", *given, "--selector", "snap").startswith("selector: expected locks, oracle")
    assert refused("ruler", *given, "--budgets", "100").startswith("budget: expected a multiple of the page")
    assert "'full'" in refused("ruler", *given, "--budgets", "all")
    assert refused("ruler", *given, "--page", "17").startswith("page: expected one of (16, 32, 64)")
    assert refused("ruler", *given, "--engine", "tgi").startswith("engine: expected one of hf, vllm")
    vllm = (*given, "--engine", "vllm")
    assert refused("ruler", *vllm, "--selector", "locks-r8,quest").startswith(
        "selector: expected locks or one"
    )
    assert refused("needles", *vllm).startswith(
        "task: expected one of ruler, longbench, math500, aime, infinite"
    )
    assert refused("ruler", *vllm, "--selector", "locks", "--tail", "2").startswith("tail: expected 1 in the")
    assert refused("ruler", *given, "--lengths", "4k") == (
        "lengths: expected 1 to 2048 tokens, the model's context, got 4096"
    )
    assert refused("ruler", *given, "--lengths", "long").startswith("lengths: expected tokens such as 4096")
    assert refused("ruler", *given, "--examples", "0") == "examples: expected at least 1, got 0"
    assert refused("ruler", *given, "--batch", "0") == "batch: expected at least 1, got 0"
    assert "no text file at" in refused("ruler", *given, "--haystack", tmp_path / "none.txt")
    assert "squad: no file at" in refused(
        "ruler", *given, "--tasks", "qa_1", "--squad", tmp_path / "none.json"
    )
    assert refused("ruler", *given, "--selector", "", "--budgets", "64").startswith(
        "budgets: expected 'full' or"
    )


def test_an_engine_that_is_not_there_is_named(model: Path, monkeypatch: pytest.MonkeyPatch):
    given = ("ruler", "--model", model, "--engine", "vllm", "--selector", "locks")
    for found, message in (
        (None, "engine: vLLM is not installed; pip install 'locks-attention[vllm]'"),
        (("vllm", "0.1.0"), "engine: vLLM 0.1.0 is not supported on "),
    ):
        monkeypatch.setattr("locks.vllm.compat.installed", lambda found=found: found)
        assert refused(*given).startswith(message)


def test_a_directory_without_weights_or_tokenizer_is_named(model: Path, tmp_path: Path):
    assert "expected a model directory" in refused("ruler", "--model", tmp_path / "none", *FAST)
    for kept, lacking in (("*token*", "weights"), ("*.safetensors", "tokenizer")):
        folder = tmp_path / lacking
        folder.mkdir()
        for file in [model / "config.json", *model.glob(kept)]:
            (folder / file.name).write_bytes(file.read_bytes())
        assert f"no {lacking}, looked for" in refused("ruler", "--model", folder, *FAST)


def test_a_length_without_room_for_a_task_is_found_before_the_run(model: Path, tmp_path: Path):
    tasks = ("--tasks", "niah_single_1,niah_multivalue", "--lengths", "1200", "--out", tmp_path)
    assert refused("ruler", "--model", model, *FAST, *tasks).startswith("length: expected room for")
    assert not (tmp_path / "ruler.jsonl").exists()


def test_needles_run(model: Path, tmp_path: Path):
    given = ("--lengths", "1500", "--selector", "oracle", "--budgets", "64,full", "--examples", "1")
    result = evaluate("needles", "--model", model, "--out", tmp_path, *given)
    assert result.exit_code == 0, result.output
    rows = lines(tmp_path / "needles.jsonl")[1:]
    assert [(row["selector"], row["tokens"]) for row in rows] == [("full", 8 * 4), ("oracle", 8 * 4)]
    assert all(row["prompt_tokens"] <= 1500 for row in rows)


def test_problems_are_answered_several_times_alike_by_every_selector(model: Path, tmp_path: Path):
    (tmp_path / "test.jsonl").write_text(
        '{"problem": "1+1?", "answer": "2"}\n{"problem": "2+2?", "answer": "4"}\n'
    )
    given = (
        "--data",
        tmp_path,
        "--samples",
        "3",
        "--lengths",
        "160",
        "--selector",
        "locks",
        "--budgets",
        "256,full",
    )
    result = evaluate("math500", "--model", model, "--out", tmp_path / "out", "--batch", "6", *given)
    assert result.exit_code == 0, result.output
    rows = lines(tmp_path / "out" / "math500.jsonl")[1:]
    answers = {(row["selector"], row["index"], row["sample"]): row["answer"] for row in rows}
    assert len(rows) == len(answers) == 2 * 2 * 3
    # A covering budget and the same draws: the same answers; another sample: another.
    assert all(answers["locks", i, s] == answers["full", i, s] for i in range(2) for s in range(3))
    assert len({answers["full", 0, s] for s in range(3)}) == 3
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert {(row["n"], row["expected"]) for row in found} == {(2, 2)}


def test_a_dataset_that_is_nowhere_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for family, file in (("longbench", "narrativeqa"), ("math500", "test"), ("infinitebench", "passkey")):
        assert f"give {file}.jsonl, or its directory, with --data" in refused(family, "--model", model, *FAST)
    assert "looked for" in refused("aime", "--model", model, *FAST, "--data", tmp_path)
