"""What the engine tests share: starting and stopping an engine, running requests step by step, checking its caches."""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locks import api

# Greedy outputs may part where two tokens are as likely to this many nats: sums of float32 in another order.
TIE = 2e-3


@contextmanager
def engine(model: Path, locks: dict[str, Any] | None, **settings: Any) -> Iterator[Any]:
    """An engine in this process; `locks` None for vLLM's own attention."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enforce_eager": True,
        "num_gpu_blocks_override": 160,
        "block_size": 64,
        "additional_config": {} if locks is None else {"locks": locks},
    }
    llm = LLM(str(model), **(options | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2)


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def layers(llm: Any) -> dict[str, Any]:
    return llm.llm_engine.vllm_config.compilation_config.static_forward_context


def run(
    llm: Any,
    requests: Sequence[Sequence[int]],
    tokens: int,
    each_step: Callable[[int], object] | None = None,
) -> list[Any]:
    """Serves all requests together, calling `each_step(step)` after every step; their outputs in order."""
    name = f"run{random.getrandbits(32)}"
    for i, ids in enumerate(requests):
        llm.llm_engine.add_request(f"{name}-{i}", {"prompt_token_ids": list(ids)}, greedy(tokens))
    done = drain(llm, each_step)
    return [done[f"{name}-{i}"] for i in range(len(requests))]


def drain(llm: Any, each_step: Callable[[int], object] | None = None) -> dict[str, Any]:
    """Steps until no request is left; the first output of each that finished."""
    done, step = {}, 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
        step += 1
        if each_step is not None:
            each_step(step)
    return done


def alone(llm: Any, requests: Sequence[Sequence[int]], tokens: int) -> list[Any]:
    """Each request by itself, with nothing cached before."""
    outputs = []
    for ids in requests:
        assert llm.reset_prefix_cache()
        outputs += run(llm, [ids], tokens)
    assert llm.reset_prefix_cache()
    return outputs


def assert_same(got: Any, want: Any) -> None:
    """Equal token ids, or parted where the two likeliest tokens tie."""
    for i, (a, b) in enumerate(zip(got.token_ids, want.token_ids, strict=True)):
        if a != b:
            first, second = sorted((x.logprob for x in want.logprobs[i].values()), reverse=True)[:2]
            assert first - second < TIE, f"token {i}: {a} for {b}, whose lead is {first - second:.4f} nats"
            return


def check_records(llm: Any) -> int:
    """Every full page of every running request has the record of the keys now in the cache; how many there were."""
    scheduler, checked = core(llm).scheduler, 0
    owners = {n: layer for n, layer in layers(llm).items() if n + ".locks_summary" in layers(llm)}
    assert owners
    for request in scheduler.running:
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for name, owner in owners.items():
            keys, _, records = owner.impl.stages.views(owner.kv_cache)
            fmt = owner.impl.stages.config.fmt
            pages = request.num_computed_tokens // fmt.page
            table = torch.tensor([blocks], dtype=torch.int32)
            lens = torch.tensor([pages * fmt.page], dtype=torch.int32)
            want = api.summarize(keys, table, lens, fmt, impl="torch")
            page = torch.arange(pages)
            block, slot = table[0][page // records.shape[2]].long(), page % records.shape[2]
            same = (records[block, :, slot] == want[block, :, slot]).all(-1)
            assert bool(same.all()), f"{name}: pages {page[~same.all(1)].tolist()} of {request.request_id}"
            checked += same.numel()
    return checked


def watch_selection(worker: Any) -> None:
    """From now on keeps what a rank selects: for `LLM.collective_rpc`, which runs it in every rank's process."""
    from locks import torch_impl

    worker.selected, worker.select_pages = [], torch_impl.select_pages

    def watched(share: Tensor, *args: Any, **settings: Any) -> Any:
        pages = worker.select_pages(share, *args, **settings)
        worker.selected.append((pages.page_ids.tolist(), share.log().tolist()))
        return pages

    torch_impl.select_pages = watched


def end_watch(worker: Any) -> list[tuple[Any, Any]]:
    """Page ids [rows, Hkv, M] and logarithms of shares [rows, Hkv, N] of every layer and step since the watch began."""
    from locks import torch_impl

    torch_impl.select_pages = worker.select_pages
    return worker.selected


def selected(llm: Any, requests: Sequence[Sequence[int]], tokens: int) -> tuple[list[Any], list[Any]]:
    """Each request's output, served alone, and for each the ids and shares of every (step, layer), all ranks' heads."""
    outputs, found = [], []
    for ids in requests:
        llm.collective_rpc(watch_selection)
        outputs += run(llm, [ids], tokens)
        ranks = llm.collective_rpc(end_watch)
        found.append(
            [
                tuple(torch.cat([torch.tensor(rank[part]) for rank in call], 1) for part in range(2))
                for call in zip(*ranks, strict=True)
            ]
        )
    return outputs, found
