"""What a policy makes of a layout: times, balance, bytes and bounds, in the words of `steelyard plan`.

Everything but the times is worked out from the tables by `checks.verify`, not from the planner's own account.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.limits import require_countable
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner import make_plan
from steelyard.planner.balanced import DEFAULT_OBJECTIVE
from steelyard.planner.baselines.relaid import cut_at_ranks
from steelyard.planner.bounds import busiest_bytes_bound, total_bytes_bound
from steelyard.planner.checks import BALANCED_POLICIES, PlanReport, max_over_mean, verify
from steelyard.planner.layouts import choose_layout
from steelyard.planner.objective import Objective
from steelyard.planner.spanning_bounds import spanning_bytes_bound
from steelyard.planner.tables import build_all_tables

COMPARED = ("balanced", "packed", "wlb", "per_document_cp", "head_tail", "greedy")
SPANNING_BOUND_RANKS = 64  # beyond, the search for that bound takes seconds
REPEATS = 3
ENOUGH_S = 1.0  # what has taken this long is not timed again

Clock = Callable[[], float]
Result = TypeVar("Result")


@dataclass(frozen=True)
class PlanFigures:
    """One batch under one policy. Bytes are one layer's forward pass, all ranks' tables counted.

    Attributes:
        batch: number of the batch in its workload.
        plan_ms: time of planning; tables_ms: time until every array that the runtime needs exists, for all ranks. The
            fastest of up to three runs each.
        work_max_over_mean: largest work of a server ÷ its share (the mean, if all are equally fast): in pairs, or,
            where `row_keys` of the objective says what a query row costs besides, in pairs and those, for all policies.
            Infinite where a server of speed 0 has work.
        bytes_total: all rows sent, both phases, all ranks.
        bytes_out_max_over_mean, bytes_in_max_over_mean: busiest sender and receiver of the dispatch phase (queries,
            keys, values) over the mean of all ranks; 1 where nothing is sent.
        busiest_bytes: most bytes that one rank sends or receives in the dispatch phase.
        busiest_lower_bound_bytes: no plan in which no receiver sends, and that keeps the balance promise, has less.
            None where the next is, and for a plan in which a rank does both in the dispatch phase.
        lower_bound_bytes: no plan that keeps the balance promise on this layout has a smaller `bytes_total`. None where
            a document spans ranks, where time is balanced instead of pairs, and for a plan that owes or keeps no
            balance: of another policy than `balanced` and `reference`, or limited by memory.
        spanning_lower_bound_bytes: the same from a weaker bound that allows documents to span ranks. None where
            `lower_bound_bytes` is given, with a window, for more than 64 ranks, and where that is None for another
            reason than documents that span ranks.
        pairs_total: (query, key) pairs computed: policies that cut documents compute fewer, another function.
        received_tokens_max: most query and key rows that one server receives.
        buffer_bytes_max: most bytes that exchange buffers of one layer's attention take on one rank at a time, in the
            memory mode that was planned for.
        tasks, moved_tasks: all of them, and those computed elsewhere than where their queries live.
        tokens_max_over_mean: tokens of the fullest rank over the mean: the imbalance of memory.
    """

    batch: int
    plan_ms: float
    tables_ms: float
    work_max_over_mean: float
    bytes_total: int
    bytes_out_max_over_mean: float
    bytes_in_max_over_mean: float
    busiest_bytes: int
    busiest_lower_bound_bytes: int | None
    lower_bound_bytes: int | None
    pairs_total: int
    received_tokens_max: int
    buffer_bytes_max: int
    tasks: int
    moved_tasks: int
    tokens_max_over_mean: float
    spanning_lower_bound_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class MeasuredPlan:
    """A plan, its figures, and the work of each server in the unit of `work_max_over_mean`, int64 (ranks,)."""

    plan: DispatchPlan
    figures: PlanFigures
    work_by_server: IntArray


def measure_plan(
    layout: Layout,
    *,
    policy: str,
    shape: AttentionShape,
    tolerance: float,
    topology: Topology | None = None,
    window: int | None = None,
    objective: Objective = DEFAULT_OBJECTIVE,
    batch: int = 0,
    layout_chosen: bool = False,
    spanning_bound: bool = True,
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
) -> MeasuredPlan:
    """Plan, build the tables of all ranks, verify, and count. `packed` cuts documents at the ends of ranks, as training
    on packed chunks does.

    Args:
        objective: what `balanced` balances and whose bytes it makes few. The other policies have no such choice, but
            their work is counted in the same unit. All figures of bytes are those of a forward pass, and its memory
            mode is the one of `buffer_bytes_max`.
        layout_chosen: where a document spans ranks, `balanced` lays the documents out anew (`planner.layouts`) before
            it plans; `plan_ms` counts that.
        spanning_bound: whether to search for `spanning_lower_bound_bytes`: a third of a second at 64 ranks.

    Raises:
        UsageError, PlanError: as `make_plan`.
        PlanViolation: the plan does not keep what it promises.
    """
    if topology is None:
        topology = Topology(layout.ranks)
    require_countable(layout.doc_lengths, "plan", objective.row_keys)
    given = cut_at_ranks(layout) if policy == "packed" else layout
    relaid = layout_chosen and policy == "balanced" and layout.spans_ranks
    tokens_per_rank = int(layout.tokens_by_rank.max())

    def plan_it() -> DispatchPlan:
        placed = given
        if relaid:
            placed = choose_layout(
                layout.doc_lengths.tolist(), tokens_per_rank, layout.ranks,
                shape=shape, topology=topology, tolerance=tolerance, window=window, objective=objective,
            )  # fmt: skip
        row_keys = objective.row_keys if policy == "balanced" else 0
        return make_plan(
            placed, policy=policy, topology=topology, shape=shape, tolerance=tolerance, window=window,
            passes=objective.passes, memory=objective.memory,
            objective="time" if row_keys else "pairs", row_keys=row_keys or None,
        )  # fmt: skip

    plan_s, plan = fastest(plan_it, repeats, clock)
    tables_s, tables = fastest(lambda: build_all_tables(plan), repeats, clock)
    report = verify(plan, tables)
    work, worst = report.work_by_server, report.work_max_over_mean
    if objective.row_keys:
        work = work + objective.row_keys * rows_by_server(plan)
        worst = max_over_share(work, topology)
    bounds = bounds_of(plan, report, SPANNING_BOUND_RANKS if spanning_bound else 0)
    figures = PlanFigures(
        batch=batch,
        plan_ms=plan_s * 1e3,
        tables_ms=tables_s * 1e3,
        work_max_over_mean=worst,
        bytes_total=report.bytes_total,
        bytes_out_max_over_mean=report.bytes_out_max_over_mean,
        bytes_in_max_over_mean=report.bytes_in_max_over_mean,
        busiest_bytes=report.busiest_bytes,
        busiest_lower_bound_bytes=bounds.busiest,
        lower_bound_bytes=bounds.total,
        pairs_total=report.pairs_total,
        received_tokens_max=report.received_tokens_max,
        buffer_bytes_max=report.buffer_bytes_max(objective.memory),
        tasks=report.tasks,
        moved_tasks=report.moved_tasks,
        tokens_max_over_mean=max_over_mean(plan.layout.tokens_by_rank),
        spanning_lower_bound_bytes=bounds.spanning,
    )
    return MeasuredPlan(plan, figures, work)


def rows_by_server(plan: DispatchPlan) -> IntArray:
    """Query rows that each server computes, int64 (ranks,)."""
    rows = np.zeros(plan.layout.ranks, dtype=np.int64)
    np.add.at(rows, plan.tasks.server, plan.tasks.end - plan.tasks.start)
    return rows


def max_over_share(work: IntArray, topology: Topology) -> float:
    """Largest work ÷ share: a server's part of all work by its speed. Infinite where one of speed 0 has work."""
    speeds = np.array(topology.speeds or (1.0,) * topology.servers, dtype=np.float64)
    speeds = speeds / speeds.max()
    busy = work > 0
    if np.any(speeds[busy] == 0):
        return float("inf")
    shares = int(work.sum()) * (speeds / speeds.sum())
    return float((work[busy] / shares[busy]).max(initial=0.0))


