"""One engine after the other on a CPU: equal to vLLM's own, equal to solo runs, and every record that of its keys."""

from pathlib import Path
from typing import Any

import pytest

from locks import SummaryFormat
from locks.vllm import stats
from tests.engine.engines import (
    alone,
    assert_same,
    check_records,
    core,
    drain,
    engine,
    greedy,
    layers,
    prompts,
    run,
)

RAGGED = (300, 17, 500, 64, 129, 1, 250, 333)


@pytest.fixture(scope="module")
def own(tiny: Path) -> list[Any]:
    """What vLLM's own attention answers."""
    with engine(tiny, None) as llm:
        assert not any(name.endswith(".locks_summary") for name in layers(llm))
        return run(llm, prompts(RAGGED), 40)


@pytest.mark.parametrize(("block", "page"), [(16, 16), (32, 16), (64, 64), (128, 32)])
def test_budget_that_covers_the_context_changes_nothing(tiny: Path, own: list[Any], block: int, page: int):
    blocks = 160 * 64 // block
    settings = {"block_size": block, "num_gpu_blocks_override": blocks}
    with engine(tiny, {"budget": 1024, "page": page}, **settings) as llm:
        got = run(llm, prompts(RAGGED), 40, lambda step: step % 10 or check_records(llm))
    for a, b in zip(got, own, strict=True):
        assert_same(a, b)


def test_dense_below_changes_nothing_for_shorter_rows_and_skips_their_scan(tiny: Path, own: list[Any]):
    before = stats.totals()
    with engine(tiny, {"budget": 64, "dense_below": 1024}) as llm:
        got = run(llm, prompts(RAGGED), 40)
    for a, b in zip(got, own, strict=True):
        assert_same(a, b)
    after = stats.totals()
    assert after.covered_rows - before.covered_rows == after.decode_rows - before.decode_rows > 0
    assert after.sparse_rows == before.sparse_rows
    assert after.summary_bytes == before.summary_bytes


def test_layers_of_different_ranks(tiny: Path):
    given = {"budget": 64, "rank": 2, "layer_ranks": "8@1-1"}
    requests, read = prompts(RAGGED), {}
    for name, settings in {"mixed": given, "two": {"budget": 64, "rank": 2}}.items():
        before = stats.totals()
        with engine(tiny, settings, max_num_batched_tokens=128) as llm:
            got = run(llm, requests, 20, lambda step, llm=llm: step % 8 or check_records(llm))
            after = stats.totals()
            if name == "mixed":
                for a, b in zip(got, alone(llm, requests, 20), strict=True):
                    assert_same(a, b)
                sides = [layer for name, layer in layers(llm).items() if name.endswith(".locks_summary")]
                assert [side.config.fmt.rank for side in sides] == [2, 8, 2]
                widths = [side.kv_cache.shape[-1] for side in sides]
                assert widths[0] == widths[2] < widths[1]
        read[name] = after.summary_bytes - before.summary_bytes
    eight, two = (SummaryFormat(rank=rank).layout(64).nbytes for rank in (8, 2))
    assert read["mixed"] / read["two"] == pytest.approx((eight + 2 * two) / (3 * two))


def test_batch_equals_solo_runs_twice_over_one_prefix(tiny: Path):
    shared = prompts([192], seed=1)[0]
    # 129: a prefix hit that leaves one token of the prompt.
    requests = [shared + tail for tail in prompts((70, 5, 200, 33, 129, 2, 90, 64), seed=2)]
    with engine(tiny, {"budget": 64}, max_num_batched_tokens=128, disable_log_stats=False) as llm:
        solo = alone(llm, requests, 40)
        before, hits = stats.totals(), cached_tokens(llm)
        first = run(llm, requests, 40, lambda step: step % 8 or check_records(llm))
        second = run(llm, requests, 40, lambda step: step % 8 or check_records(llm))
        after = stats.totals()
        # All but the first request of the first round, and all of the second, find the prefix.
        assert cached_tokens(llm) - hits >= 15 * len(shared)
    for a, b, c in zip(first, second, solo, strict=True):
        assert_same(a, c)
        assert_same(b, c)
    # All contexts are longer than the budget: of 40 tokens the prompt's last one gives the first.
    assert after.sparse_rows - before.sparse_rows == after.decode_rows - before.decode_rows == 2 * 8 * 39


