"""The table of launch shapes: what is found in it, what is not, and what a damaged one says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from locks.kernels.config import TABLE, KernelConfig, device_name, read_table, table_key, tuned

ROWS = json.loads(TABLE.read_text())["rows"]


def table(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"rows": rows}))
    return path


def row(**changed: Any) -> dict[str, Any]:
    one = {"device": "a GPU", "op": "attend", "shape": {"page": 16}, "config": {"block_n": 4, "num_warps": 2}}
    return one | changed


@pytest.mark.parametrize("one", ROWS, ids=lambda one: f"{one['device']} {one['op']}")
def test_every_committed_row_is_found_and_says_how_it_was_measured(one: dict[str, Any]) -> None:
    assert tuned(one["device"], one["op"], **one["shape"]) == KernelConfig(**one["config"])
    assert 0 < one["us"] <= one["runner_up_us"]
    assert one["measured"]
    assert {"triton", "commit", "date"} <= set(one)
    # A row's result must not depend on the batch around it.
    assert not {"B", "T", "batch", "rows"} & set(one["shape"])


def test_what_was_not_measured_is_not_found() -> None:
    one = ROWS[0]
    assert tuned("another GPU", one["op"], **one["shape"]) is None
    assert tuned(one["device"], "another", **one["shape"]) is None
    assert tuned(one["device"], one["op"], **(one["shape"] | {"page": 64})) is None
    assert tuned(one["device"], one["op"]) is None


def test_the_order_of_a_shapes_items_does_not_matter() -> None:
    assert table_key("a", "b", {"x": 1, "y": 2}) == table_key("a", "b", {"y": 2, "x": 1})


def test_a_table_is_read(tmp_path: Path) -> None:
    more = row(op="score_hopper", config={"block_n": 8, "num_warps": 1, "registers": 128, "programs": 16})
    found = read_table(table(tmp_path / "t.json", row(), more))
    assert found == {
        table_key("a GPU", "attend", {"page": 16}): KernelConfig(4, 2),
        table_key("a GPU", "score_hopper", {"page": 16}): KernelConfig(8, 1, registers=128, programs=16),
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"op": "attend"}],
            r"t.json: rows\[0\]: expected device, op, shape and config, got no config, device, shape",
        ),
        ([row(config={"block_n": 4})], r"t.json: rows\[0\]: config: expected of \[.*\], got \['block_n'\]"),
        ([row(config={"block_n": 4, "num_warps": 2, "threads": 64})], r"config: expected of .*'threads'"),
        ([row(), row()], r"t.json: rows\[1\]: expected one row for .*, got a second"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_table(table(tmp_path / "t.json", *rows))


def test_a_device_has_the_name_that_torch_gives_it(device: str) -> None:
    got = device_name(torch.zeros(1, device=device).device)
    assert got == (torch.cuda.get_device_name() if device == "cuda" else "cpu")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KernelConfig(4, 2).block_n = 8  # pyright: ignore[reportAttributeAccessIssue]
