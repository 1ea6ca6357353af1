"""The fast path of scoring: twice the error of PyTorch on the same operands at most; rows, marks, large logits."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locks import SummaryFormat, page_mass, reference
from locks.format import rotate, unpack
from locks.kernels import quantise, score, score_hopper
from locks.pages import gather_pages
from tests.helpers import DEVICE, Cache, examples, generator, ids, normal, paged_cache, records_of

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FORMATS = [SummaryFormat(16, rank, coef_bits=bits) for rank in (4, 8) for bits in (4, 8)]
LN2 = math.log(2)


def quantised_mass(q: Tensor, records: Tensor, cache: Cache, fmt: SummaryFormat, scale: float) -> Tensor:
    """log_mass [B, Hq, N] of the table's pages, by PyTorch in float32 on operands rounded as the kernel rounds them."""
    heads, D = records.shape[1], q.shape[-1]
    pages = torch.arange(cache.block_table.shape[1] * records.shape[2], device=q.device)
    rows = gather_pages(records, cache.block_table.clamp(min=0), pages.expand(len(q), -1))
    page, at = unpack(rows, fmt, D), fmt.layout(D).vector_scales
    # [B, Hkv, 1, N, R]
    vector_scale = rows[..., at : at + 2 * fmt.rank].contiguous().view(torch.bfloat16).float()[:, :, None]
    query = q.float() * (scale / LN2)
    norm = query.square().sum(-1).unflatten(1, (heads, -1))
    turned = rotate(query)
    unit = turned.abs().amax(-1, keepdim=True) / 16256
    query = rotate(torch.floor(turned / unit + 0.5) * unit).unflatten(1, (heads, -1))
    along = torch.einsum("bhgd,bhnrd->bhgnr", query, page.basis) * vector_scale
    along = (along / 256).half().float() * 256 / vector_scale.clamp(min=1e-38)
    center = torch.einsum("bhgd,bhnd->bhgn", query, page.mean)
    logits = center[..., None] + torch.einsum("bhgnr,bhntr->bhgnt", along, page.coef)
    top = logits.amax(-1, keepdim=True)
    mass = top[..., 0] + torch.exp2(logits - top).half().float().sum(-1).log2()
    return ((mass + 0.5 * LN2 * norm[..., None] * page.variance[:, :, None]) * LN2).flatten(1, 2)


def fast_mass(q: Tensor, records: Tensor, cache: Cache, fmt: SummaryFormat, **options):
    assert score_hopper.fits(q, records, fmt)
    return page_mass(
        q, records, cache.block_table, cache.seq_lens, fmt, impl="triton", exact=False, **options
    )


def assert_mass_is_within_its_operands_rounding(
    q, cache, fmt, *, scale: float, window_pages: int = 1
) -> None:
    records = records_of(cache, fmt)
    got = fast_mass(q, records, cache, fmt, scale=scale, window_pages=window_pages)
    want = reference.page_mass(
        q, records, cache.block_table, cache.seq_lens, fmt, scale=scale, window_pages=window_pages
    )
    known = want.log_mass.isfinite()
    torch.testing.assert_close(got.log_mass[~known].double(), want.log_mass[~known], rtol=0, atol=0)
    plain = quantised_mass(q, records, cache, fmt, scale).double()
    error = (got.log_mass.double() - want.log_mass)[known].abs()
    allowed = (plain - want.log_mass)[known].abs()
    if known.any():
        largest = float(want.log_mass[known].abs().amax())
        assert error.amax() <= 2 * allowed.amax() + 8 * 2.0**-24 * max(1.0, largest)
        # On average too: a lost digit or term would hide below the largest error.
        assert error.mean() <= 2 * allowed.mean() + 8 * 2.0**-24 * max(1.0, largest)
    some = want.total.isfinite()
    torch.testing.assert_close(got.total[~some].double(), want.total[~some], rtol=0, atol=0)
    assert (
        (got.total.double() - want.total)[some].abs() <= (float(allowed.amax()) if known.any() else 0) + 1e-4
    ).all()


