from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_layouts import TOLERANCES, layouts

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import LLAMA3_8B, AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError
from steelyard.planner import make_plan
from steelyard.planner.bounds import busiest_bytes_bound, total_bytes_bound
from steelyard.planner.checks import max_over_mean, verify
from steelyard.planner.measure import (
    COMPARED,
    SPANNING_BOUND_RANKS,
    Bounds,
    MeasuredPlan,
    bounds_of,
    fastest,
    max_over_share,
    measure_plan,
    rows_by_server,
)
from steelyard.planner.objective import Objective
from steelyard.planner.spanning_bounds import spanning_bytes_bound

SHAPE = AttentionShape(heads=2, kv_heads=1, head_dim=4)
LAYOUT = Layout.from_doc_lengths([[900], [100] * 9, [300] * 3])


def ticking(*steps: float) -> Iterator[float]:
    now = 0.0
    for step in steps:
        yield now
        now += step
        yield now


def test_the_fastest_run_counts_and_the_collector_is_off_meanwhile() -> None:
    times = ticking(0.5, 0.2, 0.3)
    elapsed, collecting = fastest(gc.isenabled, 3, clock=lambda: next(times))
    assert elapsed == pytest.approx(0.2)
    assert not collecting
    assert gc.isenabled()


def test_what_takes_long_is_timed_once() -> None:
    times = ticking(1.5)
    assert fastest(lambda: "result", 3, clock=lambda: next(times)) == (1.5, "result")


