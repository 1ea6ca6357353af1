"""What a task hands to the engine: examples, each drawn from a seed of its own, and how an answer is scored."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Tokens to ids. Everything that has to fit a length counts with it.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Forced:
    """A text read behind a prompt, teacher-forced: `question_ids` leads up to it, `answer_ids` is what counts.

    `then`: texts that are read on behind it, in the same row; their answers count too.
    """

    question_ids: list[int]
    answer_ids: list[int]
    then: tuple[Forced, ...] = ()

    @property
    def feed(self) -> list[int]:
        """What is read: everything but the last token."""
        return [token for text in (self, *self.then) for token in text.question_ids + text.answer_ids][:-1]

    @property
    def targets(self) -> list[int]:
        """What counts as right behind each token of `feed`; -1 where nothing does."""
        wanted = [
            token for text in (self, *self.then) for token in [-1] * len(text.question_ids) + text.answer_ids
        ]
        return wanted[1:]


@dataclass(frozen=True)
class Example:
    """One prompt.

    Attributes:
        index: which one of its task.
        ids: the prompt's tokens.
        answers: what is right, as the task's score takes it.
        max_new_tokens: of the answer; 0 where texts are forced.
        forced: texts to read behind the prompt in place of generating; all examples of a task have equally many.
        facts: what else the score needs.
    """

    index: int
    ids: list[int]
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 0
    forced: tuple[Forced, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A task at one length.

    Attributes:
        name: as it stands in the results.
        length: tokens of a prompt and its answer, at most.
        count: one past the number of the last example.
        make: the example of a number below `count`; equal numbers give equal examples.
        score: of an example and what was generated; a share of what is right, 0 to 1, for each name of a score,
            the task's own first. For forced texts what is generated is `Read`.
        unit: "points", shown as 100 times the mean, or "perplexity", shown as exp of it.
        samples: answers drawn for an example; 1 is greedy.
        first: number of the first example; those below are another run's.
        stop_ids: tokens that end an answer beside the tokenizer's own.
    """

    name: str
    length: int
    count: int
    make: Callable[[int], Example]
    score: Callable[[Example, Any], dict[str, float]]
    unit: str = "points"
    samples: int = 1
    first: int = 0
    stop_ids: tuple[int, ...] = ()

    @property
    def indices(self) -> range:
        """The numbers of the examples."""
        return range(self.first, self.count)


@dataclass(frozen=True)
class Read:
    """What a model made of a forced text: how many of its tokens were the likeliest, and their mean -log p."""

    right: int
    total: int
    nll: float


def draw(*key: Any) -> random.Random:
    """A generator that depends on `key` alone: the seed, the task, the length, the number of the example."""
    return random.Random("/".join(map(str, key)))


def prompt_ids(tokenizer: Any, text: str, *, prefix: str = "", chat: bool = True) -> list[int]:
    """The tokens of a prompt: the user's turn where the tokenizer has a chat template, and how the answer begins.

    Args:
        tokenizer: of transformers.
        text: the user's words.
        prefix: the first words of the answer, given to the model.
        chat: False leaves the template out.
    """
    if not (chat and tokenizer.chat_template):
        return list(tokenizer(text + prefix).input_ids)
    turn = [{"role": "user", "content": text}]
    opened = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(opened + prefix.lstrip(), add_special_tokens=False).input_ids)


def fit(units: int, least: int, tokens: Callable[[int], int], room: int, most: int | None = None) -> int:
    """The largest number of units whose prompt takes at most `room` tokens, by bisection.

    Args:
        units: a guess, at least `least`.
        least: the fewest that make a prompt.
        tokens: how many tokens a prompt of so many units takes; grows with them, about.
        room: the limit.
        most: the most units that there are.

    Raises:
        ValueError: not even `least` fit.
    """
    if tokens(least) > room:
        raise ValueError(f"length: expected room for {tokens(least)} tokens at least, got {room}")
    if most is not None and tokens(most) <= room:
        return most
    low, high = least, max(units, least + 1)
    while tokens(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= room else (low, middle)
    return low
