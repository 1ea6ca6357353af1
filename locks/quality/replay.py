"""Decode steps of a prefilled batch as one CUDA graph: a token costs the host one launch in place of thousands.

A small model's step takes the device a fraction of the time that the host needs to launch it, and processes that
share a device take turns at it. So the first token of an answer is decoded as ever, the second is captured, and the
others are replays: inputs, lengths, keys and summaries stay at their addresses, and the table is as wide as the last
token will need. An evictor has two kinds of steps, those that evict and those that do not; where rows differ in that a
step is run as ever. Where nothing can be captured (on a CPU) so are all, and with LOCKS_REPLAY=0 in the environment.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor

from locks import hf
from locks.quality.held import HeldLayer

_log = logging.getLogger(__name__)


class Replay:
    """Steps of a batch whose layers are all paged, each row with blocks of its own.

    Args:
        model: that `engine.enabled` prepared.
        cache: the batch's, which nothing else may grow meanwhile; rows may be of different lengths, without a mask.
        lengths: [B] tokens of a row.
        most: steps to come, at most.
    """

    def __init__(self, model: Any, cache: hf.PagedCache, lengths: Tensor, most: int) -> None:
        self.model, self.cache = model, cache
        self.layers = [layer for layer in cache.layers if isinstance(layer, hf.PagedLayer)]
        self.columns = cache.get_seq_length() + most
        for layer in self.layers:
            layer.mask = None
            if not isinstance(layer, HeldLayer):
                layer.reserve(self.columns)
        self.token = lengths.new_zeros((len(lengths), 1))
        self.position = lengths[:, None].clone()
        self._seen: set[bool] = set()
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._captures = lengths.device.type == "cuda" and os.environ.get("LOCKS_REPLAY") != "0"

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token [B] of every row; the next step overwrites them."""
        self.token.copy_(tokens[:, None])
        held = [layer for layer in self.layers if isinstance(layer, HeldLayer)]
        kind = held[0].kind if held else False
        if kind is None or not self._captures:
            return self._advance()
        if kind not in self._seen:
            # What a first step finds out about shapes and kernels is known when the second is captured.
            self._seen.add(kind)
            return self._advance()
        if kind in self._graphs:
            for layer in held:
                layer.follow()
        elif not self._capture(kind, held):
            return self._advance()
        graph, logits = self._graphs[kind]
        graph.replay()
        return logits

    def _advance(self) -> Tensor:
        for layer in self.layers:
            # As wide as it will get, so that no shape depends on the step; how long rows are their lengths say.
            layer.columns = self.columns - 1
        out = self.model(self.token, position_ids=self.position, **hf.cache_argument(self.model, self.cache))
        self.position += 1
        return out.logits[:, -1]

    def _capture(self, kind: bool, held: list[HeldLayer]) -> bool:
        """Captures a step, which the host counts as done and the device has yet to do; whether that succeeds."""
        counts = [layer.held for layer in held]
        # The allocator gives back nothing that it has cached while a graph is captured, and a graph's memory is new.
        torch.cuda.empty_cache()
        captured = self._captured()
        if isinstance(captured, str):
            # Nothing of it ran, so the step is done as ever. What it had allocated is free only now.
            torch.cuda.empty_cache()
            _tell(captured)
            self._captures = False
            for layer, before in zip(held, counts, strict=True):
                layer.held = before
            return False
        self._graphs[kind] = captured
        return True

    def _captured(self) -> tuple[torch.cuda.CUDAGraph, Tensor] | str:
        """A step's graph and its logits, or why there is none."""
        device = self.token.device
        try:
            graph, stream = torch.cuda.CUDAGraph(), _stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                # Other threads of the process may use the device meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    logits = self._advance()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            return _reason(error)
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph, logits


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _reason(error: RuntimeError) -> str:
    """An error's first sentence; what follows is of the moment: bytes, addresses."""
    return str(error).partition("\n")[0].partition(". ")[0]


@functools.cache
def _tell(reason: str) -> None:
    """Warns, once a process and reason: every batch of a full device would say the same."""
    _log.warning("a decode step cannot be captured: %s", reason)
