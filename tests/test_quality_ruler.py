"""RULER's generator against the published parameters: what is hidden, where, how often, and how long prompts are."""

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from locks.models import SetupError
from locks.quality import ruler, ruler_lists, ruler_niah, ruler_qa
from locks.quality.example import Example, prompt_ids
from locks.quality.scores import match_all, match_part
from locks.quality.text import all_words, read_prose, sentences

pytest.importorskip("wonderwords")


class Words:
    """A tokenizer whose tokens are what white space parts: lengths can be checked by hand."""

    chat_template = None

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.texts: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        for word in re.findall(r"\s*\S+|\s+$", text):
            if word not in self.ids:
                self.ids[word] = len(self.texts)
                self.texts.append(word)
        ids = [self.ids[word] for word in re.findall(r"\s*\S+|\s+$", text)]
        return type("Encoded", (), {"input_ids": ids})

    def decode(self, ids: list[int]) -> str:
        return "".join(self.texts[i] for i in ids)


PROSE = read_prose(None)


def prompts(name: str, length: int = 4096, count: int = 4, **given: Any) -> list[tuple[str, Example]]:
    tokenizer = Words()
    (task,) = ruler.tasks(tokenizer, [name], length, count=count, prose=PROSE, **given)
    assert task.count == count
    examples = [task.make(i) for i in range(count)]
    return [(tokenizer.decode(example.ids), example) for example in examples]


def test_the_thirteen_tasks():
    assert len(ruler.TASKS) == 13
    assert [name for name in ruler.TASKS if name.startswith("niah")] == list(ruler_niah.TASKS)
    assert set(ruler.TASKS) - set(ruler_niah.TASKS) == {"vt", "cwe", "fwe", "qa_1", "qa_2"}


@pytest.mark.parametrize("name", ruler.SYNTHETIC)
@pytest.mark.parametrize("length", [2048, 8192])
def test_prompt_and_answer_fill_the_length_and_no_more(name: str, length: int):
    for text, example in prompts(name, length):
        total = len(example.ids) + example.max_new_tokens
        assert total <= length
        # One unit of haystack would be too many: 22 words of noise, a sentence of prose, three words of a list; fwe
        # grows by a step of each of its ranks.
        assert total > length - (200 if name == "fwe" else 80)
        assert len(text.split()) <= length


@pytest.mark.parametrize(
    ("name", "generate"),
    [("niah_single_1", 128), ("vt", 30), ("cwe", 120), ("fwe", 50)],
)
def test_answers_get_the_published_room(name: str, generate: int):
    assert prompts(name, count=1)[0][1].max_new_tokens == generate


@pytest.mark.parametrize("name", ruler_niah.TASKS)
def test_needles_are_as_many_as_published_and_hold_the_answers(name: str):
    # Needles planted, answers asked for.
    published = {"niah_multikey_1": (4, 1), "niah_multivalue": (4, 4), "niah_multiquery": (4, 4)}
    planted, asked = published.get(name, (1, 1))
    spec = ruler_niah.TASKS[name]
    for text, example in prompts(name):
        found = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", text)
        assert {kind for kind, _, _ in found} == {spec.value}
        if spec.haystack == "needle":
            assert len(found) > 50
        else:
            assert len(found) == planted
        assert len(example.answers) == asked
        query = re.search(r"What .* for (.*) mentioned in the provided text\?", text)
        assert query
        keys = re.split(r", and |, ", query[1])
        values = [value for key in keys for _, at, value in found if at == key]
        assert sorted(values) == sorted(example.answers)


def test_kinds_of_keys_and_values():
    numbers = prompts("niah_single_2")[0][1].answers[0]
    assert re.fullmatch(r"[1-9]\d{6}", numbers)
    uuids = prompts("niah_multikey_3")[0][1].answers[0]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuids)
    key = re.search(r"number for (\S+) mentioned", prompts("niah_single_1")[0][0])
    assert key
    adjective, _, noun = key[1].partition("-")
    assert {adjective} <= set(all_words())
    assert noun


