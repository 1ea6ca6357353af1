"""Long generation: what its texts hold where, and a run of it under selectors and evictors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from locks.cli import app
from locks.quality import engine, longgen, methods, run
from locks.quality.example import Example, Forced, Read
from locks.quality.log import Log
from locks.quality.text import read_prose
from tests.quality_model import save_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("wonderwords")

PROSE = read_prose(None)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    """A token a byte."""
    return transformers.AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def chatty(model_dir: Path) -> Any:
    """The same with a chat template."""
    found = transformers.AutoTokenizer.from_pretrained(model_dir)
    found.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return found


@pytest.mark.parametrize("length", [1900, 2048, 6001])
def test_numbers_are_noted_early_and_asked_for_late(tokenizer: Any, length: int):
    task = longgen.task(tokenizer, length, count=3, seed=42, prose=PROSE)
    for index in task.indices:
        example = task.make(index)
        (forced,) = example.forced
        assert len(forced.feed) == len(forced.targets) == length
        text = tokenizer.decode(forced.feed)
        noted = dict(re.findall(r"The special magic number for (\w+) is: (\d{4})\.", text))
        assert noted == example.facts
        assert len(noted) == len({value[0] for value in noted.values()}) == 8
        for key, value in noted.items():
            # A sentence of prose may be as long as this.
            assert text.index(f"{key} is: {value}.") < length / 4 + 400
            assert text.count(f"number for {key}") == 3
            assert text.count(f"number for {key}?") == 1
        # Each value stands twice: noted and given as the answer, whose last digit is not read.
        assert sorted(text.count(value) for value in noted.values()) == [1] + [2] * 7
        body = text[: text.index("What is the special")]
        prose = re.sub(r" The special magic number for \w+ is: \d{4}\.", "", body)
        assert prose.strip()[:200] in PROSE
        assert not any(key in prose.lower().split() for key in noted)


def test_what_counts_is_the_numbers_behind_their_questions(tokenizer: Any):
    (forced,) = longgen.task(tokenizer, 1900, count=1, seed=1, prose=PROSE).make(0).forced
    text = tokenizer.decode(forced.feed)
    wanted, runs = "", []
    for at, token in enumerate(forced.targets):
        if token >= 0:
            wanted += tokenizer.decode([token])
            runs.append(at)
    assert len(wanted) == 8 * 4
    for i, (key, value) in enumerate(re.findall(r"is the .*? for (\w+)\?\n.*?: (\d{3,4})", text)):
        assert wanted[4 * i :].startswith(value)
        # The question's last letters and the colon come right before.
        assert text[: runs[4 * i] + 1].endswith(f"The special magic number for {key} is: ")
        assert runs[4 * i : 4 * i + 4] == list(range(runs[4 * i], runs[4 * i] + 4))


def test_equal_seeds_make_equal_examples_and_others_others(tokenizer: Any):
    def feed(seed: int, index: int, length: int = 2048) -> list[int]:
        task = longgen.task(tokenizer, length, count=9, seed=seed, prose=PROSE)
        return task.make(index).forced[0].feed

    assert feed(42, 3) == feed(42, 3)
    assert len({tuple(feed(*key)) for key in ((42, 3), (42, 4), (1, 3), (42, 3, 2049))}) == 4


def test_questions_are_turns_where_there_is_a_template(chatty: Any):
    example = longgen.task(chatty, 2048, count=1, seed=42, prose=PROSE).make(0)
    assert chatty.decode(example.ids).startswith("[user]Write a long notebook")
    assert chatty.decode(example.ids).endswith("<end>[assistant]")
    text = chatty.decode(example.forced[0].feed)
    assert (
        len(re.findall(r"<end>\[user\]What is [\w ]+\?<end>\[assistant\]The special [\w ]+: \d{3,4}", text))
        == 8
    )
    plain = longgen.task(chatty, 2048, count=1, seed=42, prose=PROSE, chat=False).make(0)
    assert "[user]" not in chatty.decode(plain.ids + plain.forced[0].feed)


def test_a_length_without_room_says_how_much_it_takes(tokenizer: Any):
    with pytest.raises(
        ValueError, match=r"lengths: expected at least (\d+) decoded tokens, got 900"
    ) as error:
        longgen.task(tokenizer, 900, count=1, seed=42, prose=PROSE).make(0)
    match = re.search(r"least (\d+)", str(error.value))
    assert match is not None
    # Names differ in length from one length to another, by a few letters.
    assert longgen.task(tokenizer, int(match[1]) + 200, count=1, seed=42, prose=PROSE).make(0).ids


def test_texts_that_follow_each_other_in_a_row_are_read_as_one_pass_reads_them(model_dir: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()
    row, texts = list(range(40)), [Forced([3, 4], [5, 6, 7]), Forced([8], [9]), Forced([2, 1], [5, 5])]
    flat = [token for text in texts for token in text.question_ids + text.answer_ids]
    counts = [
        counted
        for text in texts
        for counted in [False] * len(text.question_ids) + [True] * len(text.answer_ids)
    ]
    with torch.no_grad():
        logits = model(torch.tensor([row + flat])).logits[0, len(row) - 1 : -1].double()
    wanted, chosen = torch.tensor(flat)[counts], logits[counts]
    nll = float(torch.nn.functional.cross_entropy(chosen, wanted))
    chain = Forced(texts[0].question_ids, texts[0].answer_ids, tuple(texts[1:]))
    with engine.enabled(model):
        session = engine.Session(model, engine.prefill(model, [row]), None)
        session.rewind(None)
        (found,) = session.read([chain])
    assert (found.right, found.total) == (int((chosen.argmax(-1) == wanted).sum()), 6)
    assert found.nll == pytest.approx(nll, rel=1e-4)


def test_the_score_is_the_share_of_digits(tokenizer: Any):
    task = longgen.task(tokenizer, 2000, count=1, seed=0, prose=PROSE)
    assert task.score(Example(0, [1]), [Read(24, 32, 0.5)]) == {"digits": 0.75}


def test_selectors_and_evictors_run_it(model_dir: Path, tokenizer: Any, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()
    task = longgen.task(tokenizer, 240, count=2, seed=42, prose=PROSE, notes=1)
    small = "locks,locks-r8,oracle,quest,streaming,snapkv,h2o,rkv"
    with Log(tmp_path / "longgen.jsonl", {}) as log:
        for names, budget, full in ((small, 64, True), ("locks,snapkv,h2o,rkv", 512, False)):
            plan = run.Plan([task], methods.parse_methods(names), [budget], full, 16, batch=2)
            run.run(model, tokenizer, plan, log)
        rows = list(log.rows.values())
    full = [row["score"] for row in rows if row["selector"] == "full"]
    assert len(rows) == 2 * (1 + 8 + 4)
    for row in rows:
        assert (row["length"], row["tokens"], row["prompt_tokens"] - 240) == (240, 4, len(task.make(0).ids))
        if row["selector"] != "full":
            assert row["bytes_per_step"] < row["dense_bytes_per_step"] or row["budget"] == 512
        if row["budget"] == 512:
            # It covers the prompt and all that is decoded.
            assert row["score"] == full[row["index"]]


def test_a_prompt_that_leads_beyond_the_models_context_is_named(model_dir: Path, tmp_path: Path):
    given = ["--model", str(model_dir), "--out", str(tmp_path), "--lengths", "2048", "--budgets", "full"]
    result = CliRunner().invoke(app, ["eval", "longgen", *given])
    assert result.exit_code == 1
    assert (
        "lengths: expected longgen to take at most 2048 tokens, the model's context, got 2" in result.stderr
    )
