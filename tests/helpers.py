"""What the stages' tests share: random paged caches, strategies that draw them, the rules of closeness."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from locks import PageList, SummaryFormat, api, reference

ROOT = Path(__file__).resolve().parents[1]

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
IMPLS = ("torch", "triton")
# The interpreter computes no bfloat16.
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_CUDA else (torch.float32, torch.float16)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
# Each group size with some width, each width with some group size.
PAIRS = tuple(zip(GROUPS, (*HEAD_DIMS, 64, 128), strict=True))
PATTERNS = ("normal", "constant", "zeros", "low_rank", "huge", "nan", "inf")
LAYOUTS = ("plain", "halves", "token_major")

# Keys of rank 2 are known almost exactly in this format, so that something is certain of them.
SHARP = SummaryFormat(16, 4, 16, 16, 16)


def examples(count: int) -> settings:
    """Few examples: a launch is slow in the interpreter, and on a GPU every new shape is compiled."""
    return settings(max_examples=max(count, 30) if HAS_CUDA else count)


@dataclass(frozen=True)
class Cache:
    """A paged cache: nan in every slot that no row owns, -1 in every unused entry of the table."""

    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor

    @property
    def keys_args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k, self.block_table, self.seq_lens

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.block_table, self.seq_lens

    def row(self, b: int) -> Cache:
        """Row b alone, over the same pool."""
        return replace(self, block_table=self.block_table[b : b + 1], seq_lens=self.seq_lens[b : b + 1])


def run_compiled(*arguments: str) -> str:
    """What a run of this Python prints, of the checkout's code and without Triton's interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    run = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype).to(DEVICE)