class Bounds(NamedTuple):
    """As the figures of the same names."""

    total: int | None = None
    busiest: int | None = None
    spanning: int | None = None


def bounds_of(plan: DispatchPlan, report: PlanReport, spanning_ranks: int = SPANNING_BOUND_RANKS) -> Bounds:
    """What any plan on the same layout sends at least; for documents that span ranks up to so many ranks.

    None where it is not proved for the plan, so that no plan sends less than its bound: see `PlanFigures`.
    """
    if plan.row_keys or plan.policy not in BALANCED_POLICIES or plan.memory_limited:
        return Bounds()
    case = plan.layout, plan.topology, plan.shape, plan.tolerance, plan.window
    total, spanning, busiest = total_bytes_bound(*case), None, None
    if total is None and plan.layout.ranks <= spanning_ranks:
        spanning = spanning_bytes_bound(*case)
    if not np.any((report.dispatch_bytes_in > 0) & (report.dispatch_bytes_out > 0)):
        busiest = busiest_bytes_bound(*case)
    return Bounds(total, busiest, spanning)


def fastest(work: Callable[[], Result], repeats: int, clock: Clock = time.perf_counter) -> tuple[float, Result]:
    """Time of the fastest of up to `repeats` runs, without pauses of the garbage collector, and the last result."""
    best, spent, collecting = float("inf"), 0.0, gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            begin = clock()
            result = work()
            elapsed = clock() - begin
            best, spent = min(best, elapsed), spent + elapsed
            if spent >= ENOUGH_S:
                break
    finally:
        if collecting:
            gc.enable()
    return best, result
