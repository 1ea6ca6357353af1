"""The demo: its JSON, its table, its picture, and that its answers are those of the selectors it names."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("seaborn")
Image = pytest.importorskip("PIL.Image")

from locks import demo, hf, needles, plot, torch_impl  # noqa: E402
from locks.cli import app  # noqa: E402
from locks.models import SetupError, smollm2_gguf  # noqa: E402
from locks.selectors import make_selector  # noqa: E402

TOKENS, BUDGET, LAYERS, HKV, D, P = 500, 96, 30, 3, 64, 16


@pytest.fixture(scope="module", autouse=True)
def _smollm2() -> None:
    try:
        smollm2_gguf()
    except SetupError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "new" / "out"


@pytest.fixture(scope="module")
def result(out: Path) -> Any:
    """What one small run prints."""
    arguments = ["demo", "--tokens", TOKENS, "--budget", BUDGET, "--seed", 3, "--out", out, "--json"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows(result: Any) -> dict[str, Any]:
    return {row["selector"]: row for row in result["rows"]}


def test_what_is_printed_is_what_is_written(result: Any, out: Path) -> None:
    assert json.loads((out / "demo.json").read_text()) == result
    assert sorted(path.name for path in out.iterdir()) == ["demo.json", "demo.png"]


def test_json_says_what_was_asked_and_answered(result: Any, rows: dict[str, Any]) -> None:
    assert list(rows) == ["dense", "locks", "oracle", "quest", "shared"]
    settings = result["settings"]
    assert (settings["seed"], settings["tokens"], settings["budget"]) == (3, TOKENS, BUDGET)
    assert (settings["page"], settings["rank"], settings["basis_bits"], settings["coef_bits"]) == (P, 4, 4, 4)
    assert TOKENS - 100 < result["context_tokens"] <= TOKENS
    assert len(result["questions"]) == 8
    depths = [question["depth"] for question in result["questions"]]
    assert depths == sorted(depths)
    assert result["seconds"]["total"] > result["seconds"]["prefill"] > 0
    assert result["versions"]["torch"] == torch.__version__
    values = [question["value"] for question in result["questions"]]
    for row in rows.values():
        # A token that is no digit may be longer than one letter, and then moves those behind it.
        if all(len(text) == 4 for text in row["answers"]):
            right = sum(a == b for a, b in zip("".join(row["answers"]), "".join(values), strict=True))
            assert right == row["digits_right"]
        assert 0 <= row["digits_right"] <= row["digits_total"] == 32


def test_dense_attention_finds_the_numbers(rows: dict[str, Any]) -> None:
    assert rows["dense"]["kl"] == 0
    assert rows["dense"]["digits_right"] >= 26
    for name in ("locks", "oracle", "quest", "shared"):
        assert rows[name]["kl"] > 0
    assert rows["locks"]["digits_right"] >= rows["quest"]["digits_right"]


def test_every_step_was_sparse(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        assert (row["decode_rows"] == row["sparse_rows"] > 0) == (name != "dense")


def test_bytes_are_those_of_records_and_pages(result: Any, rows: dict[str, Any]) -> None:
    context = result["context_tokens"]
    for name, row in rows.items():
        assert row["bytes_per_step"] == pytest.approx(
            row["summary_bytes_per_step"] + row["page_bytes_per_step"]
        )
        if name != "dense":
            # A record takes 256 bytes, as a token's K and V do; of the newest page a part is read.
            share = {"locks": 1 / 16, "quest": 1 / 16, "oracle": 0}.get(name)
            assert share is None or row["resident_share"] == share
            most = LAYERS * HKV * BUDGET * 4 * D
            assert most * (1 - P / BUDGET) < row["page_bytes_per_step"] <= most
    # At each step the sealed pages' records are read once: a question has at most 128 tokens.
    for name in ("locks", "quest"):
        pages = rows[name]["summary_bytes_per_step"] / (LAYERS * HKV * 256)
        assert context // P <= pages <= (context + 128) // P
    per_token = LAYERS * HKV * 4 * D
    assert per_token * context < rows["dense"]["bytes_per_step"] < per_token * (context + 128)
    assert rows["dense"]["summary_bytes_per_step"] == 0
    assert rows["oracle"]["summary_bytes_per_step"] == pytest.approx(
        8 * rows["locks"]["summary_bytes_per_step"]
    )
    # The shared basis takes 250 of the record's 256 bytes a page, and its basis once.
    assert result["settings"]["shared_rank"] == 31
    pages = context // P
    shared = (pages * 250 + 2 * D * 32) / (pages * P * 4 * D)
    assert rows["shared"]["resident_share"] == pytest.approx(shared)


def test_table_has_a_row_for_each(result: Any) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo.table(result))
    text = console.export_text()
    for row in result["rows"]:
        line = next(line for line in text.splitlines() if demo.TITLES[row["selector"]] in line)
        assert f"{row['digits_right']}/{row['digits_total']}" in line
        assert f"{100 * row['bytes_per_step'] / row['dense_bytes_per_step']:.1f}" in line
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_picture_shows_a_head_that_retrieves(result: Any, out: Path) -> None:
    seen = result["picture"]
    assert 0 <= seen["layer"] < LAYERS
    assert 0 <= seen["head"] < 9
    assert seen["true_share"] > 0.5
    assert seen["needle_page"] < seen["pages"]
    assert len(seen["picked_pages"]) == BUDGET // P
    assert {0, seen["pages"] - 1} < set(seen["picked_pages"])
    with Image.open(out / "demo.png") as image:
        assert image.width > 1000
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 20)}
    for color in plot.COLORS.values():
        assert tuple(bytes.fromhex(color[1:])) in colors


@pytest.fixture(scope="module")
def asked() -> Any:
    """A model made ready, the last words of three questions, and a short context, prefilled."""
    prepared = demo.prepare(seed=1, tokens=300, budget=BUDGET)
    questions = [replace(q, question_ids=q.question_ids[-3:]) for q in prepared.task.questions[:3]]
    hf.enable(prepared.model, hf.LocksConfig(budget=None))
    context = demo.prefill(prepared.model, prepared.task.context_ids)
    yield prepared, questions, context
    hf.disable(prepared.model)


def answers(asked: Any, config: hf.LocksConfig, watch: demo.Watch | None = None) -> demo.Answers:
    prepared, questions, context = asked
    watch = demo.Watch(questions, P) if watch is None else watch
    return demo.ask(prepared.model, questions, context, config, "test", watch)


def test_a_covering_budget_answers_as_dense_attention(asked: Any) -> None:
    dense = answers(asked, hf.LocksConfig(budget=None))
    covered = answers(asked, hf.LocksConfig(budget=512))
    torch.testing.assert_close(covered.logits, dense.logits, rtol=1e-3, atol=2e-3)
    assert needles.mean_kl(dense.logits, covered.logits) < 1e-6
    assert covered.stats.sparse_rows == covered.stats.decode_rows > 0


def test_answers_leave_the_context_as_it_was(asked: Any) -> None:
    context = asked[-1]
    layer = context.layers[-1]
    keys, lengths = layer.dense()[0], layer.seq_lens.clone()
    config = hf.LocksConfig(budget=BUDGET, selector=make_selector("quest"))
    first, second = answers(asked, config), answers(asked, config)
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(layer.dense()[0], keys)
    assert torch.equal(layer.seq_lens, lengths)


def test_dense_answers_do_not_depend_on_the_batch(asked: Any) -> None:
    prepared, questions, context = asked
    together = answers(asked, hf.LocksConfig(budget=None)).logits
    alone = answers((prepared, questions[1:2], context), hf.LocksConfig(budget=None)).logits
    torch.testing.assert_close(alone[0], together[1], rtol=1e-3, atol=2e-3)


def test_watch_finds_the_head_with_most_mass_on_the_needle(asked: Any) -> None:
    questions = asked[1]
    watch, seen = demo.Watch(questions, P), []

    def see(step: hf.Step) -> None:
        watch.see(step)
        for row, question in enumerate(questions):
            if watch.column == len(question.question_ids) - 1:
                layer = step.layer
                table = (layer.k_cache, layer.table, layer.seq_lens)
                exact = torch_impl.exact_page_mass(step.q, *table, page=P, scale=step.scale).log_mass.softmax(
                    -1
                )
                for page in range(question.needle[0] // P, (question.needle[1] - 1) // P + 1):
                    seen.append((float(exact[row, :, page].max()), step.layer_idx, question.key, page))

    answers(asked, hf.LocksConfig(budget=BUDGET, selector=make_selector("locks"), on_step=see), watch)
    best = watch.found()
    share, layer, key, page = max(seen)
    assert (best.layer, best.key, best.needle) == (layer, key, page)
    assert float(best.true[page]) == pytest.approx(share)
    assert float(best.true.sum()) == pytest.approx(1, abs=1e-5)
    assert float(best.estimated.sum()) == pytest.approx(1, abs=1e-5)


def test_watch_without_a_step_has_nothing() -> None:
    with pytest.raises(RuntimeError, match="got none"):
        demo.Watch([], P).found()


def test_too_long_a_context_is_refused() -> None:
    done = CliRunner().invoke(app, ["demo", "--tokens", "9000"])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "error: tokens: expected at most 8064" in done.stderr
