"""Balance: programs are shared out among the rows of a batch so that the slowest has as little to do as can be.

A launch has `slots` programs, as many as run at once, and one more for every row. Every program works out for itself
which row it serves, from the rows' lengths, so nothing is launched for it and a CUDA graph may be replayed with other
lengths. What a row's programs do must not depend on how many they are.

Work is counted in steps and cut in chunks, each of a number of steps that is its row's own. Shares of the slots,
rounded up, bound the slowest program; then no row keeps more programs than it needs to end when that one does. All end
together, if need be with slots left empty: two thirds of them keep memory busy, the few that would be left at the end
do not.
"""

import triton
import triton.language as tl


@triton.jit
def programs_of_rows(chunks, log_steps, slots, num_rows):
    """How many programs each row has, [BLOCK_B]: one at least, and in all `slots + num_rows` at most.

    Where rows are few to the slots, no program has more than their mean and what rounding adds: a program a row, and a
    chunk.

    Args:
        chunks: [BLOCK_B] int32, each row's chunks, 0 behind the last row.
        log_steps: [BLOCK_B] int32, the binary logarithm of the steps of a chunk; those of all rows, and those of a row
            times `slots`, are below 2**31.
        slots: programs to share out.
        num_rows: rows of the batch.
    """
    off_b = tl.arange(0, chunks.shape[0])
    work = chunks << log_steps
    total = tl.sum(work, 0)
    mean = tl.maximum((total + slots - 1) // slots, 1)
    # A row of less than half of that has one program, and another one follows in its slot.
    large = work * 2 >= mean
    of_large = tl.sum(tl.where(large, work, 0), 0)
    # What rounding up leaves to share. Where that is little, rows are many, and some programs wait for a slot.
    left = slots - tl.sum(large.to(tl.int32), 0) - (total - of_large + mean - 1) // mean
    left = tl.maximum(left, slots // 2)
    share = tl.where(large, work * left // tl.maximum(of_large, 1) + 1, 1)
    slowest = tl.maximum(tl.max(((chunks + share - 1) // share) << log_steps, 0), 1)
    most = slowest >> log_steps
    return tl.maximum((chunks + most - 1) // most, (off_b < num_rows).to(tl.int32))


@triton.jit
def row_of_slot(chunks, log_steps, slot, slots, num_rows):
    """The row that program `slot` serves, which of its programs it is, and how many those are; num_rows: no row.

    The other arguments are those of `programs_of_rows`.
    """
    off_b = tl.arange(0, chunks.shape[0])
    programs = programs_of_rows(chunks, log_steps, slots, num_rows)
    end = tl.cumsum(programs, 0)
    row = tl.sum((end <= slot).to(tl.int32), 0)
    own = off_b == row
    programs = tl.sum(tl.where(own, programs, 0), 0)
    return tl.minimum(row, num_rows), slot - tl.sum(tl.where(own, end, 0), 0) + programs, programs
