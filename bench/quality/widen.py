"""A model with wider heads and larger groups that says what the old one said.

A head of D = 64 becomes one of 128: its rotary pairs keep their frequencies, which are every second one of the wider
head's, and the pairs between are new. New query rows are zero, new key rows random; new value rows random, the
output's new columns zero; further query heads of a group likewise. So nothing changes until training finds a use
for them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# New keys are this long, of what the old ones are.
NEW_KEYS = 0.5


def widen(model: Any, *, head_dim: int, group: int, context: int, seed: int = 0) -> Any:
    """A float32 Llama with heads of `head_dim` (a multiple of the model's own) and `group` query heads a KV head.

    Args:
        model: a LlamaForCausalLM with plain rotary positions.
        head_dim: width of a head.
        group: query heads that share a KV head, at least as many as now.
        context: positions that the new model's config allows.
        seed: of the new rows.

    Raises:
        ValueError: a size that the model cannot be widened to.
    """
    old = model.config
    times = head_dim // old.head_dim
    kv_heads = old.num_key_value_heads
    was = old.num_attention_heads // kv_heads
    if head_dim % old.head_dim or group < was:
        raise ValueError(
            f"head_dim, group: expected a multiple of {old.head_dim} and at least {was}, got {head_dim} and {group}"
        )
    config = copy.deepcopy(old)
    config.head_dim, config.num_attention_heads = head_dim, kv_heads * group
    config.max_position_embeddings = context
    generator = torch.Generator().manual_seed(seed)
    half = old.head_dim // 2
    # Where the old head's elements go: pair j of the two halves becomes pair j * times.
    pairs = torch.arange(half) * times
    kept = torch.cat([pairs, pairs + head_dim // 2])
    state = {name: weight.detach().float().clone() for name, weight in model.state_dict().items()}
    for name in list(state):
        weight = state[name]
        if name.endswith("q_proj.weight"):
            rows = weight.new_zeros(kv_heads, group, head_dim, weight.shape[1])
            # The logits' scale is the wider head's.
            rows[:, :was, kept] = weight.unflatten(0, (kv_heads, was, old.head_dim)) * times**0.5
            state[name] = rows.flatten(0, 2)
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            rows = _random((kv_heads, head_dim, weight.shape[1]), NEW_KEYS * weight.std(), generator)
            rows[:, kept] = weight.unflatten(0, (kv_heads, old.head_dim))
            state[name] = rows.flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            columns = weight.new_zeros(weight.shape[0], kv_heads, group, head_dim)
            columns[:, :, :was, kept] = weight.unflatten(1, (kv_heads, was, old.head_dim))
            state[name] = columns.flatten(1)
    wide = type(model)(config)
    # What is tied to the embeddings follows them.
    wide.load_state_dict(state)
    return wide


def shorten(model: Any, layers: Sequence[int]) -> Any:
    """The model with those of its layers alone, in place: a head start for a shallow one, not its equal."""
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in layers])
    number: int
    layer: Any
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in layers]
    return model


def _random(shape: tuple[int, ...], std: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * float(std)
