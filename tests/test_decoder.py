"""The decoder: its steps are `decode`'s, at fixed addresses, for one token or several, idle rows left alone."""

from typing import Any

import pytest
import torch

from locks import SummaryFormat, decode, summarize
from locks.decoder import Decoder
from tests.helpers import DEVICE, IMPLS, normal

by_impl = pytest.mark.parametrize("impl", IMPLS)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
FMT = SummaryFormat(16, 4)
LAYERS, HEADS, GROUP, D, DV, BLOCK, BLOCKS = 2, 2, 2, 64, 80, 32, 3


def caches(rows: int, blocks: int = BLOCKS, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    k, v = (
        [
            normal(rows * blocks, HEADS, BLOCK, width, seed=seed + 7 * i + width, dtype=DTYPE)
            for i in range(LAYERS)
        ]
        for width in (D, DV)
    )
    return k, v


def decoder(lengths: list[int], *, impl: str, seed: int = 0, blocks: int = BLOCKS, **options: Any) -> Decoder:
    """Rows of these lengths, whose blocks are shuffled."""
    rows = len(lengths)
    made = Decoder(
        *caches(rows, blocks, seed),
        num_q_heads=HEADS * GROUP,
        fmt=FMT,
        max_rows=rows,
        max_blocks=blocks,
        impl=impl,
        **{"budget": 48, **options},
    )
    order = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(seed))
    made.block_table.copy_(order.view(rows, blocks))
    made.seq_lens.copy_(torch.tensor(lengths))
    made.summarize()
    return made


