"""What `steelyard plan` says of its plans: tables, notes, one JSON object and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steelyard.cost.attention import pairs_before_array
from steelyard.data.workload import Workload
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.domain.units import format_count
from steelyard.errors import DataError
from steelyard.planner.checks import BALANCED_POLICIES
from steelyard.planner.measure import SPANNING_BOUND_RANKS, MeasuredPlan, PlanFigures
from steelyard.planner.objective import Objective

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
Planned: TypeAlias = dict[str, list[MeasuredPlan]]
"""Plans of all batches of a workload that there are plans for, by policy."""

LEGEND = f"""\
work: busiest rank over its share. {{unit}}: sent by all ranks in one layer's forward
pass. busiest: {{unit}} in or out of one rank on the way to the servers. /bound: over
the least possible; with a * over a weaker bound, where a document spans ranks
(up to {SPANNING_BOUND_RANKS} of them); – where none is known, or the policy promises no balance.
pairs: of query and key, all work. tokens: fullest rank over the mean. moved:
ranges of queries computed on another rank; where documents span ranks, keys
travel besides."""


@dataclass(frozen=True)
class Refusal:
    """A batch that a policy has no plan for, and why."""

    policy: str
    batch: int
    reason: str


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        model: as it was given; `shape` is its attention.
        memory_tokens: the cap of every rank, or None.
        layout: whether `balanced` also places the tokens (`chosen`) or not (`given`).
        documents: how a data set's documents were packed; None: the workload is a file.
    """

    model: str
    shape: AttentionShape
    workload: Workload
    topology: Topology
    tolerance: float
    window: int | None
    objective: Objective
    memory_tokens: int | None
    layout: Literal["chosen", "given"]
    documents: Literal["span", "cut"] | None


def as_json(request: Request, plans: Planned, refused: Sequence[Refusal]) -> dict[str, Any]:
    """All figures, unrounded. Documented in docs/plan.md."""
    return {
        "policies": {
            policy: [
                {
                    **m.figures.as_json(),
                    "work_by_rank": m.work_by_server.tolist(),
                    "memory_limited": m.plan.memory_limited,
                }
                for m in measured
            ]
            for policy, measured in plans.items()
        },
        "workload": request.workload.name,
        "documents": request.documents,
        "batches": len(request.workload.batches),
        "ranks": request.workload.ranks,
        "tokens_per_rank": request.workload.tokens_per_rank,
        "model": request.model,
        "tolerance": request.tolerance,
        "window": request.window,
        "layout": request.layout,
        "row_keys": request.objective.row_keys,
        "refused": [asdict(refusal) for refusal in refused],
    }


def print_plans(console: Console, request: Request, plans: Planned, refused: Sequence[Refusal]) -> None:
    workload = request.workload
    documents = sum(int(np.count_nonzero(batch)) for batch in workload.batches)
    console.print(
        f"[bold]{escape(workload.name)}[/]: {_counted(len(workload.batches), 'batch', 'batches')}, "
        f"{_counted(documents, 'document')}, {_counted(workload.ranks, 'rank')} × "
        f"{_counted(workload.tokens_per_rank, 'token')}; model {escape(request.model)}, "
        f"tolerance {request.tolerance:g}",
        soft_wrap=True,
    )
    unit, unit_bytes = _unit(max((m.figures.bytes_total for measured in plans.values() for m in measured), default=0))
    for policy, measured in plans.items():
        if measured or not refused:
            console.print()
            _print_policy(console, policy, [m.figures for m in measured], unit, unit_bytes)
    notes = [
        f"{policy}: no plan for batch {', '.join(str(r.batch) for r in refused if r.policy == policy)}"
        for policy in dict.fromkeys(r.policy for r in refused)
    ]
    notes += [note for policy, measured in plans.items() for note in _notes(policy, measured, request)]
    notes += _notes_on_all(request)
    if notes:
        console.print()
    for note in notes:
        console.print(f"[yellow]{note}[/]", soft_wrap=True)
    console.print(f"\n{LEGEND.format(unit=unit)}", style="dim", soft_wrap=True)


def _unit(size_bytes: int) -> tuple[str, int]:
    """The unit of all tables: the largest that the largest figure holds one of."""
    return next((unit for unit in UNITS if size_bytes >= unit[1]), UNITS[-1] if size_bytes else UNITS[0])


