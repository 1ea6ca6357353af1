"""The implementation on a GPU: FlashAttention for prefill, Triton kernels in the CUDA graph for decoding."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from locks import triton_impl
from locks.vllm.builder import StepBuilder
from locks.vllm.metadata import StepMetadata
from locks.vllm.stages import open_layer


class CudaBuilder(FlashAttentionMetadataBuilder):
    """Splits a batch; FlashAttention's own metadata is made for the prefill part alone."""

    # Batches of 1 or of 1 + k query tokens a request replay full graphs; mixed ones run piecewise.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.steps = StepBuilder(kv_cache_spec, layer_names, vllm_config, device, short_prompts_decode=True)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata[FlashAttentionMetadata]:
        """The step's metadata."""
        return self._build(common_attn_metadata, fast_build, counted=True)

    def build_for_cudagraph_capture(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, common_attn_metadata: Any
    ) -> StepMetadata[FlashAttentionMetadata]:
        """The metadata of a graph, whose rows are no requests."""
        return self._build(common_attn_metadata, False, counted=False)

    def _build(self, common: Any, fast_build: bool, *, counted: bool) -> StepMetadata[FlashAttentionMetadata]:
        def dense(part: Any) -> FlashAttentionMetadata:
            return FlashAttentionMetadataBuilder.build(self, 0, part, fast_build)

        return self.steps.build(common, dense, counted=counted)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """No: rows of one prefix still attend to pages of their own."""
        return False


class CudaImpl(FlashAttentionImpl):
    """FlashAttention for prefill, the sparse step for decoding."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: Any = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        self.stages = open_layer(
            triton_impl,
            head_size,
            self.scale,
            kv_cache_dtype=kv_cache_dtype,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Adds the summary cache; vLLM asks the layers for their caches next."""
        super().process_weights_after_loading(act_dtype)
        self.stages.attach(self)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepMetadata[FlashAttentionMetadata] | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention output [T, Hq, D] of the whole batch."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "locks: fused quantisation of the output; set -cc.pass_config.fuse_attn_quant=False"
            )
        if attn_metadata is None:
            self.stages.reserve(self.num_kv_heads, query)
            return output.fill_(0)
        step, n = attn_metadata, attn_metadata.num_decode_tokens
        # Before any row is decoded: a prompt's lone last token may find its prefix in blocks that this step fills.
        if step.prefill_sealing is not None:
            self.stages.seal_prefill(kv_cache, step.prefill_sealing)
        if step.rows is not None:
            self.stages.seal(kv_cache, step.rows.sealing)
            self.stages.decode(query[:n], kv_cache, step.rows, output[:n])
        if step.prefill is not None:
            super().forward(layer, query[n:], key[n:], value[n:], kv_cache, step.prefill, output[n:])
        return output
