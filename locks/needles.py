"""The retrieval task: real prose with numbers hidden in it, a question for each, and the answers' scores."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# fmt: off
_KEYS = (
    "apple", "bridge", "candle", "dragon", "engine", "forest", "guitar", "hammer", "island", "jacket",
    "kitten", "ladder", "mirror", "orange", "pencil", "rocket", "saddle", "turtle", "umbrella", "violin",
    "walnut", "yogurt", "zebra",
)
# fmt: on
# Of six wordings tried on SmolLM2-135M-Instruct none keeps more digits, at 1,000 tokens and at 4,000. A blank
# line before each sentence in place of the space costs it a few.
_NEEDLE = " The special magic number for {key} is: {value}."
_QUESTION = "\n\nWhat is the special magic number for {key}?"
_ANSWER = "The special magic number for {key} is: "


@dataclass(frozen=True)
class Question:
    """One needle and the question that asks for it.

    Attributes:
        key: the word the number belongs to.
        value: the number, as its digits.
        needle: first and one past the last position of the needle's sentence in the context.
        depth: where the needle starts, as a share of the context.
        question_ids: tokens that follow the context, up to the answer's first digit.
        answer_ids: the digits, one token each.
    """

    key: str
    value: str
    needle: tuple[int, int]
    depth: float
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def input_ids(self) -> tuple[int, ...]:
        """What follows the context, teacher-forced: its last `len(answer_ids)` logits are the answer's."""
        return self.question_ids + self.answer_ids[:-1]


@dataclass(frozen=True)
class NeedleTask:
    """A context, which all questions share and continue, and its questions in the order of their depths."""

    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]


def build_needles(
    tokenizer: Any,
    *,
    tokens: int = 4000,
    needles: int = 8,
    digits: int = 4,
    seed: int = 0,
    text: str | None = None,
) -> NeedleTask:
    """A context of at most `tokens` tokens of prose, numbers hidden at seeded depths, and their questions.

    The context falls short of `tokens` by less than one sentence of the prose. Each of its `needles` equal
    parts holds one number, at a sentence boundary near a depth that the seed draws. The seed draws too the
    words, the numbers, which differ in their first digits, and the sentence the prose starts from. The chat
    template of the tokenizer is used where it has one.

    Args:
        tokenizer: of transformers, writing a number one token a digit.
        tokens: upper limit of the context's length.
        needles: how many numbers are hidden and asked for, at most 23.
        digits: of each number.
        seed: equal seeds give equal tasks, on one Python version where `text` is not given.
        text: the prose; where none is given, the reference texts that CPython ships in `pydoc_data.topics`
            (about 36,000 tokens of SmolLM2).

    Returns:
        The task.

    Raises:
        ValueError: a number out of range, a text too short, or a tokenizer that joins digits.
    """
    prose = list(_sentences(text) if text is not None else python_prose())
    if not prose:
        raise ValueError(f"text: expected prose, got {text!r}")
    keys = _free_keys(prose)
    if not 1 <= needles <= len(keys):
        raise ValueError(f"needles: expected 1 to {len(keys)}, got {needles}")
    rng = random.Random(seed)
    keys = rng.sample(keys, needles)
    values = _numbers(rng, needles, digits)

    def encode(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False).input_ids if piece else []

    before, after = _turns(tokenizer)
    planted = [encode(_NEEDLE.format(key=key, value=value)) for key, value in zip(keys, values, strict=True)]
    context = encode(before)
    room = tokens - len(context) - sum(map(len, planted))
    body = _fill(encode, prose, room, rng.randrange(len(prose)), tokens)

    total = sum(map(len, body))
    targets = [(i + rng.random()) / needles * total for i in range(needles)]
    spans: list[tuple[int, int]] = []
    written = 0
    for sentence in body:
        context += sentence
        written += len(sentence)
        while len(spans) < needles and targets[len(spans)] <= written:
            needle = planted[len(spans)]
            spans.append((len(context), len(context) + len(needle)))
            context += needle

    questions = []
    for key, value, span in zip(keys, values, spans, strict=True):
        ids = encode(_QUESTION.format(key=key) + after + _ANSWER.format(key=key) + value)
        if [tokenizer.decode([token]) for token in ids[-digits:]] != list(value):
            raise ValueError(
                f"tokenizer: expected one token a digit, got {tokenizer.tokenize(value)} for {value}"
            )
        depth = span[0] / len(context)
        questions.append(Question(key, value, span, depth, tuple(ids[:-digits]), tuple(ids[-digits:])))
    return NeedleTask(tuple(context), tuple(questions))


