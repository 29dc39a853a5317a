"""`steelyard data stats PATH`: how long the documents are, and what that would cost in training."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from steelyard.cli.flags import Switch, parse_flags
from steelyard.cli.output import command_output
from steelyard.data import failures
from steelyard.data.config import Format, SourceConfig
from steelyard.data.failures import SkipReport
from steelyard.data.lengths import DEFAULT_RANKS, DataStatistics, ScanProgress, data_statistics
from steelyard.domain.units import format_bytes, format_count
from steelyard.errors import UsageError
from steelyard.settings import nearest_sibling

DESCRIPTION = """\
Read the documents once and show how long they are, and the imbalance of core-attention work that they would cause if
each rank computed its own packed chunk. Lengths are in tokens, work in causal (query, key) pairs."""

QUIET_S = 2.0
BAR_WIDTH = 16


@dataclass(frozen=True)
class DataStatsFlags:
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A folder, file or glob pattern of text, code, JSONL (.gz, .zst), Parquet or a saved `datasets` folder."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face `tokenizer.json` or the folder of one."""
    chunk_tokens: int = 8192
    """Tokens of a chunk: what one rank computes on at a time."""
    ranks: tuple[int, ...] = DEFAULT_RANKS
    """Numbers of ranks for which the imbalance is given."""
    format: Format = "auto"
    """Format of the documents; `auto`: by file name."""
    field: str = "text"
    """Field (JSONL) or column (Parquet, datasets) that holds the text."""
    suffixes: tuple[str, ...] = ()
    """File-name endings to read, for example `.py .md`; none: the usual ones of the format."""
    max_documents: int | None = None
    """Stop after this many documents; None: read all."""
    plot: Path | None = None
    """Draw the distribution into this file (.png, .svg or .pdf)."""
    out: Path | None = None
    """Write data-stats.png and data-stats.json into this folder."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(DataStatsFlags, argv, prog="steelyard data stats", description=DESCRIPTION)
    plot = flags.plot
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {plot}: expected a file that ends in .png, .svg or .pdf")
    if plot is not None and not plot.parent.is_dir():  # said now, not after a long scan
        raise UsageError(f"--plot {plot}: there is no folder {plot.parent}")
    source_path = Path(flags.path).expanduser()
    if not source_path.exists() and not any(c in flags.path for c in "*?["):
        raise UsageError(f"no file or folder {flags.path}{nearest_sibling(source_path)}")
    with command_output(as_json=flags.json) as output:
        with scan_progress() as progress, failures_said_once():
            statistics = data_statistics(
                SourceConfig(path=flags.path, format=flags.format, field=flags.field, suffixes=flags.suffixes),
                tokenizer=flags.tokenizer,
                chunk_tokens=flags.chunk_tokens,
                ranks=flags.ranks,
                max_documents=flags.max_documents,
                progress=progress,
            )
        print_statistics(output.console, statistics)
        written = _write(statistics, plot, flags.out)
        for path in written:
            output.console.print(f"wrote {escape(str(path))}", soft_wrap=True)
        output.result({**statistics.as_json(), "written": [str(path) for path in written]})
    return 0


def print_statistics(console: Console, statistics: DataStatistics) -> None:
    """The distribution as tables with bars of text."""
    plain = console.options.ascii_only
    above = statistics.token_share_above(statistics.chunk_tokens)
    lines = [
        f"[bold]{statistics.documents:,}[/] documents in {statistics.files:,} files, "
        f"{format_bytes(statistics.size_bytes)}, [bold]{statistics.tokens:,}[/] tokens "
        f"(tokenizer {escape(statistics.tokenizer)})",
        f"length in tokens: median {statistics.percentile(50):,}, mean {statistics.mean:,.0f}, "
        f"p90 {statistics.percentile(90):,}, p99 {statistics.percentile(99):,}, longest {statistics.max:,}",
        f"{above:.0%} of the tokens are in documents longer than a chunk of {statistics.chunk_tokens:,} tokens",
    ]
    if not statistics.complete:
        lines.append("[yellow]there are more documents: the scan stopped where it was told to[/]")
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print("\nDocuments and tokens by length", style="bold")
    console.print(_length_table(statistics, plain=plain))
    console.print("\nCore-attention work if each rank computes its own chunk", style="bold")
    console.print(_imbalance_table(statistics, plain=plain))
    console.print()
    print_left_out(console, statistics.skipped, statistics.ignored_files)


@contextlib.contextmanager
def failures_said_once() -> Iterator[None]:
    """No warning for each file that cannot be used: `print_left_out` is to say them all."""
    warnings = logging.getLogger(failures.__name__)
    level = warnings.level
    warnings.setLevel(logging.ERROR)
    try:
        yield
    finally:
        warnings.setLevel(level)


def print_left_out(console: Console, skipped: SkipReport, ignored_files: Mapping[str, int]) -> None:
    """Documents that could not be used, by reason, and files that were not read, by their ending."""
    for reason, count in skipped.counts.items():
        examples = "; ".join(skipped.examples.get(reason, ()))
        line = f"[yellow]left out[/] {count:,} {reason}" + (f", for example {escape(examples)}" if examples else "")
        console.print(line, soft_wrap=True)
    if ignored_files:
        most = sorted(ignored_files.items(), key=lambda item: -item[1])[:8]
        names = ", ".join(f"{suffix or 'no ending'} ({count:,})" for suffix, count in most)
        console.print(f"files of other kinds, not read: {escape(names)}; --suffixes chooses", soft_wrap=True)


def _length_table(statistics: DataStatistics, *, plain: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens", justify="right", no_wrap=True)
    for name in ("documents", "share of documents", "share of tokens"):
        table.add_column(name, justify="right" if name == "documents" else "left", no_wrap=True)
    most = max(max(b.documents / statistics.documents, b.tokens / statistics.tokens) for b in statistics.bins)
    for b in statistics.bins:
        documents, tokens = b.documents / statistics.documents, b.tokens / statistics.tokens
        table.add_row(
            f"{b.low:,} … {b.high - 1:,}" if b.high > b.low + 1 else f"{b.low:,}",
            f"{b.documents:,}",
            f"{documents:6.1%} [cyan]{text_bar(documents / most, plain=plain)}[/]",
            f"{tokens:6.1%} [blue]{text_bar(tokens / most, plain=plain)}[/]",
        )
    return table


def _imbalance_table(statistics: DataStatistics, *, plain: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("ranks", "busiest / mean", "95th percentile"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("attention time spent waiting", no_wrap=True)
    for i in statistics.imbalance:
        waiting = 1 - 1 / i.max_over_mean
        table.add_row(
            f"{i.ranks}",
            f"{i.max_over_mean:.2f}",
            f"{i.max_over_mean_p95:.2f}",
            f"{waiting:4.0%} [red]{text_bar(waiting, plain=plain)}[/]",
        )
    return table


def text_bar(share: float, *, plain: bool = False) -> str:
    """A bar of BAR_WIDTH characters for 1, to an eighth of a character; `plain`: for terminals without blocks."""
    eighths = round(min(max(share, 0.0), 1.0) * BAR_WIDTH * 8)
    if plain:
        return "#" * round(eighths / 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


@contextlib.contextmanager
def scan_progress(
    *, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[ScanProgress], None]]:
    """What a scan calls as it goes on: shows a bar on stderr once it has taken `quiet_s`, and removes it at the end."""
    started_s = clock()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with contextlib.ExitStack() as stack:
        bars: list[Progress] = []

        def show(progress: ScanProgress) -> None:
            if clock() - started_s < quiet_s:
                return
            if not bars:
                bars.append(stack.enter_context(Progress(*columns, console=Console(file=sys.stderr), transient=True)))
                bars[0].add_task("reading")
            bars[0].update(
                bars[0].task_ids[0],
                total=progress.total_bytes,
                completed=progress.done_bytes,
                description=f"{format_count(progress.documents)} documents, {format_bytes(progress.done_bytes)}",
            )

        yield show


def _write(statistics: DataStatistics, plot: Path | None, out: Path | None) -> list[Path]:
    written: list[Path] = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "data-stats.json").write_text(json.dumps(statistics.as_json(), indent=2) + "\n", encoding="utf-8")
        written.append(out / "data-stats.json")
    pictures = [p for p in (plot, out / "data-stats.png" if out is not None else None) if p is not None]
    if pictures:
        from steelyard.plots.lengths import length_distribution  # matplotlib takes as long to import as a small scan

        for picture in pictures:
            length_distribution(picture, statistics)
            written.append(picture)
    return written
