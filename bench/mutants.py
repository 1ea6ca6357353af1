"""Do the tests notice a fault? Puts each one of bench/mutants.json into a copy of the code and runs its tests.

    python bench/mutants.py --out bench/results/mutants.json

A fault replaces one text, which its file holds once, by another. The copy is that of a commit; tests run in Triton's
interpreter, up to the first failure. A run that was stopped goes on where it was; faults already tried on the same
files and tests are not tried again.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from locks import doctor

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "bench/mutants.json"

# A failure is enough: shrinking it takes minutes in the interpreter. The tests' profiles inherit from this one.
PLUGIN = """from hypothesis import Phase, settings

settings.register_profile("first-failure", phases=[Phase.explicit, Phase.generate])
settings.load_profile("first-failure")
"""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: what it changes.
        kind: "comparison", "constant", "dropped", "sign", "axis" or "operand".
        old: the text that is replaced.
        new: what takes its place.
        tests: files and test ids, in the order they are run in; one of them must fail.
    """

    file: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.old, self.new

    def applied(self, text: str) -> str:
        """The file's text with the fault."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.file}: expected once and changed, got {text.count(self.old)}: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def git(*args: str) -> bytes:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, check=True).stdout


def copy_of(commit: str, replaced: list[str], where: Path) -> None:
    """The files of a commit, some of them as they stand in the working tree."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(where, filter="data")
    for name in replaced:
        (where / name).write_bytes((ROOT / name).read_bytes())
    (where / "first_failure.py").write_text(PLUGIN)


def environment(copy: Path) -> dict[str, str]:
    """What the copy's tests run under; no compiled file may outlive the source it was made from."""
    own = {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LOCKS_HYPOTHESIS": "ci",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**os.environ, **own}


def check_import(copy: Path) -> None:
    """Raises where the tests would import another `locks` than the copy's."""
    command = [sys.executable, "-c", "import locks; print(locks.__file__)"]
    found = subprocess.run(
        command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=True
    ).stdout.strip()
    if Path(found) != copy / "locks/__init__.py":
        raise RuntimeError(f"locks: expected {copy / 'locks/__init__.py'}, got {found}")


def run(copy: Path, tests: tuple[str, ...], limit: float | None) -> dict[str, Any]:
    """Whether a test fails, which one, and the seconds that it took to know."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "first_failure",
        *tests,
    ]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment(copy),
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "killed_by": None, "seconds": round(time.perf_counter() - start, 1)}
    seconds = round(time.perf_counter() - start, 1)
    if done.returncode == 0:
        return {"status": "survived", "killed_by": None, "seconds": seconds}
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed:
        return {"status": "killed", "killed_by": failed[1], "seconds": seconds}
    if done.returncode < 0:
        return {"status": "killed", "killed_by": f"signal {-done.returncode}", "seconds": seconds}
    raise RuntimeError(f"pytest {' '.join(tests)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def write(rows: list[dict[str, Any]], commit: str, out: Path) -> None:
    """Writes the result file whole or not at all."""
    counts = Counter(row["status"] for row in rows)
    result = {
        "command": f"python bench/mutants.py --out {out}",
        "versions": doctor.versions(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "counts": dict(counts),
        "killed_share": round(counts["killed"] / len(rows), 4),
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_suffix(".unfinished")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(out)


def main(
    out: Annotated[Path, typer.Option(help="file to write, and to go on with")] = Path(
        "bench/results/mutants.json"
    ),
    commit: Annotated[str, typer.Option(help="whose files are tested")] = "HEAD",
    tree: Annotated[
        list[str] | None, typer.Option(help="a file to take from the working tree instead")
    ] = None,
    only: Annotated[str, typer.Option(help="a pattern: those of files whose names hold it")] = "",
    retry: Annotated[bool, typer.Option(help="try those that were not killed again")] = False,
    limit: Annotated[float, typer.Option(help="seconds a mutant may take")] = 600,
    check: Annotated[bool, typer.Option(help="stop once every mutant is known to fit the files")] = False,
) -> None:
    """Tries every fault of the list and writes one row each."""
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in json.loads(LIST.read_text())]
    commit = git("rev-parse", commit).decode().strip()
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    if retry:
        old = [row for row in old if row["status"] == "killed"]
    rows = {(row["file"], row["old"], row["new"]): row for row in old}
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary).resolve()
        copy_of(commit, tree or [], copy)
        for mutant in mutants:
            mutant.applied((copy / mutant.file).read_text())
        if check:
            return
        check_import(copy)
        left = [m for m in mutants if re.search(only, m.file) and m.key not in rows]
        every = tuple(dict.fromkeys(test for mutant in left for test in mutant.tests))
        if every and (sound := run(copy, every, None))["status"] != "survived":
            raise RuntimeError(f"{sound['killed_by']}: expected to pass without a mutant, got a failure")
        for mutant in tqdm(left, "mutants"):
            path = copy / mutant.file
            text = path.read_text()
            path.write_text(mutant.applied(text))
            found = run(copy, mutant.tests, limit)
            path.write_text(text)
            rows[mutant.key] = {
                **dataclasses.asdict(mutant),
                **found,
                "commit": commit,
                "from_tree": tree or [],
            }
            write([rows[m.key] for m in mutants if m.key in rows], commit, out)
    typer.echo(Counter(row["status"] for row in rows.values()))


if __name__ == "__main__":
    typer.run(main)
