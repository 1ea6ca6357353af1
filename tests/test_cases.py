"""Faults that users of such systems reported, as far as they concern the library; named by number."""

import itertools
import math
import mmap

import pytest
import torch
from torch import Tensor

from locks import (
    SummaryFormat,
    decode,
    page_logits,
    page_mass,
    page_share,
    reference,
    select_pages,
    summarize,
)
from locks.format import unpack
from locks.torch_impl import page_factors
from tests.helpers import (
    DEVICE,
    GROUPS,
    HEAD_DIMS,
    IMPLS,
    PAIRS,
    Cache,
    assert_close_as_torch,
    assert_pages_within_error,
    assert_same_pages,
    ids,
    listed,
    normal,
    paged_cache,
    records_of,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)
FMT = SummaryFormat()


def step(cache: Cache, q: Tensor, records: Tensor, impl: str, *, fmt: SummaryFormat = FMT, budget: int = 64):
    return decode(
        q, cache.k, cache.v, records, cache.block_table, cache.seq_lens, fmt, budget=budget, impl=impl
    )


@by_impl
def test_case_01_context_shorter_than_budget_equals_dense(impl):
    """Every T from one token to the budget."""
    for first in (1, 33):
        lengths = list(range(first, first + 32))
        cache = paged_cache(lengths, D=64)
        q = normal(len(lengths), 2, 64, seed=first)
        got = step(cache, q, records_of(cache, FMT), impl)
        plain = reference.dense_attention(q, *cache.args, scale=0.125, dtype=torch.float32)
        oracle = reference.dense_attention(q, *cache.args, scale=0.125)
        for b in range(len(lengths)):
            assert_close_as_torch(got.out[b], plain.out[b], oracle.out[b], terms=2.0)
        assert got.pages.counts[:, 0].tolist() == [-(-length // 16) for length in lengths]


@pytest.mark.parametrize("page", [16, 32])
def test_case_03_reference_torch_and_triton_pick_the_same_pages_at_the_first_step(page):
    """Straight after summarize, each with the records that it made itself."""
    fmt = SummaryFormat(page, 4)
    cache = paged_cache([7 * page + 1, 6 * page], page=page)
    q = normal(2, 3, 64, seed=1)
    args = (q, cache.block_table, cache.seq_lens)
    lists, shares = {}, {}
    for impl in ("reference", *IMPLS):
        if impl == "reference":
            records = records_of(cache, fmt)
            mass = reference.page_mass(q, records, *args[1:], fmt, scale=0.125)
            shares[impl] = reference.page_share(mass, 1)
            lists[impl] = reference.select_pages(shares[impl], cache.seq_lens, page=page, budget=4 * page)
        else:
            records = summarize(*cache.keys_args, fmt, impl=impl)
            mass = page_mass(q, records, *args[1:], fmt, impl=impl)
            shares[impl] = page_share(mass, 1, impl=impl)
            lists[impl] = decode(
                q, cache.k, cache.v, records, *args[1:], fmt, budget=4 * page, impl=impl
            ).pages
    for impl in IMPLS:
        assert_pages_within_error(
            lists[impl], lists["reference"], shares[impl], shares["reference"], cache.seq_lens, page=page
        )
    # No two shares of this input lie near each other.
    assert_same_pages(lists["torch"], lists["reference"])
    assert_same_pages(lists["triton"], lists["reference"])


@by_impl
def test_case_04_a_row_equals_its_solo_run_whatever_its_neighbours_and_padding(impl):
    """Poisoned neighbours, records and pool, another table width: the same ids, bit for bit."""
    lengths = [150, 16, 250, 77]
    cache = paged_cache(lengths, heads=2)
    q, records = normal(4, 4, 64, seed=1), records_of(cache, FMT)
    together = step(cache, q, records, impl)
    tolerance = 0 if impl == "triton" else 1e-5
    for b in range(4):
        alone = Cache(
            cache.k.clone(),
            cache.v.clone(),
            cache.block_table[b : b + 1, : -(-lengths[b] // 16)],
            cache.seq_lens[b : b + 1],
        )
        strangers = [x for r, row in enumerate(cache.block_table.tolist()) if r != b for x in row if x >= 0]
        alone.k[strangers], alone.v[strangers] = math.nan, math.nan
        own = records.clone()
        own[strangers] = 0xFF
        wide = torch.cat([alone.block_table, torch.full((1, 40), -1, dtype=torch.int32, device=DEVICE)], 1)
        for table in (alone.block_table, wide):
            solo = step(Cache(alone.k, alone.v, table, alone.seq_lens), q[b : b + 1], own, impl)
            assert solo.pages.page_ids[0].tolist() == together.pages.page_ids[b].tolist()
            assert solo.pages.counts[0].tolist() == together.pages.counts[b].tolist()
            torch.testing.assert_close(solo.out[0], together.out[b], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(solo.lse[0], together.lse[b], rtol=tolerance, atol=tolerance)


@by_impl
def test_case_06_ties_go_to_the_lower_page_on_every_run(impl):
    """Pages with equal keys have equal scores: constant keys, zeros, and a query of zeros."""
    for pattern, q in (
        ("zeros", normal(1, 3, 64, seed=1)),
        ("zeros", torch.zeros(1, 3, 64, device=DEVICE)),
        ("normal", torch.zeros(1, 3, 64, device=DEVICE)),
    ):
        cache = paged_cache([209], pattern=pattern)
        records = records_of(cache, FMT)
        runs = [listed(step(cache, q, records, impl, budget=96).pages) for _ in range(3)]
        assert runs == [[0, 1, 2, 3, 4, 13]] * 3
    # One block twice over: the same record under two page ids.
    cache = paged_cache([209])
    cache.block_table[0, 9] = cache.block_table[0, 4]
    q = cache.k[cache.block_table[0, 4:5].long(), :, 3] * 4
    got = page_share(page_mass(q, records_of(cache, FMT), *cache.keys_args[1:], FMT, impl=impl), 1, impl=impl)
    assert got[0, 0, 4] == got[0, 0, 9] == got[0, 0, 1:13].max()
    assert listed(select_pages(got, cache.seq_lens, page=16, budget=48, impl=impl)) == [0, 4, 13]


def _huge(dtype: torch.dtype, elements: int) -> Tensor:
    """Zeros that take no memory until they are written (on a CPU)."""
    if DEVICE == "cuda":
        return torch.zeros(elements, dtype=dtype, device=DEVICE)
    # MAP_NORESERVE: pages that are not touched are not counted.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


@by_impl
def test_case_07_offsets_beyond_2_to_the_31_elements(impl):
    """Blocks 2**22 elements apart with ids above 512: every cache and record offset needs 64 bits."""
    apart, blocks, heads, D = 2**22, 530, 2, 64
    small = paged_cache([100, 40], heads=heads, D=D, dtype=torch.float16)
    assert (blocks - len(small.k)) * apart > 2**31
    pool = _huge(torch.float16, blocks * apart)
    shape, strides = (blocks, heads, 16, D), (apart, 16 * 2 * D, 2 * D, 1)
    k, v = pool.as_strided(shape, strides), pool.as_strided(shape, strides, D)
    small_records = records_of(small, FMT)
    nbytes = small_records.shape[-1]
    records = _huge(torch.uint8, blocks * apart).as_strided(
        (blocks, heads, 1, nbytes), (apart, nbytes, nbytes, 1)
    )
    high = blocks - len(small.k)
    k[high:], v[high:], records[high:] = small.k, small.v, small_records
    table = torch.where(small.block_table >= 0, small.block_table + high, -1)
    q = normal(2, 4, D, seed=1, dtype=torch.float16)
    want = step(small, q, small_records, impl)
    got = step(Cache(k, v, table, small.seq_lens), q, records, impl)
    assert_same_pages(got.pages, want.pages)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    logits = page_logits(q, records, table, small.seq_lens, FMT, impl=impl)
    assert torch.equal(
        logits, page_logits(q, small_records, small.block_table, small.seq_lens, FMT, impl=impl)
    )
    # The records too are written where they belong.
    lens, table = small.seq_lens[1:], table[1:]
    fresh = summarize(k, table, lens, FMT, out=records.zero_(), impl=impl)
    expected = summarize(small.k, small.block_table[1:], lens, FMT, impl=impl)
    assert expected.any()
    assert torch.equal(fresh[high:], expected)


@pytest.mark.gpu
@by_impl
def test_case_07_a_contiguous_cache_of_more_than_2_to_the_31_elements(impl):
    """High block ids in a plain pool of 2**31 + elements, K and V each."""
    blocks, heads, D = 2**21 // 2 + 64, 2, 64
    small = paged_cache([1000, 333], heads=heads, D=D, dtype=torch.bfloat16)
    k, v = (torch.zeros(blocks, heads, 16, D, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    assert k.numel() > 2**31
    high = blocks - len(small.k)
    k[high:], v[high:] = small.k, small.v
    table = torch.where(small.block_table >= 0, small.block_table + high, -1)
    q = normal(2, 8, D, seed=1, dtype=torch.bfloat16)
    records, small_records = (
        summarize(c, t, small.seq_lens, FMT, impl=impl) for c, t in ((k, table), (small.k, small.block_table))
    )
    assert torch.equal(records[high:], small_records)
    got = step(Cache(k, v, table, small.seq_lens), q, records, impl, budget=256)
    want = step(small, q, small_records, impl, budget=256)
    assert_same_pages(got.pages, want.pages)
    assert torch.equal(got.out, want.out)


@by_impl
@pytest.mark.parametrize("table_filler", [-1, 0])
def test_case_08_rows_of_length_0_write_zeros_and_read_nothing(impl, table_filler):
    """Padding rows of a captured batch, in a pool full of nan; their table points nowhere or at block 0."""
    cache = paged_cache([0, 100, 0, 20, 0], heads=2)
    table = torch.where(cache.block_table < 0, table_filler, cache.block_table)
    cache = Cache(cache.k, cache.v, table, cache.seq_lens)
    q = normal(5, 4, 64, seed=1)
    q[::2] = math.nan
    records = records_of(cache, FMT)
    before = [x.clone() for x in (cache.k, cache.v, records, table)]
    got = step(cache, q, records, impl)
    summarize(*cache.keys_args, FMT, start=cache.seq_lens, out=records, impl=impl)
    for now, then in zip((cache.k, cache.v, records, table), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert not got.out[::2].any()
    assert (got.lse[::2] == -math.inf).all()
    assert (got.pages.page_ids[::2] == -1).all()
    assert not got.pages.counts[::2].any()
    assert got.out[1::2].isfinite().all()
    mass = page_mass(q, records, table, cache.seq_lens, FMT, impl=impl)
    assert (mass.log_mass[::2] == -math.inf).all()
    assert (mass.total[::2] == -math.inf).all()
    share = page_share(mass, 2, impl=impl)
    assert not share[::2].any()


@by_impl
def test_case_09_the_tail_is_minus_1_and_the_count_exact_at_every_step(impl):
    """A row that grows token by token past its budget, beside one that is replaced by a shorter one."""
    cache = paged_cache([100, 100])
    records = records_of(cache, FMT)
    for t in (0, 16, 17, 36, 64, 65, 100):
        lens = ids(t, 100 - t)
        got = decode(
            normal(2, 1, 64, seed=t),
            cache.k,
            cache.v,
            records,
            cache.block_table,
            lens,
            FMT,
            budget=64,
            impl=impl,
        )
        for b, length in enumerate((t, 100 - t)):
            n = -(-length // 16)
            pages = listed(got.pages, b)
            assert len(pages) == min(n, 4)
            assert pages == sorted(set(pages))
            assert not pages or (pages[0] == 0 and pages[-1] == n - 1)


@by_impl
@pytest.mark.parametrize("page", [16, 32, 64])
def test_case_11_page_ids_are_pages_not_token_slots_nor_blocks(impl, page):
    """The needle's page is found and read in a shuffled table whose blocks hold four pages."""
    fmt = SummaryFormat(page, 4)
    cache = paged_cache([10 * page + 5], page=page, block=4 * page)
    needle = 6 * page + page // 2
    block = int(cache.block_table[0, needle // (4 * page)])
    q = normal(1, 1, 64, seed=1)
    cache.k[block, 0, needle % (4 * page)] = q[0, 0] * 4
    got = step(cache, q, records_of(cache, fmt), impl, fmt=fmt, budget=3 * page)
    assert listed(got.pages) == [0, 6, 10]
    torch.testing.assert_close(got.out[0, 0], cache.v[block, 0, needle % (4 * page)], rtol=0, atol=0.01)


@by_impl
@pytest.mark.parametrize("stale", [math.nan, math.inf, 3.0])
def test_case_13_stale_records_of_a_reused_block_are_never_read(impl, stale):
    """A new request's tokens arrive one by one in blocks whose records an earlier request left."""
    cache = paged_cache([70])
    q, records = normal(1, 2, 64, seed=1), records_of(cache, FMT)
    old = torch.full_like(records.view(torch.bfloat16), stale).view(torch.uint8)
    assert unpack(old, FMT, 64).variance.eq(stale).all() or math.isnan(stale)
    for t in (15, 16, 17, 32, 33, 48, 49, 64, 65, 70):
        # The newest page has no record of its own yet, full or not.
        for n in range(-(-t // 16) - 1):
            old[cache.block_table[0, n]] = records[cache.block_table[0, n]]
        args = (cache.block_table, ids(t), FMT)
        got, want = (decode(q, cache.k, cache.v, x, *args, budget=48, impl=impl) for x in (old, records))
        assert_same_pages(got.pages, want.pages)
        assert torch.equal(got.out, want.out)


@by_impl
def test_case_13_summarize_replaces_the_records_of_a_reused_block(impl):
    cache = paged_cache([40])
    want = summarize(*cache.keys_args, FMT, impl=impl)
    stale = torch.full_like(want, 0xA5)
    got = summarize(*cache.keys_args, FMT, out=stale.clone(), impl=impl)
    full = cache.block_table[0, :2].long()
    assert torch.equal(got[full], want[full])
    others = [n for n in range(len(got)) if n not in full.tolist()]
    assert torch.equal(got[others], stale[others])


@by_impl
@pytest.mark.parametrize(("group", "D"), PAIRS)
def test_case_15_group_sizes_and_head_widths(impl, group, D):
    assert_decodes_as_the_reference(group, D, torch.float32 if group % 2 else torch.float16, impl)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "D"), list(itertools.product(GROUPS, HEAD_DIMS)))
def test_case_15_every_group_size_with_every_head_width(group, D):
    assert_decodes_as_the_reference(group, D, torch.bfloat16, "triton")


def assert_decodes_as_the_reference(group: int, D: int, dtype: torch.dtype, impl: str) -> None:
    cache = paged_cache([130], heads=2, D=D, dtype=dtype)
    q, records = normal(1, 2 * group, D, seed=1, dtype=dtype), records_of(cache, FMT)
    got = step(cache, q, records, impl)
    args = (records, cache.block_table, cache.seq_lens, FMT)
    mass = page_mass(q, *args, impl=impl)
    want = reference.page_mass(q, *args, scale=D**-0.5)
    plain = reference.page_mass(q, *args, scale=D**-0.5, dtype=torch.float32)
    assert_close_as_torch(mass.log_mass, plain.log_mass, want.log_mass, terms=8.0)
    share = reference.page_share(want, 2)
    assert_pages_within_error(
        got.pages,
        reference.select_pages(share, cache.seq_lens, page=16, budget=64),
        page_share(mass, 2, impl=impl),
        share,
        cache.seq_lens,
        page=16,
    )
    exact, rough = (
        reference.sparse_attention(q, *cache.args, got.pages, page=16, scale=D**-0.5, dtype=x)
        for x in (torch.float64, dtype)
    )
    assert_close_as_torch(got.out, rough.out, exact.out, terms=1.0)


def test_case_16_bases_are_orthonormal_in_any_batch():
    """Thousands of pages in one call, rank-deficient ones among them: rows are orthonormal, or zero."""
    keys = normal(3000, 16, 64, seed=0)
    keys[::7] = keys[::7, :1].clone()
    keys[3::7] = 0
    keys[5::7, 2:] = keys[5::7, :1].clone()
    for make, eps in ((page_factors, 1e-5), (lambda k, r: reference.factors(k.double(), r), 1e-12)):
        mean, basis, coef = make(keys, 8)
        gram = (basis @ basis.mT).double()
        size = gram.diagonal(dim1=-2, dim2=-1)
        assert (((size - 1).abs() < eps) | (size == 0)).all()
        assert (gram - torch.diag_embed(size)).abs().max() < eps
        # No direction in a page of zeros, one in a page of two different keys.
        real = (size > 0).sum(-1)
        assert not real[3::7].any()
        assert (real[5::7] == 1).all()
        assert (real[1::7] == 8).all()
        # What a constant page's mean loses to rounding is no signal.
        assert coef[::7].abs().max() < eps
        error = (keys - mean[:, None] - coef @ basis).double().norm(dim=(-1, -2))
        best = torch.linalg.svdvals((keys - keys.mean(1, keepdim=True)).double())[:, 8:].norm(dim=-1)
        assert (error <= 1.001 * best + 64 * 2**-23 * keys.double().norm(dim=(-1, -2))).all()


@by_impl
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_16_a_non_finite_key_does_not_poison_other_pages(impl, bad):
    cache = paged_cache([36], heads=2)
    clean = summarize(*cache.keys_args, FMT, impl=impl)
    cache.k[cache.block_table[0, 1], 0, 7, 11] = bad
    got = summarize(*cache.keys_args, FMT, impl=impl)
    marked = unpack(got[cache.block_table[0, 1], 0, 0], FMT, 64)
    assert marked.variance == marked.residual_norm == math.inf
    assert not marked.mean.any()
    assert not marked.coef.any()
    got[cache.block_table[0, 1], 0, 0] = clean[cache.block_table[0, 1], 0, 0]
    assert torch.equal(got, clean)


@by_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_case_17_the_page_of_one_enormous_key_is_found(impl, dtype):
    """A sink of 300 times the norm that every query points at, and an outlier channel that every key has."""
    cache = paged_cache([40 * 16 + 3], dtype=dtype)
    q = normal(1, 2, 64, seed=1, dtype=dtype)
    cache.k[cache.block_table[0, 23], 0, 5] = (q[0].float().mean(0) * 300).to(dtype)
    got = step(cache, q, records_of(cache, FMT), impl, budget=48)
    assert listed(got.pages) == [0, 23, 40]
    want = reference.dense_attention(q, *cache.args, scale=0.125)
    torch.testing.assert_close(got.out.double(), want.out, rtol=1e-2, atol=1e-3)
    # An outlier channel in every page does not hide the page that differs elsewhere.
    cache.k[cache.block_table[0, 23], 0, 5] = (q[0].float().mean(0) * 8).to(dtype)
    cache.k[..., 13] += 60
    q[..., 13] = 1
    assert 23 in listed(step(cache, q, records_of(cache, FMT), impl, budget=64).pages)


@by_impl
def test_case_18_scores_of_float16_with_large_norms_are_compared_in_float32(impl):
    """Logits near 1e6, which float16 does not hold: pages are told apart, and the output is the winner's."""
    cache = paged_cache([10 * 16 + 2], D=128, dtype=torch.float16)
    q = torch.full((1, 2, 128), 300.0, dtype=torch.float16, device=DEVICE)
    for n in range(10):
        # Steps of 3 %: a mean of one value is off by up to half of 1 / 127 of it.
        cache.k[cache.block_table[0, n]] = 100 + 3 * ((5 * n) % 9)
    cache.k[cache.block_table[0, 10], :, :2] = 1
    records = records_of(cache, FMT)
    mass = page_mass(q, records, *cache.keys_args[1:], FMT, impl=impl)
    assert (mass.log_mass[..., :10] > 65504).all()
    assert mass.log_mass[..., :10].isfinite().all()
    got = step(cache, q, records, impl, budget=48)
    # 5 n mod 9 is greatest for page 7.
    assert listed(got.pages) == [0, 7, 10]
    value = cache.v[cache.block_table[0, 7], 0].float().mean(0)
    torch.testing.assert_close(got.out[0, 0].float(), value, rtol=2e-3, atol=2e-3)


@by_impl
def test_case_19_every_rank_with_every_group_size(impl):
    for rank, group in itertools.product((1, 2, 4, 8, 16), GROUPS):
        fmt = SummaryFormat(32, rank)
        cache = paged_cache([65], page=32, seed=rank)
        args = (normal(1, group, 64, seed=group), records_of(cache, fmt), *cache.keys_args[1:], fmt)
        plain = reference.page_logits(*args, scale=0.125, dtype=torch.float32)
        oracle = reference.page_logits(*args, scale=0.125)
        # Each rank must matter, or a wrong row of the record would not show.
        basis = unpack(args[1][cache.block_table[0, :2].long()], fmt, 64).coef.abs().amax(-2)
        assert (basis > 0).all()
        assert_close_as_torch(page_logits(*args, impl=impl), plain, oracle, terms=4.0)


@by_impl
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_case_19_every_query_head_reads_the_records_of_its_own_kv_head(impl, heads):
    cache = paged_cache([50], heads=heads)
    q, records = normal(1, 6, 64, seed=1), records_of(cache, FMT)
    got = page_logits(q, records, *cache.keys_args[1:], FMT, impl=impl)
    for h in range(6):
        own = h * heads // 6
        alone = reference.page_logits(
            q[:, h : h + 1], records[:, own : own + 1], *cache.keys_args[1:], FMT, scale=0.125
        )
        torch.testing.assert_close(got[:, h].double(), alone[:, 0], rtol=1e-5, atol=1e-5)
