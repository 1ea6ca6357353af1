"""The record: its sizes, its bytes (read here by a second unpacking) and what its numbers promise."""

import itertools
import math
import struct

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from locks import SummaryFormat, allocate_records, reference
from locks.format import (
    BF16_MAX,
    ROUNDING,
    Factors,
    bf16_value,
    code_max,
    encode,
    rotate,
    round_up_bf16,
    unpack,
)
from tests.helpers import examples, formats

P, D = 16, 64


def rotation(width: int) -> torch.Tensor:
    """What vectors are multiplied by before they are quantised, block by block; 0.25 times signs at a width of 80."""
    size = math.gcd(width // 2, 16)
    signs = torch.tensor(scipy.linalg.hadamard(2 * size), dtype=torch.float64)
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for first in range(0, width // 2, size):
        one = torch.arange(first, first + size)
        block = torch.cat([one, one + width // 2])
        matrix[block[:, None], block[None, :]] = signs / (2 * size) ** 0.5
    return matrix


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def read_codes(data: bytes, count: int, bits: int) -> list[int]:
    """Codes of one vector: at 4 bits the first half is in low nibbles and the second half in high ones."""
    if bits == 4:
        assert len(data) == count // 2
        return [signed(byte & 15, 4) for byte in data] + [signed(byte >> 4, 4) for byte in data]
    return list(struct.unpack(f"<{count}{'b' if bits == 8 else 'h'}", data))


def read_bf16(data: bytes) -> float:
    return struct.unpack("<f", b"\0\0" + data)[0]


def read_record(data: bytes, fmt: SummaryFormat, width: int) -> dict:
    """One record byte by byte, in the order that the module's docstring gives."""
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return data[at - count : at]

    mean = read_codes(take(width * fmt.mean_bits // 8), width, fmt.mean_bits)
    basis = [read_codes(take(width * fmt.basis_bits // 8), width, fmt.basis_bits) for _ in range(fmt.rank)]
    # Tokens are the slow axis (pairs of tokens half a page apart at 4 bits), ranks the fast one.
    if fmt.coef_bits == 4:
        pairs = [[take(1)[0] for _ in range(fmt.rank)] for _ in range(fmt.page // 2)]
        coef = [[signed(b & 15, 4) for b in row] for row in pairs]
        coef += [[signed(b >> 4, 4) for b in row] for row in pairs]
    else:
        size = fmt.coef_bits // 8
        coef = [read_codes(take(size * fmt.rank), fmt.rank, fmt.coef_bits) for _ in range(fmt.page)]
    numbers = [read_bf16(take(2)) for _ in range(3 + fmt.rank)]
    assert len(data) % 32 == 0
    assert 0 <= len(data) - at < 32
    assert not any(data[at:])
    return {
        "mean": [c * numbers[fmt.rank] for c in mean],
        "basis": basis,
        "coef": [[c * s for c, s in zip(row, numbers[: fmt.rank], strict=True)] for row in coef],
        "variance": numbers[fmt.rank + 1],
        "residual_norm": numbers[fmt.rank + 2],
        "codes": (mean, basis, coef),
    }


def some_keys(*lead: int, page: int = P, width: int = D, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(*lead, page, width, generator=gen, dtype=torch.float64)
    return keys + torch.randn(*lead, 1, width, generator=gen, dtype=torch.float64)


def reconstruct(record) -> torch.Tensor:
    return record.mean[..., None, :] + record.coef @ record.basis


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page": 8}, r"page: expected one of \(16, 32, 64\), got 8"),
        ({"page": 48}, r"page: expected one of \(16, 32, 64\), got 48"),
        ({"page": 128}, r"page: expected one of \(16, 32, 64\), got 128"),
        ({"page": None}, r"page: expected one of \(16, 32, 64\), got None"),
        ({"rank": 0}, r"rank: expected one of \(1, 2, 4, 8, 16\), got 0"),
        ({"rank": 3}, r"rank: expected one of \(1, 2, 4, 8, 16\), got 3"),
        ({"rank": True}, r"rank: expected one of \(1, 2, 4, 8, 16\), got True"),
        ({"page": 64, "rank": 32}, r"rank: expected one of \(1, 2, 4, 8, 16\), got 32"),
        ({"rank": 16}, "rank: expected at most page - 1 = 15, got 16"),
        ({"mean_bits": 2}, r"mean_bits: expected one of \(4, 8, 16\), got 2"),
        ({"basis_bits": 32}, r"basis_bits: expected one of \(4, 8, 16\), got 32"),
        ({"coef_bits": 5}, r"coef_bits: expected one of \(4, 8, 16\), got 5"),
        ({"page": 16.0}, r"page: expected one of \(16, 32, 64\), got 16.0"),
        ({"basis_bits": 4.0}, r"basis_bits: expected one of \(4, 8, 16\), got 4.0"),
    ],
)
def test_a_size_that_is_not_supported_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        SummaryFormat(**arguments)


def test_the_default_format_is_the_designs():
    assert SummaryFormat() == SummaryFormat(page=16, rank=4, mean_bits=8, basis_bits=4, coef_bits=4)


def test_every_supported_combination_is_accepted_and_laid_out_without_gaps():
    for page, rank, mean, basis, coef in itertools.product(
        (16, 32, 64), (1, 2, 4, 8, 16), (4, 8, 16), (4, 8, 16), (4, 8, 16)
    ):
        if rank >= page:
            continue
        at = SummaryFormat(page, rank, mean, basis, coef).layout(80)
        sizes = [80 * mean // 8, rank * 80 * basis // 8, page * rank * coef // 8, 2 * (3 + rank)]
        assert [at.mean, at.basis, at.coef, at.scales] == [sum(sizes[:i]) for i in range(4)]
        assert at.nbytes % 32 == 0
        assert 0 <= at.nbytes - sum(sizes) < 32


@pytest.mark.parametrize(
    ("rank", "nbytes", "share", "fewer"), [(8, 736, 0.100, 9.8), (4, 448, 0.060, 16), (2, 288, 0.040, 24)]
)
def test_bytes_of_actual_tensors_reach_the_numbers_asked_for(rank, nbytes, share, fewer):
    """Resident bytes over K+V, and bytes read a step at 2**20 tokens with a budget of 2,048."""
    fmt, tokens, budget = SummaryFormat(16, rank), 2**20, 2048
    k = torch.zeros(tokens // 16, 1, 16, 128, dtype=torch.bfloat16, device="meta")
    records = allocate_records(k, fmt)
    assert records.nbytes == nbytes * tokens // 16
    assert records.nbytes / (2 * k.nbytes) <= share
    assert fmt.resident_share(128) == records.nbytes / (2 * k.nbytes)
    attended = 2 * k[: budget // 16].nbytes
    assert 2 * k.nbytes / (records.nbytes + attended) >= fewer


def test_resident_share_counts_the_values_own_width():
    assert SummaryFormat(16, 4).resident_share(128, 64) == 448 / (2 * 16 * (128 + 64))


@pytest.mark.parametrize(
    "fmt",
    [
        SummaryFormat(),
        SummaryFormat(16, 1, 16, 4, 8),
        SummaryFormat(16, 2, 4, 8, 16),
        SummaryFormat(32, 16, 8, 16, 4),
        SummaryFormat(64, 8, 16, 16, 16),
        SummaryFormat(32, 4, 4, 4, 8),
    ],
)
@pytest.mark.parametrize("width", [64, 80, 256])
def test_unpack_reads_a_record_as_its_layout_says_byte_by_byte(fmt, width):
    records = reference.summarize_pages(some_keys(2, page=fmt.page, width=width, seed=fmt.rank), fmt)
    assert records.dtype == torch.uint8
    assert records.shape == (2, fmt.layout(width).nbytes)
    got = unpack(records, fmt, width, torch.float64)
    for page in range(2):
        want = read_record(bytes(records[page].tolist()), fmt, width)
        for name in ("coef", "variance", "residual_norm"):
            assert getattr(got, name)[page].tolist() == want[name], name
        for name in ("mean", "basis"):
            vectors = torch.tensor(want[name], dtype=torch.float64)
            torch.testing.assert_close(
                getattr(got, name)[page], vectors @ rotation(width), rtol=1e-12, atol=1e-12
            )
        # Each vector uses its whole range, less what a scale gains by being rounded up.
        mean, basis, _ = want["codes"]
        assert max(abs(c) for c in mean) >= code_max(fmt.mean_bits) * (1 - 2**-7) - 0.5
        assert {max(abs(c) for c in vector) for vector in basis} == {code_max(fmt.basis_bits)}


@given(formats(), st.integers(0, 2**16))
@examples(15)
def test_no_code_leaves_its_symmetric_range(fmt, seed):
    record = read_record(
        bytes(reference.summarize_pages(some_keys(page=fmt.page, seed=seed), fmt).tolist()), fmt, D
    )
    mean, basis, coef = record["codes"]
    assert max(map(abs, mean)) <= code_max(fmt.mean_bits)
    assert max(abs(c) for v in basis for c in v) <= code_max(fmt.basis_bits)
    assert max(abs(c) for v in coef for c in v) <= code_max(fmt.coef_bits)


def test_unpack_returns_the_dtype_asked_for():
    records = reference.summarize_pages(some_keys(), SummaryFormat())
    assert {x.dtype for x in unpack(records, SummaryFormat(), D)} == {torch.float32}
    assert {x.dtype for x in unpack(records, SummaryFormat(), D, torch.float64)} == {torch.float64}


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256, 16, 240])
def test_a_rotation_mixes_blocks_of_paired_halves_and_undoes_itself(width):
    x = torch.randn(3, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(rotate(x), x @ rotation(width), rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=0, atol=1e-13)
    assert rotate(x.float()).dtype == torch.float32


def test_one_large_channel_costs_the_others_no_precision():
    """Post-RoPE keys have such channels: without a rotation int4 codes would round all the others to 0."""
    keys = some_keys(64)
    keys = keys - keys.mean(-2, keepdim=True)
    keys[..., 3] *= 8
    fmt = SummaryFormat(16, 8, 16, 4, 16)
    error = keys - reconstruct(unpack(reference.summarize_pages(keys, fmt), fmt, D, torch.float64))
    best = torch.linalg.svdvals(keys)[:, 8:].square().sum()
    assert error.square().sum() < 1.12 * best


def test_code_max_is_the_end_of_a_symmetric_range():
    assert [code_max(bits) for bits in (4, 8, 16)] == [7, 127, 32767]


@given(st.floats(0, 2.0**126, width=32))
def test_round_up_bf16_gives_the_least_bfloat16_that_is_not_below(x):
    bits = round_up_bf16(torch.tensor([x]))
    assert bits.dtype == torch.int16
    up = bf16_value(bits, torch.float64).item()
    assert up >= x
    below = bf16_value(bits - 1, torch.float64).item() if bits.item() else -1.0
    assert below < x


def test_round_up_bf16_stops_at_the_largest_finite_one():
    assert torch.finfo(torch.bfloat16).max == BF16_MAX
    bits = round_up_bf16(torch.tensor([3.4e38, math.inf]))
    assert bf16_value(bits, torch.float64).tolist() == [BF16_MAX, BF16_MAX]


def test_a_constant_page_is_its_mean():
    """127 in every rotated slot: mean scale 1, codes 127, nothing else but the allowance for float32 rounding."""
    keys = torch.full((P, 80), 127.0, dtype=torch.float64) @ rotation(80)
    fmt = SummaryFormat()
    record = read_record(bytes(reference.summarize_pages(keys, fmt).tolist()), fmt, 80)
    assert record["mean"] == [127.0] * 80
    assert not any(any(v) for v in record["codes"][1] + record["codes"][2])
    assert record["variance"] == 0
    # |k| times 2**-14, one step of a bfloat16 at most above.
    assert ROUNDING == 2**-14
    assert 1 <= record["residual_norm"] / (127 * 80**0.5 * 2**-14) <= 1 + 2**-7


@pytest.mark.parametrize(
    ("value", "code"), [(-0.5, 0), (0.5, 1), (1.5, 2), (-1.5, -1), (2.49, 2), (-2.51, -3)]
)
def test_codes_round_halves_up(value, code):
    """A mean whose largest element is 127 has scale 1."""
    keys = torch.zeros(P, 80, dtype=torch.float64)
    keys[:, 0], keys[:, 1] = 127, value
    record = reference.summarize_pages(keys @ rotation(80), SummaryFormat())
    assert read_record(bytes(record.tolist()), SummaryFormat(), 80)["codes"][0][1] == code


def test_a_coefficient_is_fitted_to_what_the_ranks_before_left():
    """A page of two tokens' directions, by hand: mean 0, basis vectors of one element each."""
    keys = torch.zeros(P, 80, dtype=torch.float64)
    keys[0, 0], keys[1, 0] = 7.0, -7.0
    keys[2, 1], keys[3, 1] = 3.5, -3.5
    basis = torch.zeros(2, 80, dtype=torch.float64)
    basis[0, 0], basis[1, 1] = 1, -1
    fmt = SummaryFormat(16, 2)
    keys, basis = keys @ rotation(80), basis @ rotation(80)
    factors = Factors(keys.mean(0), basis, torch.full((P, 2), math.nan, dtype=torch.float64))
    record = read_record(bytes(encode(keys, factors, fmt).tolist()), fmt, 80)
    _, vectors, coef = record["codes"]
    assert vectors[0] == [7] + [0] * 79
    assert vectors[1] == [0, -7] + [0] * 78
    assert coef == [[7, 0], [-7, 0], [0, -7], [0, 7]] + [[0, 0]] * 12
    # 7 = coefficient 1 times code 7, so the scale is 1/7 rounded up: 0.1431 (bfloat16).
    scale = record["coef"][0][0] / 7
    assert 1 / 7 <= scale <= 1 / 7 * (1 + 2**-7)
    assert record["coef"][2][1] == -7 * scale / 2
    left = [(7 - 49 * scale) ** 2 * 2, (3.5 - 49 * scale / 2) ** 2 * 2]
    assert record["variance"] == pytest.approx(sum(left) / (P * 80), rel=2**-7)


def test_rounding_of_one_rank_is_taken_up_by_the_next():
    """Both basis vectors are the same direction: the second one codes what the first one's rounding left."""
    keys = torch.zeros(P, D, dtype=torch.float64)
    keys[:, 0] = torch.linspace(-1, 1, P, dtype=torch.float64)
    basis = torch.zeros(2, D, dtype=torch.float64)
    basis[:, 0] = 1
    page = Factors(keys.mean(0), basis, keys.new_zeros(P, 2))
    once = unpack(
        encode(keys, Factors(page.mean, basis[:1], page.coef[:, :1]), SummaryFormat(16, 1)),
        SummaryFormat(16, 1),
        D,
    )
    twice = unpack(encode(keys, page, SummaryFormat(16, 2)), SummaryFormat(16, 2), D)
    assert 0 < twice.residual_norm - ROUNDING < 0.2 * (once.residual_norm - ROUNDING)


@given(formats(), st.sampled_from((64, 80, 128)), st.floats(-15, 15), st.integers(0, 2**16))
@examples(15)
def test_variance_and_residual_norm_are_those_of_the_dequantised_page_rounded_up(fmt, width, power, seed):
    keys = some_keys(3, page=fmt.page, width=width, seed=seed) * 10.0**power
    record = unpack(reference.summarize_pages(keys, fmt), fmt, width, torch.float64)
    residual = keys - reconstruct(record)
    variance = residual.square().mean((-1, -2))
    norm = residual.norm(dim=-1).amax(-1) + ROUNDING * keys.norm(dim=-1).amax(-1)
    for stored, exact in ((record.variance, variance), (record.residual_norm, norm)):
        # One bfloat16 step above at most; 2**-20 is float32 rounding ahead of it.
        exact = exact.clamp(min=torch.finfo(torch.float32).smallest_normal)
        assert (stored >= exact * (1 - 2**-20)).all()
        assert (stored <= exact * (1 + 2**-7 + 2**-20)).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_more_bits_bring_the_reconstruction_to_the_best_of_its_rank(bits):
    keys = some_keys(4)
    fmt = SummaryFormat(16, 8, bits, bits, bits)
    record = unpack(reference.summarize_pages(keys, fmt), fmt, D, torch.float64)
    error = (keys - reconstruct(record)).norm(dim=(-1, -2))
    centred = keys - keys.mean(-2, keepdim=True)
    best = torch.linalg.svdvals(centred)[:, 8:].norm(dim=-1)
    assert (error >= best * (1 - 1e-6)).all()
    assert (error <= best * {4: 1.25, 8: 1.01, 16: 1.00001}[bits]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_page_with_a_non_finite_key_gets_a_marked_record_and_no_other_page_does(bad):
    keys, fmt = some_keys(3, 2), SummaryFormat()
    clean = reference.summarize_pages(keys, fmt)
    keys[1, 0, 5, 7] = bad
    records = reference.summarize_pages(keys, fmt)
    marked = read_record(bytes(records[1, 0].tolist()), fmt, D)
    assert marked["variance"] == marked["residual_norm"] == math.inf
    assert not any(any(part) for part in marked["codes"][1] + marked["codes"][2])
    assert not any(marked["codes"][0])
    assert marked["coef"] == [[0.0] * 4] * P
    records[1, 0] = clean[1, 0]
    assert torch.equal(records, clean)


@pytest.mark.parametrize("magnitude", [3e38, 1e30, 1e-30, 1e-44])
def test_finite_keys_of_any_magnitude_give_finite_numbers(magnitude):
    """float32, where squares of such keys overflow or vanish."""
    keys = (some_keys().float() / 8).clamp(-1, 1) * magnitude
    fmt = SummaryFormat()
    record = unpack(
        encode(keys, Factors(*(x.float() for x in reference.factors(keys.double(), 4))), fmt),
        fmt,
        D,
        torch.float64,
    )
    assert all(part.isfinite().all() for part in record)
    residual = (keys.double() - reconstruct(record)).norm(dim=-1).amax()
    assert residual <= record.residual_norm or record.residual_norm == BF16_MAX


def test_float32_and_float64_encode_the_same_record_where_nothing_is_near_a_rounding_edge():
    keys = (torch.arange(P * D, dtype=torch.float64).reshape(P, D) * 37 % 64) / 64
    factors = reference.factors(keys, 4)
    fmt = SummaryFormat()
    double = unpack(encode(keys, factors, fmt), fmt, D)
    single = unpack(encode(keys.float(), Factors(*(x.float() for x in factors)), fmt), fmt, D)
    assert (double.mean == single.mean).float().mean() == 1
    torch.testing.assert_close(double.residual_norm, single.residual_norm, rtol=2**-7, atol=0)


@given(st.integers(0, 2**16))
@examples(5)
def test_the_bytes_a_page_encodes_to_do_not_depend_on_the_pages_beside_it(seed):
    keys, fmt = some_keys(3, 2, seed=seed).float(), SummaryFormat()
    together = encode(keys, reference.factors(keys, 4), fmt)
    alone = encode(keys[2, 1], Factors(*(x[2, 1] for x in reference.factors(keys, 4))), fmt)
    assert torch.equal(together[2, 1], alone)


def test_four_bit_codes_hold_halves_of_the_axis_in_one_byte():
    """Byte i holds element i low and element i + D / 2 high."""
    keys = torch.zeros(P, 80, dtype=torch.float64)
    keys[:, 0], keys[:, 40], keys[:, 1], keys[:, 41] = 7, -7, -1, 3
    record = reference.summarize_pages(keys @ rotation(80), SummaryFormat(mean_bits=4))
    assert record[:3].tolist() == [7 | (-7 & 15) << 4, (-1 & 15) | 3 << 4, 0]
