"""Evictors against their definitions, written out in loops; and what they let go is gone."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from locks import api, hf
from locks.cli import app
from locks.quality import engine, held, methods
from locks.quality.evictors import EVICTORS, redundancy
from locks.types import PageMass
from tests.quality_model import save_model, sliding_model

transformers = pytest.importorskip("transformers")

HKV, GROUP, D, SCALE = 2, 2, 64, 0.2
NAMES = ("snapkv", "h2o", "rkv")

Weights = dict[int, float]
Choose = Callable[[list[int], list[Weights], np.ndarray, int], list[int]]


def stream(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys that resemble each other in parts, and values that say their position."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, HKV * GROUP, tokens, D, generator=generator)
    k = torch.randn(1, HKV, tokens, D, generator=generator)
    kinds = torch.randn(1, HKV, 5, D, generator=generator)
    k = 0.7 * k + kinds[:, :, torch.randint(5, (tokens,), generator=generator)]
    v = torch.arange(tokens, dtype=torch.float32)[:, None].expand(1, HKV, tokens, D).contiguous()
    return q, k, v


def positions(layer: held.HeldLayer, row: int = 0) -> list[list[int]]:
    """Which tokens each KV head of a row holds, by what their values say."""
    values = layer.v_cache[layer.block_table[row].long()].transpose(0, 1).flatten(1, 2)
    return values[:, : int(layer.seq_lens[row]), 0].long().tolist()


def drive(
    name: str,
    budget: int,
    prompt: int,
    steps: int,
    each: Callable[..., object] = lambda *_: None,
    tail: int = 0,
) -> list[list[list[int]]]:
    """What is held after the prompt and after every decoded token, when `each` is called with all that was made."""
    q, k, v = stream(prompt + steps)
    evictor = EVICTORS[name]()
    cache = hf.PagedCache(transformers.LlamaConfig(num_hidden_layers=1), hf.LocksConfig(budget=None))
    (source,) = cache.layers
    assert isinstance(source, hf.PagedLayer)
    source.expect(None)
    source.update(k[:, :, :prompt], v[:, :, :prompt])
    watch = held.Watch(torch.tensor([prompt]), evictor.sums, tail)
    watch.see(0, q[:, :, : prompt + tail], k[:, :, : prompt + tail], SCALE)
    (layer,) = held.hold(cache, [prompt], watch, evictor, budget, 1).layers
    assert isinstance(layer, held.HeldLayer)
    seen = [positions(layer)]
    for t in range(prompt, prompt + steps):
        layer.expect(None)
        layer.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        mass = evictor.page_mass(
            q[:, :, t], layer.state, layer.k_cache, layer.table, layer.seq_lens, scale=SCALE
        )
        each(q[:, :, t], mass, layer, k)
        seen.append(positions(layer))
    return seen


def defined(name: str, budget: int, prompt: int, steps: int, tail: int = 0) -> list[list[list[int]]]:
    """The same by the definition, one head and one token at a time, in double precision."""
    q, k, _ = (x[0].double().numpy() for x in stream(prompt + steps))
    choose = {"snapkv": snapkv, "h2o": h2o, "rkv": rkv}[name]
    heads = []
    for head in range(HKV):
        log: list[Weights] = []

        def look(t: int, tokens: list[int], head: int = head, log: list[Weights] = log) -> None:
            found = dict.fromkeys(tokens, 0.0)
            for query in range(head * GROUP, (head + 1) * GROUP):
                e = [np.exp(SCALE * q[query, t] @ k[head, s]) for s in tokens]
                for s, x in zip(tokens, e, strict=True):
                    found[s] += x / sum(e) / GROUP
            log[t:] = [found, *log[t + 1 :]]

        for t in range(prompt):
            look(t, list(range(t + 1)))
        tokens = list(range(prompt))
        # Accumulated weights are those of queries that are done; votes are of the whole prompt's last ones.
        for t in range(prompt, prompt if name == "h2o" else prompt + tail):
            look(t, tokens)
        if prompt >= budget:
            tokens = choose(tokens, log, k[head], budget)
        history = [tokens]
        for t in range(prompt, prompt + steps):
            if len(tokens) == budget:
                tokens = choose(tokens, log, k[head], budget)
            tokens = [*tokens, t]
            look(t, tokens)
            history.append(tokens)
        heads.append(history)
    return [[history[i] for history in heads] for i in range(steps + 1)]


def h2o(tokens: list[int], log: list[Weights], keys: np.ndarray, budget: int) -> list[int]:
    recent = budget // 2 - 1
    total = {s: sum(seen.get(s, 0.0) for seen in log) for s in tokens}
    old = sorted(tokens[: len(tokens) - recent], key=lambda s: -total[s])
    return sorted(old[: budget // 2]) + tokens[len(tokens) - recent :]


def voted(prefix: list[int], log: list[Weights], queries: int) -> Weights:
    """Weights of the last queries, the largest among three neighbours on either side."""
    plain = [sum(seen.get(s, 0.0) for seen in log[-queries:]) for s in prefix]
    return {s: max(plain[max(0, i - 3) : i + 4]) for i, s in enumerate(prefix)}


def snapkv(tokens: list[int], log: list[Weights], keys: np.ndarray, budget: int) -> list[int]:
    window = min(32, budget // 4)
    prefix = tokens[:-window]
    votes = voted(prefix, log, window)
    kept = sorted(prefix, key=lambda s: (-votes[s], s))[: budget - 1 - window]
    return sorted(kept) + tokens[-window:]


def rkv(tokens: list[int], log: list[Weights], keys: np.ndarray, budget: int) -> list[int]:
    unit = {s: keys[s] / np.linalg.norm(keys[s]) for s in tokens}
    repeats = dict.fromkeys(tokens, 0.0)
    for s in tokens:
        alike = {other: unit[s] @ unit[other] for other in tokens if other != s}
        latest = max((other for other, cosine in alike.items() if cosine > 0.5), default=None)
        for other, cosine in alike.items():
            repeats[other] += 0.0 if other == latest else cosine / len(tokens)
    total = sum(np.exp(x) for x in repeats.values())
    prefix = tokens[:-8]
    votes = voted(prefix, log, 8)
    joint = {s: 0.1 * votes[s] / 8 - 0.9 * np.exp(repeats[s]) / total for s in prefix}
    kept = sorted(prefix, key=lambda s: (-joint[s], s))[: budget - min(128, budget // 4) - 8]
    return sorted(kept) + tokens[-8:]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("budget", "prompt"), [(48, 150), (64, 64), (64, 63), (64, 5), (128, 129)], ids=lambda n: str(n)
)
def test_what_is_held_is_what_the_definition_holds(name: str, budget: int, prompt: int):
    got, want = drive(name, budget, prompt, 90), defined(name, budget, prompt, 90)
    for step, (mine, others) in enumerate(zip(got, want, strict=True)):
        assert mine == others, f"after {step} tokens"
        assert max(map(len, mine)) <= budget
    if prompt >= budget:
        assert mine[0] != mine[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompts_last_queries_vote_before_they_are_decoded(name: str):
    got = drive(name, 64, 150, 40, tail=3)
    assert got == defined(name, 64, 150, 40, tail=3)
    assert (got[0] == drive(name, 64, 150, 40)[0]) == (name == "h2o")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_gone_never_comes_back(name: str):
    history = drive(name, 64, 100, 60)
    for step, (before, now) in enumerate(itertools.pairwise(history)):
        for earlier, tokens in zip(before, now, strict=True):
            assert tokens == sorted(set(tokens))
            assert set(tokens) <= {*earlier, 100 + step}


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_all_that_is_held_is_attended_to_at_its_own_positions(impl: str):
    checked = []

    def check(q: torch.Tensor, mass: PageMass, layer: held.HeldLayer, k: torch.Tensor) -> None:
        share = api.page_share(mass, HKV, impl=impl)
        pages = api.select_pages(share, layer.seq_lens, page=16, budget=64, impl=impl)
        args = (q, layer.k_cache, layer.v_cache, layer.table, layer.seq_lens, pages)
        out = api.sparse_attention(*args, page=16, scale=SCALE, impl=impl).out
        for head, tokens in enumerate(positions(layer)):
            for query in range(head * GROUP, (head + 1) * GROUP):
                weights = (SCALE * k[0, head, tokens].double() @ q[0, query].double()).softmax(0)
                want = weights @ torch.tensor(tokens, dtype=torch.float64)
                torch.testing.assert_close(out[0, query].double(), want.expand(D), rtol=1e-5, atol=1e-4)
                checked.append(len(tokens))

    drive("rkv", 64, 70, 20, check)
    assert (min(checked), max(checked)) == (49, 64)


def test_of_tokens_that_repeat_each_other_the_latest_stays():
    keys = torch.eye(8, 16)[None, None].clone()
    keys[0, 0, 5] = keys[0, 0, 2] = keys[0, 0, 1]
    (found,) = redundancy(keys, 0.5)[0]
    # Each of the three leaves out the latest of the other two.
    assert found[1] > found[2] > found[5] == found[0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_dir: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()


def ids(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


def answer(session: engine.Session, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return session.generate([row[-1:] for row in prompts], [tokens] * len(prompts), [])


@torch.inference_mode()
def poison(source: hf.PagedCache, layers: list[held.HeldLayer]) -> None:
    """Makes nan of all of a batch's own keys and values, and of what lies behind the tokens that layers hold."""
    for layer in source.layers:
        assert isinstance(layer, hf.PagedLayer)
        for cache in (layer.k_cache, layer.v_cache):
            cache.fill_(torch.nan)
    for layer in layers:
        for row, count in enumerate(layer.held):
            for cache in (layer.k_cache, layer.v_cache):
                cache[row, :, count:] = torch.nan


