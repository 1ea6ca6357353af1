"""A vLLM engine in a process of its own, which ends with it: nothing of one engine is left when the next begins."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from locks.quality.engine import TEMPERATURE, TOP_K, TOP_P

ENVIRONMENT = {
    # The counts are those of the process that decodes.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Request:
    """A prompt, how long its answer may get, what ends it, and the seed that it is drawn with; None is greedy."""

    ids: list[int]
    limit: int
    stops: list[int]
    seed: int | None = None


@dataclass(frozen=True)
class Served:
    """Answers with the token that ends them, and what the plugin counted meanwhile, by the names of its totals."""

    tokens: list[list[int]]
    counts: dict[str, float]


class Engine:
    """An engine in the only process of a pool."""

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        self.pool = pool

    def answer(self, requests: Sequence[Request]) -> Served:
        """What it answers; several at once."""
        return self.pool.submit(_answer, list(requests)).result()


@contextmanager
def started(settings: dict[str, Any]) -> Iterator[Engine]:
    """An engine with these arguments of vLLM's `LLM`."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        pool.submit(_start, settings).result()
        yield Engine(pool)


# What the pool's process holds.
_llm: Any = None


def _start(settings: dict[str, Any]) -> None:
    global _llm
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]

    from locks.vllm import plugin

    # A checkout has no entry point; registering twice does no harm.
    plugin.register()
    _llm = LLM(**settings)


def _answer(requests: list[Request]) -> Served:
    from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    from locks.vllm import stats

    def sampling(request: Request) -> Any:
        drawn = {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K, "seed": request.seed}
        return SamplingParams(
            max_tokens=request.limit,
            stop_token_ids=request.stops,
            detokenize=False,
            **({"temperature": 0} if request.seed is None else drawn),
        )

    before = asdict(stats.totals())
    outputs = _llm.generate(
        [{"prompt_token_ids": request.ids} for request in requests],
        [sampling(request) for request in requests],
        use_tqdm=False,
    )
    after = asdict(stats.totals())
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return Served(tokens, {name: after[name] - before[name] for name in after})
