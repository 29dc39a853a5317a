"""`steelyard advise CONFIG.toml`: the best configurations for a model, a cluster and a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from steelyard.cli.flags import Flatten, Switch, check_picture, parse_flags
from steelyard.cli.output import command_output
from steelyard.domain.units import format_bytes, format_time
from steelyard.errors import UsageError
from steelyard.settings import load_toml
from steelyard.simulate.advise import advise, as_json, describe, reason_for
from steelyard.simulate.config import SimulateConfig
from steelyard.simulate.worker_processes import cores

DESCRIPTION = """\
Search the configurations that a model, a cluster and a number of tokens per step allow, and show the best ones with
their reasons, and how many were refused and why. What by bounds cannot be among the best is not tried. CONFIG.toml is
one of `simulate`; degrees, policy, micro-batches, ping-pong, recomputation and sharding in it are not kept, since they
are what is searched. Mixed devices, slow ranks, shard_ranks and sites are refused."""


@dataclass(frozen=True)
class AdviseFlags:
    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml")]
    """The configuration, a TOML file."""
    simulation: Annotated[SimulateConfig, Flatten]
    tokens_per_step: int | None = None
    """Tokens of a step; None: those of the configuration in the file."""
    limit: int = 1000
    """Most configurations to try; if there are more that might be among the best, those that promise most are tried."""
    processes: int | None = None
    """Worker processes; None: one per core."""
    plot: Path | None = None
    """Draw the map of configurations into this file (.png, .svg or .pdf)."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(AdviseFlags, argv, prog="steelyard advise", description=DESCRIPTION, default=_default(argv))
    config = flags.simulation
    numbers = {"limit": flags.limit, "processes": flags.processes, "tokens-per-step": flags.tokens_per_step}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: expected at least 1")
    check_picture(flags.plot)
    tokens = flags.tokens_per_step or config.scenario().tokens_per_step
    with command_output(as_json=flags.json) as output:
        advice = advise(config, tokens_per_step=tokens, limit=flags.limit, processes=flags.processes or cores())
        say = partial(output.console.print, markup=False, soft_wrap=True)
        tried = len(advice.outcomes)
        say(f"{tokens:,} tokens a step, attention kernel {advice.kernel}")
        say(f"{tried:,} configuration{'s' * (tried != 1)} tried; {advice.fit:,} of them fit")
        if advice.slower:
            say(f"{advice.slower:,} more not tried: by bounds of their memory and time they cannot be among the best")
        if advice.untried:
            left = f"{advice.untried:,} more left out by --limit {flags.limit:,}"
            say(f"{left}: they promise less than those that were tried, but any of them may be better")
        for place, e in enumerate(advice.best, start=1):
            low, high = e.band_s
            say(
                f"{place}. {e.tokens_per_s_per_device:,.0f} tokens/s per device: {format_time(e.step_time_s)} a step "
                f"({format_time(low)} … {format_time(high)}), {e.memory.verdict}: {format_bytes(e.memory.expected)} of "
                f"{format_bytes(e.memory.capacity)}"
            )
            say(f"   {describe(e.scenario)}")
            say(f"   {reason_for(e)}")
        if not advice.best:
            say("no configuration fits; the nearest needs more devices or a smaller step")
        for suggestion in advice.next:
            say(f"try next: {suggestion.change} ({suggestion.reason})")
        for reason, count in advice.refusals.items():
            say(f"refused: {count:,} × {reason}")
        values = as_json(advice)
        try:
            if flags.plot is not None and not any(o.step_time_s for o in advice.outcomes):
                say("no map: no configuration could be estimated")
            elif flags.plot is not None:
                from steelyard.plots.simulation import configuration_map  # matplotlib

                note = f"{config.model.name} on {config.devices()} × {config.cluster.device}, {tokens:,} tokens a step"
                configuration_map(flags.plot, advice.outcomes, refusals=advice.refusals, note=note)
                values["written"] = [str(flags.plot)]
                say(f"wrote {flags.plot}")
        finally:  # what was found is told even where the disk has no room for a picture
            output.result(values)
    return 0 if advice.best else 1


def _default(argv: Sequence[str]) -> AdviseFlags:
    if any(a in ("-h", "--help") for a in argv):
        return AdviseFlags(config=Path("CONFIG.toml"), simulation=SimulateConfig())
    if not argv or argv[0].startswith("-"):
        given = f"{argv[0]} stands first" if argv else "nothing is given"
        raise UsageError(f"{given}, expected a configuration file: steelyard advise CONFIG.toml [flags]")
    return AdviseFlags(config=Path(argv[0]), simulation=load_toml(SimulateConfig, argv[0]))
