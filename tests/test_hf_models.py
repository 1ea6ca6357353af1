"""transformers: supported families decode as they do without locks, other kinds are refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SiglipVisionConfig,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from locks import hf
from locks.models import SetupError, load_smollm2

WINDOW = 32
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


def build(kind: type[Any], config: type[Any], **overrides: Any) -> Any:
    torch.manual_seed(0)
    return kind(config(**SIZES | overrides)).eval()


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: build(LlamaForCausalLM, LlamaConfig),
    "llama, one group": lambda: build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=4),
    "qwen2": lambda: build(Qwen2ForCausalLM, Qwen2Config),
    "qwen2, mixed": lambda: build(Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, **MIXED),
    "qwen3": lambda: build(Qwen3ForCausalLM, Qwen3Config),
    "mistral": lambda: build(MistralForCausalLM, MistralConfig, sliding_window=None),
    "glm": lambda: build(GlmForCausalLM, GlmConfig),
    "glm4": lambda: build(Glm4ForCausalLM, Glm4Config),
    "gemma": lambda: build(GemmaForCausalLM, GemmaConfig),
    "gemma2, no cap": lambda: build(
        Gemma2ForCausalLM, Gemma2Config, attn_logit_softcapping=None, query_pre_attn_scalar=64, **MIXED
    ),
    "gemma3": lambda: build(Gemma3ForCausalLM, Gemma3TextConfig, query_pre_attn_scalar=100, **MIXED),
    # Its language-model head calls the decoder past the base model.
    "opt": lambda: build(
        OPTForCausalLM, OPTConfig, hidden_size=256, ffn_dim=128, word_embed_proj_dim=256, init_std=0.2
    ),
}


def generate(model: Any, inputs: dict[str, Tensor], new: int) -> tuple[Tensor, Tensor, Any]:
    out = model.generate(
        **inputs,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, 1), out.past_key_values


def left_padded(lengths: list[int]) -> dict[str, Tensor]:
    ids = torch.randint(1, 97, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_that_covers_the_context_changes_nothing(family: str) -> None:
    model, inputs, new = FAMILIES[family](), left_padded([50, 90]), 24
    tokens, plain, _ = generate(model, inputs, new)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, new, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens, attention_mask=mask, position_ids=positions)
    exact = exact.logits[:, -new - 1 : -1]
    hf.enable(model, hf.LocksConfig(budget=128, impl="torch"))
    again, got, cache = generate(model, inputs, new)
    assert torch.equal(again, tokens)
    rounding = 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + rounding
    paged = sum(isinstance(layer, hf.PagedLayer) for layer in cache.layers)
    stats = hf.stats(model)
    assert stats.sparse_rows == stats.decode_rows == 2 * (new - 1) * paged > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_budget_is_kept_to_in_every_global_layer(family: str) -> None:
    model, inputs, new = FAMILIES[family](), left_padded([150, 140]), 20
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * 2
    _, plain, _ = generate(model, inputs, new)
    hf.enable(model, hf.LocksConfig(budget=48, impl="torch"))
    _, got, cache = generate(model, inputs, new)
    kinds = {"full_attention": hf.PagedLayer, "sliding_attention": DynamicSlidingWindowLayer}
    assert [type(layer) for layer in cache.layers] == [kinds[name] for name in types]
    for i, name in enumerate(types):
        stats = hf.stats(model, i)
        rows = 2 * (new - 1) if name == "full_attention" else 0
        heads = cache.layers[i].k_cache.shape[1] if rows else 0
        assert (stats.sparse_rows, stats.decode_rows, stats.pages_read) == (rows, rows, rows * heads * 3)
    assert not torch.allclose(got[:, 1:], plain[:, 1:], atol=1e-2)


def test_a_decoder_without_a_head_is_enabled_like_one_with() -> None:
    model: Any = build(LlamaModel, LlamaConfig)
    ids = left_padded([80])["input_ids"]
    with torch.no_grad():
        plain = model(ids).last_hidden_state[:, -1]
        hf.enable(model, hf.LocksConfig(budget=128, impl="torch"))
        # Positional arguments, and the second one the mask.
        cache = model(ids[:, :-1], torch.ones(1, 79)).past_key_values
        got = model(ids[:, -1:], **hf.cache_argument(model, cache)).last_hidden_state[:, -1]
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)
    assert hf.stats(model).sparse_rows == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_decode_within_their_rounding(dtype: torch.dtype) -> None:
    model, inputs = FAMILIES["llama"](), left_padded([90])
    tokens = generate(model, inputs, 12)[0]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens).logits
        model.to(dtype)
        plain = model(tokens).logits
        hf.enable(model, hf.LocksConfig(budget=128, impl="torch"))
        cache = model(tokens[:, :90]).past_key_values
        got = torch.cat(
            [model(t, **hf.cache_argument(model, cache)).logits for t in tokens[:, 90:].split(1, dim=1)], 1
        )
    error, allowed = (got - exact[:, 90:]).abs().max(), 2 * (plain - exact)[:, 90:].abs().max()
    assert error <= allowed


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "soft cap": (
        lambda: build(Gemma2ForCausalLM, Gemma2Config),
        r"Gemma2ForCausalLM cannot decode sparsely: it caps its logits \(attn_logit_softcapping = 50.0\)",
    ),
    "encoder-decoder": (
        lambda: BartForConditionalGeneration(
            BartConfig(vocab_size=97, d_model=64, encoder_layers=1, decoder_layers=1)
        ),
        "BartForConditionalGeneration cannot decode sparsely: it is an encoder-decoder model",
    ),
    "ALiBi, no flag": (lambda: build(BloomForCausalLM, BloomConfig), "BloomForCausalLM .* ALiBi"),
    "ALiBi, in a config of its own": (
        lambda: MptForCausalLM(MptConfig(d_model=128, n_heads=2, n_layers=1, vocab_size=97)),
        "MptForCausalLM .* ALiBi",
    ),
    "ALiBi, a flag": (
        lambda: FalconForCausalLM(
            FalconConfig(
                vocab_size=97, hidden_size=128, num_hidden_layers=1, num_attention_heads=2, alibi=True
            )
        ),
        "FalconForCausalLM .* ALiBi",
    ),
    "no attention interface": (
        lambda: FalconForCausalLM(
            FalconConfig(vocab_size=97, hidden_size=128, num_hidden_layers=1, num_attention_heads=2)
        ),
        "FalconForCausalLM .* does not use transformers' attention interface",
    ),
    "sinks": (
        lambda: build(GptOssForCausalLM, GptOssConfig, num_local_experts=2),
        "GptOssForCausalLM .* learned sinks",
    ),
    "latent attention": (
        lambda: build(
            DeepseekV3ForCausalLM,
            DeepseekV3Config,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
        ),
        r"DeepseekV3ForCausalLM .* latent attention \(kv_lora_rank\)",
    ),
    "state space": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=1)),
        "MambaForCausalLM .* (keeps no key/value cache|has layers of type linear_attention)",
    ),
    "linear attention": (
        lambda: build(
            Qwen3NextForCausalLM, Qwen3NextConfig, num_experts=2, num_experts_per_tok=1, num_hidden_layers=4
        ),
        "Qwen3NextForCausalLM .* layers of type linear_attention",
    ),
    "chunked attention": (
        lambda: build(Llama4ForCausalLM, Llama4TextConfig, num_local_experts=2),
        "Llama4ForCausalLM .* layers of type chunked_attention",
    ),
    "cross-attention": (
        lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=97,
                n_embd=128,
                n_layer=1,
                n_head=2,
                add_cross_attention=True,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
        "GPT2LMHeadModel .* cross-attention",
    ),
    "not causal": (
        lambda: BertModel(
            BertConfig(vocab_size=97, hidden_size=128, num_hidden_layers=1, num_attention_heads=2)
        ),
        "BertModel .* not causal",
    ),
    "several modalities": (
        lambda: Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=Gemma3TextConfig(**SIZES),
                vision_config=SiglipVisionConfig(
                    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
                ),
            )
        ),
        "Gemma3ForConditionalGeneration .* several modalities; load its text model alone",
    ),
    "windows only": (
        lambda: build(MistralForCausalLM, MistralConfig, sliding_window=WINDOW),
        "MistralForCausalLM .* every layer has a sliding window",
    ),
    "narrow heads": (
        lambda: build(LlamaForCausalLM, LlamaConfig, head_dim=32),
        r"LlamaForCausalLM .* 32 wide, not a multiple of 16 in 64\.\.256",
    ),
    "fp64": (
        lambda: build(LlamaForCausalLM, LlamaConfig).double(),
        "LlamaForCausalLM .* dtype is torch.float64",
    ),
    "its own mask": (
        lambda: build(DogeForCausalLM, DogeConfig),
        "DogeAttention: its own mask has no sparse counterpart",
    ),
    "no keyword arguments": (
        lambda: build(NemotronForCausalLM, NemotronConfig),
        "NemotronAttention: its attention got no paged cache",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_sparse_counterpart_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    model = make().eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        hf.enable(model)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_mask_of_the_models_own_is_refused_without_a_budget_too() -> None:
    """Which would be left out of every step otherwise."""
    make, message = REFUSED["its own mask"]
    with pytest.raises(ValueError, match=message):
        hf.enable(make(), hf.LocksConfig(budget=None))


def test_a_cache_of_another_kind_in_the_generation_config_is_refused() -> None:
    model = FAMILIES["llama"]()
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(ValueError, match="a cache of type 'quantized'; set cache_implementation to None"):
        hf.enable(model)


def test_an_argument_that_is_not_known_is_refused() -> None:
    """A model of tomorrow that hands its attention something new must not lose it silently."""
    model = FAMILIES["llama"]()
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "temperature": 2.0}), with_kwargs=True
    )
    with pytest.raises(
        ValueError, match=r"LlamaAttention: layer 1 passes temperature = 2\.0 to its attention"
    ):
        hf.enable(model)


def test_a_layer_that_goes_around_the_interface_is_noticed() -> None:
    model = FAMILIES["llama"]()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match=r"expected layers \[0, 1\] to attend .* got \[0\]"):
        hf.enable(model)


def test_smollm2_decodes_sparsely_to_what_it_says_densely() -> None:
    try:
        model, tokenizer = load_smollm2(dtype=torch.float32, device="cpu")
    except SetupError as missing:
        pytest.skip(str(missing))
    lines = [
        f"The {word} is kept in box number {i}." for i, word in enumerate(("red key", "blue key", "old map"))
    ]
    text = "\n".join(lines * 12) + "\nThe blue key is kept in box number"
    inputs = dict(tokenizer(text, return_tensors="pt"))
    assert 300 < inputs["input_ids"].shape[1] < 500
    plain = generate(model, inputs, 3)[0]
    for budget in (512, 128):
        hf.enable(model, hf.LocksConfig(budget=budget))
        got = generate(model, inputs, 3)[0]
        assert torch.equal(got, plain)
        stats = hf.stats(model)
        assert stats.sparse_rows == stats.decode_rows == 2 * model.config.num_hidden_layers
    assert "1" in tokenizer.decode(got[0, -3:])