def tokens(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a step of one layer."""
    sizes = ((HEADS * GROUP, D), (HEADS, D), (HEADS, DV))
    return tuple(normal(rows, *size, seed=seed + i, dtype=DTYPE) for i, size in enumerate(sizes))  # pyright: ignore[reportReturnType]


def step(one: Decoder, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Every layer's output, lse, page ids and counts of one more step."""
    one.advance()
    found = []
    for layer in range(LAYERS):
        got = one.attend(layer, *tokens(len(one.row_lens), seed + 10 * layer))
        found.append(tuple(x.clone() for x in (got.out, got.lse, *got.pages)))
    one.seal()
    return found


def expected(one: Decoder, layer: int, q: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """What `decode` says of the caches and summaries as they are."""
    args = (one.k_caches[layer], one.v_caches[layer], one.records[layer], one.block_table, one.row_lens)
    got = decode(q, *args, FMT, budget=one.budget, impl=one.impl, **options)
    return got.out, got.lse, *got.pages


def assert_full_pages_are_sealed(one: Decoder) -> None:
    """Every full page's record is the one that is made of its keys anew; no other was ever written."""
    for k_cache, records in zip(one.k_caches, one.records, strict=True):
        anew = summarize(k_cache, one.block_table, one.seq_lens, FMT, impl=one.impl)
        assert torch.equal(records, anew)


@pytest.mark.parametrize(("window_pages", "impl"), [(1, "torch"), (1, "triton"), (2, "torch")])
def test_steps_are_those_of_decode_while_pages_fill(impl, window_pages):
    one = decoder([63, 0, 15, 79], impl=impl, window_pages=window_pages, budget=32 + 16 * window_pages)
    for count in range(2):
        found = step(one, 100 * count)
        for layer in range(LAYERS):
            q = tokens(4, 100 * count + 10 * layer)[0]
            want = expected(one, layer, q, window_pages=window_pages)
            assert all(map(torch.equal, found[layer], want))
    assert one.seq_lens.tolist() == [65, 0, 17, 81]
    assert_full_pages_are_sealed(one)


@by_impl
@pytest.mark.parametrize("q_len", [3])
def test_tokens_of_a_step_are_each_what_they_are_alone(impl, q_len):
    one = decoder([62, 0, 30, 77], impl=impl, q_len=q_len)
    for count in range(2):
        found = step(one, 100 * count)
        assert one.row_lens.view(4, q_len)[:, -1].tolist() == one.seq_lens.tolist()
        for layer in range(LAYERS):
            q = tokens(4 * q_len, 100 * count + 10 * layer)[0]
            assert all(map(torch.equal, found[layer], expected(one, layer, q)))
    assert_full_pages_are_sealed(one)
    # One token at a time, with what the step's others will write not there yet.
    alone = decoder([62, 0, 30, 77], impl=impl)
    many = decoder([62, 0, 30, 77], impl=impl, q_len=q_len)
    got = step(many, 5)[0][0].view(4, q_len, HEADS * GROUP, DV)
    q, k, v = (x.view(4, q_len, *x.shape[1:]) for x in tokens(4 * q_len, 5))
    for i in range(q_len):
        alone.advance()
        want = alone.attend(0, q[:, i].contiguous(), k[:, i].contiguous(), v[:, i].contiguous()).out
        assert torch.equal(got[:, i], want)
        alone.seal()


@by_impl
def test_rejected_tokens_are_overwritten_and_their_pages_sealed_anew(impl):
    one, other = (decoder([60, 42], impl=impl, q_len=8, seed=3) for _ in range(2))
    step(one, 1)
    # Of the eight tokens one was right.
    one.seq_lens -= 7
    other.seq_lens += 1
    for layer in range(LAYERS):
        q, k, v = tokens(16, 1 + 10 * layer)
        other.row_lens.copy_(torch.tensor([61] + 7 * [0] + [43] + 7 * [0]))
        other.attend(layer, q, k, v)
    for count in range(2, 3):
        for got, want in zip(step(one, 100 * count), step(other, 100 * count), strict=True):
            assert all(map(torch.equal, got, want))


@by_impl
def test_an_idle_row_writes_nothing_and_a_row_beyond_its_table_counts_as_the_room(impl):
    one = decoder([0, BLOCK * BLOCKS - 1], impl=impl)
    before = [cache.clone() for cache in (*one.k_caches, *one.v_caches, *one.records)]
    # Row 0 is idle; row 1 fills its last slot, then has no slot left.
    found = step(one, 0)
    assert not found[0][0][0].any()
    assert torch.isneginf(found[0][1][0]).all()
    kept = [cache.clone() for cache in (*one.k_caches, *one.v_caches, *one.records)]
    own = one.block_table[0].long()
    assert all(torch.equal(x[own], y[own]) for x, y in zip(before, kept, strict=True))
    assert not any(map(torch.equal, before, kept))
    step(one, 100)
    assert all(map(torch.equal, kept, (*one.k_caches, *one.v_caches, *one.records)))


@by_impl
def test_a_budget_that_covers_the_table_reads_no_record(impl):
    one = decoder([30, 90], impl=impl, budget=BLOCK * BLOCKS)
    plain = decoder([30, 90], impl=impl, budget=BLOCK * BLOCKS)
    for records in one.records:
        records.fill_(0xFF)
    for got, want in zip(step(one, 0), step(plain, 0), strict=True):
        assert torch.equal(got[0], want[0])
        assert got[3].tolist() == [[2, 2], [6, 6]]


def test_a_steps_buffers_are_the_same_at_every_step():
    one = decoder([70, 20], impl="triton")
    kept = set()
    for count in range(3):
        one.advance()
        got = one.attend(0, *tokens(2, count))
        kept.add(tuple(x.data_ptr() for x in (got.out, got.lse, *got.pages)))
    assert len(kept) == 1


@pytest.mark.gpu
def test_a_step_allocates_nothing():
    one = decoder([1000, 600], impl="triton", blocks=40)
    inputs = tokens(2, 1)
    step(one, 0)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    one.advance()
    for layer in range(LAYERS):
        one.attend(layer, *inputs)
    one.seal()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_thousand_replays_are_the_eager_steps_while_lengths_change(q_len):
    lengths = [3000, 0, 33, 517]
    captured, eager = (decoder(lengths, impl="triton", blocks=300, q_len=q_len) for _ in range(2))
    rows = len(lengths) * q_len
    inputs = [tuple(x.clone() for x in tokens(rows, layer)) for layer in range(LAYERS)]
    outs = [torch.empty(rows, HEADS * GROUP, DV, dtype=DTYPE, device=DEVICE) for _ in range(LAYERS)]

    def run(one: Decoder) -> None:
        one.advance()
        for layer, (q, k, v) in enumerate(inputs):
            outs[layer].copy_(one.attend(layer, q, k, v).out)
        one.seal()

    run(captured)
    captured.seq_lens.copy_(torch.tensor(lengths))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for count in range(1000):
        for q, k, v in inputs:
            for x in (q, k, v):
                x.normal_(generator=generator)
        if count % 97 == 96:
            # Requests come and go.
            fresh = torch.tensor([(count * 31 + 977 * row) % 5000 for row in range(4)], device=DEVICE)
            for one in (captured, eager):
                one.seq_lens.copy_(fresh)
                one.summarize()
        graph.replay()
        got = [out.clone() for out in outs]
        run(eager)
        assert all(map(torch.equal, got, outs)), count


def test_a_prompt_in_chunks_is_summarised_from_where_the_last_one_ended():
    one = decoder([40, 20], impl="torch")
    first = [records.clone() for records in one.records]
    # What was summarised before is not looked at again.
    for k_cache in one.k_caches:
        k_cache[one.block_table[0, 0].long(), :, :16] = torch.nan
    before = one.seq_lens.clone()
    one.seq_lens.copy_(torch.tensor([70, 90]))
    one.summarize(before)
    for k_cache, records, old in zip(one.k_caches, one.records, first, strict=True):
        anew = summarize(k_cache, one.block_table, one.seq_lens, FMT, impl="torch")
        block = one.block_table[0, 0].long()
        assert torch.equal(records[block, :, 0], old[block, :, 0])
        anew[block, :, 0] = old[block, :, 0]
        assert torch.equal(records, anew)


def test_bad_arguments_are_named():
    k, v = caches(2)
    good: dict[str, Any] = {"num_q_heads": 4, "budget": 48, "max_rows": 2, "max_blocks": 3, "fmt": FMT}
    for match, wrong in (
        ("num_q_heads: expected at least 1", {"num_q_heads": 0}),
        ("multiple of Hkv = 2", {"num_q_heads": 7}),
        ("budget: expected at least 48", {"budget": 32}),
        ("q_len: expected 1 to 16", {"q_len": 17}),
        ("max_rows: expected an int", {"max_rows": 1.5}),
        ("max_blocks: expected at least 1", {"max_blocks": 0}),
        ("fmt: expected a SummaryFormat", {"fmt": 4}),
        ("block size that is a multiple of the page", {"fmt": SummaryFormat(64, 4), "budget": 256}),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            Decoder(k, v, **{**good, **wrong})
    with pytest.raises(ValueError, match="v_caches: expected one tensor a layer"):
        Decoder(k, v[:1], **good)
    with pytest.raises(ValueError, match=r"k_caches\[1\]: expected"):
        Decoder([k[0], k[1][:3]], v, **good)
    with pytest.raises(ValueError, match=r"v_caches\[1\]: expected strides"):
        Decoder(k, [v[0], v[1].transpose(1, 2).contiguous().transpose(1, 2)], **good)
    one = Decoder(k, v, **good)
    q, new_k, new_v = tokens(2, 0)
    for match, args in (
        (r"q: expected \w+ \[2, 4, 64\]", (q[:1], new_k, new_v)),
        (r"k: expected \w+ \[2, 2, 64\]", (q, new_v, new_v)),
        (r"v: expected \w+ \[2, 2, 80\]", (q, new_k, new_v.double())),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            one.attend(0, *args)
