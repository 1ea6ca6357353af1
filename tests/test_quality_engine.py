"""The engine against `generate`, its sampler, and methods by name."""

from collections import Counter
from typing import Any

import pytest
import torch

from locks import SummaryFormat, hf
from locks.pages import budget_pages
from locks.quality import engine, methods, replay
from locks.quality.evictors import EVICTORS, Evictor
from locks.quality.example import Forced
from locks.selectors import Locks

transformers = pytest.importorskip("transformers")

# Of different lengths, none a multiple of the page; the first is shorter than a block.
LENGTHS = (61, 200, 133)


@pytest.fixture(scope="module")
def model():
    from tests.quality_model import random_llama

    return random_llama(50)


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (length,), generator=generator).tolist() for length in LENGTHS]


def session(model, rows, selector=None, budget=None, repeats=1):
    evictors = [selector] if isinstance(selector, Evictor) else []
    prefilled = engine.prefill(model, [row[:-1] for row in rows], evictors)
    made = engine.Session(model, prefilled, selector, repeats)
    made.rewind(budget)
    return made


def last(rows: list[list[int]]) -> list[list[int]]:
    return [row[-1:] for row in rows]


def plain(model, row: list[int], count: int) -> list[int]:
    ids = torch.tensor([row])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(row) :].tolist()


def test_full_attention_says_what_generate_says(model, rows):
    expected = [plain(model, row, 20) for row in rows]
    with engine.enabled(model):
        assert session(model, rows).generate(last(rows), [20] * 3, []) == expected


@pytest.mark.parametrize(
    "spec", ["locks", "oracle", "quest", "streaming", "shared-r2", "snapkv", "h2o", "rkv"]
)
def test_a_covering_budget_says_what_full_attention_says(model, rows, spec: str):
    expected = [plain(model, row, 20) for row in rows]
    (method,) = methods.parse_methods(spec)
    with engine.enabled(model):
        covering = session(model, rows, method.make(64), 512)
        assert covering.generate(last(rows), [20] * 3, []) == expected


@pytest.mark.parametrize("spec", ["locks", "oracle", "quest", "streaming", "snapkv", "h2o", "rkv"])
def test_a_batch_says_what_its_rows_say_alone(model, rows, spec: str):
    (method,) = methods.parse_methods(spec)
    with engine.enabled(model):
        together = session(model, rows, method.make(64), 64).generate(last(rows), [12] * 3, [])
        for row, expected in zip(rows, together, strict=True):
            assert session(model, [row], method.make(64), 64).generate(last([row]), [12], []) == [expected]


def test_budgets_follow_each_other_on_one_session(model, rows):
    (method,) = methods.parse_methods("locks-r8")
    alone = {}
    with engine.enabled(model):
        for budget in (64, 96, 512):
            alone[budget] = session(model, rows, method.make(64), budget).generate(last(rows), [40] * 3, [])
        one = session(model, rows, method.make(64), 64)
        for budget in (512, 64, 96, 64):
            one.rewind(budget)
            assert one.generate(last(rows), [40] * 3, []) == alone[budget]
    assert alone[64] != alone[512]


def layers_of(made: Any) -> list[Locks]:
    """The selectors of all layers, every one page-local."""
    assert all(isinstance(one, Locks) for one in made)
    return made


def test_layers_of_different_ranks(model, rows):
    named = methods.parse_methods("locks-r2+8@1-1,locks-r2,locks-r8")
    mixed, two, eight = (method.make(64, 2) for method in named)
    assert [one.fmt.rank for one in layers_of(mixed)] == [2, 8]
    with engine.enabled(model):
        together = session(model, rows, mixed, 64)
        answers = together.generate(last(rows), [12] * 3, [])
        for row, expected in zip(rows, answers, strict=True):
            assert session(model, [row], mixed, 64).generate(last([row]), [12], []) == [expected]
        read = {}
        for name, selector in (("mixed", mixed), ("two", two), ("eight", eight)):
            one = session(model, rows, selector, 64)
            one.generate(last(rows), [1] * 3, [])
            read[name] = one.traffic().read
        assert read["two"] < read["mixed"] < read["eight"]
        assert read["mixed"] == pytest.approx((read["two"] + read["eight"]) / 2, abs=1)


