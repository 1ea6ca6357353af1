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
from locks.types import PageMass

TOOLS = ("memcheck", "racecheck")
# Idle, within the first page, at and behind the end of one, more than the budget.
LENGTHS = (0, 5, 16, 33, 150, 331)
BUDGET = 96


def cache(
    fmt: SummaryFormat, head_dim: int, block: int, *, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """A paged cache of ragged rows, two KV heads, and three queries a KV head."""
    gen = torch.Generator(device).manual_seed(fmt.rank)
    width = -(-max(LENGTHS) // block)
    options = {"device": device, "dtype": dtype, "generator": gen}
    k, v = (torch.randn(len(LENGTHS) * width, 2, block, head_dim, **options) for _ in range(2))
    return {
        "q": torch.randn(len(LENGTHS), 6, head_dim, **options),
        "k_cache": k,
        "v_cache": v,
        "block_table": torch.randperm(len(k), device=device, generator=gen).int().view(len(LENGTHS), width),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        "fmt": fmt,
    }


def steps(fmt: SummaryFormat, head_dim: int, block: int, **where: Any) -> None:
    """Summaries, logits, a step, one with coverage and one with a certificate."""
    made = cache(fmt, head_dim, block, **where)
    k, table, lens = made["k_cache"], made["block_table"], made["seq_lens"]
    records = locks.summarize(k, table, lens, fmt, impl="triton")
    locks.page_logits(made["q"], records, table, lens, fmt, impl="triton")
    mass = locks.page_mass(made["q"], records, table, lens, fmt, exact=False, impl="triton")
    triton_impl.page_share(mass, 2)
    more: dict[str, Any]
    for more in ({}, {"certificate": True}, {"coverage": 0.9}, {"coverage_certified": 0.5}):
        locks.decode(**made, records=records, budget=BUDGET, impl="triton", **more)
    # No row can be longer: every page is listed.
    locks.decode(**made, records=records, budget=table.shape[1] * block, impl="triton")


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
