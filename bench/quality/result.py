"""The result file of a run, with what is true of the machine and the code, and its picture beside it."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from locks import doctor
from locks.quality import figure
from locks.quality.log import Row


def write(out: Path, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes the facts and the rows, whole or not at all, and draws the rows if there are some.

    Args:
        out: the JSON file; the picture has its name with .png.
        facts: of the run; "model" is put into every row.
        rows: of `locks.quality.summary`.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        **facts,
        "device": doctor.device_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": doctor.versions(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "rows": [{"model": facts["model"], **row} for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    # Calls on the same logs may write at the same time.
    beside = out.with_suffix(f".{os.getpid()}.unfinished")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(out)
    if rows:
        figure.scores(rows, out.with_suffix(".png"))
