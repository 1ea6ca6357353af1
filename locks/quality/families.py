"""The families of tasks by name: what they need is checked before a model is loaded, their examples made after."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from locks.models import SetupError
from locks.quality import infinitebench, longbench, longgen, reading, reasoning, ruler
from locks.quality.example import Task
from locks.quality.text import read_prose

# Makes the tasks with a tokenizer.
Make = Callable[[Any], list[Task]]


@dataclass(frozen=True)
class Options:
    """What a user asked of a family.

    Attributes:
        tasks: names; empty for all that can be made.
        lengths: tokens of a prompt and its answer; of longgen, tokens that are decoded.
        count: examples of a task, at most; None for the family's own.
        seed: of what is drawn.
        samples: answers an example, where they are drawn.
        chat: use the tokenizer's chat template where it has one.
        data: the dataset's file or directory.
        haystack: a text file of prose.
        squad, hotpotqa: the question-answering sets of RULER.
    """

    tasks: Sequence[str] = ()
    lengths: Sequence[int] = ()
    count: int | None = None
    seed: int = 42
    samples: int = 4
    chat: bool = True
    data: Path | None = None
    haystack: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None

    def chosen(self, known: Sequence[str], default: Sequence[str] | None = None) -> list[str]:
        """The tasks asked for, in the family's order.

        Raises:
            ValueError: an unknown name, with the choices.
        """
        for name in self.tasks:
            if name not in known:
                raise ValueError(f"task: expected some of {', '.join(known)}, got {name!r}")
        wanted = self.tasks or (known if default is None else default)
        return [name for name in known if name in wanted]


class Family(NamedTuple):
    """Tasks of one kind: `make` checks the options and returns what makes the tasks; `packages` are what it imports.

    `forced`: nothing is generated, texts are read a token a step.
    """

    make: Callable[[Options], Make]
    tasks: Sequence[str]
    packages: Sequence[str] = ()
    count: int | None = None
    forced: bool = False

    def prepare(self, options: Options) -> Make:
        """What makes the tasks.

        Raises:
            ValueError, SetupError: an unknown task, a file that is missing or damaged, a package that is missing.
        """
        lacking = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if lacking:
            raise SetupError(f"not installed: {', '.join(lacking)}; pip install 'locks-attention[eval]'")
        return self.make(options)


def _ruler(options: Options) -> Make:
    files = {"qa_1": options.squad, "qa_2": options.hotpotqa}
    default = [name for name in ruler.TASKS if name in ruler.SYNTHETIC or files.get(name)]
    names = options.chosen(ruler.TASKS, default)
    prose = read_prose(options.haystack)
    documents = ruler.read_documents(names, options.squad, options.hotpotqa)

    def make(tokenizer: Any) -> list[Task]:
        return [
            task
            for length in options.lengths
            for task in ruler.tasks(
                tokenizer,
                names,
                length,
                count=options.count or 0,
                seed=options.seed,
                prose=prose,
                documents=documents,
                chat=options.chat,
            )
        ]

    return make


def _perplexity(options: Options) -> Make:
    options.chosen(("perplexity",))
    prose, count = read_prose(options.haystack), options.count or 0
    return lambda tokenizer: [
        reading.perplexity(tokenizer, length, count=count, prose=prose) for length in options.lengths
    ]


def _needles(options: Options) -> Make:
    options.chosen(("needles",))
    prose = None if options.haystack is None else read_prose(options.haystack)
    count, seed = options.count or 0, options.seed
    return lambda tokenizer: [
        reading.needles(tokenizer, length, count=count, seed=seed, prose=prose) for length in options.lengths
    ]


def _longgen(options: Options) -> Make:
    options.chosen(("longgen",))
    prose, count, seed, chat = read_prose(options.haystack), options.count or 0, options.seed, options.chat
    return lambda tokenizer: [
        longgen.task(tokenizer, length, count=count, seed=seed, prose=prose, chat=chat)
        for length in options.lengths
    ]


def _longbench(options: Options) -> Make:
    records = longbench.read(
        options.data, options.chosen(longbench.TASKS, _present(options, longbench.TASKS))
    )
    return lambda tokenizer: [
        task
        for length in options.lengths
        for task in longbench.tasks(tokenizer, records, length, count=options.count, chat=options.chat)
    ]


def _infinitebench(options: Options) -> Make:
    names = options.chosen(infinitebench.TASKS, _present(options, infinitebench.TASKS))
    records = infinitebench.read(options.data, names)
    return lambda tokenizer: [
        task
        for length in options.lengths
        for task in infinitebench.tasks(tokenizer, records, length, count=options.count, chat=options.chat)
    ]


def _present(options: Options, names: Sequence[str]) -> list[str]:
    """The tasks that a directory has files for; all where it has none, or where data come from elsewhere."""
    if options.data is None or not options.data.is_dir():
        return list(names)
    held = {file.stem for file in options.data.iterdir()}
    return [name for name in names if name in held] or list(names)


def _reasoning(name: str, options: Options) -> Make:
    options.chosen((name,))
    problems = reasoning.read(options.data, name)
    return lambda tokenizer: [
        reasoning.task(
            tokenizer, name, problems, length, count=options.count, samples=options.samples, chat=options.chat
        )
        for length in options.lengths
    ]


FAMILIES = {
    "ruler": Family(_ruler, ruler.TASKS, ("wonderwords",), 100),
    "needles": Family(_needles, ("needles",), count=16, forced=True),
    "perplexity": Family(_perplexity, ("perplexity",), count=16, forced=True),
    "longgen": Family(_longgen, ("longgen",), ("wonderwords",), 16, forced=True),
    "longbench": Family(_longbench, longbench.TASKS, ("rouge", "jieba", "fuzzywuzzy")),
    "math500": Family(functools.partial(_reasoning, "math500"), ("math500",), ("math_verify",)),
    "aime": Family(functools.partial(_reasoning, "aime"), ("aime",), ("math_verify",)),
    "infinitebench": Family(_infinitebench, infinitebench.TASKS, ("rouge_score",)),
}
