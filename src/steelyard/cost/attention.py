"""Work of core attention: how many (query, key) pairs a query range has, and the floating-point operations of a pair.

A causal query at position p of its document sees the keys [0, p]: p + 1 pairs. With a window of w keys it sees
[max(0, p − w + 1), p]: min(p + 1, w) pairs. Everything here is exact integer arithmetic, because the planner decides
with it and every rank and platform must decide alike. Positions stay below 2³⁰ (`domain.limits`), so that 8 × pairs
fits 64 bits.

Two families: the plain functions take and return Python integers, the `*_array` functions int64 arrays.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from steelyard.domain.arrays import IntArray

FORWARD_FLOPS_PER_PAIR_AND_CHANNEL = 4  # two matrix products, a multiplication and an addition each
BACKWARD_OVER_FORWARD = 2.5  # five matrix products instead of two, since the scores are computed anew


def row_pairs(position: int, window: int | None = None) -> int:
    """Pairs of the single query at `position`."""
    return position + 1 if window is None else min(position + 1, window)


def pairs_before(end: int, window: int | None = None) -> int:
    """Pairs of the queries [0, end) of one document."""
    if window is None or end <= window:
        return end * (end + 1) // 2
    return window * (window + 1) // 2 + (end - window) * window


def pairs(start: int, end: int, window: int | None = None) -> int:
    """Pairs of the queries [start, end) of one document."""
    return pairs_before(end, window) - pairs_before(start, window)


def end_within(budget: int, window: int | None = None) -> int:
    """The largest end for which the queries [0, end) have at most `budget` >= 0 pairs."""
    full = None if window is None else window * (window + 1) // 2
    if full is not None and window is not None and budget > full:
        return window + (budget - full) // window
    return (isqrt(8 * budget + 1) - 1) // 2


def largest_start(end: int, at_least: int, window: int | None = None) -> int | None:
    """The largest start for which [start, end) has `at_least` pairs or more; None if [0, end) has fewer."""
    budget = pairs_before(end, window) - max(0, at_least)
    return None if budget < 0 else end_within(budget, window)


def smallest_start(end: int, at_most: int, window: int | None = None) -> int:
    """The smallest start for which [start, end) has `at_most` >= 0 pairs or fewer."""
    budget = pairs_before(end, window) - at_most
    if budget <= 0:
        return 0
    return end_within(budget - 1, window) + 1


def smallest_end(start: int, at_least: int, window: int | None = None) -> int:
    """The smallest end for which [start, end) has `at_least` pairs or more (documents have no upper end here)."""
    if at_least <= 0:
        return start
    return end_within(pairs_before(start, window) + at_least - 1, window) + 1


def pairs_before_array(end: IntArray, window: int | None = None) -> IntArray:
    """`pairs_before` of each element, int64 of the same shape."""
    if window is None:
        return end * (end + 1) // 2
    ramp: IntArray = np.minimum(end, window)
    return ramp * (ramp + 1) // 2 + (end - ramp) * window


def pairs_array(start: IntArray, end: IntArray, window: int | None = None) -> IntArray:
    """`pairs` of each element, int64 of the same shape."""
    return pairs_before_array(end, window) - pairs_before_array(start, window)


def longest_row_pairs(doc_lengths: IntArray, window: int | None = None) -> int:
    """Pairs of the longest query row of any document: the largest thing that cannot be divided. 0 without documents."""
    return row_pairs(int(doc_lengths.max()) - 1, window) if len(doc_lengths) else 0
