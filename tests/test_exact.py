"""Exact page mass against the reference, and the oracle that ranks by it: one scan, on either implementation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locks import reference, torch_impl, triton_impl
from locks.format import PAGES
from locks.kernels import exact
from locks.kernels.config import KernelConfig
from locks.selectors import Oracle, make_selector
from tests.helpers import (
    DEVICE,
    DTYPES,
    IMPLS,
    LAYOUTS,
    PATTERNS,
    Cache,
    assert_close_as_torch,
    edge_lengths,
    examples,
    normal,
    paged_cache,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)


@by_impl
@examples(15)
@given(
    data=st.data(),
    page=st.sampled_from(PAGES),
    per_block=st.sampled_from((1, 3, 4)),
    heads=st.sampled_from((1, 2)),
    group=st.sampled_from((1, 3, 4, 8)),
    width=st.sampled_from((64, 80, 128)),
    dtype=st.sampled_from(DTYPES),
    pattern=st.sampled_from(PATTERNS),
    layout=st.sampled_from(LAYOUTS),
    window_pages=st.sampled_from((1, 3)),
)
def test_the_oracle_s_masses_are_the_reference_s(
    impl: str,
    data: st.DataObject,
    page: int,
    per_block: int,
    heads: int,
    group: int,
    width: int,
    dtype: torch.dtype,
    pattern: str,
    layout: str,
    window_pages: int,
) -> None:
    lengths = data.draw(st.lists(edge_lengths(page), min_size=1, max_size=3))
    cache = paged_cache(
        lengths,
        page=page,
        block=page * per_block,
        heads=heads,
        D=width,
        dtype=dtype,
        pattern=pattern,
        layout=layout,
        seed=1,
    )
    q = normal(len(lengths), heads * group, width, seed=2, dtype=dtype)
    options = {"scale": width**-0.5, "window_pages": window_pages}
    got = Oracle(page, impl).page_mass(q, None, *cache.keys_args, **options)
    plain = reference.exact_page_mass(q, *cache.keys_args, page=page, dtype=torch.float32, **options)
    oracle = reference.exact_page_mass(q, *cache.keys_args, page=page, **options)
    # A sum of products may be larger on the way than at its end, but not than |q| |k|.
    keys = cache.k.double().nan_to_num(0, 0, 0).norm(dim=-1).max()
    terms = float(options["scale"] * q.double().norm(dim=-1).max() * keys)
    assert_close_as_torch(got.log_mass, plain.log_mass, oracle.log_mass, terms=terms)
    assert_close_as_torch(got.total, plain.total, oracle.total, terms=terms)


# A chunk and a page more, and two chunks to the page.
@pytest.mark.parametrize("pages", [exact.CHUNK + 2, 2 * exact.CHUNK + 1])
@pytest.mark.parametrize("config", [None, KernelConfig(1, 4), KernelConfig(exact.CHUNK, 4)])
def test_rows_of_several_chunks_and_tiles_of_every_size(pages: int, config: KernelConfig | None) -> None:
    cache = paged_cache([16 * pages - 3, 40], heads=2, D=64, block=64)
    q = normal(2, 8, 64, seed=1)
    got = exact.exact(q, *cache.keys_args, page=16, scale=0.3, window_pages=2, config=config)
    want = reference.exact_page_mass(q, *cache.keys_args, page=16, scale=0.3, window_pages=2)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_float32_is_not_rounded_to_fewer_bits() -> None:
    """Keys that differ from one page to the next in their last bits alone."""
    step = 2.0**-20
    k = torch.full((4, 1, 16, 64), 1.0, device=DEVICE)
    k += step * torch.arange(4, device=DEVICE)[:, None, None, None]
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    lens = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    q = torch.ones(1, 1, 64, device=DEVICE)
    mass = Oracle(16, "triton").page_mass(q, None, k, table, lens, scale=1.0).log_mass[0, 0, :3]
    rise = (mass[1:] - mass[:-1]).cpu()
    # A step is 8 times the distance of floats of this size.
    torch.testing.assert_close(rise, torch.full((2,), 64 * step), rtol=0, atol=2.0**-17)
    assert (rise > 0).all()


def edge(cache: Cache, scale: float, q: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    return Oracle(16, impl).page_mass(q, None, *cache.keys_args, scale=scale)


@by_impl
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale_is_a_scale(impl: str, scale: float) -> None:
    cache, q = paged_cache([100, 20], D=64), normal(2, 3, 64, seed=1)
    want = reference.exact_page_mass(q, *cache.keys_args, page=16, scale=scale)
    for one, other in zip(edge(cache, scale, q, impl), want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@by_impl
def test_logits_beyond_the_largest_float_are_no_nan(impl: str) -> None:
    cache, q = paged_cache([112], D=64), torch.ones(1, 1, 64, device=DEVICE)
    for page, value in ((2, 3e38), (4, -3e38)):
        cache.k[cache.block_table[0, page], 0] = value
    log_mass, total = edge(cache, 0.5, q, impl)
    assert log_mass[0, 0, 2] == math.inf
    assert log_mass[0, 0, 4] == -math.inf
    torch.testing.assert_close(total[0, 0], log_mass[0, 0, [1, 3, 5]].logsumexp(-1))


@by_impl
@pytest.mark.parametrize("rows", [0, 2])
def test_nothing_to_score(impl: str, rows: int) -> None:
    cache = paged_cache([0] * rows, D=64, extra_columns=2 * (rows == 0))
    log_mass, total = edge(cache, 1.0, normal(rows, 3, 64, seed=1), impl)
    assert log_mass.shape == (rows, 3, cache.block_table.shape[1])
    assert total.tolist() == [[-math.inf] * 3] * rows


def test_the_oracle_runs_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name, module in (("triton", triton_impl), ("torch", torch_impl)):
        run = module.exact_page_mass

        def seen(*args, name=name, run=run, **more):
            asked.append(name)
            return run(*args, **more)

        monkeypatch.setattr(module, "exact_page_mass", seen)
    cache, q = paged_cache([40], D=64), normal(1, 1, 64, seed=1)
    for impl in ("triton", "torch", None):
        make_selector("oracle", impl=impl).page_mass(q, None, *cache.keys_args, scale=1.0)
    assert asked == ["triton", "torch", "triton" if DEVICE == "cuda" else "torch"]


def test_what_is_refused_names_the_argument() -> None:
    cache, q = paged_cache([40], D=64), normal(1, 1, 64, seed=1)
    with pytest.raises(ValueError, match=r"page: expected one of \(16, 32, 64\), got 24"):
        Oracle(24)
    wrong = cache.k.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"k_cache: expected .*contiguous"):
        Oracle(16).page_mass(q, None, wrong, *cache.keys_args[1:], scale=1.0)
    with pytest.raises(TypeError, match="k_cache: expected float16"):
        edge(cache, 1.0, q.half(), "torch")
    with pytest.raises(ValueError, match=r"impl: expected one of .* got 'cuda'"):
        edge(cache, 1.0, q, "cuda")
    config = KernelConfig(2 * exact.CHUNK, 4)
    with pytest.raises(ValueError, match=r"config: block_n: expected at most 64 pages, got 128"):
        exact.exact(q, *cache.keys_args, page=16, scale=1.0, window_pages=1, config=config)
