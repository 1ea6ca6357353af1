"""What the plugin takes for granted of the vLLM that is installed: names, signatures and the memory planner's rules.

The first test to fail with a new release, and it says what changed. It needs vLLM's Python files alone, so it also
runs against an unpacked GPU wheel on a machine without a GPU.
"""

import dataclasses
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from locks.format import SummaryFormat
from locks.vllm import compat
from locks.vllm.config import PluginConfig


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_this_version_is_a_supported_one():
    import vllm

    assert any(compat.unsupported(vllm.__version__, device) is None for device in compat.SUPPORTED)


def test_attention_implementation():
    from vllm.v1.attention.backend import AttentionImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    init = [
        "self",
        "num_heads",
        "head_size",
        "scale",
        "num_kv_heads",
        "alibi_slopes",
        "sliding_window",
        "kv_cache_dtype",
        "logits_soft_cap",
        "attn_type",
        "kv_sharing_target_layer_name",
    ]
    forward = [
        "self",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        "output_scale",
        "output_block_scale",
    ]
    assert parameters(AttentionImpl.__init__) == init
    assert parameters(FlashAttentionImpl.__init__) == [*init, "sinks"]
    assert parameters(FlashAttentionImpl.forward) == forward
    update = ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]
    assert parameters(FlashAttentionImpl.do_kv_cache_update) == update
    assert parameters(FlashAttentionImpl.process_weights_after_loading) == ["self", "act_dtype"]


def test_our_implementations_have_the_same_signatures():
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from locks.vllm.impl_cpu import CpuImpl
    from locks.vllm.impl_cuda import CudaImpl

    for ours in (CpuImpl, CudaImpl):
        for name in ("__init__", "forward", "do_kv_cache_update", "process_weights_after_loading"):
            assert parameters(getattr(ours, name)) == parameters(getattr(FlashAttentionImpl, name)), name


def test_metadata_builder():
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    build = ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
    for builder in (AttentionMetadataBuilder, FlashAttentionMetadataBuilder):
        init = ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"]
        assert parameters(builder.__init__) == init
        assert parameters(builder.build) == build
        assert parameters(builder.build_for_cudagraph_capture) == ["self", "common_attn_metadata"]
    order = ["self", "reorder_batch_threshold", "supports_spec_as_decode"]
    assert parameters(AttentionMetadataBuilder._init_reorder_batch_threshold)[:3] == order
    assert AttentionMetadataBuilder.supports_update_block_table is False
    levels = ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
    assert sorted(AttentionCGSupport.__members__, key=lambda n: AttentionCGSupport[n].value) == levels


def test_common_metadata_has_the_fields_that_a_prefill_slice_replaces():
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    names = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    sliced = {
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "block_table_tensor",
        "slot_mapping",
        "positions",
        "is_prefilling",
        "seq_lens_cpu_upper_bound",
        "_seq_lens_cpu",
        "_num_computed_tokens_cpu",
        "_num_computed_tokens_cache",
        "_token_to_req_indices_cache",
    }
    # What a slice may keep: whole-batch numbers, and what models that are refused need.
    kept = {
        "max_query_len",
        "max_seq_len",
        "causal",
        "logits_indices_padded",
        "num_logits_indices",
        "encoder_seq_lens",
        "encoder_seq_lens_cpu",
        "dcp_local_seq_lens",
        "dcp_local_seq_lens_cpu",
        "mm_req_doc_ranges",
        "rswa_prefix_lens",
        "replayssm_decode_base_cpu",
    }
    assert sliced <= names
    assert names <= sliced | kept
    assert parameters(split_decodes_and_prefills) == [
        "common_attn_metadata",
        "decode_threshold",
        "require_uniform",
        "treat_short_extends_as_decodes",
    ]


def test_flash_attention_reads_no_more_of_its_metadata_than_its_own_fields():
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadata

    names = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
    assert {"num_actual_tokens", "query_start_loc", "seq_lens", "block_table", "slot_mapping"} <= names
    # K in the first half of the last axis, V in the second.
    assert FlashAttentionBackend.get_kv_cache_shape(7, 64, 2, 128) == (7, 2, 64, 256)
    assert FlashAttentionBackend.forward_includes_kv_cache_update is False


def test_what_a_rank_says_of_its_memory_is_known():
    from vllm.config import CacheConfig, ParallelConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    assert "num_gpu_blocks" in {field.name for field in dataclasses.fields(CacheConfig)}
    assert {"rank", "world_size"} <= {field.name for field in dataclasses.fields(ParallelConfig)}
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    assert spec.page_size_bytes == 2 * 64 * 2 * 128 * 2