def test_one_answer_is_asked_for_in_the_singular():
    one, many = prompts("niah_single_1")[0][0], prompts("niah_multiquery")[0][0]
    assert one.startswith("A special magic number is hidden within the following text.")
    assert re.search(r"The special magic number for \S+ mentioned in the provided text is$", one)
    assert many.startswith("Some special magic numbers are hidden within the following text.")
    assert re.search(r", and \S+ mentioned in the provided text are$", many)


def test_depths_are_a_grid_of_forty():
    assert len(ruler_niah.DEPTHS) == len(set(ruler_niah.DEPTHS)) == 40
    assert ruler_niah.DEPTHS[0] == 0
    assert ruler_niah.DEPTHS[-1] == 100
    assert {b - a for a, b in zip(ruler_niah.DEPTHS, ruler_niah.DEPTHS[1:], strict=False)} == {2, 3}


def test_needles_in_prose_stand_on_the_grid_and_leave_the_prose_alone():
    plain = [f"Sentence {i}." for i in range(200)]
    hay = tuple(" ".join(plain).split())
    planted = [f"Needle {i}." for i in range(4)]
    seen = set()
    for seed in range(60):
        text = ruler_niah.plant(ruler_niah.TASKS["niah_multikey_1"], Random(seed), 400, hay, planted)
        found = sentences(text)
        assert [s for s in found if s not in planted] == plain
        # In the order given, each behind as many sentences as its depth says.
        at = [found.index(needle) - i for i, needle in enumerate(planted)]
        assert at == sorted(set(at))
        seen |= set(at)
    assert seen == {200 * depth // 100 for depth in ruler_niah.DEPTHS}


def test_variable_tracking_has_one_chain_of_four_hops():
    for text, example in prompts("vt"):
        shot, question = text.rsplit("Memorize and track", 1)
        for part, width, names in ((shot, 3, None), (question, 5, example.answers)):
            statements = re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", part)
            assert len(statements) == 5
            assert all(len(name) == width for name, _ in statements)
            assert statements[0][1].isdecimal()
            assert [a for a, _ in statements[:-1]] == [b for _, b in statements[1:]]
            if names:
                assert tuple(name for name, _ in statements) == names
                assert f"assigned the value {statements[0][1]} in the text" in part
        assert len(shot.split()) <= 500
        assert "5 variables are assigned the value" in question


def test_common_words_stand_thirty_times_and_the_others_three():
    for text, example in prompts("cwe", 8192):
        shot, question = text.rsplit("Below is a numbered list", 1)
        for part, often, seldom in ((shot, 10, 3), (question, 30, 3)):
            listed = re.search(r"most often\.\n(.*)\nQuestion", part)
            assert listed
            words = re.split(r" ?\d+\. ", listed[1])[1:]
            counts = Counter(Counter(words).values())
            assert counts[often] == 10
            assert set(counts) == {often, seldom}
        assert len(example.answers) == 10
        common = {word for word, count in Counter(words).items() if count == 30}
        assert common == set(example.answers)


def test_short_common_word_lists_count_six_and_one():
    text, example = prompts("cwe", 2048)[0]
    listed = re.search(r"most often\.\n(.*)\nQuestion", text.rsplit("Below is", 1)[1])
    assert listed
    counts = Counter(re.split(r" ?\d+\. ", listed[1])[1:])
    assert {counts[word] for word in example.answers} == {6}
    assert set(counts.values()) == {6, 1}


def test_coded_words_follow_the_zeta_law_with_exponent_two():
    assert ruler_lists.ALPHA == 2.0
    for text, example in prompts("fwe", 8192):
        coded = re.search(r"coded words\. (.*)\nQuestion", text)
        assert coded
        counts = Counter(coded[1].split())
        (dots, most), *ranked = counts.most_common()
        assert dots == "..."
        assert [word for word, _ in ranked[:3]] == list(example.answers)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        for rank, (_, count) in enumerate(ranked[:8], start=2):
            assert count == pytest.approx(most / rank**2, abs=1.01)
        assert most / sum(counts.values()) == pytest.approx(6 / 3.14159265**2, rel=0.1)


def test_examples_depend_on_seed_and_number_alone():
    first, again = (prompts("niah_multikey_1", seed=42)[2] for _ in range(2))
    assert first[0] == again[0]
    other = prompts("niah_multikey_1", seed=43)[2]
    assert other[1].answers != first[1].answers
    assert len({text for text, _ in prompts("niah_single_1", count=4)}) == 4


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Article {a} paragraph {p} says that it is number {10 * a + p}.",
                    "qas": [
                        {"question": f"Which number is {a}-{p}?", "answers": [{"text": str(10 * a + p)}]},
                        {"question": "Is there none?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(3)
            ]
        }
        for a in range(4)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    return path


def test_squad_asks_about_documents_in_the_haystack(squad: Path):
    documents = ruler.read_documents(["qa_1"], squad, None)
    assert len(documents["qa_1"].questions) == 12
    tokenizer = Words()
    (task,) = ruler.tasks(tokenizer, ["qa_1"], 200, count=5, prose=PROSE, documents=documents)
    for index in range(5):
        example = task.make(index)
        text = tokenizer.decode(example.ids)
        asked = re.search(r"Which number is (\d)-(\d)\?", text)
        assert asked
        assert f"Article {asked[1]} paragraph {asked[2]} says" in text
        # The rest of the article comes before other documents.
        assert text.count(f"Article {asked[1]} paragraph") == 3
        assert text.count("Document ") > 3
        assert text.endswith("Answer:")
        assert task.score(example, f"It is {example.answers[0]}.") == {"part": 1.0, "all": 1.0}


def test_all_documents_are_a_haystack_too(squad: Path):
    documents = ruler.read_documents(["qa_1"], squad, None)
    (task,) = ruler.tasks(Words(), ["qa_1"], 4096, count=99, prose=PROSE, documents=documents)
    assert task.count == 12
    assert len(task.make(11).ids) < 400


def test_hotpotqa_has_its_paragraphs(tmp_path: Path):
    asked = {
        "question": "Who?",
        "answer": "Ann",
        "context": [["Title", ["Ann ", "did."]], ["Other", ["Bob."]]],
    }
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([asked]))
    found = ruler_qa.read(path, "hotpotqa", "HotpotQA")
    assert sorted(found.texts) == ["Other\nBob.", "Title\nAnn did."]
    text, prefix, answers = ruler_qa.build(found, Random(0), 0, 2)
    assert "Title\nAnn did." in text
    assert (prefix, answers) == (" Answer:", ("Ann",))