def test_ranks_of_layers_by_name():
    fmt = SummaryFormat(rank=2, coef_bits=8)
    (method,) = methods.parse_methods("locks-r2c8+8@0-1+4@1-2")
    assert [one.fmt for one in layers_of(method.make(64, 4))] == [
        SummaryFormat(rank=8, coef_bits=8),
        *[SummaryFormat(rank=4, coef_bits=8)] * 2,
        fmt,
    ]
    assert method.facts() == {
        "selector": "locks-r2c8+8@0-1+4@1-2",
        "rank": None,
        "page": 16,
        "bits": [8, 4, 8],
    }
    for layers in (2, 0):
        with pytest.raises(ValueError, match=f"'locks-r2c8.*': expected layers of 0 to {layers - 1}, got 2"):
            method.make(64, layers)
    for wrong in (
        "locks-r4+8@2-1",
        "locks-r2+8",
        "locks-r2+8@1",
        "quest+8@0-1",
        "locks-r2+8@a-b",
        "oracle-r2+8@0-1",
    ):
        with pytest.raises(ValueError, match="selector: expected"):
            methods.parse_methods(wrong)
    with pytest.raises(ValueError, match="rank: expected"):
        methods.parse_methods("locks-r2+3@0-1")


def test_selectors_follow_each_other_on_one_batch(model, rows):
    specs = methods.parse_methods("locks-r8,quest,oracle,shared-r4,locks")
    alone = {}
    with engine.enabled(model):
        for method in specs:
            alone[method.spec] = session(model, rows, method.make(64), 64).generate(last(rows), [30] * 3, [])
        prefilled = engine.prefill(model, [row[:-1] for row in rows])
        full = None
        for method in [None, *specs, None, *reversed(specs)]:
            one = engine.Session(model, prefilled, None if method is None else method.make(64))
            one.rewind(None if method is None else 64)
            found = one.generate(last(rows), [30] * 3, [])
            if method is None:
                assert full in (None, found)
                full = found
            else:
                assert found == alone[method.spec]


def test_a_model_with_sliding_windows_is_answered_row_by_row(rows):
    from tests.quality_model import sliding_model

    sliding = sliding_model(50)
    expected = plain(sliding, rows[1], 20)
    with engine.enabled(sliding):
        assert not engine.pads(sliding)
        prefilled = engine.prefill(sliding, [rows[1][:-1]])
        for selector in (None, methods.Streaming(), None):
            one = engine.Session(sliding, prefilled, selector)
            for _ in range(2):
                one.rewind(None if selector is None else 512)
                assert one.generate(last([rows[1]]), [20], []) == [expected]


def test_rows_end_at_a_stop_token_or_their_limit(model, rows):
    expected = [plain(model, row, 20) for row in rows]
    stop = expected[0][3]
    with engine.enabled(model):
        made = session(model, rows).generate(last(rows), [20, 0, 7], [stop])
    for row, found, limit in zip(expected, made, (20, 0, 7), strict=True):
        end = row.index(stop) if stop in row else limit
        assert found == row[: min(end, limit)]


def test_every_step_is_sparse(model, rows):
    (method,) = methods.parse_methods("oracle")
    with engine.enabled(model):
        sparse = session(model, rows, method.make(64), 64)
        sparse.generate([row[-3:] for row in rows], [5] * 3, [])
        stats = hf.stats(model)
        # Three tokens of the prompt and four of the answer; two layers, three rows.
        assert stats.sparse_rows == 7 * 2 * 3
        assert stats.dense_rows == 0
        traffic = sparse.traffic()
        assert 0 < traffic.read < traffic.dense


def test_full_attention_reads_all_there_is(model, rows):
    with engine.enabled(model):
        made = session(model, rows)
        made.generate(last(rows), [3] * 3, [])
        # Three steps over the prompt and one to three tokens; 2 layers of 2 heads, K and V of 64 at 2 bytes.
        tokens = sum(LENGTHS) / 3 + 1
        assert made.traffic().read == made.traffic().dense == pytest.approx(tokens * 2 * 2 * 2 * 64 * 2)


