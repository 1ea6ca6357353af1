"""LongBench, InfiniteBench, MATH-500 and AIME: prompts from records in the published form, and scores by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from locks.models import SetupError, load_model
from locks.quality import data, infinitebench, longbench, longbench_scores, reasoning
from locks.quality.example import Example
from locks.quality.families import FAMILIES, Options
from locks.quality.scores import f1, plain_chinese, plain_words
from tests.quality_model import save_model

for name in ("transformers", "jieba", "rouge", "rouge_score", "fuzzywuzzy", "math_verify"):
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(save_model(tmp_path_factory.mktemp("model")))[1]


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


LONG = {
    "input": "Who {is} it?",
    "context": "It is {Ann}.",
    "answers": ["Ann", "Ann Lee"],
    "all_classes": None,
    "length": 3,
}


def test_longbench_has_its_tasks_limits_and_metrics():
    assert len(longbench.TASKS) == 21
    limits = {name: longbench._PROTOCOL[name]["max_new_tokens"] for name in longbench.TASKS}
    assert {name for name, limit in limits.items() if limit == 512} == {
        "gov_report",
        "qmsum",
        "multi_news",
        "vcsum",
    }
    assert (limits["trec"], limits["hotpotqa"], limits["samsum"], limits["lcc"]) == (64, 32, 128, 64)
    for name in longbench.TASKS:
        protocol = longbench._PROTOCOL[name]
        assert "{context}" in protocol["prompt"]
        assert callable(getattr(longbench_scores, protocol["metric"]))


def test_longbench_fills_its_prompt_and_scores_the_best_answer(tokenizer: Any, tmp_path: Path):
    save(tmp_path / "hotpotqa.jsonl", [LONG])
    records = longbench.read(tmp_path, ["hotpotqa"])
    (task,) = longbench.tasks(tokenizer, records, 2000)
    example = task.make(0)
    text = tokenizer.decode(example.ids)
    assert text.startswith("Answer the question based on the given passages.")
    assert "\nIt is {Ann}.\n" in text
    assert text.endswith("Question: Who {is} it?\nAnswer:")
    assert example.max_new_tokens == 32
    assert task.score(example, "It's the Ann Lee!") == {"qa_f1": pytest.approx(2 * 2 / (3 + 2))}


def test_longbench_cuts_a_long_prompt_in_the_middle(tokenizer: Any):
    rows = [{**LONG, "context": "".join(f"<{i}>" for i in range(2000))}]
    (task,) = longbench.tasks(tokenizer, {"hotpotqa": rows}, 1200)
    example = task.make(0)
    assert 1200 - 32 - 2 <= len(example.ids) <= 1200 - 32
    text = tokenizer.decode(example.ids)
    assert text.startswith("Answer the question based on the given passages.")
    assert text.endswith("Question: Who {is} it?\nAnswer:")
    assert text.index("<0>") < text.index("<1999>")
    assert "<1000>" not in text


def test_longbench_leaves_few_shot_and_code_prompts_without_a_template(tokenizer: Any):
    class Chat:
        chat_template = "yes"

        def __call__(self, text: str, **given: Any) -> Any:
            return tokenizer(text, **given)

        def decode(self, ids: list[int], **given: Any) -> str:
            return tokenizer.decode(ids, **given)

        def apply_chat_template(self, turns: Any, **_: Any) -> str:
            return f"<user>{turns[0]['content']}<assistant>"

    rows = [{**LONG, "all_classes": ["A"]}]
    made = longbench.tasks(Chat(), dict.fromkeys(longbench.TASKS, rows), 3000)
    plain = {task.name for task in made if not tokenizer.decode(task.make(0).ids).startswith("<user>")}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    stops = {task.name: task.stop_ids for task in made}
    assert [tokenizer.decode(list(ids)) for name, ids in stops.items() if name == "samsum"] == ["\n"]
    assert not any(ids for name, ids in stops.items() if name != "samsum")


def score(name: str, generated: str, answers: tuple[str, ...], classes: list[str] | None = None) -> float:
    (found,) = longbench._score(
        name, Example(0, [], answers, facts={"all_classes": classes or []}), generated
    ).values()
    return found


def test_of_few_shot_answers_the_first_line_counts():
    assert score("triviaqa", "\nParis\nPassage: London", ("Paris",)) == 1.0
    assert score("hotpotqa", "Paris\nLondon", ("Paris",)) < 1.0
    assert score("samsum", "Ann left.\nDialogue: ...", ("Ann left.",)) == pytest.approx(1.0)


def test_f1_counts_words_as_often_as_they_occur():
    assert plain_words("The Cat's, a hat!") == ["cats", "hat"]
    assert f1(["a", "a", "b"], ["a", "b", "b"]) == pytest.approx(2 / 3)
    assert f1([], ["a"]) == 0.0
    assert score("qasper", "the answer is unanswerable", ("Unanswerable",)) == pytest.approx(2 / 4)


def test_chinese_words_are_cut_by_jieba():
    assert plain_chinese("你好，世界！ Abc.") == "你好世界abc"
    assert score("multifieldqa_zh", "北京大学。", ("北京大学",)) == 1.0
    # One word of two.
    assert score("multifieldqa_zh", "上海大学", ("北京大学",)) < 1.0
    assert score("dureader", "我来到北京", ("我来到北京",)) == pytest.approx(1.0)
    assert score("dureader", "", ("我来到北京",)) == 0.0


def test_rouge_is_the_f_of_the_longest_common_subsequence():
    # Common: a, b; two of four words on either side.
    assert score("gov_report", "a b c d", ("a x b y",)) == pytest.approx(0.5, abs=1e-6)
    assert score("gov_report", "...", ("a",)) == 0.0


def test_classes_share_a_point_and_parts_of_the_right_name_do_not_count():
    classes = ["Person", "Person, group", "City"]
    assert score("trec", "City", ("City",), classes) == 1.0
    assert score("trec", "City or Person", ("City",), classes) == 0.5
    assert score("trec", "Person, group", ("Person, group",), classes) == 1.0
    assert score("trec", "Country", ("City",), classes) == 0.0


def test_numbers_share_a_point():
    assert score("passage_count", "12 or 13", ("12",)) == 0.5
    assert score("passage_count", "none", ("12",)) == 0.0
    assert score("passage_retrieval_en", "Paragraph 3", ("Paragraph 3",)) == 1.0
    assert score("passage_retrieval_zh", "段落30", ("段落3",)) == 0.0


def test_code_is_compared_by_its_first_line_that_is_no_comment():
    assert score("lcc", "\n# a comment\n```\nreturn x\nmore", ("return x",)) == 1.0
    assert score("lcc", "return y", ("return x",)) == pytest.approx(0.88, abs=0.01)


def book(**more: Any) -> dict[str, Any]:
    return {"context": "Once.", "input": "What?", "answer": ["x"], "options": [], **more}


def test_infinitebench_fills_its_prompts(tokenizer: Any):
    rows = {
        "longbook_choice_eng": [book(answer=["Bob"], options=["Ann", "Bob", "Cyd", "Dan"])],
        "code_run": [
            book(input="Please give me the exact number of the return value of func_1(7).", answer=[-5])
        ],
        "math_find": [book(input="You should answer: The largest number is", answer=[9])],
        "passkey": [book(context="x" * 5000, input="What is the pass key?", answer=["71432"])],
    }
    made = {task.name: task for task in infinitebench.tasks(tokenizer, rows, 1500)}
    texts = {name: tokenizer.decode(task.make(0).ids) for name, task in made.items()}
    assert "B. Bob\nC. Cyd\n" in texts["longbook_choice_eng"]
    assert "a function called func_1 in" in texts["code_run"]
    assert texts["code_run"].endswith("The value of func_1(7) is")
    assert texts["math_find"].startswith("What is the largest number in the following list?\n\nOnce.")
    assert texts["passkey"].startswith("There is an important info hidden")
    assert texts["passkey"].endswith("What is the pass key?\n\nThe pass key is")
    assert 1490 - 6 <= len(made["passkey"].make(0).ids) <= 1500 - 6
    assert made["longbook_choice_eng"].score(made["longbook_choice_eng"].make(0), "B") == {"score": 1.0}
    assert made["code_run"].score(made["code_run"].make(0), "-5.") == {"score": 1.0}


@pytest.mark.parametrize(
    ("task", "generated", "label", "expected"),
    [
        ("passkey", " 71432. It", "71432", 1.0),
        ("passkey", "key 5 71432", "71432", 0.0),
        ("number_string", "none", "1", 0.0),
        ("kv_retrieval", 'The value is "ab-1".', "ab-1", 1.0),
        ("kv_retrieval", "xab-1", "ab-1", 0.0),
        ("longdialogue_qa_eng", "Bob: yes", ["BOB"], 1.0),
        ("longbook_choice_eng", "B", ["Bob", "B"], 1.0),
        ("longbook_choice_eng", "Bob", ["Ann", "A"], 0.0),
        ("longbook_choice_eng", "I think the answer is: B.", ["Bob", "B"], 1.0),
        ("longbook_choice_eng", "The answer is Ann", ["Ann", "A"], 1.0),
        ("longbook_choice_eng", "so it must be D", ["Dan", "D"], 1.0),
        ("longbook_choice_eng", "", ["Dan", "D"], 0.0),
        ("code_debug", "B. f", ["f", "B"], 1.0),
        ("code_debug", "The answer is: f", ["f", "B"], 1.0),
        ("code_debug", "The answer is: g", ["f", "B"], 0.0),
        ("code_debug", "f is wrong", ["f", "B"], 0.0),
        ("code_run", "It returns -12", -12, 1.0),
        ("code_run", "12 apples", 12, 0.0),
        ("code_run", "", 12, 0.0),
        ("math_find", "It is 12.", 12, 1.0),
        ("math_find", "0.5", 0.5, 1.0),
        ("math_find", "no", 1, 0.0),
        ("math_calc", "[8, 5, 9, 3]", [8, 5, 7, 3], 0.5),
        ("longbook_qa_eng", "the tall man", ["Man", "A tall man"], 1.0),
        ("longbook_qa_chn", "北京。", ["上海", "北京"], 1.0),
        ("longbook_sum_eng", "one two three", "one two three", 1.0),
    ],
)
def test_infinitebench_scores(task: str, generated: str, label: Any, expected: float):
    assert infinitebench.SCORERS[task](generated, label) == pytest.approx(expected)


def test_infinitebench_has_a_scorer_and_a_prompt_for_each_of_its_tasks():
    assert len(infinitebench.TASKS) == 12
    assert set(infinitebench.SCORERS) == set(infinitebench.TASKS)


@pytest.mark.parametrize(
    ("generated", "answer", "expected"),
    [
        ("So the answer is \\boxed{\\frac{1}{2}}.", "0.5", True),
        ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}", True),
        ("\\boxed{7}", "8", False),
        ("It is 042, so \\boxed{42}", "042", True),
        ("no idea", "1", False),
        ("\\boxed{(3, \\frac{\\pi}{2})}", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
    ],
)
def test_answers_are_judged_as_mathematics(generated: str, answer: str, expected: bool):
    assert reasoning.right(generated, answer) is expected


def test_problems_come_from_the_fields_of_either_set(tokenizer: Any, tmp_path: Path):
    save(tmp_path / "test.jsonl", [{"problem": "1+1?", "answer": "2", "subject": "Algebra"}])
    assert reasoning.read(tmp_path, "math500") == [("1+1?", "2")]
    aime = save(tmp_path / "aime.jsonl", [{"Problem": "2+2?", "Answer": 4, "ID": "I-1"}])
    problems = reasoning.read(aime, "aime")
    assert problems == [("2+2?", "4")]
    task = reasoning.task(tokenizer, "aime", problems, 400, count=None, samples=3)
    example = task.make(0)
    assert (task.samples, task.count) == (3, 1)
    assert len(example.ids) + example.max_new_tokens == 400
    assert tokenizer.decode(example.ids).startswith("2+2?\n\nPlease reason step by step")
    assert task.score(example, "\\boxed{4}") == {"right": 1.0}


def test_data_that_are_missing_or_malformed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = data.Source("nobody/nothing", "none.jsonl")
    with pytest.raises(
        SetupError, match=r"trec: no data, looked for .*trec.jsonl, .*trec.json, .*trec.parquet"
    ):
        data.records(tmp_path, "trec", source, ())
    save(tmp_path / "trec.jsonl", [{"input": "x"}])
    with pytest.raises(SetupError, match=r"record 0: expected fields input, context, no context"):
        data.records(tmp_path, "trec", source, ("input", "context"))
    (tmp_path / "trec.jsonl").write_text("{broken\n")
    with pytest.raises(SetupError, match=r"trec: .*trec.jsonl cannot be read"):
        data.records(tmp_path, "trec", source, ())
    (tmp_path / "trec.jsonl").write_text("")
    with pytest.raises(SetupError, match="holds no record"):
        data.records(tmp_path, "trec", source, ())
    with pytest.raises(SetupError, match="passkey: record 0: no answer that can be scored"):
        infinitebench.read(save(tmp_path / "passkey.jsonl", [book(answer=[])]).parent, ["passkey"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        SetupError, match=r"none.jsonl of nobody/nothing cannot be had from the hub: give trec.jsonl"
    ):
        data.records(None, "trec", source, ())


def test_lists_are_read_too_and_lines_are_cut_at_line_breaks_alone(tmp_path: Path):
    source = data.Source("nobody/nothing", "none.jsonl")
    (tmp_path / "a.json").write_text('[{"x": 1}, {"x": 2}]')
    assert data.records(tmp_path, "a", source, ("x",)) == [{"x": 1}, {"x": 2}]
    (tmp_path / "b.jsonl").write_text('{"x": "one\u2028two\x85"}\n', encoding="utf-8")
    assert data.records(tmp_path, "b", source, ("x",)) == [{"x": "one\u2028two\x85"}]


def test_families_make_the_tasks_that_a_directory_holds(tokenizer: Any, tmp_path: Path):
    save(tmp_path / "lcc.jsonl", [LONG, LONG])
    save(tmp_path / "trec.jsonl", [{**LONG, "all_classes": ["Ann"]}])
    make = FAMILIES["longbench"].prepare(Options(lengths=(1000,), data=tmp_path))
    assert [(task.name, task.count) for task in make(tokenizer)] == [("trec", 1), ("lcc", 2)]
    make = FAMILIES["longbench"].prepare(Options(lengths=(1000,), data=tmp_path, tasks=("lcc",), count=1))
    assert [(task.name, task.count) for task in make(tokenizer)] == [("lcc", 1)]
    with pytest.raises(ValueError, match=r"task: expected some of narrativeqa, .* got 'lc'"):
        FAMILIES["longbench"].prepare(Options(data=tmp_path, tasks=("lc",)))


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jieba" else object())
    with pytest.raises(SetupError, match=r"not installed: jieba; pip install 'locks-attention\[eval\]'"):
        FAMILIES["longbench"].prepare(Options())
