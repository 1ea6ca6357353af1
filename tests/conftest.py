"""What every test runs under: where kernels run, how many examples a property draws, and poisoned memory."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Triton decides when a function is decorated, its own ones when it is imported: before any test module.
    os.environ["TRITON_INTERPRET"] = "1"

# Workers share the cores: with torch's default each would start a thread a core.
if "PYTEST_XDIST_WORKER" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))

_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=300, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("LOCKS_HYPOTHESIS") or ("deep" if HAS_CUDA else "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(scope="session")
def device() -> str:
    """The device that kernels run on: "cuda", or "cpu" in Triton's interpreter."""
    return "cuda" if HAS_CUDA else "cpu"


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            poison = float("nan")
        elif tensor.dtype == torch.uint8:
            poison = 0xA5
        elif tensor.dtype == torch.bool:
            poison = True
        else:
            poison = torch.iinfo(tensor.dtype).min
        with torch.no_grad():
            return tensor.fill_(poison)

    return poisoned


@pytest.fixture(scope="session", autouse=True)
def _poison_empty() -> Iterator[None]:
    """Memory that nobody wrote reads as nan, or as a number that no index and no code may be.

    torch's own switch for this needs its deterministic mode, which would run other kernels than a user's.
    """
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ]:
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield
