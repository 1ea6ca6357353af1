"""CPU_ATTN on a CPU engine: vLLM's own backend, with our implementation where a locks configuration is given."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from locks.vllm import config as settings
from locks.vllm.impl_cpu import CpuBuilder, CpuImpl


def _wanted() -> bool:
    return settings.from_engine(get_current_vllm_config_or_none()) is not None


class CpuBackend(CPUAttentionBackend):
    """Decides anew for every engine of a process; vLLM keeps the class that it found first."""

    @staticmethod
    def get_impl_cls() -> Any:
        """Ours where the current engine has a locks configuration, else vLLM's."""
        return CpuImpl if _wanted() else CPUAttentionBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> Any:
        """The builder that goes with `get_impl_cls`."""
        return CpuBuilder if _wanted() else CPUAttentionBackend.get_builder_cls()
