"""Coverage: as few pages as reach a share of every head's mass, as estimated or for certain, up to a cap."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locks import (
    PageMass,
    api,
    decode,
    page_mass,
    page_share,
    reference,
    select_pages,
)
from locks.certificate import MAX_COVER_PAGES, always_pages
from tests.helpers import (
    IMPLS,
    SHARP,
    Case,
    assert_same_pages,
    cases,
    decode_args,
    examples,
    listed,
    normal,
    paged_cache,
    records_of,
    true_share,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)


def lists(case: Case, impl: str, places: int) -> tuple[Any, Any, Any]:
    """The mass, share and plain top list that a coverage cuts."""
    options = {"scale": case.scale, "window_pages": case.window_pages}
    mass = page_mass(*case.query_args, impl=impl, **options)
    share = page_share(mass, case.cache.k.shape[1], impl=impl)
    pages = select_pages(
        share,
        case.cache.seq_lens,
        page=case.fmt.page,
        budget=(1 + case.window_pages + places) * case.fmt.page,
        window_pages=case.window_pages,
        impl=impl,
    )
    return mass, share, pages


@by_impl
@given(
    case=cases(patterns=("normal", "low_rank")),
    places=st.integers(1, 8),
    coverage=st.sampled_from((0.05, 0.3, 0.7, 0.9)),
    certified=st.booleans(),
)
@examples(12)
def test_coverage_keeps_the_references_pages_given_equal_scores(impl, case, places, coverage, certified):
    mass, share, pages = lists(case, impl, places)
    work = api.load_impl(impl)
    args = decode_args(case.q, case.cache, case.fmt)
    options: dict[str, Any] = {
        "coverage": coverage,
        "certified": certified,
        "scale": case.scale,
        "window_pages": case.window_pages,
    }
    got = work.cover_pages(*args, mass, share, pages, **options)
    exact = PageMass(mass.log_mass.double(), mass.total.double())
    want = reference.cover_pages(*args, exact, share, pages, **options)  # pyright: ignore[reportCallIssue]
    assert_same_pages(got, want)


@pytest.mark.parametrize("mode", ["coverage", "coverage_certified"])
@pytest.mark.parametrize("strength", [0.5, 2.0, 6.0])
@by_impl
def test_coverage_keeps_the_references_pages_where_it_cuts(impl, mode, strength):
    """From the first page to the cap, and heads of a group that need different numbers."""
    cache = paged_cache([900, 420, 0, 7, 33], heads=2, pattern="low_rank", block=32, layout="halves")
    q = strength * normal(5, 6, 64, seed=3)
    args = decode_args(q, cache, SHARP)
    seen = set()
    for wanted in (0.02, 0.4, 0.8, 0.95):
        options: dict[str, Any] = {"budget": 320, "window_pages": 2, mode: wanted}
        got = decode(*args, impl=impl, **options)
        want = reference.decode(*args, scale=0.125, **options)
        if mode == "coverage":
            assert_same_pages(got.pages, want.pages)
        # What is allowed for rounding may cost a page, and never saves one.
        assert ((got.pages.counts - want.pages.counts) <= 1).all()
        for b, h in product(range(5), range(2)):
            assert set(listed(want.pages, b, h)) <= set(listed(got.pages, b, h))
        assert got.pages.page_ids.shape[-1] == 20
        seen |= set(got.pages.counts[:2].flatten().tolist())
    assert len(seen) >= 4


@pytest.mark.parametrize("certified", [False, True])
def test_the_reference_keeps_no_page_that_it_can_do_without(certified):
    """By definition: every head reaches the coverage, and some head would not without the least page."""
    cache = paged_cache([900, 420], heads=2, pattern="low_rank")
    q = 2 * normal(2, 6, 64, seed=3)
    records = records_of(cache, SHARP)
    rest = (*cache.keys_args[1:], SHARP)
    mass = reference.page_mass(q, records, *rest, scale=0.125)
    share = reference.page_share(mass, 2)
    pages = reference.select_pages(share, cache.seq_lens, page=16, budget=640)
    args: tuple[Any, ...] = (q, cache.k, cache.v, records, *rest, mass, share, pages)
    options: dict[str, Any] = {"certified": certified, "scale": 0.125, "window_pages": 1}
    got = reference.cover_pages(*args, coverage=0.7, **options)
    low = high = mass.log_mass
    if certified:
        low, high = reference.page_interval(q, records, *rest, scale=0.125)
    always = always_pages(cache.seq_lens, 16, share.shape[-1], 1, 2)
    exact = reference.sparse_attention(q, *cache.args, always, page=16, scale=0.125).lse

    def reached(b: int, h: int, kept: set[int]) -> Tensor:
        competing = set(range(1, -(-int(cache.seq_lens[b]) // 16) - 1))
        heads = slice(3 * h, 3 * h + 3)
        inside = exact[b, heads].exp() + low[b, heads][:, sorted(kept & competing)].exp().sum(-1)
        return inside / (inside + high[b, heads][:, sorted(competing - kept)].exp().sum(-1))

    for b, h in product(range(2), range(2)):
        kept = set(listed(got, b, h))
        assert 2 < len(kept) < 40
        assert (reached(b, h, kept) >= 0.7).all()
        least = min(kept - {0, max(kept)}, key=lambda p: (float(share[b, h, p]), -p))
        assert (reached(b, h, kept - {least}) < 0.7).any()


@pytest.mark.parametrize("window_pages", [1, 2, 3])
def test_always_kept_are_the_first_page_and_the_newest_once_each(window_pages):
    lengths = [0, 1, 16, 17, 33, 49, 100, 500]
    pages = always_pages(torch.tensor(lengths, dtype=torch.int32), 16, 8, window_pages, 2)
    for b, length in enumerate(lengths):
        n = min(-(-length // 16), 8)
        want = sorted({0, *range(max(0, n - window_pages), n)}) if n else []
        assert [listed(pages, b, h) for h in range(2)] == [want, want]


@by_impl
def test_equal_shares_are_kept_from_the_lower_page_on(impl):
    """Candidates that are one page over and over."""
    cache = paged_cache([400])
    for page in range(2, 24):
        cache.k[cache.block_table[0, page].long()] = cache.k[cache.block_table[0, 1].long()]
    records = records_of(cache, SHARP)
    args = (normal(1, 2, 64, seed=1), cache.k, cache.v, records, *cache.keys_args[1:], SHARP)
    got = decode(*args, budget=384, coverage=0.5, impl=impl)
    kept = listed(got.pages)
    assert kept == [*range(len(kept) - 1), 24]
    assert 8 < len(kept) < 18


@by_impl
def test_a_certified_coverage_is_reached_in_truth(impl):
    cache = paged_cache([900, 420], heads=2, pattern="low_rank")
    q = 3 * normal(2, 6, 64, seed=3)
    args = decode_args(q, cache, SHARP)
    for wanted in (0.3, 0.9, 0.99):
        got = decode(*args, budget=640, coverage_certified=wanted, certificate=True, impl=impl)
        reached = got.pages.counts < 40
        assert reached.any()
        assert (true_share(q, cache, got.pages, 16, 0.125) >= wanted)[reached].all()
        assert got.certificate is not None
        assert (got.certificate.share >= 0.99 * wanted)[reached].all()


@by_impl
def test_at_the_cap_the_list_is_the_plain_one(impl):
    cache = paged_cache([900, 100], heads=2)
    args = decode_args(normal(2, 4, 64, seed=3), cache, SHARP)
    plain = decode(*args, budget=80, impl=impl)
    modes: tuple[dict[str, Any], ...] = ({"coverage": 0.9999}, {"coverage_certified": 0.9999})
    for mode in modes:
        got = decode(*args, budget=80, impl=impl, **mode)
        assert_same_pages(got.pages, plain.pages)
        assert torch.equal(got.out, plain.out)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"coverage": 0.9, "coverage_certified": 0.9},
            ValueError,
            "coverage_certified: expected None beside coverage = 0.9, got 0.9",
        ),
        ({"coverage": 1.0}, ValueError, "coverage: expected a share between 0 and 1, both excluded, got 1.0"),
        ({"coverage": 0}, ValueError, "coverage: expected a share between 0 and 1, both excluded, got 0"),
        (
            {"coverage_certified": math.nan},
            ValueError,
            "coverage_certified: expected a share between 0 and 1",
        ),
        (
            {"coverage": "0.9"},
            TypeError,
            r"coverage: expected a share of the mass \(float\) or None, got '0.9'",
        ),
        ({"coverage_certified": True}, TypeError, "coverage_certified: expected a share of the mass"),
        (
            {"coverage": 0.9, "budget": 16 * (MAX_COVER_PAGES + 1)},
            ValueError,
            r"budget: expected at most 65536 tokens \(4096 pages\) with a coverage, got 65552",
        ),
        ({"coverage": 0.9, "budget": 32}, ValueError, "budget: expected at least 48 tokens"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(options, error, message):
    cache = paged_cache([200])
    args = decode_args(normal(1, 2, 64, seed=1), cache, SHARP)
    with pytest.raises(error, match=f"^{message}"):
        decode(*args, **{"budget": 48, **options})
