"""Eight needles at 4,000 tokens: digits right and KL to dense for every selector and budget, over many contexts.

    python bench/needles.py --contexts 16 --out bench/results/needles.json

Each context is prefilled densely once; every selector then answers its eight questions, teacher-forced, all layers
sparse, the first and the newest page inside the budget. One row per (selector, format, budget), with 95 % bootstrap
intervals over questions, paired with dense.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import json
import multiprocessing
import subprocess
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from locks import SummaryFormat, demo, doctor, hf
from locks.models import load_smollm2
from locks.needles import build_needles
from locks.selectors import make_selector

FORMATS = {
    "r=8": SummaryFormat(rank=8),
    "r=8 coef 8": SummaryFormat(rank=8, coef_bits=8),
    "r=4": SummaryFormat(rank=4),
    "r=4 coef 8": SummaryFormat(rank=4, coef_bits=8),
    "r=2": SummaryFormat(rank=2),
    "r=2 coef 8": SummaryFormat(rank=2, coef_bits=8),
}
CONFIGS = [
    ("oracle", ""),
    *(("locks", form) for form in FORMATS),
    ("quest", ""),
    ("arkvale", ""),
    ("mean", ""),
    ("shared", "r=4"),
]


# SmolLM2's.
HEAD_DIM = 64

# Selector, format, budget.
Run = tuple[str, str, int | None]
# Of each run, share of digits right and KL to dense, a number a question.
Found = dict[Run, tuple[list[float], list[float]]]


def answer(
    model: Any, context: hf.PagedCache, task: Any, selector: Any, budget: int | None, name: str
) -> Tensor:
    """Logits [questions, digits, vocabulary] of one context's answers under one selector."""
    config = hf.LocksConfig(budget=budget, selector=selector)
    watch = demo.Watch(task.questions, 16)
    return demo.ask(model, task.questions, context, config, name, watch).logits


@functools.cache
def load() -> tuple[Any, Any]:
    """The model, enabled, once a process."""
    torch.set_num_threads(1)
    model, tokenizer = load_smollm2()
    return hf.enable(model, hf.LocksConfig(budget=None)), tokenizer


def run_context(seed: int, tokens: int, runs: list[Run]) -> Found:
    """One context's questions under every run: share of digits right and KL to dense, a number a question."""
    model, tokenizer = load()
    task = build_needles(tokenizer, tokens=tokens, seed=seed)
    context = demo.prefill(model, task.context_ids)
    expected = torch.tensor([q.answer_ids for q in task.questions], device=model.device)
    dense = answer(model, context, task, None, None, "dense")
    log_p = dense.double().log_softmax(-1)
    found: Found = {}
    for name, form, budget in [("dense", "", None), *runs]:
        logits = dense
        if budget is not None:
            selector = make_selector(name, FORMATS.get(form, SummaryFormat()), model.config.head_dim)
            logits = answer(model, context, task, selector, budget, f"{seed}: {name} {form} {budget}")
        digits = (logits.argmax(-1) == expected).float().mean(1)
        divergence = (log_p.exp() * (log_p - logits.double().log_softmax(-1))).sum(-1).mean(1)
        found[name, form, budget] = (digits.tolist(), divergence.tolist())
    return found


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    if values.std() == 0:
        return float(values.mean()), float(values.mean())
    found = stats.bootstrap((values,), np.mean, rng=0, n_resamples=2000, method="percentile")
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def main(
    contexts: Annotated[int, typer.Option(help="contexts, eight questions each")] = 16,
    tokens: Annotated[int, typer.Option(help="tokens of a context")] = 4000,
    budgets: Annotated[str, typer.Option(help="tokens a KV head attends to, by commas")] = "128,256,512",
    seed: Annotated[int, typer.Option(help="the first context's seed")] = 0,
    workers: Annotated[int, typer.Option(help="processes, each with a model of its own")] = 1,
    only: Annotated[str, typer.Option(help="selectors to run, by commas, as 'quest' or 'locks r=4'")] = "",
    out: Annotated[Path, typer.Option(help="file to write")] = Path("bench/results/needles.json"),
) -> None:
    """Runs every selector over the contexts and writes one JSON file."""
    wanted = only.split(",") if only else [f"{name} {form}".strip() for name, form in CONFIGS]
    configs = [(name, form) for name, form in CONFIGS if f"{name} {form}".strip() in wanted]
    runs: list[Run] = [(name, form, int(b)) for name, form in configs for b in budgets.split(",")]
    command = (
        f"python bench/needles.py --contexts {contexts} --tokens {tokens} --budgets {budgets} --seed {seed}"
    )
    if only:
        command += f" --only '{only}'"
    done = []
    # A small model's decode steps are bound by the host: on a GPU machine several processes share the device.
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(run_context, number, tokens, runs) for number in range(seed, seed + contexts)]
        for job in tqdm(concurrent.futures.as_completed(jobs), "contexts", len(jobs)):
            # What is finished is kept, whatever happens to the rest.
            done.append(job.result())
            rows = summary(done)
            write(rows, command, out)
    for row in rows:
        low, high = row["digits_right_95"]
        name = f"{row['selector']} {row['format']}"
        typer.echo(
            f"{name:18s} {row['budget'] or '':>5} {row['digits_right']:.3f} [{low:.3f}, {high:.3f}] KL {row['kl']:.3f}"
        )


def summary(contexts: list[Found]) -> list[dict[str, Any]]:
    """One row per run over all contexts' questions."""

    def all_of(run: Run, part: int) -> np.ndarray:
        return np.concatenate([found[run][part] for found in contexts])

    base = all_of(("dense", "", None), 0)
    rows = []
    for run in contexts[0]:
        scores, divergence = all_of(run, 0), all_of(run, 1)
        fmt = FORMATS.get(run[1])
        rows.append(
            {
                "selector": run[0],
                "format": run[1],
                "budget": run[2],
                "resident_share": None if fmt is None else fmt.resident_share(HEAD_DIM),
                "digits_right": scores.mean(),
                "digits_right_95": interval(scores),
                "minus_dense": (scores - base).mean(),
                "minus_dense_95": interval(scores - base),
                "kl": divergence.mean(),
                "kl_95": interval(divergence),
                "questions": len(scores),
            }
        )
    return rows


def write(rows: list[dict[str, Any]], command: str, out: Path) -> None:
    """Writes the result file whole or not at all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "command": command,
        "model": "SmolLM2-135M-Instruct",
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "device": doctor.device_facts(device),
        "versions": doctor.versions(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_suffix(".unfinished")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(out)


if __name__ == "__main__":
    typer.run(main)
