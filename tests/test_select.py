"""Shares of a group's mass, and the selection: exact ids for every kind of tie, tail, count and row."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from locks import PageMass, page_share, reference, select_pages
from locks.kernels import select as select_op
from locks.pages import budget_pages, least_budget
from tests.helpers import DEVICE, IMPLS, assert_same_pages, examples, generator, ids, listed

by_impl = pytest.mark.parametrize("impl", IMPLS)
BIG = torch.finfo(torch.float32).max


def shares(*rows: list[float]) -> torch.Tensor:
    """[1, rows, N]."""
    return torch.tensor([rows], dtype=torch.float32, device=DEVICE)


def masses(log_mass: list, total: list) -> PageMass:
    return PageMass(torch.tensor(log_mass, device=DEVICE), torch.tensor(total, device=DEVICE))


@by_impl
def test_share_is_the_groups_sum_of_each_heads_share(impl):
    log_mass = torch.randn(2, 6, 5, generator=generator(0)).to(DEVICE)
    total = torch.randn(2, 6, generator=generator(1)).to(DEVICE)
    got = page_share(PageMass(log_mass, total), 2, impl=impl)
    want = (log_mass.double() - total.double()[..., None]).exp().view(2, 2, 3, 5).sum(2)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(want, reference.page_share(PageMass(log_mass.double(), total.double()), 2))


@by_impl
def test_share_of_a_page_that_is_not_scored_is_zero_and_of_a_marked_one_infinite(impl):
    inf = math.inf
    mass = masses([[[1.0, -inf, inf, 2.0], [1.0, -inf, 3.0, -inf]]], [[1.0, 2.0]])
    got = page_share(mass, 1, impl=impl)
    want = [1 + math.exp(-1), 0, inf, math.exp(1)]
    assert got[0, 0].tolist() == pytest.approx(want, rel=1e-6)
    # Each head alone: the mark belongs to the first.
    assert page_share(mass, 2, impl=impl)[0, 1].tolist() == pytest.approx(
        [math.exp(-1), 0, math.e, 0], rel=1e-6
    )


@by_impl
def test_share_of_a_head_without_a_finite_candidate_is_zero_but_for_marked_pages(impl):
    inf = math.inf
    mass = masses([[[5.0, inf, -inf]]], [[-inf]])
    assert page_share(mass, 1, impl=impl)[0, 0].tolist() == [0, inf, 0]
    assert reference.page_share(mass, 1)[0, 0].tolist() == [0, inf, 0]


@by_impl
def test_share_reads_strided_masses(impl):
    """Rows of a wider buffer and more pages than one program takes."""
    wide = torch.randn(2, 4, 2100, generator=generator(0)).to(DEVICE)
    total = torch.randn(2, 8, generator=generator(1)).to(DEVICE)[:, :4]
    mass = PageMass(wide[..., :2050], total)
    got = page_share(mass, 2, impl=impl)
    torch.testing.assert_close(
        got.double(), reference.page_share(PageMass(*(x.double() for x in mass)), 2), rtol=1e-5, atol=0
    )


FEW = st.sampled_from((0.0, 1.0, 2.0))
CLOSE = st.integers(0, 40).map(
    lambda i: float(torch.tensor(1.0).view(torch.int32).add(i).view(torch.float32))
)
TINY = st.sampled_from((0.0, 1e-45, 3e-45, 1.2e-38))
ANY = st.floats(0, 3.4028234663852886e38, width=32)
WILD = st.sampled_from((math.nan, math.inf, 0.5, 0.0))


@st.composite
def selections(draw: st.DrawFn):
    """Shares [B, Hkv, N], lengths, page and options; the table may be wider than its rows."""
    page, window_pages = draw(st.sampled_from((16, 32, 64))), draw(st.sampled_from((1, 1, 2, 4)))
    rows, heads, width = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 24))
    values = draw(st.sampled_from((FEW, CLOSE, TINY, ANY, WILD, st.just(0.25))))
    flat = draw(st.lists(values, min_size=rows * heads * width, max_size=rows * heads * width))
    share = torch.tensor(flat, dtype=torch.float32, device=DEVICE).view(rows, heads, width)
    lengths = draw(st.lists(st.integers(0, width * page), min_size=rows, max_size=rows))
    pages = draw(st.integers(window_pages + 2, window_pages + 12))
    return share, ids(*lengths), {"page": page, "budget": pages * page, "window_pages": window_pages}


@by_impl
@given(selection=selections())
@example(
    selection=(
        torch.full((1, 1, 6), math.nan, device=DEVICE),
        ids(96),
        {"page": 16, "budget": 48, "window_pages": 1},
    )
)
@examples(25)
def test_ids_are_the_references_given_equal_shares(impl, selection):
    share, lens, options = selection
    got = select_pages(share, lens, impl=impl, **options)
    assert_same_pages(got, reference.select_pages(share, lens, **options))


@by_impl
@given(selection=selections())
@examples(15)
def test_a_list_is_ascending_and_holds_the_first_and_newest_pages(impl, selection):
    share, lens, options = selection
    got = select_pages(share, lens, impl=impl, **options)
    m = options["budget"] // options["page"]
    assert got.page_ids.shape == (*share.shape[:2], m)
    for b, length in enumerate(lens.tolist()):
        n = -(-length // options["page"])
        for h in range(share.shape[1]):
            pages = listed(got, b, h)
            assert len(pages) == int(got.counts[b, h]) == min(n, m)
            assert pages == sorted(set(pages))
            always = {0, *range(max(0, n - options["window_pages"]), n)} if n else set()
            assert always <= set(pages) <= set(range(n))


@by_impl
@pytest.mark.parametrize(
    ("row", "budget", "window_pages", "want"),
    [
        # The greatest candidates; the shares of page 0 and of the newest page are not read.
        ([9, 1, 5, 2, 4, 3, 9], 64, 1, [0, 2, 4, 6]),
        ([math.nan, 1, 5, 2, 4, 3, math.nan], 64, 1, [0, 2, 4, 6]),
        # Three newest pages leave one place.
        ([0, 1, 2, 3, 9, 9, 9], 80, 3, [0, 3, 4, 5, 6]),
        # Ties go to the lower page: all equal, all zero, a tie at the edge of the budget.
        ([1, 1, 1, 1, 1, 1, 1], 64, 1, [0, 1, 2, 6]),
        ([0, 0, 0, 0, 0, 0, 0], 64, 1, [0, 1, 2, 6]),
        ([0, 2, 3, 2, 3, 2, 0], 80, 1, [0, 1, 2, 4, 6]),
        ([0, 0, 0, 7, 0, 0, 0], 64, 1, [0, 1, 3, 6]),
        # Marked pages rank first, the lower ones where there are more than places.
        ([0, 5, math.inf, 6, math.inf, 7, 0], 64, 1, [0, 2, 4, 6]),
        ([0, 5, math.inf, math.inf, math.inf, math.inf, 0], 64, 1, [0, 2, 3, 6]),
        ([0, 5, BIG, math.inf, 6, 7, 0], 48, 1, [0, 3, 6]),
        # nan counts as infinite, and never displaces a page that is always kept.
        ([0, math.nan, math.inf, math.nan, math.nan, 1, 0], 64, 1, [0, 1, 2, 6]),
        ([0, 1, math.inf, math.nan, math.inf, 1, 0], 64, 1, [0, 2, 3, 6]),
        ([0, -0.0, 0.0, -0.0, 0.0, 0.0, 0], 64, 1, [0, 1, 2, 6]),
        # A row that fits keeps all.
        ([0, 1, 2, 3, 4, 5, 6], 112, 1, [0, 1, 2, 3, 4, 5, 6]),
        ([0, 1, 2, 3, 4, 5, 6], 96, 1, [0, 2, 3, 4, 5, 6]),
    ],
)
def test_selection_by_hand(impl, row, budget, window_pages, want):
    for length in (97, 112):
        got = select_pages(
            shares(row), ids(length), page=16, budget=budget, window_pages=window_pages, impl=impl
        )
        assert listed(got) == want
    reference_list = reference.select_pages(
        shares(row), ids(112), page=16, budget=budget, window_pages=window_pages
    )
    assert listed(reference_list) == want


@by_impl
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 48, 49, 64, 65])
def test_a_row_that_fits_its_budget_keeps_every_page_and_a_longer_one_exactly_m(impl, length):
    got = select_pages(torch.zeros(1, 1, 8, device=DEVICE), ids(length), page=16, budget=64, impl=impl)
    n = -(-length // 16)
    assert listed(got) == (list(range(n)) if n <= 4 else [0, 1, 2, n - 1])
    assert got.page_ids.shape == (1, 1, 4)


@by_impl
def test_a_budget_wider_than_the_table_leaves_a_tail(impl):
    got = select_pages(torch.zeros(1, 2, 3, device=DEVICE), ids(40), page=16, budget=320, impl=impl)
    assert got.page_ids[0].tolist() == [[0, 1, 2] + [-1] * 17] * 2
    assert got.counts.tolist() == [[3, 3]]


@by_impl
def test_the_default_window_is_one_page(impl):
    share = shares([0, 1, 2, 3, 4, 5, 6])
    got = select_pages(share, ids(112), page=16, budget=64, impl=impl)
    assert_same_pages(got, select_pages(share, ids(112), page=16, budget=64, window_pages=1, impl=impl))
    assert listed(got) == [0, 4, 5, 6]


@by_impl
def test_a_length_above_the_tables_room_counts_as_the_room(impl):
    share = shares([0, 1, 2, 3, 4, 5, 0])
    want = select_pages(share, ids(112), page=16, budget=64, impl=impl)
    assert listed(want) == [0, 4, 5, 6]
    assert_same_pages(select_pages(share, ids(1000), page=16, budget=64, impl=impl), want)


@by_impl
@pytest.mark.parametrize("digit", range(8))
def test_shares_that_differ_in_one_digit_of_their_bits_are_told_apart(impl, digit):
    """The threshold is found four bits at a time: the candidates differ in one of the eight digits alone."""
    base = 0x3F1234A5 & ~(0xF << 4 * digit)
    # The top digit holds the sign.
    values = (1, 9, 1, 14, 9, 14) if digit < 7 else (1, 2, 1, 3, 2, 3)
    bits = [base | (value << 4 * digit) for value in values]
    share = torch.tensor([0, *bits, 0], dtype=torch.int32, device=DEVICE).view(torch.float32)[None, None]
    for budget, want in (
        (48, [0, 4, 7]),
        (64, [0, 4, 6, 7]),
        (80, [0, 2, 4, 6, 7]),
        (112, [0, 1, 2, 4, 5, 6, 7]),
    ):
        assert listed(select_pages(share, ids(128), page=16, budget=budget, impl=impl)) == want


@by_impl
@pytest.mark.parametrize("kept", [3, 1023, 1500])
def test_selection_over_thousands_of_pages_with_ties_across_tiles(impl, kept):
    """Tiles are 1,024 pages: values repeat in all of them, and a tie at the threshold spans tiles."""
    share = torch.randint(0, 4, (1, 2, 2300), generator=generator(kept)).float().to(DEVICE)
    lens = ids(2300 * 16)
    got = select_pages(share, lens, page=16, budget=16 * kept, impl=impl)
    assert_same_pages(got, reference.select_pages(share, lens, page=16, budget=16 * kept))


@by_impl
def test_strided_shares_select_as_contiguous_ones(impl):
    share = torch.rand(2, 3, 20, generator=generator(0)).to(DEVICE)
    lens, options = ids(320, 200), {"page": 16, "budget": 96, "impl": impl}
    wide = torch.zeros(3, 2, 30, device=DEVICE).transpose(0, 1)[..., :20]
    wide.copy_(share)
    assert not wide.is_contiguous()
    assert_same_pages(select_pages(wide, lens, **options), select_pages(share, lens, **options))


@pytest.mark.parametrize("lengths", [(320, 200), (48, 0), (500, 16)])
def test_lists_written_over_last_steps_have_no_old_ids(lengths):
    """Into buffers that are rows of wider ones and full of another step's ids."""
    share = torch.rand(2, 2, 40, generator=generator(0)).to(DEVICE)
    lens = ids(*lengths)
    out = (
        torch.full((2, 2, 9), 7, dtype=torch.int32, device=DEVICE)[..., :6],
        torch.full((2, 5), 7, dtype=torch.int32, device=DEVICE)[:, :2],
    )
    got = select_op.select(share, lens, page=16, pages=6, window_pages=1, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    want = reference.select_pages(share, lens, page=16, budget=96)
    assert got[0].tolist() == want.page_ids.tolist()
    assert got[1].tolist() == want.counts.tolist()


def test_share_writes_into_the_output_it_is_given():
    log_mass, total = torch.randn(1, 4, 5, device=DEVICE), torch.randn(1, 4, device=DEVICE)
    out = torch.zeros(1, 2, 9, device=DEVICE)[..., :5]
    assert select_op.share(log_mass, total, 2, out=out) is out
    assert torch.equal(out, select_op.share(log_mass, total, 2))


@pytest.mark.parametrize(
    ("total", "pages"),
    [
        pytest.param(4096, 40, id="all keys at once"),
        pytest.param(4097, 40, id="groups of 8"),
        pytest.param(66000, 9, id="groups of 32"),
        pytest.param(4200, 1100, id="keys in tiles"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    ["random", "few values", "far apart", "equal", "zeros", "one group", "marked", "always kept"],
)
def test_long_rows_select_the_references_pages(total, pages, kind):
    assert (select_op.plan(total, pages).block_c == 0) == (pages == 1100)
    gen = generator(total)
    share = torch.rand(2, 2, total, generator=gen)
    if kind == "few values":
        share = torch.randint(0, 3, share.shape, generator=gen).float()
    elif kind == "far apart":
        # The most steps that a search can take, for a value between the two is never there.
        share = torch.where(share < 0.004, BIG, torch.where(share < 0.9, 1e-45, 0.0))
    elif kind in ("equal", "zeros"):
        share = torch.full_like(share, 0.25 if kind == "equal" else 0.0)
    elif kind == "one group":
        share[..., 100:132] += 1
    elif kind == "marked":
        share[..., 3::97] = math.inf
        share[..., 5] = math.nan
    elif kind == "always kept":
        # Greater shares than any candidate's, which take no candidate's place.
        share[..., 0] = share[0, :, -2:] = share[1, :, -72:-70] = 9
    share, lens = share.to(DEVICE), ids(16 * total - 5, 16 * (total - 70))
    got = select_op.select(share, lens, page=16, pages=pages, window_pages=2)
    want = reference.select_pages(share, lens, page=16, budget=16 * pages, window_pages=2)
    assert got[0].tolist() == want.page_ids.tolist()
    assert got[1].tolist() == want.counts.tolist()


def masses_of(kind: str, rows: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log_mass [rows, 6, N] of two groups of three heads, and total [rows, 6]."""
    gen = generator(N)
    log_mass = 4 * torch.randn(rows, 6, N, generator=gen)
    total = torch.logsumexp(log_mass, -1)
    if kind == "equal":
        log_mass = torch.full_like(log_mass, -3.0)
    elif kind == "two values":
        log_mass = torch.where(log_mass > 8, 0.0, torch.where(log_mass > -6, -80.0, -math.inf))
    elif kind == "nan":
        log_mass[..., 7::31] = math.nan
    elif kind == "marked":
        log_mass[:, 1, 5::17] = math.inf
        total[:, 0] = -math.inf
    return log_mass.to(DEVICE), total.to(DEVICE)


# Pages kept, and the pages of a table: all keys at once, groups, groups in tables of a size that no load fits, tiles.
FUSED = [(8, 64), (12, 4160), (12, 4161), (600, 4200)]


@pytest.mark.parametrize(("pages", "N"), FUSED)
@pytest.mark.parametrize("kind", ["random", "equal", "two values", "nan", "marked"])
def test_two_launches_select_what_the_shares_do(pages, N, kind):
    """Rows of no page, of one token, of M pages, of one more, of as many as fit at once, and of all that there are."""
    fits = select_op.plan(N, pages).block_c + 2
    lengths = [0, 1, 16 * pages, 16 * pages + 1, 16 * fits, 16 * fits + 1, 16 * N]
    log_mass, total = masses_of(kind, len(lengths), N)
    lens = ids(*lengths)
    options = {"page": 16, "pages": pages, "window_pages": 2}
    got = select_op.select_from_mass(log_mass, total, lens, 2, **options)
    share = select_op.share(log_mass, total, 2)
    separate = select_op.select(share, lens, **options)
    want = reference.select_pages(share, lens, page=16, budget=16 * pages, window_pages=2)
    assert got[0].tolist() == separate[0].tolist() == want.page_ids.tolist()
    assert got[1].tolist() == separate[1].tolist() == want.counts.tolist()


@pytest.mark.parametrize(("pages", "N"), FUSED)
def test_what_lies_behind_a_rows_pages_is_not_read(pages, N):
    """log_mass behind the row is nan, which would rank first; so would what the workspace holds before the call."""
    lengths = [0, 5, 16 * pages + 1, 16 * pages + 130, 8 * N, 16 * N - 100]
    log_mass, total = masses_of("random", len(lengths), N)
    for b, length in enumerate(lengths):
        log_mass[b, :, -(-length // 16) :] = math.nan
    work = select_op.workspace(len(lengths), 2, N, pages, DEVICE)
    for buffer in work:
        buffer.fill_(0x7F800000)
    options = {"page": 16, "pages": pages, "window_pages": 1}
    got = select_op.select_from_mass(log_mass, total, ids(*lengths), 2, **options, work=work)
    for b, length in enumerate(lengths):
        # The row alone, in a table that it fills.
        n = -(-length // 16)
        row = select_op.share(log_mass[b : b + 1, :, :n].contiguous(), total[b : b + 1], 2) if n else None
        share = torch.zeros(1, 2, 0, device=DEVICE) if row is None else row
        want = reference.select_pages(share, ids(length), page=16, budget=16 * pages)
        assert got[0][b].tolist() == want.page_ids[0].tolist()
        assert got[1][b].tolist() == want.counts[0].tolist()


@pytest.mark.parametrize(("pages", "N"), FUSED)
def test_a_workspace_and_lists_serve_one_step_after_another(pages, N):
    log_mass, total = masses_of("random", 2, N)
    options = {"page": 16, "pages": pages, "window_pages": 1}
    # Room for more rows than there are.
    work = select_op.workspace(3, 2, N, pages, DEVICE)
    out = torch.empty(2, 2, pages, dtype=torch.int32, device=DEVICE), ids([7, 7], [7, 7])
    for lengths in ((16 * N, 16 * pages + 1), (16, 16 * N), (8 * N, 0), (16 * pages, 8 * N + 1)):
        got = select_op.select_from_mass(log_mass, total, ids(*lengths), 2, **options, out=out, work=work)
        assert got[0] is out[0]
        assert got[1] is out[1]
        want = select_op.select_from_mass(log_mass, total, ids(*lengths), 2, **options)
        assert got[0].tolist() == want[0].tolist()
        assert got[1].tolist() == want[1].tolist()


def test_a_workspace_that_is_too_small_is_refused():
    log_mass, total = masses_of("random", 2, 64)
    work = select_op.workspace(1, 2, 64, 8, DEVICE)
    with pytest.raises(ValueError, match=r"^work.keys: expected at least \[2, 2, 128\], got \[1, 2, 128\]$"):
        select_op.select_from_mass(log_mass, total, ids(9, 9), 2, page=16, pages=8, window_pages=1, work=work)


@pytest.mark.parametrize("N", [1, 4096, 4097, 8192, 20000, 65536, 200_000, 3_000_000])
@pytest.mark.parametrize("pages", [3, 64, 100, 128, 500, 4096])
def test_a_plan_keeps_to_what_a_program_holds(N, pages):
    shape = select_op.plan(N, pages)
    if shape.group:
        assert shape.group * shape.block_c >= N
        assert shape.slots >= pages
        assert 256 * shape.warps <= shape.slots * shape.group <= select_op.IN_REGISTERS
        # What the second kernel reads of the maxima, four by four, is what a program of the first writes.
        assert shape.block_n % (4 * shape.group) == 0
    if shape.block_c:
        assert 256 * shape.warps <= shape.block_c <= select_op.MAX_GROUPS
    else:
        assert N > select_op.DIRECT


@pytest.mark.gpu
def test_a_captured_selection_follows_the_lengths():
    log_mass, total = masses_of("random", 2, 4160)
    lens = ids(16 * 4160, 999)
    out = torch.empty(2, 2, 12, dtype=torch.int32, device=DEVICE), ids([0, 0], [0, 0])
    given_ = {"page": 16, "pages": 12, "window_pages": 1, "out": out}
    given_["work"] = select_op.workspace(2, 2, 4160, 12, DEVICE)
    select_op.select_from_mass(log_mass, total, lens, 2, **given_)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_op.select_from_mass(log_mass, total, lens, 2, **given_)
    share = select_op.share(log_mass, total, 2)
    for lengths in ((16 * 4160, 999), (0, 16 * 3000), (200, 16 * 4000)):
        lens.copy_(ids(*lengths))
        graph.replay()
        want = reference.select_pages(share, lens, page=16, budget=192)
        assert out[0].tolist() == want.page_ids.tolist()
        assert out[1].tolist() == want.counts.tolist()


@by_impl
def test_a_row_selects_what_it_selects_alone(impl):
    share = torch.randint(0, 6, (3, 2, 30), generator=generator(0)).float().to(DEVICE)
    lens, options = ids(480, 33, 200), {"page": 16, "budget": 96, "impl": impl}
    together = select_pages(share, lens, **options)
    for b, width in ((0, 30), (1, 3), (2, 13)):
        alone = select_pages(share[b : b + 1, :, :width], lens[b : b + 1], **options)
        assert alone.page_ids[0].tolist() == together.page_ids[b].tolist()
        assert alone.counts[0].tolist() == together.counts[b].tolist()


@pytest.mark.gpu
@given(selection=selections())
@examples(1)
def test_equal_runs_select_equal_pages(selection):
    share, lens, options = selection
    first = select_pages(share, lens, impl="triton", **options)
    for _ in range(3):
        assert_same_pages(select_pages(share, lens, impl="triton", **options), first)


def test_the_least_budget_buys_the_first_page_the_newest_and_one_candidate():
    assert least_budget(16) == least_budget(16, 1) == 48
    assert least_budget(32, 3) == 160
    assert budget_pages(48, 16) == budget_pages(48, 16, 1) == 3
    assert budget_pages(320, 64, 2) == 5
