"""Tensor parallelism on loopback: what two ranks say, select and hold is what one does; a dead one ends the engine."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.conftest import save_llama
from tests.engine.engines import assert_same, drain, engine, greedy, prompts, run, selected

RAGGED = (300, 17, 500, 64, 129, 1, 250, 333)
ALONE = (150, 240)
STEPS = 24
LOCKS = {"budget": 64}
# Bytes of keys and values a KV head: 3 layers of 160 blocks of 64 tokens, 64 + 64 float32 each.
A_HEAD = 3 * 160 * 64 * 128 * 4

# A batch's outputs, those of requests served alone, and what these selected.
Answers = tuple[list[Any], list[Any], list[Any]]


def answers(llm: Any) -> Answers:
    return run(llm, prompts(RAGGED), STEPS), *selected(llm, prompts(ALONE, seed=8), STEPS)


def assert_same_answers(two: Answers, one: Answers) -> None:
    for got, want in zip(two[0] + two[1], one[0] + one[1], strict=True):
        assert_same(got, want)
    for i in range(len(ALONE)):
        equal = [a == b for a, b in zip(two[1][i].token_ids, one[1][i].token_ids, strict=True)]
        # A step's selection follows from the tokens up to its own; the last one is never fed back.
        steps = min([*equal, False].index(False), STEPS - 1)
        assert steps > STEPS // 2
        assert len(two[2][i]) == len(one[2][i]) == 3 * (STEPS - 1)
        for call in range(3 * steps):
            assert_same_pages(two[2][i][call], one[2][i][call])


def assert_same_pages(two: Any, one: Any) -> None:
    """Equal page ids in every head, but for pages whose scores tie to twice the ranks' difference in scores."""
    (got, score), (want, reference) = two, one
    assert got.shape == want.shape
    scored = reference > float("-inf")
    error = float((score - reference)[scored].abs().max())
    # A record's code may round the other way where sums of float32 came in another order.
    assert error < 1
    for row, head in (got != want).any(-1).nonzero().tolist():
        score_of = reference[row, head]
        least = min(float(score_of[page]) for page in want[row, head].tolist() if scored[row, head, page])
        for page in set(got[row, head].tolist()) ^ set(want[row, head].tolist()):
            assert abs(float(score_of[page]) - least) <= 2 * error


def memory(worker: Any) -> tuple[int, int]:
    """Bytes of summaries, and of keys and values, that a rank holds."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    total = [0, 0]
    for name, layer in layers.items():
        total[not name.endswith(".locks_summary")] += layer.kv_cache.numel() * layer.kv_cache.element_size()
    return total[0], total[1]


def pid(worker: Any) -> int:
    return os.getpid()


def plan(rank: int, ranks: int, held: tuple[int, int], heads: int) -> str:
    summaries, cache = (f"{part / 2**20:.1f} MiB" for part in held)
    share = f"{100 * held[0] / held[1]:.1f} %"
    return (
        f"LOCKS: rank {rank} of {ranks} holds {summaries} of summaries beside {cache} of keys and values ({share}), "
        f"{heads} KV heads in 3 layers"
    )


def test_two_ranks_say_and_select_what_one_does_and_hold_half_each(
    tmp_path: Path, caplog_vllm: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    model = save_llama(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4)
    with engine(model, LOCKS) as llm:
        one = answers(llm)
        (whole,) = llm.collective_rpc(memory)
    # A record of 256 bytes for each 8192 of keys and values.
    assert whole == (4 * A_HEAD // 32, 4 * A_HEAD)
    with engine(model, LOCKS, tensor_parallel_size=2) as llm:
        two = answers(llm)
        halves = [tuple(half) for half in llm.collective_rpc(memory)]
    assert_same_answers(two, one)
    assert halves == [(whole[0] // 2, whole[1] // 2)] * 2
    assert plan(0, 1, whole, 4) in caplog_vllm.text
    said = "".join(capfd.readouterr())
    for rank in range(2):
        assert said.count(plan(rank, 2, halves[rank], 2)) == 1


def with_the_head_twice(model: Path, directory: Path) -> Path:
    """The same model with a copy of its one KV head for each half of the query heads."""
    from transformers import LlamaForCausalLM

    one = LlamaForCausalLM.from_pretrained(model)
    one.config.num_key_value_heads = 2
    state = one.state_dict()
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = weight.repeat(2, 1)
    two = LlamaForCausalLM(one.config)
    two.load_state_dict(state)
    two.save_pretrained(directory)
    return directory


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """What processes that start inside write, as long as they live, goes to a file."""
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    with path.open("wb") as file:
        for stream in kept:
            os.dup2(file.fileno(), stream)
    try:
        yield
    finally:
        for stream, old in kept.items():
            os.dup2(old, stream)
            os.close(old)


@pytest.fixture(scope="module")
def shared_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Answers, Any, Path]]:
    """What one rank answers with a copy of the head for each half; two ranks that share the head, and their log."""
    from vllm import envs

    directory = tmp_path_factory.mktemp("models")
    model = save_llama(directory / "model", num_key_value_heads=1)
    with engine(with_the_head_twice(model, directory / "twice"), LOCKS) as llm:
        one = answers(llm)
    with pytest.MonkeyPatch.context() as patch:
        # As it is served: the engine has a process of its own, and functions are sent to it.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        envs.disable_envs_cache()
        with ExitStack() as stack:
            with written_to(directory / "log"):
                llm = stack.enter_context(engine(model, LOCKS, tensor_parallel_size=2))
            yield one, llm, directory / "log"


def test_ranks_that_share_a_head_select_for_their_own_query_heads(shared_head: tuple[Answers, Any, Path]):
    one, llm, _ = shared_head
    assert_same_answers(answers(llm), one)
    assert [tuple(held) for held in llm.collective_rpc(memory)] == [(A_HEAD // 32, A_HEAD)] * 2


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Ends what runs inside by an error if it takes longer."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_rank_that_dies_ends_the_engine_with_one_message(shared_head: tuple[Answers, Any, Path]):
    from vllm.v1.engine.exceptions import EngineDeadError

    _, llm, log = shared_head
    ranks, front = [psutil.Process(n) for n in llm.collective_rpc(pid)], llm.llm_engine
    front.add_request("last", {"prompt_token_ids": prompts((100,))[0]}, greedy(900))
    for _ in range(5):
        front.step()
    ranks[1].kill()
    with at_most(60), pytest.raises(EngineDeadError):
        drain(llm)
    said = log.read_text()
    assert said.count("Worker proc VllmWorker-1 died unexpectedly") == said.count("died unexpectedly") == 1
    with at_most(10):
        while any(map(running, ranks)):
            time.sleep(0.1)
    # Whoever asks again is told so at once.
    with at_most(10), pytest.raises(EngineDeadError):
        run(llm, prompts((100,)), 1)