def test_a_missing_or_malformed_set_is_named(tmp_path: Path):
    with pytest.raises(
        SetupError, match=r"squad: no file at None: give SQuAD 2.0's dev-v2.0.json with --squad"
    ):
        ruler.read_documents(["qa_1"], None, None)
    with pytest.raises(SetupError, match="hotpotqa: no file at"):
        ruler.read_documents(["qa_2"], None, tmp_path / "none.json")
    for content in ("[1", '{"data": [{}]}', "[]"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(SetupError, match=r"bad.json is not SQuAD 2\.0"):
            ruler.read_documents(["qa_1"], tmp_path / "bad.json", None)


def test_both_scores():
    assert match_all("It is 12 and 34.", ("12", "34", "56", "78")) == 0.5
    assert match_part("the ANSWER", ("no", "Answer")) == 1.0
    assert match_part("nothing", ("no such",)) == 0.0
    assert match_all("Apple, pear", ("apple", "PEAR")) == 1.0


def test_a_length_without_room_is_refused():
    (task,) = ruler.tasks(Words(), ["niah_multivalue"], 200, count=1, prose=PROSE)
    with pytest.raises(ValueError, match="length: expected room for"):
        task.make(0)


def test_the_chat_template_comes_before_the_answers_prefix():
    class Chat(Words):
        chat_template = "yes"

        def apply_chat_template(self, turns: Any, **_: Any) -> str:
            return f"<user> {turns[0]['content']} <assistant> "

    tokenizer = Chat()
    ids = prompt_ids(tokenizer, "question", prefix=" The answer is")
    assert tokenizer.decode(ids) == "<user> question <assistant> The answer is"
    plain = prompt_ids(tokenizer, "question", prefix=" The answer is", chat=False)
    assert tokenizer.decode(plain) == "question The answer is"
