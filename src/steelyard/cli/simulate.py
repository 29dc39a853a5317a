"""`steelyard simulate CONFIG.toml`: how fast, how much memory, what limits it and what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from steelyard.cli.flags import Flatten, Switch, check_folder, parse_flags
from steelyard.cli.output import command_output
from steelyard.domain.units import format_bytes, format_time
from steelyard.errors import UsageError
from steelyard.settings import load_toml
from steelyard.simulate.answer import CAUSES, as_json, dominant_cause, model_text, next_configurations
from steelyard.simulate.config import PolicyOrAll, SimulateConfig
from steelyard.simulate.documents import Documents
from steelyard.simulate.sites import simulate_sites
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.workloads import PolicyName, WorkloadCache

DESCRIPTION = """\
Predict the time of a training step, its memory and what limits it, on this machine and without the ones that will
train. CONFIG.toml holds the configuration; every flag below is one of its keys and replaces its value."""

POLICIES: tuple[PolicyName, ...] = ("packed", "wlb", "per_document_cp", "balanced")


@dataclass(frozen=True)
class SimulateFlags:
    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml")]
    """The configuration, a TOML file."""
    simulation: Annotated[SimulateConfig, Flatten]
    policy: PolicyOrAll | None = None
    """packed, wlb, per_document_cp, balanced, or all for a comparison; unset: `run.policy`."""
    plot: Path | None = None
    """Write pictures, an HTML report and a Perfetto trace into this folder."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(SimulateFlags, argv, prog="steelyard simulate", description=DESCRIPTION, default=_default(argv))
    config = flags.simulation
    check_folder(flags.plot)
    with command_output(as_json=flags.json) as output:
        chosen = config.run.policy if flags.policy in (None, "all") else flags.policy
        assert chosen != "all"
        scenario = config.scenario(policy=chosen)
        documents = config.stream(scenario)
        cache = WorkloadCache(documents)
        sampling = config.sampling
        estimate = simulate_step(scenario, cache, batches=sampling.batches, seed=sampling.seed)
        suggestions = next_configurations(estimate, cache, batches=sampling.batches, seed=sampling.seed)
        values = as_json(estimate, documents, suggestions)
        compared = _compared(config, cache) if flags.policy == "all" else {}
        if compared:
            values["policies"] = {
                name: as_json(e, documents) if isinstance(e, StepEstimate) else {"refused": e}
                for name, e in compared.items()
            }
        if config.sites:
            values["replicas"] = simulate_sites(config, cache, estimate)
        _print(output.console, estimate, documents, values)
        if compared:
            _print_compared(output.console, compared)
        try:
            if flags.plot is not None:
                from steelyard.plots.simulation_report import write_report  # matplotlib

                # What "before" means in the pictures; refused ones are told only where all were asked for.
                packed = {} if compared or chosen == "packed" else _compared(config, cache, ("packed",))
                packed = {name: e for name, e in packed.items() if isinstance(e, StepEstimate)}
                written = write_report(flags.plot, estimate, documents, values, compared or packed)
                values["written"] = [str(p) for p in written]
                for path in written:
                    output.console.print(f"  {path}", markup=False, soft_wrap=True)
        finally:  # what was computed is told even where the disk has no room for pictures
            output.result(values)
    return 0


def _default(argv: Sequence[str]) -> SimulateFlags:
    """What the file alone says: the defaults of the flags. For `--help`, an example."""
    if any(a in ("-h", "--help") for a in argv):
        return SimulateFlags(config=Path("CONFIG.toml"), simulation=SimulateConfig())
    if not argv or argv[0].startswith("-"):
        given = f"{argv[0]} stands first" if argv else "nothing is given"
        raise UsageError(f"{given}, expected a configuration file: steelyard simulate CONFIG.toml [flags]")
    return SimulateFlags(config=Path(argv[0]), simulation=load_toml(SimulateConfig, argv[0]))


