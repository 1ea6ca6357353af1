"""Writes the README's tables from the code and the committed results: python bench/readme.py [--check]"""

from __future__ import annotations

import functools
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


def _digits(row: dict[str, Any]) -> str:
    """A share of digits right and its interval."""
    return f"{row['digits_right']:.3f} ({'-'.join(f'{end:.2f}' for end in row['digits_right_95'])})"


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


def needles() -> str:
    """Digits right and KL by selector and budget."""
    result = json.loads((ROOT / "bench/results/needles.json").read_text())
    dense = next(row for row in result["rows"] if row["budget"] is None)
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["budget"] is not None:
            cells.setdefault(f"{row['selector']} {row['format']}".strip(), {})[row["budget"]] = row
    budgets = sorted({budget for found in cells.values() for budget in found})
    rows = []
    for name, found in cells.items():
        digits = [_digits(found[b]) for b in budgets]
        rows.append([name, *digits, *(f"{found[b]['kl']:.3f}" for b in budgets)])
    header = ["selector", *(f"{b} tokens" for b in budgets), *(f"KL at {b}" for b in budgets)]
    note = (
        f"{result['model']}, {dense['questions']} questions of four digits; dense attention has "
        f"{dense['digits_right']:.3f} right. 95 % bootstrap intervals over questions; "
        f"`bench/results/needles.json`, by `{result['command']}` on {result['device']['name']}, {result['dtype']}."
    )
    return _table(header, rows) + "\n\n" + note


def attention() -> str:
    """Device time of a decode step's attention against the fastest dense attention of the run."""
    result = json.loads((ROOT / "bench/results/h200/attention.json").read_text())
    shapes: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    dense: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["rows"]:
        key = (row["model"], row["T"], row["B"], row.get("lengths", "equal"))
        if row["op"] == "dense":
            dense[key] = min(dense.get(key, row), row, key=lambda one: one["p50_us"])
        elif row["R"] is not None:
            shapes.setdefault((*key, row["R"], row["layout"]), {})[row["op"], row["impl"]] = row
    rows = []
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))

    def place(shape: tuple[Any, ...]) -> tuple[Any, ...]:
        model, tokens, batch, lengths, rank, layout = shape
        return models.index(model), batch, lengths, tokens, layout != "block 64, shuffled", -rank

    for *key, rank, layout in sorted(shapes, key=place):
        found = shapes[*key, rank, layout]
        chain = found.get(("chain", "locks"))
        if chain is None:
            continue
        fastest = dense[tuple(key)]
        stages = [
            found.get(("score", "hopper"), found["score", "general"]),
            found["select", "locks"],
            found["attend", "locks"],
        ]
        rows.append(
            [
                f"{key[0]}, {key[1] // 1024}K, batch {key[2]}"
                + ("" if key[3] == "equal" else f" ({key[3]})"),
                str(rank),
                layout.split(",")[0],
                f"{fastest['p50_us']:.0f} ({fastest['impl']})",
                *(f"{stage['p50_us']:.1f}" for stage in stages),
                f"{chain['p50_us']:.1f}",
                f"{fastest['p50_us'] / chain['p50_us']:.2f}x",
            ]
        )
    header = ["shape", "rank", "layout", "dense", "score", "select", "attend", "step", "dense / step"]
    machine = result["rows"][0]
    commits = ", ".join(sorted({row["commit"][:7] for row in result["rows"]}))
    note = (
        f"µs of device time a layer, median of graph replays, budget 2,048 tokens; {machine['GPU']}, reads at "
        f"{result['read_gb_per_s'] / 1000:.2f} TB/s; torch {machine['torch']}, triton {machine['triton']}, commit "
        f"{commits}; `bench/results/h200/attention.json`, by `make bench`. Where the budget covers the context nothing "
        "is scored in a step, and `score` fills the masses behind short rows, which a step does not."
    )
    return _table(header, rows) + "\n\n" + note


