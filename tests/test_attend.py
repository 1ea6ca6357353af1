"""Attention over listed pages, against the reference in float64: any list, any storage, nothing else read."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locks import PageList, reference, sparse_attention, torch_impl, triton_impl
from locks.kernels import attend as attend_op
from locks.kernels.config import KernelConfig
from tests.helpers import (
    DEVICE,
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    IMPLS,
    LAYOUTS,
    Cache,
    Case,
    assert_close_as_torch,
    cases,
    examples,
    generator,
    ids,
    normal,
    output_terms,
    paged_cache,
)

by_impl = pytest.mark.parametrize("impl", IMPLS)


def page_list(*lists: list[list[int]], room: int | None = None, tail: int = -1) -> PageList:
    """lists[b][h]: the pages of row b and KV head h."""
    room = room or max(1, *(len(pages) for row in lists for pages in row))
    table = [[pages + [tail] * (room - len(pages)) for pages in row] for row in lists]
    return PageList(ids(*table), ids(*[[len(pages) for pages in row] for row in lists]))


def some_pages(cache: Cache, page: int, seed: int) -> PageList:
    """A random ascending list for every row and head, of any length from none to all."""
    gen, lists = generator(seed), []
    for length in cache.seq_lens.tolist():
        n = -(-length // page)
        lists.append(
            [
                (torch.rand(n, generator=gen) < torch.rand((), generator=gen) + 0.1)
                .nonzero()
                .flatten()
                .tolist()
                for _ in range(cache.k.shape[1])
            ]
        )
    return page_list(*lists)


def assert_attention_is_the_references(
    q: Tensor, cache: Cache, pages: PageList, impl: str, *, page: int, scale: float
) -> None:
    got = sparse_attention(q, *cache.args, pages, page=page, scale=scale, impl=impl)
    plain = reference.sparse_attention(q, *cache.args, pages, page=page, scale=scale, dtype=q.dtype)
    oracle = reference.sparse_attention(q, *cache.args, pages, page=page, scale=scale)
    assert got.out.dtype == q.dtype
    assert got.lse.dtype == torch.float32
    assert_close_as_torch(got.out, plain.out, oracle.out, terms=output_terms(q, cache, scale))
    assert_close_as_torch(got.lse, plain.lse, oracle.lse, terms=8.0)


@by_impl
@given(case=cases(finite_only=True), seed=st.integers(0, 2**16))
@examples(10)
def test_attention_is_the_references(impl, case: Case, seed):
    page = case.fmt.page
    # float16 scores of a key 300 times larger overflow in plain PyTorch, which then is no measure.
    scale = case.scale / (1000 if case.q.dtype == torch.float16 else 1)
    assert_attention_is_the_references(
        case.q, case.cache, some_pages(case.cache, page, seed), impl, page=page, scale=scale
    )


@by_impl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("page", "block", "D", "Dv", "heads", "group", "dtype"),
    [
        (16, 16, 64, 128, 3, 5, torch.float32),
        (16, 64, 80, 80, 2, 16, torch.float16),
        (32, 64, 256, 96, 1, 3, torch.float32),
        (64, 64, 112, 64, 2, 1, torch.float16),
    ],
)
def test_attention_is_the_references_for_every_storage(impl, layout, page, block, D, Dv, heads, group, dtype):
    cache = paged_cache(
        [6 * page + 5, page - 3], page=page, block=block, D=D, Dv=Dv, heads=heads, dtype=dtype, layout=layout
    )
    q = normal(2, heads * group, D, seed=1, dtype=dtype)
    assert_attention_is_the_references(q, cache, some_pages(cache, page, D), impl, page=page, scale=D**-0.5)


@pytest.mark.gpu
@by_impl
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_is_the_references_for_every_dtype(impl, D, dtype):
    """Each group size with some page and some storage: pairs, since each one is compiled."""
    for i, group in enumerate(GROUPS):
        page, layout = (16, 32, 64)[i % 3], LAYOUTS[i // 3]
        cache = paged_cache([40 * page + 7, 17, 0], page=page, heads=2, D=D, dtype=dtype, layout=layout)
        q = normal(3, 2 * group, D, seed=group, dtype=dtype)
        assert_attention_is_the_references(
            q, cache, some_pages(cache, page, D), impl, page=page, scale=D**-0.5
        )


@by_impl
def test_attention_is_the_softmax_over_the_listed_tokens_by_hand(impl):
    """Pages 1 and 3 of four, the last one of five tokens; scale given and by default."""
    cache = paged_cache([53], heads=1, D=64)
    q = normal(1, 2, 64, seed=1)
    keys = reference.row_tokens(*cache.keys_args, 0)[0].double()
    values = reference.row_tokens(cache.v, cache.block_table, cache.seq_lens, 0)[0].double()
    tokens = [*range(16, 32), *range(48, 53)]
    for scale, used in ((0.4, 0.4), (None, 0.125)):
        got = sparse_attention(q, *cache.args, page_list([[1, 3]]), page=16, scale=scale, impl=impl)
        logits = used * q[0].double() @ keys[tokens].T
        torch.testing.assert_close(
            got.out[0].double(), logits.softmax(-1) @ values[tokens], rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(got.lse[0].double(), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)


@by_impl
def test_a_row_without_pages_gives_zero_and_minus_infinity(impl):
    """Of length 0, with an empty list, or with pages listed of a row that has no token."""
    cache = paged_cache([0, 40, 0])
    pages = page_list([[]], [[]], [[0, 1]])
    out, lse = sparse_attention(normal(3, 2, 64, seed=1), *cache.args, pages, page=16, impl=impl)
    assert not out.any()
    assert (lse == -math.inf).all()


@by_impl
def test_a_list_without_room_is_an_empty_one(impl):
    empty = PageList(page_list([[0]]).page_ids[..., :0], page_list([[]]).counts)
    out, lse = sparse_attention(normal(1, 2, 64, seed=1), *paged_cache([40]).args, empty, page=16, impl=impl)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_a_list_without_room_beside_dense_rows_is_an_empty_one():
    cache, q = paged_cache([200, 90]), normal(2, 2, 64, seed=1)
    ids, counts = page_list([[0]], [[0]])
    options = {"page": 16, "scale": 0.3}
    want = attend_op.attend(q, *cache.args, None, None, **options)
    out, lse = attend_op.attend(q, *cache.args, ids[..., :0], counts * 0, dense_below=100, **options)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    assert torch.equal(out[1], want[0][1])


@by_impl
def test_entries_behind_the_count_are_not_read(impl):
    """Whatever they hold: a page of the row, one far outside, a negative one."""
    cache = paged_cache([100], heads=2)
    q = normal(1, 4, 64, seed=1)
    want = sparse_attention(q, *cache.args, page_list([[1, 4], [6]]), page=16, impl=impl)
    for tail in (0, 5, 2**27 - 1, -(2**27)):
        got = sparse_attention(
            q, *cache.args, page_list([[1, 4], [6]], room=5, tail=tail), page=16, impl=impl
        )
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)


@by_impl
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_but_the_listed_tokens_is_read(impl, poison):
    """Other pages, slots behind the row's end and other rows' blocks may hold anything."""
    cache = paged_cache([90, 50], heads=2)
    q = normal(2, 4, 64, seed=1)
    pages = page_list([[0, 3, 5], [2]], [[0, 1], [1, 3]])
    want = sparse_attention(q, *cache.args, pages, page=16, impl=impl)
    assert want.out.isfinite().all()
    keep = torch.zeros(cache.k.shape[:3], dtype=torch.bool, device=DEVICE)
    for b, rows in enumerate(pages.page_ids.tolist()):
        for h, row in enumerate(rows):
            for n in row:
                if n >= 0:
                    keep[cache.block_table[b, n], h, : max(0, min(16, int(cache.seq_lens[b]) - n * 16))] = (
                        True
                    )
    cache.k[~keep] = poison
    cache.v[~keep] = poison
    got = sparse_attention(q, *cache.args, pages, page=16, impl=impl)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@by_impl
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_non_finite_number_in_a_listed_page_reaches_its_own_heads_and_row_alone(impl, part):
    cache = paged_cache([90, 50], heads=2)
    q = normal(2, 4, 64, seed=1)
    pages = page_list([[0, 3], [0, 3]], [[0, 1], [1, 3]])
    want = sparse_attention(q, *cache.args, pages, page=16, impl=impl)
    getattr(cache, part)[cache.block_table[0, 3], 1, 2, 9] = math.nan
    got = sparse_attention(q, *cache.args, pages, page=16, impl=impl)
    dense = reference.sparse_attention(q, *cache.args, pages, page=16, scale=0.125)
    assert torch.equal(got.out.isnan(), dense.out.isnan())
    assert got.out[0, 2:].isnan().any()
    assert torch.equal(got.out[0, :2], want.out[0, :2])
    assert torch.equal(got.out[1], want.out[1])


@by_impl
def test_scores_far_above_float32s_exponent_range_do_not_overflow(impl):
    """Logits of thousands: one token takes all, and the lse is its logit."""
    cache = paged_cache([64])
    q = normal(1, 1, 64, seed=1) * 3000
    logits = reference.row_tokens(*cache.keys_args, 0)[0] @ q[0, 0] / 8
    best = int(logits.argmax())
    assert logits[best] > 1000
    got = sparse_attention(q, *cache.args, page_list([[0, 1, 2, 3]]), page=16, impl=impl)
    value = cache.v[cache.block_table[0, best // 16], 0, best % 16]
    torch.testing.assert_close(got.out[0, 0], value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse[0, 0], logits[best], rtol=1e-6, atol=0)


@by_impl
def test_a_length_above_the_tables_room_counts_as_the_room(impl):
    cache = paged_cache([64], extra_columns=0)
    q, pages = normal(1, 2, 64, seed=1), page_list([[0, 2, 3]])
    want = sparse_attention(q, *cache.args, pages, page=16, impl=impl)
    got = sparse_attention(q, *cache.args[:3], ids(1000), pages, page=16, impl=impl)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@by_impl
def test_lengths_decide_the_tokens_not_the_list(impl):
    """A page that lies behind the row's end, or partly so, gives what it has."""
    cache = paged_cache([64])
    q = normal(1, 1, 64, seed=1)
    got = sparse_attention(q, *cache.args[:3], ids(33), page_list([[1, 2, 3]]), page=16, impl=impl)
    keys = reference.row_tokens(*cache.keys_args, 0)[0, 16:33].double()
    torch.testing.assert_close(
        got.lse[0, 0].double(), (keys @ q[0, 0].double() / 8).logsumexp(-1), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("block_n", [1, 2, 4])
def test_every_split_gives_the_same_attention(block_n):
    """Up to 40 splits: more than one step of the merge; the second head's later splits are empty."""
    cache = paged_cache([40 * 16 - 3], heads=2)
    q = normal(1, 4, 64, seed=1)
    pages = page_list([list(range(40)), [3, 4, 20]])
    config = KernelConfig(block_n=block_n, num_warps=4)
    out, lse = attend_op.attend(q, *cache.args, *pages, page=16, scale=0.3, config=config)
    plain = reference.sparse_attention(q, *cache.args, pages, page=16, scale=0.3, dtype=torch.float32)
    oracle = reference.sparse_attention(q, *cache.args, pages, page=16, scale=0.3)
    assert_close_as_torch(out, plain.out, oracle.out, terms=1.0)
    assert_close_as_torch(lse, plain.lse, oracle.lse, terms=8.0)


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_default_split_is_128_tokens_and_half_of_it_for_wide_heads(page, width):
    config = attend_op.default_config(page, width)
    assert config.block_n * page == (128 if width <= 128 else 64)


def test_attend_writes_into_the_outputs_it_is_given():
    cache = paged_cache([60], heads=2)
    q, pages = normal(1, 4, 64, seed=1), page_list([[0, 2], [1, 3]])
    want = attend_op.attend(q, *cache.args, *pages, page=16, scale=0.3)
    out = torch.zeros(1, 4, 96, device=DEVICE)[..., :64], torch.zeros(1, 4, device=DEVICE)
    got = attend_op.attend(q, *cache.args, *pages, page=16, scale=0.3, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    assert torch.equal(out[0], want[0])
    assert torch.equal(out[1], want[1])


@by_impl
def test_a_row_attends_as_it_does_alone(impl):
    """Bit for bit by the kernel: its splits are cut by list position alone, and empty ones add nothing."""
    cache = paged_cache([400, 33, 0], heads=2)
    q = normal(3, 4, 64, seed=1)
    pages = some_pages(cache, 16, 5)
    together = sparse_attention(q, *cache.args, pages, page=16, impl=impl)
    tolerance = 0 if impl == "triton" else 1e-5
    for b in range(3):
        alone = sparse_attention(
            q[b : b + 1], *cache.row(b).args, PageList(*(x[b : b + 1] for x in pages)), page=16, impl=impl
        )
        torch.testing.assert_close(alone.out[0], together.out[b], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(alone.lse[0], together.lse[b], rtol=tolerance, atol=tolerance)


@by_impl
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_queries_and_lists_attend_as_contiguous_ones(impl, dtype):
    cache = paged_cache([100], heads=2, dtype=dtype)
    q, pages = normal(1, 4, 64, seed=1, dtype=dtype), page_list([[0, 2, 6], [1, 5]])
    want = sparse_attention(q, *cache.args, pages, page=16, impl=impl)
    wide = torch.cat([q, q + 1], -1)[..., :64]
    lists = PageList(
        torch.cat([pages.page_ids, pages.page_ids], -1)[..., :3], torch.cat([pages.counts] * 2, -1)[:, :2]
    )
    table = torch.cat([cache.block_table] * 2, -1)[:, : cache.block_table.shape[1]]
    got = sparse_attention(wide, cache.k, cache.v, table, cache.seq_lens, lists, page=16, impl=impl)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def whole_pages(lengths: list[int], heads: int, page: int = 16) -> PageList:
    return page_list(*[[list(range(-(-length // page)))] * heads for length in lengths])


@pytest.mark.parametrize("work", [torch_impl, triton_impl], ids=["torch", "triton"])
@pytest.mark.parametrize("below", [96, 2**31 - 1])
def test_rows_of_fewer_tokens_than_a_bound_attend_to_all_of_their_pages(work, below):
    """Whatever is listed for them, in a list with room for fewer; a row of exactly the bound is not among them."""
    lengths = [400, 33, 0, 96, 95]
    cache, q = paged_cache(lengths, heads=2), normal(len(lengths), 4, 64, seed=1)
    lists = [[[0, 3, 5], [4]], [[0], []], [[], []], [[1, 5], [0, 2]], [[0, 900], [-7]]]
    every = [[list(range(-(-length // 16)))] * 2 for length in lengths]
    kept = [whole if n < below else some for n, whole, some in zip(lengths, every, lists, strict=True)]
    want = reference.sparse_attention(q, *cache.args, page_list(*kept), page=16, scale=0.3)
    got = work.sparse_attention(
        q, *cache.args, page_list(*lists), page=16, scale=0.3, dense_below=below, out=torch.empty_like(q)
    )
    torch.testing.assert_close(got.out.double(), want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=1e-5)


# Many tiles a program, in steps of one page, of two and of a part of one.
PLANS = (attend_op.Plan(3, 16, 2), attend_op.Plan(2, 32, 3), attend_op.Plan(5, 16, 1))


@by_impl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("page", "block", "D", "Dv", "group", "dtype"),
    [
        (16, 16, 64, 128, 5, torch.float32),
        (16, 128, 128, 128, 8, torch.float16),
        (32, 64, 256, 96, 3, torch.float32),
        (64, 64, 112, 64, 1, torch.float16),
    ],
)
def test_without_a_list_attention_is_dense(impl, layout, page, block, D, Dv, group, dtype):
    """Over rows of every length, the slots behind them full of nan."""
    lengths = [0, 1, page, 9 * page + 5, 2 * page - 1]
    cache = paged_cache(lengths, page=page, block=block, heads=2, D=D, Dv=Dv, dtype=dtype, layout=layout)
    q, scale = normal(len(lengths), 2 * group, D, seed=1, dtype=dtype), D**-0.5
    got = sparse_attention(q, *cache.args, None, page=page, scale=scale, impl=impl, debug=True)
    pages = whole_pages(lengths, 2, page)
    plain = reference.sparse_attention(q, *cache.args, pages, page=page, scale=scale, dtype=dtype)
    oracle = reference.dense_attention(q, *cache.args, scale=scale)
    assert_close_as_torch(got.out, plain.out, oracle.out, terms=output_terms(q, cache, scale))
    assert_close_as_torch(got.lse, plain.lse, oracle.lse, terms=8.0)


@pytest.mark.parametrize("plan", PLANS)
@given(case=cases(finite_only=True), seed=st.integers(0, 2**16))
@examples(4)
def test_attention_in_steps_is_the_references(plan, case: Case, seed):
    """Of some rows' lists and other rows' whole lengths."""
    q, cache, page = case.q, case.cache, case.fmt.page
    scale = case.scale / (1000 if q.dtype == torch.float16 else 1)
    pages, below = some_pages(cache, page, seed), 4 * page
    config = KernelConfig(block_n=max(1, 32 // page), num_warps=4)
    options = {"page": page, "scale": scale, "dense_below": below, "config": config, "plan": plan}
    out, lse = attend_op.attend(q, *cache.args, *pages, **options)
    every = whole_pages(cache.seq_lens.tolist(), cache.k.shape[1], page)
    lists = [
        [(every if length < below else pages).page_ids[b, h].tolist() for h in range(cache.k.shape[1])]
        for b, length in enumerate(cache.seq_lens.tolist())
    ]
    want = page_list(*[[[n for n in one if n >= 0] for one in row] for row in lists])
    plain = reference.sparse_attention(q, *cache.args, want, page=page, scale=scale, dtype=q.dtype)
    oracle = reference.sparse_attention(q, *cache.args, want, page=page, scale=scale)
    assert_close_as_torch(out, plain.out, oracle.out, terms=output_terms(q, cache, scale))
    assert_close_as_torch(lse, plain.lse, oracle.lse, terms=8.0)


MIXED = [400, 33, 0, 150, 96, 95, 230]


def mixed(
    plan: attend_op.Plan, rows: slice = slice(None), columns: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sparse, idle, dense and covered rows, or some of them; dense rows' lists are of another row's pages."""
    cache = paged_cache(MIXED, heads=2)
    q = normal(len(MIXED), 6, 64, seed=1)
    pages = page_list(
        *[[[0, 2, 3, 5, 8], [4]] if n in (400, 150) else [[0, 900], [-7]] for n in MIXED[:-1]],
        [[0, 1, 13, 14], []],
    )
    args = q[rows], cache.k, cache.v, cache.block_table[rows, :columns], cache.seq_lens[rows]
    config = KernelConfig(block_n=2, num_warps=4)
    return attend_op.attend(
        *args, *(x[rows] for x in pages), page=16, scale=0.3, dense_below=96, config=config, plan=plan
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_row_of_a_mixed_batch_attends_as_it_does_alone(plan):
    """Bit for bit, over a table with less room, too; a row of exactly the bound is not dense."""
    out, lse = mixed(plan)
    for b, length in enumerate(MIXED):
        alone = mixed(plan, slice(b, b + 1), -(-max(length, 1) // 16))
        assert torch.equal(alone[0][0], out[b])
        assert torch.equal(alone[1][0], lse[b])
    cache, q = paged_cache(MIXED, heads=2), normal(len(MIXED), 6, 64, seed=1)
    for b, keys in (
        (1, [[0, 1, 2]] * 2),
        (5, [list(range(6))] * 2),
        (4, [[0], []]),
        (6, [[0, 1, 13, 14], []]),
    ):
        want = reference.sparse_attention(
            q[b : b + 1], *cache.row(b).args, page_list(keys), page=16, scale=0.3
        )
        torch.testing.assert_close(out[b].double(), want.out[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), want.lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_a_dense_row_attends_as_with_a_list_of_its_pages(plan):
    """Bit for bit, in a kernel that knows lists and in one that does not."""
    lengths = [250, 17, 64]
    cache, q = paged_cache(lengths, heads=2), normal(3, 4, 64, seed=1)
    options = {"page": 16, "scale": 0.3, "config": KernelConfig(block_n=2, num_warps=4), "plan": plan}
    want = attend_op.attend(q, *cache.args, *whole_pages(lengths, 2), **options)
    some = page_list(*[[[0], [1]]] * 3)
    for lists, below in (((None, None), 0), (some, 251)):
        got = attend_op.attend(q, *cache.args, *lists, dense_below=below, **options)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("plan", PLANS)
def test_in_steps_rows_of_any_number_of_pages_are_read_to_their_end(plan):
    """Tiles of four pages, the last one of each row of one to four; up to three a program."""
    lengths = [16 * n - 5 for n in range(4 * plan.splits + 1, 8 * plan.splits + 6, 3)]
    cache, q = paged_cache(lengths), normal(len(lengths), 1, 64, seed=1)
    config = KernelConfig(block_n=4, num_warps=4)
    out, lse = attend_op.attend(q, *cache.args, None, None, page=16, scale=0.3, config=config, plan=plan)
    want = reference.dense_attention(q, *cache.args, scale=0.3)
    torch.testing.assert_close(out.double(), want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("page", "block", "Dv", "plan"),
    [
        (16, 64, 64, attend_op.Plan(3, 32, 3)),
        (32, 96, 80, attend_op.Plan(2, 16, 3)),
        (64, 64, 64, attend_op.Plan(2, 16, 2)),
    ],
)
def test_in_steps_any_storage_is_read(layout, page, block, Dv, plan):
    """Pages that share a block, pages of several steps, wider values; the slots behind the rows full of nan."""
    lengths = [13 * page + 5, page, 7 * page]
    cache = paged_cache(lengths, page=page, block=block, heads=2, D=64, Dv=Dv, layout=layout)
    q, config = normal(3, 4, 64, seed=1), KernelConfig(block_n=max(1, 64 // page), num_warps=4)
    options = {"page": page, "scale": 0.3, "config": config, "plan": plan}
    want = reference.dense_attention(q, *cache.args, scale=0.3)
    for lists in ((None, None), whole_pages(lengths, 2, page)):
        out, lse = attend_op.attend(q, *cache.args, *lists, **options)
        torch.testing.assert_close(out.double(), want.out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)


def test_the_last_split_with_tokens_is_merged():
    """Alone among those that are added up at once, and with splits without tokens behind it."""
    lengths = [16 * n - 5 for n in (16, 17, 32, 33)]
    cache, q = paged_cache(lengths), normal(len(lengths), 1, 64, seed=1)
    options = {"page": 16, "scale": 0.3, "config": KernelConfig(block_n=1, num_warps=4)}
    want = reference.dense_attention(q, *cache.args, scale=0.3)
    for splits in (33, 40):
        plan = attend_op.Plan(splits, 0, 1)
        out, lse = attend_op.attend(q, *cache.args, None, None, **options, plan=plan)
        torch.testing.assert_close(out.double(), want.out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)


def test_a_row_of_one_tile_a_split_attends_as_without_steps():
    """Bit for bit, whatever longer rows need, and with splits that are left over."""
    cache, q = paged_cache([40 * 16 - 3], heads=2), normal(1, 4, 64, seed=1)
    pages = page_list([list(range(0, 40, 3)), [3, 4, 20]])
    options = {"page": 16, "scale": 0.3, "config": KernelConfig(block_n=2, num_warps=4)}
    want = attend_op.attend(q, *cache.args, *pages, **options)
    for plan in (attend_op.Plan(7, 16, 2), attend_op.Plan(64, 16, 2), attend_op.Plan(40, 0, 1)):
        got = attend_op.attend(q, *cache.args, *pages, **options, plan=plan)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("stale", [math.nan, math.inf, 5.0])
def test_what_a_call_left_is_not_added_to_the_next(stale):
    cache, q = paged_cache([300, 20, 0], heads=2), normal(3, 4, 64, seed=1)
    options = {"page": 16, "scale": 0.3, "config": KernelConfig(block_n=1, num_warps=4)}
    work = attend_op.workspace(3, 4, 19, 64, DEVICE)
    plan = attend_op.Plan(19, 0, 1)
    want = attend_op.attend(q, *cache.args, None, None, **options, plan=plan)
    for x in work:
        x.fill_(stale)
    got = attend_op.attend(q, *cache.args, None, None, **options, plan=plan, work=work)
    assert all(map(torch.equal, got, want))
    assert got[0].isfinite().all()
    # Without tokens nothing is written but that.
    assert (work.lse[1, :, 2:] == -math.inf).all()
    torch.testing.assert_close(
        work.part[1, :, 2:], torch.full_like(work.part[1, :, 2:], stale), equal_nan=True
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("part", "bad"), [("k", math.nan), ("v", math.nan), ("k", math.inf)])
def test_a_non_finite_number_stays_through_later_steps(plan, part, bad):
    cache, q = paged_cache([250, 250], heads=2), normal(2, 4, 64, seed=1)
    options = {"page": 16, "scale": 0.3, "config": KernelConfig(block_n=2, num_warps=4), "plan": plan}
    want = attend_op.attend(q, *cache.args, None, None, **options)
    getattr(cache, part)[cache.block_table[0, 0], 1, 2] = bad
    out, lse = attend_op.attend(q, *cache.args, None, None, **options)
    assert out[0, 2:].isnan().any(-1).all()
    assert torch.equal(out[0, :2], want[0][0, :2])
    assert torch.equal(out[1], want[0][1])
    assert torch.equal(lse[1], want[1][1])


@pytest.mark.parametrize("heads", [1, 4, 8, 32])
def test_a_row_is_cut_by_its_own_length_alone(heads):
    """Whatever the lists and the table have room for: the splits are as many, or more than the row has tiles."""
    of = {"page": 16, "head_dim": 128, "num_kv_heads": heads, "config": KernelConfig(8, 4)}
    assert attend_op.default_plan(128, 0, **of) == attend_op.Plan(16, 0, 3)
    most = attend_op.default_plan(128, 2**16, **of)
    for whole in (1, 100, 127, 128, 129, 1000, 4096):
        plan = attend_op.default_plan(128, whole, **of)
        tiles = max(16, -(-whole // 8))
        assert plan.splits == min(most.splits, tiles)
        assert (plan.step > 0) == (plan.splits < tiles)
    assert 16 <= most.splits <= attend_op.WHOLE_SPLITS
