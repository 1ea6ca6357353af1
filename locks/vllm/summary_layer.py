"""A second cache beside an attention layer's own, for its page summaries.

vLLM plans, allocates, pages and copies it as any layer's cache: block b of the one belongs to block b of the
other, so a prefix hit, a preempted or a reused block needs no bookkeeping here.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from locks.vllm import refusals
from locks.vllm.config import PluginConfig

SUFFIX = ".locks_summary"


class SummaryBuilder(AttentionMetadataBuilder[Any]):
    """Needs no metadata and restricts no CUDA graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> None:
        """None: the layer that owns the summaries has all that is needed."""
        return


class SummaryBackend(AttentionBackend):
    """The layout of a summary cache, [num_blocks, Hkv, block * head_size], and nothing that computes."""

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's messages."""
        return "LOCKS_SUMMARY"

    @staticmethod
    def get_impl_cls() -> Any:
        """None exists."""
        raise NotImplementedError("a summary cache computes nothing")

    @staticmethod
    def get_builder_cls() -> type[SummaryBuilder]:
        """The builder of no metadata."""
        return SummaryBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Any block that the attention layer may have."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """One run of bytes a (block, KV head)."""
        return num_blocks, num_kv_heads, block_size * head_size


class SummaryLayer(AttentionLayerBase):
    """The cache for the summaries of one attention layer."""

    supports_dcp = False

    def __init__(self, owner: Any, config: PluginConfig) -> None:
        self.owner, self.config = owner, config
        # vLLM replaces it, more than once: always read it here.
        self.kv_cache: Tensor = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that knows the layout."""
        return SummaryBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        """As much room a token as a record needs, in elements of the owner's dtype.

        Raises:
            ValueError: the engine's blocks do not hold whole pages.
        """
        block = vllm_config.cache_config.block_size
        refusals.check_block(block, self.config)
        return summary_spec(
            self.config, block, self.owner.num_kv_heads, self.owner.head_size, self.owner.kv_cache_torch_dtype
        )


def summary_spec(
    config: PluginConfig, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> FullAttentionSpec:
    """What vLLM plans for the summaries of one layer that has such a cache."""
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=elements_per_token(config, head_size, dtype),
        head_size_v=0,
        dtype=dtype,
    )


def elements_per_token(config: PluginConfig, head_size: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` for each token and KV head that hold a page's record."""
    each = config.page * dtype.itemsize
    width = -(-config.fmt.layout(head_size).nbytes // each)
    # Where both caches had the same width, vLLM would take them for one kind and merge their plans.
    return width + (width == head_size)


def as_records(cache: Tensor, block_size: int, config: PluginConfig, head_size: int) -> Tensor:
    """A summary cache [num_blocks, Hkv, n] as records [num_blocks, Hkv, block / P, record bytes] uint8, no copy."""
    pages = cache.view(torch.uint8).unflatten(2, (block_size // config.page, -1))
    return pages[..., : config.fmt.layout(head_size).nbytes]


def attach(vllm_config: Any, impl: Any, config: PluginConfig) -> SummaryLayer:
    """Adds a summary layer beside the attention layer that `impl` serves, or finds the one that is there.

    Args:
        vllm_config: the engine's.
        impl: of the attention layer.
        config: the plugin's; the summary layer's is that of its layer.
    """
    context = vllm_config.compilation_config.static_forward_context
    name, owner = next((n, layer) for n, layer in context.items() if getattr(layer, "impl", None) is impl)
    side = context.get(name + SUFFIX)
    if side is None or side.owner is not owner:
        side = context[name + SUFFIX] = SummaryLayer(owner, of_layer(config, name))
    return side


def of_layer(config: PluginConfig, name: str) -> PluginConfig:
    """The configuration of the attention layer of that name."""
    # All of vLLM's models come with it, too much for a start-up that may need none.
    from vllm.model_executor.models.utils import extract_layer_index

    return config.of_layer(extract_layer_index(name))
