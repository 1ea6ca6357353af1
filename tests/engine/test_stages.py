"""Rows of a step out of vLLM's metadata, and the GPU's stages (in Triton's interpreter) against the CPU's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locks import decode, torch_impl, triton_impl
from locks.vllm import stages
from locks.vllm.config import PluginConfig
from locks.vllm.metadata import BatchSplitter, DecodeRows, Sealing, prefill_part
from locks.vllm.stages import LayerStages
from locks.vllm.summary_layer import elements_per_token

BLOCK, HKV, HQ, D = 32, 2, 6, 64


def common(new: list[int], lens: list[int], width: int = 8, tokens: int | None = None) -> Any:
    """vLLM's metadata of requests with `new` query tokens and lengths `lens`."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = int(starts[-1]) if tokens is None else tokens
    table = torch.arange(1, 1 + len(new) * width, dtype=torch.int32).view(len(new), width)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(new),
        num_actual_tokens=total,
        max_query_len=max(new),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=torch.arange(total),
        seq_lens_cpu_upper_bound=torch.tensor(lens, dtype=torch.int32),
        is_prefilling=torch.tensor([n > 3 for n in new]),
    )


def splitter(query_len: int, dense_below: int = 0) -> BatchSplitter:
    config = PluginConfig(budget=64, dense_below=dense_below)
    return BatchSplitter(config, 8, query_len, torch.device("cpu"), short_prompts_decode=True)


def test_one_token_a_request():
    batch, rows = common([1, 1, 0], [40, 64, 0]), splitter(1)
    assert rows.split(batch) == (3, 2)
    got = rows.decode_rows(batch, 3, 3)
    assert got.seq_lens.tolist() == [40, 64, 0]
    assert got.seq_lens.data_ptr() == batch.seq_lens.data_ptr()
    assert got.sealing.start.tolist() == [39, 63, 0]
    assert got.sealing.max_new_pages == 1


def test_drafted_tokens_are_rows_and_padding_is_empty():
    rows = splitter(3)
    # A graph of four requests of three tokens, two of them real.
    batch = common([3, 3, 0, 0], [40, 64, 0, 0], tokens=12)
    assert rows.split(batch) == (4, 12)
    got = rows.decode_rows(batch, 4, 12)
    assert got.seq_lens.tolist() == [38, 39, 40, 62, 63, 64, *[0] * 6]
    table = batch.block_table_tensor
    assert torch.equal(got.block_table[:6], table[[0, 0, 0, 1, 1, 1]])
    assert got.sealing.start.tolist() == [37, 61, 0, 0]
    # What a captured graph reads stays where it is.
    again = rows.decode_rows(common([3, 3, 3, 0], [9, 33, 50, 0], tokens=12), 4, 12)
    for old, new in ((got.seq_lens, again.seq_lens), (got.block_table, again.block_table)):
        assert old.data_ptr() == new.data_ptr()
    assert got.sealing.start.data_ptr() == again.sealing.start.data_ptr()
    assert again.seq_lens.tolist() == [7, 8, 9, 31, 32, 33, 48, 49, 50, 0, 0, 0]


def test_drafts_of_different_lengths():
    batch, rows = common([3, 1, 2], [40, 64, 18]), splitter(3)
    got = rows.decode_rows(batch, *rows.split(batch))
    assert got.seq_lens.tolist() == [38, 39, 40, 64, 17, 18]
    assert torch.equal(got.block_table, batch.block_table_tensor[[0, 0, 0, 1, 2, 2]])


@pytest.mark.parametrize("query_len", [1, 3])
def test_rows_below_the_bound_are_empty_to_the_scan(query_len: int):
    rows = splitter(query_len, dense_below=50)
    new = [query_len] * 2
    got = rows.decode_rows(common(new, [40, 51]), 2, 2 * query_len)
    lens = [40, 51] if query_len == 1 else [38, 39, 40, 49, 50, 51]
    assert got.seq_lens.tolist() == lens
    assert got.scanned.dtype == torch.int32
    assert got.scanned.tolist() == [length if length >= 50 else 0 for length in lens]
    # What a captured graph reads stays where it is.
    again = rows.decode_rows(common(new, [70, 20]), 2, 2 * query_len)
    assert again.scanned.data_ptr() == got.scanned.data_ptr()
    assert again.scanned.tolist() == [length if length >= 50 else 0 for length in again.seq_lens.tolist()]


def test_without_a_bound_every_row_is_scanned():
    got = splitter(1).decode_rows(common([1, 1], [40, 51]), 2, 2)
    assert got.scanned is got.seq_lens


def test_what_is_left_of_a_mixed_batch():
    batch, rows = common([1, 1, 20, 7], [40, 64, 20, 100]), splitter(1)
    requests, tokens = rows.split(batch)
    assert (requests, tokens) == (2, 2)
    rest = prefill_part(batch, requests, tokens)
    assert rest.query_start_loc.tolist() == rest.query_start_loc_cpu.tolist() == [0, 20, 27]
    assert (rest.num_reqs, rest.num_actual_tokens, rest.slot_mapping.tolist()[0]) == (2, 27, 2)
    assert rest.seq_lens.tolist() == [20, 100]
    sealing = rows.prefill_sealing(rest)
    assert sealing.start.tolist() == [0, 93]
    assert sealing.max_new_pages == 2
    assert torch.equal(sealing.block_table, batch.block_table_tensor[2:])


def layer(config: PluginConfig, work: Any, kv_cache: Tensor) -> LayerStages:
    made = LayerStages(config, None, work, D, D**-0.5)
    width = BLOCK * elements_per_token(config, D, kv_cache.dtype)
    side: Any = SimpleNamespace(kv_cache=torch.full((kv_cache.shape[0], HKV, width), torch.nan))
    made.side = side
    return made


