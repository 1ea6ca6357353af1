"""The command `locks`: thin, each command calls one function and prints what it returns."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from locks.format import SummaryFormat
from locks.models import SetupError
from locks.pages import budget_pages

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decode long contexts from compact summaries of the keys' pages.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Budget = Annotated[
    int, typer.Option(help="Tokens that a KV head attends to at a step, a multiple of the page.")
]


@contextlib.contextmanager
def _mistakes(*kinds: type[Exception]) -> Iterator[None]:
    """Ends the command with one line for what its user can mend; other errors keep their traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("locks"):
            raise
        _fail(f"not installed: {error.name}; pip install 'locks-attention[demo]'")
    except ImportError as error:
        # locks.hf says which version it needs.
        if "pip install" not in str(error):
            raise
        _fail(str(error))
    except (SetupError, *kinds) as error:
        _fail(" ".join(str(error).split()))


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


@app.command(epilog="Example: locks doctor --json")
def doctor(as_json: Json = False) -> None:
    """Versions, device, which implementation would run, what is missing and the command that fixes it.

    Exits with 1 where the library itself cannot run.
    """
    from locks.doctor import report

    with Console(stderr=True).status("running one decode step"):
        found = report()
    if as_json:
        _print_json(found)
    else:
        _show_report(found)
    raise typer.Exit(0 if found["ok"] else 1)


