"""What the vLLM benchmarks share: engines in processes of their own, and files of rows that are written whole."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "h200"
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # The engine in the process that started it: its scheduler and its counts can be seen.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ROW = "ROW "


class Child:
    """A run of `script` in a process of its own: what it says by `tell`; what else it writes is passed on.

    code: what it ended with, once all is read.
    """

    code: int | None = None

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )

    def __iter__(self) -> Iterator[Any]:
        with self.process:
            for line in self.process.stdout or ():
                if line.startswith(ROW):
                    yield json.loads(line.removeprefix(ROW))
                else:
                    print(line, end="", flush=True)
        self.code = self.process.returncode


def needs_vllm() -> None:
    """Ends the program with one line where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vllm: expected to be installed beside this Python, found none")


def tell(value: Any) -> None:
    """Hands a value to the process that started this one."""
    print(ROW + json.dumps(value), flush=True)


def smollm2(directory: Path) -> Path:
    """SmolLM2 as a directory that vLLM loads."""
    from locks import models

    model, tokenizer = models.load_smollm2(device="cpu")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def start(model: Path, locks: dict[str, Any] | None, **settings: Any) -> Any:
    """An engine of this process with LOCKS, or with vLLM's own attention where `locks` is None."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    from locks.vllm import plugin
    from locks.vllm.config import VARIABLE

    if locks is not None:
        # In place of `additional_config`, by which vLLM names what it compiled: a second rank need not compile again.
        os.environ[VARIABLE] = json.dumps(locks)
    # A checkout has no entry point; registering twice does no harm.
    plugin.register()
    options: dict[str, Any] = {"disable_log_stats": True}
    if torch.cuda.is_available():
        options["dtype"] = "bfloat16"
        if locks is not None:
            options["attention_config"] = {"backend": "CUSTOM"}
    else:
        # Compiling for a CPU takes longer than what runs on one.
        options |= {"dtype": "float32", "enforce_eager": True}
    return LLM(str(model), **(options | settings))


def driver() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown"
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def facts(llm: Any) -> dict[str, Any]:
    """What an engine turned out to be, and where it runs."""
    config = llm.llm_engine.vllm_config
    return {
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "cudagraph": config.compilation_config.cudagraph_mode.name,
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "cache_blocks": config.cache_config.num_gpu_blocks,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": driver(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "triton": version("triton"),
            "vllm": __import__("vllm").__version__,
        },
    }


def _totals(worker: Any) -> dict[str, Any]:
    from locks.vllm import stats

    return asdict(stats.totals())


def totals(llm: Any) -> dict[str, Any]:
    """What the first rank counted since it started; the others' rows are the same."""
    return llm.collective_rpc(_totals)[0]


def head(commit: str) -> dict[str, str]:
    """Commit and date of a row; git's where none is given."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    known = commit or subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": known or "unknown", "date": datetime.date.today().isoformat()}


def keep(row: dict[str, Any], out: Path, key: Sequence[str]) -> None:
    """Puts a row in the file, in the place of the one that has the same `key`; the file is written whole or not."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [old for old in rows if any(old.get(name) != row.get(name) for name in key)] + [row]
    rows.sort(key=lambda r: [str(type(r.get(n))) + str(r.get(n)).zfill(9) for n in key])
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    unfinished.rename(out)
