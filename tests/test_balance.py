"""A launch's programs shared out among the rows of a batch: every row is served, long ones by many."""

import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from locks.kernels.balance import row_of_slot
from tests.helpers import DEVICE, examples


@triton.jit
def shares_kernel(work_ptr, out_ptr, slots, num_rows, BLOCK_B: tl.constexpr):
    off_b = tl.arange(0, BLOCK_B)
    work = tl.load(work_ptr + off_b, mask=off_b < num_rows, other=0)
    # pyright takes a kernel's arithmetic for calls that never return.
    row, number, programs = row_of_slot(  # pyright: ignore[reportGeneralTypeIssues]
        work, tl.program_id(0), slots, num_rows
    )
    at = out_ptr + tl.program_id(0) * 3
    tl.store(at, row)
    tl.store(at + 1, number)
    tl.store(at + 2, programs)


def shares(work: list[int], slots: int) -> list[list[int]]:
    """row, number and programs of every program."""
    rows = len(work)
    given = torch.tensor(work, dtype=torch.int32, device=DEVICE)
    out = torch.full((slots + rows, 3), -7, dtype=torch.int32, device=DEVICE)
    shares_kernel[(slots + rows,)](given, out, slots, rows, BLOCK_B=max(2, triton.next_power_of_2(rows)))
    return out.tolist()


@given(work=st.lists(st.integers(0, 1024), min_size=2, max_size=9), slots=st.integers(1, 40))
@examples(12)
def test_every_row_has_its_part_of_the_programs_and_one_at_least(work, slots):
    found = shares(work, slots)
    total = max(1, sum(work))
    want = [
        [row, number, programs]
        for row, own in enumerate(work)
        for programs in [max(1, own * slots // total)]
        for number in range(programs)
    ]
    assert found[: len(want)] == want
    assert all(row == len(work) for row, _, _ in found[len(want) :])


def test_a_long_row_beside_short_ones_has_nearly_all_programs():
    found = shares([1024, *[1] * 7], 64)
    assert sum(row == 0 for row, _, _ in found) == 63
    assert [row for row, _, _ in found[63:70]] == list(range(1, 8))