def _compared(
    config: SimulateConfig, cache: WorkloadCache, policies: Sequence[PolicyName] = POLICIES
) -> dict[str, StepEstimate | str]:
    """Policies on the same documents; what cannot run gives its reason."""
    found: dict[str, StepEstimate | str] = {}
    for name in policies:
        try:
            found[name] = simulate_step(
                config.scenario(policy=name), cache, batches=config.sampling.batches, seed=config.sampling.seed
            )
        except UsageError as error:
            found[name] = str(error)
    return found


def _print(console: Console, estimate: StepEstimate, documents: Documents, values: Mapping[str, Any]) -> None:
    scenario, memory = estimate.scenario, estimate.memory
    low, high = estimate.band_s
    color = {"fits": "green", "tight": "yellow", "does not fit": "red"}[memory.verdict]
    console.print(
        f"{model_text(scenario.model)} on {scenario.degrees.devices} × {scenario.profile.name}: {scenario.degrees}; "
        f"policy {scenario.policy}, attention kernel {scenario.kernel_name}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(
        f"[{color}]{memory.verdict}[/{color}]: {format_bytes(memory.expected)} of {format_bytes(memory.capacity)} "
        f"({format_bytes(memory.low)} … {format_bytes(memory.high)})", soft_wrap=True,
    )  # fmt: skip
    console.print(
        f"[bold]{format_time(estimate.step_time_s)}[/bold] a step ({format_time(low)} … {format_time(high)}), "
        f"{estimate.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {estimate.mfu_causal:.1%} "
        f"({estimate.mfu:.1%} with attention counted in full)", soft_wrap=True,
    )  # fmt: skip
    cause = dominant_cause(estimate)
    console.print(f"most time goes to {CAUSES[cause]}: {estimate.shares[cause]:.0%}")
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, share in sorted(estimate.shares.items(), key=lambda item: -item[1]):
        if share >= 0.001:
            table.add_row(f"  {CAUSES[name]}", f"{share:6.1%}")
    console.print(table)
    if values["next"]:
        console.print("try next:")
        for suggestion in values["next"]:
            console.print(f"  {suggestion['change']}  ({suggestion['reason']})", markup=False, soft_wrap=True)
    if "replicas" in values:
        r = values["replicas"]
        console.print(
            f"{len(r['sites'])} replicas, {r['mode']}: {r['tokens_per_s']:,.0f} tokens/s together, "
            f"{r['exposed_share']:.1%} of the time in exposed transfers, {r['waiting_share']:.1%} waiting for others",
            soft_wrap=True,
        )  # fmt: skip
    console.print(f"sampled: {values['sampler']}, {values['batches']} batches", markup=False, soft_wrap=True)
    console.print("not modelled: " + "; ".join(values["not_modelled"]), markup=False, soft_wrap=True)


def _print_compared(console: Console, compared: Mapping[str, StepEstimate | str]) -> None:
    table = Table(title="policies on the same documents", title_justify="left", box=None, pad_edge=False)
    for name in ("policy", "step", "tokens/s", "waiting", "exposed", "bubble", "pairs", "memory"):
        table.add_column(name, justify="left" if name in ("policy", "memory") else "right", no_wrap=True)
    for name, e in compared.items():
        if isinstance(e, str):
            table.add_row(name, "refused")
            continue
        table.add_row(
            name, format_time(e.step_time_s), f"{e.tokens_per_s_per_device:,.0f}", f"{e.shares['imbalance']:.1%}",
            f"{e.exposed_comm_share:.1%}", f"{e.bubble_share:.1%}", f"{e.pairs_kept:.0%}", e.memory.verdict,
        )  # fmt: skip
    console.print(table)
    for name, e in compared.items():
        if isinstance(e, str):
            console.print(f"{name} is refused: {e}", markup=False, soft_wrap=True)
    console.print(
        "tokens/s are per device; pairs: share of the attention work that is left where documents are cut",
        markup=False, soft_wrap=True,
    )  # fmt: skip
