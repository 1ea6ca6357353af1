"""Every kernel at small shapes under compute-sanitizer: `make sanitize`.

    python bench/sanitize.py --tools memcheck,racecheck

First without the tool, which compiles the kernels, then once under each: memory that is out of bounds or misaligned,
and threads that race for shared memory. Rows are ragged, blocks shuffled; lengths and tables end within a page.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer

import locks
from locks import SummaryFormat, triton_impl
from locks.kernels import attend, score, score_hopper
from locks.kernels.config import KernelConfig
from locks.types import PageMass

TOOLS = ("memcheck", "racecheck")
# Idle, within the first page, at and behind the end of one, more than the budget.
LENGTHS = (0, 5, 16, 33, 150, 331)
BUDGET = 96
# Tokens a block, rank, head dimension and query heads a KV head of long scans.
SCANS = ((16, 4, 64, 3), (48, 8, 128, 4), (64, 4, 128, 8), (16, 8, 64, 8), (48, 4, 128, 12), (64, 8, 64, 1))


def cache(
    fmt: SummaryFormat, head_dim: int, block: int, group: int = 3, *, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """A paged cache of ragged rows, two KV heads, and `group` queries a KV head."""
    gen = torch.Generator(device).manual_seed(fmt.rank)
    width = -(-max(LENGTHS) // block)
    options = {"device": device, "dtype": dtype, "generator": gen}
    k, v = (torch.randn(len(LENGTHS) * width, 2, block, head_dim, **options) for _ in range(2))
    return {
        "q": torch.randn(len(LENGTHS), 2 * group, head_dim, **options),
        "k_cache": k,
        "v_cache": v,
        "block_table": torch.randperm(len(k), device=device, generator=gen).int().view(len(LENGTHS), width),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        "fmt": fmt,
    }


def steps(fmt: SummaryFormat, head_dim: int, block: int, **where: Any) -> None:
    """Summaries, logits, exact masses, a step, one with coverage and one with a certificate."""
    made = cache(fmt, head_dim, block, **where)
    k, table, lens = made["k_cache"], made["block_table"], made["seq_lens"]
    records = locks.summarize(k, table, lens, fmt, impl="triton")
    locks.page_logits(made["q"], records, table, lens, fmt, impl="triton")
    triton_impl.exact_page_mass(made["q"], k, table, lens, page=fmt.page, scale=0.1)
    mass = locks.page_mass(made["q"], records, table, lens, fmt, exact=False, impl="triton")
    triton_impl.page_share(mass, 2)
    more: dict[str, Any]
    for more in ({}, {"certificate": True}, {"coverage": 0.9}, {"coverage_certified": 0.5}):
        locks.decode(**made, records=records, budget=BUDGET, impl="triton", **more)
    # No row can be longer: every page is listed.
    locks.decode(**made, records=records, budget=table.shape[1] * block, impl="triton")


def scans(fmt: SummaryFormat, head_dim: int, block: int, group: int, **where: Any) -> None:
    """Scans of rows so long that a program of few takes several steps, and chunks of one and of two steps."""
    made = cache(fmt, head_dim, block, group, **where)
    k, table = made["k_cache"], made["block_table"]
    lens = torch.full_like(made["seq_lens"], table.shape[1] * block)
    records = locks.summarize(k, table, lens, fmt, impl="triton")
    pages = (4209, 1703, 0, 3)
    long = table.flatten().repeat(pages[0])[: -(-pages[0] * fmt.page // block)].repeat(len(pages), 1)
    lens = torch.tensor(pages, dtype=torch.int32, device=k.device) * fmt.page - 5
    for rows in (1, len(pages)):
        score.score(
            made["q"][:rows],
            records,
            long[:rows],
            lens[:rows].clamp(min=0),
            fmt,
            scale=0.1,
            window_pages=2,
            exact=False,
            config=KernelConfig(8, 1, registers=score_hopper.REGISTERS[fmt.rank], programs=1),
        )


def attention(page: int, head_dim: int, block: int, **where: Any) -> None:
    """Attention with and without lists and rows that are dense all the same, by one tile a program and in steps."""
    made = cache(SummaryFormat(page, 4), head_dim, block, **where)
    q, table, lens = made["q"], made["block_table"], made["seq_lens"]
    # More pages than some rows have, every other one; the counts of some heads end before.
    ids = torch.arange(0, -(-max(LENGTHS) // page), 2, dtype=torch.int32, device=q.device).repeat(
        len(q), 2, 1
    )
    counts = (torch.arange(2 * len(q), dtype=torch.int32, device=q.device) % (ids.shape[2] + 1)).view(-1, 2)
    arguments = q, made["k_cache"], made["v_cache"], table, lens
    tiles = -(-max(LENGTHS) // attend.default_config(page, head_dim).block_n // page)
    for plan in (attend.Plan(tiles, 0, 1), attend.Plan(1, 32, 4), attend.Plan(2, 32, 4)):
        for listed, below in (((ids, counts), 0), ((ids, counts), 151), ((None, None), 0)):
            attend.attend(*arguments, *listed, page=page, scale=0.1, dense_below=below, plan=plan)


def decoder(q_len: int, **where: Any) -> None:
    """Steps of the whole model, over the end of a page."""
    fmt = SummaryFormat(rank=4)
    made = cache(fmt, 64, 32, **where)
    one = locks.Decoder(
        [made["k_cache"]] * 2,
        [made["v_cache"]] * 2,
        num_q_heads=6,
        fmt=fmt,
        budget=BUDGET,
        max_rows=len(LENGTHS),
        max_blocks=made["block_table"].shape[1],
        q_len=q_len,
        impl="triton",
    )
    one.block_table.copy_(made["block_table"])
    one.seq_lens.copy_(made["seq_lens"])
    one.summarize()
    q = made["q"].repeat_interleave(q_len, 0)
    k, v = (made[name][: len(q), :, 0].contiguous() for name in ("k_cache", "v_cache"))
    for _ in range(2):
        one.advance()
        for layer in range(2):
            one.attend(layer, q, k, v)
        one.seal()


def wide(*, device: str, dtype: torch.dtype) -> None:
    """Selections from more pages than a program holds: by groups, and in tiles."""
    del dtype
    gen = torch.Generator(device).manual_seed(0)
    pages = 5000
    log_mass = torch.randn(2, 6, pages, device=device, generator=gen)
    mass = PageMass(log_mass, log_mass.logsumexp(-1))
    lens = torch.tensor([16 * pages - 3, 16 * 130], dtype=torch.int32, device=device)
    for budget in (16 * 64, 16 * 1100):
        triton_impl.select_from_mass(mass, lens, 2, page=16, budget=budget, window_pages=1)


def every(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """All workloads by name; 16-bit ones take the fast path where its shape allows."""
    where = {"device": device, "dtype": dtype}
    for page, rank, head_dim, block in ((16, 4, 64, 16), (16, 8, 128, 64), (32, 8, 80, 64)):
        fmt = SummaryFormat(page, rank)
        name = f"steps, P {page}, R {rank}, D {head_dim}, blocks of {block}"
        yield name, lambda fmt=fmt, d=head_dim, block=block: steps(fmt, d, block, **where)
    for block, rank, head_dim, group in SCANS:
        fmt = SummaryFormat(16, rank)
        name = f"long scans, R {rank}, D {head_dim}, G {group}, blocks of {block}"
        yield name, lambda fmt=fmt, d=head_dim, block=block, g=group: scans(fmt, d, block, g, **where)
    for page, head_dim, block in ((16, 64, 16), (32, 128, 96)):
        name = f"attention, P {page}, D {head_dim}, blocks of {block}"
        yield name, lambda page=page, d=head_dim, block=block: attention(page, d, block, **where)
    for q_len in (1, 2):
        yield f"decoder, {q_len} a step", lambda q_len=q_len: decoder(q_len, **where)
    yield "wide selections", lambda: wide(**where)


def _run(tool: str | None) -> int:
    command = [sys.executable, __file__, "--inside"]
    if tool:
        options = ["--error-exitcode", "9", "--print-limit", "20"]
        command = [shutil.which("compute-sanitizer") or "", "--tool", tool, *options, *command]
    # Each tensor in memory of its own, so that what lies behind it is nobody's.
    return subprocess.run(
        command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, check=False
    ).returncode


def main(
    tools: Annotated[str, typer.Option(help=f"by commas, of {', '.join(TOOLS)}")] = ",".join(TOOLS),
    inside: Annotated[bool, typer.Option("--inside", hidden=True)] = False,
) -> None:
    """Runs every workload under every tool; ends with 1 if one of them reports anything."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a CUDA device, and torch sees none")
    if inside:
        for name, work in every("cuda", torch.bfloat16):
            work()
            torch.cuda.synchronize()
            typer.echo(name)
        return
    chosen = tools.split(",")
    if unknown := set(chosen) - set(TOOLS):
        raise typer.BadParameter(f"tools: expected of {', '.join(TOOLS)}, got {', '.join(sorted(unknown))}")
    if shutil.which("compute-sanitizer") is None:
        raise typer.BadParameter("needs compute-sanitizer, which comes with the CUDA toolkit")
    failed = [tool for tool in (None, *chosen) if _run(tool)]
    if failed:
        sys.exit(f"failed: {', '.join(tool or 'without a tool' for tool in failed)}")


if __name__ == "__main__":
    typer.run(main)
