"""Keys before and after their rotary encoding, values, and the last queries of a model on a text, a file a layer.

    python analysis/capture_keys.py --tokens 4096 --out analysis/out/keys

Any local transformers model with rotary positions, any text. One forward pass writes a layer's tensors as soon as the
layer has them, so that one layer's are in memory at a time, beside the model.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import outputs
import torch
import typer
from contexts import load, model_facts, prose
from outputs import InputError, OutputError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "locks_capture"
MANIFEST = "manifest.json"
# The smallest page.
PAGE = 16


class Capture:
    """A folder that `capture` wrote, read a layer at a time."""

    def __init__(self, folder: Path) -> None:
        if not (folder / MANIFEST).is_file():
            raise InputError(
                f"{folder}: no captured keys; run: python analysis/capture_keys.py --out {folder}"
            )
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        self.layers: int = self.manifest["layers"]
        self.scale: float = self.manifest["scale"]

    def read(self, layer: int, name: str, device: str = "cpu") -> Tensor:
        """keys, keys_before, values [Hkv, T, D] or queries [Hq, last positions, D], float32."""
        with safe_open(self.folder / _file(layer), framework="pt", device=device) as file:
            return file.get_tensor(name).float()


def _file(layer: int) -> str:
    return f"layer-{layer:03d}.safetensors"


def tokenize(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """The text's first tokens, at most so many.

    Raises:
        InputError: less than two pages.
    """
    ids = tokenizer(text).input_ids[:tokens]
    if len(ids) < 2 * PAGE:
        raise InputError(f"text: expected at least two pages ({2 * PAGE} tokens), got {len(ids)} tokens")
    return ids


def capture(
    model: Any, ids: list[int], folder: Path, *, queries: int = 64, facts: dict[str, Any] | None = None
) -> Capture:
    """Runs the model once and writes a safetensors file a layer and a manifest; all of them or none.

    Raises:
        InputError: a model without rotary positions, or keys with nan or inf.
        OutputError: the folder cannot be written.
    """
    scales: dict[int, float] = {}
    shape: list[int] = []
    with outputs.aside(folder) as unfinished:
        unfinished.mkdir()

        def write(layer: int, tensors: dict[str, Tensor], scale: float) -> None:
            for name in ("keys", "queries"):
                bad = (~tensors[name].isfinite()).nonzero()
                if len(bad):
                    raise InputError(f"layer {layer}: {name} hold nan or inf, first at {bad[0].tolist()}")
            scales[layer] = scale
            shape[:] = tensors["keys"].shape
            stored = {k: v.contiguous().cpu() for k, v in tensors.items()}
            try:
                save_file(stored, unfinished / _file(layer))
            except SafetensorError as error:
                raise OutputError(f"{folder}: cannot be written: {error}") from error

        with _seen(model, queries, write), torch.inference_mode():
            model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
        if len(set(scales.values())) != 1:
            raise InputError(f"model: expected layers of one logit scale, got {sorted(set(scales.values()))}")
        manifest = {
            "tokens": len(ids),
            "tokens_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
            "queries": min(queries, len(ids)),
            "layers": len(scales),
            "kv_heads": shape[0],
            "head_dim": shape[2],
            "scale": scales[0],
            "commit": outputs.commit(),
            **(facts or {}),
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return Capture(folder)


@contextmanager
def _seen(model: Any, queries: int, write: Callable[[int, dict[str, Tensor], float], None]) -> Iterator[None]:
    """Hands every layer's tensors to `write` as the model's attention gets them."""
    homes = [
        sys.modules[type(m).__module__]
        for m in model.modules()
        if hasattr(m, "layer_idx") and hasattr(m, "is_causal")
    ]
    rotary = "apply_rotary_pos_emb"
    if not homes or not hasattr(homes[0], rotary):
        raise InputError(f"{type(model).__name__}: expected a model with rotary positions, got one without")
    home, rotate = homes[0], getattr(homes[0], rotary)
    before: list[Tensor] = []

    def rotated(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        before[:] = [k]
        return rotate(q, k, *args, **kwargs)

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if not before:
            raise InputError(f"layer {module.layer_idx}: expected rotary positions, got none")
        tensors = {
            "keys": k[0],
            "keys_before": before.pop()[0],
            "values": v[0],
            "queries": q[0, :, -queries:],
        }
        write(module.layer_idx, tensors, kwargs.get("scaling") or q.shape[-1] ** -0.5)
        return AttentionInterface()["sdpa"](module, q, k, v, mask, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    previous = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    setattr(home, rotary, rotated)
    try:
        yield
    finally:
        setattr(home, rotary, rotate)
        model.set_attn_implementation(previous)


def capture_text(
    out: Path,
    *,
    tokens: int,
    model: Path | None,
    text: Path | None,
    held_out: bool,
    queries: int,
    device: str,
) -> Capture:
    """Captures a file's text, or the installed prose where none is given."""
    if text is not None and not text.is_file():
        raise InputError(f"{text}: expected a text file, got none")
    words = prose()[held_out] if text is None else text.read_text(encoding="utf-8")
    loaded, tokenizer = load(model, device)
    facts = {
        **model_facts(model),
        "text_sha256": hashlib.sha256(words.encode()).hexdigest(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    return capture(loaded, tokenize(tokenizer, words, tokens), out, queries=queries, facts=facts)


def main(
    tokens: Annotated[int, typer.Option(help="of the text, from its start")] = 4096,
    out: Annotated[Path, typer.Option(help="folder to write")] = outputs.OUT / "keys",
    model: Annotated[Path | None, typer.Option(help="model directory or .gguf; SmolLM2 without")] = None,
    text: Annotated[
        Path | None, typer.Option(help="text file; prose from Python's own texts without")
    ] = None,
    held_out: Annotated[bool, typer.Option(help="the part of that prose that nothing else reads")] = False,
    queries: Annotated[int, typer.Option(help="last positions whose queries are kept")] = 64,
    device: Annotated[str, typer.Option()] = "cpu",
) -> None:
    """Captures keys."""
    found = capture_text(
        out, tokens=tokens, model=model, text=text, held_out=held_out, queries=queries, device=device
    )
    typer.echo(f"{out}: {found.layers} layers, {found.manifest['tokens']} tokens")


if __name__ == "__main__":
    outputs.run(main)
