"""EleutherAI's lm-eval with one more model, "locks": any of its tasks, decoded under a selector or an evictor.

    locks lm-eval --model_args pretrained=PATH,selector=locks,rank=4,budget=512 --tasks ...

It takes `lm-eval run`'s options; from Python, importing this module registers the model. As in `locks eval`, a prompt
is read densely but for its last `tail` tokens, and everything behind that a token a step: what transformers' `generate`
generates, and the texts whose likelihood a task asks for, teacher-forced.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from locks import hf
from locks.checks import FLOATS
from locks.models import SetupError, head_dim, load_model, load_smollm2, num_layers
from locks.quality import engine
from locks.quality.evictors import Evictor
from locks.quality.example import Forced
from locks.quality.methods import FULL, Method, parse_budgets, parse_methods

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry
    from lm_eval.models import huggingface
    from lm_eval.utils import simple_parse_args_string
except ImportError as error:
    raise ImportError(
        f"locks.quality.harness needs lm-eval: pip install 'locks-attention[harness]' ({error})"
    ) from error

# The decorator of lm-eval that registers the class hides its type.
HFLM: Any = huggingface.HFLM

__all__ = ["LocksLM", "chosen", "main", "run"]

_log = logging.getLogger(__name__)

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
# HFLM's own, which mean here what they mean there.
PASSED = (
    "add_bos_token",
    "chat_template_args",
    "enable_thinking",
    "max_batch_size",
    "max_length",
    "prefix_token_id",
    "think_end_token",
    "truncation",
)
OWN = ("pretrained", "selector", "rank", "budget", "page", "tail", "dtype", "device", "batch_size")
# `generate` would copy rows of a cache that it did not make.
_ONE = ("num_beams", "num_return_sequences")


def chosen(selector: str, rank: int | None, budget: int | str, page: int) -> tuple[Method, int] | None:
    """The method and its budget; None for full attention, which a selector or a budget "full" asks for.

    Args:
        selector: a method as `locks eval` names it.
        rank: of its records, where the name does not say.
        budget: tokens that a KV head attends to at a step.
        page: tokens in a page.

    Raises:
        ValueError: an unknown name or a size that is not possible, with the choices.
    """
    found = (
        [] if selector == FULL else parse_methods(selector if rank is None else f"{selector}-r{rank}", page)
    )
    if selector != FULL and len(found) != 1:
        raise ValueError(f"selector: expected one, got {selector!r}")
    budgets, full = parse_budgets(str(budget), page)
    if len(budgets) + full != 1:
        raise ValueError(f"budget: expected one, got {budget!r}")
    return (found[0], budgets[0]) if found and budgets else None


class LocksLM(HFLM):
    """lm-eval's transformers model, decoding under a selector or an evictor.

    Args:
        pretrained: a model directory or a `.gguf` file; SmolLM2-135M-Instruct where none is given.
        selector: as in `locks eval`: "locks", "locks-r8", "quest", "h2o", ...; "full" for dense attention, which
            leaves everything to HFLM.
        rank: of the selector's records, where its name does not say.
        budget: tokens that a KV head attends to at a step, a multiple of the page, or "full".
        page: tokens in a page.
        tail: last tokens of a prompt that are decoded too.
        dtype: float32, float16 or bfloat16; float32 on a CPU and bfloat16 on a GPU where none is given.
        device: the current GPU, else the CPU, where none is given.
        batch_size: rows that are decoded at once.
        **kwargs: HFLM's own arguments that `PASSED` lists.

    Raises:
        ValueError: an argument that is unknown or not possible, before any weight is loaded, or a model that cannot
            decode sparsely.
        SetupError: no model at `pretrained`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        selector: str = "locks",
        rank: int | None = None,
        budget: int | str = 2048,
        page: int = 16,
        tail: int = 1,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        **kwargs: Any,
    ) -> None:
        self.choice = chosen(selector, rank, budget, page)
        self.tail = _count("tail", tail)
        rows = _count("batch_size", batch_size)
        for name in kwargs:
            if name not in PASSED:
                raise ValueError(f"model_args: expected some of {', '.join((*OWN, *PASSED))}, got {name!r}")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        placed = {"dtype": DTYPES.get(dtype or ""), "device": _device(device)}
        model, tokenizer = (
            load_smollm2(**placed) if pretrained is None else load_model(str(pretrained), **placed)
        )
        if self.choice is not None:
            # What cannot decode sparsely is refused here, not at the first request.
            with engine.enabled(model):
                rows = rows if engine.pads(model) else 1
        super().__init__(model, tokenizer=tokenizer, backend="causal", batch_size=rows, **kwargs)
        # Summed over rows and steps: how many there were, bytes read, and bytes that dense attention would have read.
        self.steps, self.read_bytes, self.dense_bytes = 0, 0.0, 0.0

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Any:
        """A model from arguments and lm-eval's own options, such as `--device`; an argument takes an option's place."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**options, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """The same from the text behind `--model_args`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The texts that the model writes behind the requests' prompts."""
        with contextlib.nullcontext() if self.choice is None else engine.enabled(self.model):
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

    @torch.inference_mode()
    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """Token ids [B, prompt and answer] for prompts [B, T], padded on their left."""
        if self.choice is None:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        for name in _ONE:
            if generation_kwargs.get(name, 1) != 1:
                raise ValueError(f"{name}: expected 1 under a selector, got {generation_kwargs[name]}")
        real = generation_kwargs.pop("attention_mask").bool()
        rows = [ids[mask].tolist() for ids, mask in zip(context, real, strict=True)]
        tail = self._tail(rows)
        session = self._session(rows, tail)
        # Padding moves behind the part of a prompt that is in the cache already.
        real = torch.arange(session.width + tail, device=context.device) < session.lengths[:, None]
        real[:, session.width :] = True
        ids = torch.zeros_like(context)
        ids[real] = torch.tensor([token for row in rows for token in row], device=ids.device)
        for column in ids[:, session.width : -1].unbind(1):
            session.step(column)
        with _unmasked(self.model) if session.evicts else contextlib.nullcontext():
            made = super()._model_generate(
                ids,
                max_length,
                stop,
                attention_mask=real.long(),
                **hf.cache_argument(self.model, session.cache),
                **generation_kwargs,
            )
        session.taken += made.shape[1] - ids.shape[1]
        self._count_bytes(session)
        return made

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """For each request the log-likelihood of its text behind its context, and whether every token was likeliest."""
        if self.choice is None:
            return super()._loglikelihood_tokens(list(requests), disable_tqdm, override_bs)
        answers = [(0.0, True)] * len(requests)
        # Texts behind one context share its prefill.
        texts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        pairs = [self._pair(context, text) for _, context, text in requests]
        with engine.enabled(self.model), tqdm(total=len(requests), disable=disable_tqdm, unit="text") as bar:
            for index, (context, text) in enumerate(pairs):
                if len(context) == 1:
                    # Nothing to select from, and nothing to prefill if it were decoded.
                    answers[index] = self._behind_one(context[0], text[0])
                    context, text = context + text[:1], text[1:]
                    pairs[index] = context, text
                if text:
                    texts[tuple(context)].append(index)
            bar.update(len(requests) - sum(map(len, texts.values())))
            session, prefilled = None, None
            for batch in self._batches(texts):
                contexts, repeats = [context for context, _ in batch], len(batch[0][1])
                tail = self._tail(contexts)
                if session is None or prefilled != (contexts, repeats):
                    # The old one goes first: there may be room for one cache alone.
                    session, prefilled = None, (contexts, repeats)
                    session = self._session(contexts, tail, repeats)
                else:
                    session.rewind(self.choice[1])
                numbers = [index for _, indices in batch for index in indices]
                read = session.read([Forced(pairs[index][0][-tail:], pairs[index][1]) for index in numbers])
                self._count_bytes(session)
                for index, text in zip(numbers, read, strict=True):
                    log_p, greedy = -text.nll * text.total, text.right == text.total
                    answers[index] = answers[index][0] + log_p, answers[index][1] and greedy
                    bar.update()
        for (name, _, _), answer in zip(requests, answers, strict=True):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def _pair(self, context: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        """The text, and what there is room for of its context, cut on its left."""
        if not context or not 1 <= len(text) <= self.max_length:
            raise ValueError(
                f"request: expected a context and a text of 1 to {self.max_length} tokens behind it, got "
                f"{len(context)} and {len(text)}"
            )
        # The very last token is predicted and not read.
        room = self.max_length + 1 - len(text)
        if len(context) > room:
            _log.warning("context: cut on its left from %d to %d tokens", len(context), room)
        return context[-room:], text

    @torch.inference_mode()
    def _behind_one(self, context: int, token: int) -> tuple[float, bool]:
        out = self.model(torch.tensor([[context]], device=self.device)).logits[0, -1]
        return float(out.double().log_softmax(-1)[token]), int(out.argmax()) == token

    def _batches(
        self, texts: dict[tuple[int, ...], list[int]]
    ) -> Iterator[list[tuple[list[int], list[int]]]]:
        """Contexts with the numbers of the texts behind them, equally many each, as many as a batch has rows."""
        rows = int(self.batch_size)
        parts = [
            (list(context), indices[first : first + rows])
            for context, indices in texts.items()
            for first in range(0, len(indices), rows)
        ]
        parts.sort(key=lambda part: (len(part[1]), len(part[0])), reverse=True)
        for count, alike in itertools.groupby(parts, key=lambda part: len(part[1])):
            some = list(alike)
            together = rows // count
            yield from (some[first : first + together] for first in range(0, len(some), together))

    def _tail(self, rows: list[list[int]]) -> int:
        """How many tokens of these prompts are decoded; one at the least is left to prefill."""
        least = min(map(len, rows))
        if least < 2:
            raise ValueError(f"prompt: expected at least 2 tokens under a selector, got {least}")
        return min(self.tail, least - 1)

    def _session(self, prompts: list[list[int]], tail: int, repeats: int = 1) -> engine.Session:
        """Rows that stand before the last `tail` tokens of their prompts, `repeats` of each."""
        assert self.choice is not None
        method, budget = self.choice
        selector = method.make(head_dim(self.model.config), num_layers(self.model.config))
        evictors = [selector] if isinstance(selector, Evictor) else []
        prefilled = engine.prefill(
            self.model,
            [prompt[:-tail] for prompt in prompts],
            evictors,
            [prompt[-tail:] for prompt in prompts],
        )
        session = engine.Session(self.model, prefilled, selector, repeats)
        session.rewind(budget)
        return session

    def _count_bytes(self, session: engine.Session) -> None:
        steps = session.taken * len(session.lengths)
        traffic = session.traffic()
        self.steps += steps
        self.read_bytes += steps * traffic.read
        self.dense_bytes += steps * traffic.dense

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's facts for the results, and `locks`: the method, its budget, and bytes that a row's step reads."""
        facts: dict[str, Any] = {"selector": FULL, "budget": None}
        if self.choice is not None:
            method, budget = self.choice
            steps = max(1, self.steps)
            facts = {
                **method.facts(),
                "budget": budget,
                "tail": self.tail,
                "steps": self.steps,
                "bytes_per_step": round(self.read_bytes / steps),
                "dense_bytes_per_step": round(self.dense_bytes / steps),
            }
        return {**super().get_model_info(), "locks": facts}


@contextlib.contextmanager
def _unmasked(model: Any) -> Iterator[None]:
    """`generate` without its mask: rows of an evictor's cache are as long as what they hold, and know it."""
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


def _count(name: str, value: int | str) -> int:
    """The number, at least 1; "auto", which measures dense passes, is none."""
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{name}: expected a number of at least 1, got {value!r}")
    return int(value)


def _device(name: str | None) -> torch.device | None:
    try:
        device = None if name is None else torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected one of torch's, such as cpu or cuda:0, got {name!r}") from error
    # lm-eval asks for cuda:0 where its user asks for nothing.
    return None if device and device.type == "cuda" and not torch.cuda.is_available() else device


model_registry.register("locks", target="locks.quality.harness:LocksLM")


def run(options: Sequence[str]) -> None:
    """`lm-eval run --model locks` with more of its options, of which the last of a name counts."""
    # lm-eval reads no other arguments than the process's.
    process, sys.argv = sys.argv, ["lm-eval", "run", "--model", "locks", *options]
    try:
        cli_evaluate()
    finally:
        sys.argv = process


def main() -> None:
    """`lm_eval`, knowing the model "locks"; what its user can mend ends it with one line."""
    try:
        cli_evaluate()
    except (SetupError, ValueError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
