"""The whole analysis on a small random model: batches, scores, equal tables for equal seeds, the page."""

import json
import math
import re
from pathlib import Path
from typing import Any

import attention
import blind_sweep
import blindness
import capture_keys
import contexts
import figures_choice
import findings
import group_combine
import key_rank
import layer_rank
import outputs
import pandas as pd
import parts
import pytest
import quantisation
import report
import selection
import torch
from selection import Part, Size
from transformers import LlamaConfig, LlamaForCausalLM
from ways import Way

from locks import SummaryFormat, hf, reference
from locks.baselines import SharedBasis, fit_shared
from locks.needles import NeedleTask, Question
from locks.selectors import make_selector

VOCABULARY, DIGITS = 97, 2
LENGTHS = (203, 190)


def ids(count: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def task(seed: int) -> NeedleTask:
    """A context and eight questions of random tokens, of different lengths."""
    questions = tuple(
        Question("k", "12", (0, 1), 0.0, ids(5 + i % 3, 100 * seed + i), ids(DIGITS, 100 * seed + 50 + i))
        for i in range(8)
    )
    return NeedleTask(ids(LENGTHS[seed], seed + 1), questions)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.2,
    )
    return hf.enable(LlamaForCausalLM(config).eval(), hf.LocksConfig(budget=None))


@pytest.fixture
def small(model, monkeypatch) -> Size:
    """The analyses' model and contexts are the small ones; everything else is as it always is."""
    monkeypatch.setattr(contexts, "enabled", lambda path, device: (model, None))
    monkeypatch.setattr(contexts, "make_tasks", lambda tokenizer, tokens, seeds: [task(s) for s in seeds])
    keys = [layer.dense()[0][0] for layer in contexts.prefill(model, [task(1)]).cache.layers]  # type: ignore[attr-defined]
    monkeypatch.setattr(contexts, "held_out_keys", lambda path, device, tokens: keys)
    contexts.look.cache_clear()
    return Size(1, 200, (64, 128), False)


@pytest.mark.parametrize("selector", [None, "locks", "quest", "shared"])
def test_contexts_in_a_batch_answer_as_each_alone(model, selector):
    def config() -> hf.LocksConfig:
        if selector is None:
            return hf.LocksConfig(budget=None)
        like = make_selector(selector, SummaryFormat(), 64, impl="torch")
        own = contexts.FittedBasis(like) if isinstance(like, SharedBasis) else like
        return hf.LocksConfig(budget=64, selector=own)

    together = contexts.ask(contexts.prefill(model, [task(0), task(1)]), config())
    assert together.shape == (16, DIGITS, VOCABULARY)
    for seed in (0, 1):
        alone = contexts.ask(contexts.prefill(model, [task(seed)]), config())
        torch.testing.assert_close(together[8 * seed : 8 * seed + 8], alone, rtol=1e-4, atol=1e-4)


