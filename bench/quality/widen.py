"""A model with wider heads and larger groups that says what the old one said.

A head of D = 64 becomes one of 128: its rotary pairs keep their frequencies, which are every second one of the wider
head's, and the pairs between are new. New query rows are random and new key rows zero, so that keys grow only where
training finds a use for them; new value rows are random and the output's new columns zero. A further query head of a
group starts as a copy whose output is ignored. So nothing changes at first.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

# New queries and values are this long, of what the old ones are.
NEW_ROWS = 0.5


def widen(
    model: Any, *, head_dim: int, group: int, context: int, theta: float | None = None, seed: int = 0
) -> Any:
    """A float32 Llama with heads of `head_dim` (a multiple of the model's own) and `group` query heads a KV head.

    Args:
        model: a LlamaForCausalLM with plain rotary positions.
        head_dim: width of a head.
        group: query heads that share a KV head, at least as many as now.
        context: positions that the new model's config allows.
        theta: base of the rotary frequencies; the model's own where none is given.
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
    if theta is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    generator = torch.Generator().manual_seed(seed)
    half = old.head_dim // 2
    # Where the old head's elements go: pair j of the two halves becomes pair j * times.
    pairs = torch.arange(half) * times
    kept = torch.cat([pairs, pairs + head_dim // 2])
    state = {name: weight.detach().float().clone() for name, weight in model.state_dict().items()}
    for name in list(state):
        weight = state[name]
        if name.endswith("q_proj.weight"):
            rows = _random((kv_heads, group, head_dim, weight.shape[1]), NEW_ROWS * weight.std(), generator)
            # The logits' scale is the wider head's.
            heads = weight.unflatten(0, (kv_heads, was, old.head_dim)) * times**0.5
            rows[:, :, kept] = heads[:, torch.arange(group) % was]
            state[name] = rows.flatten(0, 2)
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            rows = weight.new_zeros(kv_heads, head_dim, weight.shape[1])
            if name.endswith("v_proj.weight"):
                rows = _random(tuple(rows.shape), NEW_ROWS * weight.std(), generator)
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


def _random(shape: tuple[int, ...], std: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * float(std)
