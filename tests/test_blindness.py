"""A sketch that is fixed before a page is seen misses the page that holds the mass; a page's own basis finds it.

The numbers to the theorem `fixed_sketch_misses`: N caches of equal sketches, in the n-th of which page n alone is
moved along a direction that the sketch does not see, so that it holds nearly all of a query's mass.
"""

import pytest
import torch
from torch import Tensor

from locks import api, reference
from locks.baselines import SharedBasis, SharedFactors, fit_shared
from locks.format import SummaryFormat
from locks.selectors import Locks, Selector
from tests.helpers import Cache, generator, listed, paged_cache

D, PAGE, N, BUDGET, SCALE = 64, 16, 32, 128, 0.125
FMT = SummaryFormat()


def offline_basis() -> SharedFactors:
    """Fitted to other keys of the same distribution, at the bytes of a page-local record."""
    keys = torch.randn(1, 4000, D, generator=generator(1)) * torch.logspace(0.5, -1, D)
    return fit_shared(keys, SharedBasis.matching(FMT, D).rank)


def unseen(factors: SharedFactors, q: Tensor) -> Tensor:
    """The unit vector nearest to q that no basis vector sees, [D] float64."""
    basis = factors.basis[0].double()
    seen = torch.linalg.lstsq(basis.T, q.double()[:, None]).solution
    left = q.double() - (basis.T @ seen)[:, 0]
    assert (basis @ left).abs().max() < 1e-12
    return left / left.norm()


def kept_pages(selector: Selector, q: Tensor, cache: Cache) -> list[int]:
    """The pages that a selector keeps within the budget."""
    state = selector.allocate(cache.k)
    selector.seal(state, *cache.keys_args)
    mass = selector.page_mass(q, state, *cache.keys_args, scale=SCALE)
    share = api.page_share(mass, 1, impl="torch")
    pages = api.select_pages(share, cache.seq_lens, page=PAGE, budget=BUDGET, impl="torch")
    return listed(pages)


def moved(cache: Cache, n: int, step: Tensor) -> Cache:
    """The cache with every key of page n moved by a step."""
    k = cache.k.clone()
    k[cache.block_table[0, n].long()] += step
    return Cache(k, *cache.args[1:])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shared_sketch_misses_every_heavy_page_and_page_local_summaries_find_each(seed):
    cache = paged_cache([N * PAGE + 1], seed=seed)
    q = torch.randn(1, 1, D, generator=generator(seed + 10)).to(cache.k.device)
    factors = SharedFactors(*(x.to(cache.k.device) for x in offline_basis()))
    u = unseen(factors, q[0, 0])
    # Twelve nats above any other key.
    top = float((SCALE * reference.row_tokens(*cache.keys_args, 0)[0].double() @ q[0, 0].double()).max())
    step = (2 * top + 12) / (SCALE * float(u @ q[0, 0].double())) * u
    shared = SharedBasis.matching(FMT, D)
    shared = SharedBasis(PAGE, shared.rank, coef_bits=shared.coef_bits, factors=factors)
    before = kept_pages(shared, q, cache)
    assert len(before) == BUDGET // PAGE
    missed = found = 0
    for n in range(N):
        heavy = moved(cache, n, step)
        logits = SCALE * reference.row_tokens(*heavy.keys_args, 0)[0].double() @ q[0, 0].double()
        # The page behind the last full one holds a lone token.
        assert logits.softmax(0)[n * PAGE : (n + 1) * PAGE].sum() > 1 - 1e-3
        # The sketch is what it was, so the choice is.
        assert kept_pages(shared, q, heavy) == before
        if n not in before:
            missed += n not in kept_pages(shared, q, heavy)
        found += n in kept_pages(Locks(FMT, "torch"), q, heavy)
    # All but the pages that it keeps in every cache; the last of the list is the lone token's.
    assert missed == N - (len(before) - 1)
    assert found == N
