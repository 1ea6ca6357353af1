"""Compiles the kernels that a launcher starts for Hopper, on a machine without a GPU, and reads their resources.

Run as a script, without TRITON_INTERPRET, it compiles every stage for the shape given as JSON and prints a JSON list.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from bench.resources import Resources, capture
from tests.ptx import faults


def every_stage(page: int, rank: int, head_dim: int, group: int) -> list[Resources]:
    """Compiles every stage for bfloat16 caches of that shape."""
    from locks import SummaryFormat
    from locks.kernels import (
        append,
        attend,
        certify,
        cover,
        every,
        exact,
        logits,
        score,
        score_hopper,
        seal,
        select,
        summarize,
    )

    fmt, per_block, heads = SummaryFormat(page, rank), 4, 4
    cache = torch.zeros(8, heads, per_block * page, head_dim, dtype=torch.bfloat16)
    records = torch.zeros(8, heads, per_block, fmt.layout(head_dim).nbytes, dtype=torch.uint8)
    table, lengths = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(2, heads * group, head_dim, dtype=torch.bfloat16)
    new = torch.zeros(2, heads, head_dim, dtype=torch.bfloat16)
    with capture() as done:
        append.append(new, new, cache, cache, table, lengths)
        summarize.summarize(cache, table, lengths, fmt, start=None, max_new_pages=None, out=records)
        pointers = seal.layer_pointers([cache], [records])
        seal.seal(pointers, cache, records, table, lengths, fmt)
        log_mass, total = score.score(q, records, table, lengths, fmt, scale=0.1, window_pages=2)
        if score_hopper.shape_fits(fmt, head_dim, group):
            # One row, and several that share the programs out; the other rank, for three heads a group.
            for rows in (1, 2):
                some = (q[:rows], records, table[:rows], lengths[:rows], fmt)
                score.score(*some, scale=0.1, window_pages=2, exact=False)
            other = SummaryFormat(page, 12 - rank)
            scored = torch.zeros(8, heads, per_block, other.layout(head_dim).nbytes, dtype=torch.uint8)
            score.score(
                q[:, : 3 * heads], scored, table, lengths, other, scale=0.1, window_pages=2, exact=False
            )
        logits.logits(q, records, table, lengths, fmt, scale=0.1)
        exact.exact(q, cache, table, lengths, page=page, scale=0.1, window_pages=2)
        share = select.share(log_mass, total, heads)
        ids, counts = select.select(share, lengths, page=page, pages=16, window_pages=2)
        select.select_from_mass(log_mass, total, lengths, heads, page=page, pages=16, window_pages=2)
        wide = torch.zeros(2, heads * group, 65536)
        for early in (False, True):
            options = {"page": page, "pages": 128, "window_pages": 2, "early": early}
            select.select_from_mass(wide, total, lengths, heads, **options)
        every.every(lengths, heads, room=64, page=page, pages=128)
        # A row longer than one program takes at once, with few groups to read and with many.
        long = torch.zeros(2, heads, 65536)
        select.select(long, lengths, page=page, pages=128, window_pages=2)
        select.select(long, lengths, page=page, pages=1024, window_pages=2)
        _, lse = attend.attend(q, cache, cache, table, lengths, ids, counts, page=page, scale=0.1)
        # Rows of several tiles a program: some of them, all of them, and long lists.
        room, some = torch.zeros(2, 2048, dtype=torch.int32), torch.zeros(2, heads, 4096, dtype=torch.int32)
        for lists, below in ((ids, 32768), (None, 0), (some, 0)):
            listed = (lists, None if lists is None else counts)
            attend.attend(q, cache, cache, room, lengths, *listed, page=page, scale=0.1, dense_below=below)
        of_records = (q, records, table, lengths, fmt)
        *_, low, upper = certify.certify(q, cache, *of_records[1:], log_mass, ids, counts, lse, scale=0.1)
        cover.cover(
            *of_records,
            share,
            log_mass,
            total,
            ids,
            counts,
            low,
            upper,
            coverage=0.9,
            scale=0.1,
            window_pages=2,
        )
    return done


if __name__ == "__main__":
    compiled = every_stage(**json.loads(sys.argv[1]))
    print(json.dumps([asdict(one) | {"ptx": None, "unwaited": faults(one.ptx)} for one in compiled]))
