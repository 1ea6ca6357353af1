"""Forced texts: perplexity of prose, and the digits of numbers hidden in it."""

from __future__ import annotations

from typing import Any

from locks.needles import build_needles
from locks.quality.example import Example, Forced, Read, Task

# Tokens of a text that perplexity is taken over; all before them is the context.
TAIL = 256
NEEDLES = 8
# What a question about a number and its answer take, at most.
QUESTION = 128


def perplexity(tokenizer: Any, length: int, *, count: int, prose: str) -> Task:
    """Perplexity of the last `TAIL` tokens of `length` tokens of prose, read a token a step.

    The examples are windows at even distances over the prose, which must be longer than one.

    Raises:
        ValueError: a text too short.
    """
    ids = tokenizer(prose, add_special_tokens=False).input_ids
    room = len(ids) - length
    if room < 0 or length <= TAIL:
        raise ValueError(
            f"lengths: expected {TAIL + 1} to {len(ids)} tokens, all that the prose has, got {length}; give a longer "
            "text with --haystack"
        )
    starts = sorted({round(room * i / max(1, count - 1)) for i in range(count)})

    def make(index: int) -> Example:
        window = ids[starts[index] : starts[index] + length]
        context, read = window[: length - TAIL - 1], window[length - TAIL - 1 :]
        return Example(index, context, forced=(Forced(read[:1], read[1:]),))

    return Task("perplexity", length, len(starts), make, _loss, unit="perplexity")


def needles(tokenizer: Any, length: int, *, count: int, seed: int, prose: str | None) -> Task:
    """Eight numbers in `length` tokens of prose, questions and answers included: the share of digits right."""

    def make(index: int) -> Example:
        task = build_needles(
            tokenizer, tokens=length - QUESTION, needles=NEEDLES, seed=seed + index, text=prose
        )
        asked = tuple(Forced(list(q.question_ids), list(q.answer_ids)) for q in task.questions)
        return Example(index, list(task.context_ids), forced=asked)

    return Task("needles", length, count, make, _digits)


def _loss(example: Example, read: list[Read]) -> dict[str, float]:
    return {"nll": read[0].nll}


def _digits(example: Example, read: list[Read]) -> dict[str, float]:
    return {"digits": sum(text.right for text in read) / sum(text.total for text in read)}
