"""The seal kernel: after every step, each layer's records are those that `summarize` makes of the same pages."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from locks.format import SummaryFormat
from locks.kernels.seal import layer_pointers, seal
from locks.kernels.summarize import summarize

POISON = 0xA5


def make_layers(
    fmt: SummaryFormat,
    layers: int,
    per_block: int,
    table: Tensor,
    head_dim: int,
    device: str,
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """Layers' random keys with two KV heads, and records that nobody wrote, for the blocks of a table."""
    blocks, g = int(table.max()) + 1, torch.Generator().manual_seed(0)
    shape = (blocks, 2, per_block * fmt.page, head_dim)
    keys = [torch.randn(shape, generator=g).to(dtype).to(device) for _ in range(layers)]
    shape = (blocks, 2, per_block, fmt.layout(head_dim).nbytes)
    return keys, [torch.full(shape, POISON, dtype=torch.uint8, device=device) for _ in range(layers)]


def shuffled_table(rows: int, blocks: int) -> Tensor:
    order = torch.randperm(rows * blocks + 1, generator=torch.Generator().manual_seed(1))[: rows * blocks]
    return order.reshape(rows, blocks).to(torch.int32)


def expected(
    keys: list[Tensor],
    poisoned: list[Tensor],
    table: Tensor,
    fmt: SummaryFormat,
    before: list[int],
    after: list[int],
) -> list[Tensor]:
    """Poisoned records and those of the newest page of each row that grew past a page's end."""
    device = table.device
    start = torch.tensor([(a // fmt.page - 1) * fmt.page if a >= fmt.page else 0 for a in after])
    grew = torch.tensor([a // fmt.page > b // fmt.page for b, a in zip(before, after, strict=True)])
    lengths = torch.where(grew, torch.tensor(after), 0).to(torch.int32).to(device)
    want = [part.clone() for part in poisoned]
    for k, out in zip(keys, want, strict=True):
        summarize(k, table, lengths, fmt, start=start.to(torch.int32).to(device), max_new_pages=None, out=out)
    return want


def check(got: list[Tensor], want: list[Tensor], device: str) -> None:
    """Asserts that the same records were written, with the same bytes but, on a GPU, for codes at a tie."""
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal((mine == POISON).all(-1), (theirs == POISON).all(-1))
        assert (mine != theirs).float().mean() <= (0.0 if device == "cpu" else 0.01)


@settings(max_examples=settings().max_examples // 4)
@given(
    page=st.sampled_from([16, 32]),
    per_block=st.integers(1, 3),
    layers=st.integers(1, 2),
    before=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    gained=st.lists(st.integers(0, 16), min_size=3, max_size=3),
    each_its_own=st.booleans(),
)
@example(16, 1, 3, [15, 14], [1, 1, 1], False)
@example(16, 2, 2, [15, 9, 30], [8, 8, 0], True)
@example(16, 2, 1, [0, 16, 90], [16, 15, 6], True)
def test_the_page_that_filled_gets_its_record_in_every_layer(
    device: str,
    page: int,
    per_block: int,
    layers: int,
    before: list[int],
    gained: list[int],
    each_its_own: bool,
) -> None:
    fmt = SummaryFormat(page, 1)
    rows = len(before)
    gained = gained[:rows] if each_its_own else gained[:1] * rows
    after = [b + n for b, n in zip(before, gained, strict=True)]
    table = shuffled_table(rows, -(-106 // (per_block * page))).to(device)
    keys, records = make_layers(fmt, layers, per_block, table, 64, device, torch.float32)
    want = expected(keys, records, table, fmt, before, after)
    lengths = torch.tensor(after, dtype=torch.int32, device=device)
    fresh = torch.tensor(gained, dtype=torch.int32, device=device) if each_its_own else gained[0]
    seal(layer_pointers(keys, records), keys[0], records[0], table, lengths, fmt, new_tokens=fresh)
    check(records, want, device)


@pytest.mark.parametrize("head_dim", [80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_precision_caches_as_engines_lay_them_out(
    dtype: torch.dtype, head_dim: int, device: str
) -> None:
    """Tokens before heads, and one token at a time: the default."""
    fmt = SummaryFormat(16, 8, coef_bits=8)
    table = shuffled_table(2, 2).to(device)
    keys, records = make_layers(fmt, 2, 2, table, head_dim, device, dtype)
    keys = [k.transpose(1, 2).contiguous().transpose(1, 2) for k in keys]
    want = expected(keys, records, table, fmt, [47, 20], [48, 21])
    assert not torch.equal(want[0], records[0])
    lengths = torch.tensor([48, 21], dtype=torch.int32, device=device)
    seal(layer_pointers(keys, records), keys[0], records[0], table, lengths, fmt)
    check(records, want, device)


def test_a_row_beyond_the_table_or_without_tokens_writes_nothing(device: str) -> None:
    fmt = SummaryFormat()
    table = shuffled_table(3, 2).to(device)
    keys, records = make_layers(fmt, 2, 1, table, 64, device, torch.float32)
    lengths = torch.tensor([48, 0, 33], dtype=torch.int32, device=device)
    seal(layer_pointers(keys, records), keys[0], records[0], table, lengths, fmt)
    assert all((part == POISON).all() for part in records)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, r: (k, r[:1]), r"records: expected one tensor a layer, got 1 for 2"),
        (lambda k, r: ([], []), r"records: expected one tensor a layer, got 0 for 0"),
        (lambda k, r: ([k[0], k[1][:2]], r), r"k_caches\[1\]: expected shape \[4, 2, 16, 64\]"),
        (
            lambda k, r: ([k[0], k[1].half()], r),
            r"k_caches\[1\]: expected dtype torch.float32, got torch.float16",
        ),
        (
            lambda k, r: ([k[0], k[1].transpose(1, 2).contiguous().transpose(1, 2)], r),
            r"k_caches\[1\]: expected strides",
        ),
        (lambda k, r: (k, [r[0], r[1].to("meta")]), r"records\[1\]: expected device"),
        (lambda k, r: ([one[..., ::2] for one in k], r), r"k_caches\[0\]: expected a contiguous last axis"),
        (
            lambda k, r: (k, [one[..., 2:] for one in r]),
            r"records\[0\]: expected an address that is a multiple of 16",
        ),
    ],
)
def test_layers_that_differ_are_refused_by_name(change, message: str, device: str) -> None:
    fmt = SummaryFormat()
    keys, records = make_layers(fmt, 2, 1, torch.tensor([[3]]), 64, device, torch.float32)
    with pytest.raises(ValueError, match=message):
        layer_pointers(*change(keys, records))


@pytest.mark.gpu
def test_a_graph_seals_every_page_of_every_layer(device: str) -> None:
    fmt = SummaryFormat(16, 8)
    table = shuffled_table(2, 4).to(device)
    keys, records = make_layers(fmt, 3, 1, table, 128, device, torch.bfloat16)
    pointers = layer_pointers(keys, records)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)

    def step() -> None:
        seal(pointers, keys[0], records[0], table, lengths, fmt)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for length in range(1, 65):
        lengths.fill_(length)
        graph.replay()
    whole = torch.full((2,), 64, dtype=torch.int32, device=device)
    want = [torch.full_like(part, POISON) for part in records]
    for k, out in zip(keys, want, strict=True):
        summarize(k, table, whole, fmt, start=None, max_new_pages=None, out=out)
    check(records, want, device)
