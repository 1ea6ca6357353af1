"""The whole decode step: pages and output against the reference, and what is not read."""

import math

import pytest
import torch
from hypothesis import given

from locks import (
    SummaryFormat,
    decode,
    page_logits,
    page_mass,
    page_share,
    reference,
    select_pages,
    sparse_attention,
    summarize,
)
from tests.helpers import (
    DEVICE,
    IMPLS,
    PAIRS,
    Case,
    assert_close_as_torch,
    assert_pages_within_error,
    assert_same_pages,
    cases,
    examples,
    ids,
    listed,
    normal,
    output_terms,
    paged_cache,
    records_of,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)
DEFAULT = SummaryFormat()


def assert_step_is_the_references(case: Case, impl: str, *, places: int = 2) -> None:
    """Pages equal the reference's but for near ties; the output is that of the pages, in float64."""
    fmt, cache, q = case.fmt, case.cache, case.q
    options = {"scale": case.scale, "window_pages": case.window_pages}
    budget = (1 + case.window_pages + places) * fmt.page
    args = (q, cache.k, cache.v, records_of(cache, fmt), cache.block_table, cache.seq_lens, fmt)
    got = decode(*args, budget=budget, impl=impl, **options)
    want = reference.decode(*args, budget=budget, **options)
    mass = page_mass(*case.query_args, exact=False, impl=impl, **options)
    share = page_share(mass, cache.k.shape[1], impl=impl)
    chosen = {"page": fmt.page, "budget": budget, "window_pages": case.window_pages}
    separate = select_pages(share, cache.seq_lens, impl=impl, **chosen)
    assert torch.equal(got.pages.page_ids, separate.page_ids)
    assert torch.equal(got.pages.counts, separate.counts)
    reference_share = reference.page_share(reference.page_mass(*case.query_args, **options), cache.k.shape[1])
    assert_pages_within_error(
        got.pages,
        want.pages,
        share,
        reference_share,
        cache.seq_lens,
        page=fmt.page,
        window_pages=case.window_pages,
    )
    oracle, plain = (
        reference.sparse_attention(q, *cache.args, got.pages, page=fmt.page, scale=case.scale, dtype=dtype)
        for dtype in (torch.float64, q.dtype)
    )
    assert got.out.dtype == q.dtype
    assert_close_as_torch(got.out, plain.out, oracle.out, terms=output_terms(q, cache, case.scale))
    assert_close_as_torch(got.lse, plain.lse, oracle.lse, terms=8.0)


@by_impl
@given(case=cases(patterns=("normal", "constant", "zeros", "low_rank")))
@examples(6)
def test_a_step_is_the_references(impl, case):
    assert_step_is_the_references(case, impl)


@by_impl
@pytest.mark.parametrize(
    ("fmt", "D", "heads", "group", "window_pages", "layout"),
    [
        (SummaryFormat(16, 4), 128, 2, 7, 1, "halves"),
        (SummaryFormat(32, 2, 8, 8, 16), 96, 1, 5, 2, "token_major"),
        (SummaryFormat(64, 8, 16, 4, 4), 64, 2, 2, 1, "plain"),
    ],
)
def test_a_step_is_the_references_at_chosen_shapes(impl, fmt, D, heads, group, window_pages, layout):
    cache = paged_cache([11 * fmt.page + 3, 7 * fmt.page], page=fmt.page, heads=heads, D=D, layout=layout)
    q = normal(2, heads * group, D, seed=1)
    assert_step_is_the_references(Case(fmt, cache, q, D**-0.5, window_pages), impl)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "D"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page", [16, 32, 64])
def test_a_step_is_the_references_for_every_dtype(group, D, dtype, page):
    cache = paged_cache([60 * page + 3, 9 * page], page=page, heads=2, D=D, dtype=dtype, layout="halves")
    q = normal(2, 2 * group, D, seed=group, dtype=dtype)
    case = Case(SummaryFormat(page, 4), cache, q, D**-0.5, 1)
    assert_step_is_the_references(case, "triton", places=14)


@by_impl
@pytest.mark.parametrize("window_pages", [1, 2])
def test_a_table_that_the_budget_covers_takes_every_page_and_no_record(impl, window_pages):
    cache = paged_cache([80, 33, 16, 1, 0], heads=2)
    assert cache.block_table.shape[1] * cache.k.shape[2] <= 96
    q = normal(5, 6, 64, seed=1)
    # Full of nan: a record that were read would show.
    records = records_of(cache, DEFAULT).fill_(0xFF)
    args = (q, cache.k, cache.v, records, *cache.keys_args[1:], DEFAULT)
    got = decode(*args, budget=96, window_pages=window_pages, impl=impl)
    whole = decode(*args, budget=96, window_pages=window_pages, impl=impl, debug=True)
    assert got.pages.counts.tolist() == [[5, 5], [3, 3], [1, 1], [1, 1], [0, 0]]
    assert all(map(torch.equal, got.pages, whole.pages))
    assert torch.equal(got.out, whole.out)
    assert torch.equal(got.lse, whole.lse)
    with pytest.raises(ValueError, match="budget: expected"):
        decode(*args, budget=32, window_pages=window_pages, impl=impl)


