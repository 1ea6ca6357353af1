"""Device time by graph replay, the read bandwidth, and what every row says of the machine and the code."""

from __future__ import annotations

import datetime
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import triton


def device_times(calls: list[Callable[[], Any]], *, seconds: float = 0.25) -> tuple[float, float, float]:
    """p20, p50 and p80 of the device time of one call, µs: replays of a graph of all calls, each in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Short calls are repeated so that a replay's own start does not show.
    repeats = max(1, 8 // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    times: list[float] = []
    for _ in range(2):
        graph.replay()
    while sum(times) < seconds * 1e6 or len(times) < 7:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return per_call(times, repeats * len(calls))


def per_call(times: list[float], calls: int) -> tuple[float, float, float]:
    """p20, p50 and p80 of one call from times of `calls` of them, in the same unit."""
    quintiles = statistics.quantiles(times, n=5)
    return quintiles[0] / calls, statistics.median(times) / calls, quintiles[3] / calls


def read_bandwidth() -> float:
    """GB/s of reading 4 GB once."""
    x = torch.zeros(2**30, dtype=torch.int32, device="cuda")
    return 4 * x.numel() / device_times([lambda: torch.amax(x)])[1] / 1e3


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def commit_of() -> str:
    """What git says, empty outside a repository."""
    return _output("git", "rev-parse", "HEAD")


def facts() -> dict[str, Any]:
    """What every row says of the machine and the code."""
    return {
        "GPU": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit_of(),
        "date": datetime.date.today().isoformat(),
    }
