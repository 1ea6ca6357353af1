"""Compiles the kernels that a launcher starts for Hopper, on a machine without a GPU, and reads their resources.

Run as a script, without TRITON_INTERPRET, it compiles every stage for the shape given as JSON and prints a JSON list.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def _compile(fn: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Resources:
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    options.pop("launch_pdl", None)
    values = dict(zip(fn.arg_names, args, strict=False)) | kwargs
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(fn.params):
        name, value = parameter.name, values[parameter.name]
        divisible = False
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], divisible = TYPES[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i64" if abs(value) >= 2**31 else "i32"
            divisible = value % 16 == 0 and not parameter.do_not_specialize
        if divisible:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [binaries / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    return Resources(fn.fn.__name__, found["REG"], found["STACK"], kernel.metadata.shared)


@contextlib.contextmanager
def capture() -> Iterator[list[Resources]]:
    """Within the block, a launch compiles its kernel for sm_90 instead of running it; yields what was compiled."""
    done: list[Resources] = []
    original: Callable[..., Any] = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        done.append(_compile(self, args, kwargs))

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield done
    finally:
        JITFunction.run = original  # type: ignore[method-assign]


def every_stage(page: int, rank: int, head_dim: int, group: int) -> list[Resources]:
    """Compiles every stage for bfloat16 caches of that shape."""
    from locks import SummaryFormat
    from locks.kernels import attend, certify, cover, logits, score, score_hopper, seal, select, summarize

    fmt, per_block, heads = SummaryFormat(page, rank), 4, 4
    cache = torch.zeros(8, heads, per_block * page, head_dim, dtype=torch.bfloat16)
    records = torch.zeros(8, heads, per_block, fmt.layout(head_dim).nbytes, dtype=torch.uint8)
    table, lengths = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(2, heads * group, head_dim, dtype=torch.bfloat16)
    with capture() as done:
        config = summarize.default_config(page, 1000, head_dim=head_dim, interpreted=False)
        summarize.summarize(
            cache, table, lengths, fmt, start=None, max_new_pages=None, out=records, config=config
        )
        pointers = seal.layer_pointers([cache], [records])
        seal.seal(pointers, cache, records, table, lengths, fmt, config=config)
        log_mass, total = score.score(q, records, table, lengths, fmt, scale=0.1, window_pages=2)
        if score_hopper.shape_fits(fmt, head_dim, group):
            score.score(q, records, table, lengths, fmt, scale=0.1, window_pages=2, exact=False)
        logits.logits(q, records, table, lengths, fmt, scale=0.1)
        share = select.share(log_mass, total, heads)
        ids, counts = select.select(share, lengths, page=page, pages=16, window_pages=2)
        select.select_from_mass(log_mass, total, lengths, heads, page=page, pages=16, window_pages=2)
        wide = torch.zeros(2, heads * group, 65536)
        select.select_from_mass(wide, total, lengths, heads, page=page, pages=128, window_pages=2)
        select.every_page(lengths, heads, room=64, page=page, pages=128)
        # A row longer than one program takes at once, with few groups to read and with many.
        long = torch.zeros(2, heads, 65536)
        select.select(long, lengths, page=page, pages=128, window_pages=2)
        select.select(long, lengths, page=page, pages=1024, window_pages=2)
        _, lse = attend.attend(q, cache, cache, table, lengths, ids, counts, page=page, scale=0.1)
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
    print(json.dumps([asdict(one) for one in every_stage(**json.loads(sys.argv[1]))]))
