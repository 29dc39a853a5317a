"""`steelyard check`: whether a model, its data and its loss give the same numbers on any number of processes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from steelyard.check.report import CheckReport
from steelyard.check.request import CheckRequest, ModelSource
from steelyard.check.source import has_weights, model_source, read_documents
from steelyard.cli.flags import Switch, parse_flags
from steelyard.cli.output import command_output
from steelyard.data.config import Format, SourceConfig
from steelyard.domain.units import format_count
from steelyard.errors import UsageError

DESCRIPTION = """\
Check that a model trains on the same numbers whatever the number of processes: loss and every gradient on 1, 2, 3 and 4
CPU processes against the documents one by one, no document seeing another and no token a later one, a loss that is the
mean over all tokens, labels shifted inside each document, and even work. MODEL is the folder of a Transformers model,
or one of decoder, llama, mistral, mixtral, qwen2, qwen3, gemma2 and gemma3 (small, random); without it our own small
decoder is checked."""

Names = Literal["float32", "float64"]


@dataclass(frozen=True)
class CheckFlags:
    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Folder of a Transformers model, or a built-in name; none: our own small decoder."""
    module: str | None = None
    """Your own model: `pkg.mod:build` or `path/to/file.py:build`, a function that returns it (see docs/check.md)."""
    data: str | None = None
    """Your documents: a folder, file or glob pattern as for `steelyard data stats`; none: random tokens."""
    tokenizer: str | None = None
    """`bytes`, or a Hugging Face `tokenizer.json` or the folder of one; none: the model's own if its folder has one."""
    format: Format = "auto"
    """Format of the documents; `auto`: by file name."""
    field: str = "text"
    """Field (JSONL) or column (Parquet, datasets) that holds the text."""
    suffixes: tuple[str, ...] = ()
    """File-name endings to read, for example `.py .md`; none: the usual ones of the format."""
    documents: int = 12
    """How many documents of --data are used, in the order of training."""
    max_doc_tokens: int | None = None
    """Documents are cut to this many tokens; none: 128, or the model's context if that is shorter."""
    ranks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="INT [INT ...]")] = ("1", "2", "3", "4")
    """Numbers of processes, as `1 2 4` or `1,2,4`; 1 is always among them."""
    layers: int | None = None
    """Keep only this many layers of a Transformers model: a large one, checked in less time and memory."""
    dtype: Names = "float32"
    """`float64` tells rounding from a fault: rounding shrinks, a fault does not."""
    checkpointing: Switch = False
    """Run a Transformers model with activation checkpointing."""
    ping_pong: Switch = False
    """Run a Transformers model as two halves in turn (`PingPong`)."""
    tolerance: float = 0.05
    """No process's attention work above (1 + tolerance) × the mean."""
    seed: int = 0
    """Seed of random weights, documents and perturbations."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(CheckFlags, argv, prog="steelyard check", description=DESCRIPTION)
    request = _request(flags)
    from steelyard.check.run import run_checks  # torch: not for --help or a wrong flag

    with command_output(as_json=flags.json) as output:
        started_s = time.monotonic()
        with _progress() as progress:
            report = run_checks(request, progress=progress, debug=debug)
        _print(output.console, request, report, time.monotonic() - started_s)
        output.result(report.as_json())
    return 0 if report.passed else 1


def _request(flags: CheckFlags) -> CheckRequest:
    search_path = str(Path.cwd())
    source = model_source(flags.model, flags.module, flags.layers, search_path)
    documents = None
    if flags.data is not None:
        documents = read_documents(
            SourceConfig(flags.data, format=flags.format, field=flags.field, suffixes=flags.suffixes),
            source,
            tokenizer=flags.tokenizer,
            documents=flags.documents,
            max_tokens=flags.max_doc_tokens,
        )
    else:
        given = CheckFlags()
        for name in ("tokenizer", "format", "field", "suffixes", "documents", "max_doc_tokens"):
            if getattr(flags, name) != getattr(given, name):
                raise UsageError(f"--{name.replace('_', '-')} says how to read documents; give them with --data")
    return CheckRequest(
        source=source,
        documents=documents,
        ranks=_whole_numbers("--ranks", flags.ranks),
        tolerance=flags.tolerance,
        dtype=flags.dtype,
        seed=flags.seed,
        checkpointing=flags.checkpointing,
        ping_pong=flags.ping_pong,
        search_paths=(search_path,),
    )


def _whole_numbers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """Whole numbers, separated by commas, spaces or both."""
    parts = [part for value in values for part in value.split(",") if part]
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"{flag} {' '.join(values)}: expected whole numbers, such as 1 2 4 or 1,2,4")
    return tuple(int(part) for part in parts)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows the stages on stderr: a bar on a terminal, a line for each elsewhere."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda what, done, stages: print(f"checking {what} ({done + 1} of {stages})", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("checking {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("…")
        yield lambda what, done, stages: bar.update(task, description=what, completed=done, total=stages)


def _print(console: Console, request: CheckRequest, report: CheckReport, time_s: float) -> None:
    counts = ", ".join(map(str, request.ranks[:-1])) + " and " if len(request.ranks) > 1 else ""
    documents = "documents of random tokens" if request.documents is None else "documents"
    console.print(
        f"[bold]{escape(_model_text(request.source))}[/] ({format_count(report.parameters)} parameters), "
        f"{report.documents} {documents} ({report.tokens:,} tokens), on {counts}{request.ranks[-1]} CPU processes",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for name in ("check", "result"):
        table.add_column(name, no_wrap=True)
    for name in ("largest difference", "allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in report.results:
        verdict = "[green]pass[/]" if result.passed else "[bold red]FAIL[/]"
        table.add_row(result.name, verdict, f"{result.max_abs_diff:.1e}", f"{result.tolerance:.1e}")
    console.print(table)
    failed = [result for result in report.results if not result.passed]
    for result in failed:
        seen = f" {_sentence(result.finding)}" if result.finding else ""
        console.print(f"\n[bold red]{result.name}[/] ({escape(result.where)}):{escape(seen)} {escape(result.advice)}")
    if not failed:
        console.print(f"all {len(report.results)} checks passed in {time_s:.0f} s")
        return
    console.print(f"\n{len(failed)} of {len(report.results)} checks failed, after {time_s:.0f} s", style="bold")
    if request.dtype == "float32" and any(result.may_be_rounding for result in failed):
        console.print("--dtype float64 tells rounding from a fault: rounding shrinks, a fault does not.")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _model_text(source: ModelSource) -> str:
    if source.kind == "module":
        return f"{source.name}()"
    if source.kind == "folder":
        weights = "" if has_weights(Path(source.name)) else ", random weights (the folder holds none)"
        return f"{source.name}{weights}"
    return f"built-in {source.name}"
