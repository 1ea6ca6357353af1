"""transformers without a budget: where our kernels run, a decode step attends to the whole cache where it lies."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, masking_utils
from transformers.masking_utils import causal_mask_function

from locks import hf
from locks.hf_cache import BLOCK
from tests.helpers import DEVICE, DTYPES, normal
from tests.test_hf import LAYERS, assert_as_close_as, generate, left_padded, prompt, tiny
from tests.test_hf_models import FAMILIES

IN_PLACE = hf.LocksConfig(budget=None, impl="triton", debug=True)
COPIES = hf.LocksConfig(budget=None, impl="torch")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns each copy of a whole cache had, in order."""
    made: list[int] = []
    dense = hf.PagedLayer.dense

    def noted(layer: hf.PagedLayer) -> tuple[Tensor, Tensor]:
        made.append(layer.columns)
        return dense(layer)

    monkeypatch.setattr(hf.PagedLayer, "dense", noted)
    return made


@pytest.fixture
def model() -> Any:
    return tiny().to(DEVICE)


@pytest.mark.parametrize("length", [1, BLOCK - 2, 150])
def test_one_row_is_the_models_own_attention(model: Any, length: int, copied: list[int]) -> None:
    ids, exact = prompt(length).to(DEVICE), copy.deepcopy(model)
    plain = generate(model, ids, 5)
    got = generate(hf.enable(model, IN_PLACE), ids, 5)
    assert copied == []
    assert torch.equal(got.tokens, plain.tokens)
    assert_as_close_as(got.logits, plain.logits, exact, plain.tokens)


@pytest.mark.parametrize("family", ["llama", "gemma2, no cap"])
def test_ragged_rows_are_the_models_own_attention(family: str, copied: list[int]) -> None:
    """Padding, one length a row; a scale of its own and layers with a window beside the whole ones."""
    model = FAMILIES[family]().to(DEVICE)
    batch = {name: x.to(DEVICE) for name, x in left_padded([prompt(n, n) for n in (37, 1, 64, 90)]).items()}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    plain = generate(model, ids, 6, attention_mask=mask)
    found, texts = [], []
    for config in (COPIES, IN_PLACE):
        texts.append(generate(hf.enable(model, config), ids, 6, attention_mask=mask))
        found.append(hf.stats(model))
        whole = sum(isinstance(layer, hf.PagedLayer) for layer in texts[-1].cache.layers)
        # One at every step and layer, that of `enable` first, and of the second config none.
        assert copied == [n for n in (3, *range(91, 96)) for _ in range(whole)]
    assert found[0] == found[1]
    assert (found[1].decode_rows, found[1].sparse_rows, found[1].dense_rows) == (
        5 * 4 * whole,
        0,
        6 * 4 * whole,
    )
    for text in texts:
        assert torch.equal(text.tokens, plain.tokens)
        torch.testing.assert_close(text.logits, plain.logits, rtol=1e-4, atol=1e-4)


LENGTHS = [0, 0, 1, BLOCK - 1, BLOCK, 130]
# Of each row's step: the first stays padding alone, one has padding between its tokens.
STEP = [False, True, True, False, True, True]


