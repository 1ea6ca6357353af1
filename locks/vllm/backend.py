"""CUSTOM on a GPU: vLLM's FlashAttention for prefill, the sparse step for decoding, in full CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
import vllm

from locks import checks
from locks.vllm import compat, refusals

# Before anything that another version may not have is imported.
compat.require(vllm.__version__, "cuda")

from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend  # noqa: E402

from locks.vllm.impl_cuda import CudaBuilder, CudaImpl  # noqa: E402

# Blocks of this size are read as fast as smaller ones and make a block table a quarter as wide.
BLOCK = 64


class CudaBackend(FlashAttentionBackend):
    """What vLLM asks before it builds a model."""

    @staticmethod
    def get_name() -> str:
        """The name under which a user selects it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        """The implementation of a layer."""
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaBuilder]:
        """The builder of a step's metadata."""
        return CudaBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens of a block where the user names none."""
        return max(BLOCK, default_block_size)

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        """One run of memory a (block, KV head): what a sparse step reads."""
        return "HND"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Widths that the kernels have."""
        return head_size in checks.HEAD_DIMS

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """Plain numbers only."""
        return kv_cache_dtype in (None, "auto", "float16", "bfloat16")

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A row's scores, pages and output do not depend on the rows beside it."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """What FlashAttention has."""
        return dtype in (torch.float16, torch.bfloat16)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Why the model cannot be served, in words that say what to do; empty where it can."""
        return [f"locks: {refusals.explain(r)}" for r in super().validate_configuration(*args, **kwargs)]