def _size(size_bytes: int, unit_bytes: int, digits: int) -> str:
    """So many decimals; where all would be 0, the first digit that is not."""
    value = size_bytes / unit_bytes
    return f"{value:.{digits}f}" if not value or value >= 10**-digits else f"{value:.1g}"


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _notes(policy: str, measured: Sequence[MeasuredPlan], request: Request) -> Iterator[str]:
    """What a reader of the figures would otherwise not see."""
    limited = [m.figures.batch for m in measured if m.plan.memory_limited]
    if limited:
        yield f"{policy}: the memory cap came before balance in batch {', '.join(map(str, limited))}"
    if request.memory_tokens is not None and policy not in BALANCED_POLICIES:
        beyond = [m.figures.batch for m in measured if m.figures.received_tokens_max > request.memory_tokens]
        where = f"exceeded in batch {', '.join(map(str, beyond))}" if beyond else "exceeded in no batch"
        yield f"{policy}: cap not honoured by this policy; {where}"
    if any(np.isinf(m.figures.work_max_over_mean) for m in measured):
        yield f"{policy}: ranks of speed 0 have work; it cannot finish"
    batches = request.workload.batches
    whole = sum(int(pairs_before_array(batches[m.figures.batch], request.window).sum()) for m in measured)
    done = sum(m.figures.pairs_total for m in measured)
    if done < whole:
        yield (
            f"{policy}: cuts documents, so that {format_count(done)} of {format_count(whole)} pairs are computed: "
            "another function, not a better plan"
        )


def _notes_on_all(request: Request) -> Iterator[str]:
    if request.objective.row_keys:
        yield (
            f"work is time: a query row costs {request.objective.row_keys:,} keys besides those that it sees, under "
            "all policies; no bounds are known for it"
        )
    if request.documents == "span" and any(layout.spans_ranks for layout in request.workload.layouts()):
        yield (
            "`steelyard train` cuts documents where chunks end, these plans do not; --documents cut plans what it "
            "trains on"
        )


_COLUMNS = (
    "batch",
    "work",
    "{unit}",
    "/bound",
    "busiest",
    "/bound",
    "pairs",
    "tokens",
    "moved",
    "plan ms",
    "tables ms",
)


def _print_policy(console: Console, policy: str, rows: Sequence[PlanFigures], unit: str, unit_bytes: int) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for name in _COLUMNS:
        table.add_column(name.format(unit=unit), justify="right", no_wrap=True, min_width=5)
    for f in rows:
        table.add_row(
            f"{f.batch}",
            f"{f.work_max_over_mean:.3f}",
            _size(f.bytes_total, unit_bytes, 2),
            _ratio(f.bytes_total, f.lower_bound_bytes)
            if f.spanning_lower_bound_bytes is None
            else _ratio(f.bytes_total, f.spanning_lower_bound_bytes, "*"),
            _size(f.busiest_bytes, unit_bytes, 3),
            _ratio(f.busiest_bytes, f.busiest_lower_bound_bytes),
            format_count(f.pairs_total),
            f"{f.tokens_max_over_mean:.2f}",
            f"{f.moved_tasks:,}",
            f"{f.plan_ms:,.1f}",
            f"{f.tables_ms:,.1f}",
        )
    console.print(policy, style="bold", markup=False)
    needed = console.measure(table, options=console.options.update(max_width=1_000)).maximum
    if needed > console.width:  # lines that the terminal wraps can be read, figures cut short cannot
        table.width = needed
    console.print(table, crop=False)


def _ratio(value: int, bound: int | None, mark: str = "") -> str:
    """How far above the bound; a dash where there is none, or nothing must be sent."""
    return f"{value / bound:.3f}{mark}" if bound else "–"


def draw_plans(path: Path, request: Request, plans: Planned) -> None:
    """Draw the batch that is worst as packed, which must be among the plans.

    Raises:
        DataError: the picture cannot be written.
    """
    from steelyard.plots.plans import PolicyWork, busiest, work_by_policy  # matplotlib takes as long as a small plan

    workload, speeds = request.workload, request.topology.speeds
    first = [policy for policy in ("packed", "balanced") if policy in plans]
    ordered = [*first, *(policy for policy in plans if policy not in first)]
    worst = int(np.argmax([m.figures.work_max_over_mean for m in plans["packed"]]))
    whole = int(pairs_before_array(workload.batches[worst], request.window).sum())
    panels = [
        PolicyWork(
            policy,
            m.work_by_server.tolist(),
            m.figures.bytes_total,
            m.figures.tokens_max_over_mean,
            m.figures.pairs_total / whole,
        )
        for policy in ordered
        for m in plans[policy]
        if m.figures.batch == worst
    ]
    rows = f" Work is time: {request.objective.row_keys:,} keys a query row." if request.objective.row_keys else ""
    note = (
        f"{Path(workload.name).name}, batch {worst}: {_counted(workload.ranks, 'rank')} × "
        f"{_counted(workload.tokens_per_rank, 'token')}, tolerance {request.tolerance:g}.\n"
        f"Each bar is a multiple of the rank's share of the work under its policy.{rows}"
    )
    title = None
    if len(panels) > 2 and panels[1].policy == "balanced":
        packed, balanced = (busiest(panel, speeds) for panel in panels[:2])
        title = f"Work of the busiest rank over its share: packed {packed}, balanced {balanced}"
        if packed.endswith("×") and balanced.endswith("×"):
            title = f"The busiest rank does {packed} its share as packed, {balanced} balanced"
    try:
        work_by_policy(path, panels, speeds=speeds, title=title, note=note)
    except OSError as error:
        raise DataError(f"--plot {path}: the picture cannot be written ({error})") from error
