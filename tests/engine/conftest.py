"""Tests in a real vLLM engine on a CPU: run where vLLM is installed (`make test-engine`), not seen elsewhere."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(
        # One process, so that a test sees the caches; read when vllm is imported.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        # n-gram drafts run by numba, which would give torch its number of threads, and vLLM lets nobody take it back.
        NUMBA_NUM_THREADS="1",
        # vLLM compiles a function of its sampler, in each process anew.
        TORCH_COMPILE_DISABLE="1",
        # Workers that were told to end take as long as they may.
        VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS="1",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # vLLM and what it imports warn of much that is not ours.
        item.add_marker(pytest.mark.filterwarnings("default"))


def save_llama(directory: Path, **changes: Any) -> Path:
    """A small Llama with random weights, sharp enough for its attention to decide what it says."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    assert model.dtype == torch.float32
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from locks import models

    model, tokenizer = models.load_smollm2(dtype=torch.float32)
    directory = tmp_path_factory.mktemp("models") / "smollm2"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's loggers do not pass on what they get."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
