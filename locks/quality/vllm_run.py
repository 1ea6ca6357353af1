"""The engine of vLLM: the same tasks, plans and logs, answered by the plugin in one engine after another.

A selector and a budget are an engine's settings, so each of them gets an engine, in a process of its own that ends
with it. Prompts are prefilled densely, so an answer's first token is full attention's; every later one is decoded
sparsely.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from locks.models import SetupError, head_dim
from locks.quality.engine import Traffic
from locks.quality.example import Example, Task, draw
from locks.quality.log import Key, Log
from locks.quality.methods import Method
from locks.quality.run import Config, Plan, batches, result_rows, stop_ids
from locks.quality.vllm_process import Engine, Request, Served, started
from locks.vllm import compat

# The only selector that the plugin has.
SELECTOR = "locks"
# Bytes of an element of K and V, whatever the cache's dtype, as in the engine of transformers.
ELEMENT = 2


def check(methods: Sequence[Method], model: Path | None, tail: int) -> None:
    """Whether this engine can run what is asked for, before a weight is loaded.

    Raises:
        ValueError: a selector that the plugin does not have, or prompts' last tokens read sparsely.
        SetupError: no vLLM, one that is not supported, or no model directory.
    """
    for method in methods:
        if method.selector != SELECTOR:
            raise ValueError(
                f"selector: expected {SELECTOR} or one with a rank and bits such as locks-r8 or locks-r4c8 in the "
                f"engine vllm, got {method.spec!r}; the engine hf has the others"
            )
    if tail != 1:
        raise ValueError(f"tail: expected 1 in the engine vllm, which prefills whole prompts, got {tail}")
    found = compat.installed()
    if found is None:
        raise SetupError("engine: vLLM is not installed; pip install 'locks-attention[vllm]'")
    reason = compat.unsupported(found[1], _device().type)
    if reason is not None:
        raise SetupError(f"engine: {reason}")
    if model is None or not (model.expanduser() / "config.json").is_file():
        raise SetupError(f"model: expected a model directory for the engine vllm, got {model}")


def load(path: Path) -> tuple[Any, Any]:
    """The model's config and its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    path = path.expanduser()
    return (
        AutoConfig.from_pretrained(path, local_files_only=True),
        AutoTokenizer.from_pretrained(path, local_files_only=True),
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> torch.dtype:
    """What the engine of transformers takes there too."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def settings(path: Path, plan: Plan, config: Config, length: int) -> dict[str, Any]:
    """The arguments of vLLM's `LLM` for one line of the comparison.

    Args:
        path: the model's directory.
        plan: for how many answers at once.
        config: the line.
        length: the most tokens of a prompt and its answer.
    """
    chosen: dict[str, Any] = {
        "model": str(path.expanduser()),
        "skip_tokenizer_init": True,
        "dtype": str(dtype()).removeprefix("torch."),
        "max_model_len": length,
        "max_num_seqs": plan.batch,
        # A prompt that is known already would leave its last token to the sparse step.
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # A small model is compiled for longer than it runs.
        chosen["enforce_eager"] = True
    if config.method is None or config.budget is None:
        return chosen
    fmt = config.method.fmt
    if fmt is None:
        raise ValueError(f"selector: expected one with a record, got {config.method.spec!r}")
    options: dict[str, Any] = {"budget": config.budget, "page": fmt.page, "rank": fmt.rank}
    options |= {name: getattr(fmt, name) for name in ("mean_bits", "basis_bits", "coef_bits")}
    if config.method.more:
        options["layer_ranks"] = ",".join(map(str, config.method.more))
    chosen["additional_config"] = {"locks": options}
    if on_gpu:
        # A CPU engine knows no other backend than its own, which gives way to ours there.
        chosen["attention_config"] = {"backend": "CUSTOM"}
    return chosen


def run(path: Path, model_config: Any, tokenizer: Any, plan: Plan, log: Log) -> None:
    """Answers what the log does not hold yet, one engine for each line that lacks something."""
    length = max(task.length for task in plan.tasks)
    ends = stop_ids(_generation_config(path, model_config), tokenizer)
    keys = [key for task in plan.tasks for key in plan.keys(task)]
    held = sum(key in log.rows for key in keys)
    with tqdm(total=len(keys), initial=held, unit="answer") as bar:
        for config in plan.configs:
            line = _Line(model_config, tokenizer, plan, config, ends, log, bar)
            lacking = {task: line.lacking(task) for task in plan.tasks}
            if not any(lacking.values()):
                continue
            with started(settings(path, plan, config, length)) as engine:
                for task, indices in lacking.items():
                    bar.set_description(f"{line.name} {task.name} {task.length}")
                    for some in batches(indices, max(1, plan.batch // task.samples)):
                        line.answer(engine, task, some)


@dataclass(frozen=True)
class _Line:
    """One line of the comparison: makes requests of examples, and rows of what comes back."""

    model_config: Any
    tokenizer: Any
    plan: Plan
    config: Config
    ends: set[int]
    log: Log
    bar: tqdm

    @property
    def name(self) -> str:
        facts = self.config.facts(self.plan.page)
        return (
            facts["selector"] if self.config.budget is None else f"{facts['selector']} {self.config.budget}"
        )

    def lacking(self, task: Task) -> list[int]:
        """The examples of which the log lacks a sample."""
        return [i for i in task.indices if any(key not in self.log.rows for key in self._keys(task, i))]

    def _keys(self, task: Task, index: int) -> list[Key]:
        return [self.plan.key(task, index, sample, self.config) for sample in range(task.samples)]

    def answer(self, engine: Engine, task: Task, indices: list[int]) -> None:
        """Adds the rows of a few examples to the log."""
        examples = [task.make(index) for index in indices]
        requests = [request for example in examples for request in self._requests(task, example)]
        began = time.perf_counter()
        served = engine.answer(requests)
        seconds = (time.perf_counter() - began) / len(requests)
        traffic = self._traffic(requests, served)
        facts = {
            **self.config.facts(self.plan.page),
            "bytes_per_step": round(traffic.read),
            "dense_bytes_per_step": round(traffic.dense),
            "seconds": round(seconds, 4),
        }
        texts = [
            (self.tokenizer.decode(ids, skip_special_tokens=True), len(ids))
            for request, tokens in zip(requests, served.tokens, strict=True)
            for ids in [_before(tokens, request.stops)]
        ]
        rows = [
            row
            for place, example in enumerate(examples)
            for row in result_rows(task, example, texts[place * task.samples :][: task.samples], facts)
        ]
        fresh = sum(key not in self.log.rows for index in indices for key in self._keys(task, index))
        self.log.append(rows)
        self.bar.update(fresh)

    def _requests(self, task: Task, example: Example) -> Iterator[Request]:
        stops = sorted({*task.stop_ids, *self.ends})
        for sample in range(task.samples):
            # Equal for every line.
            rng = draw(self.plan.seed, "sample", task.name, example.index, sample)
            seed = None if task.samples == 1 else rng.getrandbits(31)
            yield Request(example.ids, example.max_new_tokens, stops, seed)

    def _traffic(self, requests: Sequence[Request], served: Served) -> Traffic:
        """Of a decode step of one row, on average; of the prompts where no answer has a second token."""
        # A prompt's last token is prefilled; the last token of an answer is never read.
        lengths = [
            len(request.ids) + step
            for request, tokens in zip(requests, served.tokens, strict=True)
            for step in range(1, len(tokens))
        ]
        token = 2 * ELEMENT * _elements(self.model_config)
        if not lengths:
            dense = token * sum(len(request.ids) for request in requests) / len(requests)
            return Traffic(dense, dense)
        if self.config.method is None:
            dense = token * sum(lengths) / len(lengths)
            return Traffic(dense, dense)
        counts = served.counts
        if not counts["decode_rows"]:
            raise RuntimeError("engine: vLLM decoded without the plugin; `locks doctor` says what is wrong")
        rows, scale = counts["decode_rows"], ELEMENT / dtype().itemsize
        read = counts["summary_bytes"] + scale * counts["page_bytes"]
        return Traffic(read / rows, scale * counts["dense_bytes"] / rows)


def _elements(config: Any) -> int:
    """Numbers in one token's keys, over layers and heads."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_hidden_layers * heads * head_dim(config)


def _before(tokens: Sequence[int], stops: Sequence[int]) -> list[int]:
    """The tokens before the first of the stops."""
    end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:end])


def _generation_config(path: Path, model_config: Any) -> Any:
    from transformers import GenerationConfig

    if (path.expanduser() / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path.expanduser(), local_files_only=True)
    return GenerationConfig.from_model_config(model_config)
