"""`steelyard simulate CONFIG.toml`: how fast, how much memory, what limits it and what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steelyard.cli.flags import Flatten, Switch, check_folder, parse_flags
from steelyard.cli.output import command_output
from steelyard.cost.peak_memory import MemoryEstimate
from steelyard.domain.units import format_bytes, format_time
from steelyard.errors import UsageError
from steelyard.settings import load_toml
from steelyard.simulate.answer import (
    CAUSES,
    as_json,
    dominant_cause,
    model_text,
    next_configurations,
    not_modelled,
)
from steelyard.simulate.config import PolicyOrAll, SimulateConfig, SiteSection
from steelyard.simulate.documents import Documents
from steelyard.simulate.sites import NOT_MODELLED, decisive, estimate_sites, site_scenario, together
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.worker_processes import cores
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
        sampling = config.sampling
        first = site_scenario(config, chosen, config.sites[0] if config.sites else None)
        documents = config.stream(first)
        cache = WorkloadCache(documents, processes=cores())
        sites = estimate_sites(config, cache, chosen)
        worst = decisive(sites) if sites else None
        if worst is None:
            estimate = simulate_step(first, cache, batches=sampling.batches, seed=sampling.seed)
        else:
            estimate = worst.estimate
        suggestions = next_configurations(estimate, cache, batches=sampling.batches, seed=sampling.seed)
        values = as_json(estimate, documents, suggestions)
        at = worst.section if worst is not None else None
        compared = _compared(config, cache, at) if flags.policy == "all" else {}
        if compared:
            values["policies"] = {
                name: as_json(e, documents) if isinstance(e, StepEstimate) else {"refused": e}
                for name, e in compared.items()
            }
        if worst is not None:
            values["site"] = worst.name
            values["scope"] = f"one replica by itself, at {worst.name}; the step of all of them is replicas.step_time_s"
            values["replicas"] = together(config, sites)
            left = [line for site in sites for line in not_modelled(site.estimate.scenario, documents)]
            values["not_modelled"] = list(dict.fromkeys((*left, *NOT_MODELLED)))
        _print(output.console, estimate, documents, values)
        if compared:
            _print_compared(output.console, compared)
        try:
            if flags.plot is not None:
                from steelyard.plots.simulation_report import write_report  # matplotlib

                # What "before" means in the pictures; refused ones are told only where all were asked for.
                packed = {} if compared or chosen == "packed" else _compared(config, cache, at, ("packed",))
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
    config: SimulateConfig, cache: WorkloadCache, site: SiteSection | None, policies: Sequence[PolicyName] = POLICIES
) -> dict[str, StepEstimate | str]:
    """Policies on the same documents and devices; what cannot run gives its reason."""
    found: dict[str, StepEstimate | str] = {}
    for name in policies:
        try:
            found[name] = simulate_step(
                config.scenario(policy=name, site=site),
                cache,
                batches=config.sampling.batches,
                seed=config.sampling.seed,
            )
        except UsageError as error:
            found[name] = str(error)
    return found


def _print(console: Console, estimate: StepEstimate, documents: Documents, values: Mapping[str, Any]) -> None:
    """The answer. With sites the numbers of a step are those of the one to look at first, and that is said."""
    scenario, replicas = estimate.scenario, values.get("replicas")
    low, high = estimate.band_s
    model, degrees = model_text(scenario.model), scenario.degrees
    devices = f"{degrees.devices} × {scenario.profile.name}"
    run = f"{degrees}; policy {scenario.policy}"
    kernel = f"attention kernel {scenario.kernel_name}"
    if replicas is None:
        console.print(f"{model} on {devices}: {run}, {kernel}", markup=False, soft_wrap=True)
        _print_verdict(console, estimate.memory)
    else:
        console.print(f"{model} at {_number(replicas['sites'])}, each: {run}", markup=False, soft_wrap=True)
        _print_verdict(console, estimate.memory, at=_places(replicas, values["site"]))
        _print_replicas(console, replicas)
        pace = f" at {scenario.speed:g} × their speed" if scenario.speed != 1 else ""
        console.print(
            f"one replica by itself, at {values['site']}, on {devices}{pace}, {kernel}:", markup=False, soft_wrap=True
        )
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
        console.print("try next:" if replicas is None else f"try next at {values['site']}:", markup=False)
        for suggestion in values["next"]:
            console.print(f"  {suggestion['change']}  ({suggestion['reason']})", markup=False, soft_wrap=True)
    else:
        console.print("try next: nothing one change away is known to be better")
    console.print(f"sampled: {values['sampler']}, {values['batches']} batches", markup=False, soft_wrap=True)
    console.print("not modelled: " + "; ".join(values["not_modelled"]), markup=False, soft_wrap=True)


def _print_verdict(console: Console, memory: MemoryEstimate, at: str = "") -> None:
    color = {"fits": "green", "tight": "yellow", "does not fit": "red"}[memory.verdict]
    console.print(
        f"[{color}]{memory.verdict}[/{color}]{escape(at)}: "
        f"{format_bytes(memory.expected)} of {format_bytes(memory.capacity)} "
        f"({format_bytes(memory.low)} … {format_bytes(memory.high)})", soft_wrap=True,
    )  # fmt: skip


def _number(sites: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(sites)} {'site' if len(sites) == 1 else 'sites'} of {sites[0]['devices']} devices"


def _places(replicas: Mapping[str, Any], shown: str) -> str:
    """Of which sites the worst verdict is, and whose memory stands behind it."""
    sites = replicas["sites"]
    names = [s["name"] for s in sites if s["verdict"] == replicas["verdict"]]
    where = "at every site" if len(names) == len(sites) > 1 else f"at {', '.join(names)}"
    return f" {where}" + (f"; {shown}" if len(names) > 1 else "")


def _print_replicas(console: Console, replicas: Mapping[str, Any]) -> None:
    rate = replicas["tokens_per_s"]
    link = f" (slowest link: {replicas['slowest_link']})" if replicas["slowest_link"] else ""
    console.print(
        f"[bold]{format_time(replicas['step_time_s'])}[/bold] a step of all together under {replicas['mode']}, "
        f"{f'{rate:,.0f}' if rate >= 10 else f'{rate:.2g}'} tokens/s: {replicas['exposed_share']:.1%} of the time in "
        f"exposed transfers between sites{escape(link)}, {replicas['waiting_share']:.1%} waiting for other sites",
        soft_wrap=True,
    )  # fmt: skip
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="")
    for name in ("site", "device", "step alone", "at work", "memory", ""):
        table.add_column(name, justify="right" if name in ("step alone", "at work") else "left")
    for s in replicas["sites"]:
        table.add_row(
            escape(s["name"]), escape(s["device"]), format_time(s["step_time_s"]), f"{s['busy_share']:.0%}",
            s["verdict"], f"{s['memory_gib_by_rank_max']:.0f} of {s['memory_capacity_gib']:.0f} GiB",
        )  # fmt: skip
    console.print(table)


def _print_compared(console: Console, compared: Mapping[str, StepEstimate | str]) -> None:
    table = Table(title="policies on the same documents", title_justify="left", box=None, padding=(0, 1, 0, 0))
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
        "tokens/s are per device; waiting: for ranks that work longer; exposed: transfers, also those of a rank that "
        "is waited for; pairs: share of the attention work that is left where documents are cut",
        markup=False, soft_wrap=True,
    )  # fmt: skip