def ids(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _keys(pattern: str, heads: int, length: int, D: int, page: int, gen: torch.Generator) -> Tensor:
    """[heads, length, D]; pages differ in their mean."""
    n = -(-length // page)
    keys = torch.randn(heads, n, page, D, generator=gen) + torch.randn(heads, n, 1, D, generator=gen)
    if pattern == "constant":
        keys[:] = keys[:, :, :1].clone()
    elif pattern == "zeros":
        keys[:] = 0
    elif pattern == "low_rank":
        coef = torch.randn(heads, n, page, 2, generator=gen)
        keys = coef @ torch.randn(heads, n, 2, D, generator=gen)
    elif n > 2 and pattern != "normal":
        # One key of a candidate.
        at = int(torch.randint(1, n - 1, (), generator=gen))
        if pattern == "huge":
            keys[:, at, page // 3] *= 300
        else:
            keys[0, at, page // 3, D // 5] = math.nan if pattern == "nan" else math.inf
    return keys.flatten(1, 2)[:, :length]


def _pool(
    layout: str, blocks: int, heads: int, block: int, D: int, Dv: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V full of nan: two tensors, the halves of one, or with the heads behind the tokens."""

    def full(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)

    if layout == "halves":
        both = full(blocks, heads, block, D + Dv)
        return both[..., :D], both[..., D:]
    if layout == "token_major":
        return full(blocks, block, heads, D).transpose(1, 2), full(blocks, block, heads, Dv).transpose(1, 2)
    return full(blocks, heads, block, D), full(blocks, heads, block, Dv)


def paged_cache(
    lengths: list[int],
    *,
    page: int = 16,
    block: int | None = None,
    heads: int = 1,
    D: int = 64,
    Dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    pattern: str = "normal",
    layout: str = "plain",
    extra_columns: int = 1,
    seed: int = 0,
) -> Cache:
    """Rows of the given lengths in blocks of a shuffled pool."""
    block, gen = block or page, generator(seed)
    need = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(need) + 2, generator=gen).tolist()
    k, v = _pool(layout, len(order), heads, block, D, D if Dv is None else Dv, dtype)
    table = torch.full((len(lengths), max(need, default=0) + extra_columns), -1, dtype=torch.int32)
    for b, (length, count) in enumerate(zip(lengths, need, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(blocks, dtype=torch.int32)
        tokens = torch.arange(length)
        place = torch.tensor(blocks, dtype=torch.long)[tokens // block]
        keys = _keys(pattern, heads, length, D, page, gen).transpose(0, 1)
        k[place, :, tokens % block] = keys.to(dtype).to(DEVICE)
        values = torch.randn(length, heads, v.shape[-1], generator=gen)
        v[place, :, tokens % block] = values.to(dtype).to(DEVICE)
    return Cache(k, v, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))


def records_of(cache: Cache, fmt: SummaryFormat) -> Tensor:
    """The reference's records; those that no page owns are full of nan."""
    out = api.allocate_records(cache.k, fmt).fill_(0xFF)
    return reference.summarize(*cache.keys_args, fmt, out=out)


def decode_args(q: Tensor, cache: Cache, fmt: SummaryFormat) -> tuple[Any, ...]:
    """What `decode` takes, with the reference's records."""
    return q, cache.k, cache.v, records_of(cache, fmt), *cache.keys_args[1:], fmt


def true_share(q: Tensor, cache: Cache, pages: PageList, page: int, scale: float) -> Tensor:
    """Share of the mass that the pages hold, the least of each group's heads, [B, Hkv] float64."""
    dense = reference.dense_attention(q, *cache.args, scale=scale).lse
    kept = reference.sparse_attention(q, *cache.args, pages, page=page, scale=scale).lse
    return (kept - dense).exp().unflatten(1, (cache.k.shape[1], -1)).amin(2)


def edge_lengths(page: int) -> st.SearchStrategy[int]:
    edges = [0, 1, page - 1, page, page + 1, 2 * page, 2 * page + 1, 3 * page]
    return st.one_of(st.sampled_from(edges), st.integers(0, 9 * page))


@dataclass(frozen=True)
class Case:
    """One drawn input of a whole step."""

    fmt: SummaryFormat
    cache: Cache
    q: Tensor
    scale: float
    window_pages: int

    @property
    def query_args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, SummaryFormat]:
        """What page_logits and page_mass take."""
        return self.q, records_of(self.cache, self.fmt), self.cache.block_table, self.cache.seq_lens, self.fmt


@st.composite
def formats(draw: st.DrawFn) -> SummaryFormat:
    bits = st.sampled_from((4, 8, 16))
    page = draw(st.sampled_from((16, 32, 64)))
    rank = draw(st.sampled_from([r for r in (1, 2, 4, 8, 16) if r < page]))
    return SummaryFormat(page, rank, draw(bits), draw(bits), draw(bits))


@st.composite
def cases(draw: st.DrawFn, *, patterns: tuple[str, ...] = PATTERNS, finite_only: bool = False) -> Case:
    """Ragged batches of any supported shape, value pattern and storage."""
    fmt = draw(formats())
    heads = draw(st.sampled_from((1, 2, 3)))
    D = draw(st.sampled_from(range(64, 257, 16)))
    dtype = draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(edge_lengths(fmt.page), min_size=1, max_size=3))
    if finite_only:
        patterns = tuple(p for p in patterns if p not in ("nan", "inf"))
    cache = paged_cache(
        lengths,
        page=fmt.page,
        block=fmt.page * draw(st.sampled_from((1, 1, 2, 4))),
        heads=heads,
        D=D,
        Dv=draw(st.sampled_from((D, 64, 128))),
        dtype=dtype,
        pattern=draw(st.sampled_from(patterns)),
        layout=draw(st.sampled_from(LAYOUTS)),
        extra_columns=draw(st.sampled_from((1, 2))),
        seed=draw(st.integers(0, 2**16)),
    )
    q = normal(
        len(lengths), heads * draw(st.integers(1, 16)), D, seed=draw(st.integers(0, 2**16)), dtype=dtype
    )
    scale = draw(st.sampled_from((D**-0.5, 0.3)))
    return Case(fmt, cache, q, scale, draw(st.sampled_from((1, 1, 2, 3))))


def _split(x: Tensor, oracle: Tensor) -> Tensor:
    """x where the oracle is finite, as float64; elsewhere both must be the same infinity or nan."""
    x = x.double()
    finite = oracle.isfinite()
    torch.testing.assert_close(x[~finite], oracle[~finite], rtol=0, atol=0, equal_nan=True)
    return x[finite]


def assert_close_as_torch(actual: Tensor, plain: Tensor, oracle: Tensor, *, terms: float = 0.0) -> None:
    """The error is at most twice that of plain PyTorch in the same dtype on the same operands, plus rounding.

    Args:
        actual: what is tested.
        plain: the same by PyTorch in the operation's own dtype.
        oracle: the same in float64.
        terms: the largest number that is added on the way, where that is larger than the result.
    """
    assert actual.shape == oracle.shape
    assert oracle.dtype == torch.float64
    want = oracle[oracle.isfinite()]
    error = _largest(_split(actual, oracle) - want)
    allowed = _largest(_split(plain, oracle) - want)
    rounding = 4 * torch.finfo(actual.dtype).eps * max(terms, _largest(want))
    assert error <= 2 * allowed + rounding, (
        f"error {error:.3g}, plain PyTorch's {allowed:.3g}, rounding {rounding:.3g}"
    )


def output_terms(q: Tensor, cache: Cache, scale: float) -> float:
    """`terms` of an attention output: a weight errs by its logit's rounding, and that by the size of the logit."""
    largest = 4.0
    for b in range(len(cache.seq_lens)):
        keys = reference.row_tokens(cache.k, cache.block_table, cache.seq_lens, b).double()
        if keys.shape[1]:
            logits = scale * q[b].double().unflatten(0, (keys.shape[0], -1)) @ keys.mT
            largest = max(largest, _largest(logits.nan_to_num(0, 0, 0)))
    return _largest(cache.v[~cache.v.isnan()]) * largest / 4


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def assert_same_pages(actual: PageList, expected: PageList) -> None:
    assert actual.page_ids.dtype == actual.counts.dtype == torch.int32
    assert actual.page_ids.tolist() == expected.page_ids.tolist()
    assert actual.counts.tolist() == expected.counts.tolist()


def listed(pages: PageList, b: int = 0, h: int = 0) -> list[int]:
    """The ids of one row and head without the tail, which must be -1."""
    count = int(pages.counts[b, h])
    row = pages.page_ids[b, h].tolist()
    assert row[count:] == [-1] * (len(row) - count)
    return row[:count]


def assert_pages_within_error(
    actual: PageList,
    expected: PageList,
    share: Tensor,
    expected_share: Tensor,
    seq_lens: Tensor,
    *,
    page: int,
    window_pages: int = 1,
) -> None:
    """Pages differ only where reference shares lie within twice the measured score error of the M-th."""
    assert actual.counts.tolist() == expected.counts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        n = -(-length // page)
        for h in range(share.shape[1]):
            got, want = set(listed(actual, b, h)), set(listed(expected, b, h))
            if got == want:
                continue
            competing = range(1, n - window_pages)
            assert got ^ want <= set(competing)
            scores = expected_share[b, h].double()
            error = _largest(share[b, h, 1 : n - window_pages].double() - scores[1 : n - window_pages])
            last = min(float(scores[p]) for p in want & set(competing))
            for p in got ^ want:
                assert abs(float(scores[p]) - last) <= 2 * error
