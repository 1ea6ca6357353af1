"""A real model in a real engine: greedy parity with vLLM's own attention, and needles found with a small budget."""

from pathlib import Path
from typing import Any

import pytest

from locks.needles import NeedleTask, build_needles
from locks.vllm import stats
from tests.engine.engines import assert_same, engine, run


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def settings(length: int) -> dict[str, Any]:
    return {
        "max_model_len": length,
        "num_gpu_blocks_override": 3 * length // 64,
        "max_num_batched_tokens": 1024,
    }


def test_greedy_output_is_that_of_vllms_own_attention(smollm2: Path, tokenizer: Any):
    texts = [
        "The moon is",
        "def fibonacci(n):",
        "Once upon a time, in a small village by the sea, there lived an old fisherman who",
        "The three laws of thermodynamics say that",
    ]
    requests = [tokenizer(text).input_ids for text in texts]
    outputs = []
    for locks in (None, {"budget": 512}):
        with engine(smollm2, locks, **settings(512)) as llm:
            outputs.append(run(llm, requests, 64))
    for own, ours in zip(*outputs, strict=True):
        assert_same(ours, own)


def answer(llm: Any, task: NeedleTask, question: int) -> list[int]:
    asked = task.questions[question]
    (output,) = run(llm, [list(task.context_ids + asked.question_ids)], len(asked.answer_ids))
    return list(output.token_ids)


def test_needles_are_found_with_256_tokens_of_4000(smollm2: Path, tokenizer: Any):
    task = build_needles(tokenizer, tokens=4000, needles=4, digits=4, seed=0)
    right, sparse = {}, 0
    for name, locks in (("own", None), ("locks", {"budget": 256})):
        before = stats.totals()
        with engine(smollm2, locks, **settings(4224)) as llm:
            answers = [answer(llm, task, i) for i in range(len(task.questions))]
        sparse = stats.totals().sparse_rows - before.sparse_rows
        right[name] = sum(
            got == want
            for ids, question in zip(answers, task.questions, strict=True)
            for got, want in zip(ids, question.answer_ids, strict=True)
        )
    # The first digit comes of the prompt's last token.
    assert sparse == 4 * 3
    assert right["own"] >= 12
    assert right["locks"] >= right["own"] - 2
