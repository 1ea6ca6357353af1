"""The entry point: vLLM calls `register` in each of its processes, perhaps more than once."""

from __future__ import annotations

import contextlib
from typing import Any

from locks.vllm import compat, config

CUDA_BACKEND = "locks.vllm.backend.CudaBackend"
CPU_BACKEND = "locks.vllm.backend_cpu.CpuBackend"
CONNECTOR = "LocksDecodeBenchConnector"
# Below vLLM's own logger, so that its handlers write what we say.
LOGGER = "vllm.plugins.locks"


def register() -> None:
    """Tells vLLM where the backends are; nothing of vLLM changes until an engine asks for one.

    A CPU engine takes no other backend than CPU_ATTN, so that name leads to ours there, which hands an engine
    without a locks configuration vLLM's own implementation.

    Raises:
        ValueError: LOCKS_CONFIG is set and describes nothing possible.
    """
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    wanted = config.from_environment() is not None
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    # Called again in a process that has it already.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "locks.vllm.connector", CONNECTOR)
    if not current_platform.is_cpu():
        return
    reason = compat.unsupported(vllm.__version__, "cpu")
    if reason is None:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    elif wanted:
        raise ValueError(f"locks: {reason}")
    else:
        init_logger(LOGGER).warning("locks stays off: %s", reason)


def use_connector(vllm_config: Any) -> None:
    """Puts our DecodeBenchConnector in the place of vLLM's, before the engine makes one."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == "DecodeBenchConnector":
        transfer.kv_connector = CONNECTOR
