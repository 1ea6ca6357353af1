"""`locks generate`: a local model's greedy text with page summaries and, to compare, with dense attention."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from locks import api, hf, progress
from locks.format import SummaryFormat
from locks.models import load_model, load_smollm2


def load(path: Path | None) -> tuple[Any, Any]:
    """`(model, tokenizer)` at a path, SmolLM2 for None."""
    return load_smollm2() if path is None else load_model(path)


def encode(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """The prompt's tokens, as a user's turn where `chat` is set and the tokenizer has a chat template.

    Raises:
        ValueError: the prompt is empty.
    """
    if not text.strip():
        raise ValueError("prompt: expected some text, got none")
    if not (chat and tokenizer.chat_template):
        return tokenizer(text).input_ids
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, tokenize=True, return_dict=True
    ).input_ids


def check(model: Any, ids: list[int], max_new_tokens: int) -> None:
    """Raises ValueError where the prompt and the answer do not fit into the model's context."""
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and len(ids) + max_new_tokens > room:
        raise ValueError(
            f"prompt: expected at most {room - max_new_tokens} tokens (the model's context of {room}, less "
            f"{max_new_tokens} new ones), got {len(ids)}"
        )


def run(
    model: Any,
    tokenizer: Any,
    ids: list[int],
    *,
    fmt: SummaryFormat,
    budget: int,
    max_new_tokens: int,
    dense: bool,
) -> dict[str, Any]:
    """Both texts, where their tokens first differ, and what was read.

    Dense attention runs on the same paged cache, so the two differ in the pages alone.
    """
    sparse = hf.LocksConfig(budget=budget, fmt=fmt)
    runs = {"locks": _generate(model, tokenizer, ids, sparse, "LOCKS", max_new_tokens)}
    difference = None
    if dense:
        full = hf.LocksConfig(budget=None)
        runs["dense"] = _generate(model, tokenizer, ids, full, "dense attention", max_new_tokens)
        difference = first_difference(tokenizer, runs["locks"]["tokens"], runs["dense"]["tokens"])
    return {
        "prompt_tokens": len(ids),
        "settings": {"budget": budget, "max_new_tokens": max_new_tokens, **asdict(fmt)},
        "impl": api.resolve_impl(None, model.device, model.dtype),
        "runs": runs,
        "first_difference": difference,
    }


def first_difference(tokenizer: Any, locks: list[int], dense: list[int]) -> dict[str, Any] | None:
    """Index of the first new token that differs, and both there ("" past an end); None where none does."""
    for i in range(max(len(locks), len(dense))):
        ours, theirs = locks[i : i + 1], dense[i : i + 1]
        if ours != theirs:
            return {"token": i, "locks": tokenizer.decode(ours), "dense": tokenizer.decode(theirs)}
    return None


class _Ticks(BaseStreamer):
    """Steps a bar at every new token."""

    def __init__(self, shown: Any) -> None:
        self.shown, self.prompt = shown, True

    def put(self, value: torch.Tensor) -> None:
        """Sees what was appended."""
        # The prompt comes first, whole.
        if not self.prompt:
            self.shown.update()
        self.prompt = False

    def end(self) -> None:
        """Has nothing to finish."""


def _generate(
    model: Any, tokenizer: Any, ids: list[int], config: hf.LocksConfig, name: str, max_new_tokens: int
) -> dict[str, Any]:
    hf.enable(model, config)
    began = time.perf_counter()
    try:
        tokens = torch.tensor([ids], device=model.device)
        with progress.layers(model, "prefill"), progress.bar(max_new_tokens, name, "token") as shown:
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                # One row is never padded; without an id transformers says so in a warning.
                pad_token_id=tokenizer.eos_token_id,
                streamer=_Ticks(shown),
            )
        stats = hf.stats(model)
    finally:
        hf.disable(model)
    new = out[0, len(ids) :].tolist()
    return {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens": new,
        "seconds": time.perf_counter() - began,
        "stats": asdict(stats),
    }
