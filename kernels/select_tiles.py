"""Select, where neither a row's keys nor the groups to read fit in registers: keys in tiles, read for every digit."""

import triton
import triton.language as tl


@triton.jit
def tiles_kernel(
    keys_ptr,
    seq_lens_ptr,
    ids_ptr,
    counts_ptr,
    stride_k_b,
    stride_k_h,
    stride_i_b,
    stride_i_h,
    stride_c_b,
    max_pages,
    window_pages,
    P: tl.constexpr,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """page_ids and count of one (row, KV head), by keys read again for each digit of four bits."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    keys_ptr += row * stride_k_b + head * stride_k_h
    ids_ptr += row * stride_i_b + head * stride_i_h
    pages = (tl.minimum(tl.load(seq_lens_ptr + row), max_pages * P) + P - 1) // P
    tl.store(counts_ptr + row * stride_c_b + head, tl.minimum(pages, M))
    off_m = tl.arange(0, BLOCK_M)
    if pages <= M:
        tl.store(ids_ptr + off_m, tl.where(off_m < pages, off_m, -1), mask=off_m < M)
    else:
        last = pages - window_pages
        wanted = M - 1 - window_pages
        # The K-th largest key: after each digit, `tau` is its prefix and `need` counts what is still missing below.
        tau = tl.zeros((1,), tl.int32)
        need = tl.zeros((1,), tl.int32) + wanted
        digits = tl.arange(0, 16)
        for step in range(8):
            shift = 28 - 4 * step
            counts = tl.zeros((16,), tl.int32)
            for n in range(0, last, BLOCK_N):
                off_n = n + tl.arange(0, BLOCK_N)
                key = tl.load(keys_ptr + off_n, mask=off_n < last, other=-1)
                # Keys that agree with tau in all higher digits.
                match = ((key >> shift) >> 4) == ((tau >> shift) >> 4)
                digit = tl.where(match & (key >= 0), (key >> shift) & 15, -1)
                counts += tl.sum((digit[None, :] == digits[:, None]).to(tl.int32), 1)
            # at_least[d]: keys of this prefix whose digit is d or more.
            at_least = tl.sum(tl.where(digits[None, :] >= digits[:, None], counts[None, :], 0), 1)
            chosen = tl.max(tl.where(at_least >= need, digits, 0), 0)
            need -= tl.sum(tl.where(digits > chosen, counts, 0), 0)
            tau += chosen << shift
        tl.store(ids_ptr, 0)
        at = 1
        ties = 0
        for n in range(0, last, BLOCK_N):
            off_n = n + tl.arange(0, BLOCK_N)
            key = tl.load(keys_ptr + off_n, mask=off_n < last, other=-1)
            tie = (key == tau).to(tl.int32)
            rank = ties + tl.cumsum(tie, 0)
            keep = ((key > tau) | ((tie > 0) & (rank <= need))).to(tl.int32)
            tl.store(ids_ptr + at + tl.cumsum(keep, 0) - 1, off_n, mask=keep > 0)
            at += tl.sum(keep, 0)
            ties += tl.sum(tie, 0)
        newest = off_m < window_pages
        tl.store(ids_ptr + M - window_pages + off_m, last + off_m, mask=newest)
