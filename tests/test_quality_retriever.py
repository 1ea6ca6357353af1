"""The retriever: widening changes nothing, lessons end in the answers that RULER scores, training resumes."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from locks.models import load_smollm2
from locks.quality import ruler_lists, ruler_niah
from locks.quality.log import Log
from locks.quality.scores import match_all
from locks.quality.text import all_words, read_prose
from tests.quality_model import save_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("wonderwords")

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> Any:
    """A script beside the others, which import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench" / "quality"))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_smollm2(device="cpu", dtype=torch.float32)[1]


@pytest.fixture(scope="module")
def school(tokenizer: Any) -> Any:
    School = script("lessons").School

    return School(tokenizer, read_prose(None))


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})).eval()


@pytest.mark.parametrize(("head_dim", "group"), [(32, 4), (16, 3), (64, 3), (32, 8)])
def test_a_widened_model_says_what_the_old_one_said(head_dim: int, group: int):
    widen = script("widen").widen

    model = tiny()
    wide = widen(model, head_dim=head_dim, group=group, context=256).eval()
    assert (wide.config.head_dim, wide.config.num_attention_heads) == (head_dim, 2 * group)
    assert wide.model.layers[0].self_attn.k_proj.weight.shape == (2 * head_dim, 96)
    ids = torch.randint(64, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    # What is new is there to be learnt: every new row of keys has a query, every new head an output to grow.
    wide.train()(ids, labels=ids).loss.backward()
    keys = wide.model.layers[0].self_attn.k_proj.weight.grad.unflatten(0, (2, head_dim))
    outputs = wide.model.layers[0].self_attn.o_proj.weight.grad.unflatten(1, (2 * group, head_dim))
    assert bool((keys.norm(dim=-1) > 0).all())
    assert bool((outputs.norm(dim=0) > 0).all())


def test_a_widened_model_may_turn_more_slowly():
    widen = script("widen").widen

    wide = widen(tiny(), head_dim=32, group=4, context=256, theta=40_000.0)
    own = widen(tiny(), head_dim=32, group=4, context=256)
    assert wide.config.rope_parameters["rope_theta"] == 40_000.0
    assert wide.model.rotary_emb.inv_freq[-1] < own.model.rotary_emb.inv_freq[-1]


def test_a_model_is_not_narrowed():
    widen = script("widen").widen

    with pytest.raises(ValueError, match="expected a multiple of 16 and at least 3, got 24 and 2"):
        widen(tiny(), head_dim=24, group=2, context=128)


def answers(tokenizer: Any, lesson: Any) -> list[tuple[str, str]]:
    """What stands before each answer, and the answer."""
    found, first = [], 0
    for at, (token, label) in enumerate(zip(lesson.ids, lesson.labels, strict=True)):
        assert label in (-100, token)
        if label == tokenizer.eos_token_id:
            start = at
            while start and lesson.labels[start - 1] != -100:
                start -= 1
            found.append((tokenizer.decode(lesson.ids[first:start]), tokenizer.decode(lesson.ids[start:at])))
            first = at + 1
    return found


@pytest.mark.parametrize("kind", ruler_niah.TASKS)
def test_needle_lessons_ask_as_ruler_asks_and_answer_what_is_hidden(school: Any, tokenizer: Any, kind: str):
    spec = ruler_niah.TASKS[kind]
    for seed in range(3):
        lesson = school.of_kind(kind, 4096, Random(seed))
        assert 3000 < len(lesson.ids) <= 4096
        text = tokenizer.decode(lesson.ids)
        hidden: dict[str, list[str]] = {}
        for key, value in re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", text):
            hidden.setdefault(key, []).append(value)
        asked = answers(tokenizer, lesson)
        assert len(asked) >= 2
        for before, answer in asked:
            query = re.findall(r"What .* for (.*) mentioned in the provided text\?", before)[-1]
            wanted = [value for key in re.split(r", and |, ", query) for value in hidden[key]]
            assert len(wanted) == spec.queries * spec.values
            assert match_all(answer, wanted) == 1.0


def test_lists_and_chains_are_answered_rightly(school: Any, tokenizer: Any):
    for seed in range(3):
        lesson = school.of_kind("vt", 4096, Random(seed))
        assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", tokenizer.decode(lesson.ids)))
        for before, answer in answers(tokenizer, lesson):
            value = re.findall(r"assigned the value (\d+), they are", before)[-1]
            names = answer.split()
            assert assigned[names[0]] == value
            assert [assigned[name] for name in names[1:]] == names[:-1]
        for before, answer in answers(tokenizer, school.of_kind("cwe", 4096, Random(seed))):
            counts = Counter(re.findall(r" \d+\. (\S+)", before.rsplit("Below is a numbered", 1)[1]))
            most = max(counts.values())
            assert sorted(re.findall(r"\d+\. (\S+)", answer)) == sorted(
                w for w, n in counts.items() if n == most
            )
        for before, answer in answers(tokenizer, school.of_kind("fwe", 4096, Random(seed))):
            coded = before.rsplit("coded words.", 1)[1].split("Question:")[0].split()
            ranked = [word for word, _ in Counter(coded).most_common(4)]
            assert ranked[0] == "..."
            assert re.findall(r"[a-z]{6}", answer) == ranked[1:]


def test_an_entry_of_several_words_is_one_entry(school: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    pairs = tuple(f"{a} {b}" for a in ("contact", "dump", "dune", "dust") for b in all_words()[:500])
    monkeypatch.setattr(ruler_lists, "all_words", lambda: pairs)
    for seed in range(3):
        for before, answer in answers(tokenizer, school.of_kind("cwe", 4096, Random(seed))):
            listed = before.rsplit("Below is a numbered", 1)[1].split("often.\n")[-1].split("\nQuestion")[0]
            counts = Counter(entry.strip() for entry in re.split(r"\d+\. ", listed) if entry.strip())
            assert set(counts) <= set(pairs)
            common = {entry for entry, _ in counts.most_common(ruler_lists.COMMON)}
            assert {entry.strip() for entry in re.split(r"\d+\. ", answer) if entry.strip()} == common


def test_lessons_depend_on_their_number_alone(school: Any):
    assert school.lesson(512, "train", 0, 7) == school.lesson(512, "train", 0, 7)
    assert len({tuple(school.lesson(512, "train", 0, n).ids) for n in range(8)}) == 8


def test_the_schedule_grows_lessons_and_ends_with_a_small_rate():
    LAST = script("train_retriever").LAST
    learning_rate = script("train_retriever").learning_rate
    stage_length = script("train_retriever").stage_length

    assert [stage_length(share, 16_384) for share in (0, 0.2, 0.4, 0.7, 1)] == [
        2048,
        4096,
        8192,
        16384,
        16384,
    ]
    rates = [learning_rate(share / 100, 1.0) for share in range(101)]
    assert max(rates) == pytest.approx(1.0, abs=0.02)
    assert rates[0] < 0.1
    assert rates[100] == pytest.approx(LAST)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_training_lowers_the_loss_and_goes_on_from_its_checkpoint(
    school: Any, tokenizer: Any, tmp_path: Path
):
    School = script("lessons").School
    Trainer = script("train_retriever").Trainer
    train = script("train_retriever").train

    easy = School(tokenizer, read_prose(None), {"niah_multikey_2": 1})

    def trainer(seconds: float) -> Any:
        model = tiny(
            vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=64, max_position_embeddings=4096
        )
        return Trainer(model.train(), tokenizer, peak=3e-3, minutes=seconds / 60, longest=4096)

    first = trainer(12)
    train(first, easy, tmp_path, seed=0, stop=6 / 60, tokens=1024, workers=0)
    assert 0 < first.share < 1
    again = trainer(12)
    again.restore(tmp_path)
    assert again.progress == first.progress
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, first.model.state_dict()[name])
    train(again, easy, tmp_path, seed=0, stop=1, tokens=1024, workers=0)
    assert again.share == 1
    steps = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    for step in steps:
        assert step["right_by_kind"] == {"niah_multikey_2": pytest.approx(step["right"], abs=1e-4)}


def test_a_fault_in_training_leaves_the_steps_before_it(school: Any, tokenizer: Any, tmp_path: Path):
    Trainer = script("train_retriever").Trainer
    train = script("train_retriever").train

    class Failing:
        def lesson(self, length: int, *key: Any) -> Any:
            if key[-1] > 12:
                raise RuntimeError("no more lessons")
            return school.lesson(512, *key)

    def trainer() -> Any:
        model = tiny(vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=4096)
        return Trainer(model.train(), tokenizer, peak=3e-3, minutes=5, longest=4096)

    first, again = trainer(), trainer()
    with pytest.raises(RuntimeError, match="no more lessons"):
        train(first, Failing(), tmp_path, seed=0, stop=5, tokens=1024, workers=0)
    again.restore(tmp_path)
    assert again.progress == first.progress
    assert again.progress.step > 0
    # Kinds are told apart, and what is right of all is what is right of each.
    steps = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len({kind for step in steps for kind in step["right_by_kind"]}) > 1
    assert all(0 <= share <= 1 for step in steps for share in step["right_by_kind"].values())


def test_ruler_in_parts_and_processes_leaves_what_it_has_and_goes_on(tmp_path: Path):
    save_model(tmp_path / "model")
    out = tmp_path / "ruler.json"
    command = [
        sys.executable,
        str(ROOT / "bench" / "quality" / "ruler.py"),
        "--model",
        str(tmp_path / "model"),
    ]
    command += ["--length", "1200", "--examples", "2", "--part", "1", "--batch", "1", "--workers", "1"]
    command += [
        "--tasks",
        "niah_single_1,niah_multikey_2",
        "--selectors",
        "locks-r8,oracle",
        "--budgets",
        "64,full",
    ]
    command += ["--logs", str(tmp_path / "logs"), "--out", str(out)]

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def call(*more: str, code: int = 0) -> dict[str, Any]:
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=580)
        assert done.returncode == code, done.stderr
        assert ("cut short: niah_single_1, niah_multikey_2" in done.stderr) == (code != 0)
        assert "a job failed" not in done.stderr
        return json.loads(out.read_text())

    # What is interrupted writes what it has, and says that it is not whole; so does what had no time.
    # Where the tests run in a shell's background, interrupts are ignored, and a child's would be too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([*command, "--least", "90"], env=environment, stderr=subprocess.DEVNULL) as cut:
        signal.signal(signal.SIGINT, before)
        log = tmp_path / "logs" / "niah_single_1-0.jsonl"
        while cut.poll() is None and (not log.is_file() or log.read_bytes().count(b"\n") < 2):
            time.sleep(0.05)
        cut.send_signal(signal.SIGINT)
        assert cut.wait(300) != 0
    assert {(row["task"], row["n"]) for row in json.loads(out.read_text())["rows"]} == {("niah_single_1", 1)}
    assert call("--least", "90", "--minutes", "0", code=1)["learnt"] == []
    # A random model knows nothing: with a bar, full attention is all that is asked, and no task is in a mean.
    barred = call("--least", "90")
    assert {row["selector"] for row in barred["rows"]} == {"full"}
    assert barred["learnt"] == []
    assert set(barred["left_out"]) == {"niah_single_1", "niah_multikey_2"}
    # Without one the rest is answered, and nothing again.
    whole = call("--least", "0")
    assert whole["left_out"] == []
    assert {(row["task"], row["selector"], row["n"]) for row in whole["rows"]} == {
        (task, selector, n)
        for task, n in (("niah_single_1", 2), ("niah_multikey_2", 2), ("mean", 4))
        for selector in ("full", "locks-r8", "oracle")
    }
    assert (tmp_path / "ruler.png").is_file()
    logs = sorted((tmp_path / "logs").glob("*.jsonl"))
    assert [len(log.read_text().splitlines()) for log in logs] == [1 + 3] * 4
    assert {
        "model",
        "task",
        "length",
        "selector",
        "rank",
        "page",
        "bits",
        "budget",
        "score",
        "ci_low",
        "ci_high",
        "n",
    } <= set(whole["rows"][0])
    # No time: nothing is begun, and the file says the same.
    assert call("--least", "0", "--minutes", "0")["rows"] == whole["rows"]


