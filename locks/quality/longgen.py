"""Long generation: thousands of decoded tokens, then questions about what stands in the first of them.

The answer to a short order is a notebook: prose, with numbers noted in its first quarter. Every token of it is decoded,
teacher-forced, so that pages are summarised and tokens evicted while it grows; then the numbers are asked for, in the
same row, one turn after the other, each answer teacher-forced too. The score is the share of the numbers' tokens that
were the likeliest.
"""

from __future__ import annotations

import functools
import re
from random import Random
from typing import Any

from locks.quality.example import Example, Forced, Read, Task, draw, prompt_ids
from locks.quality.text import sentences, words

NOTES = 8
# The share of the decoded tokens in which the numbers are noted, and how much of it the notes may take.
EARLY, DENSE = 0.25, 0.9
_ORDER = (
    "Write a long notebook for me. Some special magic numbers are noted in it. Memorize them: I will ask you for "
    "them at the end."
)
_NOTE = " The special magic number for {key} is: {value}."
_QUESTION = "What is the special magic number for {key}?"
_ANSWER = "The special magic number for {key} is: "


def task(
    tokenizer: Any, length: int, *, count: int, seed: int, prose: str, chat: bool = True, notes: int = NOTES
) -> Task:
    """The task at `length` decoded tokens, questions and answers inside, behind a prompt of some fifty.

    Args:
        tokenizer: of transformers.
        length: tokens that are decoded, exactly.
        count: examples.
        seed: of all of them.
        prose: what the notebook is filled with, going round as often as that takes.
        chat: use the tokenizer's chat template where it has one.
        notes: numbers to note and to ask for, at most 9.

    Raises:
        ValueError: a length without room.
    """
    maker = _Maker(tokenizer, length, seed, prose, chat, notes)
    if length < maker.least:
        raise ValueError(f"lengths: expected at least {maker.least} decoded tokens, got {length}")
    return Task("longgen", length, count, maker.example, _score)


class _Maker:
    """Makes the examples of one length."""

    def __init__(self, tokenizer: Any, length: int, seed: int, prose: str, chat: bool, notes: int) -> None:
        self.tokenizer, self.length, self.seed, self.chat, self.notes = tokenizer, length, seed, chat, notes
        self.keys, self.prose = _keys(prose), sentences(prose)
        self.between, self.after = _turns(tokenizer, chat)

    @property
    def least(self) -> int:
        """The length that has room for whatever keys are drawn."""
        longest = sorted(self.keys, key=len)[-self.notes :]
        planted, asked = self._pieces([(key, "9999") for key in longest])
        noted, questions = (sum(map(len, some)) for some in (planted, (text.feed for text in asked)))
        return 1 + int(max(noted / DENSE / EARLY, (questions + self.notes) / (1 - EARLY)))

    def example(self, index: int) -> Example:
        """The example of that number."""
        rng = draw(self.seed, "longgen", self.length, index)
        # Told apart by their first digits.
        values = [f"{first}{rng.randrange(1000):03}" for first in rng.sample(range(1, 10), self.notes)]
        noted = list(zip(rng.sample(self.keys, self.notes), values, strict=True))
        planted, asked = self._pieces(noted)
        rng.shuffle(asked)
        first, *others = asked
        # The very last token is predicted and not read.
        room = self.length - len(Forced(first.question_ids, first.answer_ids, tuple(others)).feed)
        notebook = self._notebook(rng, planted, room)
        whole = Forced(notebook + first.question_ids, first.answer_ids, tuple(others))
        prompt = prompt_ids(self.tokenizer, _ORDER, prefix="\n\n", chat=self.chat)
        return Example(index, prompt, tuple(values), forced=(whole,), facts=dict(noted))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _pieces(self, noted: list[tuple[str, str]]) -> tuple[list[list[int]], list[Forced]]:
        """The notes, and a question and answer about each."""
        planted = [self._encode(_NOTE.format(key=key, value=value)) for key, value in noted]
        return planted, [self._asked(key, value) for key, value in noted]

    def _asked(self, key: str, value: str) -> Forced:
        said = self.between + _QUESTION.format(key=key) + self.after + _ANSWER.format(key=key)
        ids = self._encode(said + value)
        for count in range(1, len(value) + 1):
            if self.tokenizer.decode(ids[-count:]).strip() == value:
                return Forced(ids[:-count], ids[-count:])
        raise ValueError(f"tokenizer: expected tokens of its own for the number in {said + value!r}")

    def _notebook(self, rng: Random, planted: list[list[int]], room: int) -> list[int]:
        """`room` tokens of sentences in order, the planted ones at drawn places among the first."""
        free = EARLY * self.length - sum(map(len, planted))
        # In tokens of prose before each.
        places = [(i + rng.random()) / len(planted) * free for i in range(len(planted))]
        waiting = list(zip(places, planted, strict=True))
        at, written = rng.randrange(len(self.prose)), 0
        made: list[int] = []
        while len(made) < room:
            line = self._encode((" " if made else "") + self.prose[at % len(self.prose)])
            at += 1
            # Before a sentence that would lead beyond its place, but for the very first one.
            while made and waiting and waiting[0][0] < written + len(line):
                made += waiting.pop(0)[1]
            made += line
            written += len(line)
        return made[:room]


def _turns(tokenizer: Any, chat: bool) -> tuple[str, str]:
    """What stands between an answer and the next question, and between a question and its answer."""
    if not (chat and tokenizer.chat_template):
        return "\n\n", "\n"
    marks = ("<<order>>", "<<notebook>>", "<<question>>")
    turns = [
        {"role": role, "content": mark}
        for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    between, after = text.split(marks[1])[1].split(marks[2])
    return between, after


@functools.cache
def _keys(prose: str) -> tuple[str, ...]:
    """Short nouns that the prose does not use."""
    used = set(re.findall("[a-z]+", prose.lower()))
    return tuple(word for word in words("noun") if re.fullmatch("[a-z]{4,8}", word) and word not in used)


def _score(example: Example, read: list[Read]) -> dict[str, float]:
    return {"digits": read[0].right / read[0].total}
