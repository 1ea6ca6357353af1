"""What the metadata builders of both devices share: the split, the graphs they support, the counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from locks.vllm import config as settings
from locks.vllm import stats
from locks.vllm.config import PluginConfig
from locks.vllm.metadata import BatchSplitter, StepMetadata, prefill_part, query_len
from locks.vllm.summary_layer import of_layer, summary_spec


class StepBuilder:
    """Makes the metadata of a step; a device's builder adds what its dense prefill needs.

    Args:
        kv_cache_spec: of the layers.
        layer_names: the layers.
        vllm_config: the engine's.
        device: where the batch lies.
        short_prompts_decode: see `BatchSplitter`.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *,
        short_prompts_decode: bool,
    ) -> None:
        self.config = settings.from_engine(vllm_config) or PluginConfig()
        # A graph pads a batch up to its own size.
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        requests = max(vllm_config.scheduler_config.max_num_seqs, graphs)
        self.splitter = BatchSplitter(
            self.config,
            requests,
            query_len(vllm_config),
            device,
            short_prompts_decode=short_prompts_decode,
        )
        layers = [of_layer(self.config, name) for name in layer_names]
        self.shape = stats.Shape(
            layers=len(layer_names),
            kv_heads=kv_cache_spec.num_kv_heads,
            token_bytes=2 * kv_cache_spec.head_size * kv_cache_spec.dtype.itemsize,
            record_bytes=sum(own.fmt.layout(kv_cache_spec.head_size).nbytes for own in layers) / len(layers),
        )
        blocks = vllm_config.cache_config.num_gpu_blocks
        # None while vLLM tries CUDA graphs on a cache of a few blocks.
        if blocks is not None:
            own = kv_cache_spec
            sides = [
                summary_spec(each, own.block_size, own.num_kv_heads, own.head_size, own.dtype)
                for each in layers
            ]
            stats.report_plan(
                self.shape,
                vllm_config.parallel_config,
                cache_bytes=blocks * len(layer_names) * own.page_size_bytes,
                summary_bytes=blocks * sum(side.page_size_bytes for side in sides),
            )

    def build(self, common: Any, dense: Any, *, counted: bool) -> StepMetadata[Any]:
        """The step's metadata; `dense` makes vLLM's own for the prefill part of the batch."""
        requests, tokens = self.splitter.split(common)
        rows = self.splitter.decode_rows(common, requests, tokens) if tokens else None
        prefill = sealing = None
        if requests < common.num_reqs:
            part = prefill_part(common, requests, tokens)
            prefill, sealing = dense(part), self.splitter.prefill_sealing(part)
        if counted:
            self._count(common, requests)
        return StepMetadata(tokens, rows, prefill, sealing)

    def _count(self, common: Any, requests: int) -> None:
        known = common.seq_lens_cpu_upper_bound
        if known is None:
            return
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int64)
        new, lens = np.diff(starts), known[: common.num_reqs].numpy().astype(np.int64)
        decoding = new[:requests]
        # [rows]: the last token of a request sees all of it, the one before it one less.
        behind = np.repeat(starts[1 : requests + 1], decoding) - 1 - np.arange(decoding.sum())
        rows = np.maximum(np.repeat(lens[:requests], decoding) - behind, 0)
        page = self.config.page
        sealed = lens // page - np.maximum(lens - new, 0) // page
        stats.count(self.config, self.shape, rows, int(new[requests:].sum()), int(sealed.sum()))
