"""Time per output token of vLLM with its own attention and with LOCKS: bench/results/h200/vllm_tpot.json.

    python bench/vllm_tpot.py --contexts 16384 131072 --batch 1 --ranks 8 4

A model of GLM-4-9B-Chat-1M's shape with dummy weights; DecodeBenchConnector fills the cache, so no prompt is
prefilled. TPOT = (time of 72 tokens - time of 8 tokens) / 64, each a request of its own. Every implementation runs in
an engine of its own process, one after the other, `--rounds` times over. The file is written after every measurement,
so a run that is stopped leaves what it has. `--ttft` prefills for real and times the first token instead.

It wants vLLM 0.26.0 and a GPU. From a checkout that is not installed only one GPU can be used: the workers of several
find the plugin by its entry point.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
MODEL = "glm-4-9b-1m"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 2**21,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT, LONG = 8, 72
# What a row is of: measured again, it takes the old one's place.
KEY = (
    "measure",
    "impl",
    "rank",
    "page",
    "budget",
    "dense_below",
    "context",
    "batch",
    "model",
    "tensor_parallel",
    "runner",
    "block_size",
)


def engine(options: argparse.Namespace) -> Any:
    """The engine of this process."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    from locks.vllm import plugin

    # A checkout has no entry point; registering twice does no harm.
    plugin.register()
    directory = Path(tempfile.mkdtemp()) / MODEL
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE))
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": options.model_len or max(options.contexts) + 256,
        "max_num_seqs": max(options.batch),
        "gpu_memory_utilization": options.memory,
        "tensor_parallel_size": options.tensor_parallel,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, *options.batch})},
    }
    if options.block_size:
        settings["block_size"] = options.block_size
    if options.measure == "tpot":
        settings["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.5},
        }
    if options.impl == "locks":
        settings["attention_config"] = {"backend": "CUSTOM"}
        settings["additional_config"] = {
            "locks": {
                "budget": options.budget,
                "rank": options.rank,
                "page": options.page,
                "dense_below": options.dense_below,
            }
        }
    return LLM(str(directory), **settings)


def seconds(llm: Any, context: int, batch: int, tokens: int) -> float:
    """Of `batch` requests of `context` tokens that answer with `tokens` each."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [3 + i] * context} for i in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    end = time.perf_counter()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * batch
    return end - begin


def driver() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown"
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def facts(llm: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What the engine turned out to be."""
    import torch

    config = llm.llm_engine.vllm_config
    return {
        "model": MODEL,
        "tensor_parallel": options.tensor_parallel,
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "cudagraph": config.compilation_config.cudagraph_mode.name,
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "cache_blocks": config.cache_config.num_gpu_blocks,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "triton": version("triton"),
            "vllm": __import__("vllm").__version__,
        },
    }


def measure(options: argparse.Namespace) -> None:
    """Runs one implementation in this process and prints a line for every context and batch."""
    from locks.vllm import stats

    llm = engine(options)
    known = facts(llm, options)
    for context in options.contexts:
        for batch in options.batch:
            if batch * (context + LONG) > known["cache_blocks"] * known["block_size"]:
                continue
            before, sparse = stats.totals(), options.impl == "locks"
            if options.measure == "ttft":
                seconds(llm, context, batch, 1)
                samples = [1000 * seconds(llm, context, batch, 1) for _ in range(options.repeats)]
            else:
                seconds(llm, context, batch, SHORT)
                samples = []
                for _ in range(options.repeats):
                    short = seconds(llm, context, batch, SHORT)
                    long = seconds(llm, context, batch, LONG)
                    samples.append(1000 * (long - short) / (LONG - SHORT))
            row = {"impl": options.impl, "context": context, "batch": batch, **known, "samples_ms": samples}
            if sparse:
                after = stats.totals()
                requests = batch * (1 + options.repeats * (1 if options.measure == "ttft" else 2))
                row["decode_rows"] = after.decode_rows - before.decode_rows
                row["sparse_rows"] = after.sparse_rows - before.sparse_rows
                row["seal_s_a_request"] = (after.seal_seconds - before.seal_seconds) / requests
            print("ROW " + json.dumps(row), flush=True)


def commit() -> str:
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def keep(rows: list[dict[str, Any]], row: dict[str, Any], out: Path) -> None:
    """Puts a row in its place and writes the file, whole or not at all."""
    rows[:] = [old for old in rows if any(old.get(name) != row.get(name) for name in KEY)] + [row]
    rows.sort(key=lambda r: [str(type(r.get(n))) + str(r.get(n)).zfill(9) for n in KEY])
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    unfinished.rename(out)


def run(options: argparse.Namespace) -> None:
    """Every implementation in turn, `--rounds` times."""
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    locks = [("locks", rank) for rank in options.ranks]
    samples: dict[tuple[Any, ...], list[float]] = {}
    head = {"commit": options.commit or commit(), "date": datetime.date.today().isoformat()}
    for _ in range(options.rounds):
        for impl, rank in [("dense", None), *locks]:
            child = [sys.executable, __file__, *sys.argv[1:], "--impl", impl, "--rank", str(rank or 0)]
            environment = {
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            }
            process = subprocess.Popen(child, stdout=subprocess.PIPE, text=True, env=environment)
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("ROW "):
                    print(line, end="", flush=True)
                    continue
                row = json.loads(line.removeprefix("ROW "))
                found = samples.setdefault((impl, rank, row["context"], row["batch"]), [])
                found += row.pop("samples_ms")
                name, own = options.measure, impl == "locks"
                row |= {
                    "measure": name,
                    "rank": rank,
                    "page": options.page if own else None,
                    "budget": options.budget if own else None,
                    "dense_below": options.dense_below if own else None,
                    f"{name}_ms": round(statistics.median(found), 4),
                    f"{name}_ms_min": round(min(found), 4),
                    f"{name}_ms_max": round(max(found), 4),
                    "samples": len(found),
                    **head,
                }
                keep(rows, row, options.out)
                shown = (impl, rank, row["context"], row["batch"], row[f"{name}_ms"])
                print("{} rank {} context {} batch {}: {} ms".format(*shown), flush=True)
            if process.wait():
                print(f"{impl} rank {rank} ended with {process.returncode}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2**14, 2**16, 2**17, 2**18, 2**19, 2**20])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 4])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--dense-below", type=int, default=0)
    parser.add_argument("--block-size", type=int, help="of the cache; the backend's own where none is given")
    parser.add_argument(
        "--model-len", type=int, help="longest request; the longest context where none is given"
    )
    parser.add_argument("--memory", type=float, default=0.95, help="share of the GPU that the engine may use")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="measurements in one engine")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each implementation")
    parser.add_argument("--ttft", dest="measure", action="store_const", const="ttft", default="tpot")
    parser.add_argument("--commit", default="", help="for a checkout without its history")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "h200" / "vllm_tpot.json")
    parser.add_argument("--impl", choices=["dense", "locks"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.impl is None:
        run(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
