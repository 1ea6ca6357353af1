"""What the retriever learns from: RULER's tasks with many questions to a context, made of tokens, any number of them.

A lesson is one sequence. Its first question stands as RULER asks it, with the same sentences; more questions about the
same context follow, so that a long context teaches more than one answer. Only answers count for the loss; prose counts
whole. Numbers of instances are drawn by seeds that evaluation does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from locks.quality import ruler_lists, ruler_niah
from locks.quality.example import draw
from locks.quality.text import sentences

# How often a lesson is of a kind.
WEIGHTS = {
    "niah_single_1": 1,
    "niah_single_2": 1,
    "niah_single_3": 1.5,
    "niah_multikey_1": 1,
    "niah_multikey_2": 2,
    "niah_multikey_3": 3,
    "niah_multivalue": 1.5,
    "niah_multiquery": 1.5,
    "vt": 2.5,
    "cwe": 2.5,
    "fwe": 1.5,
    "prose": 1,
}
IGNORED = -100
# Stands where the context goes while a template is cut in two.
_MARK = "\x00"


class Lesson(NamedTuple):
    """A sequence and, for each of its tokens, that token where it counts and `IGNORED` where not."""

    ids: list[int]
    labels: list[int]
    kind: str


class Writer:
    """Grows a lesson piece by piece."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.labels: list[int] = []

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        """The pieces' tokens, each by itself."""
        return self.tokenizer(list(pieces), add_special_tokens=False).input_ids if pieces else []

    def read(self, text: str) -> None:
        """Text that is given."""
        self.take(self.encode([text]))

    def take(self, parts: Sequence[Sequence[int]]) -> None:
        """Tokens that are given."""
        for part in parts:
            self.ids += part
            self.labels += [IGNORED] * len(part)

    def answer(self, text: str) -> None:
        """Text that counts, and the end of the answer."""
        (ids,) = self.encode([text])
        ids = [*ids, self.tokenizer.eos_token_id]
        self.ids += ids
        self.labels += ids


def joined(values: Sequence[str]) -> str:
    """Several values as an answer has them."""
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])}, and {values[-1]}"