def test_a_model_is_given_other_positions_than_it_was_trained_with(tmp_path: Path):
    ruler = script("ruler")
    save_model(tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    longer = {"rope_type": "default", "rope_theta": 8 * 10_000.0}
    assert ruler.parse_rope("theta=80000", tmp_path) == longer
    yarn = ruler.parse_rope("yarn=8", tmp_path)
    assert yarn["original_max_position_embeddings"] == own["max_position_embeddings"] == 2048
    (tmp_path / "recipe.json").write_text(json.dumps({"length": 1024}))
    yarn = ruler.parse_rope("yarn=8", tmp_path)
    assert yarn["original_max_position_embeddings"] == 1024

    plain, wide, turned = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(3))
    ruler.extend(wide, longer, 4096)
    ruler.extend(turned, yarn, 4096)
    assert wide.config.max_position_embeddings == turned.config.max_position_embeddings == 4096
    exponents = torch.arange(0, 64, 2) / 64
    torch.testing.assert_close(wide.model.rotary_emb.inv_freq, 80_000.0**-exponents)
    # YaRN leaves the fastest pairs as they are and slows the slowest by its factor; cosines are scaled.
    slower = turned.model.rotary_emb.inv_freq / plain.model.rotary_emb.inv_freq
    assert slower[0] == pytest.approx(1)
    assert slower[-1] == pytest.approx(1 / 8)
    assert turned.model.rotary_emb.attention_scaling > 1
    ids = torch.randint(200, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        said = [model(ids).logits for model in (plain, wide, turned)]
    assert not torch.allclose(said[0], said[1], atol=1e-3)
    assert not torch.allclose(said[0], said[2], atol=1e-3)
    for wrong in ("theta", "theta=0", "theta=-1", "yarn=a", "linear=2", "8"):
        with pytest.raises(ValueError, match="rope: expected theta=FLOAT or yarn=FACTOR, got"):
            ruler.parse_rope(wrong, tmp_path)


def test_what_another_call_does_is_passed_over(tmp_path: Path):
    ruler = script("ruler")
    model = save_model(tmp_path / "model")
    setup = ruler.Setup(
        model, tmp_path / "logs", 1200, 1, "locks-r8", "64,full", 0.0, 1, 42, None, time.time() + 600
    )
    file = tmp_path / "logs" / "niah_single_1-0.jsonl"
    with Log(file, {"of": "another"}):
        ruler.job(setup, "niah_single_1", 0, 1)
        assert len(file.read_text().splitlines()) == 1
    file.unlink()
    ruler.job(setup, "niah_single_1", 0, 1)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row.get("selector") for row in rows] == [None, "full", "locks-r8"]
    # Other positions are another run's.
    turned = dataclasses.replace(setup, rope="theta=80000", logs=tmp_path / "turned")
    ruler.job(turned, "niah_single_1", 0, 1)
    header, *more = (json.loads(line) for line in (turned.logs / file.name).read_text().splitlines())
    assert header == {**rows[0], "rope": "theta=80000"}
    assert [row["answer"] for row in more] != [row["answer"] for row in rows[1:]]
