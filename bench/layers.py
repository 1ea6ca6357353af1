"""The shapes that are measured, and layers of them: paged caches with queries, more of them than the L2 cache holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from locks import SummaryFormat, api

PAGE = 16
BUDGET = 2048
# Layers of one shape that are kept at most, as many as the models have, and the bytes of all of them.
MAX_LAYERS = 40
MEMORY = 80e9
# Of an H200; other GPUs have less.
L2_BYTES = 60e6


@dataclass(frozen=True)
class Shape:
    """A model's attention at one context length and batch; with `rest`, every row but the first has that length."""

    model: str
    T: int
    B: int
    Hq: int
    Hkv: int
    D: int
    ranks: tuple[int, ...]
    blocks: tuple[int, ...] = (64,)
    budget: int = BUDGET
    rest: int | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, the longest first."""
        return [self.T, *[self.T if self.rest is None else self.rest] * (self.B - 1)]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(rows, tokens) of neighbouring rows of one length."""
        return [(len(list(rows)), tokens) for tokens, rows in itertools.groupby(self.lengths)]

    @property
    def described(self) -> str:
        """The rows' lengths in words."""
        return "equal" if self.rest is None else f"{self.T}, {self.B - 1} of {self.rest}"

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer, 16 bits each."""
        return 4 * self.Hkv * self.D

    @property
    def kv_bytes(self) -> int:
        """K and V of one layer."""
        return self.token_bytes * sum(self.lengths)

    @property
    def kept_bytes(self) -> int:
        """K and V of the tokens of one layer that a step attends to."""
        return self.token_bytes * sum(min(self.budget, tokens) for tokens in self.lengths)

    @property
    def scored_pages(self) -> int:
        """Pages of all rows, one KV head."""
        return sum(-(-tokens // PAGE) for tokens in self.lengths)

    def record_bytes(self, fmt: SummaryFormat) -> int:
        """Records of one layer."""
        return self.scored_pages * self.Hkv * fmt.layout(self.D).nbytes

    @property
    def mass_bytes(self) -> int:
        """Log-masses of one layer that are written and read again, float32."""
        return 4 * self.Hq * self.scored_pages

    @property
    def layer_bytes(self) -> int:
        """Memory of one layer of the benchmark: the cache, records of one rank, log-masses for the table's width."""
        largest = max(self.record_bytes(SummaryFormat(rank=rank)) for rank in self.ranks)
        return self.kv_bytes + largest + 4 * self.Hq * self.B * (self.T // PAGE)

    @property
    def least_bytes(self) -> int:
        """The least that a stage reads of one layer: records, or pages; no records where no row exceeds the budget."""
        records = [self.record_bytes(SummaryFormat(rank=rank)) for rank in self.ranks]
        return min([self.kept_bytes, *(records if self.budget < self.T else [])])

    @property
    def layers(self) -> int:
        """So many that the least that a stage reads of all is four times the L2 cache, or all that memory allows."""
        wanted = min(MAX_LAYERS, -(-int(4 * L2_BYTES) // self.least_bytes))
        return max(2, min(wanted, int(MEMORY // self.layer_bytes)))


# The most telling first: a run that is bounded in time may end before the last.
SHAPES = [
    Shape("glm-4-9b-1m", 2**17, 1, 32, 4, 128, (8, 4), (64, 16)),
    Shape("glm-4-9b-1m", 2**20, 1, 32, 4, 128, (8, 4), (64, 16)),
    # No longer than the budget.
    Shape("glm-4-9b-1m", 2**11, 1, 32, 4, 128, (4,)),
    Shape("llama-3.1-8b", 2**17, 1, 32, 8, 128, (8,)),
    Shape("llama-3.1-8b", 2**17, 16, 32, 8, 128, (8,)),
    Shape("qwen3-4b", 2**15, 32, 32, 8, 128, (4,)),
    Shape("smollm2-135m", 2**13, 64, 9, 3, 64, (4,)),
    # One long row beside short ones.
    Shape("glm-4-9b-1m", 2**20, 64, 32, 4, 128, (8, 4), rest=2**12),
    Shape("glm-4-9b-1m", 2**15, 1, 32, 4, 128, (8, 4)),
]


class Layer:
    """One layer's paged cache, shuffled over its blocks, with a query for each row."""

    def __init__(
        self,
        shape: Shape,
        block: int,
        seed: int,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        gen = torch.Generator(device).manual_seed(seed)
        of_row = [-(-tokens // block) for tokens in shape.lengths]
        size = (sum(of_row), shape.Hkv, block, shape.D)
        self.k, self.v = (torch.randn(size, device=device, dtype=dtype, generator=gen) for _ in range(2))
        self.table = torch.zeros((shape.B, max(of_row)), dtype=torch.int32, device=device)
        blocks = torch.randperm(size[0], device=device, generator=gen).int().split(of_row)
        for row, ids in zip(self.table, blocks, strict=True):
            row[: len(ids)] = ids
        self.lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        self.q = torch.randn(shape.B, shape.Hq, shape.D, device=device, dtype=dtype, generator=gen)

    def records(self, fmt: SummaryFormat, impl: str | None = None) -> Tensor:
        """Records of every full page."""
        out = api.allocate_records(self.k, fmt)
        return api.summarize(self.k, self.table, self.lens, fmt, out=out, impl=impl)

    def row(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, block table and length of one row, each still with a batch axis."""
        one = slice(index, index + 1)
        return self.q[one], self.table[one], self.lens[one]

    def contiguous(self, shape: Shape) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The same memory as q [rows, Hq, 1, D] and keys and values [rows, Hkv, tokens, D], for PyTorch's kernels.

        One triple for each of the shape's runs: rows of different lengths make no dense batch.
        """
        parts, row, at = [], 0, 0
        for rows, tokens in shape.runs:
            size = (rows, shape.Hkv, tokens, shape.D)
            count = rows * shape.Hkv * tokens * shape.D
            k, v = (x.flatten()[at : at + count].view(size) for x in (self.k, self.v))
            parts.append((self.q[row : row + rows, :, None], k, v))
            row, at = row + rows, at + count
        return parts
