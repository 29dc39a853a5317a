"""The lower bounds against every plan there is, in small cases."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import all_placements, few_rows, topologies, within_caps
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import TOLERANCES, whole_documents, whole_layouts

from steelyard.cost.attention import longest_row_pairs
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B, AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner import make_plan
from steelyard.planner.bounds import _pour, _Price, busiest_bytes_bound, total_bytes_bound
from steelyard.planner.checks import verify

SHAPES = st.sampled_from([AttentionShape(1, 1, 1, 1), AttentionShape(2, 1, 1, 1), AttentionShape(8, 1, 4), LLAMA3_8B])
SMALL_WINDOWS = st.none() | st.integers(1, 5)
LOOSE = st.sampled_from([0.0, 0.02, 0.1, 0.4, 1.0])


@st.composite
def tiny_cases(draw: st.DrawFn) -> tuple[Layout, Topology]:
    """Whole documents on two or three ranks, few enough rows to try everything."""
    ranks = draw(st.integers(2, 3))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    places = draw(st.lists(st.integers(0, ranks - 1), min_size=len(lengths), max_size=len(lengths)))
    return few_rows(whole_documents(lengths, places, ranks)), draw(topologies(ranks))


def check_bounds(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None
) -> None:
    total = total_bytes_bound(layout, topology, shape, tolerance, window)
    busiest = busiest_bytes_bound(layout, topology, shape, tolerance, window)
    assert total is not None and busiest is not None
    found = all_placements(layout, topology, shape, window)
    kept = within_caps(found, topology, tolerance, longest_row_pairs(layout.doc_lengths, window), promise=True)
    assert np.any(kept), "the promised caps can always be met"
    assert total <= found.total[kept].min()
    calm = kept & ~found.relays
    assert not np.any(calm) or busiest <= found.busiest[calm].min()


@settings(max_examples=300)
@given(tiny_cases(), SHAPES, LOOSE, SMALL_WINDOWS)
def test_no_plan_beats_the_bounds(
    case: tuple[Layout, Topology], shape: AttentionShape, tolerance: float, window: int | None
) -> None:
    check_bounds(*case, shape, tolerance, window)


@pytest.mark.nightly
@pytest.mark.timeout(3_000)
@settings(max_examples=5_000)
@given(tiny_cases(), SHAPES, LOOSE, SMALL_WINDOWS)
def test_no_plan_beats_the_bounds_in_many_cases(
    case: tuple[Layout, Topology], shape: AttentionShape, tolerance: float, window: int | None
) -> None:
    check_bounds(*case, shape, tolerance, window)


@settings(max_examples=150)
@given(whole_layouts(longest=2_000, most_ranks=12), TOLERANCES, st.none() | st.integers(1, 300))
def test_balanced_is_not_below_the_bounds(layout: Layout, tolerance: float, window: int | None) -> None:
    plan = make_plan(layout, shape=LLAMA3_8B, tolerance=tolerance, window=window)
    bound = total_bytes_bound(layout, plan.topology, LLAMA3_8B, tolerance, window)
    report = verify(plan)
    assert bound is not None and bound <= report.bytes_total
    busiest = busiest_bytes_bound(layout, plan.topology, LLAMA3_8B, tolerance, window)
    if not np.any((report.dispatch_bytes_in > 0) & (report.dispatch_bytes_out > 0)):
        assert busiest is not None and busiest <= report.busiest_bytes


def cheapest_of_one_document(price: _Price, length: int, window: int | None) -> list[int]:
    """Fewest bytes for at least F = 0, 1, … pairs of a document that lives elsewhere: every run of queries is tried.

    Runs suffice: of m queries with k keys, those nearest the last one have most pairs.
    """
    row = [q + 1 if window is None else min(q + 1, window) for q in range(length)]
    cheapest = {0: 0}
    for end in range(1, length + 1):
        for start in range(end):
            low = 0 if window is None else max(0, start - window + 1)
            cost = price.alpha * (end - start) + price.beta * (end - low)
            work = sum(row[start:end])
            cheapest[work] = min(cost, cheapest.get(work, cost))
    best, least = [], 10**18
    for work in range(sum(row), -1, -1):
        least = min(least, cheapest.get(work, least))
        best.append(least)
    return best[::-1]


@settings(max_examples=150)
@given(st.integers(1, 40), st.none() | st.integers(1, 40), st.integers(1, 50), st.integers(1, 50))
def test_the_least_bytes_of_one_document(length: int, window: int | None, alpha: int, beta: int) -> None:
    """g is never above the truth, concave, and not far below it where one document has so much work."""
    price = _Price(alpha, beta, length if window is None else min(length, window))
    truth = np.array(cheapest_of_one_document(price, length, window), dtype=np.float64)
    bound = price.least_bytes(np.arange(len(truth), dtype=np.float64))
    assert np.all(bound <= truth * (1 + 1e-12))
    assert np.all(np.diff(bound) >= 0) and np.all(np.diff(bound, 2) <= 1e-9 * truth[-1])


def test_the_least_bytes_are_nearly_the_truth() -> None:
    for window, most in ((None, 0.02), (40, 0.05)):
        price = _Price(4, 1, 200 if window is None else window)
        truth = np.array(cheapest_of_one_document(price, 200, window), dtype=np.float64)[200:]
        bound = price.least_bytes(np.arange(200, 200 + len(truth), dtype=np.float64))
        free = slice(0, len(truth) // 3)  # further up, documents without a window are clipped
        assert np.max(truth[free] / bound[free]) < 1 + most


def test_the_discrete_term_counts() -> None:
    """Documents [1, 2] on two ranks, prices of query, output, key, value 1: moving row 0 of the second costs 4."""
    layout, shape = Layout.from_doc_lengths([[1], [2]]), AttentionShape(1, 1, 1, 1)
    found = all_placements(layout, Topology(2), shape)
    kept = within_caps(found, Topology(2), 0.0, 2, promise=False)
    bound = total_bytes_bound(layout, Topology(2), shape, 0.0)
    assert found.total[kept].min() == 4 and bound is not None and bound <= 4


def test_the_bound_is_not_vacuous() -> None:
    layout = Layout.from_doc_lengths([[131_072], *[[65_536, 65_536]] * 7])
    bound = total_bytes_bound(layout, Topology(8), LLAMA3_8B, 0.02)
    bytes_total = verify(make_plan(layout, shape=LLAMA3_8B, tolerance=0.02)).bytes_total
    assert bound is not None and 0.6 * bytes_total < bound <= bytes_total


def test_pouring_over_rooms_of_different_size() -> None:
    """A surplus of 100 over rooms 64 and 49: 64 and 36, so 8 and 6 times the slope."""
    alpha, beta = 4, 2
    slope = (2 * beta * (2 * alpha + beta)) ** 0.5
    poured = _pour(np.array([100, 0]), np.array([49, 64]), _Price(alpha, beta, 1_000))
    assert poured.tolist() == pytest.approx([slope * 14 - beta, 0])


def test_short_documents_cost_more_than_the_root() -> None:
    """A surplus of 5,000 pairs out of documents of 10: at least (α + β)/10 a pair, more than c·√5,000."""
    layout, shape = Layout.from_doc_lengths([[10] * 182, []]), AttentionShape(1, 1, 1, 1)
    bound = total_bytes_bound(layout, Topology(2), shape, 0.0)
    surplus = 182 * 55 // 2 - 10  # the promised cap is a row above the share
    assert bound is not None and bound >= surplus * 4 / 10 > (48 * surplus) ** 0.5


def test_prices_of_another_pass() -> None:
    layout = Layout.from_doc_lengths([[1_000], []])
    both = [
        total_bytes_bound(layout, Topology(2), LLAMA3_8B, 0.02, alpha_bytes=a, beta_bytes=b)
        for a, b in ((4, 2), (8, 4))
    ]
    assert None not in both and both[1] == pytest.approx(2 * (both[0] or 0), abs=2)
    forward = total_bytes_bound(layout, Topology(2), LLAMA3_8B, 0.02)
    named = total_bytes_bound(layout, Topology(2), LLAMA3_8B, 0.02, alpha_bytes=16_384, beta_bytes=4_096)
    assert forward == named
    with pytest.raises(UsageError, match="alpha_bytes=0"):
        total_bytes_bound(layout, Topology(2), LLAMA3_8B, 0.02, alpha_bytes=0)


def test_not_available_where_documents_span() -> None:
    spanning = Layout.contiguous([10], 5, 2)
    for bound in (total_bytes_bound, busiest_bytes_bound):
        assert bound(spanning, Topology(2), LLAMA3_8B, 0.02) is None
        assert bound(Layout.from_doc_lengths([[5], [5]]), Topology(2), LLAMA3_8B, 0.02) == 0
        assert bound(Layout.from_doc_lengths([[], []]), Topology(2), LLAMA3_8B, 0.02) == 0