class School:
    """Makes lessons with one tokenizer.

    Args:
        tokenizer: of transformers, with an end of text.
        prose: haystack of the tasks that hide things in prose.
        weights: how often a lesson is of a kind; the kinds that are left out are not taught.
    """

    def __init__(self, tokenizer: Any, prose: str, weights: dict[str, float] | None = None) -> None:
        self.tokenizer = tokenizer
        self.weights = WEIGHTS if weights is None else weights
        self.prose = tokenizer([f" {s}" for s in sentences(prose)], add_special_tokens=False).input_ids
        (self.noise,) = tokenizer([f"\n{ruler_niah.NOISE}"], add_special_tokens=False).input_ids

    def lesson(self, length: int, *key: Any) -> Lesson:
        """A lesson of at most `length` tokens that depends on `key` alone."""
        rng = draw("lesson", length, *key)
        (kind,) = rng.choices(list(self.weights), list(self.weights.values()))
        return self.of_kind(kind, length, rng)

    def of_kind(self, kind: str, length: int, rng: Random) -> Lesson:
        """A lesson of one kind."""
        writer = Writer(self.tokenizer)
        kinds: dict[str, Callable[[Writer, Random, int], None]] = {
            "vt": self._tracking,
            "cwe": self._common,
            "fwe": self._frequent,
            "prose": self._prose,
        }
        if kind in ruler_niah.TASKS:
            self._niah(writer, rng, length, ruler_niah.TASKS[kind])
        else:
            kinds[kind](writer, rng, length)
        return Lesson(writer.ids[:length], writer.labels[:length], kind)

    def _hay(self, rng: Random, essay: bool, room: int) -> list[list[int]]:
        """Sentences of prose from anywhere, or lines of noise, of `room` tokens at the most."""
        if not essay:
            return [self.noise] * max(1, room // len(self.noise))
        start, parts = rng.randrange(len(self.prose)), []
        while room > 0:
            part = self.prose[(start + len(parts)) % len(self.prose)]
            room -= len(part)
            parts.append(part)
        return parts[:-1] or parts

    def _niah(self, writer: Writer, rng: Random, length: int, spec: ruler_niah.Niah) -> None:
        hidden: dict[str, list[str]] = {}
        # About twice as many tokens as a needle of words and a number, or of two uuids.
        size = {"numbers": 26, "uuids": 45}[spec.value] + (30 if spec.key == "uuids" else 0)
        asked = max(1, min(16, length // (24 * size)))
        keys = length // size if spec.haystack == "needle" else max(spec.queries, asked)
        while len(hidden) < max(2, keys // spec.values):
            hidden[ruler_niah.DRAWS[spec.key](rng)] = [
                ruler_niah.DRAWS[spec.value](rng) for _ in range(spec.values)
            ]
        planted = [(key, value) for key, values in hidden.items() for value in values]
        rng.shuffle(planted)
        places = {key: [v for k, v in planted if k == key] for key in hidden}
        glue = " " if spec.haystack == "essay" else "\n"
        needles = writer.encode([glue + ruler_niah.needle(spec, key, value) for key, value in planted])

        groups = [rng.sample(list(hidden), min(spec.queries, len(hidden))) for _ in range(asked)]
        text, prefix = ruler_niah.frame(spec, _MARK, groups[0])
        before, after = text.split(_MARK)
        questions = [(f"{after}{prefix}", groups[0])]
        for group in groups[1:]:
            text, prefix = ruler_niah.frame(spec, _MARK, group)
            questions.append((text.split(_MARK)[1] + prefix, group))
        answers = [joined([value for key in group for value in places[key]]) for _, group in questions]
        opening, *ends = writer.encode([before, *(question for question, _ in questions)])
        spoken = sum(map(len, writer.encode(answers))) + 4 * len(answers)
        room = length - len(opening) - sum(map(len, ends)) - spoken - sum(map(len, needles))
        body = list(needles)
        if spec.haystack == "needle":
            # Needles that do not fit are not asked for: the questions' keys come first, then the order is drawn.
            wanted = {key for _, group in questions for key in group}
            order = sorted(range(len(planted)), key=lambda i: planted[i][0] not in wanted)
            while room < 0 and len(order) > len(wanted):
                room += len(needles[order.pop()])
            rng.shuffle(order)
            body = [needles[i] for i in order]
        elif room > 0:
            hay = self._hay(rng, spec.haystack == "essay", room)
            for place, needle in zip(
                sorted((rng.randint(0, len(hay)) for _ in needles), reverse=True),
                reversed(needles),
                strict=True,
            ):
                hay.insert(place, needle)
            body = hay
        writer.take([opening, *body])
        for end, answer in zip(ends, answers, strict=True):
            writer.take([end])
            writer.answer(f" {answer}.")

    def _tracking(self, writer: Writer, rng: Random, length: int) -> None:
        short = 500 if length > 2000 else length // 4
        self._chains(writer, rng, short, 1, 3)
        writer.read("\n\n")
        chains = max(1, min(4, length // 2000))
        self._chains(writer, rng, length - len(writer.ids), chains, 5)

    def _chains(self, writer: Writer, rng: Random, room: int, count: int, width: int) -> None:
        """A context with several chains and a question about each."""
        chains = [ruler_lists.chain(rng, width) for _ in range(count)]
        texts = []
        for names, _, value in chains:
            text, prefix = ruler_lists.tracking_frame(_MARK, value, len(names))
            texts.append((text.split(_MARK), prefix, " ".join(names)))
        used = sum(
            len(ids) for text, prefix, answer in texts for ids in writer.encode([*text, prefix + answer])
        )
        statements = [writer.encode([f"\n{line}" for line in lines]) for _, lines, _ in chains]
        used += sum(len(ids) for lines in statements for ids in lines)
        hay = self._hay(rng, False, max(len(self.noise), room - used - 8 * count))
        slots: list[list[list[int]]] = [[] for _ in range(len(hay) + 1)]
        for lines in statements:
            for place, line in zip(sorted(rng.randrange(len(slots)) for _ in lines), lines, strict=True):
                slots[place].append(line)
        body = [*slots[0]]
        for line, behind in zip(hay, slots[1:], strict=True):
            body += [line, *behind]
        for i, ((before, after), prefix, answer) in enumerate(texts):
            if i == 0:
                writer.read(before.removesuffix("\n"))
                writer.take(body)
            writer.read(after + prefix)
            writer.answer(answer)

    def _common(self, writer: Writer, rng: Random, length: int) -> None:
        """Lists of words until the sequence is full: one as long as it, or several short ones."""
        full = rng.random() < 0.5
        while (room := length - len(writer.ids)) > 400:
            size = room if full else min(room, rng.randint(400, max(401, length // 2)))
            # Six tokens an entry, about; the common words take a third or so.
            count = max(12, min(len(ruler_lists.all_words()), (size - 150) // 8 // 3))
            often, seldom = (30, 3) if size > 3500 else (6, 1)
            if seldom == 1:
                count = max(12, (size - 150) // 8 - 50)
            self._list(writer, rng, size, count, often, seldom)

    def _list(self, writer: Writer, rng: Random, size: int, count: int, often: int, seldom: int) -> None:
        while True:
            entries, common = ruler_lists.listed(rng, count, often, seldom)
            ids = writer.encode([f" {i}. {entry}" for i, entry in enumerate(entries, start=1)])
            if sum(map(len, ids)) <= size - 150 or count <= 14:
                break
            count = int(count * 0.9)
        text, prefix = ruler_lists.common_frame(_MARK)
        before, after = text.split(_MARK)
        writer.read(before)
        writer.take(ids)
        writer.read(after + prefix)
        # In the order of their first places, so that there is one answer.
        first = sorted(common, key=entries.index)
        writer.answer(f" {ruler_lists.numbered(first)}")
        writer.read("\n")

    def _frequent(self, writer: Writer, rng: Random, length: int) -> None:
        full = rng.random() < 0.5
        while (room := length - len(writer.ids)) > 400:
            size = room if full else min(room, rng.randint(400, max(401, length // 2)))
            # Four tokens a word and one for the dots, which are 6 in 10.
            words, answers = ruler_lists.coded(rng, size // 3, max(4, size // 50))
            ids = writer.encode([f" {word}" for word in words])
            while sum(map(len, ids)) > size - 130:
                ids.pop()
            text, prefix = ruler_lists.frequent_frame(_MARK)
            before, after = text.split(_MARK)
            writer.read(before.removesuffix(" "))
            writer.take(ids)
            writer.read(after + prefix)
            writer.answer(f" {joined(answers)}.")
            writer.read("\n")

    def _prose(self, writer: Writer, rng: Random, length: int) -> None:
        for part in self._hay(rng, True, length):
            writer.ids += part
            writer.labels += part
