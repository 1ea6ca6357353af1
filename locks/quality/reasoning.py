"""MATH-500 and AIME: several answers drawn for a problem, judged by `math-verify`; the score is their mean (avg@n)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from locks.models import SetupError
from locks.quality import data
from locks.quality.example import Example, Task, prompt_ids

_ORDER = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."


class Set(NamedTuple):
    """A dataset: its file, where the hub has it, and the fields of a record: the first that is there counts."""

    file: str
    source: data.Source
    problem: tuple[str, ...] = ("problem", "question", "Problem")
    answer: tuple[str, ...] = ("answer", "Answer")


SETS = {
    "math500": Set("test", data.Source("HuggingFaceH4/MATH-500", "test.jsonl")),
    "aime": Set("test", data.Source("math-ai/aime25", "test.jsonl")),
}


def read(path: Path | None, name: str) -> list[tuple[str, str]]:
    """Problems and answers.

    Raises:
        SetupError: no file, or one of another form.
    """
    which = SETS[name]
    rows = data.records(path, which.file, which.source, ())
    try:
        return [(str(_first(row, which.problem)), str(_first(row, which.answer))) for row in rows]
    except LookupError as error:
        raise SetupError(f"{name}: expected a field {error.args[0]} in every record") from error


def _first(row: data.Record, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise LookupError(" or ".join(names))


def task(
    tokenizer: Any,
    name: str,
    problems: list[tuple[str, str]],
    length: int,
    *,
    count: int | None,
    samples: int,
    chat: bool = True,
) -> Task:
    """The task: an answer may take what a problem leaves of the length."""

    def make(index: int) -> Example:
        problem, answer = problems[index]
        ids = prompt_ids(tokenizer, _ORDER.format(problem=problem), chat=chat)
        if len(ids) >= length:
            raise ValueError(
                f"lengths: expected more than {len(ids)} tokens for problem {index}, got {length}"
            )
        return Example(index, ids, (answer,), length - len(ids))

    some = len(problems) if count is None else min(count, len(problems))
    return Task(name, length, some, make, _score, samples=samples)


def _score(example: Example, generated: str) -> dict[str, float]:
    return {"right": float(right(generated, example.answers[0]))}


def right(generated: str, answer: str) -> bool:
    """Whether the last boxed expression, or the last number, of what was generated equals the answer."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{answer}}}"), parse(generated)))