@by_impl
def test_a_step_is_its_stages_one_after_the_other(impl):
    cache = paged_cache([200, 90], heads=2)
    q, records = normal(2, 6, 64, seed=1), records_of(cache, DEFAULT)
    options = {"scale": 0.3, "window_pages": 2, "impl": impl}
    got = decode(q, cache.k, cache.v, records, *cache.keys_args[1:], DEFAULT, budget=96, **options)
    mass = page_mass(q, records, *cache.keys_args[1:], DEFAULT, **options)
    pages = select_pages(
        page_share(mass, 2, impl=impl), cache.seq_lens, page=16, budget=96, window_pages=2, impl=impl
    )
    attended = sparse_attention(q, *cache.args, pages, page=16, scale=0.3, impl=impl)
    assert_same_pages(got.pages, pages)
    assert torch.equal(got.out, attended.out)
    assert torch.equal(got.lse, attended.lse)


@by_impl
def test_scale_is_the_widths_root_and_the_window_one_page_unless_given(impl):
    cache = paged_cache([200], D=80)
    args = (
        normal(1, 2, 80, seed=1),
        cache.k,
        cache.v,
        records_of(cache, DEFAULT),
        *cache.keys_args[1:],
        DEFAULT,
    )
    got = decode(*args, budget=64, impl=impl)
    want = decode(*args, budget=64, scale=80**-0.5, window_pages=1, impl=impl)
    assert_same_pages(got.pages, want.pages)
    assert torch.equal(got.out, want.out)


@by_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("page", [16, 64])
def test_kept_pages_that_cover_the_context_give_dense_attention(impl, page, dtype):
    """Up to the budget, for T = 1, P - 1, P, P + 1 and the budget itself."""
    fmt = SummaryFormat(page, 4)
    lengths = [1, page - 1, page, page + 1, 4 * page]
    cache = paged_cache(lengths, page=page, heads=2, dtype=dtype)
    q = normal(len(lengths), 4, 64, seed=1, dtype=dtype)
    got = decode(
        q, cache.k, cache.v, records_of(cache, fmt), *cache.keys_args[1:], fmt, budget=4 * page, impl=impl
    )
    plain = reference.dense_attention(q, *cache.args, scale=0.125, dtype=dtype)
    oracle = reference.dense_attention(q, *cache.args, scale=0.125)
    assert got.pages.counts.tolist() == [[1, 1], [1, 1], [1, 1], [2, 2], [4, 4]]
    assert_close_as_torch(got.out, plain.out, oracle.out, terms=1.0)
    assert_close_as_torch(got.lse, plain.lse, oracle.lse, terms=8.0)


@by_impl
def test_selection_reads_no_key_and_no_value_of_a_candidate(impl):
    """All candidates' keys and values are nan after the records are made: the same pages.

    With the unselected ones alone poisoned, the same output too.
    """
    cache = paged_cache([250, 130], heads=2, layout="halves")
    q, records = normal(2, 6, 64, seed=1), records_of(cache, DEFAULT)

    def step():
        return decode(q, cache.k, cache.v, records, *cache.keys_args[1:], DEFAULT, budget=80, impl=impl)

    want = step()
    lists = [[set(listed(want.pages, b, h)) for h in range(2)] for b in range(2)]
    assert lists[0][0] != lists[0][1]
    for b, pages in enumerate((16, 9)):
        for h in range(2):
            for n in set(range(1, pages - 1)) - lists[b][h]:
                cache.k[cache.block_table[b, n], h] = math.nan
                cache.v[cache.block_table[b, n], h] = math.nan
    got = step()
    assert_same_pages(got.pages, want.pages)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    for b, pages in enumerate((16, 9)):
        for n in range(1, pages - 1):
            cache.k[cache.block_table[b, n]] = math.nan
            cache.v[cache.block_table[b, n]] = math.nan
    got = step()
    assert_same_pages(got.pages, want.pages)
    assert got.out.isnan().all()


