"""Balance: programs are shared out among the rows of a batch by the work that each has.

A launch has `slots` programs, and one more for every row; a row gets its part of the slots, rounded down, but at least
one. Every program works that out for itself from the rows' lengths, so nothing is launched for it and a CUDA graph may
be replayed with other lengths. What a row's programs do must not depend on how many they are.
"""

import triton
import triton.language as tl


@triton.jit
def row_of_slot(work, slot, slots, num_rows):
    """The row that a program serves, which of its programs it is, and how many those are; a row of num_rows: none.

    Args:
        work: [BLOCK_B] int32, each row's work, 0 behind the last row; its sum times `slots` below 2**31.
        slot: the program's number.
        slots: programs to share out.
        num_rows: rows of the batch.
    """
    off_b = tl.arange(0, work.shape[0])
    total = tl.maximum(tl.sum(work, 0), 1)
    programs = tl.where(off_b < num_rows, tl.maximum(work * slots // total, 1), 0)
    end = tl.cumsum(programs, 0)
    row = tl.sum((end <= slot).to(tl.int32), 0)
    own = off_b == row
    programs = tl.sum(tl.where(own, programs, 0), 0)
    return tl.minimum(row, num_rows), slot - tl.sum(tl.where(own, end, 0), 0) + programs, programs
