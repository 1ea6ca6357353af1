"""transformers: prompts are prefilled densely, decode steps are sparse, the paged cache is always right."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.modeling_utils import PreTrainedModel

import locks
from locks import hf, reference
from locks.hf_cache import BLOCK
from locks.pages import gather_pages
from locks.selectors import SELECTORS, make_selector

P, LAYERS, HQ, HKV, D = 16, 2, 4, 2, 64
FMT = locks.SummaryFormat(page=P)
# Covers every context in these tests, and the least that leaves candidates to choose from.
COVERS = hf.LocksConfig(budget=512, impl="torch")
SPARSE = hf.LocksConfig(budget=64, impl="torch")


def tiny() -> Any:
    """A random Llama whose weights are large enough for attention to be uneven; it never ends a text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HQ,
        num_key_value_heads=HKV,
        head_dim=D,
        max_position_embeddings=1024,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model() -> Any:
    return tiny()


def prompt(tokens: int, seed: int = 1, rows: int = 1) -> Tensor:
    return torch.randint(1, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


class Text(NamedTuple):
    tokens: Tensor
    logits: Tensor
    cache: Any


def generate(model: Any, ids: Tensor, new: int, **kwargs: Any) -> Text:
    """Greedy unless said otherwise; logits [rows, new, vocabulary]."""
    out = model.generate(
        ids,
        max_new_tokens=new,
        **{"do_sample": False, **kwargs},
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Text(out.sequences, torch.stack(out.logits, 1), out.past_key_values)


def left_padded(prompts: list[Tensor]) -> dict[str, Tensor]:
    width = max(ids.shape[1] for ids in prompts)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in prompts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def watched(config: hf.LocksConfig) -> tuple[hf.LocksConfig, list[hf.Step]]:
    """The config with a recorder of its steps."""
    steps: list[hf.Step] = []
    return dataclasses.replace(config, on_step=steps.append), steps


def page_ids(steps: list[hf.Step], row: int = 0) -> list[list[list[int]]]:
    return [step.pages.page_ids[row].tolist() for step in steps]


def assert_as_close_as(got: Tensor, plain: Tensor, model: PreTrainedModel, tokens: Tensor) -> None:
    """`got` errs at most twice as much as `plain`, both against the same model in fp64, plus rounding."""
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens).logits[:, -got.shape[1] - 1 : -1]
    rounding = 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + rounding


@pytest.mark.parametrize("length", [1, P - 1, P, P + 1, BLOCK - 1, BLOCK, BLOCK + 1, 150])
def test_context_within_the_budget_is_dense(model: Any, length: int) -> None:
    ids = prompt(length)
    exact = copy.deepcopy(model)
    plain = generate(model, ids, 20)
    got = generate(hf.enable(model, COVERS), ids, 20)
    assert torch.equal(got.tokens, plain.tokens)
    # The prompt goes through the very same attention.
    assert torch.equal(got.logits[:, 0], plain.logits[:, 0])
    assert_as_close_as(got.logits, plain.logits, exact, plain.tokens)
    stats = hf.stats(model)
    assert stats.sparse_rows == stats.decode_rows == 19 * LAYERS
    assert stats.attended_tokens == stats.context_tokens


def test_every_decode_row_is_served_sparsely(model: Any) -> None:
    rows, length, new, pages = 3, 100, 30, 64 // P
    generate(hf.enable(model, SPARSE), prompt(length, rows=rows), new)
    stats = hf.stats(model)
    assert stats.decode_rows == stats.sparse_rows == rows * (new - 1) * LAYERS
    assert stats.dense_rows == rows * LAYERS
    # The prompt's last prediction needs no step: steps see length + 1 .. length + new - 1 tokens.
    lengths = range(length + 1, length + new)
    heads = rows * LAYERS * HKV
    assert stats.pages_read == heads * pages * len(lengths)
    assert stats.context_tokens == heads * sum(lengths)
    assert stats.attended_tokens == heads * sum((pages - 1) * P + (t - 1) % P + 1 for t in lengths)
    assert stats.summary_bytes == heads * sum((t - 1) // P for t in lengths) * FMT.layout(D).nbytes
    assert stats.page_bytes == stats.attended_tokens * 4 * D
    assert stats.dense_bytes == stats.context_tokens * 4 * D
    assert hf.stats(model, 0).sparse_rows == rows * (new - 1)
    hf.reset_stats(model)
    assert hf.stats(model) == hf.Stats()


@pytest.mark.parametrize("window", [1, 2])
def test_sparse_steps_equal_a_loop_over_the_reference(model: Any, window: int) -> None:
    ids, new = prompt(140), 36
    chosen: list[list[list[int]]] = []

    def by_hand(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if query.shape[2] > 1:
            return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)
        length = key.shape[2]
        k_cache, v_cache = (torch.nn.functional.pad(x, (0, 0, 0, -length % P)) for x in (key, value))
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        records = locks.summarize(k_cache, table, lengths, FMT, impl="torch")
        step = reference.decode(
            query[:, :, 0],
            k_cache,
            v_cache,
            records,
            table,
            lengths,
            FMT,
            budget=64,
            window_pages=window,
            scale=kwargs["scaling"],
        )
        chosen.append(step.pages.page_ids[0].tolist())
        return step.out[:, None].to(query.dtype), None

    AttentionInterface.register("by_hand", by_hand)
    model.set_attn_implementation("by_hand")
    want = generate(model, ids, new)
    model.set_attn_implementation("sdpa")
    config, steps = watched(dataclasses.replace(SPARSE, window_pages=window))
    got = generate(hf.enable(model, config), ids, new)
    assert page_ids(steps) == chosen
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    # Otherwise the test could not tell a sparse step from a dense one.
    assert (got.logits - generate(hf.disable(model), ids, new).logits).abs().max() > 0.1


@pytest.mark.parametrize("config", [SPARSE, COVERS], ids=["sparse", "covers"])
def test_a_left_padded_row_equals_its_solo_run(model: Any, config: hf.LocksConfig) -> None:
    prompts = [prompt(n, seed=n) for n in (37, 1, 64, 130)]
    config, steps = watched(config)
    together = generate(
        hf.enable(model, config),
        new=40,
        ids=(batch := left_padded(prompts))["input_ids"],
        attention_mask=batch["attention_mask"],
    )
    shared = [page_ids(steps, row) for row in range(len(prompts))]
    for row, ids in enumerate(prompts):
        steps.clear()
        alone = generate(model, ids, 40)
        assert torch.equal(alone.tokens[0, -40:], together.tokens[row, -40:])
        assert page_ids(steps) == shared[row]
        for layer, solo in zip(together.cache.layers, alone.cache.layers, strict=True):
            assert layer.seq_lens[row] == solo.seq_lens[0]


def test_a_padded_second_prompt_equals_its_solo_run(model: Any) -> None:
    """Two turns of two rows, each turn padded to its longer row: padding in the middle of a row's columns."""
    config, steps = watched(SPARSE)
    hf.enable(model, config)
    first, second = [prompt(70, 1), prompt(90, 2)], [prompt(40, 3), prompt(13, 4)]

    def turns(rows: list[int]) -> tuple[list[Tensor], list[Any]]:
        batches = [left_padded([turn[row] for row in rows]) for turn in (first, second)]
        steps.clear()
        cache, mask, logits = None, torch.zeros(len(rows), 0, dtype=torch.long), []
        inputs = [batch["input_ids"] for batch in batches] + [torch.full((len(rows), 1), 5)] * 20
        masks = [batch["attention_mask"] for batch in batches] + [torch.ones(len(rows), 1)] * 20
        for ids, real in zip(inputs, masks, strict=True):
            mask = torch.cat([mask, real.long()], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            with torch.no_grad():
                out = model(
                    ids, attention_mask=mask, position_ids=positions, **hf.cache_argument(model, cache)
                )
            cache = out.past_key_values
            logits.append(out.logits[:, -1])
        return logits, [page_ids(steps, row) for row in range(len(rows))]

    together, shared = turns([0, 1])
    for row in (0, 1):
        alone, own = turns([row])
        assert own[0] == shared[row]
        torch.testing.assert_close(torch.cat(alone), torch.stack(together)[:, row], rtol=1e-4, atol=1e-4)


def test_summaries_are_those_of_the_cached_keys_at_every_step(model: Any) -> None:
    seen = 0

    def check(step: hf.Step) -> None:
        nonlocal seen
        layer = step.layer
        full = int(layer.seq_lens.min()) // P
        fresh = locks.summarize(layer.k_cache, layer.table, layer.seq_lens, FMT, impl="torch")
        pages = torch.arange(full).expand(2, -1)
        kept, made = (gather_pages(records, layer.table, pages) for records in (layer.state, fresh))
        assert torch.equal(kept, made)
        seen += full

    config = dataclasses.replace(SPARSE, on_step=check)
    generate(hf.enable(model, config), prompt(50, rows=2), 90)
    assert seen > 89 * LAYERS * 3


def test_storage_stays_where_it_is_until_it_grows(model: Any) -> None:
    places: list[tuple[int, ...]] = []

    def note(step: hf.Step) -> None:
        if step.layer_idx == 0:
            layer = step.layer
            held = (layer.k_cache, layer.v_cache, layer.block_table, layer.seq_lens, layer.state)
            places.append((layer.block_table.shape[1], *(tensor.data_ptr() for tensor in held)))

    text = generate(hf.enable(model, dataclasses.replace(SPARSE, on_step=note)), prompt(30), 400)
    # One place for each size.
    assert len(set(places)) == len({place[0] for place in places}) <= 4
    exact = generate(hf.enable(model, SPARSE), text.tokens[:, :-1], 1)
    for grown, once in zip(text.cache.layers, exact.cache.layers, strict=True):
        assert grown.get_seq_length() == once.get_seq_length() == 429
        # Nothing is padded, so nothing needs to be told apart.
        assert grown.mask is None


def test_several_tokens_on_a_filled_cache_attend_densely(model: Any) -> None:
    ids = prompt(200, rows=2)
    with torch.no_grad():
        plain = model(ids).logits
        exact = copy.deepcopy(model).double()(ids).logits
        hf.enable(model, SPARSE)
        cache, parts = None, []
        for chunk in ids.split([70, 2, 57, 71], dim=1):
            out = model(chunk, **hf.cache_argument(model, cache))
            cache, parts = out.past_key_values, [*parts, out.logits]
    error, allowed = (torch.cat(parts, 1) - exact).abs().max(), 2 * (plain - exact).abs().max()
    assert error <= allowed + 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    stats = hf.stats(model)
    assert (stats.decode_rows, stats.dense_rows) == (0, 4 * 2 * LAYERS)


def test_a_prompt_in_chunks_decodes_like_a_whole_one(model: Any) -> None:
    batch = left_padded([prompt(25, 1), prompt(150, 2)])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    config, steps = watched(SPARSE)
    whole = generate(hf.enable(model, config), ids, 20, attention_mask=mask)
    want = [page_ids(steps, row) for row in (0, 1)]
    steps.clear()
    chunks = generate(model, ids, 20, attention_mask=mask, prefill_chunk_size=40)
    assert torch.equal(chunks.tokens, whole.tokens)
    assert [page_ids(steps, row) for row in (0, 1)] == want


def test_a_second_generate_goes_on_with_the_cache(model: Any) -> None:
    ids, more = prompt(90), prompt(30, 2)
    for cache in (DynamicCache(), DynamicCache(config=model.config), None):
        first = generate(model, ids, 20)
        joined = torch.cat([first.tokens, more], 1)
        plain = generate(model, joined, 20)
        hf.enable(model, COVERS)
        cache = hf.PagedCache(model.config, COVERS) if cache is None else cache
        generate(model, ids, 20, **hf.cache_argument(model, cache))
        assert cache.get_seq_length() == 109
        assert torch.equal(
            generate(model, joined, 20, **hf.cache_argument(model, cache)).tokens, plain.tokens
        )
        hf.disable(model)


def test_a_cropped_cache_never_uses_stale_summaries(model: Any) -> None:
    config, steps = watched(SPARSE)
    hf.enable(model, config)
    kept, wrong, right = prompt(100), prompt(60, 2), prompt(60, 3)

    def decode(cache: Any, tokens: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [
                model(token, **hf.cache_argument(model, cache)).logits for token in tokens.split(1, dim=1)
            ]

    with torch.no_grad():
        fresh = model(kept).past_key_values
        want = decode(fresh, right)
        ids = page_ids(steps)
        for crop in (-60, 100):
            cache = model(kept).past_key_values
            decode(cache, wrong)
            cache.crop(crop)
            assert cache.get_seq_length() == 100
            steps.clear()
            got = decode(cache, right)
            assert page_ids(steps) == ids
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    cache.crop(-160)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        assert (
            model(prompt(20, rows=3), **hf.cache_argument(model, cache)).past_key_values.get_seq_length()
            == 20
        )


def test_cropping_counts_real_tokens_only(model: Any) -> None:
    hf.enable(model, SPARSE)
    batch = left_padded([prompt(5, 1), prompt(40, 2)])
    with torch.no_grad():
        cache = model(**batch).past_key_values
    cache.crop(-10)
    assert [layer.seq_lens.tolist() for layer in cache.layers] == [[0, 30]] * LAYERS


@pytest.mark.parametrize("config", [SPARSE, COVERS], ids=["sparse", "covers"])
def test_prompt_lookup_verifies_drafts_densely(model: Any, config: hf.LocksConfig) -> None:
    ids = prompt(40).repeat(1, 3)
    plain = generate(model, ids, 40)
    got = generate(hf.enable(model, config), ids, 40, prompt_lookup_num_tokens=4)
    stats = hf.stats(model)
    assert stats.sparse_rows == stats.decode_rows
    assert stats.dense_rows > LAYERS
    if config is COVERS:
        assert torch.equal(got.tokens, plain.tokens)


Moved = Callable[[Any], list[int]]


def reorder(cache: Any) -> list[int]:
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    return [2, 0, 0]


def reorder_twice(cache: Any) -> list[int]:
    cache.reorder_cache(torch.tensor([1, 1, 2]))
    cache.reorder_cache(torch.tensor([1, 2, 0]))
    return [1, 2, 1]


def select(cache: Any) -> list[int]:
    cache.batch_select_indices(torch.tensor([True, False, True]))
    return [0, 2]


def repeat(cache: Any) -> list[int]:
    cache.batch_repeat_interleave(2)
    return [0, 0, 1, 1, 2, 2]


def crop_shared(cache: Any) -> list[int]:
    """Rows that share full blocks are cut inside of one, so that both will write there."""
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    cache.crop(-80)
    return [1, 1, 0]


@pytest.mark.parametrize("move", [reorder, reorder_twice, select, repeat, crop_shared])
def test_moved_rows_decode_as_if_they_had_always_been_there(model: Any, move: Moved) -> None:
    config, steps = watched(SPARSE)
    hf.enable(model, config)
    prompts = [prompt(n, seed=n) for n in (150, 97, 130)]
    cut = 80 if move is crop_shared else 0
    batch = left_padded(prompts)

    def decode(cache: Any, mask: Tensor, tokens: Tensor) -> Tensor:
        steps.clear()
        logits = []
        for token in tokens.split(1, dim=1):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            positions = mask.sum(1, keepdim=True) - 1
            out = model(token, attention_mask=mask, position_ids=positions, **hf.cache_argument(model, cache))
            logits.append(out.logits)
        return torch.cat(logits, 1)

    with torch.no_grad():
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        cache = model(**batch, position_ids=positions).past_key_values
        rows = move(cache)
        # Every row goes its own way, over page and block boundaries.
        after = prompt(75, 9, rows=len(rows))
        got = decode(cache, batch["attention_mask"][rows, : 150 - cut], after)
        shared = [page_ids(steps, row) for row in range(len(rows))]
        for row, parent in enumerate(rows):
            ids = prompts[parent][:, : prompts[parent].shape[1] - cut]
            want = decode(model(ids).past_key_values, torch.ones_like(ids), after[row : row + 1])
            assert page_ids(steps) == shared[row]
            torch.testing.assert_close(got[row : row + 1], want, rtol=1e-4, atol=1e-4)
    for layer in cache.layers:
        # What rows wrote to is theirs alone.
        kept = [(prompts[parent].shape[1] - cut) // BLOCK for parent in rows]
        owned = [block for row, first in enumerate(kept) for block in layer.block_table[row, first:].tolist()]
        assert len(set(owned)) == len(owned)


def test_beam_search_and_sampling_equal_transformers_within_the_budget(model: Any) -> None:
    batch = left_padded([prompt(50, 1), prompt(100, 2)])
    ways = [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
    ]

    def texts() -> list[Tensor]:
        torch.manual_seed(7)
        return [model.generate(**batch, max_new_tokens=40, **{"do_sample": False, **way}) for way in ways]

    plain = texts()
    hf.enable(model, COVERS)
    assert all(torch.equal(a, b) for a, b in zip(texts(), plain, strict=True))
    stats = hf.stats(model)
    assert stats.sparse_rows == stats.decode_rows == 39 * LAYERS * (2 * 3 + 2 * 4 + 2 * 3)


def test_a_copied_or_forked_cache_goes_its_own_way(model: Any) -> None:
    ids, first, second = prompt(150), prompt(20, 2), prompt(20, 3)
    config, steps = watched(SPARSE)
    hf.enable(model, config)

    def decode(cache: Any, tokens: Tensor) -> tuple[list[Any], Tensor]:
        steps.clear()
        with torch.no_grad():
            logits = [
                model(token, **hf.cache_argument(model, cache)).logits for token in tokens.split(1, dim=1)
            ]
        return page_ids(steps), torch.cat(logits, 1)

    def prefilled() -> Any:
        with torch.no_grad():
            return model(ids).past_key_values

    want = decode(prefilled(), second)
    for copied in (copy.deepcopy, lambda cache: hf.fork(cache, config)):
        cache = prefilled()
        twin = copied(cache)
        decode(cache, first)
        got = decode(twin, second)
        assert got[0] == want[0]
        torch.testing.assert_close(got[1], want[1], rtol=0, atol=0)
    dense = hf.fork(prefilled(), dataclasses.replace(config, budget=None))
    got = decode(dense, second)
    hf.disable(model)
    with torch.no_grad():
        plain = model(torch.cat([ids, second], 1)).logits[:, 150:]
    assert got[0] == []
    torch.testing.assert_close(got[1], plain, rtol=1e-4, atol=1e-4)


def test_without_a_budget_every_row_is_dense_and_counted_so(model: Any) -> None:
    ids = prompt(100)
    plain = generate(model, ids, 30)
    got = generate(hf.enable(model, hf.LocksConfig(budget=None)), ids, 30)
    assert torch.equal(got.tokens, plain.tokens)
    stats = hf.stats(model)
    assert (stats.decode_rows, stats.sparse_rows, stats.dense_rows) == (29 * LAYERS, 0, 30 * LAYERS)


@pytest.mark.parametrize("name", SELECTORS)
def test_any_selector_decodes(model: Any, name: str) -> None:
    ids = prompt(150)
    plain = generate(model, ids, 20)
    for budget in (512, 64):
        config = hf.LocksConfig(budget=budget, selector=make_selector(name, FMT, D))
        got = generate(hf.enable(model, config), ids, 20)
        stats = hf.stats(model)
        assert stats.sparse_rows == stats.decode_rows == 19 * LAYERS
        assert stats.pages_read == 19 * LAYERS * HKV * 4 or budget == 512
        assert torch.equal(got.tokens, plain.tokens) or budget == 64


def test_triton_and_torch_decode_the_same_from_the_first_step_on(model: Any) -> None:
    # The interpreter takes its time for every page: few of them, in one layer.
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    ids, texts, chosen = prompt(72), [], []
    for impl in ("torch", "triton"):
        config, steps = watched(hf.LocksConfig(budget=48, impl=impl, debug=True))
        texts.append(generate(hf.enable(model, config), ids, 4))
        chosen.append(page_ids(steps))
    assert chosen[0] == chosen[1]
    assert torch.equal(texts[0].tokens, texts[1].tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    model, batch = tiny().to("cuda", dtype), left_padded([prompt(37, 1), prompt(300, 2)])
    ids, mask = batch["input_ids"].cuda(), batch["attention_mask"].cuda()
    plain = generate(model, ids, 1, attention_mask=mask)
    for budget in (512, 64):
        hf.enable(model, hf.LocksConfig(budget=budget))
        got = generate(model, ids, 40, attention_mask=mask)
        assert torch.equal(got.tokens[:, : plain.tokens.shape[1]], plain.tokens)
        stats = hf.stats(model)
        assert stats.sparse_rows == stats.decode_rows == 39 * 2 * LAYERS
        assert got.logits.isfinite().all()


def test_disable_undoes_enable(model: Any) -> None:
    ids = prompt(60)
    model.set_attn_implementation("eager")
    plain = generate(model, ids, 10)
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    assert hf.enable(model, SPARSE) is model
    hf.enable(model, COVERS)
    assert model.config._attn_implementation == "locks"
    cache = generate(model, ids, 10).cache
    assert hf.disable(model) is model
    assert model.config._attn_implementation == "eager"
    assert hooks == sum(len(module._forward_pre_hooks) for module in model.modules())
    again = generate(model, ids, 10)
    assert torch.equal(again.logits, plain.logits)
    with pytest.raises(RuntimeError, match="past_key_values: a paged cache takes keys only from a model"):
        model(ids[:, :1], **hf.cache_argument(model, cache))
    for refused in (hf.disable, hf.stats, hf.reset_stats):
        with pytest.raises(ValueError, match=r"model: expected one that .* prepared"):
            refused(model)


def test_two_models_keep_their_own_config_and_counts(model: Any) -> None:
    other = tiny()
    hf.enable(model, SPARSE)
    hf.enable(other, COVERS)
    generate(model, prompt(100), 5)
    assert hf.stats(other) == hf.Stats()
    generate(other, prompt(100), 7)
    assert hf.stats(model).pages_read == 4 * LAYERS * HKV * 4
    assert hf.stats(other).pages_read == 6 * LAYERS * HKV * 7


def test_a_padded_decode_step_makes_no_mask(model: Any) -> None:
    """Making one reads the padding back from the device, at every step."""
    hf.enable(model, SPARSE)
    masks: list[Any] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    batch = left_padded([prompt(20, 1), prompt(40, 2)])
    generate(model, batch["input_ids"], 4, attention_mask=batch["attention_mask"])
    assert masks[0].shape == (2, 1, 40, 40)
    assert masks[1:] == [None] * 3


def test_a_cache_holds_no_graph(model: Any) -> None:
    hf.enable(model, SPARSE)
    ids = prompt(70)
    out = model(ids)
    assert out.logits.requires_grad
    for _ in range(2):
        out = model(ids[:, :1], **hf.cache_argument(model, out.past_key_values))
    for layer in out.past_key_values.layers:
        assert [layer.k_cache.requires_grad, layer.v_cache.requires_grad] == [False, False]


def test_what_would_be_silently_dense_or_wrong_is_refused(model: Any) -> None:
    ids = prompt(40, rows=2)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **hf.cache_argument(model, plain))
    hf.enable(model, SPARSE)
    with torch.no_grad():
        cache = model(ids).past_key_values
        padded = model(**left_padded([prompt(5), prompt(40)])).past_key_values
    one, mask = ids[:, :1], torch.ones(2, 41)
    (name,) = hf.cache_argument(model, cache)
    static = StaticCache(config=model.config, max_cache_len=64)
    changed = mask.clone()
    changed[0, 3] = 0
    refusals: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "use_cache: expected True", {"use_cache": False}),
        (TypeError, "past_key_values: .* got a StaticCache", {name: static}),
        (TypeError, "DynamicCache with offloading", {name: DynamicCache(offloading=True)}),
        (ValueError, "expected an empty cache, got one with 40 tokens", {name: plain}),
        (ValueError, "expected a cache of 1 rows, got 2", {"input_ids": one[:1], name: cache}),
        (
            ValueError,
            r"attention_mask: expected \[2, 41\]",
            {name: cache, "attention_mask": mask[:, :1]},
        ),
        (ValueError, "pairs of tokens", {"attention_mask": torch.ones(2, 1, 1, 1)}),
        (TypeError, "attention_mask: expected a tensor", {"attention_mask": {}}),
        (ValueError, "padding unchanged", {name: cache, "attention_mask": changed}),
        (ValueError, "got None", {name: padded}),
        (ValueError, "output_attentions", {"output_attentions": True}),
    ]
    for error, message, kwargs in refusals:
        with pytest.raises(error, match=message), torch.no_grad():
            model(**{"input_ids": one, **kwargs})
    with pytest.raises(ValueError, match="use_cache"):
        model.generate(ids, use_cache=False, max_new_tokens=2)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"call locks.hf.disable\(model\) first"):
        model(ids)


def test_a_config_says_what_is_wrong_with_it() -> None:
    for message, kwargs in [
        ("budget: expected a multiple of the page", {"budget": 100}),
        ("budget: expected at least 48", {"budget": 32}),
        ("window_pages: expected at least 1", {"window_pages": 0}),
        ("impl: expected one of", {"impl": "cuda"}),
        (
            "fmt: expected the default",
            {"fmt": locks.SummaryFormat(rank=8), "selector": make_selector("quest", FMT, D)},
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            hf.LocksConfig(**kwargs)
    with pytest.raises(TypeError, match="model: expected a transformers PreTrainedModel"):
        hf.enable(torch.nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"config: expected a .*LocksConfig"):
        hf.enable(tiny(), 2048)  # pyright: ignore[reportArgumentType]
