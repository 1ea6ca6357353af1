"""The vLLM plugin's settings, its versions and its refusals: what needs no vLLM."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from locks import SummaryFormat
from locks.vllm import compat, config, refusals
from locks.vllm.config import PluginConfig


def test_defaults_are_those_of_the_library():
    made = config.parse({}, "here")
    assert made == PluginConfig()
    assert made.fmt == SummaryFormat()
    assert (made.budget, made.kept_pages, made.covered_below) == (2048, 128, 2049)


def test_every_option_is_taken():
    made = config.parse(
        {
            "budget": 256,
            "page": 32,
            "rank": 8,
            "mean_bits": 16,
            "basis_bits": 8,
            "coef_bits": 8,
            "window_pages": 2,
            "dense_below": 1000,
            "layer_ranks": "4@0-1",
        },
        "here",
    )
    assert made.fmt == SummaryFormat(page=32, rank=8, mean_bits=16, basis_bits=8, coef_bits=8)
    assert (made.window_pages, made.kept_pages, made.covered_below) == (2, 8, 1000)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bugdet": 64}, "unknown option bugdet"),
        ({"budget": 32}, "budget: expected at least 48"),
        ({"budget": 100}, "budget: expected a multiple of the page"),
        ({"budget": "2048"}, "budget: expected a number of tokens"),
        ({"budget": True}, "budget: expected a number of tokens"),
        ({"rank": 16}, "rank: expected at most page - 1 = 15"),
        ({"rank": 3}, "rank: expected one of"),
        ({"layer_ranks": "8@3"}, "layer_ranks: expected ranks and layers such as 8@18-20, got '8@3'"),
        ({"layer_ranks": "8@4-3"}, "layer_ranks: expected ranks and layers"),
        ({"layer_ranks": "8@3-4,"}, "layer_ranks: expected ranks and layers"),
        ({"layer_ranks": "3@3-4"}, "rank: expected one of"),
        ({"layer_ranks": "16@3-4"}, "rank: expected at most page - 1 = 15"),
        ({"layer_ranks": 8}, "layer_ranks: expected text such as '8@18-20', got 8"),
        ({"page": 24}, "page: expected one of"),
        ({"coef_bits": 5}, "coef_bits: expected one of"),
        ({"window_pages": 0}, "window_pages: expected at least 1"),
        ({"window_pages": 2, "budget": 48}, "budget: expected at least 64"),
        ({"dense_below": -1}, "dense_below: expected tokens"),
        ({"dense_below": 0.5}, "dense_below: expected tokens"),
        (5, "expected a JSON object of options, got 5"),
        (None, "expected a JSON object of options, got None"),
        ([], "expected a JSON object of options"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_ones(settings: Any, says: str):
    with pytest.raises(ValueError, match=r"^here: ") as error:
        config.parse(settings, "here")
    assert says in str(error.value)
    assert "budget (2048), page (16), rank (4)" in str(error.value)


def test_a_layer_has_the_rank_that_is_named_last_for_it():
    made = config.parse({"rank": 2, "budget": 256, "layer_ranks": "8@1-3, 4@3-3"}, "here")
    layers = [made.of_layer(layer) for layer in range(5)]
    assert [own.fmt.rank for own in layers] == [2, 8, 8, 4, 2]
    assert all(own == PluginConfig(rank=own.rank, budget=256) for own in layers)


def test_where_settings_come_from(monkeypatch: pytest.MonkeyPatch):
    def engine(extra: Any) -> Any:
        return SimpleNamespace(additional_config=extra)

    monkeypatch.delenv(config.VARIABLE, raising=False)
    assert config.from_engine(engine({})) is None
    assert config.from_engine(engine({"other": 1})) is None
    assert config.from_engine(None) is None
    assert config.from_engine(engine({"locks": {}})) == PluginConfig()
    monkeypatch.setenv(config.VARIABLE, json.dumps({"budget": 64}))
    assert config.from_engine(engine({})) == PluginConfig(budget=64)
    # The engine's own win.
    assert config.from_engine(engine({"locks": {"budget": 128}})) == PluginConfig(budget=128)
    with pytest.raises(ValueError, match=r"^additional_config\['locks'\]: "):
        config.from_engine(engine({"locks": {"budget": 1}}))
    monkeypatch.setenv(config.VARIABLE, "{budget: 64}")
    with pytest.raises(ValueError, match=r"^LOCKS_CONFIG: expected a JSON object"):
        config.from_engine(engine({}))


@pytest.mark.parametrize(
    ("version", "device", "good"),
    [
        ("0.26.0", "cuda", True),
        ("0.26.0+cu130", "cuda", True),
        ("0.27.1", "cpu", True),
        ("0.27.1", "cuda", False),
        ("0.26.0", "cpu", False),
        ("0.25.0", "cuda", False),
        ("0.32.0", "cpu", False),
        ("dev", "cuda", False),
    ],
)
def test_another_version_is_refused_by_its_number(version: str, device: str, good: bool):
    reason = compat.unsupported(version, device)
    assert (reason is None) == good
    if reason is not None:
        assert version in reason
        assert compat.SUPPORTED[device] in reason
        with pytest.raises(ValueError, match=r"^locks: vLLM"):
            compat.require(version, device)


def test_a_device_that_is_not_supported_is_refused():
    assert "xpu" in (compat.unsupported("0.26.0", "xpu") or "")


LAYER: dict[str, Any] = {
    "head_size": 128,
    "kv_cache_dtype": "auto",
    "alibi_slopes": None,
    "sliding_window": None,
    "logits_soft_cap": None,
    "sinks": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_size": 48}, "head width"),
        ({"kv_cache_dtype": "fp8"}, "quantised KV cache"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sliding_window": 4096}, "sliding-window attention"),
        ({"logits_soft_cap": 50.0}, "soft cap 50.0"),
        ({"sinks": object()}, "attention sinks"),
        ({"attn_type": "encoder_only"}, "encoder"),
        ({"kv_sharing_target_layer_name": "model.layers.3.attn"}, "model.layers.3.attn"),
    ],
)
def test_layers_that_compute_something_else_are_refused(change: dict[str, Any], says: str):
    refusals.check_layer(**LAYER)
    with pytest.raises(ValueError, match=r"^locks: ") as error:
        refusals.check_layer(**(LAYER | change))
    assert says in str(error.value)


def engine_of(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "layer_types": None,
        "kv_connector": None,
        "method": None,
        "block_size": 64,
    } | changes
    transfer = facts["kv_connector"] and SimpleNamespace(kv_connector=facts["kv_connector"])
    speculative = facts["method"] and SimpleNamespace(method=facts["method"])
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=facts["decode_context_parallel_size"],
            prefill_context_parallel_size=facts["prefill_context_parallel_size"],
        ),
        model_config=SimpleNamespace(
            is_hybrid=False, hf_text_config=SimpleNamespace(layer_types=facts["layer_types"])
        ),
        kv_transfer_config=transfer,
        speculative_config=speculative,
        cache_config=SimpleNamespace(user_specified_block_size=True, block_size=facts["block_size"]),
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 1"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 1"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "hybrid model with sliding_attention layers",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "hybrid model with linear_attention layers",
        ),
        ({"kv_connector": "LMCacheConnectorV1"}, "KV connector LMCacheConnectorV1"),
        ({"method": "eagle3"}, "speculative decoding by eagle3"),
        ({"block_size": 24}, "block size 24"),
    ],
)
def test_engines_that_would_lose_summaries_are_refused(change: dict[str, Any], says: str):
    for good in ({}, {"kv_connector": "DecodeBenchConnector"}, {"method": "ngram"}, {"block_size": 16}):
        refusals.check_engine(engine_of(**good), PluginConfig())
    with pytest.raises(ValueError, match=r"^locks: ") as error:
        refusals.check_engine(engine_of(**change), PluginConfig())
    assert says in str(error.value)


def test_vllms_reasons_are_put_in_words_that_help():
    assert "drop --kv-cache-dtype" in refusals.explain("kv_cache_dtype not supported")
    assert "sliding-window" in refusals.explain("sliding window not supported")
    assert "attention sinks" in refusals.explain("attention sinks not supported")
    assert "MLA" in refusals.explain("MLA not supported")
    assert refusals.explain("something new") == "something new"
