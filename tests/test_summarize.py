"""The summarize kernel: factors against the Eckart-Young optimum, records against `locks.format.encode`."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from locks import torch_impl
from locks.format import SummaryFormat, encode, unpack
from locks.kernels.config import KernelConfig
from locks.kernels.summarize import factors, summarize
from locks.types import Factors, Record

EPS = torch.finfo(torch.float32).eps
POISON = 0xA5

# (P, R, D): every page, rank and width at least once.
SHAPES = [(16, 4, 128), (16, 1, 64), (16, 2, 80), (16, 8, 96), (32, 16, 112), (32, 4, 192), (64, 16, 256)]
# With the bits of mean, basis and coefficients.
ENCODED = [
    ((16, 4, 128), (8, 4, 4)),
    ((16, 1, 64), (4, 8, 16)),
    ((16, 2, 80), (16, 16, 8)),
    ((16, 8, 96), (8, 16, 4)),
    ((32, 16, 112), (8, 4, 8)),
    ((32, 4, 192), (4, 4, 16)),
    ((64, 8, 64), (8, 8, 4)),
]


def graded(page: int, head_dim: int, sigma: Tensor, generator: torch.Generator) -> Tensor:
    """A centred page with the singular values sigma."""
    k = len(sigma)
    ones = torch.ones(page, 1, dtype=torch.float64)
    left = torch.randn(page, page - 1, dtype=torch.float64, generator=generator)
    left = torch.linalg.qr(torch.cat([ones, left], 1))[0][:, 1 : k + 1]
    right = torch.linalg.qr(torch.randn(head_dim, k, dtype=torch.float64, generator=generator))[0]
    return (left * sigma) @ right.T


def hard_pages(page: int, head_dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Pages [P, D] float32 that break eigen-solvers, by name."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    i = torch.arange(min(page - 1, head_dim), dtype=torch.float64)
    pages = {
        "random": normal(page, head_dim),
        "far mean": normal(page, head_dim) + 30 * normal(1, head_dim),
        "close to the mean": 1e-6 * normal(page, head_dim) + normal(1, head_dim),
        "constant": normal(1, head_dim).expand(page, -1),
        "zeros": torch.zeros(page, head_dim),
        "rank 1": normal(page, 1) @ normal(1, head_dim),
        "rank 3": normal(page, 3) @ normal(3, head_dim),
        "small integers": torch.randint(-1, 2, (page, head_dim), generator=g),
        "flat spectrum": graded(page, head_dim, torch.ones_like(i), g),
        "three and dust": graded(page, head_dim, torch.where(i < 3, 1.0, 3e-5), g),
        "equal pairs": graded(page, head_dim, 10.0 ** -(i // 2), g),
        "one element": torch.zeros(page, head_dim).index_put(
            (torch.tensor(3), torch.tensor(7)), torch.tensor(1.0)
        ),
        "outlier channel": normal(page, head_dim) * torch.where(torch.arange(head_dim) == 3, 300, 1),
        "huge key": normal(page, head_dim) * torch.where(torch.arange(page) == 5, 1e4, 1)[:, None],
        "equal keys": normal(page, head_dim)[torch.arange(page) // 2],
        "large": 1e36 * normal(page, head_dim),
        "small": 1e-38 * normal(page, head_dim),
        "denormal": 1e-43 * normal(page, head_dim),
    }
    for base in (2, 3, 10, 100, 1e4):
        pages[f"spectrum {base:g}^-k"] = graded(page, head_dim, base**-i, g)
    return {name: keys.to(torch.float32) for name, keys in pages.items()}


class Paged(NamedTuple):
    """A cache whose unused slots are nan, and its table."""

    k_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor


def paged(keys: Tensor, block: int, lengths: list[int], device: str = "cpu", seed: int = 0) -> Paged:
    """A cache with shuffled blocks for keys [B, Hkv, T, D]; tokens from lengths[b] on are not written."""
    rows, heads, tokens, head_dim = keys.shape
    per_row = -(-tokens // block)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows * per_row + 2, generator=g)[: rows * per_row]
    table = order.reshape(rows, per_row).to(torch.int32)
    cache = torch.full((rows * per_row + 2, heads, block, head_dim), torch.nan, dtype=keys.dtype)
    for b, length in enumerate(lengths):
        for t in range(min(length, tokens)):
            cache[table[b, t // block], :, t % block] = keys[b, :, t]
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return Paged(cache.to(device), table.to(device), seq_lens.to(device))


def one_row(pages: Tensor, device: str) -> Paged:
    """Pages [N, P, D] as the one row of a cache with one KV head, one page a block."""
    keys = pages.flatten(0, 1)[None, None]
    return paged(keys, pages.shape[1], [keys.shape[2]], device)


def records_of(
    where: Paged,
    fmt: SummaryFormat,
    *,
    start: Tensor | None = None,
    max_new_pages: int | None = None,
    config: KernelConfig | None = None,
) -> Tensor:
    """Every record byte of a cache [num_blocks, Hkv, block / P, bytes], poisoned where none was written."""
    blocks, heads, block, head_dim = where.k_cache.shape
    shape = (blocks, heads, block // fmt.page, fmt.layout(head_dim).nbytes)
    out = torch.full(shape, POISON, dtype=torch.uint8, device=where.k_cache.device)
    got = summarize(*where, fmt, start=start, max_new_pages=max_new_pages, out=out, config=config)
    assert got is out
    return out.cpu()


def row_records(where: Paged, fmt: SummaryFormat, config: KernelConfig | None = None) -> Tensor:
    """The records of a `one_row` cache in page order, [N, bytes]."""
    return records_of(where, fmt, config=config)[where.block_table[0].cpu().long(), 0, 0]


def reconstruct(record: Record | Factors) -> Tensor:
    """Keys [..., P, D] float64."""
    mean, basis, coef = (part.double() for part in record[:3])
    return mean[..., None, :] + coef @ basis


def norms(x: Tensor) -> Tensor:
    """Frobenius norms of pages, safe for the smallest numbers."""
    unit = x.abs().amax((-1, -2), keepdim=True).clamp(min=1e-300)
    return (x / unit).norm(dim=(-1, -2)) * unit[..., 0, 0]


def check_factors(got: Factors, keys: Tensor) -> None:
    """Asserts the bar of Eckart and Young, and that the basis is orthonormal; keys [N, P, D] float32."""
    keys, rank = keys.double(), got.basis.shape[-2]
    centred = keys - keys.mean(-2, keepdim=True)
    unit = centred.abs().amax((-1, -2), keepdim=True).clamp(min=1e-300)
    best = (torch.linalg.svdvals(centred / unit)[:, rank:] * unit[:, 0]).norm(dim=-1)
    excess = norms(keys - reconstruct(got)) - 1.001 * best
    assert (excess <= 64 * EPS * norms(keys)).all(), (excess / norms(keys)).tolist()
    basis = got.basis.double()
    there = basis.norm(dim=-1) > 0.5
    assert (there | (basis == 0).all(-1)).all()
    gram = basis @ basis.mT
    torch.testing.assert_close(gram, torch.diag_embed(there.double()), atol=2e-4, rtol=0)
    assert (there.double().diff(dim=-1) <= 0).all()
    sizes = got.coef.double().norm(dim=-2)
    assert (sizes.diff(dim=-1) <= 1e-3 * sizes[:, :1]).all()


def named_pages(page: int, head_dim: int) -> Tensor:
    pages = hard_pages(page, head_dim)
    # Larger pages cost the interpreter four and sixteen times as much.
    some = (
        "random",
        "rank 3",
        "huge key",
        "spectrum 3^-k",
        "flat spectrum",
        "constant",
        "equal pairs",
        "outlier channel",
    )
    return torch.stack(list(pages.values()) if page == 16 else [pages[name] for name in some[: 256 // page]])


@pytest.mark.parametrize(("page", "rank", "head_dim"), SHAPES)
def test_factors_reach_the_eckart_young_optimum(page: int, rank: int, head_dim: int, device: str) -> None:
    keys = named_pages(page, head_dim)
    got = factors(*one_row(keys, device), rank, page)
    got = Factors(*(part[0, 0].cpu() for part in got))
    off = got.mean.double() - keys.double().mean(-2)
    assert (norms(off[:, None]) <= 2 * EPS * norms(keys.double()) + 1e-43).all()
    check_factors(got, keys)


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 2**31),
    rank=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 80, 128]),
    true_rank=st.integers(1, 15),
    base=st.floats(1, 1e5),
    mean=st.sampled_from([0.0, 1.0, 100.0]),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
@example(seed=0, rank=8, head_dim=64, true_rank=15, base=10.0, mean=1.0, scale=1.0)
def test_factors_of_drawn_spectra(
    device: str, seed: int, rank: int, head_dim: int, true_rank: int, base: float, mean: float, scale: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    sigma = base ** -torch.arange(true_rank, dtype=torch.float64)
    pages = [
        graded(16, head_dim, sigma, g) + mean * torch.randn(1, head_dim, dtype=torch.float64, generator=g)
        for _ in range(4)
    ]
    keys = (scale * torch.stack(pages)).to(torch.float32)
    got = factors(*one_row(keys, device), rank, 16)
    check_factors(Factors(*(part[0, 0].cpu() for part in got)), keys)


@pytest.mark.parametrize(
    ("sizes", "rank"), [([1.0] * 8, 8), ([1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6], 4)], ids=["all", "half"]
)
def test_equal_singular_values_are_a_direction_each(sizes: list[float], rank: int, device: str) -> None:
    """Opposite keys in pairs, each pair along an axis of its own: singular values with the same bits come first."""
    keys = torch.zeros(1, 16, 64)
    pair = torch.arange(8)
    keys[0, 2 * pair, pair], keys[0, 2 * pair + 1, pair] = torch.tensor(sizes), -torch.tensor(sizes)
    got = factors(*one_row(keys, device), rank, 16)
    check_factors(Factors(*(part[0, 0].cpu() for part in got)), keys)


def test_factors_are_zero_for_pages_that_are_not_full_or_not_finite(device: str) -> None:
    keys = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[0, 1, 20, 3] = torch.inf
    got = factors(*paged(keys, 32, [63, 16], device), 2, 16)
    for part in got:
        nonzero = part.flatten(3).cpu().abs().amax(-1) > 0
        assert nonzero.tolist() == [
            [[True, True, True, False], [True, False, True, False]],
            [[True, False, False, False]] * 2,
        ]


@pytest.mark.parametrize(("shape", "bits"), ENCODED)
def test_records_equal_the_encoding_of_the_same_factors(
    shape: tuple[int, int, int], bits: tuple[int, int, int], device: str
) -> None:
    page, rank, head_dim = shape
    fmt = SummaryFormat(page, rank, *bits)
    keys = torch.randn(256 // page, page, head_dim, generator=torch.Generator().manual_seed(1))
    where = one_row(keys, device)
    own = Factors(*(part[0, 0].cpu() for part in factors(*where, rank, page)))
    want, got = encode(keys, own, fmt), row_records(where, fmt)
    # What differs is codes at a tie and what follows from them, and the last bit of a number.
    assert (want != got).float().mean() <= 0.01
    for a, b in zip(unpack(want, fmt, head_dim), unpack(got, fmt, head_dim), strict=True):
        assert (a - b).norm() <= 0.01 * a.norm()
    theirs = unpack(encode(keys, torch_impl.page_factors(keys, rank), fmt), fmt, head_dim)
    ours = unpack(got, fmt, head_dim)
    assert (norms(keys - reconstruct(ours)) <= 1.01 * norms(keys - reconstruct(theirs))).all()


@pytest.mark.parametrize(("shape", "bits"), ENCODED[:5])
def test_records_of_hard_pages(shape: tuple[int, int, int], bits: tuple[int, int, int], device: str) -> None:
    page, rank, head_dim = shape
    fmt = SummaryFormat(page, rank, *bits)
    keys = named_pages(page, head_dim)
    where = one_row(keys, device)
    own = Factors(*(part[0, 0].cpu() for part in factors(*where, rank, page)))
    got = unpack(row_records(where, fmt), fmt, head_dim, torch.float64)
    want = unpack(encode(keys, own, fmt), fmt, head_dim, torch.float64)
    left, sizes = keys.double() - reconstruct(got), norms(keys.double())
    assert (norms(left) <= 1.01 * norms(keys.double() - reconstruct(want)) + EPS * sizes).all()
    # The certificate, and the variance to the rounding of its storage; both have bfloat16's range.
    assert (left.norm(dim=-1).amax(-1) <= got.residual_norm).all()
    variance = left.square().mean((-1, -2))
    inside = (variance > 1e-36) & (variance < 1e38)
    assert inside.sum() >= len(keys) / 2
    assert (got.variance >= 0.999 * variance)[inside].all()
    assert (got.variance <= (1.01 * variance + (8 * EPS * sizes) ** 2))[inside].all()


def test_keys_at_the_end_of_the_range_stay_finite(device: str) -> None:
    signs = torch.where(torch.arange(16) % 3 == 0, 1.0, -1.0)[:, None]
    keys = torch.stack(
        [3.4e38 * signs.expand(-1, 64), torch.full((16, 64), 3e38), torch.full((16, 64), 2.0**127)]
    )
    fmt = SummaryFormat(16, 2, 8, 4, 8)
    got = unpack(row_records(one_row(keys, device), fmt), fmt, 64, torch.float64)
    assert all(part.isfinite().all() for part in got)
    assert (keys.double() - reconstruct(got)).abs().max() <= 0.02 * 3.4e38


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_marked_pages_do_not_disturb_their_tile(bad: float, device: str) -> None:
    fmt = SummaryFormat()
    keys = torch.randn(5, 16, 64, generator=torch.Generator().manual_seed(2))
    clean = row_records(one_row(keys, device), fmt, config=KernelConfig(8, 1))
    keys[1, 3, 40] = bad
    keys[4, 15, 63] = bad
    got = row_records(one_row(keys, device), fmt, config=KernelConfig(8, 1))
    marked = torch.tensor([False, True, False, False, True])
    assert torch.equal(got[~marked], clean[~marked])
    at = fmt.layout(64)
    numbers = got[marked, at.scales : at.scales + 14].contiguous().view(torch.int16)
    assert numbers.tolist() == [[0, 0, 0, 0, 0, 0x7F80, 0x7F80]] * 2
    assert (got[marked, : at.scales] == 0).all()
    assert torch.equal(got[marked], encode(keys[marked], torch_impl.page_factors(keys[marked], 4), fmt))


@settings(max_examples=settings().max_examples // 2)
@given(
    seed=st.integers(0, 2**31),
    page=st.sampled_from([16, 32]),
    per_block=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=3),
    starts=st.lists(st.integers(0, 100), min_size=3, max_size=3),
    started=st.booleans(),
    max_new_pages=st.sampled_from([None, 1, 2, 100]),
    block_n=st.sampled_from([1, 4]),
)
@example(0, 16, 2, [0, 16, 15], [0, 0, 0], False, None, 1)
@example(0, 16, 1, [33, 32, 31], [32, 31, 17], True, 1, 1)
@example(0, 16, 1, [96, 500], [0, 0, 0], True, None, 4)
@example(0, 32, 2, [500, 0], [64, 0, 0], True, None, 1)
def test_only_pages_in_range_are_written(
    device: str,
    seed: int,
    page: int,
    per_block: int,
    lengths: list[int],
    starts: list[int],
    started: bool,
    max_new_pages: int | None,
    block_n: int,
) -> None:
    fmt = SummaryFormat(page, 1)
    # Constant pages of integers: every implementation writes the same bytes.
    g = torch.Generator().manual_seed(seed)
    keys = torch.randint(-99, 99, (len(lengths), 2, 4, 1, 64), generator=g).float().expand(-1, -1, -1, 32, -1)
    where = paged(keys.flatten(2, 3), per_block * page, lengths, device, seed)
    start = torch.tensor(starts[: len(lengths)], dtype=torch.int32)
    want = torch.full((*where.k_cache.shape[:2], per_block, fmt.layout(64).nbytes), POISON, dtype=torch.uint8)
    plain = Paged(*(part.cpu() for part in where))
    torch_impl.summarize(
        plain.k_cache,
        plain.block_table,
        plain.seq_lens,
        fmt,
        start=start if started else None,
        max_new_pages=max_new_pages,
        out=want,
    )
    got = records_of(
        where,
        fmt,
        start=start.to(device) if started else None,
        max_new_pages=max_new_pages,
        config=KernelConfig(block_n, 1),
    )
    assert torch.equal(got, want)


def test_start_below_a_page_boundary_redoes_that_page_alone(device: str) -> None:
    fmt = SummaryFormat()
    keys = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(3))
    where = paged(keys, 16, [48], device)
    got = records_of(where, fmt, start=torch.tensor([47], dtype=torch.int32, device=device), max_new_pages=1)
    assert (got != POISON).any(-1).nonzero()[:, 0].tolist() == [int(where.block_table[0, 2])]


def test_a_page_does_not_depend_on_its_tile_or_batch(device: str) -> None:
    fmt = SummaryFormat()
    keys = torch.randn(2, 1, 64, 80, generator=torch.Generator().manual_seed(4))
    # Pages that need few sweeps beside one that needs many.
    keys[0, 0, :16] = 1
    keys[0, 0, 32:48] = hard_pages(16, 80)["spectrum 3^-k"]
    where = paged(keys, 32, [48, 33], device)
    config = KernelConfig(2, 2)
    whole = records_of(where, fmt, config=config)
    for b in range(2):
        row = Paged(where.k_cache, where.block_table[b : b + 1], where.seq_lens[b : b + 1])
        solo = records_of(row, fmt, config=config)
        mine = (solo != POISON).any(-1)
        assert mine.sum() == [3, 2][b]
        assert torch.equal(solo[mine], whole[mine])
    # The same pages in other places of their tiles.
    start = torch.tensor([16, 16], dtype=torch.int32, device=device)
    shifted = records_of(where, fmt, start=start, config=config)
    mine = (shifted != POISON).any(-1)
    assert mine.sum() == 3
    assert torch.equal(shifted[mine], whole[mine])


def test_unquantised_a_page_does_not_depend_on_its_tile(device: str) -> None:
    """To the last bit: a page that is solved is left alone while its neighbour takes more sweeps."""
    pages = hard_pages(16, 64)
    # They take 4, 1, 5 and 4 sweeps, and directions of the last need their predecessors taken out twice.
    keys = torch.stack([pages[name] for name in ("random", "flat spectrum", "equal pairs", "three and dust")])
    config = KernelConfig(4, 1)
    whole = factors(*one_row(keys, device), 8, 16, config)
    for i in range(len(keys)):
        solo = factors(*one_row(keys[i : i + 1], device), 8, 16, config)
        for mine, others in zip(solo, whole, strict=True):
            assert torch.equal(mine[0, 0, 0], others[0, 0, i])


def test_a_page_does_not_depend_on_the_tile_width(device: str) -> None:
    keys = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(9))
    where, fmt = one_row(keys, device), SummaryFormat()
    narrow, wide = (row_records(where, fmt, KernelConfig(n, 4)) for n in (1, 4))
    # On a GPU the tile's layout decides in which order a sum is taken.
    assert (narrow != wide).float().mean() <= (0.0 if device == "cpu" else 0.01)


def test_strided_caches_and_records(device: str) -> None:
    fmt = SummaryFormat()
    keys = torch.randn(1, 2, 64, 80, generator=torch.Generator().manual_seed(5))
    where = paged(keys, 32, [64], device)
    plain = records_of(where, fmt)
    # Tokens before heads, as engines lay them out, and records inside a larger buffer.
    tokens_first = where.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    nbytes = plain.shape[-1]
    buffer = torch.full((*plain.shape[:3], 2 * nbytes), POISON, dtype=torch.uint8, device=device)
    summarize(
        tokens_first,
        where.block_table,
        where.seq_lens,
        fmt,
        start=None,
        max_new_pages=None,
        out=buffer[..., :nbytes],
    )
    assert torch.equal(buffer[..., :nbytes].cpu(), plain)
    assert (buffer[..., nbytes:] == POISON).all()


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_precision_keys_are_summarised_at_full_precision(dtype: torch.dtype, device: str) -> None:
    fmt = SummaryFormat(16, 8)
    keys = torch.randn(6, 16, 96, generator=torch.Generator().manual_seed(6)).to(dtype)
    got = row_records(one_row(keys, device), fmt)
    want = row_records(one_row(keys.to(torch.float32), device), fmt)
    # On a GPU the keys' layout decides in which order a sum is taken.
    assert (got != want).float().mean() <= (0.0 if device == "cpu" else 0.01)


@pytest.mark.gpu
def test_block_ids_beyond_two_gib_of_keys(device: str) -> None:
    fmt = SummaryFormat()
    blocks = 2**31 // (16 * 128) + 2
    cache = torch.zeros(blocks, 1, 16, 128, dtype=torch.bfloat16, device=device)
    keys = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(7)).to(cache)
    cache[-2:] = keys[:, None]
    out = torch.zeros(blocks, 1, 1, fmt.layout(128).nbytes, dtype=torch.uint8, device=device)
    table = torch.tensor([[blocks - 2, blocks - 1]], dtype=torch.int32, device=device)
    length = torch.tensor([32], dtype=torch.int32, device=device)
    summarize(cache, table, length, fmt, start=None, max_new_pages=None, out=out)
    assert torch.equal(out[-2:, 0, 0].cpu(), row_records(one_row(keys.cpu(), device), fmt))
    assert not out[:-2].any()


@pytest.mark.gpu
def test_a_graph_replays_with_new_lengths(device: str) -> None:
    fmt = SummaryFormat()
    keys = torch.randn(2, 2, 64, 128, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    where = paged(keys, 16, [64, 64], device)
    whole = records_of(where, fmt)
    out = torch.full_like(whole, POISON, device=device)
    lengths = torch.zeros_like(where.seq_lens)
    start = torch.zeros_like(lengths)

    def step() -> None:
        summarize(where.k_cache, where.block_table, lengths, fmt, start=start, max_new_pages=1, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for length in range(1, 65):
        lengths.fill_(length)
        start.fill_(length - 1)
        graph.replay()
    assert torch.equal(out.cpu(), whole)
