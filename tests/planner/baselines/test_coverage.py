"""What all baselines owe: every pair of their own layout once, and all tokens kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import SMALL_SHAPE, TOLERANCES, WINDOWS, layouts

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.planner.baselines import plan_greedy, plan_head_tail, plan_per_document_cp, plan_wlb
from steelyard.planner.checks import verify

BASELINES = {
    "greedy": plan_greedy,
    "head_tail": plan_head_tail,
    "per_document_cp": plan_per_document_cp,
    "wlb": plan_wlb,
}
UNCUT = ("greedy", "wlb")


def pairs_of(layout: Layout, window: int | None = None) -> int:
    rows = (min(p + 1, window or p + 1) for n in layout.doc_lengths.tolist() for p in range(n))
    return sum(rows)


@pytest.mark.parametrize("policy", BASELINES)
@settings(max_examples=100)
@given(layout=layouts(), tolerance=TOLERANCES, window=WINDOWS, node_size=st.sampled_from([1, 2, 3]))
def test_every_baseline_is_a_plan(
    policy: str, layout: Layout, tolerance: float, window: int | None, node_size: int
) -> None:
    topology = Topology(layout.ranks, node_size=node_size)
    plan = BASELINES[policy](layout, topology, SMALL_SHAPE, tolerance, window)
    report = verify(plan)
    assert plan.policy == policy
    assert plan.layout.doc_lengths.sum() == layout.doc_lengths.sum()
    assert report.pairs_total == pairs_of(plan.layout, window)
    if policy in UNCUT:
        assert plan.layout.doc_lengths.tolist() == layout.doc_lengths.tolist()


@pytest.mark.parametrize("policy", BASELINES)
@settings(max_examples=20)
@given(layout=layouts(longest=5_000, most_ranks=40))
def test_longer_documents_on_more_ranks(policy: str, layout: Layout) -> None:
    verify(BASELINES[policy](layout, Topology(layout.ranks), LLAMA3_8B, 0.02, None))


@pytest.mark.parametrize("policy", BASELINES)
@settings(max_examples=40)
@given(layout=layouts(), data=st.data())
def test_servers_of_speed_zero_and_others(policy: str, layout: Layout, data: st.DataObject) -> None:
    speed = st.sampled_from([0.0, 0.1, 1.0, 1.7])
    speeds = data.draw(st.lists(speed, min_size=layout.ranks, max_size=layout.ranks).filter(any))
    verify(BASELINES[policy](layout, Topology(layout.ranks, speeds=tuple(speeds)), SMALL_SHAPE, 0.05, None))


@pytest.mark.parametrize("plan_baseline", BASELINES.values(), ids=BASELINES)
def test_no_document_at_all(plan_baseline: Callable[..., DispatchPlan]) -> None:
    report = verify(plan_baseline(Layout.from_doc_lengths([[], [], []]), Topology(3), SMALL_SHAPE, 0.05, None))
    assert report.tasks == report.bytes_total == report.pairs_total == 0