def test_forced_texts_are_read_as_one_pass_reads_them(model, rows):
    texts = [Forced([3, 4], [5, 6, 7]), Forced([8], [9, 10])]
    expected = []
    for row in rows:
        for text in texts:
            ids = torch.tensor([row + text.question_ids + text.answer_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, -len(text.answer_ids) - 1 : -1].double()
            wanted = torch.tensor(text.answer_ids)
            nll = torch.nn.functional.cross_entropy(logits, wanted)
            expected.append((int((logits.argmax(-1) == wanted).sum()), len(wanted), float(nll)))
    with engine.enabled(model):
        prefilled = engine.prefill(model, rows)
        for selector, budget in ((None, None), (methods.Streaming(), 512)):
            made = engine.Session(model, prefilled, selector, repeats=2)
            # Twice: rows that share a prompt's blocks must find them again.
            for _ in range(2):
                made.rewind(budget)
                found = made.read(texts * 3)
                assert [(r.right, r.total) for r in found] == [(right, total) for right, total, _ in expected]
                assert [r.nll for r in found] == pytest.approx([nll for _, _, nll in expected], rel=1e-4)


def test_sampling_draws_from_what_temperature_top_k_and_top_p_leave():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, generator=generator) * 2
    share = (logits.double() / engine.TEMPERATURE).softmax(-1)
    ranked = share.sort(descending=True)
    kept = ranked.values[: engine.TOP_K]
    kept = kept / kept.sum()
    # The fewest whose sum reaches top-p.
    count = int((kept.cumsum(-1) < engine.TOP_P).sum()) + 1
    kept = kept[:count] / kept[:count].sum()
    uniform = (torch.arange(20_000) + 0.5) / 20_000
    drawn = engine.sampled(logits.expand(20_000, -1), uniform)
    counts = Counter(drawn.tolist())
    assert set(counts) == set(ranked.indices[:count].tolist())
    for token, probability in zip(ranked.indices[:count].tolist(), kept.tolist(), strict=True):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=2e-4)


def test_a_drawn_answer_depends_on_its_row_and_numbers_alone(model, rows):
    numbers = torch.rand(3, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64).numpy()
    with engine.enabled(model):
        together = session(model, rows).generate(last(rows), [10] * 3, [], numbers)
        for i, row in enumerate(rows):
            alone = session(model, [row]).generate(last([row]), [10], [], numbers[i : i + 1])
            assert alone == [together[i]]
        greedy = session(model, rows).generate(last(rows), [10] * 3, [])
    assert together != greedy


