"""RULER: the 13 tasks, generated to the published definitions.

The sentences of the templates, the sizes and the scores are the protocol's; how instances are drawn is ours: each
example has a generator of its own, so that any part of a task can be made alone, and a prompt is as long as whole
units of its haystack allow, the tokens of the answer inside the length.

Source: RULER (arXiv 2404.06654), the 13 tasks of its `synthetic.yaml`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from locks.quality import ruler_lists, ruler_niah, ruler_qa
from locks.quality.example import Encode, Example, Task, draw, fit, prompt_ids
from locks.quality.scores import match_all, match_part


class Draft(NamedTuple):
    """A prompt before its tokens: the user's words, how the answer begins, what is right."""

    text: str
    prefix: str
    answers: tuple[str, ...]


class Recipe(NamedTuple):
    """How a task's prompts are made.

    build: (generator, number of the example, length, units of haystack, tokenizer) to a draft; least, most: units
    that a prompt may have; generate: tokens of an answer; part: whether any of the answers is enough.
    """

    build: Callable[[Random, int, int, int, Encode], Draft]
    least: int
    generate: int
    part: bool = False
    most: int | None = None


QA = {"qa_1": ("squad", "SQuAD 2.0's dev-v2.0.json"), "qa_2": ("hotpotqa", "HotpotQA's dev distractor JSON")}
TASKS = (*ruler_niah.TASKS, "vt", "cwe", "fwe", *QA)
# What can be made without a data file.
SYNTHETIC = TASKS[: -len(QA)]


def recipe(name: str, *, prose: str, documents: Any = None) -> Recipe:
    """The recipe of one of `TASKS`; `documents` (`ruler_qa.read`) for the last two."""
    if name in ruler_niah.TASKS:
        spec = ruler_niah.TASKS[name]
        hay = tuple(prose.split())
        return Recipe(
            lambda rng, _index, _length, units, _encode: Draft(*ruler_niah.build(spec, rng, units, hay)),
            spec.least,
            128,
        )
    if name in QA:
        return Recipe(
            lambda rng, index, _length, units, _encode: Draft(*ruler_qa.build(documents, rng, index, units)),
            1,
            32,
            True,
            len(documents.texts),
        )
    build, least, generate = ruler_lists.TASKS[name]
    return Recipe(
        lambda rng, _index, length, units, encode: Draft(*build(rng, length, units, encode)), least, generate
    )


def tasks(
    tokenizer: Any,
    names: Sequence[str],
    length: int,
    *,
    count: int,
    seed: int = 42,
    prose: str,
    documents: dict[str, Any] | None = None,
    chat: bool = True,
) -> list[Task]:
    """The named tasks at one length.

    Args:
        tokenizer: of transformers.
        names: of `TASKS`.
        length: tokens of a prompt and its answer.
        count: examples of a task.
        seed: of all of them.
        prose: the haystack of the tasks that hide things in essays.
        documents: for "qa_1" and "qa_2", what `ruler_qa.read` read.
        chat: use the tokenizer's chat template where it has one.
    """
    made = []
    for name in names:
        how = recipe(name, prose=prose, documents=(documents or {}).get(name))
        maker = _Maker(name, how, tokenizer, length, seed, chat)
        score = functools.partial(_score, how.part)
        some = count if documents is None or name not in QA else min(count, len(documents[name].questions))
        made.append(Task(name, length, some, maker.example, score))
    return made


class _Maker:
    """Makes the examples of one task; how many units of haystack fit is found once and then only lowered."""

    def __init__(self, name: str, how: Recipe, tokenizer: Any, length: int, seed: int, chat: bool) -> None:
        self.name, self.how, self.tokenizer, self.length = name, how, tokenizer, length
        self.seed, self.chat = seed, chat
        self.room = length - how.generate

    def example(self, index: int) -> Example:
        """The example of that number."""
        units = self.units
        while True:
            ids, answers = self._prompt(units, index)
            if len(ids) <= self.room:
                return Example(index, ids, answers, self.how.generate)
            units -= max(1, (len(ids) - self.room) * units // len(ids))
            if units < self.how.least:
                raise ValueError(f"length: expected more than {self.length} for {self.name}")

    @functools.cached_property
    def units(self) -> int:
        """Units of haystack that fill the length, by a prompt that is not among the examples."""
        guess = max(self.how.least, self.room // 20)
        return fit(guess, self.how.least, lambda n: len(self._prompt(n, -1)[0]), self.room, self.how.most)

    def _prompt(self, units: int, index: int) -> tuple[list[int], tuple[str, ...]]:
        rng = draw(self.seed, self.name, self.length, index)
        draft = self.how.build(rng, index, self.length, units, self._encode)
        ids = prompt_ids(self.tokenizer, draft.text, prefix=draft.prefix, chat=self.chat)
        return ids, draft.answers

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def _score(part: bool, example: Example, generated: str) -> dict[str, float]:
    scores = {"all": match_all(generated, example.answers), "part": match_part(generated, example.answers)}
    # The task's own comes first.
    return dict(sorted(scores.items(), key=lambda item: item[0] != ("part" if part else "all")))


def read_documents(names: Sequence[str], squad: Path | None, hotpotqa: Path | None) -> dict[str, Any]:
    """What the question-answering tasks among `names` draw from.

    Raises:
        SetupError: a file that is missing or is not of its dataset's form.
    """
    paths = {"qa_1": squad, "qa_2": hotpotqa}
    return {name: ruler_qa.read(paths[name], *QA[name]) for name in names if name in QA}
