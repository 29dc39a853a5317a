"""`steelyard advise CONFIG.toml`: the best configurations for a model, a cluster and a token budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from steelyard.cli.flags import Flatten, Switch, parse_flags
from steelyard.cli.output import command_output
from steelyard.domain.units import format_time
from steelyard.errors import UsageError
from steelyard.settings import load_toml
from steelyard.simulate.advise import advise, as_json, describe, reason_for
from steelyard.simulate.config import SimulateConfig

DESCRIPTION = """\
Try the configurations that a model, a cluster and a number of tokens per step allow, and show the best ones with their
reasons, and how many were refused and why. CONFIG.toml holds model, cluster and documents as for `simulate`; degrees
and micro-batches in it are ignored."""


@dataclass(frozen=True)
class AdviseFlags:
    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml")]
    """The configuration, a TOML file."""
    simulation: Annotated[SimulateConfig, Flatten]
    tokens_per_step: int | None = None
    """Tokens of a step; None: those of the configuration in the file."""
    limit: int = 1000
    """Most configurations to try."""
    processes: int | None = None
    """Worker processes; None: one per core."""
    plot: Path | None = None
    """Draw the map of configurations into this file (.png, .svg or .pdf)."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(AdviseFlags, argv, prog="steelyard advise", description=DESCRIPTION, default=_default(argv))
    config = flags.simulation
    if flags.limit < 1:
        raise UsageError(f"--limit {flags.limit}: expected at least 1")
    tokens = flags.tokens_per_step or config.scenario().tokens_per_step
    with command_output(as_json=flags.json) as output:
        advice = advise(config, tokens_per_step=tokens, limit=flags.limit, processes=flags.processes or _cores())
        table = Table(
            title=f"best of {len(advice.outcomes)} configurations, {tokens:,} tokens a step", title_justify="left"
        )
        for name in ("configuration", "step", "tokens/s per device", "memory", "why"):
            table.add_column(name, justify="right" if name in ("step", "tokens/s per device") else "left")
        for e in advice.best:
            table.add_row(
                describe(e.scenario), format_time(e.step_time_s), f"{e.tokens_per_s_per_device:,.0f}",
                f"{e.memory.expected / 2**30:.0f} GiB, {e.memory.verdict}", reason_for(e),
            )  # fmt: skip
        output.console.print(table)
        if not advice.best:
            output.console.print("no configuration fits; the nearest needs more devices or a smaller step")
        for reason, count in advice.refusals.items():
            output.console.print(f"refused: {count} × {reason}", markup=False)
        values = as_json(advice)
        if flags.plot is not None:
            from steelyard.plots.simulation import configuration_map  # matplotlib

            configuration_map(flags.plot, advice.outcomes)
            values["written"] = [str(flags.plot)]
        output.result(values)
    return 0 if advice.best else 1


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default(argv: Sequence[str]) -> AdviseFlags:
    if any(a in ("-h", "--help") for a in argv):
        return AdviseFlags(config=Path("CONFIG.toml"), simulation=SimulateConfig())
    if not argv or argv[0].startswith("-"):
        given = f"{argv[0]} stands first" if argv else "nothing is given"
        raise UsageError(f"{given}, expected a configuration file: steelyard advise CONFIG.toml [flags]")
    return AdviseFlags(config=Path(argv[0]), simulation=load_toml(SimulateConfig, argv[0]))
