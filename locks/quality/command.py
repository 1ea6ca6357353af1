"""`locks eval`: everything that can be wrong is found before a weight is loaded; then the run, its table and files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from locks import doctor
from locks.models import SetupError, head_dim, load_model, load_smollm2, num_layers, smollm2_gguf
from locks.quality import figure, run, summary, vllm_run
from locks.quality.families import FAMILIES, Make, Options
from locks.quality.log import Log, Row
from locks.quality.methods import Method, parse_budgets, parse_methods

ENGINES = ("hf", "vllm")
# SmolLM2's, for the model that needs no path.
SMOLLM2, SMOLLM2_CONTEXT = "SmolLM2-135M-Instruct", 8192


@dataclass(frozen=True)
class Request:
    """What the command line asked for, checked."""

    family: str
    options: Options
    make: Make
    methods: list[Method]
    budgets: list[int]
    full: bool
    page: int
    model: Path | None
    engine: str
    batch: int
    tail: int
    out: Path


@dataclass(frozen=True)
class Answerer:
    """What runs a plan: the tokenizer of its prompts, the model's context, what all rows have in common.

    weights: a name for them; dtype: of keys and values; device: where they lie; run: appends a plan's rows to a log.
    """

    tokenizer: Any
    room: int | None
    weights: str
    dtype: torch.dtype
    device: torch.device
    run: Callable[[run.Plan, Log], None]


def check(
    family: str,
    options: Options,
    *,
    selectors: str,
    budgets: str,
    page: int,
    model: Path | None,
    engine: str,
    batch: int,
    tail: int,
    out: Path,
) -> Request:
    """The request, or an error that names what is wrong with it and the choices.

    Raises:
        ValueError: an unknown name or a size that is not possible.
        SetupError: a file that is missing or damaged.
    """
    if family not in FAMILIES:
        raise ValueError(f"task: expected one of {', '.join(FAMILIES)}, got {family!r}")
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    for name, number in (("batch", batch), ("tail", tail), ("samples", options.samples)):
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")
    if options.count is not None and options.count < 1:
        raise ValueError(f"examples: expected at least 1, got {options.count}")
    methods = parse_methods(selectors, page)
    sizes, full = parse_budgets(budgets, page)
    if not (full or (methods and sizes)):
        raise ValueError(
            f"budgets: expected 'full' or a selector and a budget, got {selectors!r} and {budgets!r}"
        )
    if engine == "vllm":
        if FAMILIES[family].forced:
            others = ", ".join(name for name, each in FAMILIES.items() if not each.forced)
            raise ValueError(
                f"task: expected one of {others} in the engine vllm, which cannot be made to read a text token by "
                f"token, got {family!r}"
            )
        vllm_run.check(methods, model, tail)
    context = context_length(model)
    lengths = options.lengths or ([min(4096, context)] if context else [4096])
    for length in lengths:
        if length < 1 or (context is not None and length > context):
            raise ValueError(f"lengths: expected 1 to {context} tokens, the model's context, got {length}")
    count = options.count or FAMILIES[family].count
    options = dataclasses.replace(options, lengths=tuple(dict.fromkeys(lengths)), count=count)
    make = FAMILIES[family].prepare(options)
    return Request(family, options, make, methods, sizes, full, page, model, engine, batch, tail, out)


def parse_lengths(text: str) -> list[int]:
    """Lengths by commas, "k" for 1,024 tokens.

    Raises:
        ValueError: something else.
    """
    lengths = []
    for part in filter(None, map(str.strip, text.split(","))):
        digits = part.lower().removesuffix("k")
        if not digits.isdecimal():
            raise ValueError(f"lengths: expected tokens such as 4096 or 16k, by commas, got {part!r}")
        lengths.append(int(digits) * (1024 if part.lower().endswith("k") else 1))
    return lengths


def context_length(model: Path | None) -> int | None:
    """How many tokens a model directory's config says that it holds; None where that is not known.

    Raises:
        SetupError: no weights, no tokenizer, or no config that can be read.
    """
    if model is None:
        smollm2_gguf()
        return SMOLLM2_CONTEXT
    path = model.expanduser()
    config = path / "config.json"
    if not config.is_file():
        # A .gguf file, or nothing: loading tells.
        return None
    for what, patterns in (
        ("weights", ("*.safetensors", "pytorch_model*.bin")),
        ("tokenizer", ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")),
    ):
        if not any(True for pattern in patterns for _ in path.glob(pattern)):
            raise SetupError(f"{path}: no {what}, looked for {', '.join(patterns)}")
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (ValueError, AttributeError) as error:
        raise SetupError(f"{config}: not a model's config: {error}") from error
    return found if isinstance(found, int) else None


def execute(request: Request) -> tuple[list[Row], int]:
    """Runs what is asked for; returns the summary's rows and how many answers are missing.

    The log, `summary.json` and `summary.png` lie in `request.out`. An interrupt ends the run early, with a summary
    of what there is.
    """
    answerer = _transformers(request) if request.engine == "hf" else _vllm(request)
    room = answerer.room
    for length in request.options.lengths:
        if room is not None and length > room:
            raise ValueError(f"lengths: expected at most {room} tokens, the model's context, got {length}")
    plan = run.Plan(
        tasks=request.make(answerer.tokenizer),
        methods=request.methods,
        budgets=request.budgets,
        full=request.full,
        page=request.page,
        batch=request.batch,
        tail=request.tail,
        seed=request.options.seed,
    )
    for task in plan.tasks:
        # A length without room for a task is found here, not in the middle of the run.
        tokens = run.most_tokens(task.make(0))
        if room is not None and tokens > room:
            raise ValueError(
                f"lengths: expected {task.name} to take at most {room} tokens, the model's context, got {tokens} at "
                f"{task.length}"
            )
    with Log(request.out / f"{request.family}.jsonl", _header(request, answerer)) as log:
        with contextlib.suppress(KeyboardInterrupt):
            answerer.run(plan, log)
        rows = list(log.rows.values())
    found = summary.summarize(plan, rows)
    save(request, found, answerer)
    return found, summary.missing(plan, rows)


def _transformers(request: Request) -> Answerer:
    model, tokenizer = load_smollm2() if request.model is None else load_model(request.model)
    for method in request.methods:
        # Names layers that the model does not have.
        method.make(head_dim(model.config), num_layers(model.config))
    return Answerer(
        tokenizer,
        getattr(model.config, "max_position_embeddings", None),
        fingerprint(model),
        model.dtype,
        torch.device(model.device),
        functools.partial(run.run, model, tokenizer),
    )


def _vllm(request: Request) -> Answerer:
    # `check` saw a directory.
    path = Path(request.model or "").expanduser()
    config, tokenizer = vllm_run.load(path)
    files = [file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in path.glob(pattern)]
    return Answerer(
        tokenizer,
        getattr(config, "max_position_embeddings", None),
        _sha256(files),
        vllm_run.dtype(),
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        functools.partial(vllm_run.run, path, config, tokenizer),
    )


def _header(request: Request, answerer: Answerer) -> Row:
    """What all rows of a log have in common."""
    options = request.options
    files = {
        name: _sha256(path.rglob("*") if path.is_dir() else [path])
        for name in ("data", "haystack", "squad", "hotpotqa")
        if (path := getattr(options, name)) is not None
    }
    return {
        "family": request.family,
        "model": SMOLLM2 if request.model is None else request.model.name,
        "engine": request.engine,
        "weights": answerer.weights,
        "dtype": str(answerer.dtype).removeprefix("torch."),
        "seed": options.seed,
        "samples": options.samples,
        "chat": options.chat,
        "tail": request.tail,
        "files": files,
    }


def fingerprint(model: Any) -> str:
    """A name for a model's weights: equal weights have equal ones."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        # A sample tells trained weights apart, and costs no more for large ones.
        some = weight.detach().reshape(-1)
        some = some[:: max(1, some.numel() // 256)].float().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.is_file():
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def save(request: Request, rows: list[Row], answerer: Answerer) -> None:
    """Writes `summary.json`, whole or not at all, and `summary.png`."""
    result = {
        **_header(request, answerer),
        "lengths": list(request.options.lengths),
        "device": doctor.device_facts(answerer.device),
        "versions": doctor.versions(),
        "rows": rows,
    }
    beside = request.out / "summary.unfinished"
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(request.out / "summary.json")
    if rows:
        figure.scores(rows, request.out / "summary.png")
