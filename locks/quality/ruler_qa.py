"""RULER's question answering: SQuAD and HotpotQA with the documents of other questions as haystack."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from locks.models import SetupError


class Question(NamedTuple):
    """A question, its answers, the documents that hold them, and those beside them in the same article."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


class Documents(NamedTuple):
    """All documents of a dataset, sorted, and its questions in their order."""

    texts: list[str]
    questions: list[Question]


def read(path: Path | None, kind: str, name: str) -> Documents:
    """A dataset's file.

    Args:
        path: the file.
        kind: "squad" or "hotpotqa".
        name: what the file is, for the message.

    Raises:
        SetupError: no file, or one of another form.
    """
    if path is None or not path.is_file():
        raise SetupError(f"{kind}: no file at {path}: give {name} with --{kind}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = _squad(data) if kind == "squad" else _hotpotqa(data)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{kind}: {path} is not {name}: {type(error).__name__} {error}") from error
    if not found.questions:
        raise SetupError(f"{kind}: {path} holds no question that has an answer")
    return found


def _squad(data: Any) -> Documents:
    articles = [article["paragraphs"] for article in data["data"]]
    texts = sorted({paragraph["context"] for article in articles for paragraph in article})
    at = {text: i for i, text in enumerate(texts)}
    questions = []
    for article in articles:
        pages = list(dict.fromkeys(at[paragraph["context"]] for paragraph in article))
        for paragraph in article:
            gold = at[paragraph["context"]]
            near = tuple(page for page in pages if page != gold)
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Question(asked["question"], answers, (gold,), near))
    return Documents(texts, questions)


def _hotpotqa(data: Any) -> Documents:
    def text(title: str, lines: list[str]) -> str:
        return f"{title}\n{''.join(lines)}"

    texts = sorted({text(*document) for asked in data for document in asked["context"]})
    at = {document: i for i, document in enumerate(texts)}
    questions = [
        Question(
            asked["question"],
            (asked["answer"],),
            tuple(at[text(*document)] for document in asked["context"]),
            (),
        )
        for asked in data
    ]
    return Documents(texts, questions)


def build(documents: Documents, rng: Random, index: int, units: int) -> tuple[str, str, tuple[str, ...]]:
    """Question `index` with `units` documents: the user's words, how the answer begins, and the answers.

    The documents that hold the answer come first into the choice, then those of the same article, then any.
    """
    asked = documents.questions[index]
    chosen = list(asked.gold)
    rest = list(asked.near)
    rng.shuffle(rest)
    if units > len(chosen) + len(rest):
        others = sorted(set(range(len(documents.texts))) - {*chosen, *rest})
        rest += rng.sample(others, min(len(others), units - len(chosen) - len(rest)))
    chosen += rest[: max(0, units - len(chosen))]
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {i}:\n{documents.texts[n]}" for i, n in enumerate(chosen, start=1))
    order = (
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words."
    )
    text = f"{order}\n\nThe following are given documents.\n\n{context}\n\n{order}\n\nQuestion: {asked.text}"
    return text, " Answer:", asked.answers