def vllm() -> str:
    """Time per output token in vLLM, by model, context and batch."""
    result = json.loads((ROOT / "bench/results/h200/vllm_tpot.json").read_text())
    rows_of = [row for row in result["rows"] if row["measure"] == "tpot"]

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["tensor_parallel"], row["context"], row["batch"]

    dense = {key(row): row for row in rows_of if row["impl"] == "dense"}
    rows = []
    for row in sorted(rows_of, key=lambda row: (*key(row), row["rank"] or 0)):
        if row["impl"] == "locks":
            base = dense[key(row)]
            rows.append(
                [
                    row["model"] + (f", {row['quantization']}" if row.get("quantization") else ""),
                    str(row["tensor_parallel"]),
                    f"{row['context'] // 1024}K",
                    str(row["batch"]),
                    str(row["rank"]),
                    *(
                        f"{x['tpot_ms']:.2f} ({x['tpot_ms_min']:.2f}-{x['tpot_ms_max']:.2f})"
                        for x in (base, row)
                    ),
                    f"{base['tpot_ms'] / row['tpot_ms']:.2f}x"
                    + ("" if base["commit"] == row["commit"] else " *"),
                ]
            )
    header = ["model", "GPUs", "context", "batch", "rank", "dense, ms", "LOCKS, ms", "dense / LOCKS"]
    one = min(rows_of, key=lambda row: row["samples"])
    commits = ", ".join(sorted({row["commit"][:7] for row in rows_of}))
    note = (
        f"Time per output token, median of {one['samples']} or more (least-most); the model's shape, dummy weights, "
        f"{one['gpu']}, vLLM {one['versions']['vllm']}; `bench/results/h200/vllm_tpot.json`, by "
        "`PYTHONPATH=. python bench/vllm_tpot.py --batch 1 4` (two GPUs: `--tensor-parallel 2`). A sample is the "
        "difference of two requests over 64 tokens: where they spread by milliseconds, at 512K and 1024K, the ratio is "
        f"as rough. Commits {commits}; *: dense and LOCKS are of different runs."
    )
    return _table(header, rows) + "\n\n" + note + "\n\n" + _first_tokens(result["rows"])


def _first_tokens(rows_of: list[dict[str, Any]]) -> str:
    rows_of = [row for row in rows_of if row["measure"] == "ttft"]
    dense = {(row["model"], row["context"]): row for row in rows_of if row["impl"] == "dense"}
    rows = []
    for row in rows_of:
        if row["impl"] == "locks":
            base = dense[row["model"], row["context"]]["ttft_ms"]
            rows.append(
                [
                    row["model"],
                    f"{row['context'] // 1024}K",
                    str(row["rank"]),
                    f"{base:.0f}",
                    f"{row['ttft_ms']:.0f} ({row['ttft_ms_min']:.0f}-{row['ttft_ms_max']:.0f})",
                    f"{100 * (row['ttft_ms'] / base - 1):+.1f} %",
                    f"{1000 * row['seal_s_a_request']:.0f}",
                ]
            )
    header = ["model", "context", "rank", "dense, ms", "LOCKS, ms", "difference", "of it summaries, ms"]
    note = (
        f"Time to the first token of a real prefill, all summaries made, median of {rows_of[0]['samples']} "
        "(least-most); by `--ttft --contexts 16384 131072 --ranks 8 --rounds 1 --repeats 2` of the same program."
    )
    return _table(header, rows) + "\n\n" + note


def vllm_needles() -> str:
    """Digits right in vLLM by rank and budget."""
    rows_of = json.loads((ROOT / "bench/results/h200/vllm_needles.json").read_text())["rows"]
    found = {(row["tokens"], row["rank"], row["budget"]): row for row in rows_of}
    budgets = sorted({row["budget"] for row in rows_of if row["budget"]})
    names: dict[Any, str] = {row["rank"]: f"rank {row['rank']}" for row in rows_of if row["rank"]}
    best = sys.maxsize
    names[best] = "exact oracle"
    for tokens in sorted({row["tokens"] for row in rows_of}):
        path = ROOT / f"bench/results/h200/oracle_needles_{tokens}.json"
        for row in json.loads(path.read_text())["rows"]:
            if row["selector"] == "oracle":
                found[tokens, best, row["budget"]] = row
    rows = [
        [
            f"{tokens:,}",
            _digits(found[tokens, None, None]),
            name,
            *(_digits(found[tokens, rank, budget]) for budget in budgets),
        ]
        for tokens in sorted({row["tokens"] for row in rows_of})
        for rank, name in sorted(names.items())
    ]
    header = ["context", "full attention", "", *(f"{budget} tokens" for budget in budgets)]
    one = rows_of[0]
    note = (
        f"Digits right of eight needles, {one['questions']} questions a context length, question and answer decoded "
        f"sparsely; {one['model']}, {one['gpu']}, vLLM {one['versions']['vllm']}, runner {one['runner']}; "
        "`bench/results/h200/vllm_needles.json`, by `PYTHONPATH=. python bench/vllm_needles.py --parallel 6`. The "
        "oracle answered the same questions in transformers (`bench/results/h200/oracle_needles_*.json`, by `python "
        "bench/needles.py --only oracle --tokens 4000 --budgets 128,256,512,1024`)."
    )
    return _table(header, rows) + "\n\n" + note


