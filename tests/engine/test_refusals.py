"""What cannot be served stops an engine before it looks for weights: these models have none."""

from pathlib import Path
from typing import Any

import pytest

from locks.vllm import compat, plugin, stats
from tests.engine.engines import engine, layers, prompts, run

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def save(directory: Path, kind: str, **changes: Any) -> Path:
    """A model directory without weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(directory)
    return directory


def start(model: Path, locks: Any, **settings: Any) -> str:
    """The message that a start-up ends with."""
    with pytest.raises(Exception, match=r"locks|LOCKS") as error, engine(model, locks, **settings):
        pass
    return str(error.value)


@pytest.mark.parametrize(
    ("locks", "settings", "says"),
    [
        ({"budget": 32}, {}, "budget: expected at least 48"),
        ({"budget": 100}, {}, "multiple of the page"),
        ({"rank": 16}, {}, "rank: expected at most page - 1"),
        ({"layer_ranks": "8@0-99"}, {}, "layer_ranks: expected layers of 0 to"),
        ({"bugdet": 64}, {}, "unknown option bugdet"),
        (5, {}, "expected a JSON object"),
        ({"page": 32}, {"block_size": 16}, "block size 16: expected a multiple of the page"),
        ({}, {"kv_cache_dtype": "fp8"}, "quantised KV cache"),
        (
            {},
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            "KV connector OffloadingConnector",
        ),
    ],
)
def test_settings(tmp_path: Path, locks: Any, settings: dict[str, Any], says: str):
    model = save(tmp_path / "llama", "Llama")
    assert says in start(model, locks, **settings)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("Mistral", {"sliding_window": 64}, "sliding-window attention"),
        ("Gemma2", {"sliding_window": 64}, "sliding-window attention"),
        ("Llama", {"head_dim": 32}, "head width"),
        ("Bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    ],
)
def test_models(tmp_path: Path, kind: str, changes: dict[str, Any], says: str):
    assert says in start(save(tmp_path / kind, kind, **changes), {})


def test_draft_models(tmp_path: Path):
    model = save(tmp_path / "llama", "Llama")
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    assert "speculative decoding by draft_model" in start(model, {}, speculative_config=drafts)


def test_settings_from_the_environment(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKS_CONFIG", '{"budget": 64}')
    before = stats.totals()
    with engine(tiny, None) as llm:
        assert any(name.endswith(".locks_summary") for name in layers(llm))
        run(llm, prompts((100,)), 5)
    assert stats.totals().sparse_rows - before.sparse_rows == 4


def test_registering_twice_is_registering_once(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for _ in range(2):
        plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.CUDA_BACKEND
    assert AttentionBackendEnum.CPU_ATTN.get_path() == plugin.CPU_BACKEND
    monkeypatch.setenv("LOCKS_CONFIG", "{")
    with pytest.raises(ValueError, match="LOCKS_CONFIG: expected a JSON object"):
        plugin.register()


def test_another_version_stays_off_or_stops(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setitem(compat.SUPPORTED, "cpu", "0.1.0")
    AttentionBackendEnum.CPU_ATTN.clear_override()
    plugin.register()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    monkeypatch.setenv("LOCKS_CONFIG", "{}")
    with pytest.raises(ValueError, match=r"is not supported on cpu, expected 0\.1\.0"):
        plugin.register()
    monkeypatch.undo()
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.is_overridden()


def test_vllm_finds_the_plugin():
    assert compat.registered()
