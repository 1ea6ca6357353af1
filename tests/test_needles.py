"""The retrieval task: what stands where in a context, equal seeds, and scores worked out by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locks import hf
from locks.models import load_smollm2
from locks.needles import NeedleTask, build_needles, digits_right, mean_kl

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def smollm2():
    return load_smollm2(device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2[1]


@pytest.fixture(scope="module")
def task(tokenizer) -> NeedleTask:
    return build_needles(tokenizer, tokens=2000, seed=3)


def test_context_fills_the_asked_length_to_a_sentence(task):
    # The longest sentence of the prose is 328 tokens.
    assert 2000 - 328 < len(task.context_ids) <= 2000


def test_needle_span_is_the_needles_sentence(tokenizer, task):
    for question in task.questions:
        found = tokenizer.decode(task.context_ids[slice(*question.needle)])
        assert found == f" The special magic number for {question.key} is: {question.value}."
        assert question.depth == question.needle[0] / len(task.context_ids)


def test_each_number_and_word_stands_once_in_the_context(tokenizer, task):
    text = tokenizer.decode(task.context_ids).lower()
    for question in task.questions:
        assert text.count(question.value) == 1
        assert text.count(question.key) == 1


def test_answer_is_one_token_a_digit_and_fed_up_to_its_last(tokenizer, task):
    for question in task.questions:
        assert [tokenizer.decode([token]) for token in question.answer_ids] == list(question.value)
        fed = tokenizer.decode(question.input_ids)
        assert fed.endswith(f"The special magic number for {question.key} is: {question.value[:-1]}")
        # Split where the answer starts, the question's tokens are the ones that the whole text has.
        whole = tokenizer(fed + question.value[-1], add_special_tokens=False).input_ids
        assert tuple(whole) == question.question_ids + question.answer_ids


def test_context_and_question_are_one_user_turn_of_the_chat(tokenizer, task):
    text = tokenizer.decode(task.context_ids + task.questions[0].question_ids)
    user = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    asked = [{"role": "user", "content": user}]
    chat = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text.startswith(chat)
    assert user.endswith(f"\n\nWhat is the special magic number for {task.questions[0].key}?")


def test_words_and_first_digits_differ(tokenizer):
    for seed in range(20):
        questions = build_needles(tokenizer, tokens=600, needles=9, seed=seed).questions
        assert len({question.key for question in questions}) == 9
        assert sorted(question.value[0] for question in questions) == list("123456789")


def test_more_than_nine_numbers_differ_in_two_digits(tokenizer):
    questions = build_needles(tokenizer, tokens=2000, needles=20, digits=2).questions
    assert len({question.value for question in questions}) == 20
    assert all(len(question.value) == 2 and question.value[0] != "0" for question in questions)


def test_each_part_of_the_context_holds_one_needle(tokenizer):
    jitter = set()
    for seed in range(10):
        task = build_needles(tokenizer, tokens=4000, seed=seed)
        depths = [question.depth for question in task.questions]
        # A sentence boundary may lie a sentence past the depth drawn.
        assert all(i / 8 - 0.01 < depth < (i + 1) / 8 + 0.06 for i, depth in enumerate(depths))
        spans = [question.needle for question in task.questions]
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
        jitter.add(round(depths[3], 3))
    assert len(jitter) == 10


def test_equal_seeds_give_equal_tasks_and_others_do_not(tokenizer, task):
    assert build_needles(tokenizer, tokens=2000, seed=3) == task
    assert build_needles(tokenizer, tokens=2000, seed=4).context_ids != task.context_ids


def test_own_text_is_the_prose(tokenizer):
    text = "\n\n".join(f"Line {n} of the\nown text stands here. It goes on!" for n in range(40))
    task = build_needles(tokenizer, tokens=300, needles=2, text=text)
    prose = tokenizer.decode(task.context_ids)
    for question in task.questions:
        prose = prose.replace(tokenizer.decode(task.context_ids[slice(*question.needle)]), "")
    body = prose.split("<|im_start|>user\n")[1]
    # The seed draws the sentence it starts from, and the text goes on from its end to its beginning.
    assert body in " ".join([" ".join(text.split())] * 2)
    assert body.endswith(("here.", "on!"))


def test_word_of_the_text_is_not_a_key(tokenizer):
    text = "An Apple fell near the bridge and the candle. " * 200
    for seed in range(5):
        keys = {
            q.key for q in build_needles(tokenizer, tokens=1000, needles=20, seed=seed, text=text).questions
        }
        assert not keys & {"apple", "bridge", "candle"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"needles": 0}, "needles: expected 1 to 23, got 0"),
        ({"needles": 24}, "needles: expected 1 to 23, got 24"),
        ({"digits": 0}, "digits: expected at least 1 for 8 needles, got 0"),
        ({"needles": 10, "digits": 1}, "digits: expected at least 2 for 10 needles, got 1"),
        ({"tokens": 100}, "tokens: expected room for the needles and a sentence, got 100"),
        ({"text": "A short text. It ends here."}, "text: expected enough prose for 4000 tokens"),
        ({"text": " \n\n "}, "text: expected prose, got"),
    ],
)
def test_bad_input_is_named(tokenizer, wrong, message):
    with pytest.raises(ValueError, match=message):
        build_needles(tokenizer, **wrong)


def test_tokenizer_that_joins_digits_is_refused():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    joins = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    joins.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    joins.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["?"])
    joins.train_from_iterator((f"is: {n}." for n in range(1000, 10000)), trainer)
    with pytest.raises(ValueError, match="tokenizer: expected one token a digit, got"):
        build_needles(PreTrainedTokenizerFast(tokenizer_object=joins, unk_token="?"))


def test_smollm2_retrieves(smollm2):
    from transformers import DynamicCache

    model, tokenizer = smollm2
    task = build_needles(tokenizer, tokens=600, needles=4)
    cache = DynamicCache(config=model.config)
    right = 0
    with torch.inference_mode():
        model(torch.tensor([task.context_ids]), **hf.cache_argument(model, cache), logits_to_keep=1)
        for question in task.questions:
            answer = torch.tensor(question.answer_ids)
            fed = torch.tensor([question.input_ids])
            right += digits_right(
                model(fed, **hf.cache_argument(model, cache)).logits[0, -len(answer) :], answer
            )
            cache.crop(-fed.shape[1])
    assert right >= 14


def test_digits_right_counts_argmaxes():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, 5.0]])
    assert digits_right(logits, torch.tensor([1, 0, 2])) == 3
    assert digits_right(logits, torch.tensor([1, 2, 2])) == 2
    assert digits_right(logits[None].repeat(2, 1, 1), torch.tensor([[1, 2, 2], [0, 1, 0]])) == 2


def test_mean_kl_by_hand():
    dense = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    sparse = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    # The second row: .25 ln(1/3) + .75 ln 3.
    assert mean_kl(dense, sparse) == pytest.approx(0.5 * 0.5 * math.log(3.0), rel=1e-6)


def test_mean_kl_takes_the_first_as_the_truth():
    dense, sparse = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert mean_kl(dense, sparse) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)
    assert mean_kl(dense, sparse) != pytest.approx(mean_kl(sparse, dense), rel=1e-2)


def test_mean_kl_of_a_token_ruled_out():
    ruled_out = torch.tensor([[0.0, 0.0, -math.inf]])
    assert mean_kl(ruled_out, ruled_out) == 0.0
    assert mean_kl(ruled_out, torch.zeros(1, 3)) == pytest.approx(math.log(1.5), rel=1e-6)
    assert mean_kl(torch.zeros(1, 3), ruled_out) == math.inf


@given(
    st.integers(0, 2**31),
    st.floats(-50.0, 50.0),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_mean_kl_is_zero_of_itself_up_to_a_shift(seed, shift, dtype):
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(seed)).to(dtype).double()
    assert mean_kl(logits, logits + shift) == pytest.approx(0.0, abs=1e-12)
    assert mean_kl(logits, logits.flip(-1)) > 0.0


def test_scores_of_unlike_shapes_are_refused():
    with pytest.raises(ValueError, match=r"answer_ids: expected \[3\], got \[2\]"):
        digits_right(torch.zeros(3, 5), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"sparse: expected \[3, 5\], got \[3, 4\]"):
        mean_kl(torch.zeros(3, 5), torch.zeros(3, 4))