@pytest.mark.parametrize("name", NAMES)
def test_evicted_keys_and_values_are_read_by_nobody(model, name: str):
    prompts, evictor = ids(300, 40), EVICTORS[name]()
    with engine.enabled(model):
        batch = engine.prefill(model, [row[:-1] for row in prompts], [evictor])
        session = engine.Session(model, batch, evictor)
        session.rewind(64)
        expected = answer(session, prompts, 50)
        session.rewind(64)
        layers = [layer for layer in session.cache.layers if isinstance(layer, held.HeldLayer)]
        assert len(layers) == 2
        # There is no room for more.
        assert {layer.k_cache.shape[0] * layer.k_cache.shape[2] for layer in layers} == {2 * 64}
        poison(batch.cache, layers)
        assert answer(session, prompts, 50) == expected
        assert all(max(layer.held) <= 64 for layer in layers)
        traffic = session.traffic()
    # Two layers of two heads, K and V of 64 numbers of 2 bytes: at most 64 tokens, and all of them.
    token = 2 * 2 * 2 * 64 * 2
    assert traffic.read <= 64 * token
    assert traffic.dense == pytest.approx(token * ((299 + 39) / 2 + 51 / 2))


@pytest.mark.parametrize("name", NAMES)
def test_evictors_follow_selectors_and_budgets_on_one_batch(model, name: str):
    prompts, evictor = ids(200, 150), EVICTORS[name]()
    with engine.enabled(model):
        fresh = engine.Session(model, engine.prefill(model, [p[:-1] for p in prompts], [evictor]), evictor)
        fresh.rewind(64)
        expected = answer(fresh, prompts, 30)
        batch = engine.prefill(model, [p[:-1] for p in prompts], [EVICTORS[n]() for n in NAMES])
        locks = engine.Session(model, batch, methods.parse_methods("locks")[0].make(64))
        locks.rewind(64)
        first = answer(locks, prompts, 30)
        late = engine.Session(model, batch, evictor)
        for budget in (128, 64):
            late.rewind(budget)
            found = answer(late, prompts, 30)
        assert found == expected
        again = engine.Session(model, batch, methods.parse_methods("locks")[0].make(64))
        again.rewind(64)
        assert answer(again, prompts, 30) == first


