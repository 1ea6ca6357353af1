"""LongBench-v1: its 21 tasks, prompts, limits and metrics.

A prompt longer than the length loses its middle. Few-shot and code tasks have no chat template, and of their answers
the first line counts where the protocol says so.

Source: LongBench (arXiv 2308.14508); `longbench.json` holds the protocol's prompts and limits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from locks.quality import data, longbench_scores
from locks.quality.example import Example, Task, prompt_ids

_PROTOCOL: dict[str, dict[str, Any]] = json.loads(
    files("locks.quality").joinpath("longbench.json").read_text(encoding="utf-8")
)
TASKS = tuple(_PROTOCOL)
# No chat template: their prompts end in the middle of a pattern.
PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# Of an answer the first line counts.
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")


def read(path: Path | None, names: Sequence[str]) -> dict[str, list[data.Record]]:
    """The records of the named tasks, each in a file of its own.

    Raises:
        SetupError: a file that is missing or of another form.
    """
    needs = ("input", "context", "answers", "all_classes")
    return {
        name: data.records(
            path, name, data.Source("THUDM/LongBench", "data.zip", f"data/{name}.jsonl"), needs
        )
        for name in names
    }


def tasks(
    tokenizer: Any,
    records: dict[str, list[data.Record]],
    length: int,
    *,
    count: int | None = None,
    chat: bool = True,
) -> list[Task]:
    """The tasks at a length: prompts and answers of at most so many tokens."""
    newline = tokenizer("\n", add_special_tokens=False).input_ids[-1:]
    return [
        Task(
            name,
            length,
            len(rows) if count is None else min(count, len(rows)),
            functools.partial(_example, tokenizer, name, rows, length, chat),
            functools.partial(_score, name),
            # Without it a model goes on with the next dialogue.
            stop_ids=tuple(newline) if name == "samsum" else (),
        )
        for name, rows in records.items()
    ]


def _example(
    tokenizer: Any, name: str, rows: list[data.Record], length: int, chat: bool, index: int
) -> Example:
    protocol, row = _PROTOCOL[name], rows[index]
    # Not format: the texts may hold braces.
    text = protocol["prompt"].replace("{input}", "\x00").replace("{context}", row["context"])
    text = text.replace("\x00", row["input"])
    generate = protocol["max_new_tokens"]
    ids = _fitted(tokenizer, text, chat and name not in PLAIN, length - generate)
    facts = {"all_classes": row["all_classes"] or []}
    return Example(index, ids, tuple(row["answers"]), generate, facts=facts)


def _fitted(tokenizer: Any, text: str, chat: bool, room: int) -> list[int]:
    """The prompt's tokens, cut in the middle of the text until the template's tokens fit beside it."""
    template = len(prompt_ids(tokenizer, "", chat=chat))
    ids = prompt_ids(tokenizer, text, chat=chat)
    most = room - template
    while len(ids) > room:
        text = cut_middle(tokenizer, text, most)
        ids = prompt_ids(tokenizer, text, chat=chat)
        # Tokens that are decoded and encoded again may be more.
        most -= max(1, len(ids) - room)
    return ids


def cut_middle(tokenizer: Any, text: str, most: int) -> str:
    """The first and the last half of `most` tokens."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) <= most:
        return text
    half = most // 2
    if half < 1:
        raise ValueError(f"lengths: expected room for a prompt, got {most} tokens")
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))


def _score(name: str, example: Example, generated: str) -> dict[str, float]:
    if name in FIRST_LINE:
        generated = generated.lstrip("\n").split("\n")[0]
    metric: Callable[..., float] = getattr(longbench_scores, _PROTOCOL[name]["metric"])
    found = [metric(generated, answer, example.facts["all_classes"]) for answer in example.answers]
    return {_PROTOCOL[name]["metric"]: max(found, default=0.0)}
