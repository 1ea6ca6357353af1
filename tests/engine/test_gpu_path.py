"""The GPU's builder and implementation on a CPU: kernels in Triton's interpreter, FlashAttention's one call in PyTorch.

What this shows is that vLLM's metadata is cut and handed on as it should be; FlashAttention and CUDA graphs need a GPU.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from locks import api
from locks.vllm import summary_layer
from locks.vllm.config import PluginConfig
from tests.engine.test_stages import BLOCK, HKV, HQ, D, common

CONFIG: dict[str, Any] = {"budget": 64}


def engine_config(speculative: Any = None) -> Any:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
    )
    model = SimpleNamespace(
        get_num_attention_heads=lambda _: HQ,
        get_num_kv_heads=lambda _: HKV,
        get_head_size=lambda: D,
        is_hybrid=False,
        hf_text_config=SimpleNamespace(),
        rswa_window=None,
        max_model_len=256,
    )
    return SimpleNamespace(
        additional_config={"locks": CONFIG},
        parallel_config=parallel,
        model_config=model,
        cache_config=SimpleNamespace(
            block_size=BLOCK, user_specified_block_size=True, cache_dtype="auto", num_gpu_blocks=None
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, max_cudagraph_capture_size=8, static_forward_context={}
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        kv_transfer_config=None,
        speculative_config=speculative,
    )


def dense(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Causal attention of the last len(q) tokens of one request; caches [num_blocks, block, Hkv, D]."""
    k, v = (cache[blocks.long()].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values))
    position = torch.arange(length - len(q), length)[:, None]
    out = scaled_dot_product_attention(
        q.transpose(0, 1),
        k.repeat_interleave(HQ // HKV, 0),
        v.repeat_interleave(HQ // HKV, 0),
        attn_mask=torch.arange(length) <= position,
    )
    return out.transpose(0, 1)


def flash_attention(**given: Any) -> None:
    """What FlashAttention computes of a paged cache."""
    assert given["causal"] is True
    starts, lens = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
    for row, length in enumerate(lens):
        part = slice(starts[row], starts[row + 1])
        args = given["k"], given["v"], given["block_table"][row], length
        given["out"][part] = dense(given["q"][part], *args)


def schedule(*, batch_size: int, cache_seqlens: Tensor, cu_seqlens_q: Tensor, **given: Any) -> Tensor:
    """FlashAttention's plan for the batch that it will get."""
    assert (batch_size, batch_size + 1) == (len(cache_seqlens), len(cu_seqlens_q))
    return torch.zeros(1 + 4 * batch_size, dtype=torch.int32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A layer's implementation with its builder."""
    from vllm.v1.attention.backends import flash_attn

    from locks.vllm import impl_cuda, stages

    engine = engine_config()
    monkeypatch.setattr(stages, "get_current_vllm_config", lambda: engine)
    monkeypatch.setattr(flash_attn, "get_current_vllm_config_or_none", lambda: None)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(flash_attn, "flash_attn_supports_quant_query_input", lambda: False)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_attention, raising=False)
    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", schedule, raising=False)
    monkeypatch.setattr(flash_attn, "get_layers_from_vllm_config", lambda *_: {})
    impl = impl_cuda.CudaImpl(HQ, D, D**-0.5, HKV, None, None, "auto")
    scale = torch.ones(())
    owner: Any = SimpleNamespace(
        impl=impl,
        num_kv_heads=HKV,
        head_size=D,
        kv_cache_torch_dtype=torch.float32,
        _k_scale=scale,
        _v_scale=scale,
    )
    engine.compilation_config.static_forward_context["model.layers.0.attn"] = owner
    impl.process_weights_after_loading(torch.float32)
    side = engine.compilation_config.static_forward_context["model.layers.0.attn.locks_summary"]
    spec = SimpleNamespace(
        num_kv_heads=HKV, head_size=D, dtype=torch.float32, block_size=BLOCK, sliding_window=None
    )
    builder = impl_cuda.CudaBuilder(spec, ["model.layers.0.attn"], engine, torch.device("cpu"))
    width = BLOCK * summary_layer.elements_per_token(PluginConfig(**CONFIG), D, torch.float32)
    side.kv_cache = torch.full((40, HKV, width), torch.nan)
    return SimpleNamespace(impl=impl, builder=builder, layer=owner, side=side)


def forward(gpu: Any, batch: Any, kv_cache: Tensor, q: Tensor) -> Tensor:
    out = torch.full_like(q, torch.nan)
    new = torch.full((len(q), HKV, D), torch.nan)
    return gpu.impl.forward(gpu.layer, q, new, new, kv_cache, gpu.builder.build(0, batch), out)


def test_a_mixed_batch(gpu: Any):
    rng = torch.Generator().manual_seed(0)
    kv_cache = torch.randn((40, HKV, BLOCK, 2 * D), generator=rng)
    history = common([200, 30, 40], [200, 30, 100])
    q = torch.randn((270, HQ, D), generator=rng)
    keys, values = kv_cache.transpose(1, 2).split(D, dim=-1)
    out = forward(gpu, history, kv_cache, q)
    for row, (first, last, length) in enumerate(((0, 200, 200), (200, 230, 30), (230, 270, 100))):
        want = dense(q[first:last], keys, values, history.block_table_tensor[row], length)
        torch.testing.assert_close(out[first:last], want)
    # The first two decode now, the third goes on with its prompt.
    batch = common([1, 1, 25], [201, 31, 125])
    q = torch.randn((27, HQ, D), generator=rng)
    out = forward(gpu, batch, kv_cache, q)
    records = gpu.impl.stages.views(kv_cache)[2]
    k_cache, v_cache = kv_cache[..., :D], kv_cache[..., D:]
    lens, fmt = torch.tensor([201, 31], dtype=torch.int32), PluginConfig(**CONFIG).fmt
    table = batch.block_table_tensor
    want = api.decode(q[:2], k_cache, v_cache, records, table[:2], lens, fmt, budget=64, impl="torch")
    torch.testing.assert_close(out[:2], want.out, rtol=1e-4, atol=1e-4)
    # 31 tokens are within the budget.
    torch.testing.assert_close(out[1:2], dense(q[1:2], keys, values, table[1], 31), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out[0:1], dense(q[:1], keys, values, table[0], 201), atol=1e-2)
    torch.testing.assert_close(out[2:], dense(q[2:], keys, values, table[2], 125))


def test_a_row_reads_pages_that_another_request_fills_in_the_same_step(gpu: Any):
    # vLLM shares blocks from the moment it plans them: two equal prompts that come together, one token of the second
    # left, which counts as decoding.
    rng = torch.Generator().manual_seed(0)
    kv_cache = torch.randn((40, HKV, BLOCK, 2 * D), generator=rng)
    batch = common([1, 193], [193, 193])
    table = batch.block_table_tensor
    table[0, : 192 // BLOCK] = table[1, : 192 // BLOCK]
    q = torch.randn((194, HQ, D), generator=rng)
    assert bool(gpu.side.kv_cache.isnan().all())
    out = forward(gpu, batch, kv_cache, q)
    records, fmt = gpu.impl.stages.views(kv_cache)[2], PluginConfig(**CONFIG).fmt
    lens, (k_cache, v_cache) = torch.tensor([193], dtype=torch.int32), kv_cache.split(D, dim=-1)
    want = api.decode(q[:1], k_cache, v_cache, records, table[:1], lens, fmt, budget=64, impl="torch")
    torch.testing.assert_close(out[:1], want.out, rtol=1e-4, atol=1e-4)


def test_rows_that_pad_a_graph_are_harmless(gpu: Any):
    kv_cache = torch.full((40, HKV, BLOCK, 2 * D), torch.nan)
    rng = torch.Generator().manual_seed(0)
    kv_cache[1:8] = torch.randn((7, HKV, BLOCK, 2 * D), generator=rng)
    q = torch.randn((4, HQ, D), generator=rng)
    forward(gpu, common([200], [200]), kv_cache, torch.zeros((200, HQ, D)))
    before = gpu.side.kv_cache.clone()
    batch = common([1, 0, 0, 0], [201, 0, 0, 0], tokens=4)
    batch.block_table_tensor[1:] = 0
    out = forward(gpu, batch, kv_cache, q)
    assert bool(out[0].isfinite().all())
    assert bool((out[1:] == 0).all())
    # 201 tokens complete no page.
    assert torch.equal(gpu.side.kv_cache.view(torch.int32), before.view(torch.int32))


def test_profile_run_takes_what_a_step_needs(gpu: Any):
    out = torch.full((5, HQ, D), torch.nan)
    q = torch.zeros((5, HQ, D))
    assert gpu.impl.forward(gpu.layer, q, q, q, torch.tensor([]), None, out) is out
    assert bool((out == 0).all())