@pytest.mark.parametrize("name", NAMES)
def test_watching_a_prompt_changes_nothing(model, name: str):
    prompts = ids(120, 77)
    with engine.enabled(model):
        plain = engine.Session(model, engine.prefill(model, [p[:-1] for p in prompts]), None)
        plain.rewind(None)
        watched = engine.Session(
            model, engine.prefill(model, [p[:-1] for p in prompts], [EVICTORS[name]()]), None
        )
        watched.rewind(None)
        assert answer(watched, prompts, 20) == answer(plain, prompts, 20)


def test_an_evictor_wants_a_watched_batch_and_its_cache_cannot_be_rolled_back(model):
    (prompt,) = ids(90)
    with engine.enabled(model):
        unwatched = engine.Session(model, engine.prefill(model, [prompt]), EVICTORS["h2o"]())
        with pytest.raises(ValueError, match="watched batch for an evictor"):
            unwatched.rewind(64)
        batch = engine.prefill(model, [prompt], [EVICTORS["snapkv"]()])
        session = engine.Session(model, batch, EVICTORS["snapkv"]())
        session.rewind(64)
        with pytest.raises(NotImplementedError, match="what was evicted cannot come back"):
            session.cache.crop(10)
        with pytest.raises(RuntimeError, match="expected one token of an enabled model, got 2"):
            model(torch.tensor([[1, 2]]), **hf.cache_argument(model, session.cache))


def test_evictors_keep_the_windows_of_a_model_that_has_some():
    sliding = sliding_model(256)
    prompts = ids(130)
    evictors = [EVICTORS[name]() for name in NAMES]
    with engine.enabled(sliding):
        batch = engine.prefill(sliding, [prompts[0][:-1]], evictors)
        full = engine.Session(sliding, batch, None)
        full.rewind(None)
        expected = answer(full, prompts, 40)
        for evictor in evictors:
            session = engine.Session(sliding, batch, evictor)
            session.rewind(192)
            assert answer(session, prompts, 40) == expected


