"""What a step's attention needs to know of its batch: which tokens decode, which pages they complete, what is prefill.

vLLM sorts a batch so that decoding requests come first. Each of their query tokens becomes a row of its own with its
own length: one a request, or 1 + k with k drafted tokens. All lengths are taken from the device, whose view is the
true one; the host's numbers only bound loops. Tensors that a CUDA graph reads keep their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from locks.vllm.config import PluginConfig

P = TypeVar("P")


@dataclass(frozen=True)
class Sealing:
    """Pages to summarise: those whose last slot lies in [start, seq_lens) of a request.

    block_table [B, max_blocks], seq_lens [B], start [B] int32; max_new_pages bounds the pages of one request.
    """

    block_table: Tensor
    seq_lens: Tensor
    start: Tensor
    max_new_pages: int


@dataclass(frozen=True)
class DecodeRows:
    """Query tokens that decode: block_table [B, max_blocks], seq_lens and scanned [B] int32, and what to seal before.

    A row's length counts its own token and what came before it. A row that pads a CUDA graph has length 0. `scanned` is
    the length where summaries are read, and 0 for a row below the plugin's `dense_below`.
    """

    block_table: Tensor
    seq_lens: Tensor
    scanned: Tensor
    sealing: Sealing


@dataclass(frozen=True)
class StepMetadata(Generic[P]):
    """One step: the first `num_decode_tokens` tokens are `rows`, the rest is `prefill` with `prefill_sealing`."""

    num_decode_tokens: int
    rows: DecodeRows | None
    prefill: P | None
    prefill_sealing: Sealing | None


class BatchSplitter:
    """Makes the rows of a step out of vLLM's common metadata.

    Args:
        config: the plugin's.
        max_requests: the most requests of a batch.
        query_len: the most query tokens of a decoding request, 1 + k with k drafted tokens.
        device: where the batch lies.
        short_prompts_decode: whether the last few tokens of a prompt (the rest of a chunk or of a prefix hit), at
            most `query_len`, count as decoding. In a CUDA graph they cannot be told apart.
    """

    def __init__(
        self,
        config: PluginConfig,
        max_requests: int,
        query_len: int,
        device: torch.device,
        *,
        short_prompts_decode: bool,
    ) -> None:
        self.config, self.query_len, self.short_prompts_decode = config, query_len, short_prompts_decode
        self.max_rows = max_requests * query_len
        self.start = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.row_lens = torch.zeros(self.max_rows, dtype=torch.int32, device=device)
        self.scanned = torch.zeros_like(self.row_lens)
        self.token = torch.arange(self.max_rows, dtype=torch.int32, device=device)
        self.row_table = torch.zeros((0, 0), dtype=torch.int32, device=device)

    def split(self, common: Any) -> tuple[int, int]:
        """How many requests decode, and how many tokens they have."""
        requests, _, tokens, _ = split_decodes_and_prefills(
            common,
            decode_threshold=self.query_len,
            treat_short_extends_as_decodes=self.short_prompts_decode or common.is_prefilling is None,
        )
        return requests, tokens

    def decode_rows(self, common: Any, requests: int, tokens: int) -> DecodeRows:
        """The rows of the first `requests` requests."""
        ends, lens = common.query_start_loc[1 : requests + 1], common.seq_lens[:requests]
        table = common.block_table_tensor[:requests]
        start = self.start[:requests]
        torch.sub(common.query_start_loc[:requests], ends, out=start)
        start += lens
        sealing = Sealing(table, lens, start, max(1, -(-self.query_len // self.config.page)))
        if self.query_len == 1:
            return DecodeRows(table, lens, self._scanned(lens), sealing)
        if self.row_table.shape[1] != table.shape[1]:
            self.row_table = table.new_zeros((self.max_rows, table.shape[1]))
        token = self.token[:tokens]
        # [tokens]: the request of a token; behind the last request's end, padding.
        request = torch.searchsorted(ends, token, right=True)
        padding = request >= requests
        request.clamp_(max=requests - 1)
        row_lens, row_table = self.row_lens[:tokens], self.row_table[:tokens]
        torch.sub(lens[request], ends[request] - 1 - token, out=row_lens)
        row_lens.masked_fill_(padding, 0)
        torch.index_select(table, 0, request, out=row_table)
        return DecodeRows(row_table, row_lens, self._scanned(row_lens), sealing)

    def _scanned(self, lens: Tensor) -> Tensor:
        """The rows' lengths, 0 where they are dense: an empty row to the scan."""
        below = self.config.dense_below
        return torch.mul(lens, lens >= below, out=self.scanned[: len(lens)]) if below else lens

    def prefill_sealing(self, common: Any) -> Sealing:
        """The pages that a batch of prefills (see `prefill_part`) completes."""
        start = common.seq_lens + common.query_start_loc[:-1] - common.query_start_loc[1:]
        pages = max(1, -(-common.max_query_len // self.config.page))
        return Sealing(common.block_table_tensor, common.seq_lens, start, pages)


def prefill_part(common: Any, requests: int, tokens: int) -> Any:
    """Common metadata of what is left behind the first `requests` requests with `tokens` tokens."""

    def rest(x: Tensor | None, first: int) -> Tensor | None:
        return None if x is None else x[first:]

    return common.replace(
        query_start_loc=common.query_start_loc[requests:] - tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[requests:] - tokens,
        seq_lens=common.seq_lens[requests:],
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - tokens,
        block_table_tensor=common.block_table_tensor[requests:],
        slot_mapping=common.slot_mapping[tokens:],
        positions=rest(common.positions, tokens),
        is_prefilling=rest(common.is_prefilling, requests),
        seq_lens_cpu_upper_bound=rest(common.seq_lens_cpu_upper_bound, requests),
        _seq_lens_cpu=rest(common._seq_lens_cpu, requests),
        _num_computed_tokens_cpu=rest(common._num_computed_tokens_cpu, requests),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def query_len(vllm_config: Any) -> int:
    """The most query tokens of a decoding request."""
    speculative = vllm_config.speculative_config
    return 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
