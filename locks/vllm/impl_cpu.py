"""The implementation on a CPU, in PyTorch: what an engine test runs, and a plain reading of the GPU's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder

from locks import torch_impl
from locks.vllm import compat
from locks.vllm.builder import StepBuilder
from locks.vllm.metadata import DecodeRows, Sealing, StepMetadata
from locks.vllm.stages import open_layer


@dataclass(frozen=True)
class DensePart:
    """The prefill rows of a batch: block_table [B, max_blocks]; first token, tokens and length of each, on the host."""

    block_table: Tensor
    first: list[int]
    new: list[int]
    lens: list[int]


class CpuBuilder(AttentionMetadataBuilder[Any]):
    """Splits a batch into decode rows and prefill."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.steps = StepBuilder(kv_cache_spec, layer_names, vllm_config, device, short_prompts_decode=False)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata[DensePart]:
        """The step's metadata."""
        # A table as wide as the longest row, not as the longest that could be.
        block = self.kv_cache_spec.block_size
        width = max(1, -(-int(common_attn_metadata.seq_lens.max()) // block))
        narrow = common_attn_metadata.replace(
            block_table_tensor=common_attn_metadata.block_table_tensor[:, :width].contiguous()
        )
        return self.steps.build(narrow, _dense_part, counted=True)


def _dense_part(common: Any) -> DensePart:
    starts = common.query_start_loc_cpu.tolist()
    new = [end - start for start, end in itertools.pairwise(starts)]
    return DensePart(common.block_table_tensor, starts[:-1], new, common.seq_lens.tolist())


class CpuImpl(AttentionImpl[Any]):
    """Dense prefill over the paged cache, sparse decoding."""

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
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        compat.require(vllm.__version__, "cpu")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.stages = open_layer(
            torch_impl,
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
        self.stages.attach(self)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes keys and values [T, Hkv, D] to their slots; a slot below 0 is padding."""
        slots = slot_mapping[: key.shape[0]]
        real = slots >= 0
        slots, block = slots[real], kv_cache.shape[2]
        new = torch.cat([key[: len(real)][real], value[: len(real)][real]], dim=-1)
        kv_cache[slots // block, :, slots % block] = new

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepMetadata[DensePart] | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention output [T, Hq, D] of the whole batch."""
        if attn_metadata is None:
            return output.fill_(0)
        step, n = attn_metadata, attn_metadata.num_decode_tokens
        if step.rows is not None:
            self._decode(query[:n], kv_cache, step.rows, output[:n])
        if step.prefill is not None and step.prefill_sealing is not None:
            self._prefill(query[n:], kv_cache, step.prefill, output[n:])
            self.stages.seal_prefill(kv_cache, step.prefill_sealing)
        return output

    def _decode(self, query: Tensor, kv_cache: Tensor, rows: DecodeRows, output: Tensor) -> None:
        sealing, page = rows.sealing, self.stages.config.page
        # Asking a CPU costs nothing: most steps complete no page.
        full = sealing.start // page != sealing.seq_lens // page
        if bool(full.any()):
            table, lens, start = sealing.block_table[full], sealing.seq_lens[full], sealing.start[full]
            self.stages.seal(kv_cache, Sealing(table, lens, start, sealing.max_new_pages))
        self.stages.decode(query, kv_cache, rows, output)

    def _prefill(self, query: Tensor, kv_cache: Tensor, part: DensePart, output: Tensor) -> None:
        keys, values, _ = self.stages.views(kv_cache)
        block, group = kv_cache.shape[2], self.num_heads // self.num_kv_heads
        for row, (first, new, length) in enumerate(zip(part.first, part.new, part.lens, strict=True)):
            blocks = part.block_table[row, : -(-length // block)].long()
            # [Hkv, length, D]
            k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (keys, values))
            position = torch.arange(length - new, length)[:, None]
            mask = torch.arange(length) <= position
            q = query[first : first + new].transpose(0, 1)
            out = scaled_dot_product_attention(
                q[None],
                k.repeat_interleave(group, 0)[None],
                v.repeat_interleave(group, 0)[None],
                attn_mask=mask,
                scale=self.scale,
            )
            output[first : first + new] = out[0].transpose(0, 1)
