"""The bound for documents that span ranks, against every plan there is and against the exact planner."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import all_placements, few_rows, topologies, within_caps
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import SMALL_SHAPE, TOLERANCES, contiguous_layouts, layouts

from steelyard.cost.attention import longest_row_pairs
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B, AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner import make_plan
from steelyard.planner.bounds import total_bytes_bound
from steelyard.planner.checks import verify
from steelyard.planner.reference import plan_reference
from steelyard.planner.spanning_bounds import spanning_bytes_bound

SHAPES = st.sampled_from([AttentionShape(1, 1, 1, 1), AttentionShape(2, 1, 1, 1), AttentionShape(8, 1, 4), LLAMA3_8B])
LOOSE = st.sampled_from([0.0, 0.02, 0.1, 0.4, 1.0])


@st.composite
def tiny_cases(draw: st.DrawFn) -> tuple[Layout, Topology]:
    """Any layouts on two or three ranks, few enough rows to try everything."""
    layout = few_rows(draw(layouts(longest=12, most_ranks=3)))
    return layout, draw(topologies(layout.ranks))


def check_bound(layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float) -> None:
    bound = spanning_bytes_bound(layout, topology, shape, tolerance)
    found = all_placements(layout, topology, shape)
    kept = within_caps(found, topology, tolerance, longest_row_pairs(layout.doc_lengths), promise=True)
    assert bound is not None and bound <= found.total[kept].min()


@settings(max_examples=150)
@given(tiny_cases(), SHAPES, LOOSE)
def test_no_plan_beats_the_bound(case: tuple[Layout, Topology], shape: AttentionShape, tolerance: float) -> None:
    check_bound(*case, shape, tolerance)


@pytest.mark.nightly
@pytest.mark.timeout(3_000)
@settings(max_examples=5_000)
@given(tiny_cases(), SHAPES, LOOSE)
def test_no_plan_beats_the_bound_in_many_cases(
    case: tuple[Layout, Topology], shape: AttentionShape, tolerance: float
) -> None:
    check_bound(*case, shape, tolerance)


@settings(max_examples=60)
@given(layouts(longest=2_000, most_ranks=12), TOLERANCES)
def test_balanced_is_not_below_the_bound(layout: Layout, tolerance: float) -> None:
    plan = make_plan(layout, shape=LLAMA3_8B, tolerance=tolerance)
    bound = spanning_bytes_bound(layout, plan.topology, LLAMA3_8B, tolerance)
    assert bound is not None and bound <= verify(plan).bytes_total


@settings(max_examples=10)
@given(contiguous_layouts(longest=25, most_ranks=2))
def test_the_exact_planner_is_not_below_the_bound(layout: Layout) -> None:
    topology = Topology(layout.ranks)
    bound = spanning_bytes_bound(layout, topology, SMALL_SHAPE, 0.05)
    assert bound is not None and bound <= verify(plan_reference(layout, topology, SMALL_SHAPE, 0.05)).bytes_total


@settings(max_examples=60)
@given(layouts(longest=300, most_ranks=6).filter(lambda layout: not layout.spans_ranks), LOOSE)
def test_where_no_document_spans_the_other_bound_is_as_good(layout: Layout, tolerance: float) -> None:
    """Both are right; this one divides the last room in proportion and so stays below, but for a key's rounding."""
    weaker = spanning_bytes_bound(layout, Topology(layout.ranks), LLAMA3_8B, tolerance)
    better = total_bytes_bound(layout, Topology(layout.ranks), LLAMA3_8B, tolerance)
    slack = LLAMA3_8B.beta_bytes * layout.ranks
    assert weaker is not None and better is not None and weaker <= 1.01 * better + slack


def exact_bytes(layout: Layout, tolerance: float) -> int:
    return verify(plan_reference(layout, Topology(layout.ranks), SMALL_SHAPE, tolerance)).bytes_total


def test_home_keys_must_travel() -> None:
    """One document in halves on two ranks: rank 1 needs the first half's keys, or rank 0 takes some of its queries."""
    layout = Layout.contiguous([40], 20, 2)
    bound, exact = spanning_bytes_bound(layout, Topology(2), SMALL_SHAPE, 1.0), exact_bytes(layout, 1.0)
    assert bound is not None and 0.9 * exact <= bound <= exact


def test_one_query_that_lives_elsewhere() -> None:
    """All but the last token on rank 0, which may do all the work: it needs that query and its key, no more."""
    layout = Layout.from_shards([(0, 0, 7, 0), (0, 7, 1, 1)], 2)
    bound, exact = spanning_bytes_bound(layout, Topology(2), SMALL_SHAPE, 1.0), exact_bytes(layout, 1.0)
    assert exact == SMALL_SHAPE.alpha_bytes + SMALL_SHAPE.beta_bytes
    assert bound is not None and 0.98 * exact <= bound <= exact


def test_work_that_needs_no_key_counts_once() -> None:
    """Head and tail of a document on rank 0, its middle on rank 1: each needs the other's keys, or gives work away."""
    layout = Layout.from_shards([(0, 0, 10, 0), (0, 30, 10, 0), (0, 10, 20, 1)], 2)
    bound, exact = spanning_bytes_bound(layout, Topology(2), SMALL_SHAPE, 0.1), exact_bytes(layout, 0.1)
    assert bound is not None and 0.85 * exact <= bound <= exact


def test_a_long_document_over_eight_ranks() -> None:
    """Near what `balanced` sends: the bound says something."""
    layout = Layout.contiguous([524_288, *[65_536] * 8], 131_072, 8)
    bound = spanning_bytes_bound(layout, Topology(8), LLAMA3_8B, 0.02)
    sent = verify(make_plan(layout, shape=LLAMA3_8B, tolerance=0.02)).bytes_total
    assert bound is not None and 0.6 * sent < bound <= sent


def test_speeds_and_edges() -> None:
    layout = Layout.contiguous([300, 20], 160, 2)
    slow_first = spanning_bytes_bound(layout, Topology(2, (0.1, 1.0)), SMALL_SHAPE, 0.0)
    slow_last = spanning_bytes_bound(layout, Topology(2, (1.0, 0.1)), SMALL_SHAPE, 0.0)
    assert slow_first is not None and slow_last is not None and slow_first < slow_last
    assert spanning_bytes_bound(Layout.from_doc_lengths([[], []]), Topology(2), SMALL_SHAPE, 0.1) == 0
    assert spanning_bytes_bound(Layout.from_doc_lengths([[7]]), Topology(1), SMALL_SHAPE, 0.1) == 0
    assert spanning_bytes_bound(layout, Topology(2), SMALL_SHAPE, 0.1, window=5) is None
    assert np.isfinite(slow_last)


def test_many_documents_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the documents, twice the elements that numpy's searches go through; each document once looked at all."""
    from steelyard.planner import spanning_bounds as module

    seen = [0]

    class Counting:
        def __getattr__(self, name: str) -> object:
            function = getattr(np, name)
            if name != "flatnonzero":
                return function

            def counted(mask: np.ndarray) -> np.ndarray:
                seen[0] += mask.size
                return function(mask)  # type: ignore[no-any-return]

            return counted

    monkeypatch.setattr(module, "np", Counting())
    counts = []
    for documents in (50, 200):
        seen[0] = 0
        layout = Layout.head_tail([300 + 7 * (i % 40) for i in range(documents)], 4)
        assert spanning_bytes_bound(layout, Topology(4), LLAMA3_8B, 0.05)
        counts.append(seen[0])
    assert 0 < counts[1] <= 5 * counts[0]
