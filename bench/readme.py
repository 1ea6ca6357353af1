"""Writes the README's tables from the code and the committed results: python bench/readme.py [--check]"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from locks import SummaryFormat

ROOT = Path(__file__).resolve().parent.parent


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def records() -> str:
    """Bytes of a record and its share of K+V."""
    rows = []
    for rank in (2, 4, 8):
        for coef_bits in (4, 8):
            fmt = SummaryFormat(rank=rank, coef_bits=coef_bits)
            cells = [f"{rank}{' (default)' if fmt == SummaryFormat() else ''}", str(coef_bits)]
            for width in (128, 64):
                share = fmt.resident_share(width)
                cells += [str(fmt.layout(width).nbytes), f"{100 * share:.2f} % (1/{1 / share:.1f})"]
            rows.append(cells)
    header = ["rank", "coefficient bits", "bytes a page, D = 128", "of K+V", "bytes a page, D = 64", "of K+V"]
    return _table(header, rows)


def needles() -> str:
    """Digits right by selector and budget."""
    result = json.loads((ROOT / "bench/results/needles.json").read_text())
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    dense = None
    for row in result["rows"]:
        if row["budget"] is None:
            dense = row
        else:
            cells.setdefault(f"{row['selector']} {row['format']}".strip(), {})[row["budget"]] = row
    assert dense is not None
    budgets = sorted({budget for row in cells.values() for budget in row})
    rows = []
    for name, found in cells.items():
        line = [name]
        for budget in budgets:
            low, high = found[budget]["digits_right_95"]
            line.append(f"{found[budget]['digits_right']:.3f} ({low:.2f}-{high:.2f})")
        rows.append(line + [f"{found[budget]['kl']:.3f}" for budget in budgets])
    header = ["selector", *(f"{b} tokens" for b in budgets), *(f"KL at {b}" for b in budgets)]
    note = (
        f"Dense: {dense['digits_right']:.3f}. {dense['questions']} questions of four digits, 95 % bootstrap intervals; "
        f"`bench/results/needles.json`, by `{result['command']}` on {result['device']['name']}, {result['dtype']}."
    )
    return _table(header, rows) + "\n\n" + note


TABLES = {"records": records, "needles": needles}


def render(text: str) -> str:
    """The README's text with every table made anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text)
    return text


if __name__ == "__main__":
    path = ROOT / "README.md"
    old = path.read_text()
    new = render(old)
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if old == new else "README.md: its tables differ from the results; run python bench/readme.py"
        )
    path.write_text(new)