def test_a_run_of_evictors_goes_on_where_it_was_killed(model_dir: Path, tmp_path: Path):
    given = ["eval", "needles", "--model", str(model_dir), "--lengths", "1500", "--examples", "1"]
    given += ["--selector", "snapkv,h2o,rkv,locks", "--budgets", "64,full"]

    def evaluate(out: Path) -> list[dict[str, object]]:
        result = CliRunner().invoke(app, [*given, "--out", str(out)])
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in (out / "needles.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    whole = evaluate(tmp_path / "whole")
    assert [row["selector"] for row in whole[1:]] == ["full", "snapkv", "h2o", "rkv", "locks"]
    text = (tmp_path / "whole" / "needles.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "needles.jsonl").write_text("".join(text[:3]) + text[3][:30])
    assert evaluate(tmp_path / "cut") == whole


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_of_an_evictor_say_what_steps_say(model, name: str):
    evictor = EVICTORS[name]()
    # All full at once, then only some of them.
    for prompts in (ids(50, 50), ids(200, 40)):
        with engine.enabled(model):
            batch = engine.prefill(model, [row[:-1] for row in prompts], [evictor])
            made, traffic = [], []
            for replays in (False, True):
                session = engine.Session(model, batch, evictor, replays=replays)
                session.rewind(64)
                made.append(answer(session, prompts, 40))
                traffic.append(session.traffic())
            assert made[0] == made[1]
            assert traffic[0] == traffic[1]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_step_does_to_the_counts_is_known_before_it(model, name: str):
    prompts, evictor = ids(50, 50), EVICTORS[name]()
    with engine.enabled(model), torch.inference_mode():
        session = engine.Session(
            model, engine.prefill(model, [row[:-1] for row in prompts], [evictor]), evictor
        )
        session.rewind(64)
        (layer, _) = session.cache.layers
        assert isinstance(layer, held.HeldLayer)
        kinds = []
        for token in range(60):
            before, kind = layer.held, layer.kind
            session.step(torch.tensor([token, token]))
            after = layer.held
            kinds.append(kind)
            assert kind == (after[0] <= before[0])
            layer.held = before
            layer.follow()
            assert layer.held == after
        assert set(kinds) == {True, False}
        layer.held = [64, 63]
        assert layer.kind is None


class OnDevice(TorchFunctionMode):
    """Refuses what brings numbers from the host to a tensor, or back: no graph of a GPU's may wait for them."""

    BACK = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name in self.BACK:
            raise AssertionError(f"{name} waits for the device")
        if name in ("tensor", "as_tensor") and not isinstance(args[0], torch.Tensor):
            raise AssertionError(f"{name} copies {args[0]} from the host")
        if name == "__setitem__" and not isinstance(args[2], torch.Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            # Slices are filled by a kernel, what tensors point at is not.
            if any(isinstance(one, torch.Tensor) for one in index):
                raise AssertionError(f"__setitem__ copies {args[2]} from the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_an_evictor_takes_nothing_from_the_host_and_gives_it_nothing(model, name: str):
    prompts, evictor = ids(50, 50), EVICTORS[name]()
    with engine.enabled(model), torch.inference_mode():
        batch = engine.prefill(model, [row[:-1] for row in prompts], [evictor])
        session = engine.Session(model, batch, evictor)
        session.rewind(64)
        layers = [layer for layer in session.cache.layers if isinstance(layer, held.HeldLayer)]
        assert len(layers) == len(session.cache.layers)
        key = torch.randn(2, layers[0].k_cache.shape[1], 1, layers[0].k_cache.shape[3])
        q = torch.randn(2, key.shape[1] * GROUP, key.shape[3])
        kinds = set()
        for _ in range(60):
            for layer in layers:
                kinds.add(layer.kind)
                layer.expect(None)
                with OnDevice():
                    layer.update(key, key)
                    evictor.page_mass(
                        q, layer.state, layer.k_cache, layer.block_table, layer.seq_lens, scale=SCALE
                    )
        assert kinds == {True, False}


@pytest.mark.parametrize(
    "does",
    [
        lambda x, at: x.__setitem__((at, at), 0),
        lambda x, at: x.__setitem__(at, 1.0),
        lambda x, at: torch.tensor([1], device=x.device),
        lambda x, at: bool(x.any()),
        lambda x, at: x.sum().item(),
    ],
)
def test_what_no_graph_may_wait_for_is_refused(does: Callable[[torch.Tensor, torch.Tensor], object]):
    x, at = torch.zeros(3, 3), torch.arange(3)
    with OnDevice():
        x[:1] = 1
        x[at] = x.new_zeros(())
        with pytest.raises(AssertionError, match=r"from the host|waits for the device"):
            does(x, at)
