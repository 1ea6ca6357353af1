"""What cannot be served, and what to do instead: one message each, before weights are loaded."""

from __future__ import annotations

from typing import Any

from locks import checks
from locks.layer_ranks import check_layers
from locks.vllm import plugin
from locks.vllm.config import PluginConfig

WITHOUT = "serve this model without locks"
# The start of a reason that vLLM's own validation gives, and what we say in its place.
BACKEND_REASONS = {
    "head_size": f"head width: expected a multiple of 16 in 64..256; {WITHOUT}",
    "dtype": "dtype: expected bfloat16 or float16; set --dtype",
    "kv_cache_dtype": "quantised KV cache: summaries are made of keys as they are; drop --kv-cache-dtype",
    "block_size": "block size: expected a multiple of 16; set --block-size",
    "partial multimodal": f"bidirectional attention over images: it has no sparse counterpart; {WITHOUT}",
    "MLA": f"multi-head latent attention (MLA): its cache has no key per KV head; {WITHOUT}",
    "attention sinks": f"attention sinks: not part of the sparse step; {WITHOUT}",
    "sparse": f"a model with a sparse attention of its own; {WITHOUT}",
    "per-head quant": "quantised KV cache: summaries are made of keys as they are; drop --kv-cache-dtype",
    "compute capability": f"this GPU is older than Ampere; {WITHOUT}",
    "attention type": f"encoder or cross attention; {WITHOUT}",
    "sliding window": f"sliding-window attention: its layers would need pages of another size; {WITHOUT}",
    "non-causal": f"non-causal attention; {WITHOUT}",
    "batch invariance": "VLLM_BATCH_INVARIANT: vLLM's attention does not promise it on this device; unset it",
    "PCP": "prefill context parallelism: set --prefill-context-parallel-size 1",
}
# Drafts of these methods come from the text, not from a model with a cache of its own.
SPECULATION = ("ngram", "ngram_gpu", "suffix")
CONNECTORS = ("DecodeBenchConnector", plugin.CONNECTOR)


def explain(reason: str) -> str:
    """Our words for a reason that vLLM's validation gave."""
    for start, text in BACKEND_REASONS.items():
        if reason.startswith((start, f"non-{start}")):
            return text
    return reason


def refuse(what: str) -> None:
    """Raises the one error that every refusal is."""
    raise ValueError(f"locks: {what}")


def check_engine(vllm_config: Any, config: PluginConfig) -> None:
    """Stops an engine whose settings lose summaries or tokens.

    Raises:
        ValueError: what cannot be served, by name, and what to do instead.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        refuse("decode context parallelism: set --decode-context-parallel-size 1 (tensor parallelism works)")
    if parallel.prefill_context_parallel_size > 1:
        refuse(BACKEND_REASONS["PCP"])
    model = vllm_config.model_config
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ["full_attention"])
    if model.is_hybrid or kinds != {"full_attention"}:
        others = ", ".join(sorted(kinds - {"full_attention"})) or "state-space"
        refuse(f"hybrid model with {others} layers: only models of full attention can be served; {WITHOUT}")
    try:
        if config.others:
            check_layers(config.others, model.hf_text_config.num_hidden_layers)
    except ValueError as error:
        refuse(f"layer_ranks: {error}")
    transfer = vllm_config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    if connector is not None and connector not in CONNECTORS:
        refuse(
            f"KV connector {connector}: blocks that it moves may arrive without their summaries; "
            "expected none or DecodeBenchConnector"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in SPECULATION:
        refuse(
            f"speculative decoding by {speculative.method}: the drafting model's own steps are not prepared "
            f"by the engine one by one; expected one of {', '.join(SPECULATION)}"
        )
    cache = vllm_config.cache_config
    if cache.user_specified_block_size:
        check_block(cache.block_size, config)


def check_block(block_size: int, config: PluginConfig) -> None:
    """Stops an engine whose blocks do not hold whole pages.

    Raises:
        ValueError: the block size, the page and what to set.
    """
    if block_size % config.page:
        refuse(
            f"block size {block_size}: expected a multiple of the page ({config.page} tokens); "
            f"set --block-size {max(64, config.page)} or another page"
        )


def check_layer(
    *,
    head_size: int,
    kv_cache_dtype: str,
    alibi_slopes: Any,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    sinks: Any,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
) -> None:
    """Stops an engine with a layer that computes what the sparse step does not.

    Raises:
        ValueError: what cannot be served, by name, and what to do instead.
    """
    if str(getattr(attn_type, "value", attn_type)) != "decoder":
        refuse(BACKEND_REASONS["attention type"])
    if sliding_window is not None:
        refuse(BACKEND_REASONS["sliding window"])
    if alibi_slopes is not None:
        refuse(f"ALiBi: summaries know nothing of distances; {WITHOUT}")
    if sinks is not None:
        refuse(BACKEND_REASONS["attention sinks"])
    if logits_soft_cap:
        refuse(f"capped logits (soft cap {logits_soft_cap}): page masses assume plain ones; {WITHOUT}")
    if kv_sharing_target_layer_name is not None:
        refuse(f"layers that share the cache of {kv_sharing_target_layer_name}; {WITHOUT}")
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        refuse(BACKEND_REASONS["kv_cache_dtype"])
    if head_size not in checks.HEAD_DIMS:
        refuse(BACKEND_REASONS["head_size"])