@pytest.mark.parametrize("small_passes", [False, True])
@pytest.mark.parametrize("dense_below", [0, 100])
@pytest.mark.parametrize("page", [16, 32])
def test_gpu_stages_do_what_the_cpu_does(
    page: int, dense_below: int, small_passes: bool, monkeypatch: pytest.MonkeyPatch
):
    config = PluginConfig(budget=4 * page, page=page, dense_below=dense_below)
    rng = torch.Generator().manual_seed(0)
    lens = torch.tensor([256, 0, 99, 160, 1, 255], dtype=torch.int32)
    width, rows = 256 // BLOCK, len(lens)
    kv_cache = torch.randn((1 + rows * width, HKV, BLOCK, 2 * D), generator=rng)
    table = 1 + torch.randperm(rows * width, generator=rng, dtype=torch.int32).view(rows, width)
    q = torch.randn((rows, HQ, D), generator=rng)
    start = torch.zeros_like(lens)
    scanned = torch.where(lens < dense_below, 0, lens)
    step = DecodeRows(table, lens, scanned, Sealing(table, lens, start, 256 // page))
    if small_passes:
        monkeypatch.setattr(stages, "PASS_BYTES", 1)
    outputs = []
    for work in (torch_impl, triton_impl):
        made, out = layer(config, work, kv_cache), torch.full((rows, HQ, D), torch.nan)
        made.seal_prefill(kv_cache, step.sealing)
        made.decode(q, kv_cache, step, out)
        outputs.append(out)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    assert bool((outputs[0][1] == 0).all())
    # The row of 99 tokens is dense where it is below the crossover; it has 7 or 4 pages.
    k, v = (
        kv_cache[table[2].long(), :, :, part].transpose(0, 1).flatten(1, 2)[:, :99].repeat_interleave(3, 0)
        for part in (slice(D), slice(D, None))
    )
    dense = torch.softmax((k @ q[2][..., None])[..., 0] * D**-0.5, -1)[:, None] @ v
    close = torch.allclose(outputs[0][2], dense[:, 0], atol=1e-5)
    assert close == (dense_below == 100 or page == 32)


class Operations(TorchDispatchMode):
    """Names of the operations of PyTorch that run, those of Triton's interpreter for each launch among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dense_rows_cost_no_launch():
    rng = torch.Generator().manual_seed(0)
    lens = torch.tensor([256, 200, 99], dtype=torch.int32)
    width, rows = 256 // BLOCK, len(lens)
    kv_cache = torch.randn((1 + rows * width, HKV, BLOCK, 2 * D), generator=rng)
    table = 1 + torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    q, out = torch.randn((rows, HQ, D), generator=rng), torch.empty((rows, HQ, D))
    names = []
    for dense_below in (0, 100):
        config = PluginConfig(budget=64, dense_below=dense_below)
        scanned = torch.where(lens < dense_below, 0, lens)
        step = DecodeRows(table, lens, scanned, Sealing(table, lens, torch.zeros_like(lens), 16))
        made = layer(config, triton_impl, kv_cache)
        made.seal_prefill(kv_cache, step.sealing)
        with Operations() as seen:
            made.decode(q, kv_cache, step, out)
        names.append(seen.names)
    assert names[0] == names[1] != []


def test_a_layer_hands_its_settings_on():
    """The pages and the output of `locks.decode` with the layer's scale, budget, page and window."""
    config = PluginConfig(budget=96, page=16, window_pages=3)
    rng = torch.Generator().manual_seed(0)
    lens = torch.tensor([256, 200], dtype=torch.int32)
    width, rows = 256 // BLOCK, len(lens)
    kv_cache = torch.randn((1 + rows * width, HKV, BLOCK, 2 * D), generator=rng)
    table = 1 + torch.randperm(rows * width, generator=rng, dtype=torch.int32).view(rows, width)
    q, out = torch.randn((rows, HQ, D), generator=rng), torch.full((rows, HQ, D), torch.nan)
    made = layer(config, torch_impl, kv_cache)
    made.scale = 0.3
    step = DecodeRows(table, lens, lens, Sealing(table, lens, torch.zeros_like(lens), 256 // 16))
    made.seal_prefill(kv_cache, step.sealing)
    made.decode(q, kv_cache, step, out)
    options = {"budget": 96, "scale": 0.3, "window_pages": 3, "impl": "torch"}
    want = decode(q, *made.views(kv_cache), table, lens, config.fmt, **options)
    assert torch.equal(out, want.out)


@pytest.mark.parametrize("work", [torch_impl, triton_impl], ids=["torch", "triton"])
def test_pages_are_chosen_by_the_lengths_that_the_scan_is_given(work: Any):
    """So that a row that is dense costs no scan: as of an empty row nothing is listed, and only the bound gives all."""
    config = PluginConfig(budget=64, dense_below=100)
    lens = torch.tensor([160, 160, 99], dtype=torch.int32)
    scanned = torch.tensor([160, 0, 0], dtype=torch.int32)
    table = 1 + torch.arange(15, dtype=torch.int32).view(3, 5)
    kv_cache = torch.randn((16, HKV, BLOCK, 2 * D), generator=torch.Generator().manual_seed(0))
    q, out = torch.ones((3, HQ, D)), torch.full((3, HQ, D), torch.nan)
    made = layer(config, work, kv_cache)
    step = DecodeRows(table, lens, scanned, Sealing(table, lens, torch.zeros_like(lens), 10))
    made.seal_prefill(kv_cache, step.sealing)
    made.decode(q, kv_cache, step, out)
    assert [bool(row.any()) for row in out] == [True, False, True]
    assert bool(out.isfinite().all())
