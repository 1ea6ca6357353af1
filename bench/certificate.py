"""How tight the certificate is on SmolLM2, and how many pages a coverage keeps: bench/results/certificate.json.

    python bench/certificate.py

A context of prose is prefilled densely once; for each format its questions are then read as one batch, every layer
sparse. At every step of every layer the true share of the mass that the kept pages hold is computed in float64 from
all keys, beside what is certified of it and beside what a coverage, estimated or certified, keeps without a cap. One
row per format; shares and pages are of a (question, token, layer, KV head).
"""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from locks import SummaryFormat, decode, demo, doctor, hf
from locks.models import load_smollm2
from locks.needles import build_needles
from locks.pages import by_page, gather_pages, num_pages

FORMATS = {
    "default": SummaryFormat(),
    "r=8 coef 8": SummaryFormat(rank=8, coef_bits=8),
    "r=8, 16 bits": SummaryFormat(16, 8, 16, 16, 16),
    "P=32 r=16, 16 bits": SummaryFormat(32, 16, 16, 16, 16),
}
COVERAGES = (0.9, 0.99)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def exact_log_mass(step: hf.Step, page: int) -> Tensor:
    """log of the mass of every page from its keys, the newest included, [B, Hq, N] float64."""
    layer = step.layer
    paged = by_page(layer.k_cache, page)
    n = layer.table.shape[1] * paged.shape[2]
    ids = torch.arange(n, device=layer.table.device).expand(len(layer.table), -1)
    # [B, Hkv, N, P, D]
    keys = gather_pages(paged, layer.table, ids).double()
    q = step.q.double().unflatten(1, (keys.shape[1], -1))
    logits = step.scale * torch.einsum("bhgd,bhntd->bhgnt", q, keys)
    slot = ids[..., None] * page + torch.arange(page, device=ids.device)
    live = (slot < layer.seq_lens[:, None, None])[:, None, None]
    return torch.where(live, logits, -torch.inf).logsumexp(-1).flatten(1, 2)


class Watch:
    """An `on_step` callback that certifies each step again and keeps what came of it."""

    def __init__(self, fmt: SummaryFormat, budget: int) -> None:
        self.fmt, self.budget = fmt, budget
        self.seen: dict[str, list[Tensor]] = {}
        self.violations = 0

    def note(self, name: str, value: Tensor) -> None:
        self.seen.setdefault(name, []).append(value.double().flatten())

    def see(self, step: hf.Step) -> None:
        layer, page = step.layer, self.fmt.page
        heads = layer.k_cache.shape[1]
        args = (step.q, layer.k_cache, layer.v_cache, layer.state, layer.table, layer.seq_lens, self.fmt)
        pages = num_pages(layer.seq_lens, page)
        every = int(pages.max()) * page
        true = exact_log_mass(step, page)

        def run(**options: Any) -> tuple[Any, Tensor, Tensor]:
            got = decode(*args, scale=step.scale, **options)
            ids = got.pages.page_ids.long().repeat_interleave(true.shape[1] // heads, 1)
            kept = torch.where(ids >= 0, true.gather(2, ids.clamp(min=0)), -torch.inf).logsumexp(-1)
            share = (kept - true.logsumexp(-1)).exp().unflatten(1, (heads, -1)).amin(2)
            return got, share, got.pages.counts / pages[:, None]

        got, share, _ = run(budget=self.budget, certificate=True)
        bound = got.certificate.share.double()
        self.violations += int(((bound > share) & (bound < 1)).sum())
        self.note("bound", bound)
        self.note("truth", share)
        self.note("slack", share - bound)
        for wanted in COVERAGES:
            _, share, kept = run(budget=every, coverage=wanted)
            self.note(f"pages {wanted}", kept)
            self.note(f"share {wanted}", share)
            _, share, kept = run(budget=every, coverage_certified=wanted)
            self.note(f"certified pages {wanted}", kept)
            self.note(f"certified share {wanted}", share)

    def row(self) -> dict[str, Any]:
        seen = {name: torch.cat(parts) for name, parts in self.seen.items()}

        def spread(name: str) -> list[float]:
            return seen[name].quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()

        return {
            "certified_steps": seen["bound"].numel(),
            "violations": self.violations,
            "true_share_quantiles": spread("truth"),
            "certified_share_quantiles": spread("bound"),
            "true_minus_certified_quantiles": spread("slack"),
            "certified_share_above_a_half": float((seen["bound"] > 0.5).double().mean()),
            "coverage": [
                {
                    "coverage": wanted,
                    "mean_pages": float(seen[f"pages {wanted}"].mean()),
                    "mean_true_share": float(seen[f"share {wanted}"].mean()),
                    "reached_in_truth": float((seen[f"share {wanted}"] >= wanted).double().mean()),
                    "certified_mean_pages": float(seen[f"certified pages {wanted}"].mean()),
                    "certified_reached_below_half_of_the_pages": float(
                        (seen[f"certified pages {wanted}"] < 0.5).double().mean()
                    ),
                    "certified_least_true_share": float(seen[f"certified share {wanted}"].min()),
                }
                for wanted in COVERAGES
            ],
        }


def main(
    tokens: Annotated[int, typer.Option(help="tokens of the context")] = 2000,
    questions: Annotated[int, typer.Option(help="questions, rows of the batch")] = 4,
    steps: Annotated[int, typer.Option(help="tokens read of each question")] = 8,
    budget: Annotated[int, typer.Option(help="tokens a KV head attends to, for the certificate")] = 512,
    seed: Annotated[int, typer.Option(help="of the context")] = 0,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("bench/results/certificate.json"),
) -> None:
    """Reads the questions with every format and writes one JSON file."""
    model, tokenizer = load_smollm2()
    task = build_needles(tokenizer, tokens=tokens, needles=questions, seed=seed)
    ids = torch.tensor([q.input_ids[:steps] for q in task.questions], device=model.device)
    hf.enable(model, hf.LocksConfig(budget=None))
    context = demo.prefill(model, task.context_ids)
    rows = []
    for name, fmt in FORMATS.items():
        watch = Watch(fmt, budget)
        with torch.inference_mode():
            cache = hf.fork(context, hf.LocksConfig(budget=budget, fmt=fmt, on_step=watch.see))
            cache.batch_repeat_interleave(questions)
            for column in ids.split(1, 1):
                model(column, **hf.cache_argument(model, cache))
        rows.append(
            {"format": name, "resident_share": fmt.resident_share(model.config.head_dim), **watch.row()}
        )
        typer.echo(json.dumps(rows[-1], indent=1))
    hf.disable(model)
    head = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    result = {
        "command": f"python bench/certificate.py --tokens {tokens} --questions {questions} --steps {steps} "
        f"--budget {budget} --seed {seed}",
        "model": "SmolLM2-135M-Instruct",
        "dtype": str(model.dtype).removeprefix("torch."),
        "context_tokens": len(task.context_ids),
        "quantiles": QUANTILES,
        "device": doctor.device_facts(model.device),
        "versions": doctor.versions(),
        "commit": subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
