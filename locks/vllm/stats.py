"""What the sparse steps did: counts of rows, pages and bytes, in vLLM's log and as Prometheus counters.

Counted on the host from the lengths that the scheduler knows, so no step waits for the device. With asynchronous
speculation these are upper bounds. Every process counts its own share of the model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from locks.vllm import plugin
from locks.vllm.config import PluginConfig

LOG_SECONDS = 10.0


@dataclass
class Totals:
    """Counts since the process started. A row is one query token at one decode step, in all layers.

    decode_rows: all of them; sparse_rows: those that attended to fewer pages than they had; covered_rows: the others,
    whose context the budget (or `dense_below`) covers;
    prefill_tokens: attended to densely;
    pages_read, page_bytes: attended to by decode rows, over layers and KV heads;
    summary_bytes: read to rank pages; dense_bytes: what dense attention would have read for the same rows;
    sealed_pages: summaries made, over layers and KV heads; seal_seconds: of prefill, outside CUDA graphs.
    """

    decode_rows: int = 0
    sparse_rows: int = 0
    covered_rows: int = 0
    prefill_tokens: int = 0
    pages_read: int = 0
    page_bytes: int = 0
    summary_bytes: int = 0
    dense_bytes: int = 0
    sealed_pages: int = 0
    seal_seconds: float = 0.0


_TOTALS = Totals()
_LOGGED = Totals()
_WAITING: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
_COUNTERS: dict[str, Any] = {}
_last = time.monotonic()


def totals() -> Totals:
    """A copy of this process's counts."""
    _collect()
    return Totals(**asdict(_TOTALS))


@dataclass(frozen=True)
class Shape:
    """A builder's layers: how many, KV heads, bytes of a token's key and value, of a record on average."""

    layers: int
    kv_heads: int
    token_bytes: int
    record_bytes: float


def report_plan(shape: Shape, parallel: Any, *, cache_bytes: int, summary_bytes: int) -> None:
    """Writes to vLLM's log what the caches of this rank take; vLLM's plan counts both."""
    from vllm.logger import init_logger

    init_logger(plugin.LOGGER).info(
        "LOCKS: rank %d of %d holds %.1f MiB of summaries beside %.1f MiB of keys and values (%.1f %%), "
        "%d KV heads in %d layers",
        parallel.rank,
        parallel.world_size,
        summary_bytes / 2**20,
        cache_bytes / 2**20,
        100 * summary_bytes / cache_bytes,
        shape.kv_heads,
        shape.layers,
    )


def count(config: PluginConfig, shape: Shape, lens: np.ndarray, prefill_tokens: int, sealed: int) -> None:
    """Adds a step: lens [rows] int64, 0 for padding; tokens attended to densely; pages completed a layer and head."""
    pages = (lens + (config.page - 1)) // config.page
    sparse = (pages > config.kept_pages) & (lens >= config.covered_below)
    kept = np.where(sparse, config.kept_pages, pages)
    # The newest page is read as far as it goes.
    tokens = kept * config.page - (pages * config.page - lens)
    scanned = np.where(lens >= config.dense_below, np.maximum(pages - 1, 0), 0)
    each = shape.layers * shape.kv_heads
    _TOTALS.decode_rows += int((lens > 0).sum())
    _TOTALS.sparse_rows += int(sparse.sum())
    _TOTALS.covered_rows += int(((lens > 0) & ~sparse).sum())
    _TOTALS.prefill_tokens += prefill_tokens
    _TOTALS.pages_read += each * int(kept.sum())
    _TOTALS.page_bytes += each * shape.token_bytes * int(tokens.sum())
    _TOTALS.summary_bytes += round(each * shape.record_bytes) * int(scanned.sum())
    _TOTALS.dense_bytes += each * shape.token_bytes * int(lens.sum())
    _TOTALS.sealed_pages += each * sealed
    if time.monotonic() - _last >= LOG_SECONDS:
        report()


@contextmanager
def _on_host() -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        _TOTALS.seal_seconds += time.perf_counter() - begin


@contextmanager
def _on_device() -> Iterator[None]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    try:
        yield
    finally:
        end.record()
        _WAITING.append((begin, end))


def sealing(device: torch.device) -> AbstractContextManager[None]:
    """Times what runs inside, without waiting for a GPU."""
    return _on_device() if device.type == "cuda" else _on_host()


def _collect() -> None:
    while _WAITING and _WAITING[0][1].query():
        begin, end = _WAITING.popleft()
        _TOTALS.seal_seconds += begin.elapsed_time(end) / 1000


def report() -> None:
    """Writes what happened since the last report to vLLM's log and to Prometheus."""
    global _last
    from vllm.logger import init_logger

    _last = time.monotonic()
    _collect()
    new = {f.name: getattr(_TOTALS, f.name) - getattr(_LOGGED, f.name) for f in fields(Totals)}
    for name, value in new.items():
        setattr(_LOGGED, name, getattr(_TOTALS, name))
        if value:
            _counter(name).inc(value)
    read = new["page_bytes"] + new["summary_bytes"]
    init_logger(plugin.LOGGER).info(
        "LOCKS: decode rows %d, sparse %d, pages read %d, bytes read %.1f %% of dense (%.3g, summaries %.3g), "
        "pages summarised %d, sealing in prefill %.3f s",
        new["decode_rows"],
        new["sparse_rows"],
        new["pages_read"],
        100 * read / max(1, new["dense_bytes"]),
        read,
        new["summary_bytes"],
        new["sealed_pages"],
        new["seal_seconds"],
    )


def _counter(name: str) -> Any:
    """The Prometheus counter of one count; other processes' counters need PROMETHEUS_MULTIPROC_DIR, as vLLM's do."""
    from prometheus_client import Counter

    if name not in _COUNTERS:
        _COUNTERS[name] = Counter(f"locks_{name}", f"LOCKS: {name.replace('_', ' ')} of decode steps")
    return _COUNTERS[name]
