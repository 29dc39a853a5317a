from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner import make_plan
from steelyard.planner.bounds import busiest_bytes_bound, total_bytes_bound
from steelyard.planner.checks import verify
from steelyard.planner.measure import (
    COMPARED,
    SPANNING_BOUND_RANKS,
    MeasuredPlan,
    fastest,
    max_over_mean,
    measure_plan,
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


def test_max_over_mean() -> None:
    assert max_over_mean(np.array([1, 2, 3])) == 1.5
    assert max_over_mean(np.zeros(4, dtype=np.int64)) == 1.0


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
    for ranks, given in ((SPANNING_BOUND_RANKS, True), (SPANNING_BOUND_RANKS + 1, False)):
        many = Layout.contiguous([100, 7], 54, ranks)
        found = measure_plan(many, policy="balanced", repeats=1, **case).figures.spanning_lower_bound_bytes
        assert (found is not None) is given


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
    assert time.figures.work_max_over_mean <= 1.02 < time.work_by_server.max() / time.work_by_server.mean()
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
    assert measured(Objective(row_keys=300), "greedy").plan.row_keys == 0


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
