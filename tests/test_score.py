"""Page mass: its formula, which pages get one, what the total counts, and that rows are independent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locks import SummaryFormat, page_logits, page_mass, reference, torch_impl
from locks.kernels import score as score_op
from locks.kernels.config import KernelConfig
from locks.kernels.dependent import dependent
from tests.helpers import (
    DEVICE,
    IMPLS,
    PAIRS,
    Case,
    assert_close_as_torch,
    cases,
    examples,
    formats,
    generator,
    ids,
    normal,
    paged_cache,
    records_of,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)
DEFAULT = SummaryFormat()


def assert_mass_is_the_references(case: Case, impl: str) -> None:
    args, options = case.query_args, {"scale": case.scale, "window_pages": case.window_pages}
    mass = page_mass(*args, impl=impl, **options)
    plain = reference.page_mass(*args, dtype=torch.float32, **options)
    oracle = reference.page_mass(*args, **options)
    logits = reference.page_logits(*args, scale=case.scale)
    terms = float(logits.nan_to_num(0, 0, 0).abs().amax()) if logits.numel() else 0.0
    assert mass.log_mass.dtype == mass.total.dtype == torch.float32
    assert_close_as_torch(mass.log_mass, plain.log_mass, oracle.log_mass, terms=terms)
    assert_close_as_torch(mass.total, plain.total, oracle.total, terms=terms)


def one_row(pages: int, *, heads: int = 1, group: int = 2, D: int = 64, fmt=DEFAULT, seed=0, **kwargs):
    """A row of that many full pages and one token more: every full page is scored."""
    cache = paged_cache([pages * fmt.page + 1], page=fmt.page, heads=heads, D=D, seed=seed, **kwargs)
    q = normal(1, heads * group, D, seed=seed + 1, dtype=cache.k.dtype)
    return q, records_of(cache, fmt), cache.block_table, cache.seq_lens, fmt


def set_variance(records: torch.Tensor, fmt: SummaryFormat, D: int, value: float) -> torch.Tensor:
    """The same records with another residual variance (a number that bfloat16 holds)."""
    at = fmt.layout(D).variance
    records = records.clone()
    number = torch.tensor([value], dtype=torch.bfloat16, device=records.device).view(torch.uint8)
    records[..., at : at + 2] = number
    return records


@by_impl
@given(case=cases())
@examples(8)
def test_mass_and_total_are_the_references(impl, case):
    assert_mass_is_the_references(case, impl)


@by_impl
@pytest.mark.parametrize(
    ("fmt", "D", "group", "heads", "window_pages"),
    [
        (SummaryFormat(16, 1, 4, 16, 8), 64, 5, 2, 1),
        (SummaryFormat(16, 8, 8, 4, 4), 128, 16, 1, 2),
        (SummaryFormat(32, 2, 16, 8, 16), 80, 3, 2, 3),
        (SummaryFormat(64, 4, 8, 8, 4), 192, 7, 1, 1),
        (SummaryFormat(32, 16, 8, 4, 8), 96, 1, 1, 1),
    ],
)
def test_mass_is_the_references_at_chosen_shapes(impl, fmt, D, group, heads, window_pages):
    cache = paged_cache([5 * fmt.page + 3, 2 * fmt.page], page=fmt.page, block=2 * fmt.page, heads=heads, D=D)
    q = normal(2, heads * group, D, seed=1)
    assert_mass_is_the_references(Case(fmt, cache, q, D**-0.5, window_pages), impl)


@pytest.mark.gpu
@by_impl
@pytest.mark.parametrize(("group", "D"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mass_is_the_references_at_every_group_width_and_dtype(impl, group, D, dtype):
    cache = paged_cache([1000, 17, 0], heads=2, D=D, dtype=dtype)
    q = normal(3, 2 * group, D, seed=1, dtype=dtype)
    assert_mass_is_the_references(Case(DEFAULT, cache, q, D**-0.5, 1), impl)


@pytest.mark.gpu
@given(fmt=formats(), seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_mass_is_the_references_over_many_chunks(fmt, seed):
    """Rows of the same twenty blocks over and over."""
    cache = paged_cache([20 * fmt.page], page=fmt.page, heads=2, seed=seed)
    table = cache.block_table[0, torch.arange(9000, device=DEVICE) % 20].expand(3, -1).contiguous()
    lens = ids(9000 * fmt.page, 65 * fmt.page, 64 * fmt.page + 1)
    args = (normal(3, 8, 64, seed=seed + 1), records_of(cache, fmt), table, lens, fmt)
    mass, oracle = page_mass(*args, impl="triton", scale=0.2), reference.page_mass(*args, scale=0.2)
    plain = reference.page_mass(*args, scale=0.2, dtype=torch.float32)
    assert_close_as_torch(mass.log_mass, plain.log_mass, oracle.log_mass, terms=8.0)
    assert_close_as_torch(mass.total, plain.total, oracle.total, terms=8.0)


@by_impl
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 33, 50])
def test_scored_are_the_pages_before_the_newest_and_no_other(impl, length):
    """Everything else is -inf, in a table wider than the row."""
    cache = paged_cache([length], extra_columns=3)
    mass = page_mass(
        normal(1, 2, 64, seed=1), records_of(cache, DEFAULT), *cache.keys_args[1:], DEFAULT, impl=impl
    )
    newest = max(0, -(-length // 16) - 1)
    assert mass.log_mass[..., :newest].isfinite().all()
    assert (mass.log_mass[..., newest:] == -math.inf).all()
    assert mass.log_mass.shape == (1, 2, cache.block_table.shape[1])


@by_impl
@pytest.mark.parametrize("window_pages", [1, 2, 3, 5])
def test_total_counts_candidates_only(impl, window_pages):
    """Neither page 0 nor the newest pages, though those that have a record get a log-mass."""
    mass = page_mass(*one_row(5), window_pages=window_pages, impl=impl)
    # Six pages: 5 is the newest.
    assert mass.log_mass[..., :5].isfinite().all()
    want = mass.log_mass[..., 1 : 6 - window_pages].double().logsumexp(-1)
    torch.testing.assert_close(mass.total.double(), want, rtol=1e-6, atol=1e-6)
    assert (want == -math.inf).all() == (window_pages == 5)


@by_impl
def test_total_does_not_change_with_page_0(impl):
    q, records, table, lens, fmt = one_row(4)
    before = page_mass(q, records, table, lens, fmt, impl=impl)
    records[table[0, 0]] = records[table[0, 1]]
    after = page_mass(q, records, table, lens, fmt, impl=impl)
    assert torch.equal(before.total, after.total)
    assert torch.equal(after.log_mass[..., 0], after.log_mass[..., 1])
    assert not torch.equal(before.log_mass[..., 0], after.log_mass[..., 0])


@by_impl
@pytest.mark.parametrize("scale", [0.125, 0.5])
@pytest.mark.parametrize("variance", [2.0, 0.375])
def test_residual_term_is_half_scale_squared_times_q_squared_times_variance(impl, scale, variance):
    q, records, table, lens, fmt = one_row(3, group=3)
    without = page_mass(q, set_variance(records, fmt, 64, 0.0), table, lens, fmt, scale=scale, impl=impl)
    with_it = page_mass(q, set_variance(records, fmt, 64, variance), table, lens, fmt, scale=scale, impl=impl)
    term = 0.5 * scale**2 * q.double().square().sum(-1) * variance
    difference = (with_it.log_mass.double() - without.log_mass.double())[..., :3]
    torch.testing.assert_close(difference, term[..., None].expand(-1, -1, 3), rtol=1e-5, atol=1e-5)


@by_impl
def test_mass_without_residual_is_the_log_sum_exp_of_the_page_logits(impl):
    q, records, table, lens, fmt = one_row(3, fmt=SummaryFormat(32, 4))
    records = set_variance(records, fmt, 64, 0.0)
    logits = page_logits(q, records, table, lens, fmt, impl=impl).double()
    mass = page_mass(q, records, table, lens, fmt, impl=impl)
    torch.testing.assert_close(mass.log_mass.double(), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)


@by_impl
def test_scale_is_the_widths_root_unless_given(impl):
    q, records, table, lens, fmt = one_row(3, D=80)
    default = page_mass(q, records, table, lens, fmt, impl=impl)
    assert torch.equal(
        default.log_mass, page_mass(q, records, table, lens, fmt, scale=80**-0.5, impl=impl).log_mass
    )
    other = page_mass(q, records, table, lens, fmt, scale=0.3, impl=impl)
    assert not torch.equal(default.log_mass[..., :3], other.log_mass[..., :3])


@by_impl
@pytest.mark.parametrize("pattern", ["nan", "inf"])
def test_a_marked_page_is_infinite_and_left_out_of_the_total(impl, pattern):
    """Its own head alone; a query of zeros does not turn it into nan."""
    q, records, table, lens, fmt = one_row(5, heads=2, pattern=pattern)
    q[0, 1] = 0
    mass = page_mass(q, records, table, lens, fmt, impl=impl)
    marked = mass.log_mass == math.inf
    # Query heads 0 and 1 share the KV head whose page is marked.
    assert marked[0].sum(-1).tolist() == [1, 1, 0, 0]
    assert torch.equal(marked[0, 0], marked[0, 1])
    finite = torch.where(mass.log_mass.isfinite(), mass.log_mass, -math.inf)[..., 1:5].double()
    torch.testing.assert_close(mass.total.double(), finite.logsumexp(-1), rtol=1e-6, atol=1e-6)


@by_impl
def test_total_is_minus_infinity_where_every_candidate_is_marked(impl):
    q, records, table, lens, fmt = one_row(3)
    records = set_variance(records, fmt, 64, math.inf)
    mass = page_mass(q, records, table, lens, fmt, impl=impl)
    assert (mass.log_mass[..., :3] == math.inf).all()
    assert (mass.total == -math.inf).all()


@by_impl
def test_scores_of_large_float16_numbers_do_not_overflow(impl):
    """q . k is 2e7, the logit far above float16's 65,504."""
    cache = paged_cache([65], D=128, dtype=torch.float16)
    q = torch.full((1, 1, 128), 400.0, dtype=torch.float16, device=DEVICE)
    cache.k.copy_(torch.where(cache.k.isnan(), cache.k, cache.k.sign() * 20 + 400))
    assert_mass_is_the_references(Case(DEFAULT, cache, q, 128**-0.5, 1), impl)


