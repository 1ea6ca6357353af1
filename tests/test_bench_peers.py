"""The peer's kernel scores pages as the package's own baseline does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bench import peers
from locks.baselines import Quest
from locks.types import PageMass
from tests.helpers import DEVICE, DTYPES, PATTERNS, examples, normal, paged_cache

SCALE = 0.25


def assert_same(got: PageMass, want: PageMass) -> None:
    for a, b in zip(got, want, strict=True):
        # Rounding of float32 sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


lengths = st.lists(st.integers(0, 200), min_size=1, max_size=3)


@examples(12)
@given(
    lens=lengths,
    group=st.sampled_from([1, 3, 8]),
    width=st.sampled_from([64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    pattern=st.sampled_from(PATTERNS),
    per_block=st.sampled_from([1, 3, 4]),
    window_pages=st.sampled_from([1, 3]),
)
@example(lens=[1200, 16], group=4, width=64, dtype=torch.float16, pattern="nan", per_block=4, window_pages=1)
def test_the_scan_is_the_baseline(
    lens: list[int],
    group: int,
    width: int,
    dtype: torch.dtype,
    pattern: str,
    per_block: int,
    window_pages: int,
) -> None:
    cache = paged_cache(
        lens, heads=2, D=width, block=16 * per_block, page=16, dtype=dtype, pattern=pattern, seed=1
    )
    q = normal(len(lens), 2 * group, width, seed=2, dtype=dtype).to(DEVICE)
    options = {"scale": SCALE, "window_pages": window_pages}
    quest = Quest(16)
    state = quest.allocate(cache.k)
    quest.seal(state, cache.k, cache.block_table, cache.seq_lens)
    want = quest.page_mass(q, state, cache.k, cache.block_table, cache.seq_lens, **options)
    assert_same(peers.quest_mass(q, state, cache.block_table, cache.seq_lens, page=16, **options), want)


def test_a_scale_that_is_not_above_0_is_refused() -> None:
    cache = paged_cache([40], heads=1, D=64, block=16, page=16, dtype=torch.float16, seed=1)
    q = normal(1, 1, 64, seed=2, dtype=torch.float16).to(DEVICE)
    quest = Quest(16)
    state = quest.allocate(cache.k)
    with pytest.raises(ValueError, match=r"scale: expected one above 0, got -1\.0"):
        peers.quest_mass(q, state, cache.block_table, cache.seq_lens, page=16, scale=-1.0)
