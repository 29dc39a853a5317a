"""`steelyard demo`: the main job on a small scale, packed against balanced, with pictures and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from steelyard.cli.flags import Flatten, Switch, parse_flags
from steelyard.cli.output import command_output
from steelyard.train.demo_config import DemoConfig, demo_files

DESCRIPTION = """\
Trains a small Llama-type model on real documents, the installed Python's own source files, on this machine: no
download, no GPU. Every batch runs twice from the same parameters, as packed and with core attention balanced over the
processes, and the two are compared. Writes two pictures, a Perfetto trace and all figures."""


@dataclass(frozen=True)
class DemoFlags:
    demo: Annotated[DemoConfig, Flatten] = field(default_factory=DemoConfig)
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(DemoFlags, argv, prog="steelyard demo", description=DESCRIPTION)
    from steelyard.train.demo_worker import run_demo  # torch: not for --help or a wrong flag

    with command_output(as_json=flags.json) as output:
        record = run_demo(flags.demo, debug=debug)
        pictures = _draw(record, Path(flags.demo.out_dir))
        _print(output.console, record["figures"], pictures)
        output.result(record["figures"])
    return 0


def _draw(record: dict[str, Any], folder: Path) -> list[tuple[str, Path]]:
    """The pictures, from what the run wrote; returns what to show to whom."""
    from steelyard.observe.trace import read_perfetto
    from steelyard.plots.timeline import step_timeline
    from steelyard.plots.work import work_per_rank

    files = demo_files(folder)
    panels = {way: read_perfetto(path) for way, path in files.traces.items()}
    packed, balanced = (record["runs"][way][record["typical_run"]] for way in ("packed", "balanced"))
    note = (
        f"Batch {packed['batch']} of {record['figures']['steps']}, the one whose imbalance is nearest to the mean. "
        f"{record['figures']['ranks']} processes on one machine, measured."
    )
    work_per_rank(files.work, packed["work"], balanced["work"], share=balanced["share"], note=note)
    step_timeline(files.timeline, panels, note=note)
    return [
        ("attention work of every process, before and after", files.work),
        ("timeline of one step, packed above, balanced below", files.timeline),
        ("the same step in Perfetto (open it at https://ui.perfetto.dev)", files.traces["balanced"]),
        ("all figures", files.record),
    ]


def _print(console: Console, figures: dict[str, Any], pictures: Sequence[tuple[str, Path]]) -> None:
    table = Table(title="every batch both ways, from the same parameters", title_justify="left")
    table.add_column("")
    for way in ("packed", "balanced"):
        table.add_column(way, justify="right")
    packed, balanced = figures["packed"], figures["balanced"]
    table.add_row("tokens per second", f"{packed['tokens_per_s']:.0f}", f"{balanced['tokens_per_s']:.0f}")
    table.add_row("idle share of the processes", f"{packed['idle_share']:.1%}", f"{balanced['idle_share']:.1%}")
    ratio = "work_max_over_mean"
    table.add_row("attention work, busiest / its share", f"{packed[ratio]:.2f}", f"{balanced[ratio]:.2f}")
    table.add_row("loss at the end", f"{packed['loss_last']:.4f}", f"{balanced['loss_last']:.4f}")
    console.print(table)
    console.print(
        f"speed-up [bold]{figures['speedup']:.2f}×[/bold], predicted from the work alone "
        f"{figures['speedup_predicted']:.2f}×; the same function: losses differ by at most "
        f"{figures['loss_max_abs_diff']:.1e}, gradients by {figures['grad_max_rel_diff']:.1e} of their largest value."
    )
    for what, path in pictures:
        console.print(f"  {path}  {what}", markup=False)
