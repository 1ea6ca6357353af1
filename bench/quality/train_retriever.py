"""A model that can retrieve: SmolLM2 with heads of D = 128 in groups of 4, trained on RULER's kinds of tasks.

    python bench/quality/train_retriever.py --out out/retriever --minutes 5

Lessons grow from 2,048 to 16,384 tokens. The schedule follows the share of the minutes that is spent, so a machine of
any speed ends with a small learning rate; a call that ends early (--stop) saves where it is, and the next goes on.
Lesson i of a seed is the same on every machine. `--base scratch` trains a small Llama of the same heads from nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from lessons import IGNORED, Lesson, School
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm
from widen import widen

from locks.models import load_smollm2
from locks.quality.text import read_prose

# From which share of the time on lessons are that long, as a share of the longest.
STAGES = ((0.0, 1 / 8), (0.2, 1 / 4), (0.35, 1 / 2), (0.5, 1.0))
# Base of the rotary frequencies, of a model that was trained on 8,192 positions with 100,000: a pair that has not gone
# all the way round by then meets no new angle at 16,384, for which thrice as much would do.
THETA = 400_000.0
WARMUP = 0.03
# The learning rate at the end, of its peak.
LAST = 0.05


@dataclasses.dataclass
class Progress:
    """Where the training is; what a checkpoint holds beside weights and moments."""

    step: int = 0
    lessons: int = 0
    tokens: int = 0
    seconds: float = 0.0


def stage_length(share: float, longest: int) -> int:
    """Tokens of a lesson when that share of the time is spent."""
    return int(longest * next(part for start, part in reversed(STAGES) if share >= start))


def learning_rate(share: float, peak: float) -> float:
    """A warm-up, then half a cosine down to `LAST`."""
    if share < WARMUP:
        return peak * max(share, 1e-3) / WARMUP
    turn = math.pi * min(1.0, (share - WARMUP) / (1 - WARMUP))
    return peak * (LAST + (1 - LAST) * (1 + math.cos(turn)) / 2)


class Lessons(IterableDataset):
    """Lessons from a number on, as long as the shared counter says when they are made."""

    def __init__(self, school: School, seed: int, first: int, length: Tensor) -> None:
        self.school, self.seed, self.first, self.length = school, seed, first, length

    def __iter__(self) -> Iterator[Lesson]:
        worker = get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker else (0, 1)
        number += self.first
        while True:
            yield self.school.lesson(int(self.length), "train", self.seed, number)
            number += step


def _as_it_is(lesson: Any) -> Any:
    return lesson


def padded(lessons: list[Lesson], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, T], shorter lessons padded behind their end."""
    width = max(len(lesson.ids) for lesson in lessons)
    ids = torch.full((len(lessons), width), pad)
    labels = torch.full((len(lessons), width), IGNORED)
    for row, lesson in enumerate(lessons):
        ids[row, : len(lesson.ids)] = torch.tensor(lesson.ids)
        labels[row, : len(lesson.ids)] = torch.tensor(lesson.labels)
    return ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def loss_of(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of -log p over the tokens that count, and how many of each sequence are right [B]; only they get logits."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    counts = wanted != IGNORED
    logits = model.lm_head(hidden[counts]).float()
    target = wanted[counts]
    right = torch.zeros(len(ids), device=ids.device)
    right.index_add_(0, counts.nonzero()[:, 0], (logits.argmax(-1) == target).float())
    return cross_entropy(logits, target, reduction="sum"), right


def start(
    base: str, head_dim: int, group: int, layers: int, context: int, theta: float, seed: int
) -> tuple[Any, Any]:
    """The model to train, float32, and its tokenizer without a chat template; `layers` are of one from scratch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, tokenizer = load_smollm2(dtype=torch.float32, device="cpu")
    tokenizer.chat_template = None
    if base == "smollm2":
        wide = widen(model, head_dim=head_dim, group=group, context=context, theta=theta, seed=seed)
        return wide, tokenizer
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=2 * group,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


class Trainer:
    """The model, its optimizer and what they have seen."""

    def __init__(self, model: Any, tokenizer: Any, *, peak: float, minutes: float, longest: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.peak, self.minutes, self.longest = peak, minutes, longest
        self.device = next(model.parameters()).device
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
            lr=peak,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.progress = Progress()

    @property
    def share(self) -> float:
        """Of the time, what is spent."""
        return min(1.0, self.progress.seconds / (60 * self.minutes))

    def step(self, batches: list[list[Lesson]]) -> dict[str, Any]:
        """One update from several batches of lessons; its loss, and the share of tokens right, by kind too."""
        rate = learning_rate(self.share, self.peak)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        lessons = [lesson for batch in batches for lesson in batch]
        asked = [sum(label != IGNORED for label in lesson.labels) for lesson in lessons]
        total = sum(asked)
        loss = torch.zeros((), device=self.device)
        right: list[Tensor] = []
        for batch in batches:
            ids, labels = padded(batch, self.tokenizer.eos_token_id, self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                part, hits = loss_of(self.model, ids, labels)
            (part / total).backward()
            loss += part.detach()
            right.append(hits)
            self.progress.lessons += len(batch)
            self.progress.tokens += ids.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        kinds: dict[str, list[float]] = {}
        for lesson, hits, of in zip(lessons, torch.cat(right).tolist(), asked, strict=True):
            of_kind = kinds.setdefault(lesson.kind, [0.0, 0.0])
            of_kind[0] += hits
            of_kind[1] += of
        return {
            "loss": float(loss) / total,
            "right": sum(hits for hits, _ in kinds.values()) / total,
            "rate": rate,
            "right_by_kind": {kind: round(hits / of, 4) for kind, (hits, of) in sorted(kinds.items()) if of},
        }

    def save(self, out: Path) -> None:
        """A checkpoint to go on from, whole or not at all."""
        beside = out / "checkpoint.unfinished"
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": dataclasses.asdict(self.progress),
            },
            beside,
        )
        beside.replace(out / "checkpoint.pt")

    def restore(self, out: Path) -> None:
        """Goes on from a checkpoint, where there is one."""
        if not (out / "checkpoint.pt").is_file():
            return
        saved = torch.load(out / "checkpoint.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.progress = Progress(**saved["progress"])


def train(
    trainer: Trainer, school: School, out: Path, *, seed: int, stop: float, tokens: int, workers: int
) -> None:
    """Steps until the time is spent, or `stop` minutes of this call; writes a line a step and a checkpoint."""
    began = last = time.perf_counter()
    length = torch.tensor(stage_length(trainer.share, trainer.longest)).share_memory_()
    data = Lessons(school, seed, trainer.progress.lessons, length)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=_as_it_is,
    )
    source = iter(loader)
    try:
        with (out / "train.jsonl").open("a", encoding="utf-8") as log, tqdm(total=100, unit="%") as bar:
            while trainer.share < 1 and time.perf_counter() - began < 60 * stop:
                length.fill_(stage_length(trainer.share, trainer.longest))
                figures = trainer.step(_batches(source, tokens, int(length)))
                now = time.perf_counter()
                trainer.progress.seconds += now - last
                last = now
                line = {**dataclasses.asdict(trainer.progress), "length": int(length), **figures}
                log.write(json.dumps(line) + "\n")
                log.flush()
                bar.set_postfix(
                    loss=f"{figures['loss']:.3f}", right=f"{figures['right']:.3f}", length=int(length)
                )
                bar.n = round(100 * trainer.share)
                bar.refresh()
    finally:
        # What ends a call early does not take its steps along.
        trainer.save(out)


def _batches(source: Iterator[Lesson], tokens: int, length: int) -> list[list[Lesson]]:
    """Two batches of at most `tokens / 2` each (half of the activations of one), or of one lesson of `length`."""
    batches: list[list[Lesson]] = []
    for _ in range(2):
        batch = [next(source)]
        while sum(len(lesson.ids) for lesson in batch) + length <= tokens // 2:
            batch.append(next(source))
        batches.append(batch)
    return batches


def main(
    out: Annotated[Path, typer.Option(help="directory of the model, the log and the checkpoint")],
    base: Annotated[Literal["smollm2", "scratch"], typer.Option(help="what to start from")] = "smollm2",
    minutes: Annotated[float, typer.Option(help="of training, over all calls")] = 5.0,
    stop: Annotated[float, typer.Option(help="minutes after which this call saves and ends")] = 60.0,
    length: Annotated[int, typer.Option(help="tokens of the longest lessons")] = 16_384,
    head_dim: Annotated[int, typer.Option(help="width of a head")] = 128,
    group: Annotated[int, typer.Option(help="query heads that share a KV head")] = 4,
    layers: Annotated[int, typer.Option(help="of a model from scratch")] = 8,
    theta: Annotated[float, typer.Option(help="base of the rotary frequencies")] = THETA,
    rate: Annotated[float, typer.Option(help="peak of the learning rate")] = 4e-4,
    tokens: Annotated[int, typer.Option(help="of a step")] = 65_536,
    workers: Annotated[int, typer.Option(help="processes that make lessons")] = 12,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="the layers by torch.compile")
    ] = False,
    seed: Annotated[int, typer.Option(help="of the lessons and of new weights")] = 0,
    haystack: Annotated[Path | None, typer.Option(help="a text file of prose")] = None,
) -> None:
    """Trains, or goes on, and saves a model directory."""
    if length < 4096:
        # The first lessons are an eighth of it, and hold a question and its context.
        raise typer.BadParameter(f"expected at least 4096 tokens, got {length}", param_hint="--length")
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    model, tokenizer = start(base, head_dim, group, layers, 2 * length, theta, seed)
    school = School(tokenizer, read_prose(haystack))
    trainer = Trainer(model.to(device).train(), tokenizer, peak=rate, minutes=minutes, longest=length)
    trainer.restore(out)
    if compiled:
        # Layer by layer: one graph serves all of them, and batches of every shape.
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    train(trainer, school, out, seed=seed, stop=stop, tokens=tokens, workers=workers)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    recipe = {
        "base": base,
        "head_dim": head_dim,
        "group": group,
        "layers": model.config.num_hidden_layers,
        "theta": theta,
        "compiled": compiled,
        "length": length,
        "rate": rate,
        "tokens_a_step": tokens,
        "minutes": minutes,
        "seed": seed,
        "stages": STAGES,
        "weights": school.weights,
        **dataclasses.asdict(trainer.progress),
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
    typer.echo(json.dumps(recipe))


if __name__ == "__main__":
    typer.run(main)