@by_impl
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_marked_page_is_selected_first_and_its_row_alone_gives_what_dense_gives(impl, bad):
    cache = paged_cache([250, 250], heads=2)
    q = normal(2, 4, 64, seed=1)
    clean = decode(
        q, cache.k, cache.v, records_of(cache, DEFAULT), *cache.keys_args[1:], DEFAULT, budget=64, impl=impl
    )
    page = min(set(range(1, 15)) - set(listed(clean.pages, 0, 1)))
    cache.k[cache.block_table[0, page], 1, 3, 5] = bad
    got = decode(
        q, cache.k, cache.v, records_of(cache, DEFAULT), *cache.keys_args[1:], DEFAULT, budget=64, impl=impl
    )
    dense = reference.dense_attention(q, *cache.args, scale=0.125)
    assert page in listed(got.pages, 0, 1)
    assert len(set(listed(got.pages, 0, 1)) & set(listed(clean.pages, 0, 1))) == 3
    assert torch.equal(got.out[0, 2:].isnan(), dense.out[0, 2:].isnan())
    assert got.pages.page_ids[0, 0].tolist() == clean.pages.page_ids[0, 0].tolist()
    assert got.pages.page_ids[1].tolist() == clean.pages.page_ids[1].tolist()
    assert torch.equal(got.out[0, :2], clean.out[0, :2])
    assert torch.equal(got.out[1], clean.out[1])


@by_impl
def test_more_marked_pages_than_places_keep_the_lowest(impl):
    cache = paged_cache([250])
    for n in (12, 3, 9, 7):
        cache.k[cache.block_table[0, n], 0, 0, 0] = math.nan
    got = decode(
        normal(1, 2, 64, seed=1),
        cache.k,
        cache.v,
        records_of(cache, DEFAULT),
        *cache.keys_args[1:],
        DEFAULT,
        budget=64,
        impl=impl,
    )
    assert listed(got.pages) == [0, 3, 7, 15]


@by_impl
def test_records_kept_up_to_date_token_by_token_equal_those_made_at_once(impl):
    """As `decode` asks: summarize(start=seq_lens - 1, max_new_pages=1) after each write."""
    cache = paged_cache([33, 18])
    at_once = summarize(*cache.keys_args, DEFAULT, impl=impl)
    records = torch.zeros_like(at_once)
    for t in range(1, 34):
        lens = torch.tensor([t, min(t, 18)], dtype=torch.int32, device=DEVICE)
        summarize(
            cache.k, cache.block_table, lens, DEFAULT, start=lens - 1, max_new_pages=1, out=records, impl=impl
        )
    assert torch.equal(records, at_once)
    assert at_once.any(-1).sum() == 2 + 1


@by_impl
@pytest.mark.parametrize("layout", ["halves", "token_major"])
def test_strided_caches_decode_as_contiguous_ones(impl, layout):
    plain, strided = (paged_cache([100, 20], heads=2, layout=x) for x in ("plain", layout))
    assert not strided.k.is_contiguous()
    assert torch.equal(plain.k.nan_to_num(), strided.k.nan_to_num())
    q, got = normal(2, 4, 64, seed=1), []
    for cache in (plain, strided):
        records = records_of(cache, DEFAULT)
        got.append(decode(q, cache.k, cache.v, records, *cache.keys_args[1:], DEFAULT, budget=64, impl=impl))
    assert_same_pages(got[0].pages, got[1].pages)
    assert torch.equal(got[0].out, got[1].out)
    assert torch.equal(got[0].lse, got[1].lse)


@by_impl
def test_rows_of_a_sequence_share_its_table(impl):
    cache = paged_cache([90, 61], heads=2)
    q = normal(6, 6, 64, seed=1)
    lens = ids(88, 89, 90, 47, 0, 61)
    records = records_of(cache, DEFAULT)
    rest, options = (lens, DEFAULT), {"impl": impl, "scale": 0.2}
    short, wide = cache.block_table, cache.block_table.repeat_interleave(3, 0)
    for more in ({}, {"certificate": True}, {"coverage": 0.5}, {"debug": True}):
        got, want = (
            decode(q, cache.k, cache.v, records, table, *rest, budget=48, **more, **options)
            for table in (short, wide)
        )
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)
        assert all(map(torch.equal, got.pages, want.pages))
    assert torch.equal(*(page_logits(q, records, table, *rest, **options) for table in (short, wide)))
    attended = (
        sparse_attention(q, cache.k, cache.v, table, lens, want.pages, page=16, debug=True, **options)
        for table in (short, wide)
    )
    assert all(map(torch.equal, *attended))
    with pytest.raises(
        ValueError,
        match=r"block_table: expected int32 whose rows divide those of \[5, \d\], got int32 \[2, \d\]",
    ):
        page_mass(q[:5], records, short, lens[:5], DEFAULT, impl=impl)
