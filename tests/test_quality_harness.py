"""The adapter to lm-eval: its tasks, under full attention, budgets that cover the context, and small ones."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from locks import hf
from locks.cli import app
from locks.models import SetupError
from locks.quality.methods import parse_methods
from tests.quality_model import save_model, sliding_model

pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")
yaml = pytest.importorskip("yaml")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from locks.quality import engine, harness  # noqa: E402
from locks.quality.evictors import Evictor  # noqa: E402
from locks.quality.example import Forced  # noqa: E402
from locks.quality.harness import LocksLM  # noqa: E402

# Letters are tokens: 11 to 17 pages.
CHOICES = [" went", " stopped", " is"]
PROMPTS = [
    "The ship sailed on. " * 9 + "So it",
    "A cat sat there. " * 13 + "And",
    "Rain fell. " * 10 + "Then it",
]
TASKS = {
    "writes": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["zz"], "do_sample": False, "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "chooses": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "rolls": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text[:50]}}",
        "metric_list": [
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
        ],
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("harness") / "model")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    lines = [{"text": text, "choices": CHOICES} for text in PROMPTS]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, task in TASKS.items():
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(folder / "data.jsonl")},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(lm: Any, tasks: TaskManager, *names: str) -> dict[str, Any]:
    """What the model gave to each task's examples, texts or log-likelihoods, and the scores."""
    found = lm_eval.evaluate(lm, tasks.load(list(names or TASKS)), bootstrap_iters=0)
    given: dict[str, Any] = {
        name: [
            answer
            for sample in sorted(samples, key=lambda sample: sample["doc_id"])
            for answers in sample["resps"]
            for answer in answers
        ]
        for name, samples in found["samples"].items()
    }
    return {**given, "results": found["results"]}


