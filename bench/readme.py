"""Writes the README's tables from the code and the committed results: python bench/readme.py [--check]"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

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


def demo() -> str:
    """The demo's rows."""
    result = json.loads((ROOT / "bench/results/demo.json").read_text())
    rows = [
        [
            row["selector"],
            f"{row['digits_right']} of {row['digits_total']}",
            f"{row['kl']:.3f}",
            f"{100 * row['resident_share']:.1f} %",
            f"{100 * row['bytes_per_step'] / row['dense_bytes_per_step']:.1f} %",
        ]
        for row in result["rows"]
    ]
    header = ["answer", "digits right", "KL to dense, nats", "resident, of K+V", "read a step, of dense"]
    settings = result["settings"]
    command = f"make demo SEED={settings['seed']} TOKENS={settings['tokens']} BUDGET={settings['budget']}"
    note = (
        f"{settings['model']}, {result['context_tokens']} tokens, {settings['budget']} attended to by each KV head, "
        f"all layers sparse; `bench/results/demo.json`, by `{command}` "
        f"on two CPU cores ({result['seconds']['total']:.0f} s)."
    )
    return _table(header, rows) + "\n\n" + note


TABLES = {"records": records, "demo": demo}


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
