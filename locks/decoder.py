"""The decode step of a whole model as one object: summaries, the batch's rows, and every buffer at a fixed address.

    decoder = Decoder(k_caches, v_caches, num_q_heads=32, budget=2048, max_rows=8, max_blocks=2048)
    decoder.block_table[0] = blocks         # the prompt's keys and values are in the caches
    decoder.seq_lens[0] = tokens
    decoder.summarize()
    with torch.cuda.graph(graph):
        decoder.advance()                   # one more token in every row
        for layer in range(layers):
            out = decoder.attend(layer, q, k, v)
        decoder.seal()

With the Triton implementation a step allocates nothing and waits for nothing, so that a CUDA graph of it can be
replayed with other lengths and tables: rows come and go by what is written into `seq_lens` and `block_table`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locks import api, checks
from locks.format import SummaryFormat
from locks.pages import budget_pages
from locks.types import Decoded


class Decoder:
    """Decode steps of all layers over a paged cache.

    Attributes:
        block_table: [max_rows, max_blocks] int32, to be written into; one table for all layers.
        seq_lens: [max_rows] int32, tokens of each row, to be written into; a row of 0 tokens is idle.
        row_lens: [max_rows * q_len] int32, tokens that each query sees; made by `advance`.
        records: a layer's records each, [num_blocks, Hkv, block / P, record bytes] uint8.

    Args:
        k_caches: a layer's keys each, [num_blocks, Hkv, block, D], alike in shape, strides and dtype.
        v_caches: a layer's values each, [num_blocks, Hkv, block, Dv].
        num_q_heads: Hq, a multiple of Hkv.
        fmt: the records' format.
        budget: tokens a KV head attends to, a multiple of P, first and newest page included.
        max_rows: rows of the batch.
        max_blocks: blocks of a row at most.
        q_len: tokens that a row gains in a step, 1 to P: more than one where drafted tokens are verified.
        window_pages: how many of the newest pages are always kept.
        scale: of the logits; None for D ** -0.5.
        impl: "triton", "torch" or None (Triton on a GPU).

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.
    """

    def __init__(
        self,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        *,
        num_q_heads: int,
        budget: int,
        max_rows: int,
        max_blocks: int,
        fmt: SummaryFormat | None = None,
        q_len: int = 1,
        window_pages: int = 1,
        scale: float | None = None,
        impl: str | None = None,
    ) -> None:
        fmt = SummaryFormat() if fmt is None else fmt
        checks.summary_format(fmt)
        checks.window(window_pages)
        checks.scale(scale)
        budget_pages(budget, fmt.page, window_pages)
        for name, value, most in (
            ("num_q_heads", num_q_heads, None),
            ("max_rows", max_rows, None),
            ("max_blocks", max_blocks, None),
            ("q_len", q_len, fmt.page),
        ):
            checks.count(name, value, most)
        dims = _layers(k_caches, v_caches)
        checks.block(dims, fmt.page)
        checks.groups({**dims, "Hq": num_q_heads})
        self.k_caches, self.v_caches = list(k_caches), list(v_caches)
        self.fmt, self.budget, self.q_len, self.window_pages = fmt, budget, q_len, window_pages
        self.scale = dims["D"] ** -0.5 if scale is None else scale
        first = self.k_caches[0]
        device = first.device
        self.impl = api.resolve_impl(impl, device, first.dtype)
        self._work = api.load_impl(self.impl)
        self.records = [api.allocate_records(k, fmt) for k in self.k_caches]
        self.block_table = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.row_lens = torch.zeros(max_rows * q_len, dtype=torch.int32, device=device)
        self._active = torch.zeros_like(self.seq_lens)
        # Of a row's queries, how many tokens of the step each does not see.
        self._later = torch.arange(q_len - 1, -1, -1, dtype=torch.int32, device=device)
        self._dims = {
            "rows": max_rows * q_len,
            "Hq": num_q_heads,
            "Hkv": dims["Hkv"],
            "D": dims["D"],
            "Dv": dims["Dv"],
        }
        self._buffers = self._pointers = None
        if self.impl == "triton":
            q = first.new_empty((max_rows * q_len, num_q_heads, dims["D"]))
            self._pointers = self._work.layer_pointers(self.k_caches, self.records)
            self._buffers = self._work.step_buffers(
                q,
                self.v_caches[0],
                self.records[0],
                max_blocks,
                fmt,
                budget=budget,
                window_pages=window_pages,
            )

    def summarize(self, start: Tensor | None = None) -> None:
        """Makes the summaries of the pages that prompts filled, in all layers.

        Args:
            start: [max_rows] int32, tokens that were summarised before (of a prompt in chunks); None for 0.
        """
        for k_cache, records in zip(self.k_caches, self.records, strict=True):
            api.summarize(
                k_cache,
                self.block_table,
                self.seq_lens,
                self.fmt,
                start=start,
                out=records,
                impl=self.impl,
            )

    def advance(self) -> None:
        """Adds the step's tokens to every row that is not idle."""
        torch.sign(self.seq_lens, out=self._active)
        self.seq_lens.add_(self._active, alpha=self.q_len)
        torch.sub(self.seq_lens[:, None], self._later, out=self.row_lens.view(-1, self.q_len))
        self.row_lens.clamp_(min=0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Decoded:
        """Writes the step's keys and values into the layer's cache and attends to the pages that it selects.

        Args:
            layer: its number.
            q: [max_rows * q_len, Hq, D], a row's tokens one behind the other, after their position encoding.
            k: [max_rows * q_len, Hkv, D], likewise.
            v: [max_rows * q_len, Hkv, Dv].

        Returns:
            Decoded: out [max_rows * q_len, Hq, Dv], lse and pages. With Triton the next layer overwrites them.

        Raises:
            TypeError, ValueError: an argument of another type, dtype, shape, device or layout, by name.
        """
        k_cache, v_cache, records = self.k_caches[layer], self.v_caches[layer], self.records[layer]
        for name, value, heads, width in (("q", q, "Hq", "D"), ("k", k, "Hkv", "D"), ("v", v, "Hkv", "Dv")):
            axes = ("rows", heads, width)
            checks.tensor(name, value, axes, self._dims, dtypes=[k_cache.dtype], device=k_cache.device)
        table, more = self.block_table, {"buffers": self._buffers}
        if self.impl == "torch":
            table, more = api.row_table(table, len(self.row_lens)), {}
        with api.on_device(k_cache.device):
            self._work.append(k, v, k_cache, v_cache, table, self.row_lens)
            if self.q_len > 1:
                # A later token of the step may score a page that an earlier one filled.
                self._seal(slice(layer, layer + 1))
            return self._work.decode_step(
                q,
                k_cache,
                v_cache,
                records,
                table,
                self.row_lens,
                self.fmt,
                budget=self.budget,
                window_pages=self.window_pages,
                scale=self.scale,
                **more,
            )

    def seal(self) -> None:
        """Makes the summaries of the pages that the step filled, of all layers, in one launch.

        Steps of several tokens have made theirs in `attend`.
        """
        if self.q_len == 1:
            with api.on_device(self.seq_lens.device):
                self._seal(slice(None))

    def _seal(self, layers: slice) -> None:
        if self._pointers is not None:
            self._work.seal(
                self._pointers[layers],
                self.k_caches[0],
                self.records[0],
                self.block_table,
                self.seq_lens,
                self.fmt,
                new_tokens=self.q_len,
            )
            return
        start = (self.seq_lens - self.q_len).clamp(min=0)
        for k_cache, records in zip(self.k_caches[layers], self.records[layers], strict=True):
            self._work.summarize(
                k_cache,
                self.block_table,
                self.seq_lens,
                self.fmt,
                start=start,
                max_new_pages=1,
                out=records,
            )


def _layers(k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> dict[str, int]:
    """Checks the caches of all layers and returns their axes."""
    if len(k_caches) == 0 or len(k_caches) != len(v_caches):
        raise ValueError(
            f"v_caches: expected one tensor a layer, at least one, got {len(v_caches)} for {len(k_caches)} "
            f"layers' keys"
        )
    dims: dict[str, int] = {}
    first = k_caches[0]
    for i, (k, v) in enumerate(zip(k_caches, v_caches, strict=True)):
        for name, cache, width, alike in (
            ("k_caches", k, "D", k_caches[0]),
            ("v_caches", v, "Dv", v_caches[0]),
        ):
            axes = ("num_blocks", "Hkv", "block", width)
            dtypes = checks.FLOATS if cache is first else [first.dtype]
            device = getattr(first, "device", None)
            checks.tensor(f"{name}[{i}]", cache, axes, dims, dtypes=dtypes, device=device)
            checks.head_dim(f"{name}[{i}]", dims[width])
            if cache.stride() != alike.stride():
                raise ValueError(f"{name}[{i}]: expected strides {alike.stride()}, got {cache.stride()}")
    return dims