def test_a_basis_given_for_every_layer_is_that_layers(model):
    keys = [torch.randn(2, 60, 64, generator=torch.Generator().manual_seed(layer)) for layer in (0, 1)]
    basis = contexts.FittedBasis(SharedBasis(rank=8), keys)
    cache = hf.fork(contexts.prefill(model, [task(0)]).cache, hf.LocksConfig(budget=64, selector=basis))
    means = [layer.state.factors.mean.float() for layer in cache.layers]  # type: ignore[attr-defined]
    for mean, own in zip(means, keys, strict=True):
        torch.testing.assert_close(mean, own.mean(1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fit", ["cache", "held-out"])
def test_rows_that_share_blocks_score_as_each_alone(model, fit):
    """Also once questions have filled pages of their own, which are sealed in their context's basis."""
    tasks, rank = [task(0), task(1)], 8
    batch = contexts.prefill(model, tasks)
    own = [
        [fit_shared(keys[:, : len(t.context_ids) // 16 * 16], rank) for keys, t in zip(*rows, strict=True)]
        for rows in [(layer.dense()[0], tasks) for layer in batch.cache.layers]  # type: ignore[attr-defined]
    ]
    other = [torch.randn(2, 60, 64, generator=torch.Generator().manual_seed(layer)) for layer in (0, 1)]
    like, compared = SharedBasis(rank=rank), 0

    def compare(step: hf.Step) -> None:
        nonlocal compared
        layer, given = step.layer, fit_shared(other[step.layer_idx], rank)
        for row in (0, 5, 8, 15):
            factors = own[step.layer_idx][row // 8] if fit == "cache" else given
            alone = SharedBasis(rank=rank, factors=factors)
            args = (layer.k_cache, layer.table[row : row + 1], layer.seq_lens[row : row + 1])
            state = alone.allocate(layer.k_cache)
            alone.seal(state, *args)
            mass = alone.page_mass(step.q[row : row + 1], state, *args, scale=step.scale)
            torch.testing.assert_close(step.mass.log_mass[row : row + 1], mass.log_mass, rtol=1e-6, atol=1e-5)
            compared += 1

    basis = contexts.FittedBasis(like, other if fit == "held-out" else None)
    contexts.ask(batch, hf.LocksConfig(budget=64, selector=basis, on_step=compare))
    # The last digit is not fed.
    assert compared == 4 * 2 * (7 + DIGITS - 1)


def test_what_is_observed_is_what_dense_attention_sees(model, tmp_path):
    layers = contexts.observe(model, task(0))
    batch = contexts.prefill(model, [task(0)])
    question = task(0).questions[4]
    tokens = torch.tensor([[*task(0).context_ids, *question.input_ids]])
    with torch.inference_mode():
        cache = hf.PagedCache(model.config, hf.LocksConfig(budget=None))
        model(tokens, **hf.cache_argument(model, cache))
    assert len(layers) == 2
    row = 4 * DIGITS + 1
    for rows, layer in zip(layers, cache.layers, strict=True):
        assert rows.q.shape == (8 * DIGITS, 4, 64)
        assert int(rows.seq_lens[row]) == tokens.shape[1]
        seen = reference.row_tokens(*rows.keys_args, row)
        torch.testing.assert_close(seen, layer.dense()[0][0], rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]
        assert rows.k_cache.isfinite().all()
    hf.disable(model)
    alone = capture_keys.capture(model, tokens[0].tolist(), tmp_path / "keys", queries=1)
    hf.enable(model, hf.LocksConfig(budget=None))
    for index, rows in enumerate(layers):
        torch.testing.assert_close(rows.q[row], alone.read(index, "queries")[:, 0], rtol=1e-4, atol=1e-4)
        assert rows.scale == alone.scale
    assert batch.answers.shape == (8, DIGITS)


def everything(size: Size, folder: Path, model: Any) -> None:
    """All tables at the smallest size."""
    for name, seed in (("keys", 5), ("held-out", 6)):
        hf.disable(model)
        capture_keys.capture(model, list(ids(300, seed)), folder / name, facts={"model": "small"})
        hf.enable(model, hf.LocksConfig(budget=None))
    contexts.look.cache_clear()
    key_rank.measure(folder / "keys", folder / "held-out", folder)
    blindness.measure(size, folder, 1)
    group_combine.measure(size, folder)
    quantisation.measure(size, folder)
    layer_rank.measure(None, "cpu", ([0], [1]), 200, 64, (1, 2, 4), 1, folder)
    selection.measure(size, folder)


def test_equal_seeds_give_equal_tables_and_the_page_shows_them(small, model, tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "RESAMPLES", 50)
    for name in ("one", "two"):
        everything(small, tmp_path / name, model)
    tables = sorted(path.name for path in (tmp_path / "one").glob("*.csv"))
    assert tables == sorted(f"{name}.csv" for section in report.SECTIONS for name in section.tables)
    for name in tables:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    frame: outputs.Table = outputs.read_table(tmp_path / "one", "selection")
    decoded = frame[frame["kl"].notna()]
    assert set(decoded["selector"]) == {"dense", "oracle", "locks", "quest", "shared"}
    assert (frame.loc[frame["selector"] == "oracle", "of_oracle"] == 1).all()
    assert (frame["questions"].dropna() == 8).all()
    html = report.page(tmp_path / "one", tmp_path / "two")
    assert html.count("data:image/png;base64,") == sum(len(s.figures) for s in report.SECTIONS)
    # Nothing is fetched: the page is whole.
    assert not re.search(r"""(src|href)=["'](?!data:)""", html)
    assert "100.00% have intervals that meet" in html
    assert all(f"{name.removesuffix('.csv')}.csv</code>" in html for name in tables)


def test_parts_make_the_table_that_is_made_at_once(small, model, tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "RESAMPLES", 50)
    whole, some = tmp_path / "whole", tmp_path / "parts"
    selection.measure(small, whole)
    selection.measure(small, some, part=Part.decoded, only="shared,dense,oracle")
    decoded: outputs.Table = outputs.read_table(some, "selection")
    assert set(decoded["selector"]) == {"dense", "oracle", "shared"}
    with pytest.raises(outputs.InputError, match="expected what choices keep, got digits alone"):
        findings.selection(decoded)
    selection.measure(small, some, part=Part.kept)
    selection.measure(small, some, part=Part.decoded, only="locks::16:8,quest")
    selection.measure(small, some, part=Part.decoded, only="locks")
    pd.testing.assert_frame_equal(
        outputs.read_table(some, "selection"), outputs.read_table(whole, "selection"), check_like=True
    )
    assert ",64.0," not in (some / "selection.csv").read_text()
    # What is measured again takes its own place, and its note the earlier one's.
    selection.measure(small, some, part=Part.decoded, only="locks")
    assert len(outputs.read_table(some, "selection")) == len(outputs.read_table(whole, "selection"))
    note = json.loads((some / outputs.NOTES).read_text())["selection"]["parts"]
    rows = [(part["rows"], part["columns"][0], part["contexts"]) for part in note]
    answered, kept = ("answered", 1), ("questions", 1)
    assert rows == [
        ("shared,dense,oracle", *answered),
        ("all", *kept),
        ("locks::16:8,quest", *answered),
        ("locks", *answered),
    ]


def test_a_part_takes_the_place_of_its_cells_alone():
    old = pd.DataFrame(
        {"k": ["a", "b"], "n": [1, None], "x": [0.5, 0.7], "x_low": [0.4, 0.6], "y": [1.0, 2.0]}
    )
    new = pd.DataFrame({"k": ["c", "a"], "n": [3, 1], "x": [0.1, 0.2], "x_low": [0.0, 0.1], "y": [8.0, 9.0]})
    found = parts.merged(old, new, ["k", "n"], ["x"])
    assert found["k"].tolist() == ["a", "b", "c"]
    assert found["x"].tolist() == [0.2, 0.7, 0.1]
    assert found["x_low"].tolist() == [0.1, 0.6, 0.0]
    assert found["y"].tolist() == [1.0, 2.0, 8.0]
    with pytest.raises(ValueError, match="keys: expected rows that differ in k, got two alike"):
        parts.merged(old.assign(k="a"), new, ["k"], ["x"])


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("", {"locks 4", "locks 8", "shared 4 cache", "shared 4 held-out", "oracle 4", "quest 4"}),
        ("shared:cache,quest", {"shared 4 cache", "quest 4"}),
        ("locks::16:8:8/4/4", {"locks 8"}),
        ("locks::16:8:8/8/8,:held-out", {"shared 4 held-out"}),
    ],
)
def test_ways_are_chosen_by_what_names_them(only: str, names: set[str]):
    ways = [way for way in selection.decoded_ways(full=False) if selection.chosen(way, only)]
    assert {f"{way.name} {way.fmt.rank} {way.fit}".strip() for way in ways} == names


@pytest.mark.parametrize(("folder", "head_dim"), [("full", 64), ("full-d128", 128)])
def test_committed_tables_hold_every_way_at_every_budget(folder: str, head_dim: int):
    table: outputs.Table = outputs.read_table(outputs.RESULTS / folder, "selection")
    size = Size(13, 4000, selection.BUDGETS, full=True)

    def rows(ways: list[Way]) -> set[str]:
        cells = [
            way.cells(head_dim, size.tokens) | {"budget": b} for way in ways for b in size.budgets_of(way)
        ]
        return {parts.name_of([row.get(key) for key in selection.KEYS]) for row in cells}

    for column, wanted, measured in (
        ("questions", rows(selection.offline_ways(full=True)), attention.MEASURES),
        ("answered", {"dense|||||"} | rows(selection.decoded_ways(full=True)), ("digits", "kl")),
    ):
        some = table[table[column].notna()]
        assert set(parts.names_of(some, selection.KEYS)) == wanted
        assert set(some[column]) == {104}
        assert (
            some[[f"{name}{end}" for name in measured for end in ("", "_low", "_high")]]
            .notna()
            .all(axis=None)
        )
    assert table["digits"].dropna().between(0, 1).all()
    notes = json.loads((outputs.RESULTS / folder / outputs.NOTES).read_text())["selection"]["parts"]
    assert {(part["contexts"], part["dtype"]) for part in notes} == {(13, "float32")}


def test_the_figure_of_digits_shows_every_fit_at_every_rank():
    figure = figures_choice.decoded(outputs.read_table(outputs.RESULTS / "full", "selection"))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    shared = ["shared, fitted to the cache", "shared, fitted to other text"]
    assert names == ["page-local", *shared, "Quest", "oracle", "dense attention"]
    ranks = [ax.get_title().split(",")[0] for ax in figure.axes]
    assert ranks == ["R = 2", "R = 4", "R = 8"] * 2
    for ax in figure.axes:
        drawn = [line for line in ax.get_lines() if len(line.get_xdata()) == len(selection.BUDGETS)]  # type: ignore[arg-type]
        assert len(drawn) >= 5


def test_the_theorem_predicts_the_carriers_rank():
    frame: outputs.Table = blind_sweep.sweep(6, 0, (64,))
    (correlation,) = blind_sweep.correlations(frame)["correlation"]
    assert correlation > 0.95
    last = frame[frame["degrees"] == 90].set_index("scores")["rank"]
    assert last["page-local, R = 4"] == 1
    assert last[blind_sweep.FIXED] > 60


def test_the_prediction_at_its_ends():
    n = blind_sweep.PAGES - 2
    # At a right angle nothing is seen: the carrier ranks as a page drawn at random.
    assert blind_sweep.predicted_rank(math.pi / 2) == pytest.approx(1 + n / 2)
    seen = 0.5 * math.erfc(blind_sweep.LIFT / 2)
    assert blind_sweep.predicted_rank(0) == pytest.approx(1 + n * seen)


@pytest.mark.parametrize("turn", [0.0, 0.6, math.pi / 2])
def test_the_carriers_true_logit_does_not_turn(turn):
    case = blind_sweep.sweep_case(turn, 64, torch.Generator().manual_seed(3))
    other = blind_sweep.sweep_case(0.3, 64, torch.Generator().manual_seed(3))
    logits = [c.scale * (c.keys[0] @ c.query)[c.carrier * 16 : c.carrier * 16 + 16] for c in (case, other)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-3)
    torch.testing.assert_close(case.basis @ case.basis.T, torch.eye(blind_sweep.SPAN), rtol=0, atol=1e-5)


def test_tables_agree_where_their_intervals_meet():
    mine = pd.DataFrame({"k": [1, 2], "x": [0.5, 0.7], "x_low": [0.4, 0.6], "x_high": [0.6, 0.8]})
    other = mine.assign(x=[0.55, 0.9], x_low=[0.5, 0.85], x_high=[0.6, 0.95])
    (row,) = findings.agreement(mine, other).to_dict("records")
    assert row == {"number": "x", "rows": 2, "intervals_meet": 0.5, "largest_difference": pytest.approx(0.2)}


def test_questions_come_in_whole_contexts():
    with pytest.raises(outputs.InputError, match="questions: expected a multiple of 8, got 12"):
        selection.main(questions=12)
    with pytest.raises(
        outputs.InputError, match="only: expected ways such as locks or shared:cache:16:4, got 'lock'"
    ):
        selection.main(only="lock")


def test_the_table_of_layers_that_want_rank(small, model, tmp_path):
    frame = layer_rank.measure(None, "cpu", ([0], [1]), 200, 64, (1, 2, 4), 1, tmp_path)
    assert frame.part.tolist() == ["group"] * 3 + ["oracle"] + ["uniform"] * 3 + ["by layer"]
    groups = frame[frame.part == "group"]
    assert groups.selector.tolist() == ["locks-r1", "locks-r1+4@0-0", "locks-r1+4@1-1"]
    saved = groups.kl.to_numpy()[0] - groups.kl.to_numpy()[1:]
    assert groups.saved.tolist()[1:] == pytest.approx(saved.tolist(), abs=1e-9)
    *_, one, two, four, chosen = frame.to_dict("records")
    assert [row["part"] for row in (one, two, four, chosen)] == ["uniform"] * 3 + ["by layer"]
    # Rank 4 in one of two layers costs more than rank 2 in both: none is chosen.
    assert (one["bytes_a_token"] + four["bytes_a_token"]) / 2 > two["bytes_a_token"]
    same = ("selector", "bytes_a_token", "digits", "kl")
    assert [chosen[name] for name in same] == [one[name] for name in same]
    questions = layer_rank.Questions(model, None, 200, [1], 64)
    values = questions.under(make_selector("locks", SummaryFormat(rank=4), 64))
    assert values.mean(0).tolist() == pytest.approx([four["digits"], four["kl"]])
    assert (tmp_path / "layer_rank.csv").is_file()
