"""A decode step's dense attention by the FlashAttention 3 that vLLM brings, called as vLLM 0.26's backend calls it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.layers import Layer, Shape

# By implementation, the most parts that a row's keys are split into: what vLLM sets in full CUDA graphs, whose memory
# must do for any length, and 0, by which the library counts the parts itself, as it may where lengths stay the same.
SPLITS = {"vllm fa3": 32, "vllm fa3 free": 0}


def unavailable() -> str | None:
    """Why there is no FlashAttention 3 here; None where there is."""
    try:
        from vllm.vllm_flash_attn import (  # pyright: ignore[reportMissingImports]
            fa_version_unsupported_reason,
        )
    except ImportError as error:
        return str(error)
    return fa_version_unsupported_reason(3)


def config(impl: str) -> str:
    """What a row says of vLLM's version and of the parts of `impl`."""
    import vllm  # pyright: ignore[reportMissingImports]

    return f"vllm {vllm.__version__}, num_splits {SPLITS[impl]}"


def calls(shape: Shape, layers: list[Layer], impl: str) -> list[Callable[[], Tensor]]:
    """Calls, one a layer, that return [B, Hq, D]: every row's one query over all of its tokens.

    The schedule is made here, outside of the calls: vLLM makes it once a step, for all layers, before the graph.

    Args:
        shape: of the layers.
        layers: all with the same lengths.
        impl: a key of SPLITS.

    Source: `FlashAttentionMetadataBuilder.build` and `FlashAttentionImpl.forward` of vLLM 0.26.0,
        vllm/v1/attention/backends/flash_attn.py. The scales of 8-bit caches are left out; 16-bit ones have none.
    """
    from vllm.vllm_flash_attn import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    first = layers[0]
    both = {
        "cu_seqlens_q": torch.arange(shape.B + 1, dtype=torch.int32, device=first.q.device),
        "max_seqlen_q": 1,
        "max_seqlen_k": shape.T,
        "causal": True,
        "num_splits": SPLITS[impl],
    }
    schedule = get_scheduler_metadata(
        batch_size=shape.B,
        num_heads_q=shape.Hq,
        num_heads_kv=shape.Hkv,
        headdim=shape.D,
        cache_seqlens=first.lens,
        qkv_dtype=first.q.dtype,
        page_size=first.k.shape[2],
        **both,
    )

    def one(x: Layer) -> Callable[[], Tensor]:
        # [blocks, block, Hkv, D], strided: how vLLM, too, hands over a cache that lies head by head.
        k, v, out = x.k.transpose(1, 2), x.v.transpose(1, 2), torch.empty_like(x.q)
        return lambda: flash_attn_varlen_func(
            q=x.q,
            k=k,
            v=v,
            out=out,
            seqused_k=x.lens,
            softmax_scale=shape.D**-0.5,
            block_table=x.table,
            scheduler_metadata=schedule,
            fa_version=3,
            **both,
        )

    return [one(x) for x in layers]