def cached_tokens(llm: Any) -> int:
    (metric,) = [m for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    return metric.value


def test_preempted_requests_end_as_solo_ones(tiny: Path):
    requests = prompts((190, 100, 250, 60, 130, 40, 200, 170), seed=3)
    # Blocks for about half of them at their longest. Resumed tokens are prefilled, so a budget that leaves pages out
    # would not give the same; records are checked at all times.
    with engine(tiny, {"budget": 1024}, num_gpu_blocks_override=60, block_size=16, max_model_len=512) as llm:
        solo = alone(llm, requests, 60)
        preempted = set()

        def watch(step: int) -> None:
            preempted.update(r.request_id for r in core(llm).scheduler.waiting if r.num_preemptions)
            if step % 8 == 0:
                check_records(llm)

        together = run(llm, requests, 60, watch)
    assert len(preempted) >= 2
    for a, b in zip(together, solo, strict=True):
        assert_same(a, b)


def test_aborted_requests_leave_nothing_to_those_that_take_their_blocks(tiny: Path):
    early, late = prompts((300, 60, 200, 90, 150, 250), seed=4), prompts((280, 75, 190, 110), seed=5)
    with engine(tiny, {"budget": 64}, num_gpu_blocks_override=32, enable_prefix_caching=False) as llm:
        solo = alone(llm, early + late, 40)
        front = llm.llm_engine
        names = [
            front.add_request(f"early-{i}", {"prompt_token_ids": ids}, greedy(40))
            for i, ids in enumerate(early)
        ]
        for _ in range(12):
            front.step()
        taken = {i: blocks_of(llm, i) for i in (0, 2, 5)}
        front.abort_request([names[i] for i in taken], internal=True)
        for i, ids in enumerate(late):
            front.add_request(f"late-{i}", {"prompt_token_ids": ids}, greedy(40))
        reused = set()

        def watch(step: int) -> None:
            for request in core(llm).scheduler.running:
                if request.request_id.startswith("late"):
                    reused.update(*core(llm).scheduler.kv_cache_manager.get_block_ids(request.request_id))
            if step % 8 == 0:
                check_records(llm)

        done = drain(llm, watch)
    assert reused & {block for blocks in taken.values() for block in blocks}
    assert set(done) == {"early-1", "early-3", "early-4", "late-0", "late-1", "late-2", "late-3"}
    for i in (1, 3, 4):
        assert_same(done[f"early-{i}"], solo[i])
    for i in range(len(late)):
        assert_same(done[f"late-{i}"], solo[len(early) + i])


def blocks_of(llm: Any, number: int) -> list[int]:
    scheduler = core(llm).scheduler
    (name,) = [r.request_id for r in scheduler.running if r.request_id.startswith(f"early-{number}")]
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
    return blocks


def test_ngram_speculation_gives_what_decoding_one_by_one_gives(tiny: Path):
    # Text that repeats itself, so that drafts are made; random weights accept few of them.
    requests = [ids * 4 for ids in prompts((40, 25, 60, 33, 16, 50, 21, 44), seed=6)]
    with engine(tiny, {"budget": 64}) as llm:
        solo = alone(llm, requests, 60)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    before = stats.totals()
    with engine(tiny, {"budget": 64}, speculative_config=drafts) as llm:
        together = run(llm, requests, 60, lambda step: step % 8 or check_records(llm))
    # Every drafted token is a row.
    assert stats.totals().decode_rows - before.decode_rows > 8 * 60
    for a, b in zip(together, solo, strict=True):
        assert_same(a, b)


def test_pages_that_no_forward_pass_wrote_are_sealed_before_the_first_step(tiny: Path):
    transfer = {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.5},
    }
    settings = {"enable_prefix_caching": False, "kv_transfer_config": transfer}
    with engine(tiny, {"budget": 64}, **settings) as llm:
        checked = []
        run(llm, prompts((500, 63, 300), seed=7), 20, lambda _: checked.append(check_records(llm)))
    # 31, 3 and 18 pages, in 3 layers of 2 KV heads.
    assert checked[0] == (31 + 3 + 18) * 3 * 2


def test_memory_plan_counts_the_summaries(tiny: Path):
    with engine(tiny, {"budget": 64}, num_gpu_blocks_override=None) as llm:
        caches = [layer.kv_cache for layer in layers(llm).values()]
        sides = [layer.kv_cache for name, layer in layers(llm).items() if name.endswith(".locks_summary")]
    assert len(caches) == 2 * len(sides) == 6
    total = sum(cache.numel() * cache.element_size() for cache in caches)
    a_block = total // caches[0].shape[0]
    # VLLM_CPU_KVCACHE_SPACE, in GiB.
    assert (1 << 30) - a_block < total <= 1 << 30


def test_an_engine_without_a_configuration_is_vllms_own_beside_one_with(tiny: Path, own: list[Any]):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    with engine(tiny, {"budget": 64}) as llm:
        sparse = run(llm, prompts(RAGGED), 40)
    before = stats.totals()
    with engine(tiny, None) as llm:
        assert {type(layer.impl) for layer in layers(llm).values()} == {CPUAttentionBackendImpl}
        dense = run(llm, prompts(RAGGED), 40)
    assert stats.totals() == before
    for a, b in zip(dense, own, strict=True):
        assert_same(a, b)
    assert [x.token_ids for x in sparse] != [x.token_ids for x in own]


def test_counts_are_in_the_log_and_among_the_prometheus_counters(
    tiny: Path, caplog_vllm: pytest.LogCaptureFixture
):
    from prometheus_client import REGISTRY

    with engine(tiny, {"budget": 64}) as llm:
        stats.report()
        was = REGISTRY.get_sample_value("locks_sparse_rows_total") or 0
        run(llm, prompts((100, 200)), 10)
        stats.report()
    assert REGISTRY.get_sample_value("locks_sparse_rows_total") == was + 2 * 9
    assert "LOCKS: decode rows 18, sparse 18" in caplog_vllm.text