def test_backend_selection():
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import AttentionSelectorConfig

    assert {"CUSTOM", "CPU_ATTN"} <= set(AttentionBackendEnum.__members__)
    assert parameters(register_backend)[:2] == ["backend", "class_path"]
    checked = set(parameters(AttentionBackend.validate_configuration))
    assert set(AttentionSelectorConfig._fields) | {"device_capability"} == checked


def test_every_reason_of_vllms_validation_has_words_of_ours():
    from vllm.v1.attention.backend import AttentionBackend

    from locks.vllm import refusals

    reasons = [
        line.split('"')[1]
        for line in inspect.getsource(AttentionBackend.validate_configuration).splitlines()
        if "not supported" in line and '"' in line
    ]
    assert len(reasons) >= 14
    for reason in reasons:
        if "KV connector" not in reason:
            assert refusals.explain(reason) != reason, reason


def test_connector():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as module

    fields = [field.name for field in dataclasses.fields(module.DecodeBenchConnectorMetadata)]
    assert fields == ["reqs_to_fill"]
    init = ["self", "vllm_config", "role", "kv_cache_config"]
    assert parameters(module.DecodeBenchConnector.__init__) == init
    assert parameters(module.DecodeBenchConnector.register_kv_caches) == ["self", "kv_caches"]
    assert parameters(module.DecodeBenchConnector.start_load_kv) == ["self", "forward_context", "kwargs"]
    names = ["name", "module_path", "class_name"]
    assert parameters(KVConnectorFactory.register_connector) == names


def specs(page: int, dtype: torch.dtype, rank: int = 4) -> dict[str, Any]:
    """What two attention layers and their summary caches ask the memory planner for."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from locks.vllm.summary_layer import SummaryLayer

    engine = SimpleNamespace(cache_config=SimpleNamespace(block_size=64))
    owner = SimpleNamespace(num_kv_heads=8, head_size=128, kv_cache_torch_dtype=dtype)
    config = PluginConfig(page=page, budget=256, rank=rank)
    made = {}
    for i in range(2):
        name = f"model.layers.{i}.self_attn.attn"
        made[name] = FullAttentionSpec(
            block_size=64, num_kv_heads=8, head_size=128, dtype=dtype, indexes_kv_by_block_stride=True
        )
        made[name + ".locks_summary"] = SummaryLayer(owner, config).get_kv_cache_spec(engine)
    return made


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_planner_gives_both_caches_one_block_table(page: int, dtype: torch.dtype):
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    made = specs(page, dtype)
    engine: Any = SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False))
    (planned,) = get_kv_cache_groups(engine, dict(made))
    assert sorted(planned.layer_names) == sorted(made)
    group = planned.kv_cache_spec
    assert isinstance(group, UniformTypeKVCacheSpecs)
    record = SummaryFormat(page=page).layout(128).nbytes
    for name, spec in made.items():
        if name.endswith(".locks_summary"):
            # Whole elements for each token: at most one of them more than a record needs.
            room = spec.page_size_bytes / (8 * (64 // page))
            assert record <= room < record + page * dtype.itemsize
    assert group.page_size_bytes == sum(spec.page_size_bytes for spec in made.values())


def test_gpu_backend_loads_on_its_version_and_refuses_what_it_cannot_serve():
    import vllm
    from vllm.platforms.interface import DeviceCapability

    if compat.unsupported(vllm.__version__, "cuda") is not None:
        with pytest.raises(ValueError, match=vllm.__version__):
            importlib.import_module("locks.vllm.backend")
        return
    backend = importlib.import_module("locks.vllm.backend").CudaBackend
    good: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    assert backend.validate_configuration(**good) == []
    assert backend.validate_configuration(**good, use_batch_invariant=True) == []
    for change, word in (
        ({"head_size": 48}, "head width"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"block_size": 24}, "--block-size"),
        ({"use_mla": True}, "MLA"),
        ({"has_sink": True}, "sinks"),
        ({"use_sparse": True}, "sparse"),
        ({"attn_type": "encoder_only"}, "encoder"),
        ({"has_sliding_window": True}, "sliding-window"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_pcp": True}, "--prefill-context-parallel-size"),
    ):
        (reason,) = backend.validate_configuration(**(good | change))
        assert reason.startswith("locks: ")
        assert word in reason
    assert backend.get_name() == "CUSTOM"
    assert backend.get_required_kv_cache_layout() == "HND"
    assert backend.get_preferred_block_size(16) == 64
    assert backend.get_builder_cls()._cudagraph_support.name == "UNIFORM_BATCH"
