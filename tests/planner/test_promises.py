"""Promises 1 to 6 for anything a caller may ask for at once: speeds, memory caps, nodes, windows, objectives.

Hundreds of cases here, thousands with `-m nightly`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from random_layouts import SMALL_SHAPE, WINDOWS, layouts

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError
from steelyard.planner.balanced import plan_balanced
from steelyard.planner.checks import verify
from steelyard.planner.layouts import woven_layout
from steelyard.planner.objective import Memory, Objective, Passes
from steelyard.planner.shares import speed_weights

TOLERANCES = st.sampled_from([0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5])
SPEEDS = st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0, 1.0, 1.7, 1e6])
OBJECTIVES = st.builds(
    Objective,
    st.sampled_from(get_args(Passes)),
    st.sampled_from(get_args(Memory)),
    st.sampled_from([0, 0, 1, 140, 10_000]),
)


@st.composite
def cases(draw: st.DrawFn, *, longest: int, most_ranks: int) -> tuple[Layout, Topology]:
    layout = draw(layouts(longest=longest, most_ranks=most_ranks))
    ranks = layout.ranks
    speeds = draw(st.just([]) | st.lists(SPEEDS, min_size=ranks, max_size=ranks).filter(any))
    cap = st.integers(0, longest) | st.integers(0, 10 * longest)
    memory = draw(st.just([]) | st.just([]) | st.lists(cap, min_size=ranks, max_size=ranks))
    node_size, weight = draw(st.integers(1, ranks)), draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    return layout, Topology(ranks, tuple(speeds), tuple(memory), node_size, weight)


def check_promises(
    layout: Layout, topology: Topology, tolerance: float, window: int | None, objective: Objective
) -> None:
    try:
        plan = plan_balanced(layout, topology, SMALL_SHAPE, tolerance, window, objective)
    except PlanError as error:
        assert topology.memory_tokens and layout.spans_ranks, "only memory can make a plan impossible"
        assert "memory_tokens" in str(error)
        return
    report = verify(plan)
    received = np.zeros(topology.servers, dtype=np.int64)
    for server, cap in enumerate(topology.memory_tokens):
        received[server] = received_tokens(plan, server)
        assert received[server] <= cap
    assert topology.memory_tokens or not plan.memory_limited
    check_balance(plan, topology)
    again = plan_balanced(
        Layout.from_columns(
            *(c.copy() for c in (layout.shard_doc, layout.shard_start, layout.shard_length, layout.shard_rank)),
            ranks=layout.ranks,
        ),
        topology, SMALL_SHAPE, tolerance, window, objective,
    )  # fmt: skip
    for name in ("doc", "start", "end", "server", "shard"):
        assert getattr(plan.tasks, name).tolist() == getattr(again.tasks, name).tolist(), "promise 5"
    assert report.received_tokens_max == max(received_tokens(plan, server) for server in range(topology.servers))


def check_balance(plan: DispatchPlan, topology: Topology) -> None:
    """Promise 2, row by row and in fractions, with no arithmetic of the planner's."""
    if plan.memory_limited:
        return
    work, longest = [0] * topology.servers, 0
    for task in plan.tasks:
        for position in range(task.start, task.end):
            row = min(position + 1, plan.window or position + 1) + plan.row_keys
            work[task.server] += row
            longest = max(longest, row)
    speeds = speed_weights(topology)
    exact = Fraction(str(plan.tolerance))
    for done, speed in zip(work, speeds, strict=True):
        share = Fraction(sum(work) * speed, sum(speeds))
        assert done <= (share * (1 + exact) if share * exact >= longest else share + longest), "promise 2"


def received_tokens(plan: DispatchPlan, server: int) -> int:
    """Query rows and key rows that a server gets from others, as sets of rows."""
    queries, keys, layout = set(), set(), plan.layout
    held = set()
    for shard in layout:
        if shard.rank == server:
            held |= {(shard.doc, position) for position in range(shard.start, shard.start + shard.length)}
    for task in plan.tasks:
        if task.server == server:
            low = 0 if plan.window is None else max(0, task.start - plan.window + 1)
            queries |= {(task.doc, position) for position in range(task.start, task.end)}
            keys |= {(task.doc, position) for position in range(low, task.end)}
    return len(queries - held) + len(keys - held)


@settings(max_examples=400)
@example((Layout.from_doc_lengths([[5], []]), Topology(2, speeds=(0.0, 1.0))), 0.0, None, Objective())
@given(cases(longest=40, most_ranks=6), TOLERANCES, WINDOWS, OBJECTIVES)
def test_promises(case: tuple[Layout, Topology], tolerance: float, window: int | None, objective: Objective) -> None:
    check_promises(*case, tolerance, window, objective)


@settings(max_examples=40)
@given(cases(longest=2_000, most_ranks=12), TOLERANCES, st.none() | st.integers(1, 900), OBJECTIVES)
def test_promises_for_longer_documents(
    case: tuple[Layout, Topology], tolerance: float, window: int | None, objective: Objective
) -> None:
    check_promises(*case, tolerance, window, objective)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@settings(max_examples=6_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(longest=60, most_ranks=9), TOLERANCES, WINDOWS, OBJECTIVES)
def test_promises_thousands_of_times(
    case: tuple[Layout, Topology], tolerance: float, window: int | None, objective: Objective
) -> None:
    check_promises(*case, tolerance, window, objective)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@settings(max_examples=1_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(longest=3_000, most_ranks=24), TOLERANCES, st.none() | st.integers(1, 2_000), OBJECTIVES)
def test_promises_thousands_of_times_for_longer_documents(
    case: tuple[Layout, Topology], tolerance: float, window: int | None, objective: Objective
) -> None:
    check_promises(*case, tolerance, window, objective)


def large_case(data: st.DataObject, ranks: int) -> None:
    lengths = data.draw(st.lists(st.sampled_from([1, 3, 511, 1_001, 12_345, 65_535, 400_001]), min_size=1, max_size=60))
    per_rank = -(-sum(lengths) // data.draw(st.integers(1, ranks)))
    tolerance = data.draw(TOLERANCES)
    speeds = data.draw(st.sampled_from([(), tuple([1.0, 0.5] * ranks)[:ranks], tuple([1.0, 0.0] * ranks)[:ranks]]))
    topology = Topology(ranks, speeds=speeds, node_size=min(8, ranks), intra_node_weight=0.2)
    woven = data.draw(st.booleans())
    layout = (
        woven_layout(lengths, per_rank, ranks, topology=topology, tolerance=tolerance)
        if woven
        else Layout.contiguous(lengths, per_rank, ranks)
    )
    verify(plan_balanced(layout, topology, LLAMA3_8B, tolerance))


@settings(max_examples=6)
@given(st.data(), st.sampled_from([1, 2, 63, 512]))
def test_promises_up_to_512_servers(data: st.DataObject, ranks: int) -> None:
    large_case(data, ranks)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 512))
def test_promises_up_to_512_servers_hundreds_of_times(data: st.DataObject, ranks: int) -> None:
    large_case(data, ranks)