def vllm_serving() -> str:
    """What parity and the mixed load came to."""
    rows_of = json.loads((ROOT / "bench/results/h200/vllm_serving.json").read_text())["rows"]

    def lead(compared: dict[str, Any]) -> str:
        return f"{max((one['lead_nats'] for one in compared['first_differences']), default=0):g}"

    one = next(row for row in rows_of if row["measure"] == "parity")
    own = one["dense_reordered"]
    said = (
        f"Greedy answers of {one['answer_tokens']} tokens under a budget that covers the context: {one['equal']} of "
        f"{one['compared']} prompts are answered as by vLLM's own attention; the others part where its first choice "
        f"leads by {lead(one)} nats at most (bfloat16). Its own answers to the same prompts in another order are alike "
        f"in {own['equal']} of {own['compared']}, and part at leads of up to {lead(own)}."
    )
    loads = {
        row["batch_invariant"]: row for row in rows_of if (row["measure"], row["impl"]) == ("mixed", "locks")
    }
    load, still = loads[False], loads[True]
    solo = load["solo"]

    def served(load: dict[str, Any]) -> str:
        return (
            f"{load['finished']:,} requests finished, {load['aborted']:,} were aborted and {load['preempted']:,} "
            f"preempted; {load['not_finite']} log-probabilities were no finite number; {load['sparse_rows']:,} decode "
            f"rows were sparse, {load['eligible_rows']:,} of them, counted from the answers, longer than the budget"
        )

    under = (
        f"{load['minutes']:.1f} minutes of mixed load (shared prefixes, preemption, aborts; budget {load['budget']}, "
        f"rank {load['rank']}): {served(load)} (steps that were under way when a request ended give no answer). Of "
        f"{solo['compared']} requests served again alone {solo['equal']} were answered alike; where one parted, vLLM's "
        f"first choice led by {lead(solo)} nats at most."
        + ("" if load["whole"] else " The run was cut while it served requests alone.")
    )
    alike = (
        f"The same for {still['minutes']:.1f} minutes with `VLLM_BATCH_INVARIANT=1`: {served(still)}. Of "
        f"{still['solo']['compared']} requests served again alone {still['solo']['equal']} were answered alike, to the "
        "token."
    )
    ahead = next(row for row in rows_of if row["measure"] == "speculation")
    lone, same = ahead["solo"], ahead["reordered"]
    steps = ahead["steps"]["one by one"]
    drafted = (
        f"With {ahead['drafts']} tokens drafted a step from the text's own n-grams (budget {ahead['budget']}, rank "
        f"{ahead['rank']}; {ahead['accepted']:,} of {ahead['drafted']:,} accepted) {ahead['equal']} of "
        f"{ahead['compared']} answers of {ahead['answer_tokens']} tokens are those without drafts; where one parts, "
        f"its first choice led by {lead(ahead)} nats at most. Without drafts, in another order, {same['equal']} are. "
        f"One by one {lone['equal']} of {lone['compared']} are, and {steps['FULL 5']} of {sum(steps.values())} steps "
        f"replayed a graph of the whole step with five rows a request. {ahead['sparse_rows']:,} of "
        f"{ahead['decode_rows']:,} decode rows were sparse."
    )
    note = (
        f"{one['model']}, {one['gpu']}, vLLM {one['versions']['vllm']}; `bench/results/h200/vllm_serving.json`, by "
        "`PYTHONPATH=. python bench/vllm_serving.py parity speculation mixed`."
    )
    return "\n\n".join((said, under, alike, drafted, note))


def _result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"bench/results/quality/{name}.json").read_text())


def _paired(row: dict[str, Any], other: str, digits: int = 1, unit: str = "") -> str:
    """What a row has more than another, and its interval; empty where nothing pairs them."""
    if f"minus_{other}" not in row:
        return ""
    low, high = (f"{row[f'minus_{other}_{end}']:.{digits}f}" for end in ("low", "high"))
    return f", {row[f'minus_{other}']:+.{digits}f}{unit} ({low} to {high})"


