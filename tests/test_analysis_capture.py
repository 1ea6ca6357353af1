"""Captured keys are the model's own; what cannot be captured or written leaves one line and no file."""

import gc
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import capture_keys
import contexts
import outputs
import pandas as pd
import pytest
import torch
from outputs import InputError, OutputError
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

SCRIPT = Path(capture_keys.__file__)
LAYERS, HQ, HKV, D = 3, 4, 2, 64
IDS = torch.randint(1, 97, (80,), generator=torch.Generator().manual_seed(1)).tolist()


def tiny(layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=HQ,
        num_key_value_heads=HKV,
        head_dim=D,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def test_keys_are_those_of_the_models_cache(tmp_path):
    model = tiny()
    with torch.inference_mode():
        cache = model(torch.tensor([IDS])).past_key_values
    found = capture_keys.capture(model, IDS, tmp_path / "keys", queries=8, facts={"model": "tiny"})
    assert found.layers == LAYERS
    assert found.scale == D**-0.5
    for layer in range(LAYERS):
        torch.testing.assert_close(found.read(layer, "keys"), cache.layers[layer].keys[0])
        torch.testing.assert_close(found.read(layer, "values"), cache.layers[layer].values[0])
        assert found.read(layer, "queries").shape == (HQ, 8, D)
    # Turned by their positions, the keys from before are those from after.
    positions = torch.arange(len(IDS))[None]
    turn = model.model.rotary_emb(torch.zeros(1), positions)
    before = found.read(1, "keys_before")[None]
    torch.testing.assert_close(apply_rotary_pos_emb(before, before, *turn)[1][0], found.read(1, "keys"))
    assert json.loads((tmp_path / "keys" / "manifest.json").read_text())["tokens"] == len(IDS)


def test_the_model_is_left_as_it_was(tmp_path):
    model = tiny()
    with torch.inference_mode():
        before = model(torch.tensor([IDS])).logits
        implementation = model.config._attn_implementation
        capture_keys.capture(model, IDS, tmp_path / "keys")
        assert torch.equal(model(torch.tensor([IDS])).logits, before)
    assert model.config._attn_implementation == implementation


def test_one_layer_is_in_memory_at_a_time(tmp_path, monkeypatch):
    alive = []
    save = capture_keys.save_file

    def counted(tensors: Any, path: Any) -> None:
        gc.collect()
        mine = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape[-2:] == (len(IDS), D)]
        alive.append(len(mine))
        save(tensors, path)

    monkeypatch.setattr(capture_keys, "save_file", counted)
    capture_keys.capture(tiny(8), IDS, tmp_path / "keys")
    assert len(alive) == 8
    assert alive[-1] <= alive[0]


def test_a_model_without_rotary_positions_is_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=128, vocab_size=97)).eval()
    with pytest.raises(InputError, match="GPT2LMHeadModel: expected a model with rotary positions"):
        capture_keys.capture(model, IDS, tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


def test_keys_that_are_not_finite_are_refused(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[70] = torch.nan
    with pytest.raises(InputError, match=r"layer 1: keys hold nan or inf, first at \[1, 0, "):
        capture_keys.capture(model, IDS, tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


class Letters:
    """One token a letter."""

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": [ord(c) % 97 for c in text]})


def test_a_text_shorter_than_two_pages_is_refused():
    assert len(capture_keys.tokenize(Letters(), "a" * 32, 100)) == 32
    with pytest.raises(InputError, match=r"at least two pages \(32 tokens\), got 31"):
        capture_keys.tokenize(Letters(), "a" * 31, 100)


def test_a_text_file_that_is_not_there_is_one_line():
    command = [sys.executable, str(SCRIPT), "--text", "no-such-file.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "error: no-such-file.txt: expected a text file, got none"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}


@pytest.fixture
def small_files() -> Any:
    """No file may grow beyond 4 kB: what a full disk does, at will."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_no_half_of_a_capture(tmp_path):
    with pytest.raises(OutputError, match=r"keys: cannot be written: "):
        capture_keys.capture(tiny(), IDS, tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_the_table_that_was_there(tmp_path):
    path = tmp_path / "t.csv"
    outputs.write_table(pd.DataFrame({"x": [1.0]}), path)
    with pytest.raises(OutputError, match=r"t\.csv: cannot be written: File too large"):
        outputs.write_table(pd.DataFrame({"x": [0.5] * 4000}), path)
    assert path.read_text() == "x\n1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="keys: cannot be written: File exists"):
        capture_keys.capture(tiny(), IDS, tmp_path / "file" / "keys")


def test_an_older_capture_is_replaced_whole(tmp_path):
    capture_keys.capture(tiny(), IDS, tmp_path / "keys")
    capture_keys.capture(tiny(1), IDS[:40], tmp_path / "keys")
    assert sorted(p.name for p in (tmp_path / "keys").iterdir()) == ["layer-000.safetensors", "manifest.json"]
    assert load_file(tmp_path / "keys" / "layer-000.safetensors")["keys"].shape == (HKV, 40, D)


def test_a_models_note_names_its_weights_and_its_recipe(tmp_path):
    model = tmp_path / "small"
    tiny(1).save_pretrained(model)
    (model / "recipe.json").write_text('{"seed": 3, "stages": [[0.0, 1.0]], "base": "scratch"}')
    facts = contexts.model_facts(model)
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in model.iterdir()}
    assert facts["model"] == "small"
    assert facts["weights_sha256"] == {"model.safetensors": sums["model.safetensors"]}
    assert facts["recipe"] == {"seed": 3, "base": "scratch"}
    assert facts["recipe_sha256"] == sums["recipe.json"]
    assert contexts.model_facts(None) == {"model": "SmolLM2-135M-Instruct"}


def test_keys_that_were_not_captured_are_asked_for(tmp_path):
    with pytest.raises(InputError, match=r"no captured keys; run: python analysis/capture_keys\.py --out"):
        capture_keys.Capture(tmp_path)
    with pytest.raises(InputError, match=r"rank\.csv: no such table"):
        outputs.read_table(tmp_path, "rank")