def digits_right(logits: torch.Tensor, answer_ids: torch.Tensor) -> int:
    """`sum over t of [argmax logits[t] = answer_ids[t]]`, the teacher-forced count.

    Args:
        logits: [..., A, V] of the positions that predict the answer's tokens.
        answer_ids: [..., A] integer.
    """
    if logits.shape[:-1] != answer_ids.shape:
        raise ValueError(f"answer_ids: expected {list(logits.shape[:-1])}, got {list(answer_ids.shape)}")
    return int((logits.argmax(-1) == answer_ids).sum())


def mean_kl(dense: torch.Tensor, sparse: torch.Tensor) -> float:
    """`mean over t of KL(softmax dense[t] || softmax sparse[t])` in nats, in fp64.

    Args:
        dense: [..., A, V] logits of the answer's positions with dense attention.
        sparse: [..., A, V] the same with another.
    """
    if dense.shape != sparse.shape:
        raise ValueError(f"sparse: expected {list(dense.shape)}, got {list(sparse.shape)}")
    log_p = dense.double().log_softmax(-1)
    log_q = sparse.double().log_softmax(-1)
    # A token that dense rules out adds nothing, whatever the other makes of it; the product would be nan.
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    return float(terms.sum(-1).mean())


def python_prose() -> Iterator[str]:
    """The sentences of CPython's reference texts that read as prose, without their mark-up."""
    from pydoc_data.topics import topics

    seen = set()
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            paragraph = " ".join(block.split()).removeprefix("* ")
            paragraph = re.sub(r"\*\*?([^*\s][^*]*)\*\*?|``?([^`]+)``?", r"\1\2", paragraph)
            letters = sum(c.isalpha() or c == " " for c in paragraph)
            # Topics quote each other at length, so a paragraph is taken once.
            if (
                re.fullmatch(r"[A-Z].{60,}\.", paragraph)
                and letters > 0.9 * len(paragraph)
                and paragraph not in seen
            ):
                seen.add(paragraph)
                yield from _sentences(paragraph)


def _sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if words:
            yield from re.split(r"(?<=[.!?]) (?=\S)", words)


def _free_keys(prose: list[str]) -> list[str]:
    words = {word for sentence in prose for word in re.findall("[a-z]+", sentence.lower())}
    return [key for key in _KEYS if key not in words]


def _numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """`count` numbers no two of which begin alike: in the first digit, or the first two of more than nine."""
    lead = 1 if count <= 9 else 2
    if digits < lead:
        raise ValueError(f"digits: expected at least {lead} for {count} needles, got {digits}")
    leads = rng.sample(range(10 ** (lead - 1), 10**lead), count)
    return [str(first) + "".join(rng.choices("0123456789", k=digits - lead)) for first in leads]


def _turns(tokenizer: Any) -> tuple[str, str]:
    """What the tokenizer's chat template puts before the user's words, and between them and the answer."""
    if not tokenizer.chat_template:
        return tokenizer.bos_token or "", "\n"
    mark = "<<user>>"
    turn = [{"role": "user", "content": mark}]
    before, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split(
        mark
    )
    return before, after


def _fill(encode: Any, prose: list[str], room: int, start: int, tokens: int) -> list[list[int]]:
    body: list[list[int]] = []
    for i in range(len(prose)):
        # What the chat template puts before the first sentence ends in a line break of its own.
        ids = encode((" " if body else "") + prose[(start + i) % len(prose)])
        if len(ids) > room:
            break
        body.append(ids)
        room -= len(ids)
    else:
        raise ValueError(f"text: expected enough prose for {tokens} tokens, got {room} tokens too few")
    if not body:
        raise ValueError(
            f"tokens: expected room for the needles and a sentence, got {tokens}, {len(ids) - room} short"
        )
    return body