@triton.jit
def query_kernel(q_ptr, words_ptr, numbers_ptr, scale, D: tl.constexpr, ASM: tl.constexpr):
    """What the lanes hold of 8 queries [8, D]."""
    lane = tl.arange(0, 32)
    at = q_ptr + lane // 4 * D + lane % 4 * (D // 8)
    # pyright takes a kernel's functions for calls that never return.
    first = quantise.load_elements(at, D // 8)  # pyright: ignore[reportGeneralTypeIssues]
    second = quantise.load_elements(at + D // 2, D // 8)  # pyright: ignore[reportGeneralTypeIssues]
    query, unit, norm = quantise.quantise(first, second, scale, lane, ASM)  # pyright: ignore[reportGeneralTypeIssues]
    for part in tl.static_range(4):
        for w in tl.static_range(D // 32):
            tl.store(words_ptr + (part * (D // 32) + w) * 32 + lane, query[part][w])
    tl.store(numbers_ptr + lane, unit)
    tl.store(numbers_ptr + 32 + lane, norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 128])
def test_lanes_hold_the_rotated_query_to_half_a_unit(dtype, D):
    q = normal(8, D, seed=D, dtype=torch.float32) * 4.0 ** torch.arange(-3, 5, device=DEVICE)[:, None]
    q[1], q[2, D - 1] = 0.0, 300.0
    q = q.to(dtype)
    words, numbers = q.new_empty(4 * D, dtype=torch.int32), q.new_empty(64, dtype=torch.float32)
    query_kernel[(1,)](q, words, numbers, 0.3, D=D, ASM=DEVICE == "cuda", num_warps=1)  # pyright: ignore[reportCallIssue]
    # [2, 8 queries, 4 lanes]
    numbers = numbers.view(2, 8, 4).double()
    assert (numbers == numbers[:, :, :1]).all()
    unit, norm = numbers[:, :, 0]
    # Words of four bytes, lanes 4 g + j: first and second half, high digit and low one, query, element.
    digits = words.view(torch.int8).view(2, 2, D // 32, 8, 4, 4).permute(0, 1, 3, 4, 2, 5).flatten(3).int()
    whole = torch.cat([*(128 * digits[:, 0] + digits[:, 1])], -1)
    want = rotate(0.3 * q.double())
    torch.testing.assert_close(norm, want.square().sum(-1), rtol=1e-6, atol=0)
    some = want.abs().amax(-1) > 0
    assert some.tolist() == [True, False, *[True] * 6]
    torch.testing.assert_close(unit[some], want[some].abs().amax(-1) / 16256, rtol=1e-6, atol=0)
    # float32's rounding beside the half.
    assert (whole - want / unit[:, None]).abs().amax() <= 0.5 + 16256 * 2.0**-21
    assert (whole.abs().amax(-1) == 16256 * some).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("D", "group", "heads", "block", "window_pages"),
    [(64, 3, 2, 16, 1), (128, 8, 1, 64, 2), (128, 12, 1, 32, 1), (64, 16, 1, 48, 3)],
)
def test_mass_is_within_its_operands_rounding(dtype, fmt, D, group, heads, block, window_pages):
    cache = paged_cache([16 * 37 + 3, 77, 0, 16], heads=heads, D=D, block=block, dtype=dtype)
    q = normal(4, heads * group, D, seed=group, dtype=dtype)
    assert_mass_is_within_its_operands_rounding(q, cache, fmt, scale=D**-0.5, window_pages=window_pages)


@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    fmt=st.sampled_from(FORMATS),
    group=st.integers(1, 16),
    power=st.integers(-3, 2),
    pattern=st.sampled_from(("normal", "constant", "zeros", "low_rank", "huge")),
    seed=st.integers(0, 2**16),
)
@examples(6)
def test_drawn_masses_are_within_their_operands_rounding(lengths, fmt, group, power, pattern, seed):
    cache = paged_cache(lengths, heads=2, dtype=torch.float16, pattern=pattern, seed=seed)
    q = normal(len(lengths), 2 * group, 64, seed=seed, dtype=torch.float32)
    assert_mass_is_within_its_operands_rounding((q * 2.0**power).half(), cache, fmt, scale=0.125)


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[3]], ids=str)
def test_a_row_of_a_batch_is_its_solo_run_bit_by_bit(fmt):
    cache = paged_cache([700, 33, 0, 16 * 20, 1], heads=2, dtype=torch.float16)
    q = normal(5, 6, 64, seed=1, dtype=torch.float16)
    records = records_of(cache, fmt)
    together = fast_mass(q, records, cache, fmt)
    for b in range(5):
        alone = fast_mass(q[b : b + 1], records, cache.row(b), fmt)
        assert torch.equal(alone.log_mass[0], together.log_mass[b])
        assert torch.equal(alone.total[0], together.total[b])


@pytest.mark.parametrize("block", [48, 64])
def test_records_may_stand_apart(block):
    cache, fmt = paged_cache([16 * 20 + 3, 100], heads=2, block=block, dtype=torch.float16), SummaryFormat()
    q, records = normal(2, 6, 64, seed=1, dtype=torch.float16), records_of(cache, fmt)
    apart = records.new_full((*records.shape[:3], records.shape[3] + 32), 0xFF)[..., : records.shape[3]]
    apart.copy_(records)
    got, want = fast_mass(q, apart, cache, fmt), fast_mass(q, records, cache, fmt)
    assert all(map(torch.equal, got, want))


def test_behind_the_scored_pages_nothing_is_written_unless_asked_for():
    cache, fmt = paged_cache([200, 16 * 5, 0], heads=2, dtype=torch.float16), SummaryFormat()
    q, records = normal(3, 6, 64, seed=1, dtype=torch.float16), records_of(cache, fmt)
    whole = fast_mass(q, records, cache, fmt)
    out = whole.log_mass.new_full(whole.log_mass.shape, 7.0), whole.total.new_full(whole.total.shape, 7.0)
    log_mass, total = score.score(
        q,
        records,
        cache.block_table,
        cache.seq_lens,
        fmt,
        scale=0.125,
        window_pages=1,
        exact=False,
        whole=False,
        out=out,
    )
    assert torch.equal(total, whole.total)
    for row, (scored, untouched) in enumerate([(12, 16), (4, 8), (0, 0)]):
        assert torch.equal(log_mass[row, :, :scored], whole.log_mass[row, :, :scored])
        assert (log_mass[row, :, untouched:] == 7.0).all()


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[2]], ids=str)
def test_a_marked_page_is_infinite_and_leaves_the_others_and_the_total_alone(fmt):
    cache = paged_cache([16 * 9 + 1], heads=2, dtype=torch.float16)
    q = normal(1, 4, 64, seed=1, dtype=torch.float16)
    clean = fast_mass(q, records_of(cache, fmt), cache, fmt)
    cache.k[cache.block_table[0, 3], 1, 5, 7] = math.nan
    got = fast_mass(q, records_of(cache, fmt), cache, fmt)
    marked = got.log_mass == math.inf
    assert marked.nonzero().tolist() == [[0, 2, 3], [0, 3, 3]]
    assert torch.equal(got.log_mass[~marked], clean.log_mass[~marked])
    assert (got.total[:, 2:] < clean.total[:, 2:]).all()
    assert torch.equal(got.total[:, :2], clean.total[:, :2])


