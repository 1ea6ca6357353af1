"""The launch shape of a kernel, and the committed table of those that were measured to be the fastest.

`tuned.json` lies beside this file; `bench/tune.py` writes it. A row's `shape` never holds a batch size or a length: a
launch shape may decide the order of a sum, and a row's result must not depend on the batch around it.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True)
class KernelConfig:
    """Pages a tile, warps a program and pipeline stages: a pure function of the shape, or the caller's choice.

    `registers` a thread at most and `programs` at once on a multiprocessor are for kernels that trade one for the
    other; None leaves both to the compiler.
    """

    block_n: int
    num_warps: int
    num_stages: int = 1
    registers: int | None = None
    programs: int | None = None


_FIELDS = {field.name for field in fields(KernelConfig)}

# Device name, operation, and the shape's items in alphabetical order.
Key = tuple[str, str, tuple[tuple[str, int], ...]]


def table_key(device_name: str, op: str, shape: Mapping[str, int]) -> Key:
    """What one row of the table is found by."""
    return device_name, op, tuple(sorted(shape.items()))


def read_table(path: Path) -> dict[Key, KernelConfig]:
    """The rows of a table.

    Raises:
        ValueError: a row without device, op, shape and config, one of unknown fields, or two for one shape.
    """
    found: dict[Key, KernelConfig] = {}
    for i, row in enumerate(json.loads(path.read_text())["rows"]):
        where = f"{path.name}: rows[{i}]"
        missing = {"device", "op", "shape", "config"} - set(row)
        if missing:
            raise ValueError(
                f"{where}: expected device, op, shape and config, got no {', '.join(sorted(missing))}"
            )
        unknown = set(row["config"]) - _FIELDS
        if unknown or not {"block_n", "num_warps"} <= set(row["config"]):
            raise ValueError(f"{where}: config: expected of {sorted(_FIELDS)}, got {sorted(row['config'])}")
        key = table_key(row["device"], row["op"], row["shape"])
        if key in found:
            raise ValueError(f"{where}: expected one row for {key}, got a second")
        found[key] = KernelConfig(**row["config"])
    return found


@functools.cache
def _table() -> dict[Key, KernelConfig]:
    return read_table(TABLE)


def tuned(device_name: str, op: str, **shape: int) -> KernelConfig | None:
    """The launch shape that was the fastest of those measured on that device; None where none was measured."""
    return _table().get(table_key(device_name, op, shape))


@functools.cache
def device_name(device: torch.device) -> str:
    """The name by which the table knows a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
