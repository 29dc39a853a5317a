"""The lower bounds against every plan there is, in small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_layouts import TOLERANCES, whole_documents, whole_layouts

from steelyard.cost.attention import longest_row_pairs, pairs_before_array
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B, AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner import make_plan
from steelyard.planner.bounds import busiest_bytes_bound, total_bytes_bound
from steelyard.planner.checks import verify
from steelyard.planner.shares import work_caps

SHAPES = [AttentionShape(1, 1, 1, 1), AttentionShape(2, 1, 1, 1), AttentionShape(8, 1, 4), LLAMA3_8B]


def cheapest_by_enumeration(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float
) -> tuple[int, int | None]:
    """Fewest bytes of any placement of rows that keeps the promised caps, and the smallest busiest rank among those
    in which no receiver sends. Every placement is tried."""
    work = int(pairs_before_array(layout.doc_lengths).sum())
    caps = work_caps(work, topology, tolerance, longest_row_pairs(layout.doc_lengths)).promise
    rows = [(d, q) for d, n in enumerate(layout.doc_lengths.tolist()) for q in range(n)]
    home = dict(zip(layout.shard_doc.tolist(), layout.shard_rank.tolist(), strict=True))
    best, busiest_best = None, None
    for servers in itertools.product(range(layout.ranks), repeat=len(rows)):
        load, reach = [0] * layout.ranks, {}
        out, into, queries = [0] * layout.ranks, [0] * layout.ranks, 0
        for (doc, q), server in zip(rows, servers, strict=True):
            load[server] += q + 1
            if server != home[doc]:
                queries += 1
                out[home[doc]] += shape.query_bytes
                into[server] += shape.query_bytes
                reach[doc, server] = max(q + 1, reach.get((doc, server), 0))
        if any(done > cap for done, cap in zip(load, caps, strict=True)):
            continue
        for (doc, server), keys in reach.items():
            out[home[doc]] += keys * shape.beta_bytes
            into[server] += keys * shape.beta_bytes
        cost = queries * shape.alpha_bytes + sum(reach.values()) * shape.beta_bytes
        best = cost if best is None else min(best, cost)
        if not any(o and i for o, i in zip(out, into, strict=True)):
            busiest = max(*out, *into)
            busiest_best = busiest if busiest_best is None else min(busiest_best, busiest)
    assert best is not None, "the promised caps can always be met"
    return best, busiest_best


@st.composite
def tiny_cases(draw: st.DrawFn) -> tuple[Layout, Topology]:
    ranks = draw(st.integers(2, 3))
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    assume(ranks ** sum(lengths) <= 7_000)
    places = draw(st.lists(st.integers(0, ranks - 1), min_size=len(lengths), max_size=len(lengths)))
    speeds = draw(st.just(()) | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=ranks, max_size=ranks))
    return whole_documents(lengths, places, ranks), Topology(ranks, speeds=tuple(speeds))


def check_bounds(layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float) -> None:
    total = total_bytes_bound(layout, topology, shape, tolerance)
    busiest = busiest_bytes_bound(layout, topology, shape, tolerance)
    assert total is not None and busiest is not None
    cheapest, least_busy = cheapest_by_enumeration(layout, topology, shape, tolerance)
    assert total <= cheapest
    assert least_busy is None or busiest <= least_busy


@settings(max_examples=40)
@given(tiny_cases(), st.sampled_from(SHAPES), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_no_plan_beats_the_bounds(case: tuple[Layout, Topology], shape: AttentionShape, tolerance: float) -> None:
    check_bounds(*case, shape, tolerance)


@pytest.mark.nightly
@settings(max_examples=1_500)
@given(tiny_cases(), st.sampled_from(SHAPES), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_no_plan_beats_the_bounds_in_many_cases(
    case: tuple[Layout, Topology], shape: AttentionShape, tolerance: float
) -> None:
    check_bounds(*case, shape, tolerance)


@settings(max_examples=100)
@given(whole_layouts(longest=2_000, most_ranks=12), TOLERANCES)
def test_balanced_is_not_below_the_bound(layout: Layout, tolerance: float) -> None:
    plan = make_plan(layout, shape=LLAMA3_8B, tolerance=tolerance)
    bound = total_bytes_bound(layout, plan.topology, LLAMA3_8B, tolerance)
    assert bound is not None and bound <= verify(plan).bytes_total


def test_the_discrete_term_counts() -> None:
    """Documents [1, 2] on two ranks, α = β = 1 in units of two bytes: moving row 0 of the second costs 2, not 2.45."""
    layout = Layout.from_doc_lengths([[1], [2]])
    shape = AttentionShape(1, 1, 1, 1)
    assert cheapest_by_enumeration(layout, Topology(2), shape, 0.0)[0] >= total_bytes_bound(
        layout, Topology(2), shape, 0.0
    )


def test_the_bound_is_not_vacuous() -> None:
    layout = Layout.from_doc_lengths([[131_072], *[[65_536, 65_536]] * 7])
    bound = total_bytes_bound(layout, Topology(8), LLAMA3_8B, 0.02)
    bytes_total = verify(make_plan(layout, shape=LLAMA3_8B, tolerance=0.02)).bytes_total
    assert bound is not None and 0.6 * bytes_total < bound <= bytes_total


def test_pouring_over_rooms_of_different_size() -> None:
    """A surplus of 100 over rooms 64 and 49: 64 and 36, so 8 and 6 times the slope."""
    from steelyard.planner.bounds import _pour

    alpha, beta = 4, 2
    slope = (2 * beta * (2 * alpha + beta)) ** 0.5
    poured = _pour(np.array([100, 0]), np.array([49, 64]), alpha, beta)
    assert poured.tolist() == pytest.approx([slope * 14 - beta, 0])


def test_not_available_where_documents_span_or_a_window_is_set() -> None:
    spanning, whole = Layout.contiguous([10], 5, 2), Layout.from_doc_lengths([[10], []])
    for bound in (total_bytes_bound, busiest_bytes_bound):
        assert bound(spanning, Topology(2), LLAMA3_8B, 0.02) is None
        assert bound(whole, Topology(2), LLAMA3_8B, 0.02, window=4) is None
        assert bound(Layout.from_doc_lengths([[5], [5]]), Topology(2), LLAMA3_8B, 0.02) == 0
