"""A launch's programs shared out among the rows of a batch: every row is served, and the slowest has little to do."""

import itertools
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from locks.kernels import score_hopper
from locks.kernels.balance import programs_of_rows, row_of_slot
from tests.helpers import DEVICE, examples

K = 1024


@triton.jit
def programs_kernel(lengths_ptr, out_ptr, slots, num_rows, max_pages, BLOCK_B: tl.constexpr):
    off_b = tl.arange(0, BLOCK_B)
    lengths = tl.load(lengths_ptr + off_b, mask=off_b < num_rows, other=0)
    # pyright takes a kernel's arithmetic for calls that never return.
    _, log_steps, chunks = score_hopper.scored_chunks(  # pyright: ignore[reportGeneralTypeIssues]
        lengths, max_pages
    )
    programs = programs_of_rows(  # pyright: ignore[reportGeneralTypeIssues]
        chunks, log_steps, slots, num_rows
    )
    tl.store(out_ptr + off_b * 3, chunks)
    tl.store(out_ptr + off_b * 3 + 1, 1 << log_steps)
    tl.store(out_ptr + off_b * 3 + 2, programs)


@triton.jit
def slots_kernel(chunks_ptr, out_ptr, slots, num_rows, BLOCK_B: tl.constexpr):
    off_b = tl.arange(0, BLOCK_B)
    chunks = tl.load(chunks_ptr + off_b, mask=off_b < num_rows, other=0)
    row, number, programs = row_of_slot(  # pyright: ignore[reportGeneralTypeIssues]
        chunks, chunks * 0, tl.program_id(0), slots, num_rows
    )
    at = out_ptr + tl.program_id(0) * 3
    tl.store(at, row)
    tl.store(at + 1, number)
    tl.store(at + 2, programs)


class Row(NamedTuple):
    """How one row is cut: its chunks, the steps of each, and its programs."""

    chunks: int
    steps: int
    programs: int

    @property
    def slowest(self) -> int:
        """The most steps of a program, by the cut of the scan."""
        bounds = [i * self.chunks // self.programs for i in range(self.programs + 1)]
        return self.steps * max(end - start for start, end in itertools.pairwise(bounds))


def cut(lengths: list[int], slots: int) -> list[Row]:
    """How a batch of rows of these lengths is cut."""
    rows = len(lengths)
    block = triton.next_power_of_2(max(2, rows))
    given = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = torch.full((int(block), 3), -7, dtype=torch.int32, device=DEVICE)
    programs_kernel[(1,)](given, out, slots, rows, 2**22, BLOCK_B=block)
    assert not out[rows:, [0, 2]].any()
    return [Row(*row) for row in out[:rows].tolist()]


lengths_of_rows = st.lists(
    st.one_of(st.integers(0, 4 * K), st.floats(4, 21).map(lambda power: int(2**power))),
    min_size=2,
    max_size=40,
)


@given(lengths=lengths_of_rows, slots=st.integers(1, 2112))
@examples(100)
def test_every_row_has_a_program_and_no_more_than_end_with_the_slowest(lengths, slots):
    rows = cut(lengths, slots)
    assert all(row.programs >= 1 for row in rows)
    assert sum(row.programs for row in rows) <= slots + len(rows)
    most = max(row.slowest for row in rows)
    # With one program fewer a row would end later.
    assert all(row.programs == 1 or -(-row.chunks // (row.programs - 1)) * row.steps > most for row in rows)


@given(lengths=lengths_of_rows, slots=st.integers(440, 2112))
@examples(100)
def test_no_program_has_more_than_the_mean_a_tenth_and_a_chunk(lengths, slots):
    rows = cut(lengths, slots)
    mean = max(1, -(-sum(row.chunks * row.steps for row in rows) // slots))
    # For rounding up there is a slot a row, and one: a tenth at most.
    allowed = mean * slots / (slots - len(rows) - 1)
    assert allowed <= 1.11 * mean
    assert max(row.slowest for row in rows) < allowed + max(row.steps for row in rows)
    # Beside those of little rows, each of which is done in half of the mean, all run at once.
    little = sum(row.chunks * row.steps * 2 < mean for row in rows)
    assert sum(row.programs for row in rows) <= slots + little


@given(rows=st.integers(2, 300), tokens=st.integers(0, 2**21), slots=st.integers(1, 2112))
@examples(30)
def test_equal_rows_have_equal_parts_of_the_slots(rows, tokens, slots):
    found = cut([tokens] * rows, slots)
    part = max(1, slots // rows)
    assert len(set(found)) == 1
    assert found[0].programs <= part
    assert found[0].slowest == found[0].steps * -(-found[0].chunks // part)


@pytest.mark.parametrize(
    ("lengths", "most", "programs"),
    [
        pytest.param([K * K] + [4 * K] * 63, 24, 468, id="one long"),
        pytest.param([4 * K] * 63 + [K * K], 24, 468, id="the last is long"),
        pytest.param([512 * K] * 2 + [4 * K] * 62, 24, 466, id="two long"),
        pytest.param([K * K] + [128 * K] * 7, 32, 480, id="long and middling"),
        pytest.param([128 * K] * 16, 32, 512, id="equal"),
        # The long one is cut as if it were alone.
        pytest.param([K * K] + [96] * 63, 16, 575, id="the others tiny"),
        pytest.param([K * K] + [0] * 63, 16, 575, id="the others empty"),
    ],
)
def test_batches_of_long_rows_and_short_ones(lengths: list[int], most: int, programs: int):
    """Slots as four KV heads have on an H200. Shares by chunks left a program of the first 80 steps."""
    rows = cut(lengths, 528)
    assert max(row.slowest for row in rows) == most
    assert sum(row.programs for row in rows) == programs


@given(chunks=st.lists(st.integers(0, 1024), min_size=2, max_size=9), slots=st.integers(1, 40))
@examples(12)
def test_programs_are_numbered_within_their_rows(chunks, slots):
    rows = len(chunks)
    given = torch.tensor(chunks, dtype=torch.int32, device=DEVICE)
    out = torch.full((slots + rows, 3), -7, dtype=torch.int32, device=DEVICE)
    slots_kernel[(slots + rows,)](given, out, slots, rows, BLOCK_B=triton.next_power_of_2(rows))
    found = out.tolist()
    served = [one for one in found if one[0] < rows]
    counts = [sum(one[0] == row for one in served) for row in range(rows)]
    assert min(counts) >= 1
    assert found[: len(served)] == [[row, i, count] for row, count in enumerate(counts) for i in range(count)]
    assert all(row == rows for row, _, _ in found[len(served) :])
