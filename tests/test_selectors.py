"""Every selector against a plain loop in fp64, and what all of them promise."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locks import reference
from locks.baselines import RandomPages, SharedBasis, fit_shared
from locks.format import SummaryFormat
from locks.pages import by_page
from locks.selectors import SELECTORS, Oracle, make_selector

KEPT = [name for name in SELECTORS if name != "oracle"]
SCALE = 0.125


class Case(NamedTuple):
    q: Tensor
    k_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    page: int

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k_cache, self.block_table, self.seq_lens

    def keys(self, row: int, head: int) -> Tensor:
        """The row's keys for a query head in order, fp64 [T, D]."""
        group = self.q.shape[1] // self.k_cache.shape[1]
        return reference.row_tokens(*self.table, row)[head // group].double()

    def scored(self, row: int) -> int:
        """How many pages of the row have a log-mass."""
        return max(0, -(-int(self.seq_lens[row]) // self.page) - 1)


def make_case(
    lens: list[int],
    *,
    page: int = 16,
    per_block: int = 2,
    heads: int = 2,
    group: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Ragged rows over shuffled blocks; slots that no token owns hold nan."""
    rng = torch.Generator().manual_seed(seed)
    block = page * per_block
    need = [-(-n // block) for n in lens]
    width, total = max(1, *need), sum(need) + 1
    ids = torch.randperm(total, generator=rng).to(torch.int32)
    table = torch.zeros(len(lens), width, dtype=torch.int32)
    cache = torch.full((total, heads, block, dim), math.nan, dtype=dtype)
    # Keys share an offset and a few strong directions, as a model's do.
    spread = torch.logspace(0.5, -1, dim).expand(heads, 1, dim)
    offset = torch.randn(heads, 1, dim, generator=rng)
    for row, (tokens, blocks) in enumerate(zip(lens, need, strict=True)):
        mine, ids = ids[:blocks], ids[blocks:]
        table[row, :blocks] = mine
        keys = (torch.randn(heads, tokens, dim, generator=rng) * spread + offset).to(dtype)
        for token in range(tokens):
            cache[mine[token // block], :, token % block] = keys[:, token]
    q = torch.randn(len(lens), heads * group, dim, generator=rng).to(dtype)
    return Case(q, cache, table, torch.tensor(lens, dtype=torch.int32), page)


def selector_for(name: str, case: Case) -> Any:
    return make_selector(name, SummaryFormat(page=case.page), case.q.shape[-1])


def sealed(selector: Any, case: Case) -> Any:
    state = selector.allocate(case.k_cache)
    selector.seal(state, *case.table)
    return state


def mass_of(selector: Any, state: Any, case: Case) -> Any:
    return selector.page_mass(case.q, state, *case.table, scale=SCALE)


cases = st.builds(
    make_case,
    st.lists(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 100, 128]), min_size=1, max_size=3),
    page=st.sampled_from([16, 32]),
    per_block=st.sampled_from([1, 3]),
    heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from([64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)


def loop_quest(q: Tensor, keys: Tensor) -> float:
    return sum(
        max(x * min(column), x * max(column)) for x, column in zip(q.tolist(), keys.T.tolist(), strict=True)
    )


def loop_mean(q: Tensor, keys: Tensor) -> float:
    return math.log(len(keys)) + float(q @ keys.mean(0))


def loop_oracle(q: Tensor, keys: Tensor) -> float:
    return math.log(sum(math.exp(float(q @ key)) for key in keys))


def loop_arkvale(q: Tensor, keys: Tensor) -> float:
    center = keys.mean(0)
    return float(q @ center + q.norm() * max((key - center).norm() for key in keys))


LOOPS = {"quest": loop_quest, "mean": loop_mean, "oracle": loop_oracle, "arkvale": loop_arkvale}


@pytest.mark.parametrize("name", sorted(LOOPS))
@given(case=cases)
def test_score_equals_a_plain_loop_in_fp64(name: str, case: Case) -> None:
    selector = selector_for(name, case)
    mass = mass_of(selector, sealed(selector, case), case)
    # The ball's centre is rounded to the cache's dtype and its radius up to bfloat16.
    rounded = {"mean": case.q.dtype, "arkvale": torch.bfloat16}.get(name, torch.float32)
    for row in range(case.q.shape[0]):
        totals = []
        for head in range(case.q.shape[1]):
            q, keys = case.q[row, head].double() * SCALE, case.keys(row, head)
            pages = [keys[n * case.page :][: case.page] for n in range(case.scored(row))]
            want = torch.tensor([LOOPS[name](q, page) for page in pages], dtype=torch.float64)
            got = mass.log_mass[row, head].double()
            room = torch.finfo(rounded).eps * float(q.norm() * keys.norm(dim=-1).amax()) * 2 if pages else 0
            assert (got[: len(pages)] - want).abs().le(room + 1e-4).all()
            assert got[len(pages) :].eq(-math.inf).all()
            totals.append(got[1 : len(pages)].logsumexp(0))
        torch.testing.assert_close(mass.total[row].double(), torch.stack(totals), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["quest", "arkvale"])
@given(case=cases)
def test_score_bounds_the_largest_logit(name: str, case: Case) -> None:
    selector = selector_for(name, case)
    mass = mass_of(selector, sealed(selector, case), case).log_mass
    for row in range(case.q.shape[0]):
        for head in range(case.q.shape[1]):
            q, keys = case.q[row, head].double() * SCALE, case.keys(row, head)
            n = case.scored(row)
            logits = (keys[: n * case.page] @ q).unflatten(0, (n, case.page)) if n else torch.empty(0, 1)
            largest = logits.amax(-1)
            # The score itself is computed in fp32.
            room = 1e-5 * (1 + largest.abs())
            assert (mass[row, head, :n].double() >= largest - room).all()


def test_arkvale_s_ball_holds_every_key_as_stored() -> None:
    case = make_case([2048], dtype=torch.bfloat16)
    selector = selector_for("arkvale", case)
    center, radius = sealed(selector, case).parts
    paged = by_page(case.k_cache, 16)
    held = case.block_table[0].long()
    distance = (paged[held].double() - center[held].double()[..., None, :]).norm(dim=-1).amax(-1)
    ratio = radius[held][..., 0].double() / distance
    assert ratio.min() >= 1 - 1e-6
    assert ratio.max() < 1.01


def decode_shared(selector: SharedBasis, state: Any, block: int, head: int, slot: int) -> Tensor:
    """A page's keys [P, D] in fp64, read out of the bytes by hand."""
    codes, scale = (part[block, head, slot] for part in state.parts)
    count = selector.page * selector.rank
    numbers = [0] * count
    for i, byte in enumerate(codes.tolist()):
        low, high = byte & 15, byte >> 4
        numbers[i], numbers[i + count // 2] = (x - 16 if x > 7 else x for x in (low, high))
    coef = torch.tensor(numbers, dtype=torch.float64).unflatten(0, (selector.page, selector.rank))
    mean, basis = (x[head].double() for x in state.factors)
    return mean + float(scale) * coef @ basis


@given(case=cases)
def test_shared_basis_scores_the_keys_that_its_bytes_stand_for(case: Case) -> None:
    selector = selector_for("shared", case)
    state = sealed(selector, case)
    mass = mass_of(selector, state, case).log_mass
    group, per_block = case.q.shape[1] // case.k_cache.shape[1], case.k_cache.shape[2] // case.page
    for row in range(case.q.shape[0]):
        for head in range(case.q.shape[1]):
            q = case.q[row, head].double() * SCALE
            for page in range(case.scored(row)):
                block = int(case.block_table[row, page // per_block])
                kept = decode_shared(selector, state, block, head // group, page % per_block)
                assert float(mass[row, head, page]) == pytest.approx(float((kept @ q).logsumexp(0)), abs=1e-4)


def test_shared_basis_rounds_each_coefficient_to_the_nearest_code() -> None:
    case = make_case([160])
    selector = selector_for("shared", case)
    state = sealed(selector, case)
    mean, basis = (x.double() for x in state.factors)
    paged = by_page(case.k_cache, 16)
    for page in range(10):
        block, slot = int(case.block_table[0, page // 2]), page % 2
        for head in range(2):
            dual = basis[head] / basis[head].square().sum(-1, keepdim=True)
            want = (paged[block, head, slot].double() - mean[head]) @ dual.T
            kept = (decode_shared(selector, state, block, head, slot) - mean[head]) @ torch.linalg.pinv(
                basis[head]
            )
            step = float(state.parts[1][block, head, slot])
            assert (kept - want).abs().max() <= 0.501 * step
            assert want.abs().max() <= 7 * step <= want.abs().max() * 1.01


def test_shared_basis_is_the_principal_one() -> None:
    keys = torch.randn(2, 400, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(1, -1, 64) + 2
    factors = fit_shared(keys, 8)
    for head in range(2):
        centred = keys[head].double() - keys[head].double().mean(0)
        best = torch.linalg.svd(centred).Vh[:8]
        directions = torch.nn.functional.normalize(factors.basis[head].double(), dim=-1)
        lost = (centred - centred @ directions.T @ directions).norm()
        assert lost <= 1.001 * (centred - centred @ best.T @ best).norm()
        deviation = (centred @ best.T).square().mean(0).sqrt()
        length = factors.basis[head].double().norm(dim=-1)
        torch.testing.assert_close(length / length[0], (deviation / deviation[0]).sqrt(), rtol=0.01, atol=0)
        torch.testing.assert_close(
            factors.mean[head], keys[head].mean(0).to(torch.bfloat16), rtol=0.01, atol=0.01
        )


def test_shared_basis_of_full_rank_and_bits_is_exact() -> None:
    case = make_case([200, 70])
    selector = SharedBasis(16, 64, coef_bits=16)
    mass = mass_of(selector, sealed(selector, case), case)
    exact = reference.exact_page_mass(case.q, *case.table, page=16, scale=SCALE)
    live = exact.log_mass.isfinite()
    # bfloat16 rounds the basis; nothing else is lost.
    assert (mass.log_mass.double() - exact.log_mass)[live].abs().max() < 0.05


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(("page", "rank"), [(16, 1), (16, 4), (16, 8), (32, 4), (64, 16)])
def test_matching_takes_the_record_s_bytes(page: int, rank: int, bits: int, dim: int) -> None:
    fmt = SummaryFormat(page, rank, basis_bits=bits, coef_bits=bits)
    record = fmt.layout(dim).nbytes
    shared = SharedBasis.matching(fmt, dim)
    assert shared.coef_bits == bits
    own = shared.resident_bytes(dim, 2) - shared.resident_bytes(dim, 1)
    assert own <= record
    assert shared.rank == dim or own > record - page * bits / 8


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("dim", [64, 128])
def test_counted_bytes_are_the_tensors_bytes(name: str, dim: int) -> None:
    case = make_case([64, 128], dim=dim, dtype=torch.float16)
    selector = selector_for(name, case)
    state = sealed(selector, case)
    tensors: list[Tensor] = []
    if isinstance(state, Tensor):
        tensors = [state]
    elif state is not None:
        tensors = [*state.parts, *(state.factors or ())]
    held = sum(t.numel() * t.element_size() for t in tensors)
    blocks, heads, block, _ = case.k_cache.shape
    pages = blocks * block // 16
    assert held == heads * selector.resident_bytes(dim, pages)
    scanned = case.k_cache.numel() * 2 if name == "oracle" else held
    assert heads * selector.scan_bytes(dim, pages) == scanned


def test_quest_keeps_a_sixteenth_of_k_and_v() -> None:
    assert make_selector("quest").resident_bytes(128, 1) / (2 * 2 * 16 * 128) == 1 / 16


@pytest.mark.parametrize("name", KEPT)
@given(lens=st.lists(st.integers(0, 130), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_scoring_reads_no_key(name: str, lens: list[int], seed: int) -> None:
    case = make_case(lens, seed=seed)
    selector = selector_for(name, case)
    state = sealed(selector, case)
    before = mass_of(selector, state, case)
    case.k_cache.fill_(math.nan)
    after = mass_of(selector, state, case)
    assert torch.equal(before.log_mass, after.log_mass)
    assert torch.equal(before.total, after.total)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_key_ranks_its_page_first_and_changes_nothing_else(name: str, value: float) -> None:
    case = make_case([100, 128])
    selector = selector_for(name, case)
    if name == "shared":
        # Fitted to other keys, the basis would change every score.
        keys = torch.cat([case.k_cache[case.block_table[row].long()] for row in range(2)]).nan_to_num()
        selector = SharedBasis(16, 31, factors=fit_shared(keys.transpose(0, 1).flatten(1, 2), 31))
    clean = mass_of(selector, sealed(selector, case), case)
    # Page 3 of row 1, KV head 0.
    case.k_cache[case.block_table[1, 1], 0, 20, 5] = value
    got = mass_of(selector, sealed(selector, case), case)
    want = clean.log_mass.clone()
    want[1, :3, 3] = math.inf
    assert torch.equal(got.log_mass, want)
    assert torch.equal(got.total[0], clean.total[0])
    assert torch.equal(got.total[1, 3:], clean.total[1, 3:])
    others = clean.log_mass[1, :3, [1, 2, 4, 5, 6]].logsumexp(-1)
    torch.testing.assert_close(got.total[1, :3], others)


@pytest.mark.parametrize("name", [name for name in KEPT if name != "shared"])
def test_sealing_page_by_page_equals_sealing_at_once(name: str) -> None:
    case = make_case([77, 130])
    selector = selector_for(name, case)
    state = selector.allocate(case.k_cache)
    for tokens in range(0, 131):
        upto = case.seq_lens.clamp(max=tokens)
        start = (upto - 1).clamp(min=0)
        selector.seal(state, case.k_cache, case.block_table, upto, start=start, max_new_pages=1)
    got, want = mass_of(selector, state, case), mass_of(selector, sealed(selector, case), case)
    assert torch.equal(got.log_mass, want.log_mass)


@pytest.mark.parametrize("name", KEPT)
def test_a_step_that_fills_no_page_changes_nothing(name: str) -> None:
    """Between two pages' ends, where the newest page's slots behind the row hold nan."""
    case = make_case([77, 130])
    selector = selector_for(name, case)
    state = sealed(selector, case)
    parts = (state,) if isinstance(state, Tensor) else state.parts
    before = [part.clone() for part in parts]
    selector.seal(state, *case.table, start=case.seq_lens - 1, max_new_pages=1)
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part, old)


def test_shared_basis_keeps_its_first_fit() -> None:
    case = make_case([130])
    selector = selector_for("shared", case)
    state = selector.allocate(case.k_cache)
    selector.seal(state, case.k_cache, case.block_table, torch.tensor([15], dtype=torch.int32))
    assert state.factors is None
    selector.seal(state, case.k_cache, case.block_table, torch.tensor([96], dtype=torch.int32))
    first, page = state.factors, state.parts[0].clone()
    selector.seal(state, *case.table, start=torch.tensor([96], dtype=torch.int32))
    assert state.factors is first
    assert torch.equal(state.parts[0][case.block_table[0, :3].long()], page[case.block_table[0, :3].long()])
    assert mass_of(selector, state, case).log_mass[0, :, :8].isfinite().all()


@pytest.mark.parametrize("name", KEPT)
def test_a_larger_cache_carries_the_old_state(name: str) -> None:
    case = make_case([100, 128])
    selector = selector_for(name, case)
    state = sealed(selector, case)
    larger = torch.cat([case.k_cache, torch.zeros_like(case.k_cache)])
    grown = selector.allocate(larger, state)
    got = selector.page_mass(case.q, grown, larger, case.block_table, case.seq_lens, scale=SCALE)
    assert torch.equal(got.log_mass, mass_of(selector, state, case).log_mass)
    held = grown if isinstance(grown, Tensor) else grown.parts[0]
    assert held.shape[0] == larger.shape[0]


@pytest.mark.parametrize("name", KEPT)
def test_enormous_keys_give_no_nan(name: str) -> None:
    case = make_case([128], dtype=torch.bfloat16)
    case.k_cache[case.block_table[0, 0], :, 3] *= 1e30
    selector = selector_for(name, case)
    mass = mass_of(selector, sealed(selector, case), case)
    assert not mass.log_mass.isnan().any()
    assert not mass.total.isnan().any()


def test_random_pages_depend_on_seed_row_head_and_page_alone() -> None:
    case, other = make_case([400, 300]), make_case([400, 300], seed=5)
    wide = case.block_table.new_zeros(2, 40)
    wide[:, : other.block_table.shape[1]] = other.block_table
    selector = RandomPages(seed=7)
    one = mass_of(selector, sealed(selector, case), case).log_mass
    two = mass_of(selector, sealed(selector, other), other._replace(block_table=wide)).log_mass
    assert torch.equal(one, two[:, :, : one.shape[2]])
    drawn = one[0, :, :24].exp()
    assert len(drawn.unique()) == drawn.numel()
    assert 0.4 < drawn.mean() < 0.6
    third = RandomPages(seed=8)
    assert not torch.equal(mass_of(third, sealed(third, case), case).log_mass, one)


def test_oracle_is_the_reference() -> None:
    case = make_case([100, 17, 128], dtype=torch.float16)
    got = Oracle(16).page_mass(case.q, None, *case.table, scale=SCALE)
    want = reference.exact_page_mass(case.q, *case.table, page=16, scale=SCALE)
    torch.testing.assert_close(got.log_mass.double(), want.log_mass, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SELECTORS)
def test_names_and_pages(name: str) -> None:
    selector = make_selector(name, SummaryFormat(page=32), 64)
    assert (selector.name, selector.page) == (name, 32)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"name: expected one of \('locks', .*'random'\), got 'best'"):
        make_selector("best")
    with pytest.raises(ValueError, match=r"head_dim: expected .*'shared'"):
        make_selector("shared")
    with pytest.raises(ValueError, match="page: expected one of"):
        RandomPages(17)
    with pytest.raises(ValueError, match="rank: expected at most D = 64, got 65"):
        SharedBasis(16, 65).allocate(torch.zeros(1, 1, 16, 64))
    with pytest.raises(ValueError, match="rank: expected at least 1, got 0"):
        SharedBasis(16, 0)
    with pytest.raises(ValueError, match="coef_bits: expected one of"):
        SharedBasis(16, 8, coef_bits=5)
    with pytest.raises(ValueError, match="block size that is a multiple of the page"):
        make_selector("quest").allocate(torch.zeros(1, 1, 24, 64))
    wrong = fit_shared(torch.randn(2, 40, 64), 7)
    with pytest.raises(ValueError, match=r"basis: expected bfloat16 \[2, 8, 64\], got bfloat16 \[2, 7, 64\]"):
        SharedBasis(16, 8, factors=wrong).allocate(torch.zeros(1, 2, 16, 64))