def _by_budget(rows: list[dict[str, Any]], other: str, count: int, digits: int = 1, unit: str = "") -> str:
    """A line a selector, a column a budget; n where there are not `count` examples."""
    found = {(row["selector"], row["budget"]): row for row in rows if row["budget"]}
    budgets = sorted({budget for _, budget in found})

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "not run"
        said = f"{row['score']:.{digits}f}" + ("" if row["n"] == count else f" (n {row['n']})")
        return said + _paired(row, other, digits, unit)

    lines = [
        [name, *(cell(found.get((name, budget))) for budget in budgets)]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return _table(["", *(f"{budget} tokens" for budget in budgets)], lines)


def ruler(name: str = "ruler", other: str = "oracle") -> str:
    """Points on RULER by selector and budget, with what pairs them to the oracle or to full attention."""
    result = _result(name)
    means = [row for row in result["rows"] if row["task"] == "mean"]
    # Of one task alone there is no mean.
    means = means or [row for row in result["rows"] if row["task"] in result["learnt"]]
    full, recipe = next(row for row in means if row["selector"] == "full"), result["recipe"]
    named = full.get("tasks", [full["task"]])
    tasks = {row["task"]: row for row in result["rows"] if row["selector"] == "full"}
    examples = (
        f"{full['n']}" + (f" of {full['expected']}" if full["n"] < full["expected"] else "") + " examples"
    )
    counts = sorted({row["n"] for name, row in tasks.items() if name in named})
    each = " to ".join(str(n) for n in (counts[:1] + counts[-1:])[: len(counts)])
    left = ", ".join(f"{name} ({tasks[name]['score']:.1f})" for name in result["left_out"])
    partner = "the oracle" if other == "oracle" else "full attention"
    of = f"mean of {len(named)} tasks" if len(named) > 1 else named[0]
    note = (
        f"Points, {of} at {full['length']:,} tokens, and the paired difference from "
        f"{partner}; full attention {full['score']:.1f}; {examples}, {each} a task; "
        f"left out, with full attention's points: {left or 'none'}. {recipe['seconds'] / 60:.1f} minutes of training "
        f"on one {result['device']['name']} (D = {recipe['head_dim']}, G = {recipe['group']}, {recipe['layers']} "
        f"layers){_rope(result)}; `bench/results/quality/{name}.json`, by `{result['command']}`."
    )
    return _by_budget(means, other, full["n"]) + "\n\n" + note


def _rope(result: dict[str, Any]) -> str:
    """How the model came to be used beyond the length that it was trained at, if it was."""
    rope = result.get("rope")
    if rope is None:
        return ""
    by = (
        f"YaRN's factor {rope['factor']:g}"
        if rope["rope_type"] == "yarn"
        else f"theta {rope['rope_theta']:,.0f}"
    )
    return f" at {result['recipe']['length']:,} tokens, its rotary positions given {by} without training"


def reading(name: str) -> str:
    """Perplexity, or the share of noted numbers' digits, by selector and budget, with what pairs them to full."""
    result = _result(name)
    full = next(row for row in result["rows"] if row["selector"] == "full")
    forced = full["unit"] == "perplexity"
    digits = 2 if forced else 1
    what = (
        f"Perplexity of the last 256 of {full['length']:,} tokens of prose, each read in a sparse step"
        if forced
        else "Points: the share right of the digits of eight numbers, noted in the first quarter of "
        f"{full['length']:,} decoded tokens"
    )
    note = (
        f"{what}, and the paired difference from full attention ({full['score']:.{digits}f}"
        f"{'; in percent' if forced else ''}); {result['model']}, {full['n']} examples; {result['device']['name']}, "
        f"{result['dtype']}{_cut(result['cut_short'])}; `bench/results/quality/{name}.json`, by `{result['command']}`."
    )
    return _by_budget(result["rows"], "full", full["n"], digits, " %" if forced else "") + "\n\n" + note


def _cut(lines: list[dict[str, Any]]) -> str:
    """Which lines of a result that was cut have no or not all examples."""
    if not lines:
        return ""
    said: dict[str, list[str]] = {}
    for line in lines:
        part = f"{line['budget'] or 'all'}" + (f" ({line['n']} examples)" if line["n"] else "")
        said.setdefault(line["selector"], []).append(part)
    return "; the run was cut before " + ", ".join(
        f"{name} at {' and '.join(budgets)} tokens" for name, budgets in said.items()
    )


TABLES = {
    "records": records,
    "demo": demo,
    "needles": needles,
    "attention": attention,
    "vllm": vllm,
    "vllm_needles": vllm_needles,
    "vllm_serving": vllm_serving,
    "ruler": ruler,
    "ruler_by_layer": functools.partial(ruler, "ruler_by_layer"),
    "ruler_long": functools.partial(ruler, "ruler_long", "full"),
    "perplexity": functools.partial(reading, "perplexity"),
    "longgen": functools.partial(reading, "longgen"),
}


def render(text: str) -> str:
    """The README's text with every table made anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        # A table that has no place in the text needs no result either.
        text = pattern.sub(lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text)
    return text


if __name__ == "__main__":
    path = ROOT / "README.md"
    old = path.read_text()
    new = render(old)
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(f"readme.py: expected nothing or --check, got {' '.join(sys.argv[1:])}")
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if old == new else "README.md: its tables differ from the results; run python bench/readme.py"
        )
    path.write_text(new)