def _show_report(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, version in found["versions"].items():
        table.add_row(name, version or "not installed")
    device = found["device"]
    table.add_row("device", ", ".join(f"{name} {value}" for name, value in device.items()))
    table.add_row("runs", {"triton": "Triton kernels", "torch": "plain PyTorch"}[found["impl"]])
    if found["vllm"]:
        table.add_row("vLLM plugin", "loads" if found["vllm"]["loads"] else found["vllm"]["reason"])
    if found["selftest"]:
        table.add_row(
            "self-test", f"a decode step is within {found['selftest']['max_error']:.1e} of dense attention"
        )
    console.print(table)
    for problem in found["problems"]:
        console.print(
            f"\n{problem['what']}\n  needed for: {problem['needed_for']}\n  fix: {problem['fix']}",
            markup=False,
        )
    if not found["problems"]:
        console.print("\nNothing is missing.")


@app.command(epilog="Example: locks demo --seed 1 --tokens 8000 --budget 128")
def demo(
    seed: Annotated[int, typer.Option(help="Draws the needles, their places and the prose.")] = 0,
    tokens: Annotated[int, typer.Option(help="Length of the context, about.")] = 4000,
    budget: Budget = 256,
    out: Annotated[Path, typer.Option(help="Directory for demo.json and demo.png.")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Eight needles in real prose, answered by a small model with dense attention and with page summaries."""
    with _mistakes(ValueError):
        budget_pages(budget, SummaryFormat().page)
        from locks import demo as demonstration

        prepared = demonstration.prepare(seed=seed, tokens=tokens, budget=budget)
    with _mistakes(OSError):
        result = demonstration.run(prepared, out)
    if as_json:
        _print_json(result)
    else:
        Console().print(demonstration.table(result))
        typer.echo(f"{out / 'demo.json'}\n{out / 'demo.png'}")


@app.command(epilog="Example: locks generate prompt.txt --budget 512 --compare dense")
def generate(
    prompt_file: Annotated[
        Path | None, typer.Argument(help="A text file with the prompt.", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself, in place of a file.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A model directory or a .gguf file; SmolLM2-135M-Instruct where none is given."),
    ] = None,
    budget: Budget = 512,
    rank: Annotated[int, typer.Option(help="Rank of a page's summary.")] = 4,
    page: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 128,
    compare: Annotated[
        Literal["dense"] | None, typer.Option(help="Generate with dense attention too.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Put the prompt into the model's chat template, if it has one.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Text that a local model generates greedily while it decodes with page summaries."""
    with _mistakes(ValueError):
        fmt = SummaryFormat(page=page, rank=rank)
        budget_pages(budget, page)
    text = _prompt(prompt_file, prompt)
    with _mistakes(ValueError, TypeError, NotImplementedError):
        from locks import generation

        language_model, tokenizer = generation.load(model)
        ids = generation.encode(tokenizer, text, chat=chat)
        generation.check(language_model, ids, max_new_tokens)
        result = generation.run(
            language_model,
            tokenizer,
            ids,
            fmt=fmt,
            budget=budget,
            max_new_tokens=max_new_tokens,
            dense=compare == "dense",
        )
    if as_json:
        _print_json(result)
    else:
        _show_texts(result)


@app.command(
    "eval", epilog="Example: locks eval ruler --selector locks-r8,quest --budgets 64,128,full --lengths 4096"
)
def evaluate(
    task: Annotated[
        str,
        typer.Argument(
            help="ruler, needles, perplexity, longgen, longbench, math500, aime or infinitebench."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="A model directory or a .gguf file; SmolLM2-135M-Instruct where none is given."),
    ] = None,
    selector: Annotated[
        str,
        typer.Option(
            help="By commas: locks, locks-r8, locks-r4c8, locks-r2+8@18-20, oracle, quest, shared-r4, mean, arkvale, "
            "random, streaming; evictors: snapkv, h2o, rkv."
        ),
    ] = "locks,oracle,quest",
    budgets: Annotated[
        str, typer.Option(help="Tokens a KV head attends to, by commas; full for dense attention.")
    ] = "64,128,512,2048,full",
    lengths: Annotated[
        str,
        typer.Option(
            help="Tokens of a prompt and its answer, or that longgen decodes, by commas: 4096, 16k.",
            show_default="4096",
        ),
    ] = "",
    tasks: Annotated[
        str, typer.Option(help="Some of the family's tasks, by commas; all where none is named.")
    ] = "",
    examples: Annotated[
        int | None, typer.Option(help="Examples of a task, at most.", show_default="the family's own")
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers drawn for a problem, in math500 and aime.")] = 4,
    seed: Annotated[int, typer.Option(help="Of whatever is drawn.")] = 42,
    data: Annotated[Path | None, typer.Option(help="The dataset's file or directory.")] = None,
    haystack: Annotated[Path | None, typer.Option(help="A text file of prose to hide things in.")] = None,
    squad: Annotated[Path | None, typer.Option(help="SQuAD 2.0's dev-v2.0.json, for RULER's qa_1.")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's dev JSON, for RULER's qa_2.")] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="What runs the model: hf, or vllm with the plugin (generated answers, locks only)."
        ),
    ] = "hf",
    page: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    batch: Annotated[int, typer.Option(help="Answers at once.")] = 1,
    tail: Annotated[int, typer.Option(help="Last tokens of a prompt that are read sparsely too.")] = 1,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template, if it has one.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the log and the summary.", show_default="out/eval-TASK")
    ] = None,
    as_json: Json = False,
) -> None:
    """A public task under every selector and budget, with intervals; a run that was killed goes on where it was.

    Exits with 1 where answers are missing at the end.
    """
    with _mistakes(ValueError):
        from locks.quality import command, families, summary

        options = families.Options(
            tasks=[name.strip() for name in tasks.split(",") if name.strip()],
            lengths=command.parse_lengths(lengths),
            count=examples,
            seed=seed,
            samples=samples,
            chat=chat,
            data=data,
            haystack=haystack,
            squad=squad,
            hotpotqa=hotpotqa,
        )
        request = command.check(
            task,
            options,
            selectors=selector,
            budgets=budgets,
            page=page,
            model=model,
            engine=engine,
            batch=batch,
            tail=tail,
            out=Path("out") / f"eval-{task}" if out is None else out,
        )
    with _mistakes(ValueError, TypeError, NotImplementedError, OSError):
        rows, missing = command.execute(request)
    if as_json:
        _print_json({"rows": rows, "missing": missing})
    else:
        Console().print(summary.table(rows))
        typer.echo(f"{request.out / 'summary.json'}")
    if missing:
        typer.echo(f"cut short: {missing} answers are missing; the same command goes on with them", err=True)
        raise typer.Exit(1)


# What lm-eval knows is not repeated here: all but --help goes on to it.
@app.command(
    "lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS OF lm-eval run]",
    epilog="Example: locks lm-eval --model_args pretrained=PATH,selector=locks-r8,budget=512 --tasks gsm8k",
)
def lm_eval(context: typer.Context) -> None:
    """A task of lm-eval under a selector or an evictor: `lm-eval run --model locks`, and whatever follows.

    --model_args takes pretrained, selector, budget, page, rank, tail, dtype and device, by commas.

    Of lm-eval's own options `locks lm-eval -- --help` tells: --limit, --include_path, --output_path, ...
    """
    with _mistakes(ValueError):
        from locks.quality import harness

        harness.run(context.args)


def _prompt(file: Path | None, text: str | None) -> str:
    with _mistakes(OSError, UnicodeDecodeError):
        if file is not None and text is None:
            return file.read_text(encoding="utf-8")
    if text is None or file is not None:
        _fail("prompt: expected a prompt file or --prompt, one of the two")
    return text


def _show_texts(result: dict[str, Any]) -> None:
    budget = result["settings"]["budget"]
    for name, run in result["runs"].items():
        title = f"{budget} tokens a KV head" if name == "locks" else "dense attention"
        typer.echo(f"--- {title}: {len(run['tokens'])} tokens in {run['seconds']:.1f} s\n{run['text']}\n")
    if "dense" in result["runs"]:
        other = result["first_difference"]
        typer.echo(f"--- first different token: {_difference(other)}" if other else "--- both are the same")
    stats = result["runs"]["locks"]["stats"]
    if stats["dense_bytes"]:
        summaries, pages, full = (stats[f"{kind}_bytes"] / 1e6 for kind in ("summary", "page", "dense"))
        typer.echo(
            f"--- {stats['sparse_rows']} of {stats['decode_rows']} decode rows served sparsely; "
            f"read {summaries:.1f} MB of summaries and {pages:.1f} MB of pages, "
            f"{100 * (summaries + pages) / full:.1f} % of dense attention's {full:.1f} MB"
        )


def _difference(other: dict[str, Any]) -> str:
    return f"number {other['token']}, {other['locks']!r} instead of {other['dense']!r}"