def filled(config: hf.LocksConfig, heads: int, D: int, Dv: int, dtype: torch.dtype) -> hf.PagedLayer:
    """A layer of left-padded rows and one step."""
    rows, width = len(LENGTHS), max(LENGTHS)
    real = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
    mask = torch.cat([real, torch.tensor(STEP)[:, None]], 1).to(DEVICE)
    layer = hf.PagedLayer(config)
    for first, last in ((0, width), (width, width + 1)):
        layer.expect(mask[:, :last])
        layer.update(
            normal(rows, heads, last - first, D, seed=first, dtype=dtype),
            normal(rows, heads, last - first, Dv, seed=first + 1, dtype=dtype),
        )
    assert layer.seq_lens.tolist() == [n + one for n, one in zip(LENGTHS, STEP, strict=True)]
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "group", "D", "Dv"), [(2, 1, 64, 64), (1, 3, 128, 64), (2, 4, 80, 96), (1, 8, 64, 128)]
)
@pytest.mark.parametrize("scaling", [None, 0.2])
def test_every_row_is_what_sdpa_makes_of_a_copy(
    model: Any,
    heads: int,
    group: int,
    D: int,
    Dv: int,
    scaling: float | None,
    dtype: torch.dtype,
    copied: list[int],
) -> None:
    """Rows of padding alone, of one token, to the end of a block and over it; values of another width."""
    handle = hf.enable(model, IN_PLACE).model._locks
    module = model.model.layers[0].self_attn
    module.num_key_value_groups = group
    q = normal(len(LENGTHS), heads * group, 1, D, seed=7, dtype=dtype)

    def attended(config: hf.LocksConfig, number: torch.dtype = dtype) -> Tensor:
        layer = filled(config, heads, D, Dv, dtype)
        for name in ("k_cache", "v_cache"):
            setattr(layer, name, getattr(layer, name).to(number))
        new = torch.empty(0)
        out, _ = hf._attention(module, q.to(number), new, new, None, scaling, locks=(handle, {0: layer}))
        return out

    got = attended(IN_PLACE)
    assert copied == []
    assert got.shape == (len(LENGTHS), 1, heads * group, Dv)
    assert (got[0] == 0).all()
    plain, exact = attended(COPIES), attended(COPIES, torch.float64)
    assert len(copied) == 2
    error, allowed = ((x.double() - exact).abs().max() for x in (got, plain))
    assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps * exact.abs().max()
    # Neither row is the other's.
    assert (exact[3] - exact[4]).abs().max() > 0.1


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are the default on a GPU")
def test_a_cpu_without_kernels_goes_on_with_copies(model: Any, copied: list[int]) -> None:
    generate(hf.enable(model, hf.LocksConfig(budget=None)), prompt(20), 3)
    # The first step is that of `enable`.
    assert copied == [n for n in (3, 21, 22) for _ in range(LAYERS)]


def test_a_gradient_goes_through_sdpa(model: Any, copied: list[int]) -> None:
    ids = prompt(20).to(DEVICE)
    cache = hf.enable(model, IN_PLACE)(ids).past_key_values
    out = model(ids[:, :1], **hf.cache_argument(model, cache))
    assert copied == [21] * LAYERS
    query = model.model.layers[-1].self_attn.q_proj.weight
    out.logits.sum().backward()
    assert query.grad.abs().max() > 0


def test_dropout_and_other_widths_go_through_sdpa(model: Any, copied: list[int]) -> None:
    handle, module = hf.enable(model, IN_PLACE).model._locks, model.model.layers[0].self_attn
    new = torch.empty(0)
    for width, dropout in ((64, 0.5), (32, 0.0)):
        layer = filled(IN_PLACE, 2, width, width, torch.float32)
        q = normal(len(LENGTHS), 4, 1, width, seed=7)
        out, _ = hf._attention(module, q, new, new, None, dropout=dropout, locks=(handle, {0: layer}))
        assert out.shape == (len(LENGTHS), 1, 4, width)
    assert len(copied) == 2


def test_a_fork_with_a_budget_goes_on_from_a_cache_without(model: Any, copied: list[int]) -> None:
    ids, token = prompt(150).to(DEVICE), prompt(1, 2).to(DEVICE)
    hf.enable(model, IN_PLACE)
    covers = dataclasses.replace(IN_PLACE, budget=512)
    with torch.no_grad():
        cache = model(ids).past_key_values
        twin = hf.fork(cache, covers)
        got = [model(token, **hf.cache_argument(model, one)).logits for one in (cache, twin)]
    assert copied == []
    stats = hf.stats(model)
    assert (stats.sparse_rows, stats.dense_rows) == (LAYERS, 2 * LAYERS)
    torch.testing.assert_close(got[0], got[1], rtol=1e-4, atol=1e-4)


def test_one_token_without_padding_has_no_mask_and_everything_else_has_sdpas(monkeypatch: pytest.MonkeyPatch):
    # As while a graph is captured: then transformers makes every mask.
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)

    def masks(**changed: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        given: dict[str, Any] = {"batch_size": 2, "q_length": 1, "kv_length": 5, "q_offset": 4, **changed}
        given |= {"mask_function": causal_mask_function, "device": torch.device("cpu")}
        return AttentionMaskInterface()[hf.NAME](**given), AttentionMaskInterface()["sdpa"](**given)

    ours, sdpa = masks(attention_mask=None)
    assert ours is None
    assert sdpa is not None
    padding = torch.tensor([[False, True, True, True, True], [True] * 5])
    for changed in (
        {"attention_mask": padding},
        {"attention_mask": None, "allow_is_causal_skip": False},
        {"attention_mask": None, "local_size": 3},
        {"attention_mask": None, "q_length": 2, "q_offset": 3},
    ):
        ours, sdpa = masks(**changed)
        assert ours is not None
        assert sdpa is not None
        torch.testing.assert_close(ours, sdpa)
