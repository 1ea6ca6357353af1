"""Checks of a caller's arguments: one error a mistake, with the name, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from locks.format import PAGES, SummaryFormat

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = range(64, 257, 16)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _axes(axes: Sequence[str | int], dims: dict[str, int]) -> str:
    return "[" + ", ".join(str(dims.get(a, a) if isinstance(a, str) else a) for a in axes) + "]"


def tensor(
    name: str,
    value: object,
    axes: Sequence[str | int],
    dims: dict[str, int],
    *,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Checks type, dtype, device, shape and that the last axis is contiguous.

    Args:
        name: the argument's name.
        value: what was given.
        axes: one entry an axis: a number, or a name that is looked up in `dims` and bound there at its first use.
        dims: sizes known so far; gains the names that are bound here.
        dtypes: the allowed ones.
        device: where it must lie, if that is known.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: another shape, device or layout.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor {_names(dtypes)} {_axes(axes, dims)}, got {value!r}")
    known = dict(dims)
    sizes = [
        dims.setdefault(a, n) if isinstance(a, str) else a for a, n in zip(axes, value.shape, strict=False)
    ]
    if value.dtype not in dtypes or value.dim() != len(axes) or list(value.shape) != sizes:
        kind = ValueError if value.dtype in dtypes else TypeError
        want = f"{_names(dtypes)} {_axes(axes, known)}"
        raise kind(f"{name}: expected {want}, got {_names([value.dtype])} {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")
    if value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last axis (stride 1), got strides {value.stride()}")


def head_dim(name: str, size: int) -> None:
    """Checks a key or value width."""
    if size not in HEAD_DIMS:
        raise ValueError(f"{name}: expected a head width that is a multiple of 16 in 64..256, got {size}")


def groups(dims: dict[str, int]) -> None:
    """Checks that the query heads divide over the KV heads."""
    if dims["Hkv"] == 0 or dims["Hq"] % dims["Hkv"]:
        raise ValueError(f"q: expected a multiple of Hkv = {dims['Hkv']} query heads, got Hq = {dims['Hq']}")


def summary_format(fmt: object) -> None:
    """Checks that a format was given."""
    if not isinstance(fmt, SummaryFormat):
        raise TypeError(f"fmt: expected a SummaryFormat, got {fmt!r}")


def block(dims: dict[str, int], page: int) -> None:
    """Checks that a block holds whole pages."""
    if dims["block"] == 0 or dims["block"] % page:
        raise ValueError(
            f"k_cache: expected a block size that is a multiple of the page ({page}), got {dims['block']}"
        )


def page(size: object) -> None:
    """Checks a page size."""
    if type(size) is not int or size not in PAGES:
        raise ValueError(f"page: expected one of {PAGES}, got {size!r}")


def result(name: str, value: object, kind: type) -> None:
    """Checks that the result of the stage before was given."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r}")


def scale(value: object) -> None:
    """Checks a factor of the logits."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"scale: expected a finite number or None, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"scale: expected a finite number or None, got {value!r}")


def kv_heads(value: object) -> None:
    """Checks a number of KV heads that is given as such."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"num_kv_heads: expected an int, got {value!r}")


def count(name: str, value: object, most: int | None = None) -> None:
    """Checks a number of things, at least 1 and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < 1 or (most is not None and value > most):
        raise ValueError(f"{name}: expected {'at least 1' if most is None else f'1 to {most}'}, got {value}")


def window(window_pages: object) -> None:
    """Checks how many of the newest pages are always kept."""
    count("window_pages", window_pages)


def table_values(block_table: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int) -> None:
    """Checks lengths and block ids on the device's values; waits for the device (`debug=True`)."""
    room = block_table.shape[1] * block_size
    bad = ((seq_lens < 0) | (seq_lens > room)).nonzero()
    if bad.numel():
        row = int(bad[0, 0])
        raise ValueError(
            f"seq_lens: expected 0..{room} (the table's room), got {int(seq_lens[row])} in row {row}"
        )
    used = torch.arange(block_table.shape[1], device=block_table.device) * block_size < seq_lens[:, None]
    bad = (used & ((block_table < 0) | (block_table >= num_blocks))).nonzero()
    if bad.numel():
        row, column = (int(x) for x in bad[0])
        raise ValueError(
            f"block_table: expected block ids 0..{num_blocks - 1}, got {int(block_table[row, column])} "
            f"at [{row}, {column}]"
        )


def page_list_values(page_ids: Tensor, counts: Tensor, seq_lens: Tensor, page: int) -> None:
    """Checks a page list's values; waits for the device (`debug=True`)."""
    listed = torch.arange(page_ids.shape[-1], device=page_ids.device) < counts[..., None]
    pages = ((seq_lens + page - 1) // page)[:, None, None]
    if bool((counts < 0).any() | (counts > page_ids.shape[-1]).any()):
        raise ValueError(f"counts: expected 0..{page_ids.shape[-1]}, got {counts.tolist()}")
    if bool((listed & ((page_ids < 0) | (page_ids >= pages))).any()):
        raise ValueError(
            "page_ids: expected ids of pages that the row has, got one outside 0..ceil(seq_len / P) - 1"
        )