def same(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Equal texts, and log-likelihoods that are equal to rounding."""
    assert given["writes"] == wanted["writes"]
    log_p, greedy = zip(*given["chooses"], strict=True)
    wanted_p, wanted_greedy = zip(*wanted["chooses"], strict=True)
    assert greedy == wanted_greedy
    assert log_p == pytest.approx(wanted_p, abs=1e-3)
    assert given["rolls"] == pytest.approx(wanted["rolls"], abs=5e-3)


@pytest.fixture(scope="module")
def reference(directory: Path, tasks: TaskManager) -> dict[str, Any]:
    """What lm-eval's own model gives."""
    return evaluate(harness.HFLM(str(directory), dtype="float32", device="cpu", batch_size=2), tasks)


def test_full_is_lm_evals_own_model(directory, tasks, reference):
    lm = LocksLM(str(directory), selector="full", device="cpu", batch_size=2)
    given = evaluate(lm, tasks)
    for name in (*TASKS, "results"):
        assert given[name] == reference[name]
    assert lm.get_model_info()["locks"] == {"selector": "full", "budget": None}


@pytest.mark.parametrize(("selector", "tail", "batch"), [("locks", 1, 3), ("oracle", 5, 2), ("h2o", 3, 1)])
def test_a_budget_that_covers_the_context_equals_full(directory, tasks, reference, selector, tail, batch):
    lm = LocksLM(str(directory), selector=selector, budget=1024, tail=tail, device="cpu", batch_size=batch)
    given = evaluate(lm, tasks)
    same(given, reference)
    facts = lm.get_model_info()["locks"]
    assert (facts["selector"], facts["budget"], facts["tail"]) == (selector, 1024, tail)
    # Every token that a task asked for, and those of the tails, went through a step.
    assert facts["steps"] >= len(PROMPTS) * (49 + tail + sum(map(len, CHOICES)))


def test_layers_with_windows(directory, tmp_path, tasks):
    """Prompts of unequal lengths cannot share a batch then, and need not be told to."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    sliding_model(257).save_pretrained(tmp_path)
    wanted = evaluate(harness.HFLM(str(tmp_path), dtype="float32", device="cpu"), tasks)
    lm = LocksLM(str(tmp_path), budget=1024, device="cpu", batch_size=3)
    assert lm.batch_size == 1
    same(evaluate(lm, tasks), wanted)


class Steps:
    """Decodes prompts under a selector with `locks.hf` alone, a prompt at a time."""

    def __init__(self, lm: LocksLM, selector: str, budget: int) -> None:
        self.model, self.encode = lm.model, lm.tok_encode
        (method,) = parse_methods(selector)
        self.config = hf.LocksConfig(budget=budget, selector=method.make(64))

    def logits(self, prompt: str, text: str | int) -> torch.Tensor:
        """[n, V] behind the prompt's last token and each but the last of a text's, or of n generated ones."""
        *first, token = self.encode(prompt)
        cache = hf.PagedCache(self.model.config, self.config)
        self.model(torch.tensor([first]), **hf.cache_argument(self.model, cache))
        forced = self.encode(text) if isinstance(text, str) else [None] * text
        rows = []
        for following in forced:
            out = self.model(torch.tensor([[token]]), **hf.cache_argument(self.model, cache))
            rows.append(out.logits[0, -1])
            token = int(rows[-1].argmax()) if following is None else following
            if token == self.model.config.eos_token_id:
                break
        return torch.stack(rows)


@pytest.mark.parametrize(("selector", "tail"), [("full", 1), ("locks-r4", 1), ("locks-r4", 16), ("quest", 1)])
@pytest.mark.parametrize("batch", [1, 3])
def test_texts_are_those_of_generate_for_each_prompt_alone(
    directory, tasks, reference, selector, tail, batch
):
    lm = LocksLM(str(directory), selector=selector, budget=48, tail=tail, device="cpu", batch_size=batch)
    given = evaluate(lm, tasks, "writes")["writes"]
    model, wanted = lm.model, []
    config = None
    if selector != "full":
        config = hf.LocksConfig(budget=48, selector=parse_methods(selector)[0].make(64))
        hf.enable(model, config)
    for prompt in PROMPTS:
        ids, cache = torch.tensor([lm.tok_encode(prompt)]), {}
        if config is not None:
            cache = hf.cache_argument(model, hf.PagedCache(model.config, config))
            # What the cache does not hold is read by `generate`: a single token, which is decoded.
            for part in ids.split([ids.shape[1] - tail, *[1] * tail], dim=1)[:-1]:
                model(part, **cache)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            **cache,
        )
        wanted.append(lm.tok_decode(out[0, ids.shape[1] :].tolist()))
    assert given == wanted
    assert (given == reference["writes"]) == (selector == "full")


# Texts that share a pass are stepped to the end of the longest: of 5, 8 and 3 tokens.
@pytest.mark.parametrize(
    ("selector", "batch", "of_texts"),
    [("locks-r2", 3, 3 * 8), ("locks-r4", 1, 5 + 8 + 3), ("oracle", 2, 2 * 8 + 3)],
)
def test_a_small_budget_decodes_under_the_selector(directory, tasks, reference, selector, batch, of_texts):
    name, _, rank = selector.partition("-r")
    lm = LocksLM(
        str(directory),
        selector=name,
        rank=int(rank) if rank else None,
        budget=48,
        device="cpu",
        batch_size=batch,
    )
    given = evaluate(lm, tasks, "writes", "chooses")
    assert given["writes"] != reference["writes"]
    steps = Steps(lm, selector, 48)
    with torch.no_grad():
        hf.enable(lm.model)
        texts = [lm.tok_decode(steps.logits(prompt, 12).argmax(-1)) for prompt in PROMPTS]
        log_p = [
            float(steps.logits(prompt, text).log_softmax(-1)[range(len(text)), lm.tok_encode(text)].sum())
            for prompt in PROMPTS
            for text in CHOICES
        ]
        hf.disable(lm.model)
    assert given["writes"] == texts
    assert [got for got, _ in given["chooses"]] == pytest.approx(log_p, abs=1e-3)
    facts = lm.get_model_info()["locks"]
    assert facts["selector"] == selector
    assert facts["steps"] == len(PROMPTS) * (12 + of_texts)
    # Between the shortest prompt and the longest with its answer: 2 layers, 2 heads, 64 wide, counted in 16 bits.
    token, lengths = 2 * 2 * 2 * 64 * 2, [len(prompt) for prompt in PROMPTS]
    assert token * min(lengths) < facts["dense_bytes_per_step"] < token * (max(lengths) + 12)
    assert facts["bytes_per_step"] < facts["dense_bytes_per_step"]


def test_an_evictor_holds_the_same_in_a_batch_and_alone(directory, tasks, reference):
    lms = [
        LocksLM(str(directory), selector="rkv", budget=48, device="cpu", batch_size=batch) for batch in (1, 3)
    ]
    alone, together = (evaluate(lm, tasks, "writes", "chooses") for lm in lms)
    assert together["writes"] == alone["writes"] != reference["writes"]
    assert [log_p for log_p, _ in together["chooses"]] == pytest.approx(
        [log_p for log_p, _ in alone["chooses"]], abs=1e-3
    )


def test_an_evictor_sees_the_whole_prompt_when_it_chooses(directory):
    lm = LocksLM(str(directory), selector="rkv", budget=48, tail=16, device="cpu")
    evictor, prompt, text = parse_methods("rkv")[0].make(64), lm.tok_encode(PROMPTS[0]), CHOICES[1]
    assert isinstance(evictor, Evictor)
    with engine.enabled(lm.model):
        first, last = prompt[:-16], prompt[-16:]
        session = engine.Session(lm.model, engine.prefill(lm.model, [first], [evictor], [last]), evictor)
        session.rewind(48)
        (want,) = session.read([Forced(last, lm.tok_encode(text))])
    ((log_p, _),) = lm.loglikelihood([request(PROMPTS[0], text)], disable_tqdm=True)
    assert log_p == pytest.approx(-want.nll * want.total, abs=1e-4)


def test_behind_a_single_token_every_one_has_to_be_the_likeliest(directory):
    lm = LocksLM(str(directory), budget=48, device="cpu")
    context = lm.tok_encode("a")
    with torch.no_grad():
        likely, other = lm.model(torch.tensor([context])).logits[0, -1].topk(2).indices.tolist()
        texts = [
            [first, int(lm.model(torch.tensor([[*context, first]])).logits[0, -1].argmax())]
            for first in (likely, other)
        ]
    answers = lm._loglikelihood_tokens([(None, context, text) for text in texts], disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [True, False]


def test_a_batch_has_no_more_rows_than_asked_for(directory):
    lm = LocksLM(str(directory), budget=48, device="cpu", batch_size=4)
    batches = list(lm._batches({(1, 2): [0, 1], (3, 4): [2, 3, 4, 5, 6], (5, 6): [7, 8], (7, 8): [9, 10]}))
    rows = [[index for _, indices in batch for index in indices] for batch in batches]
    assert sorted(map(len, rows)) == [1, 2, 4, 4]
    assert sorted(index for batch in rows for index in batch) == list(range(11))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"selector": "best"}, "selector: expected locks, .*, got 'best'"),
        ({"selector": "locks,quest"}, "selector: expected one, got 'locks,quest'"),
        ({"selector": "quest", "rank": 4}, "selector: expected .*, got 'quest-r4'"),
        ({"rank": 3}, "rank: expected"),
        ({"budget": 100}, r"budget: expected a multiple of the page \(16 tokens\), got 100"),
        ({"page": 32, "budget": 112}, r"budget: expected a multiple of the page \(32 tokens\), got 112"),
        ({"budget": "some"}, "budgets: expected tokens .*, got 'some'"),
        ({"budget": "64,128"}, "budget: expected one, got '64,128'"),
        ({"page": 5}, "page: expected one of .*, got 5"),
        ({"tail": 0}, "tail: expected a number of at least 1, got 0"),
        ({"batch_size": "auto"}, "batch_size: expected a number of at least 1, got 'auto'"),
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        ({"device": "abacus"}, "device: expected one of torch's"),
        ({"peft": "x"}, "model_args: expected some of pretrained, selector, .*, got 'peft'"),
    ],
)
def test_arguments_are_checked_before_the_model_is_looked_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        LocksLM("/nowhere", **arguments)


def test_what_cannot_be_decoded_is_refused(directory):
    with pytest.raises(SetupError, match="/nowhere"):
        LocksLM("/nowhere")
    lm = LocksLM(str(directory), budget=48, device="cpu")
    with pytest.raises(ValueError, match="prompt: expected at least 2 tokens"):
        lm.generate_until([request("a", {"until": []})], disable_tqdm=True)
    with pytest.raises(ValueError, match="num_beams: expected 1 under a selector, got 2"):
        lm.generate_until([request("abc", {"until": [], "num_beams": 2})], disable_tqdm=True)
    with pytest.raises(ValueError, match="request: expected a context and a text of 1 to 2048 tokens"):
        lm.loglikelihood([request("abc", "d" * 2049)], disable_tqdm=True)


def request(*args: Any) -> Instance:
    return Instance("generate_until", {}, args, 0)


def test_a_context_too_long_is_cut_on_its_left(directory, caplog):
    lm = LocksLM(str(directory), budget=1024, max_length=100, device="cpu")
    long, short = lm.loglikelihood(
        [request("x" * 50 + "y" * 98, " ok"), request("y" * 98, " ok")], disable_tqdm=True
    )
    assert long == pytest.approx(short, abs=1e-4)
    assert "cut on its left from 148 to 98 tokens" in caplog.text


def test_an_argument_takes_the_place_of_lm_evals_option(directory):
    lm = LocksLM.create_from_arg_string(
        f"pretrained={directory},selector=full,device=cpu,batch_size=3", {"device": "cuda:0", "batch_size": 1}
    )
    assert (lm.device.type, lm.batch_size) == ("cpu", 3)


def test_command(directory, tasks, monkeypatch):
    options = ("--model", "locks", "--model_args", f"pretrained={directory}", "--tasks", "writes")
    monkeypatch.setattr(sys, "argv", ["lm_eval", *options, "--log_samples"])
    with pytest.raises(SystemExit, match="error: Specify --output_path"):
        harness.main()
    before = list(sys.argv)
    ran = CliRunner().invoke(
        app,
        [
            "lm-eval",
            # lm-eval's own options give a batch size and, without a word, a GPU.
            *("--model_args", f"pretrained={directory},selector=quest,budget=64,batch_size=2"),
            *("--tasks", "writes", "--include_path", str(tasks.include_path), "--limit", "2"),
        ],
    )
    assert ran.exit_code == 0, ran.output
    assert "locks ({'pretrained'" in ran.stdout
    assert "|writes|" in ran.stdout
    assert sys.argv == before


def test_the_command_says_a_mistake_in_one_line(tasks):
    ran = CliRunner().invoke(
        app,
        [
            *("lm-eval", "--model_args", "pretrained=/nowhere,budget=100"),
            *("--tasks", "writes", "--include_path", str(tasks.include_path)),
        ],
    )
    assert ran.exit_code == 1
    assert "error: budget: expected a multiple of the page (16 tokens), got 100" in ran.stderr.splitlines()
