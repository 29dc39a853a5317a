"""`steelyard plan WORKLOAD`: what a policy would make of it, or several beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steelyard.cli.data_stats import scan_progress
from steelyard.cli.flags import Switch, parse_flags
from steelyard.cli.output import Output, command_output
from steelyard.data.config import Format, SourceConfig
from steelyard.data.lengths import data_statistics
from steelyard.data.workload import Workload, pack_workload, read_workload
from steelyard.domain.limits import MAX_RANKS, MAX_TOKENS_PER_RANK
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.domain.units import format_count
from steelyard.errors import UsageError
from steelyard.library import Goal, attention_shape, keys_of_a_row
from steelyard.planner import POLICIES
from steelyard.planner.checks import BALANCED_POLICIES
from steelyard.planner.measure import COMPARED, SPANNING_BOUND_RANKS, MeasuredPlan, PlanFigures, measure_plan
from steelyard.planner.objective import Memory, Objective, Passes
from steelyard.settings import nearest, nearest_sibling

DESCRIPTION = """\
Plan core attention of a workload and show what comes of it: work of the busiest rank over its share, bytes of one
layer's forward pass, bounds, and the time of planning. WORKLOAD is a file
{"tokens_per_rank": T, "ranks": n, "batches": [{"docs": [lengths in packing order]}, ...]}, or a folder or file of
documents, for which --ranks is needed."""

DEFAULT_CHUNK_TOKENS = 8192
DEFAULT_BATCHES = 3
MOST = {"--ranks": MAX_RANKS, "--chunk-tokens": MAX_TOKENS_PER_RANK, "--batches": 1 << 20}
GIB = 2**30

LEGEND = f"""\
work: busiest rank over its share. GiB: sent by all ranks in one layer's forward
pass. busiest: GiB in or out of one rank on the way to the servers. /bound: over
the least possible; with a * over a weaker bound, where a document spans ranks
(up to {SPANNING_BOUND_RANKS} of them); – where no bound is known, or the policy sends less since it
does not balance. tokens: fullest rank over the mean."""


@dataclass(frozen=True)
class PlanFlags:
    workload: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKLOAD")]
    """A workload file (.json), or documents: a folder, file or glob pattern as for `steelyard data stats`."""
    policy: str = "balanced"
    """`balanced`, `packed`, `wlb`, `per_document_cp`, `head_tail`, `greedy`, or `all` of these; or `reference`, the
    fewest bytes there are, for some hundred tokens (needs scipy)."""
    model: str = "llama3-8b"
    """A built-in name (`llama3-8b`, `llama-34b`), or a Transformers config.json: bytes of a query and of a key."""
    tolerance: float = 0.05
    """No rank's work above (1 + tolerance) × its share; 0.05 is 5 %."""
    layout: Literal["chosen", "given"] = "chosen"
    """`chosen`: where a document spans ranks, `balanced` also decides which rank holds which tokens, equally many on
    each. `given`: tokens lie in packing order already."""
    speeds: str = ""
    """Relative speed of each rank, for example `1,1,0.5`; none: all equal."""
    node_size: int = 1
    """Ranks per node: `balanced` prefers transfers inside one; groups of `per_document_cp` and `head_tail` are nodes (8
    ranks where it is 1)."""
    node_weight: float = 0.125
    """Cost of a byte inside a node relative to one between nodes (0.125: an eighth); with --node-size."""
    memory_tokens: int | None = None
    """Most tokens (query rows plus key rows) that a rank may receive; None: no cap. `balanced` keeps it, the others do
    not."""
    memory: Memory = "keep"
    """`keep`: ranks keep what they received until backward. `resend`: it is sent again, for less memory."""
    passes: Passes = "both"
    """The pass whose bytes `balanced` makes few: `forward`, `backward` or `both`. Those shown are of a forward pass."""
    objective: Goal = "pairs"
    """What `balanced` balances: `pairs` of query and key, or the `time` of the attention kernel of --device, for which
    short documents are more work than their pairs say."""
    device: str | None = None
    """For --objective time: `h200`, `h100`, `a100`, `b200`, `cpu-local`, or a profile of `steelyard calibrate`."""
    window: int | None = None
    """Keys that a query sees at most, its own included; None: all earlier ones of its document."""
    ranks: int | None = None
    """For documents: number of ranks."""
    chunk_tokens: int | None = None
    """For documents: tokens that each rank holds (8192)."""
    batches: int | None = None
    """For documents: batches to plan, in the order of training (3, or as many as they fill)."""
    tokenizer: str = "bytes"
    """For documents: `bytes`, or a Hugging Face `tokenizer.json` or the folder of one."""
    format: Format = "auto"
    """For documents: their format; `auto`: by file name."""
    field: str = "text"
    """For documents: field (JSONL) or column (Parquet, datasets) that holds the text."""
    suffixes: tuple[str, ...] = ()
    """For documents: file-name endings to read, for example `.py .md`; none: the usual ones of the format."""
    plot: Path | None = None
    """Draw the work of every rank under each policy into this file (.png, .svg or .pdf)."""
    json: Switch = False
    """Print one JSON object on stdout and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(PlanFlags, argv, prog="steelyard plan", description=DESCRIPTION)
    policies = _policies(flags.policy)
    if flags.plot is not None and flags.plot.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {flags.plot}: expected a file that ends in .png, .svg or .pdf")
    if flags.plot is not None and not flags.plot.parent.is_dir():  # said now, not after planning
        raise UsageError(f"--plot {flags.plot}: there is no folder {flags.plot.parent}")
    shape = attention_shape(flags.model)
    objective = _objective(flags, shape, policies)
    with command_output(as_json=flags.json) as output:
        workload = _workload(flags)
        topology = _topology(flags, workload)
        plans = {
            policy: [
                measure_plan(
                    layout,
                    policy=policy,
                    shape=shape,
                    tolerance=flags.tolerance,
                    topology=topology,
                    window=flags.window,
                    objective=objective,
                    batch=batch,
                    layout_chosen=flags.layout == "chosen",
                )
                for batch, layout in enumerate(workload.layouts())
            ]
            for policy in policies
        }
        _show(output, flags, workload, plans, objective)
        if flags.plot is not None:
            _draw(flags, workload, topology, plans)
            output.console.print(f"wrote {escape(str(flags.plot))}", soft_wrap=True)
        output.result({"policies": {p: [m.figures.as_json() for m in measured] for p, measured in plans.items()}})
    return 0


def _policies(given: str) -> tuple[str, ...]:
    if given == "all":
        return COMPARED
    if given not in POLICIES:
        names = (*COMPARED, "reference", "all")
        close = nearest(given, names)
        raise UsageError(
            f"--policy {given}: expected one of {', '.join(names)}" + (f"; did you mean {close}?" if close else "")
        )
    return (given,)


def _objective(flags: PlanFlags, shape: AttentionShape, policies: Sequence[str]) -> Objective:
    if "balanced" not in policies:
        for name, usual in (("passes", "both"), ("objective", "pairs"), ("device", None)):
            value = getattr(flags, name)
            if value != usual:
                raise UsageError(f"--{name} {value}: only the policy `balanced` has a use for it, not {flags.policy}")
    row_keys = keys_of_a_row(flags.objective, flags.device, shape, names=("--objective ", "--device "))
    return Objective(flags.passes, flags.memory, row_keys or 0)


# --- what to plan -----------------------------------------------------------------------------------------------------


def _workload(flags: PlanFlags) -> Workload:
    path = Path(flags.workload).expanduser()
    is_pattern = any(c in flags.workload for c in "*?[")
    if not path.exists() and not is_pattern:
        raise UsageError(f"no file or folder {flags.workload}{nearest_sibling(path)}")
    if path.suffix != ".json" or path.is_dir():
        return _from_documents(flags)
    for name in ("ranks", "chunk_tokens", "batches"):
        if getattr(flags, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(flags, name)}: a workload file says this itself; "
                "the flag is for folders of documents"
            )
    return read_workload(path)


def _from_documents(flags: PlanFlags) -> Workload:
    if flags.ranks is None:
        raise UsageError(
            f"{flags.workload} is no workload file (.json) but documents; say on how many ranks, for example --ranks 8"
        )
    chunk_tokens = DEFAULT_CHUNK_TOKENS if flags.chunk_tokens is None else flags.chunk_tokens
    batches = DEFAULT_BATCHES if flags.batches is None else flags.batches
    for name, value in (("--ranks", flags.ranks), ("--chunk-tokens", chunk_tokens), ("--batches", batches)):
        if value < 1:
            raise UsageError(f"{name} {value}: expected at least 1")
        if value > MOST[name]:
            raise UsageError(f"{name} {value}: expected at most {MOST[name]:,}")
    with scan_progress() as progress:
        statistics = data_statistics(
            SourceConfig(path=flags.workload, format=flags.format, field=flags.field, suffixes=flags.suffixes),
            tokenizer=flags.tokenizer,
            chunk_tokens=chunk_tokens,
            ranks=(),
            max_tokens=flags.ranks * chunk_tokens * batches,
            progress=progress,
        )
    return pack_workload(
        statistics.lengths, name=flags.workload, tokens_per_rank=chunk_tokens, ranks=flags.ranks, batches=batches
    )


def _topology(flags: PlanFlags, workload: Workload) -> Topology:
    speeds: list[float] = []
    for place, part in enumerate(flags.speeds.split(",") if flags.speeds.strip() else []):
        try:
            speeds.append(float(part))
        except ValueError:
            raise UsageError(
                f"--speeds: number {place + 1} is {part.strip()!r}, expected for example 1,1,0.5"
            ) from None
    if flags.node_size > MAX_RANKS:
        raise UsageError(f"--node-size {flags.node_size}: expected at most {MAX_RANKS:,}")
    if speeds and len(speeds) != workload.ranks:
        raise UsageError(f"--speeds gives {len(speeds)} speeds, the workload has {workload.ranks} ranks; give one each")
    caps = () if flags.memory_tokens is None else (flags.memory_tokens,) * workload.ranks
    return Topology(
        workload.ranks,
        speeds=tuple(speeds),
        memory_tokens=caps,
        node_size=flags.node_size,
        intra_node_weight=flags.node_weight if flags.node_size > 1 else 1.0,
    )


# --- what comes of it -------------------------------------------------------------------------------------------------


def _show(
    output: Output,
    flags: PlanFlags,
    workload: Workload,
    plans: Mapping[str, Sequence[MeasuredPlan]],
    objective: Objective,
) -> None:
    console = output.console
    documents = sum(len(batch) for batch in workload.batches)
    batches = f"{len(workload.batches)} batch" + ("es" if len(workload.batches) > 1 else "")
    console.print(
        f"[bold]{escape(workload.name)}[/]: {batches}, {documents:,} documents, {workload.ranks} ranks × "
        f"{workload.tokens_per_rank:,} tokens; model {escape(flags.model)}, tolerance {flags.tolerance:g}",
        soft_wrap=True,
    )
    for policy, measured in plans.items():
        console.print()
        _print_policy(console, policy, [m.figures for m in measured])
    notes = [note for policy, measured in plans.items() for note in _notes(policy, measured, flags, objective)]
    if notes:
        console.print()
    for note in notes:
        console.print(f"[yellow]{note}[/]", soft_wrap=True)
    console.print(f"\n{LEGEND}", style="dim", soft_wrap=True)


def _notes(policy: str, measured: Sequence[MeasuredPlan], flags: PlanFlags, objective: Objective) -> Iterator[str]:
    """What a reader of the figures would otherwise not see."""
    limited = [m.figures.batch for m in measured if m.plan.memory_limited]
    if limited:
        yield f"{policy}: the memory cap came before balance in batch {', '.join(map(str, limited))}"
    if flags.memory_tokens is not None and policy not in BALANCED_POLICIES:
        beyond = [m.figures.batch for m in measured if m.figures.received_tokens_max > flags.memory_tokens]
        where = f"exceeded in batch {', '.join(map(str, beyond))}" if beyond else "exceeded in no batch"
        yield f"{policy}: cap not honoured by this policy; {where}"
    if objective.row_keys and policy == "balanced":
        yield (
            f"balanced: work is time: a query row costs {objective.row_keys:,} keys besides those that it sees; "
            "no bounds are known for it"
        )


_COLUMNS = ("batch", "work", "GiB", "/bound", "busiest", "/bound", "pairs", "tokens", "moved", "plan ms", "tables ms")


def _print_policy(console: Console, policy: str, rows: Sequence[PlanFigures]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    for f in rows:
        table.add_row(
            f"{f.batch}",
            f"{f.work_max_over_mean:.3f}",
            f"{f.bytes_total / GIB:.2f}",
            _ratio(f.bytes_total, f.lower_bound_bytes)
            if f.spanning_lower_bound_bytes is None
            else _ratio(f.bytes_total, f.spanning_lower_bound_bytes, "*"),
            f"{f.busiest_bytes / GIB:.3f}",
            _ratio(f.busiest_bytes, f.busiest_lower_bound_bytes),
            format_count(f.pairs_total),
            f"{f.tokens_max_over_mean:.2f}",
            f"{f.moved_tasks:,}",
            f"{f.plan_ms:,.1f}",
            f"{f.tables_ms:,.1f}",
        )
    console.print(policy, style="bold", markup=False)
    console.print(table)


def _ratio(value: int, bound: int | None, mark: str = "") -> str:
    """How far above the bound; a dash where there is none, or where the policy sends less since it does not balance."""
    return f"{value / bound:.3f}{mark}" if bound and value >= bound else "–"


def _draw(
    flags: PlanFlags, workload: Workload, topology: Topology, plans: Mapping[str, Sequence[MeasuredPlan]]
) -> None:
    from steelyard.plots.plans import PolicyWork, work_by_policy  # matplotlib takes as long to import as a small plan

    assert flags.plot is not None
    shown = dict(plans)
    if "packed" not in shown:  # what it would be without us
        layouts = enumerate(workload.layouts())
        shape = attention_shape(flags.model)
        shown = {
            "packed": [
                measure_plan(
                    layout, policy="packed", shape=shape, tolerance=flags.tolerance, topology=topology,
                    window=flags.window, batch=batch, repeats=1,
                )
                for batch, layout in layouts
            ],
            **shown,
        }  # fmt: skip
    first = [policy for policy in ("packed", "balanced") if policy in shown]
    ordered = [*first, *(policy for policy in shown if policy not in first)]
    worst = int(np.argmax([m.figures.work_max_over_mean for m in shown["packed"]]))
    whole = max(measured[worst].figures.pairs_total for measured in shown.values())
    panels = [
        PolicyWork(
            policy,
            shown[policy][worst].work_by_server.tolist(),
            shown[policy][worst].figures.bytes_total,
            shown[policy][worst].figures.tokens_max_over_mean,
            shown[policy][worst].figures.pairs_total / whole,
        )
        for policy in ordered
    ]
    note = (
        f"{Path(workload.name).name}, batch {worst}: {workload.ranks} ranks × {workload.tokens_per_rank:,} tokens, "
        f"tolerance {flags.tolerance:g}.\nEach bar is a multiple of the rank's share of the work under its policy."
    )
    title = None
    if len(panels) > 2 and "balanced" in shown:
        rest = {p: shown[p][worst].figures.work_max_over_mean for p in ("packed", "balanced")}
        title = f"The busiest rank does {rest['packed']:.2f}× its share as packed, {rest['balanced']:.2f}× balanced"
    work_by_policy(flags.plot, panels, speeds=topology.speeds, title=title, note=note)
