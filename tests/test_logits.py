"""Page logits against the reference: every rank, group size, head width and number of bits."""

import itertools
import math

import pytest
import torch
from hypothesis import given

from locks import SummaryFormat, page_logits, reference
from locks.format import unpack
from locks.kernels import logits as logits_op
from locks.kernels.config import KernelConfig
from tests.helpers import (
    DEVICE,
    GROUPS,
    HEAD_DIMS,
    IMPLS,
    Case,
    assert_close_as_torch,
    cases,
    examples,
    ids,
    normal,
    paged_cache,
    records_of,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)
RANKS = (1, 2, 4, 8, 16)
BITS = (4, 8, 16)


def assert_logits_are_the_references(case: Case, impl: str) -> None:
    args = case.query_args
    got = page_logits(*args, scale=case.scale, impl=impl)
    plain = reference.page_logits(*args, scale=case.scale, dtype=torch.float32)
    oracle = reference.page_logits(*args, scale=case.scale)
    assert got.dtype == torch.float32
    # A sum of products may be larger on the way than at its end, but not than |q| |k|.
    sizes = [x.double().nan_to_num(0, 0, 0).norm(dim=-1) for x in (case.q, case.cache.k)]
    terms = case.scale * float(sizes[0].amax() * sizes[1].amax()) if len(case.q) else 0.0
    assert_close_as_torch(got, plain, oracle, terms=terms)


def case_of(fmt: SummaryFormat, D: int, group: int, *, heads: int = 1, pages: int = 3, **kwargs) -> Case:
    cache = paged_cache([pages * fmt.page + 1], page=fmt.page, heads=heads, D=D, seed=fmt.rank, **kwargs)
    q = normal(1, heads * group, D, seed=group, dtype=cache.k.dtype)
    return Case(fmt, cache, q, D**-0.5, 1)


@by_impl
@given(case=cases())
@examples(8)
def test_logits_are_the_references(impl, case):
    assert_logits_are_the_references(case, impl)


@by_impl
@pytest.mark.parametrize("bits", list(itertools.product(BITS, BITS, BITS)), ids=str)
def test_logits_are_the_references_at_every_number_of_bits(impl, bits):
    assert_logits_are_the_references(case_of(SummaryFormat(16, 2, *bits), 80, 3), impl)


@by_impl
@pytest.mark.parametrize(("D", "group"), list(zip(HEAD_DIMS, (3, 5, 7, 1, 16, 2, 6), strict=True)))
def test_logits_are_the_references_at_every_head_width(impl, D, group):
    assert_logits_are_the_references(case_of(SummaryFormat(32, 4), D, group, heads=2), impl)


@by_impl
@pytest.mark.parametrize(("page", "rank"), [(p, r) for p in (16, 32, 64) for r in RANKS if r < p])
def test_logits_are_the_references_at_every_page_and_rank(impl, page, rank):
    assert_logits_are_the_references(case_of(SummaryFormat(page, rank), 64, 4), impl)


@pytest.mark.gpu
@by_impl
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_the_references_for_every_dtype(impl, D, dtype):
    """Each group size with some rank and some number of bits: pairs, since each one is compiled."""
    for i, group in enumerate(GROUPS):
        bits = BITS[i % 3]
        fmt = SummaryFormat(32, RANKS[i % 5], bits, bits, bits)
        assert_logits_are_the_references(case_of(fmt, D, group, heads=2, dtype=dtype), impl)


@by_impl
def test_logits_are_the_scaled_products_with_the_reconstructed_keys(impl):
    """By the record's definition: keys ~ mean + coef @ basis, in the cache's token order."""
    case = case_of(SummaryFormat(), 64, 2)
    q, records, table, lens, fmt = case.query_args
    page = unpack(records[table[0, :3].long(), 0, 0], fmt, 64, torch.float64)
    keys = page.mean[:, None] + page.coef @ page.basis
    want = 0.7 * torch.einsum("hd,ntd->hnt", q[0].double(), keys)
    got = page_logits(q, records, table, lens, fmt, scale=0.7, impl=impl)
    torch.testing.assert_close(got[0, :, :3].double(), want, rtol=1e-5, atol=1e-5)


@by_impl
def test_logits_of_a_fine_record_are_the_keys_own(impl):
    """16 bits and more ranks than the page has directions: nothing is lost but rounding."""
    case = case_of(SummaryFormat(16, 4, 16, 16, 16), 64, 2, pattern="low_rank")
    got = page_logits(*case.query_args, impl=impl)
    keys = reference.row_tokens(*case.cache.keys_args, 0)[0, :48].double()
    want = torch.einsum("hd,td->ht", case.q[0].double(), keys).unflatten(-1, (3, 16)) / 8
    torch.testing.assert_close(got[0, :, :3].double(), want, rtol=0, atol=2e-3)


@by_impl
@pytest.mark.parametrize("length", [0, 1, 16, 17, 32, 40])
def test_logits_are_minus_infinity_for_the_newest_page_and_behind_it(impl, length):
    cache = paged_cache([length], extra_columns=2)
    table = cache.block_table
    got = page_logits(
        normal(1, 1, 64, seed=1),
        records_of(cache, SummaryFormat()),
        table,
        ids(length),
        SummaryFormat(),
        impl=impl,
    )
    newest = max(0, -(-length // 16) - 1)
    assert got.shape == (1, 1, table.shape[1], 16)
    assert got[:, :, :newest].isfinite().all()
    assert (got[:, :, newest:] == -math.inf).all()


@by_impl
def test_scale_is_the_widths_root_unless_given(impl):
    args = case_of(SummaryFormat(), 112, 1).query_args
    assert torch.equal(page_logits(*args, impl=impl), page_logits(*args, scale=112**-0.5, impl=impl))
    assert not torch.equal(page_logits(*args, impl=impl), page_logits(*args, scale=0.2, impl=impl))


@by_impl
def test_a_length_above_the_tables_room_counts_as_the_room(impl):
    q, records, table, _, fmt = case_of(SummaryFormat(), 64, 1).query_args
    want = page_logits(q, records, table[:, :3], ids(48), fmt, impl=impl)
    assert torch.equal(page_logits(q, records, table[:, :3], ids(1000), fmt, impl=impl), want)


@pytest.mark.parametrize("block_n", [16, 32])
def test_every_launch_shape_gives_the_same_logits(block_n):
    """More pages than one tile holds."""
    args = case_of(SummaryFormat(), 64, 2, pages=19).query_args
    want = reference.page_logits(*args, scale=0.2)
    got = logits_op.logits(*args, scale=0.2, config=KernelConfig(block_n=block_n, num_warps=4))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert got.device.type == DEVICE


@by_impl
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_query_that_is_not_finite_has_no_finite_logit_and_its_neighbours_keep_theirs(impl, bad):
    q, records, table, lens, fmt = case_of(SummaryFormat(), 64, 3).query_args
    want = page_logits(q, records, table, lens, fmt, impl=impl)
    q[0, 1, 5] = bad
    got = page_logits(q, records, table, lens, fmt, impl=impl)
    assert torch.equal(got[:, ::2], want[:, ::2])
    assert not got[:, 1].isfinite().any()
