"""vLLM's DecodeBenchConnector, whose pages no forward pass wrote: they are summarised as they arrive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

from locks.vllm.metadata import Sealing
from locks.vllm.summary_layer import SUFFIX


class LocksDecodeBenchConnector(DecodeBenchConnector):
    """Fills keys and values as vLLM's does, leaves summaries alone, and makes those of the filled pages."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._context = vllm_config.compilation_config.static_forward_context

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Takes the attention layers' caches; random numbers are no summaries."""
        super().register_kv_caches({n: cache for n, cache in kv_caches.items() if not n.endswith(SUFFIX)})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fills, then seals, before the first step of these requests: also where that step is a CUDA graph."""
        super().start_load_kv(forward_context, **kwargs)
        metadata: Any = self._get_connector_metadata()
        assert self.connector_worker is not None
        caches: dict[str, Tensor] = self.connector_worker.kv_caches or {}
        stages = {name: self._context[name].impl.stages for name in caches}
        for (blocks,), tokens in metadata.reqs_to_fill.values():
            some = next(iter(caches))
            sealing = _all_pages(blocks, tokens, stages[some].config.page, caches[some].device)
            for name, cache in caches.items():
                stages[name].seal_prefill(cache, sealing)


def _all_pages(blocks: list[int], tokens: int, page: int, device: torch.device) -> Sealing:
    table = torch.tensor([blocks], dtype=torch.int32, device=device)
    lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    return Sealing(table, lens, torch.zeros_like(lens), max(1, tokens // page))
