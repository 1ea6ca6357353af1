"""Selectors by layer in transformers: each layer's own summaries, also where the cache grows, is cut or copied."""

from typing import Any

import pytest
import torch

from locks import SummaryFormat, api, hf
from locks.selectors import Locks, Oracle
from tests.quality_model import random_llama, sliding_model

pytest.importorskip("transformers")

EIGHT, TWO = Locks(SummaryFormat(rank=8)), Locks(SummaryFormat(rank=2))


@pytest.fixture
def model() -> Any:
    return random_llama(50, num_hidden_layers=3)


def prompt(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(50, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def check_records(cache: Any, selectors: list[Any]) -> None:
    """Every layer's records are what its own selector makes of the keys that are cached."""
    for layer, selector in zip(cache.layers, selectors, strict=True):
        if isinstance(selector, Oracle):
            assert layer.state is None
            continue
        pages = layer.seq_lens // 16
        expected = api.summarize(layer.k_cache, layer.table, layer.seq_lens, selector.fmt)
        for row, count in enumerate(pages.tolist()):
            for page in range(count):
                place = layer.table[row, page // 4], slice(None), page % 4
                assert torch.equal(layer.state[place], expected[place])


def test_every_layer_has_its_own_summaries(model: Any) -> None:
    selectors = [EIGHT, Oracle(), TWO]
    steps: list[hf.Step] = []
    hf.enable(model, hf.LocksConfig(budget=64, selector=selectors, on_step=steps.append))
    # Beyond the room that the prompt was given, so that the storage grows.
    out = model.generate(prompt(130), max_new_tokens=130, do_sample=False, return_dict_in_generate=True)
    cache = out.past_key_values
    assert [step.layer_idx for step in steps[:4]] == [0, 1, 2, 0]
    check_records(cache, selectors)
    stats = hf.stats(model)
    assert stats.sparse_rows == stats.decode_rows == 3 * 129

    twin = hf.fork(cache, hf.LocksConfig(budget=64, selector=selectors[::-1]))
    check_records(twin, selectors[::-1])
    twin.batch_repeat_interleave(2)
    twin.crop(100)
    model.generate(
        torch.cat([out.sequences[:, :100].repeat(2, 1), prompt(1, 2)], 1),
        past_key_values=twin,
        max_new_tokens=40,
        do_sample=False,
    )
    check_records(twin, selectors[::-1])
    check_records(cache, selectors)


def test_the_first_layer_ranks_as_it_does_when_all_are_alike(model: Any) -> None:
    seen: dict[str, list[hf.Step]] = {"mixed": [], "alike": []}
    for name, selector in (("mixed", [EIGHT, TWO, TWO]), ("alike", EIGHT)):
        hf.enable(model, hf.LocksConfig(budget=64, selector=selector, on_step=seen[name].append))
        model.generate(prompt(200), max_new_tokens=2, do_sample=False)
        hf.disable(model)
    first, second = (seen[name] for name in ("mixed", "alike"))
    assert torch.equal(first[0].mass.log_mass, second[0].mass.log_mass)
    assert not torch.equal(first[1].mass.log_mass, second[1].mass.log_mass)


def test_layers_with_windows_count(model: Any) -> None:
    sliding: Any = sliding_model(50)
    hf.enable(sliding, hf.LocksConfig(budget=64, selector=[EIGHT, TWO]))
    out = sliding.generate(prompt(130), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    layer, window = out.past_key_values.layers
    assert layer.state.shape[-1] == EIGHT.fmt.layout(64).nbytes
    assert not hasattr(window, "state")


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_selectors_than_layers_is_refused(model: Any, count: int) -> None:
    config = hf.LocksConfig(budget=64, selector=[TWO] * count)
    with pytest.raises(ValueError, match=f"selector: expected one, or one for each of 3 layers, got {count}"):
        hf.PagedCache(model.config, config)
    with pytest.raises(ValueError, match="selector: expected one, or one for each of 3 layers"):
        hf.enable(model, config)
    # And nothing is left behind.
    assert model.generate(prompt(20), max_new_tokens=2).shape[1] == 22


def test_each_selector_is_checked() -> None:
    with pytest.raises(ValueError, match="budget"):
        hf.LocksConfig(budget=64, selector=[TWO, Locks(SummaryFormat(page=64))])
    with pytest.raises(ValueError, match="fmt: expected the default beside a selector"):
        hf.LocksConfig(selector=[TWO], fmt=SummaryFormat(rank=8))
    with pytest.raises(TypeError, match="got one for each; `of_layer`"):
        _ = hf.LocksConfig(selector=[TWO]).ranker
