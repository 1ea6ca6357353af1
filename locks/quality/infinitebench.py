"""InfiniteBench: its twelve tasks from the published files, and its scorers.

Source: InfiniteBench (arXiv 2402.13718); `infinitebench.json` holds the protocol's prompts and limits.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from locks.models import SetupError
from locks.quality import data
from locks.quality.example import Example, Task, prompt_ids
from locks.quality.longbench import cut_middle
from locks.quality.scores import f1, plain_chinese, plain_words

_PROTOCOL: dict[str, dict[str, Any]] = json.loads(
    files("locks.quality").joinpath("infinitebench.json").read_text(encoding="utf-8")
)
TASKS = tuple(_PROTOCOL)
_LETTERS = "ABCD"
CHOICES = ("longbook_choice_eng", "code_debug")


def read(path: Path | None, names: Sequence[str]) -> dict[str, list[data.Record]]:
    """The records of the named tasks, each in a file of its own.

    Raises:
        SetupError: a file that is missing or of another form.
    """
    found = {}
    for name in names:
        source = data.Source("xinrongzhang2022/InfiniteBench", f"{name}.jsonl")
        found[name] = data.records(path, name, source, ("context", "input", "answer", "options"))
        for number, row in enumerate(found[name]):
            try:
                label(name, row)
            except (ValueError, LookupError, TypeError) as error:
                raise SetupError(f"{name}: record {number}: no answer that can be scored") from error
    return found


def tasks(
    tokenizer: Any,
    records: dict[str, list[data.Record]],
    length: int,
    *,
    count: int | None = None,
    chat: bool = True,
) -> list[Task]:
    """The tasks at a length; a prompt that is longer loses the middle of its context."""
    return [
        Task(
            name,
            length,
            len(rows) if count is None else min(count, len(rows)),
            functools.partial(_example, tokenizer, name, rows, length, chat),
            functools.partial(_score, name),
        )
        for name, rows in records.items()
    ]


def _example(
    tokenizer: Any, name: str, rows: list[data.Record], length: int, chat: bool, index: int
) -> Example:
    protocol, row = _PROTOCOL[name], rows[index]
    generate = min(protocol["max_new_tokens"], length // 2)
    fields = _fields(name, row)
    context, room = row["context"], length - generate
    while True:
        ids = prompt_ids(tokenizer, _filled(protocol["prompt"], {**fields, "context": context}), chat=chat)
        if len(ids) <= room:
            break
        most = len(tokenizer(context, add_special_tokens=False).input_ids) - (len(ids) - room)
        context = cut_middle(tokenizer, context, most)
    return Example(index, ids, (), generate, facts={"label": label(name, row)})


def _fields(name: str, row: data.Record) -> dict[str, str]:
    fields = {"input": row["input"], "question": row["input"]}
    fields |= {f"OPTION_{letter}": option for letter, option in zip(_LETTERS, row["options"], strict=False)}
    if name == "code_run":
        call = re.search(r"func_\d+\(.*?\)", row["input"])
        fields |= {
            "func_call": call[0] if call else row["input"],
            "func": call[0].split("(")[0] if call else "",
        }
    if name == "math_find":
        number = re.search(r"The \w+ number", row["input"])
        what = number[0].lower() if number else "the number"
        fields["prompt"] = f"What is {what} in the following list?"
    return fields


def _filled(template: str, fields: dict[str, str]) -> str:
    """The template with its fields in place; a text that looks like a field stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: fields[match[1]], template)


def label(name: str, row: data.Record) -> Any:
    """What the scorer of a task compares with."""
    answer = row["answer"]
    if name in CHOICES:
        text = answer if isinstance(answer, str) else answer[0]
        return [text, _LETTERS[list(row["options"]).index(text)]]
    if name in ("longbook_qa_eng", "longbook_qa_chn", "longdialogue_qa_eng", "math_calc"):
        return list(answer)
    first = answer if isinstance(answer, str | int | float) else answer[0]
    return int(first) if name == "code_run" else first


def _score(name: str, example: Example, generated: str) -> dict[str, float]:
    return {"score": SCORERS[name](generated, example.facts["label"])}


