"""The stages of one attention layer on vLLM's caches: seal pages, decode rows. The same on a CPU and on a GPU."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config

from locks.vllm import config as settings
from locks.vllm import plugin, refusals, stats
from locks.vllm.config import PluginConfig
from locks.vllm.metadata import DecodeRows, Sealing, query_len
from locks.vllm.summary_layer import SummaryLayer, as_records, attach

# Rows are decoded in so many passes that the masses of one pass's pages stay below this many bytes.
PASS_BYTES = 256 << 20


class LayerStages:
    """What an attention layer does beside writing its cache.

    Args:
        config: the plugin's.
        engine: vLLM's configuration.
        work: `locks.triton_impl` or `locks.torch_impl`.
        head_size: D.
        scale: of the logits.
    """

    def __init__(
        self, config: PluginConfig, engine: Any, work: ModuleType, head_size: int, scale: float
    ) -> None:
        self.config, self.engine, self.work = config, engine, work
        self.head_size, self.scale = head_size, scale
        self.side: SummaryLayer | None = None
        self._reserved = False
        self._seen: tuple[Tensor, Tensor] | None = None
        self._views: tuple[Tensor, Tensor, Tensor] | None = None

    def attach(self, impl: Any) -> None:
        """Makes room for summaries in the engine's memory plan; from here on the config is this layer's."""
        self.side = attach(self.engine, impl, self.config)
        self.config = self.side.config

    def views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k_cache, v_cache [num_blocks, Hkv, block, D] and records of a cache [num_blocks, Hkv, block, 2 D]."""
        if self.side is None:
            raise RuntimeError("locks: the layer has no summary cache; its weights were never processed")
        records = self.side.kv_cache
        if (
            self._views is None
            or self._seen is None
            or self._seen[0] is not kv_cache
            or self._seen[1] is not records
        ):
            self._seen = (kv_cache, records)
            keys, values = kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]
            self._views = keys, values, as_records(records, kv_cache.shape[2], self.config, self.head_size)
        return self._views

    def seal(self, kv_cache: Tensor, sealing: Sealing) -> None:
        """Makes the summaries of the pages that this step completed."""
        keys, _, records = self.views(kv_cache)
        self.work.summarize(
            keys,
            sealing.block_table,
            sealing.seq_lens,
            self.config.fmt,
            start=sealing.start,
            max_new_pages=sealing.max_new_pages,
            out=records,
        )

    def seal_prefill(self, kv_cache: Tensor, sealing: Sealing) -> None:
        """The same, outside CUDA graphs and timed."""
        with stats.sealing(kv_cache.device):
            self.seal(kv_cache, sealing)

    def decode(self, q: Tensor, kv_cache: Tensor, rows: DecodeRows, out: Tensor) -> None:
        """Writes the sparse step's output [B, Hq, D] of all rows; their pages are sealed already."""
        keys, values, records = self.views(kv_cache)
        step = _rows_a_pass(q.shape[1], rows.block_table.shape[1] * records.shape[2])
        for first in range(0, q.shape[0], step):
            part = slice(first, first + step)
            self._decode(
                q[part],
                keys,
                values,
                records,
                rows.block_table[part],
                rows.seq_lens[part],
                rows.scanned[part],
                out[part],
            )

    def _decode(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        records: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scanned: Tensor,
        out: Tensor,
    ) -> None:
        config, work = self.config, self.work
        pages = work.choose_pages(
            q,
            records,
            block_table,
            scanned,
            config.fmt,
            scale=self.scale,
            budget=config.budget,
            window_pages=config.window_pages,
        )
        work.sparse_attention(
            q,
            keys,
            values,
            block_table,
            seq_lens,
            pages,
            page=config.page,
            scale=self.scale,
            dense_below=config.dense_below,
            out=out,
        )

    def reserve(self, num_kv_heads: int, query: Tensor) -> None:
        """Runs a step of empty rows, so that vLLM's memory profile counts what the largest real one needs.

        Once: later runs without metadata only warm up what vLLM compiled.
        """
        if self._reserved:
            return
        self._reserved = True
        config, engine, device = self.config, self.engine, query.device
        block = engine.cache_config.block_size
        blocks = math.ceil(engine.model_config.max_model_len / block)
        rows = engine.scheduler_config.max_num_seqs * query_len(engine)
        rows = min(rows, _rows_a_pass(query.shape[1], blocks * (block // config.page)))
        cache = query.new_zeros((1, num_kv_heads, block, self.head_size))
        shape = (1, num_kv_heads, block // config.page, config.fmt.layout(self.head_size).nbytes)
        records = torch.zeros(shape, dtype=torch.uint8, device=device)
        q = query.new_zeros((rows, *query.shape[1:]))
        table = torch.zeros((rows, blocks), dtype=torch.int32, device=device)
        lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._decode(q, cache, cache, records, table, lens, lens, torch.empty_like(q))


def open_layer(work: ModuleType, head_size: int, scale: float, **facts: Any) -> LayerStages:
    """The stages of a layer of the engine that is being built.

    Args:
        work: `locks.triton_impl` or `locks.torch_impl`.
        head_size: D.
        scale: of the logits.
        facts: what else vLLM says of the layer, see `locks.vllm.refusals.check_layer`.

    Raises:
        ValueError: the layer or its engine cannot be served.
    """
    engine = get_current_vllm_config()
    config = settings.from_engine(engine) or PluginConfig()
    refusals.check_layer(head_size=head_size, **facts)
    refusals.check_engine(engine, config)
    plugin.use_connector(engine)
    return LayerStages(config, engine, work, head_size, scale)


def _rows_a_pass(num_heads: int, pages: int) -> int:
    return max(1, PASS_BYTES // (4 * num_heads * pages))