def test_figures_are_those_of_the_checker_and_the_bounds() -> None:
    measured = measure_plan(LAYOUT, policy="balanced", shape=SHAPE, tolerance=0.05, batch=3)
    plan = make_plan(LAYOUT, shape=SHAPE, tolerance=0.05)
    report, figures = verify(plan), measured.figures
    assert figures.batch == 3
    assert figures.bytes_total == report.bytes_total > 0
    assert figures.work_max_over_mean == report.work_max_over_mean <= 1.05
    assert figures.busiest_bytes == report.busiest_bytes
    assert figures.lower_bound_bytes == total_bytes_bound(LAYOUT, Topology(3), SHAPE, 0.05)
    assert figures.busiest_lower_bound_bytes == busiest_bytes_bound(LAYOUT, Topology(3), SHAPE, 0.05)
    assert figures.pairs_total == sum(n * (n + 1) // 2 for n in LAYOUT.doc_lengths.tolist())
    assert measured.work_by_server.sum() == figures.pairs_total
    assert figures.bytes_out_max_over_mean == report.dispatch_bytes_out.max() / report.dispatch_bytes_out.mean()
    assert figures.buffer_bytes_max == report.buffer_bytes_max() > 0
    assert figures.plan_ms > 0 < figures.tables_ms
    assert figures.tokens_max_over_mean == 1.0


def test_packed_cuts_documents_where_ranks_end() -> None:
    layout = Layout.contiguous([10], 5, 2)
    figures = measure_plan(layout, policy="packed", shape=SHAPE, tolerance=0.05).figures
    assert (figures.pairs_total, figures.bytes_total) == (30, 0)
    assert measure_plan(layout, policy="balanced", shape=SHAPE, tolerance=0.05).figures.pairs_total == 55


def test_bounds_are_null_where_documents_span_ranks() -> None:
    layout = Layout.contiguous([1_000, 10], 505, 2)
    figures = measure_plan(layout, policy="balanced", shape=SHAPE, tolerance=0.05).figures
    assert figures.lower_bound_bytes is None
    assert figures.busiest_lower_bound_bytes is None


def test_another_bound_is_given_where_documents_span_ranks() -> None:
    layout = Layout.contiguous([1_000, 10], 505, 2)
    case = {"shape": SHAPE, "tolerance": 0.05}
    figures = measure_plan(layout, policy="balanced", shape=SHAPE, tolerance=0.05).figures
    bound = figures.spanning_lower_bound_bytes
    assert bound == spanning_bytes_bound(layout, Topology(2), SHAPE, 0.05)
    assert bound is not None and 0 < bound <= figures.bytes_total
    assert measure_plan(LAYOUT, policy="balanced", **case).figures.spanning_lower_bound_bytes is None
    windowed = measure_plan(layout, policy="balanced", window=100, **case).figures
    assert windowed.spanning_lower_bound_bytes is None
    for ranks, known in ((SPANNING_BOUND_RANKS, True), (SPANNING_BOUND_RANKS + 1, False)):
        many = Layout.contiguous([100, 7], 54, ranks)
        found = measure_plan(many, policy="balanced", repeats=1, **case).figures.spanning_lower_bound_bytes
        assert (found is not None) is known


@pytest.mark.parametrize("policy", [p for p in COMPARED if p != "balanced"])
@pytest.mark.parametrize("layout", [LAYOUT, Layout.contiguous([1_000, 10], 505, 2)])
def test_bounds_are_null_for_policies_that_promise_no_balance(
    layout: Layout, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are not looked for."""
    for name in ("total_bytes_bound", "busiest_bytes_bound", "spanning_bytes_bound"):
        monkeypatch.setattr(f"steelyard.planner.measure.{name}", lambda *_: pytest.fail("looked for"))
    figures = measure_plan(layout, policy=policy, shape=SHAPE, tolerance=0.05, repeats=1).figures
    assert figures.lower_bound_bytes is figures.busiest_lower_bound_bytes is figures.spanning_lower_bound_bytes is None


def test_bounds_are_null_where_memory_came_first() -> None:
    """With room for few rows next to nothing is sent, far less than balance would take."""
    layout, topology = Layout.from_doc_lengths([[4_000], [100]]), Topology(2, memory_tokens=(10, 10))
    measured = measure_plan(layout, policy="balanced", shape=SHAPE, tolerance=0.05, topology=topology)
    bound = total_bytes_bound(layout, topology, SHAPE, 0.05)
    assert measured.plan.memory_limited and bound is not None and measured.figures.bytes_total < bound
    assert bounds_of(measured.plan, verify(measured.plan)) == Bounds()


def relay() -> DispatchPlan:
    """Documents [6], [5] and [1]: rank 0 gives two rows to rank 1, which gives three of its own to rank 2."""
    plan = make_plan(Layout.from_doc_lengths([[6], [5], [1]]), shape=SHAPE, tolerance=0.3)
    rows = [(0, 0, 4, 0, 0), (0, 4, 6, 1, 0), (1, 0, 2, 1, 1), (1, 2, 5, 2, 1), (2, 0, 1, 2, 2)]
    return replace(plan, tasks=CATasks.from_columns(*np.array(rows, dtype=np.int64).T))


def test_the_bound_of_the_busiest_rank_is_null_where_a_receiver_sends() -> None:
    plan = relay()
    report = verify(plan)
    assert report.dispatch_bytes_in[1] > 0 < report.dispatch_bytes_out[1]
    bounds = bounds_of(plan, report)
    assert bounds.busiest is None and bounds.total is not None and bounds.total <= report.bytes_total
    assert busiest_bytes_bound(plan.layout, plan.topology, SHAPE, plan.tolerance) is not None


@settings(max_examples=150)
@given(layouts(longest=700, most_ranks=6), TOLERANCES, st.just(()) | st.just((40, 200, 0)))
@example(Layout.from_doc_lengths([[692], [], [467], [], [25]]), 0.0, ())
def test_no_bound_is_above_what_was_reached(layout: Layout, tolerance: float, caps: tuple[int, ...]) -> None:
    topology = Topology(layout.ranks, memory_tokens=(caps * layout.ranks)[: layout.ranks])
    try:
        figures = measure_plan(
            layout, policy="balanced", shape=LLAMA3_8B, tolerance=tolerance, topology=topology, repeats=1
        ).figures
    except PlanError:
        return
    assert (figures.lower_bound_bytes or 0) <= figures.bytes_total
    assert (figures.spanning_lower_bound_bytes or 0) <= figures.bytes_total
    assert (figures.busiest_lower_bound_bytes or 0) <= figures.busiest_bytes


def test_bounds_take_none_of_the_time_of_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(*_: object) -> int:
        now[0] += 100.0
        return 1

    monkeypatch.setattr("steelyard.planner.measure.spanning_bytes_bound", slow)
    layout = Layout.contiguous([1_000, 10], 505, 2)
    figures = measure_plan(layout, policy="balanced", shape=SHAPE, tolerance=0.05, clock=lambda: now[0]).figures
    assert now[0] == 100.0
    assert figures.plan_ms == figures.tables_ms == 0.0


def test_an_objective_reaches_planner_layout_and_figures() -> None:
    layout = Layout.contiguous([4_000, *[200] * 20], 2_000, 4)

    def measured(objective: Objective, policy: str = "balanced") -> MeasuredPlan:
        return measure_plan(
            layout, policy=policy, shape=SHAPE, tolerance=0.02, objective=objective, layout_chosen=True, repeats=1
        )

    pairs, time = measured(Objective()), measured(Objective(row_keys=300))
    assert time.plan.row_keys == 300
    assert time.figures.work_max_over_mean <= 1.02 < max_over_mean(verify(time.plan).work_by_server)
    bounds = ("lower_bound_bytes", "busiest_lower_bound_bytes", "spanning_lower_bound_bytes")
    assert [getattr(time.figures, name) for name in bounds] == [None] * 3
    assert pairs.figures.spanning_lower_bound_bytes is not None
    senders = Layout.from_doc_lengths([[1_000] * 4, *[[100] * 40] * 3])
    kept, resent = (
        measure_plan(senders, policy="greedy", shape=SHAPE, tolerance=0.02, objective=Objective(memory=mode), repeats=1)
        for mode in ("keep", "resend")
    )
    assert kept.figures.buffer_bytes_max == verify(kept.plan).buffer_bytes_max("keep")
    assert resent.figures.buffer_bytes_max == verify(resent.plan).buffer_bytes_max("resend")
    assert kept.figures.buffer_bytes_max != resent.figures.buffer_bytes_max
    greedy = measured(Objective(row_keys=300), "greedy")
    assert greedy.plan.row_keys == 0
    rows = rows_by_server(greedy.plan)
    assert rows.sum() == 8_000
    assert (greedy.work_by_server - 300 * rows).tolist() == measured(Objective(), "greedy").work_by_server.tolist()
    assert greedy.figures.work_max_over_mean == pytest.approx(max_over_mean(greedy.work_by_server))
    assert time.figures.work_max_over_mean == pytest.approx(verify(time.plan).work_max_over_mean, rel=1e-12)


def test_work_over_shares_of_unequal_servers() -> None:
    topology = Topology(3, speeds=(2.0, 1.0, 0.0))
    assert max_over_share(np.array([6, 6, 0]), topology) == pytest.approx(1.5)
    assert max_over_share(np.array([6, 6, 1]), topology) == float("inf")
    assert max_over_share(np.array([0, 0, 0]), topology) == 0


def test_a_chosen_layout_is_used_where_documents_span_ranks() -> None:
    layout = Layout.contiguous([4_000, *[200] * 20], 2_000, 4)
    given, chosen = (
        measure_plan(layout, policy="balanced", shape=SHAPE, tolerance=0.05, layout_chosen=choice)
        for choice in (False, True)
    )
    assert given.plan.layout is layout
    assert chosen.figures.bytes_total < given.figures.bytes_total
    assert chosen.figures.pairs_total == given.figures.pairs_total
    assert chosen.plan.layout.tokens_by_rank.max() <= 2_000
    whole = measure_plan(LAYOUT, policy="balanced", shape=SHAPE, tolerance=0.05, layout_chosen=True)
    assert whole.plan.layout is LAYOUT


def test_every_compared_policy_is_measured() -> None:
    layout = Layout.contiguous([2_000, *[150] * 10, 500], 1_000, 4)
    for policy in COMPARED:
        figures = measure_plan(layout, policy=policy, shape=SHAPE, tolerance=0.05, repeats=1).figures
        assert figures.tasks > 0
