"""What the analysis says a choice of pages keeps, its scores and its reconstructions, against the library."""

import attention
import pytest
import reconstruct
import spectra
import torch
import ways
from contexts import Rows
from torch import Tensor

from locks import PageList, SummaryFormat, reference
from locks.baselines import SharedBasis
from locks.selectors import Locks, Oracle, make_selector
from tests.helpers import generator, ids, listed, normal, paged_cache

D, HEADS, GROUP, PAGE, SCALE = 64, 2, 3, 16, 0.125


@pytest.fixture
def rows() -> Rows:
    """Three rows over one sequence's blocks, at different lengths, the last page of each a part of one."""
    cache = paged_cache([330], block=64, heads=HEADS, seed=3, extra_columns=0)
    k, v = (torch.where(x.isfinite(), x, 0) for x in (cache.k, cache.v))
    q = normal(3, HEADS * GROUP, D, seed=4)
    return Rows(q, k, v, cache.block_table.expand(3, -1), ids(297, 310, 330), SCALE)


def share_of(truth: attention.Exact) -> Tensor:
    return (truth.log_mass - truth.lse[..., None]).exp().double()


def test_exact_attention_is_the_references(rows):
    truth = attention.exact(rows, PAGE)
    dense = reference.dense_attention(rows.q, *rows.args, scale=SCALE)
    torch.testing.assert_close(truth.out.double(), dense.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(truth.lse.double(), dense.lse, rtol=1e-5, atol=1e-5)
    scores = Oracle(PAGE).page_mass(rows.q, None, *rows.keys_args, scale=SCALE)
    torch.testing.assert_close(truth.scores.log_mass, scores.log_mass, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(truth.scores.total, scores.total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", [64, 128, 336])
def test_kept_counts_pages_by_hand(rows: Rows, budget: int):
    truth = attention.exact(rows, PAGE)
    best = attention.choose(truth.scores, rows, PAGE, budget)
    mass = Locks(SummaryFormat(rank=1), "torch")
    state = mass.allocate(rows.k_cache)
    mass.seal(state, *rows.keys_args)
    scores = mass.page_mass(rows.q, state, *rows.keys_args, scale=SCALE)
    pages = attention.choose(scores, rows, PAGE, budget)
    found = attention.kept(truth, rows, PAGE, pages, best)
    sparse = reference.sparse_attention(rows.q, *rows.args, pages, page=PAGE, scale=SCALE)
    dense = reference.dense_attention(rows.q, *rows.args, scale=SCALE)
    torch.testing.assert_close(
        found["mass"].double(), (sparse.lse - dense.lse).exp().mean(1), rtol=1e-4, atol=1e-5
    )
    error = ((sparse.out - dense.out).norm(dim=-1) / dense.out.norm(dim=-1)).mean(1)
    torch.testing.assert_close(found["output_error"].double(), error, rtol=1e-3, atol=1e-5)
    share, m = share_of(truth), budget // PAGE
    for b, length in enumerate(rows.seq_lens.tolist()):
        able = range(1, -(-length // PAGE) - 1)
        heavy = [(h, p) for h in range(HEADS * GROUP) for p in able if share[b, h, p] >= 1 / m]
        mine = {h: set(listed(pages, b, h)) for h in range(HEADS)}
        oracle = {h: set(listed(best, b, h)) & set(able) for h in range(HEADS)}
        got = sum(p in mine[h // GROUP] for h, p in heavy) / len(heavy) if heavy else float("nan")
        assert float(found["carriers"][b]) == pytest.approx(got, nan_ok=True)
        both = sum(len(mine[h] & oracle[h]) for h in oracle) / sum(map(len, oracle.values()))
        assert float(found["overlap"][b]) == pytest.approx(both)
        held = sum(float(share[b, h, p]) for h in range(HEADS * GROUP) for p in able if p in mine[h // GROUP])
        most = sum(
            float(share[b, h, p]) for h in range(HEADS * GROUP) for p in able if p in oracle[h // GROUP]
        )
        assert float(found["of_oracle"][b]) == pytest.approx(held / most, rel=1e-4)


def test_the_oracle_keeps_all_that_the_oracle_keeps(rows):
    truth = attention.exact(rows, PAGE)
    best = attention.choose(truth.scores, rows, PAGE, 96)
    found = attention.kept(truth, rows, PAGE, best, best)
    assert found["overlap"].tolist() == found["of_oracle"].tolist() == [1.0] * 3


@pytest.mark.parametrize("name", ["locks", "quest", "arkvale", "mean", "shared"])
@pytest.mark.parametrize("page", [16, 64])
def test_a_scorer_scores_as_the_selector_does(rows, name, page):
    fmt = SummaryFormat(page, 4)
    scorer = ways.Scorer(rows, rows.k_cache[0])
    found = scorer.mass(ways.Way(name, fmt, "cache" if name == "shared" else ""))
    selector = make_selector(name, fmt, D, impl="torch")
    # A shared basis is fitted to the row that is sealed first.
    state = selector.allocate(rows.k_cache)
    selector.seal(state, rows.k_cache, rows.block_table[:1], rows.seq_lens[:1])
    selector.seal(state, *rows.keys_args)
    wanted = selector.page_mass(rows.q, state, *rows.keys_args, scale=SCALE)
    torch.testing.assert_close(found.log_mass, wanted.log_mass, rtol=2e-3, atol=2e-3)


def test_exact_scores_of_the_keys_themselves_are_the_oracles(rows):
    scorer = ways.Scorer(rows)
    found = scorer.exact(scorer.k_cache.float(), PAGE)
    torch.testing.assert_close(
        found.log_mass, attention.exact(rows, PAGE).scores.log_mass, rtol=1e-5, atol=1e-5
    )


def pages_of(rank: int, page: int = 16, count: int = 7) -> Tensor:
    """[HEADS, count, page, D] of a mean and that many directions each."""
    shape = (HEADS, count)
    coef = torch.randn(*shape, page, rank, generator=generator(11))
    return coef @ torch.randn(*shape, rank, D, generator=generator(12)) + torch.randn(
        *shape, 1, D, generator=generator(13)
    )


def test_stored_keys_are_what_the_record_stands_for():
    pages, fine = pages_of(2), SummaryFormat(16, 4, 16, 16, 16)
    factors = spectra.page_factors(pages, 4)
    torch.testing.assert_close(reconstruct.stored_keys(pages, factors, fine), pages, rtol=0, atol=2e-3)
    coarse = reconstruct.stored_keys(pages, factors, SummaryFormat(16, 4))
    assert 1e-3 < float((coarse - pages).norm() / pages.norm()) < 0.2


@pytest.mark.parametrize("page_mean", [False, True])
@pytest.mark.parametrize("fmt", [SummaryFormat(16, 4), SummaryFormat(16, 8, 8, 8, 8), SummaryFormat(64, 2)])
def test_a_shared_basis_takes_the_bytes_of_a_record_or_less_than_a_rank_fewer(fmt, page_mean):
    pages = pages_of(3, fmt.page)
    found = reconstruct.shared_keys(pages, reconstruct.Fitted(pages), fmt, page_mean=page_mean)
    left = fmt.layout(D).nbytes - found.nbytes
    assert 0 <= left < fmt.page * fmt.coef_bits // 8 or found.rank == D


def test_a_shared_basis_as_wide_as_the_keys_loses_only_rounding():
    pages = pages_of(6)
    fmt = SummaryFormat(16, 8, 16, 16, 16)
    fitted = reconstruct.Fitted(pages)
    wide = SharedBasis(16, D, coef_bits=16, factors=fitted.quantised(D, page_mean=False))
    assert reconstruct.Fitted.matching_rank(fmt, D) < D
    assert float((reconstruct.decoded(pages, wide) - pages).norm() / pages.norm()) < 1e-2


def test_lists_become_masks():
    pages = PageList(ids([[0, 2, -1]]), ids([2]))
    assert attention.listed(pages, 4).tolist() == [[[True, False, True, False]]]