def test_streaming_keeps_the_first_page_and_the_newest(model, rows):
    seen: list[tuple[int, list[list[int]]]] = []

    def see(step: hf.Step) -> None:
        seen.append((int(step.layer.seq_lens[0]), step.pages.page_ids[0].tolist()))

    config = hf.LocksConfig(budget=64, selector=methods.Streaming(), on_step=see)
    hf.enable(model, config)
    try:
        ids = torch.tensor([rows[1]])
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
    finally:
        hf.disable(model)
    assert len(seen) == 39 * 2
    for length, pages in seen:
        newest = -(-length // 16)
        expected = [0, *range(newest - budget_pages(64, 16) + 1, newest)]
        assert pages == [expected] * 2


def test_streaming_tells_pages_of_a_million_tokens_apart():
    k_cache, table = torch.zeros(1, 1, 64, 64), torch.zeros(1, 2**14, dtype=torch.int32)
    mass = methods.Streaming().page_mass(
        torch.zeros(1, 1, 64), None, k_cache, table, torch.tensor([2**20], dtype=torch.int32), scale=1.0
    )
    share = (mass.log_mass - mass.total[..., None]).exp()[0, 0, :-1]
    assert bool((share[1:] > share[:-1]).all())


def test_methods_by_name():
    found = methods.parse_methods("locks, locks-r8,locks-r4c8,quest,shared-r2, quest", 16)
    assert [m.spec for m in found] == ["locks", "locks-r8", "locks-r4c8", "quest", "shared-r2"]
    assert found[0].fmt == SummaryFormat()
    assert found[1].fmt == SummaryFormat(rank=8)
    assert found[2].facts() == {"selector": "locks-r4c8", "rank": 4, "page": 16, "bits": [8, 4, 8]}
    assert found[3].facts() == {"selector": "quest", "rank": None, "page": 16, "bits": None}
    wide = methods.parse_methods("quest", 64)[0].make(128)
    assert not isinstance(wide, list)
    assert wide.page == 64


@pytest.mark.parametrize("name", ["snap", "Locks", "quest-r4", "h2o-r4", "locks-8", "locks-r8c8b4"])
def test_an_unknown_method_is_refused_with_the_choices(name: str):
    with pytest.raises(
        ValueError, match=f"selector: expected locks, oracle, .*streaming, snapkv, h2o, rkv.*got '{name}'"
    ):
        methods.parse_methods(f"quest,{name}")


def test_budgets_by_name():
    assert methods.parse_budgets("128, 64,full,64") == ([64, 128], True)
    assert methods.parse_budgets("2048") == ([2048], False)
    with pytest.raises(
        ValueError, match=r"budgets: expected tokens \(multiples of 16\) or 'full', got 'all'"
    ):
        methods.parse_budgets("64,all")
    with pytest.raises(ValueError, match="budget: expected a multiple of the page"):
        methods.parse_budgets("100")
    with pytest.raises(ValueError, match="budget: expected at least 48 tokens"):
        methods.parse_budgets("32")


@pytest.mark.parametrize(
    "spec", [None, "locks-r8", "locks-r2+8@1-1", "oracle", "quest", "shared-r2", "streaming"]
)
def test_replayed_steps_say_what_steps_say(model, rows, spec: str | None):
    method = None if spec is None else methods.parse_methods(spec)[0]
    texts = [Forced(row[-1:] + list(range(40)), [7, 8, 9]) for row in rows]
    with engine.enabled(model):
        prefilled = engine.prefill(model, [row[:-1] for row in rows])
        made, read, traffic = [], [], []
        # On one batch, so that each finds the cache as the one before left it.
        for replays in (False, True, False, True):
            selector = None if method is None else method.make(64, 2)
            one = engine.Session(model, prefilled, selector, replays=replays)
            for budget in (None,) if method is None else (64, 96, 512):
                one.rewind(budget)
                made.append(one.generate(last(rows), [40, 3, 25], []))
                traffic.append(one.traffic())
                one.rewind(budget)
                read.append([(text.right, pytest.approx(text.nll, rel=1e-5)) for text in one.read(texts)])
    for found in (made, read, traffic):
        each = len(found) // 4
        assert found[:each] == found[each : 2 * each] == found[2 * each : 3 * each] == found[3 * each :]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a graph can be captured here")
def test_steps_that_cannot_be_captured_are_done_as_ever_and_said_once(model, rows, caplog):
    replay._tell.cache_clear()
    (method,) = methods.parse_methods("locks-r8")
    evictor = EVICTORS["rkv"]()
    with engine.enabled(model), torch.inference_mode():
        prefilled = engine.prefill(model, [rows[0][:-1]], [evictor])
        for selector in (method.make(64), evictor):
            made: list[list[torch.Tensor]] = []
            for captures in (False, True):
                one = engine.Session(model, prefilled, selector, replays=True)
                one.rewind(64)
                one._expect(40)
                assert one._replay is not None
                one._replay._captures = captures
                made.append([one.step(torch.tensor([token])).clone() for token in range(40)])
                # That was tried, then, and it failed.
                assert one._replay._captures is False
                assert not one._replay._graphs
            assert all(map(torch.equal, *made))
    said = [record.message for record in caplog.records if "captured" in record.message]
    assert len(said) == 1
    assert said[0].startswith("a decode step cannot be captured: ")


def test_what_a_warning_gives_as_a_reason_is_not_of_the_moment():
    reasons = {
        replay._reason(
            torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size}.00 MiB. GPU 0 has a total capacity of 139.80 GiB.\nSee"
            )
        )
        for size in (2, 20)
    }
    assert reasons == {"CUDA out of memory"}
    assert replay._reason(RuntimeError("not permitted\nwhen capturing. So")) == "not permitted"


def test_a_replay_decodes_behind_a_prompt_that_outgrows_its_room(model, rows):
    (method,) = methods.parse_methods("locks-r8")
    with engine.enabled(model):
        prefilled = engine.prefill(model, [rows[0][:-1]])
        layer = prefilled.cache.layers[0]
        assert isinstance(layer, hf.PagedLayer)
        room = layer.block_table.shape[1]
        made = []
        for replays in (True, False):
            one = engine.Session(model, prefilled, method.make(64), replays=replays)
            one.rewind(64)
            made.append(one.generate([rows[0][-1:]], [180], []))
        assert layer.block_table.shape[1] > room
    assert made[0] == made[1]
