"""The certificate: no bound is ever crossed, without any tolerance, and it reads nothing that was not kept."""

import math
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locks import (
    Decoded,
    SummaryFormat,
    api,
    decode,
    page_mass,
    page_share,
    reference,
    select_pages,
    sparse_attention,
    summarize,
    torch_impl,
)
from locks.format import rotate, unpack
from locks.pages import by_page, num_pages
from locks.types import Certificate
from tests.helpers import (
    DEVICE,
    IMPLS,
    SHARP,
    Cache,
    assert_same_pages,
    cases,
    decode_args,
    examples,
    generator,
    listed,
    normal,
    paged_cache,
    records_of,
    true_share,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)
FINITE = ("normal", "constant", "zeros", "low_rank", "huge")


def formats() -> Iterator[SummaryFormat]:
    """Every page and rank, and each part's bits with each of the others'."""
    shapes = [(page, rank) for page in (16, 32, 64) for rank in (1, 2, 4, 8, 16) if rank < page]
    bits = cycle(product((4, 8, 16), repeat=3))
    for page, rank in cycle(shapes):
        yield SummaryFormat(page, rank, *next(bits))


def tied(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Pages that differ in the last places only."""
    return torch.randn(*shape[:1], 1, *shape[2:], generator=gen) + 1e-4 * torch.randn(shape, generator=gen)


def low_rank(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    coef = torch.randn(*shape[:-1], 2, generator=gen)
    return coef @ torch.randn(*shape[:2], 2, shape[-1], generator=gen)


def constant(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return torch.randn(*shape[:2], 1, shape[-1], generator=gen).expand(shape).clone()


def opposite(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """A mean of 0 with keys far from it."""
    keys = 30 * torch.randn(shape, generator=gen)
    keys[:, :, 1::2] = -keys[:, :, ::2]
    return keys


def outlier_channel(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    keys = torch.randn(shape, generator=gen)
    keys[..., 3] += 300
    return keys


def one_huge_key(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    keys = torch.randn(shape, generator=gen)
    keys[:, ::3, 5] *= 3000
    return keys


def spikes(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Keys of one element each: no rank below P - 1 holds them."""
    keys = torch.zeros(shape)
    at = torch.randint(shape[-1], (*shape[:-1], 1), generator=gen)
    return keys.scatter(-1, at, 40.0)


KEYS = {
    "normal": lambda shape, gen: torch.randn(shape, generator=gen),
    "long": lambda shape, gen: 2000 * torch.randn(shape, generator=gen),
    "short": lambda shape, gen: 1e-6 * torch.randn(shape, generator=gen),
    "tied": tied,
    "low rank": low_rank,
    "constant": constant,
    "opposite": opposite,
    "outlier channel": outlier_channel,
    "one huge key": one_huge_key,
    "spikes": spikes,
    "uneven": lambda shape, gen: torch.randn(shape, generator=gen) * torch.logspace(2, -6, shape[-1]),
    "zeros": lambda shape, gen: torch.zeros(shape),
}


def one_pool(keys: Tensor, rows: int) -> Cache:
    """Every row sees the same pages, keys [heads, N, P, D], and a token behind them, the newest page."""
    _, n, page, _ = keys.shape
    k = torch.cat([keys.transpose(0, 1), torch.zeros_like(keys[:, :1]).transpose(0, 1)])
    table = torch.arange(n + 1, dtype=torch.int32).expand(rows, -1).contiguous()
    lengths = torch.full((rows,), n * page + 1, dtype=torch.int32)
    return Cache(k.to(DEVICE), torch.zeros_like(k).to(DEVICE), table.to(DEVICE), lengths.to(DEVICE))


def adversarial_queries(keys: Tensor, records: Tensor, fmt: SummaryFormat, count: int, seed: int) -> Tensor:
    """[count, heads, D] float64, half of them along what a record leaves of some key: none errs more."""
    gen = generator(seed)
    D = keys.shape[-1]
    page = unpack(records, fmt, D, torch.float64)
    left = keys.double() - page.mean[..., None, :] - page.coef @ page.basis
    # [heads, N, D]: each page's worst token.
    worst = left.norm(dim=-1).argmax(-1)[..., None, None].expand(*left.shape[:2], 1, D)
    left = left.gather(2, worst)[:, :, 0]
    left = torch.nn.functional.normalize(left, dim=-1) * D**0.5
    pick = torch.randint(left.shape[1], (count,), generator=gen)
    q = torch.randn(count, keys.shape[0], D, generator=gen, dtype=torch.float64)
    sign = torch.where(torch.rand(count, generator=gen) < 0.5, -1.0, 1.0)
    toward = left[:, pick.to(left.device)].transpose(0, 1).cpu() * sign[:, None, None]
    q = torch.where((torch.arange(count) % 2 == 0)[:, None, None], toward, q)
    return q * torch.logspace(-2, 1.5, count, dtype=torch.float64)[:, None, None]


def assert_intervals_hold(keys: Tensor, fmt: SummaryFormat, dtype: torch.dtype, impl: str, seed: int) -> int:
    """Every page's exact log-mass lies in its interval; returns how many (query, page) pairs were seen."""
    rows, group, heads, scale = 4, 16, len(keys), keys.shape[-1] ** -0.5
    limit = torch.finfo(dtype).max
    cache = one_pool(keys.clamp(-limit, limit).to(dtype), rows)
    records = summarize(*cache.keys_args, fmt, impl=impl)
    stored = cache.k[:-1].transpose(0, 1)
    q = adversarial_queries(stored, records[:-1, :, 0].transpose(0, 1), fmt, rows * group, seed)
    # [rows, heads * group, D]
    q = q.clamp(-limit, limit).to(dtype).unflatten(0, (rows, group)).transpose(1, 2).flatten(1, 2).to(DEVICE)
    args = (q, records, *cache.keys_args[1:], fmt)
    mass = page_mass(*args, scale=scale, impl=impl)
    low, high = torch_impl.page_interval(*args, mass.log_mass, scale=scale)
    logits = q.double().unflatten(1, (heads, group)) @ stored.double().flatten(1, 2).mT * scale
    exact = logits.unflatten(-1, stored.shape[1:3]).logsumexp(-1).flatten(1, 2)
    n = exact.shape[-1]
    assert (low[..., :n] <= exact).all()
    assert (exact <= high[..., :n]).all()
    assert low[..., n:].eq(-math.inf).all()
    assert high[..., n:].eq(math.inf).all()
    return exact.numel()


def test_a_million_exact_masses_lie_in_their_intervals():
    """Keys as stored, every kind, in every dtype; formats of every page, rank and bits."""
    pairs, every = 0, formats()
    kinds = product(KEYS, (torch.float32, torch.float16, torch.bfloat16))
    for seed, ((kind, dtype), fmt, D) in enumerate(zip(kinds, every, cycle((64, 80, 128)), strict=False)):
        keys = KEYS[kind]((2, 250, fmt.page, D), generator(seed))
        pairs += assert_intervals_hold(keys, fmt, dtype, "torch", seed)
    assert pairs >= 10**6


@pytest.mark.parametrize("kind", ["normal", "low rank", "one huge key", "uneven"])
def test_exact_masses_lie_in_the_intervals_of_kernels(kind):
    fmt = SummaryFormat(16, 4, 8, 4, 8)
    keys = KEYS[kind]((1, 6, 16, 64), generator(7))
    assert_intervals_hold(keys, fmt, torch.float16, "triton", 7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", list(KEYS))
def test_a_million_exact_masses_lie_in_the_intervals_of_kernels(kind, dtype):
    pairs = 0
    for seed, (fmt, D) in enumerate(zip(formats(), (64, 128, 256, 80), strict=False)):
        keys = KEYS[kind]((4, 1000, fmt.page, D), generator(seed))
        pairs += assert_intervals_hold(keys, fmt, dtype, "triton", seed)
    assert pairs >= 10**6


def assert_certificate_holds(q: Tensor, cache: Cache, got: Decoded, page: int, scale: float) -> Tensor:
    """No bound is crossed; returns which rows and heads keep all of their pages, [B, Hkv] bool."""
    proof, heads = got.certificate, cache.k.shape[1]
    assert isinstance(proof, Certificate)
    assert proof.share.dtype == proof.output_error.dtype == torch.float32
    assert proof.share.shape == proof.output_error.shape == (len(q), heads)
    whole = got.pages.counts == num_pages(cache.seq_lens, page)[:, None]
    assert proof.share[whole].eq(1).all()
    assert proof.output_error[whole].eq(0).all()
    part = ~whole
    assert (proof.share[part] < 1).all()
    assert (proof.share[part] >= 0).all()
    assert (proof.share.double() <= true_share(q, cache, got.pages, page, scale))[part].all()
    dense = reference.dense_attention(q, *cache.args, scale=scale).out
    error = (got.out.double() - dense).unflatten(1, (heads, -1))
    for b in range(len(q)):
        values = reference.row_tokens(cache.v, cache.block_table, cache.seq_lens, b).double()
        for p in (1, 2, math.inf):
            longest = values.norm(p, dim=-1).amax(-1) if values.shape[1] else values.new_zeros(heads)
            worst = error[b].norm(p, dim=-1).amax(-1)
            assert (worst <= proof.output_error[b].double() * longest)[part[b]].all()
    return whole


@by_impl
@given(
    case=cases(patterns=FINITE),
    places=st.integers(1, 4),
    mode=st.sampled_from(({}, {"coverage": 0.9}, {"coverage_certified": 0.5})),
)
@examples(12)
def test_no_bound_is_crossed(impl, case, places, mode):
    got = decode(
        *decode_args(case.q, case.cache, case.fmt),
        budget=(1 + case.window_pages + places) * case.fmt.page,
        scale=case.scale,
        window_pages=case.window_pages,
        certificate=True,
        impl=impl,
        **mode,
    )
    assert_certificate_holds(case.q, case.cache, got, case.fmt.page, case.scale)


@by_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("strength", [0.01, 1.0, 5.0, 300.0])
def test_no_bound_is_crossed_where_it_says_much(impl, dtype, strength):
    """Sharp records: shares from nothing to all but 2**-23, and logits of up to thousands."""
    cache = paged_cache([420, 333], heads=2, dtype=dtype, pattern="low_rank")
    q = strength * normal(2, 6, 64, seed=3, dtype=dtype)
    args = decode_args(q, cache, SHARP)
    got = decode(*args, budget=160, certificate=True, impl=impl)
    assert got.certificate is not None
    assert not assert_certificate_holds(q, cache, got, 16, 0.125).any()
    truth = true_share(q, cache, got.pages, 16, 0.125)
    odds = truth / (1 - truth)
    bound = got.certificate.share.double() / (1 - got.certificate.share.double())
    # What is lost is at most doubled by rounding and residual where logits are tens.
    if strength <= 5:
        assert (bound >= 0.5 * odds).all()


@by_impl
def test_a_certificate_is_the_references_less_rounding(impl):
    cache = paged_cache([420, 333, 0, 7, 64], heads=2, pattern="low_rank")
    q = 2 * normal(5, 6, 64, seed=3)
    args = decode_args(q, cache, SHARP)
    got = decode(*args, budget=160, certificate=True, impl=impl)
    want = reference.decode(*args, budget=160, scale=0.125, certificate=True)
    assert got.certificate is not None
    assert want.certificate is not None
    assert_same_pages(got.pages, want.pages)
    assert (got.certificate.share.double() <= want.certificate.share).all()
    assert (got.certificate.output_error.double() >= want.certificate.output_error).all()
    torch.testing.assert_close(got.certificate.share.double(), want.certificate.share, rtol=0, atol=2e-3)
    torch.testing.assert_close(
        got.certificate.output_error.double(), want.certificate.output_error, rtol=0, atol=1e-2
    )


@pytest.mark.parametrize(
    ("fmt", "strength"),
    [
        (SHARP, 0.01),
        (SHARP, 1.0),
        (SHARP, 10.0),
        (SHARP, 100.0),
        (SummaryFormat(), 0.3),
        (SummaryFormat(), 1.0),
    ],
)
def test_the_kernels_certificate_is_pytorchs_less_its_own_sums_rounding(fmt, strength):
    """Given one log-mass and one lse. What keys' sizes allow for is all of the error where logits are tens."""
    cache = paged_cache([420, 333], heads=2, pattern="low_rank")
    q = strength * normal(2, 6, 64, seed=3)
    records, table = records_of(cache, fmt), cache.keys_args[1:]
    mass = page_mass(q, records, *table, fmt, impl="torch")
    share = page_share(mass, 2, impl="torch")
    pages = select_pages(share, cache.seq_lens, page=16, budget=160, impl="torch")
    lse = sparse_attention(q, *cache.args, pages, page=16, impl="torch").lse
    args = (q, cache.k, records, *table, fmt, mass.log_mass, pages, lse)
    want, got = (api.load_impl(impl).certify(*args, scale=0.125) for impl in IMPLS)
    # Both end in a rounding to float32.
    assert (got.share - want.share <= 2**-24).all()
    assert (got.share - want.share >= -1e-5).all()
    assert (got.output_error >= want.output_error * (1 - 2**-23)).all()
    assert (got.output_error <= want.output_error * (1 + 3e-5)).all()


@pytest.mark.parametrize("part", ["mean", "basis"])
def test_the_sizes_of_a_records_parts_bound_its_keys_and_no_more(part):
    """Keys whose rotated elements are all of one size: no vector of such codes is longer."""
    flat = rotate(torch.ones(64))
    signs = torch.ones(16, 1) if part == "mean" else torch.tensor([1.0, -1.0]).repeat(8)[:, None]
    cache = one_pool((100 * signs * flat).expand(1, 3, -1, -1), 1)
    records = summarize(*cache.keys_args, SHARP, impl="torch")
    _, norm, size = torch_impl._numbers(records, cache.block_table, SHARP, 64)
    longest = float((100 * flat).double().norm())
    assert (size + norm >= longest)[..., :3].all()
    assert (size + norm <= 1.02 * longest)[..., :3].all()


def test_of_a_group_the_worst_head_counts():
    cache = paged_cache([420, 333], heads=1, pattern="low_rank")
    q = 2 * normal(2, 3, 64, seed=3)
    records = records_of(cache, SHARP)
    rest = (*cache.keys_args[1:], SHARP)
    got = decode(q, cache.k, cache.v, records, *rest, budget=160, certificate=True, impl="torch")
    assert got.certificate is not None
    each = []
    for g in range(3):
        head = q[:, g : g + 1]
        log_mass = page_mass(head, records, *rest, impl="torch").log_mass
        lse = got.lse[:, g : g + 1]
        each.append(torch_impl.certify(head, cache.k, records, *rest, log_mass, got.pages, lse, scale=0.125))
    torch.testing.assert_close(
        got.certificate.share, torch.stack([x.share for x in each]).amin(0), rtol=0, atol=1e-6
    )
    assert len({round(float(x.share[0, 0]), 4) for x in each}) == 3


@by_impl
def test_a_marked_page_that_is_not_kept_leaves_nothing_certain(impl):
    cache = paged_cache([200], pattern="normal")
    records = records_of(cache, SHARP)
    for page in (3, 5, 6):
        cache.k[cache.block_table[0, page].long(), 0, 2, 1] = math.nan
    records = summarize(*cache.keys_args, SHARP, impl="torch", out=records)
    args = (normal(1, 2, 64, seed=1), cache.k, cache.v, records, *cache.keys_args[1:], SHARP)
    modes: tuple[dict[str, Any], ...] = ({}, {"coverage": 0.01}, {"coverage_certified": 0.01})
    for mode in modes:
        got = decode(*args, budget=64, certificate=True, impl=impl, **mode)
        assert listed(got.pages) == [0, 3, 5, 12]
        assert got.certificate is not None
        assert got.certificate.share.tolist() == [[0.0]]
        # With room for them they are kept even where the rest would do.
        got = decode(*args, budget=160, impl=impl, **mode)
        assert {3, 5, 6} <= set(listed(got.pages))


@by_impl
def test_a_residual_too_large_to_store_leaves_nothing_certain(impl):
    """float32 keys whose residual norm exceeds the largest bfloat16 have that one stored."""
    fmt = SummaryFormat(rank=1)
    cache = paged_cache([100], D=256)
    cache.k.copy_(torch.where(cache.k < 0, -1e38, 1e38))
    records = records_of(cache, fmt)
    q = 2e-38 * normal(1, 1, 256, seed=1)
    args = (q, cache.k, cache.v, records, *cache.keys_args[1:], fmt)
    got = decode(*args, budget=48, certificate=True, impl=impl)
    assert got.certificate is not None
    assert got.certificate.share.tolist() == [[0.0]]
    assert decode(*args, budget=112, certificate=True, impl=impl).certificate == (1, 0)


@by_impl
def test_an_old_record_in_the_newest_pages_place_is_not_read(impl):
    cache = paged_cache([100], pattern="low_rank")
    records = records_of(cache, SHARP)
    args = (normal(1, 2, 64, seed=1), cache.k, cache.v, records, *cache.keys_args[1:], SHARP)
    want = decode(*args, budget=64, certificate=True, impl=impl).certificate
    records[cache.block_table[0, 6].long()] = 0x7F
    assert decode(*args, budget=64, certificate=True, impl=impl).certificate == want


@by_impl
def test_a_residual_that_may_be_cut_off_at_the_largest_number_is_not_taken_for_it(impl):
    """Where all else in the record is small."""
    cache, at = paged_cache([100], pattern="low_rank"), SHARP.layout(64)
    records = records_of(cache, SHARP)
    records[..., at.residual_norm : at.residual_norm + 2] = 0x7F
    args = (1e-38 * normal(1, 1, 64, seed=1), cache.k, cache.v, records, *cache.keys_args[1:], SHARP)
    got = decode(*args, budget=48, certificate=True, impl=impl)
    want = reference.decode(*args, budget=48, scale=0.125, certificate=True)
    for proof in (got.certificate, want.certificate):
        assert proof is not None
        assert proof.share.tolist() == [[0.0]]


@by_impl
def test_a_row_is_certified_and_covered_as_it_is_alone(impl):
    """In a ragged batch, with a wider table, among rows of length 0."""
    cache = paged_cache([420, 0, 900, 333], heads=2, pattern="low_rank", extra_columns=9)
    q = 2 * normal(4, 6, 64, seed=3)
    records = records_of(cache, SHARP)
    options: dict[str, Any] = {"budget": 320, "certificate": True, "impl": impl}
    modes: tuple[dict[str, Any], ...] = ({"coverage": 0.6}, {"coverage_certified": 0.6})
    for mode in modes:
        got = decode(q, cache.k, cache.v, records, *cache.keys_args[1:], SHARP, **options, **mode)
        assert got.certificate is not None
        for b in range(4):
            row = cache.row(b)
            width = max(1, -(-int(row.seq_lens[0]) // 16))
            alone = decode(
                q[b : b + 1],
                row.k,
                row.v,
                records,
                row.block_table[:, :width].contiguous(),
                row.seq_lens,
                SHARP,
                **options,
                **mode,
            )
            assert alone.certificate is not None
            assert alone.pages.page_ids.tolist() == got.pages.page_ids[b : b + 1].tolist()
            for mine, other in zip(alone.certificate, got.certificate, strict=True):
                if impl == "triton":
                    assert mine.tolist() == other[b : b + 1].tolist()
                # A product of matrices may add in another order at another size.
                torch.testing.assert_close(mine, other[b : b + 1], rtol=0, atol=1e-4)


@by_impl
@pytest.mark.parametrize("mode", ["coverage", "coverage_certified"])
def test_no_unread_key_or_value_is_touched(impl, mode):
    cache = paged_cache([420], pattern="low_rank")
    q = 3 * normal(1, 3, 64, seed=3)
    records = records_of(cache, SHARP)
    options: dict[str, Any] = {"budget": 320, "certificate": True, "impl": impl, mode: 0.8}
    before = decode(q, *cache.args[:2], records, *cache.keys_args[1:], SHARP, **options)
    kept = listed(before.pages)
    assert len(kept) < 20
    for page in set(range(27)) - set(kept):
        block = cache.block_table[0, page].long()
        by_page(cache.k, 16)[block] = math.nan
        by_page(cache.v, 16)[block] = math.nan
    after = decode(q, *cache.args[:2], records, *cache.keys_args[1:], SHARP, **options)
    assert_same_pages(after.pages, before.pages)
    assert torch.equal(after.out, before.out)
    assert after.certificate is not None
    assert before.certificate is not None
    assert torch.equal(after.certificate.share, before.certificate.share)
    assert torch.equal(after.certificate.output_error, before.certificate.output_error)


@by_impl
def test_nothing_is_certified_for_no_rows_and_for_a_table_without_columns(impl):
    cache = paged_cache([40])
    records = records_of(cache, SHARP)
    for rows, columns in ((0, 3), (2, 0)):
        q = normal(rows, 2, 64, seed=1)
        table = torch.zeros(rows, columns, dtype=torch.int32, device=DEVICE)
        lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        args = (q, cache.k, cache.v, records, table, lengths, SHARP)
        got = decode(*args, budget=48, coverage=0.5, certificate=True, impl=impl)
        assert got.certificate is not None
        assert got.certificate.share.tolist() == [[1.0]] * rows
        assert got.certificate.output_error.tolist() == [[0.0]] * rows


def test_no_certificate_is_made_unless_asked_for():
    cache = paged_cache([200])
    args = decode_args(normal(1, 2, 64, seed=1), cache, SHARP)
    assert decode(*args, budget=48).certificate is None
    assert reference.decode(*args, budget=48, scale=0.125).certificate is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [{}, {"coverage": 0.8}, {"coverage_certified": 0.8}])
@by_impl
def test_a_certified_step_can_be_captured_in_a_graph(impl, mode):
    cache = paged_cache([4000, 900, 0], heads=2, pattern="low_rank", dtype=torch.bfloat16)
    records = records_of(cache, SHARP)
    q = 2 * normal(3, 8, 64, seed=3, dtype=torch.bfloat16)
    args = (q, cache.k, cache.v, records, *cache.keys_args[1:], SHARP)
    options: dict[str, Any] = {"budget": 1024, "certificate": True, "impl": impl, **mode}
    decode(*args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(*args, **options)
    q.copy_(2 * normal(3, 8, 64, seed=4, dtype=torch.bfloat16))
    graph.replay()
    want = decode(*args, **options)
    assert_same_pages(got.pages, want.pages)
    assert torch.equal(got.out, want.out)
    assert got.certificate is not None
    assert want.certificate is not None
    assert torch.equal(got.certificate.share, want.certificate.share)
    assert_certificate_holds(q, cache, got, 16, 0.125)


def test_no_bound_is_crossed_on_a_models_keys():
    """SmolLM2 on a thousand tokens of prose: all layers, the questions' steps."""
    pytest.importorskip("transformers")
    from locks import hf
    from locks.models import SetupError, load_smollm2
    from locks.needles import build_needles

    try:
        model, tokenizer = load_smollm2(dtype=torch.float32, device=DEVICE)
    except SetupError as missing:
        pytest.skip(str(missing))
    task = build_needles(tokenizer, tokens=1000, needles=2)
    seen = []

    def certify(step: hf.Step) -> None:
        layer = step.layer
        args = (step.q, layer.k_cache, layer.v_cache, layer.state, layer.table, layer.seq_lens, fmt)
        got = decode(*args, budget=256, scale=step.scale, certificate=True, impl="torch")
        rows = Cache(layer.k_cache, layer.v_cache, layer.table, layer.seq_lens)
        assert_certificate_holds(step.q, rows, got, fmt.page, step.scale)
        seen.append(step.layer_idx)

    for fmt in (SummaryFormat(), SummaryFormat(16, 8, 16, 16, 16)):
        config = hf.LocksConfig(budget=256, fmt=fmt, on_step=certify)
        hf.enable(model, config)
        with torch.inference_mode():
            ids = torch.tensor([task.context_ids + task.questions[0].question_ids[:2]], device=DEVICE)
            cache = hf.PagedCache(model.config, config)
            model(ids[:, :-2], **hf.cache_argument(model, cache), logits_to_keep=1)
            for at in (-2, -1):
                model(ids[:, at:][:, :1], **hf.cache_argument(model, cache))
        hf.disable(model)
    layers = list(range(model.config.num_hidden_layers))
    assert seen == layers * 4