def _spaced(text: str, marks: str) -> list[str]:
    return text.translate(str.maketrans(dict.fromkeys(marks, " "))).split()


def first_number(generated: str, wanted: str) -> float:
    """passkey, number_string: the first run of digits."""
    found = re.search(r"[0-9]+", generated)
    return float(found is not None and found[0] == wanted)


def has_word(generated: str, wanted: str) -> float:
    """kv_retrieval: the value stands as a word."""
    return float(wanted in _spaced(generated, "\n:\"'.,?!{}"))


def has_name(generated: str, wanted: list[str]) -> float:
    """longdialogue_qa_eng: the name stands as a word, in whatever case."""
    return float(wanted[0] in [word.upper() for word in _spaced(generated, "\n:\"'.,?!{}")])


def last_number(generated: str, wanted: int) -> float:
    """code_run: the last word is the number."""
    words = _spaced(generated.strip(), "\n.`'\":")
    return float(
        bool(words) and re.fullmatch(r"[+-]?\d+", words[-1]) is not None and int(words[-1]) == wanted
    )


def found_number(generated: str, wanted: float) -> float:
    """math_find: the first number, as the answer's type has it."""
    found = re.search(r"\d+\.\d+|\d+", generated)
    if found is None:
        return 0.0
    return float((int(float(found[0])) if isinstance(wanted, int) else float(found[0])) == wanted)


def leading_values(generated: str, wanted: list[int]) -> float:
    """math_calc: the share of the values that are right before the first that is not."""
    found = [int(number) for number in re.findall(r"[0-9]+", generated)]
    count = 0
    for mine, value in zip(found, wanted, strict=False):
        if mine != value:
            break
        count += 1
    return count / len(wanted)


def debugged(generated: str, wanted: list[str]) -> float:
    """code_debug: the letter first, or the letter or the function behind the words that announce an answer."""
    name, letter = wanted
    if generated[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = generated.strip()
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    return _announced(" ".join(text.split()), ("answer is:", "is:", "answer:"), (letter, name)) or 0.0


def chosen(generated: str, wanted: list[str]) -> float:
    """longbook_choice_eng: the letter first, or behind the words that announce an answer, or the first alone."""
    if generated[:1] and generated[0] in _LETTERS:
        return float(generated[0] in wanted)
    text = " ".join(_spaced(generated, "\n\"'.,?!{}"))
    found = _announced(text, ("answer is:", "answer:", "answer is", "option is"), wanted)
    if found is not None:
        return found
    return float(next((word in wanted for word in text.split() if word in _LETTERS), False))


def _announced(text: str, prefixes: Sequence[str], wanted: Sequence[str]) -> float | None:
    """Whether what follows the first of the prefixes that occurs begins with an answer; None where none occurs."""
    for prefix in prefixes:
        _, found, behind = text.partition(prefix)
        if found:
            # One character stands between: a space, as a rule.
            return float(any(behind[1:].startswith(answer) for answer in wanted))
    return None


def best_f1(generated: str, wanted: list[str]) -> float:
    """longbook_qa_eng: F1 of words with the nearest answer."""
    return max(f1(plain_words(generated), plain_words(answer)) for answer in wanted)


def best_f1_zh(generated: str, wanted: list[str]) -> float:
    """longbook_qa_chn: F1 of characters with the nearest answer."""
    return max(f1(list(plain_chinese(generated)), list(plain_chinese(answer))) for answer in wanted)


def rouge_lsum(generated: str, wanted: str) -> float:
    """longbook_sum_eng: F of ROUGE-Lsum."""
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeLsum"]).score(wanted, generated)["rougeLsum"].fmeasure)


SCORERS: dict[str, Callable[[str, Any], float]] = {
    "passkey": first_number,
    "number_string": first_number,
    "kv_retrieval": has_word,
    "longdialogue_qa_eng": has_name,
    "longbook_sum_eng": rouge_lsum,
    "longbook_choice_eng": chosen,
    "longbook_qa_eng": best_f1,
    "longbook_qa_chn": best_f1_zh,
    "math_find": found_number,
    "math_calc": leading_values,
    "code_run": last_number,
    "code_debug": debugged,
}