@by_impl
def test_logits_far_apart_in_one_page_do_not_overflow(impl):
    """exp of the largest logit is infinite in float32."""
    cache = paged_cache([65], pattern="low_rank")
    q = normal(1, 2, 64, seed=1) * 1000
    assert_mass_is_the_references(Case(SummaryFormat(16, 2, 16, 16, 16), cache, q, 1.0, 1), impl)


@by_impl
def test_a_row_equals_its_solo_run(impl):
    """Whatever stands beside it, whatever the table's width: bit for bit by the kernel."""
    tolerance = 0 if impl == "triton" else 1e-5
    lengths = [100, 33, 0, 161]
    cache = paged_cache(lengths, heads=2, extra_columns=1)
    q = normal(4, 4, 64, seed=1)
    records = records_of(cache, DEFAULT)
    together = page_mass(q, records, cache.block_table, cache.seq_lens, DEFAULT, impl=impl)
    for b in range(4):
        table = cache.block_table[b : b + 1]
        for width in (-(-lengths[b] // 16) or 1, 70):
            row = torch.full((1, width), -1, dtype=torch.int32, device=DEVICE)
            shared = min(width, table.shape[1])
            row[:, :shared] = table[:, :shared]
            solo = page_mass(q[b : b + 1], records, row, cache.seq_lens[b : b + 1], DEFAULT, impl=impl)
            for got, want in (
                (solo.log_mass[0, :, :shared], together.log_mass[b, :, :shared]),
                (solo.total[0], together.total[b]),
            ):
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            assert (solo.log_mass[0, :, shared:] == -math.inf).all()


@by_impl
def test_strided_queries_and_records_score_as_contiguous_ones(impl):
    q, records, table, lens, fmt = one_row(3, heads=2)
    want = page_mass(q, records, table, lens, fmt, impl=impl)
    wide = torch.cat([q, q + 1], -1)[..., :64]
    spaced = torch.stack([records, records + 1], -2)[..., 0, :]
    assert not wide.is_contiguous()
    assert not spaced.is_contiguous()
    got = page_mass(wide, spaced, table, lens, fmt, impl=impl)
    assert torch.equal(got.log_mass, want.log_mass)
    assert torch.equal(got.total, want.total)


@by_impl
def test_a_length_above_the_tables_room_counts_as_the_room(impl):
    q, records, table, _, fmt = one_row(3)
    want = page_mass(q, records, table[:, :3], ids(48), fmt, impl=impl)
    got = page_mass(q, records, table[:, :3], ids(1000), fmt, impl=impl)
    assert torch.equal(got.log_mass, want.log_mass)
    assert torch.equal(got.total, want.total)


@pytest.mark.parametrize("pages", [63, 64, 65, 129])
def test_totals_of_chunks_add_up(pages):
    """Rows that end just before, at and behind a chunk of 64 pages."""
    fmt = SummaryFormat(16, 1)
    q, records, table, lens, fmt = one_row(pages, group=1, fmt=fmt)
    log_mass, total = score_op.score(q, records, table, lens, fmt, scale=0.2, window_pages=1)
    assert log_mass[..., :pages].isfinite().all()
    torch.testing.assert_close(
        total.double(), log_mass[..., 1:pages].double().logsumexp(-1), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_every_launch_shape_gives_the_same_mass(block_n):
    q, records, table, lens, fmt = one_row(70, group=1, fmt=SummaryFormat(16, 1))
    log_mass, total = score_op.score(q, records, table, lens, fmt, scale=0.2, window_pages=2)
    config = KernelConfig(block_n=block_n, num_warps=4)
    got = score_op.score(q, records, table, lens, fmt, scale=0.2, window_pages=2, config=config)
    torch.testing.assert_close(got[0], log_mass, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], total, rtol=1e-5, atol=1e-5)


def test_a_tile_wider_than_a_chunk_is_refused():
    """Its pages would count in the totals of two chunks."""
    q, records, table, lens, fmt = one_row(3)
    with pytest.raises(ValueError, match="block_n: expected at most 64 pages"):
        score_op.score(
            q,
            records,
            table,
            lens,
            fmt,
            scale=0.2,
            window_pages=1,
            config=KernelConfig(block_n=128, num_warps=4),
        )


def test_total_adds_any_number_of_chunks_and_skips_the_empty_ones():
    """300 partial totals: more than one step of the loop that adds them, of very unlike sizes."""
    partial = (torch.randn(2, 3, 300, generator=generator(0)) * 40).to(DEVICE)
    partial[0, 0] = -math.inf
    partial[0, 1, :140] = -math.inf
    partial[1, 2, 100:] = -math.inf
    total = torch.empty(2, 3, device=DEVICE)
    launch = score_op.total_kernel[(3, 2)]
    waits = dependent(score_op.total_kernel, partial.device)
    launch(partial, total, *partial.stride()[:2], total.stride(0), 300, BLOCK_C=128, **waits)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(total.double(), partial.double().logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_score_writes_into_the_outputs_it_is_given():
    q, records, table, lens, fmt = one_row(3)
    want = score_op.score(q, records, table, lens, fmt, scale=0.2, window_pages=1)
    # Rows of a wider buffer, so that strides count.
    out = torch.zeros(1, 2, 9, device=DEVICE)[..., :5], torch.zeros(1, 2, device=DEVICE)
    got = score_op.score(q, records, table, lens, fmt, scale=0.2, window_pages=1, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    assert torch.equal(out[0], want[0])
    assert torch.equal(out[1], want[1])


@pytest.mark.parametrize("make", [reference.exact_page_mass, torch_impl.exact_page_mass])
@pytest.mark.parametrize("window_pages", [1, 2])
def test_exact_mass_is_the_log_sum_exp_of_a_pages_true_logits(make, window_pages):
    """What the oracle ranks by, row by row from the keys: ragged rows, wide blocks, one page with a nan."""
    lengths, page = [70, 33, 0], 16
    cache = paged_cache(lengths, block=32, heads=2, D=80)
    cache.k[cache.block_table[0, 1], 1, 4, 9] = math.nan
    q = normal(3, 6, 80, seed=1)
    mass = make(q, *cache.keys_args, page=page, scale=0.3, window_pages=window_pages)
    assert mass.log_mass.shape == (3, 6, cache.block_table.shape[1] * 2)
    for b, length in enumerate(lengths):
        keys = reference.row_tokens(*cache.keys_args, b).double()
        pages = max(0, -(-length // page) - 1)
        for h in range(6):
            logits = 0.3 * keys[h // 3, : pages * page] @ q[b, h].double()
            want = logits.view(pages, page).logsumexp(-1)
            marked = [2] if (b, h // 3) == (0, 1) else []
            want[marked] = math.inf
            got = mass.log_mass[b, h].double()
            torch.testing.assert_close(got[:pages], want, rtol=1e-5, atol=1e-5)
            assert (got[pages:] == -math.inf).all()
            counted = [n for n in range(1, pages + 1 - window_pages) if n not in marked]
            torch.testing.assert_close(
                mass.total[b, h].double(), want[counted].logsumexp(-1), rtol=1e-5, atol=1e-5
            )
