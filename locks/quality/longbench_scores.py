"""LongBench's metrics, through the libraries that it uses: each of (generated, answer, the task's classes), 0 to 1."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

from locks.quality.scores import f1, plain_chinese, plain_words


def qa_f1(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of words in SQuAD's normal form."""
    return f1(plain_words(generated), plain_words(answer))


def qa_f1_zh(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of Chinese words without punctuation."""
    words = [[plain_chinese(word) for word in _cut(text)] for text in (generated, answer)]
    mine, wanted = ([word for word in found if word] for found in words)
    return f1(mine, wanted)


def rouge(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L; 0 where there is nothing to compare."""
    from rouge import Rouge

    # The library raises for a text without a word.
    try:
        scores: Any = Rouge().get_scores([generated], [answer], avg=True)
    except ValueError:
        return 0.0
    return float(scores["rouge-l"]["f"])


def rouge_zh(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L over Chinese words."""
    return rouge(" ".join(_cut(generated)), " ".join(_cut(answer)))


def classification(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """One over the number of classes that are named, where the right one is among them.

    A class whose name is a part of the right one's does not count.
    """
    named = [name for name in classes if name in generated and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers that are the answer."""
    return _numbers(generated, answer)


def retrieval(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers that are the right paragraph's."""
    return _numbers(generated, re.findall(r"Paragraph (\d+)", answer)[0])


def retrieval_zh(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers that are the right paragraph's, in Chinese."""
    return _numbers(generated, re.findall(r"段落(\d+)", answer)[0])


def code_similarity(generated: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Edit similarity of the first line that is neither a comment nor a fence."""
    lines = generated.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return _fuzz().ratio(line, answer) / 100


def _numbers(generated: str, wanted: str) -> float:
    found = re.findall(r"\d+", generated)
    return found.count(wanted) / len(found) if found else 0.0


@functools.cache
def _jieba() -> Any:
    with warnings.catch_warnings():
        # It looks for an old module and its patterns have escapes that Python warns of.
        warnings.simplefilter("ignore")
        import jieba
    jieba.setLogLevel(logging.WARNING)
    return jieba


def _cut(text: str) -> list[str]:
    return list(_jieba().cut(text, cut_all=False))


@functools.cache
def _fuzz() -> Any:
    with warnings.catch_warnings():
        # That it is slow without another library, whose ratio differs.
        warnings.simplefilter("ignore")
        from fuzzywuzzy import fuzz
    return fuzz