def test_logits_of_hundreds_of_thousands_keep_their_order():
    cache = paged_cache([10 * 16 + 2], D=128, dtype=torch.float16)
    q = torch.full((1, 2, 128), 300.0, dtype=torch.float16, device=cache.k.device)
    for n in range(10):
        cache.k[cache.block_table[0, n]] = 100 + 3 * ((5 * n) % 9)
    records = records_of(cache, SummaryFormat())
    got = fast_mass(q, records, cache, SummaryFormat()).log_mass
    want = reference.page_mass(
        q, records, cache.block_table, cache.seq_lens, SummaryFormat(), scale=128**-0.5
    )
    assert got[..., :10].min() > 3e5
    torch.testing.assert_close(got.double(), want.log_mass, rtol=2e-3, atol=0)
    assert got[0, 0, :9].argsort().tolist() == [(2 * m) % 9 for m in range(9)]


def test_the_shape_alone_decides_which_path_is_taken():
    cache = paged_cache([40], dtype=torch.float16)
    q, records = normal(1, 2, 64, seed=1, dtype=torch.float16), records_of(cache, SummaryFormat())
    assert score_hopper.fits(q, records, SummaryFormat())
    assert not score_hopper.fits(q.float(), records, SummaryFormat())
    # A copy starts at a multiple of 16 bytes.
    odd = records.new_zeros((*records.shape[:3], records.shape[3] + 8))[..., : records.shape[3]]
    assert not score_hopper.fits(q, odd, SummaryFormat())
    assert not score_hopper.fits(normal(1, 17, 64, seed=1, dtype=torch.float16), records, SummaryFormat())
    for other in (
        SummaryFormat(16, 2),
        SummaryFormat(32, 4),
        SummaryFormat(16, 4, 16),
        SummaryFormat(16, 4, 8, 8),
        SummaryFormat(16, 4, 8, 4, 16),
    ):
        assert not score_hopper.fits(q, records, other)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_the_total_of_one_candidate_is_its_mass(group):
    cache, fmt = paged_cache([35], dtype=torch.float16), SummaryFormat()
    q, records = normal(1, group, 64, seed=1, dtype=torch.float16), records_of(cache, fmt)
    log_mass, total = fast_mass(q, records, cache, fmt)
    torch.testing.assert_close(total, log_mass[..., 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [16 * 11 + 3, 16 * 9, 16])
def test_the_table_may_hold_anything_behind_the_scored_pages(length):
    """Blocks that are nowhere: what is read there ends the program."""
    cache, fmt = paged_cache([length], dtype=torch.float16, extra_columns=20), SummaryFormat()
    q, records = normal(1, 2, 64, seed=1, dtype=torch.float16), records_of(cache, fmt)
    want = fast_mass(q, records, cache, fmt)
    cache.block_table[0, -(-length // 16) - 1 :] = 2**30
    got = fast_mass(q, records, cache, fmt)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("per_block", [3, 8, 16])
def test_masses_do_not_depend_on_how_pages_lie_in_blocks(per_block):
    cache, fmt = paged_cache([16 * 37 + 3], dtype=torch.float16), SummaryFormat()
    q, records = normal(1, 2, 64, seed=1, dtype=torch.float16), records_of(cache, fmt)
    want = fast_mass(q, records, cache, fmt)
    blocks = -(-38 // per_block)
    order = torch.randperm(blocks, generator=generator(per_block)).to(DEVICE)
    # [blocks, per_block, Hkv, bytes]; behind the row's end nan.
    pages = records.new_full((blocks * per_block, 1, records.shape[3]), 0xFF)
    pages[:38] = records[cache.block_table[0, :38].long(), :, 0]
    apart = records.new_empty((blocks, 1, per_block, records.shape[3]))
    apart[order] = pages.unflatten(0, (blocks, per_block)).transpose(1, 2)
    got = fast_mass(q, apart, Cache(cache.k, cache.v, order.int()[None], cache.seq_lens), fmt)
    assert torch.equal(got.log_mass[..., :37], want.log_mass[..., :37])
    assert (got.log_mass[..., 37:] == -math.inf).all()
    assert torch.equal(got.total, want.total)


@triton.jit
def chunks_kernel(lengths_ptr, out_ptr, max_pages, BLOCK: tl.constexpr):
    off = tl.arange(0, BLOCK)
    # pyright takes a kernel's arithmetic for calls that never return.
    newest, log_steps, chunks = score_hopper.scored_chunks(  # pyright: ignore[reportGeneralTypeIssues]
        tl.load(lengths_ptr + off), max_pages
    )
    tl.store(out_ptr + off * 3, newest)
    tl.store(out_ptr + off * 3 + 1, log_steps)
    tl.store(out_ptr + off * 3 + 2, chunks)


def test_a_row_has_1024_chunks_at_most_a_shorter_one_512_and_they_are_full_but_the_last():
    room = 2**24
    # The newest page is not scored.
    edges = [
        16 * pages + more for pages in (0, 1, 8, 9, *(2**n for n in range(12, 24))) for more in (0, 16, 17)
    ]
    lengths = [*edges, 16 * room, 16 * room + 1]
    given = ids(*lengths, *[0] * (64 - len(lengths)))
    out = given.new_full((64, 3), -7)
    chunks_kernel[(1,)](given, out, room, BLOCK=triton.next_power_of_2(len(given)))
    for length, (newest, log_steps, chunks) in zip(lengths, out.tolist(), strict=False):
        assert newest == -(-min(length, 16 * room) // 16) - 1
        steps = 2**log_steps
        most = 1024 if newest > 8192 else 512
        assert chunks == -(-max(newest, 0) // (8 * steps)) <= most
        assert steps == 1 or newest > 8 * steps // 2 * most
        # A table of no more pages has room for them.
        assert chunks <= score_hopper.num_chunks(newest + 1)


@triton.jit
def short_chunks(length, max_pages):
    """As of rows that are 256 times longer."""
    newest = (tl.minimum(length, max_pages * 16) + 15) // 16 - 1
    log_steps = newest * 0
    for bound in tl.static_range(4, 16):  # pyright: ignore[reportGeneralTypeIssues]
        log_steps += (newest > (1 << bound)).to(tl.int32)
    return newest, log_steps, (newest + (8 << log_steps) - 1) >> (3 + log_steps)


@pytest.mark.skipif(DEVICE == "cuda", reason="there rows are as long as that")
@pytest.mark.parametrize("group", [3, 8])
def test_a_chunk_of_several_steps_is_summed_whole(group, monkeypatch):
    cache, fmt = paged_cache([16 * 61 + 3, 16 * 23], dtype=torch.float16), SummaryFormat()
    q, records = normal(2, group, 64, seed=1, dtype=torch.float16), records_of(cache, fmt)
    want = fast_mass(q, records, cache, fmt, window_pages=2)
    monkeypatch.setattr(score_hopper, "scored_chunks", short_chunks)
    got = fast_mass(q, records, cache, fmt, window_pages=2)
    assert torch.equal(got.log_mass, want.log_mass)
    for row, pages in enumerate((60, 21)):
        total = want.log_mass[row, :, 1:pages].double().logsumexp(-1)
        torch.testing.assert_close(got.total[row].double(), total, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16 * 16384 + 5, 2**20, 2**21 + 17])
def test_long_rows_have_chunks_of_their_own_length(length):
    """A table that repeats a few blocks: the same page has the same mass wherever it stands."""
    cache = paged_cache([64 * 20], heads=2, D=128, block=64, dtype=torch.bfloat16)
    table = cache.block_table[:, :20].repeat(1, -(-length // (64 * 20)))
    q = normal(1, 8, 128, seed=1, dtype=torch.bfloat16)
    records = records_of(cache, SummaryFormat())
    long = Cache(cache.k, cache.v, table, ids(length))
    short = fast_mass(
        q, records, Cache(cache.k, cache.v, table[:, :21], ids(64 * 20 + 16)), SummaryFormat()
    ).log_mass[0, :, :80]
    got = fast_mass(q, records, long, SummaryFormat())
    pages = -(-length // 16) - 1
    repeated = short.repeat(1, -(-pages // 80))[:, :pages]
    assert torch.equal(got.log_mass[0, :, :pages], repeated)
    assert (got.log_mass[0, :, pages:] == -math.inf).all()
    total = repeated[:, 1:].double().logsumexp(-1)
    torch.testing.assert_close(got.total[0].double(), total, rtol=0, atol=1e-4)
