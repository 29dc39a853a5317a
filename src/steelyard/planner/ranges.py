"""Which query range to move: the closed form for the cheapest range of a given work, in integers.

A server that holds nothing of a document and takes F pairs of it as the queries [b − m, b) costs α·m + β·b bytes. With
b² − (b − m)² = 2F, the least of α·m + β·b is at b − m = √(b² − 2F) = b·α/(α + β), hence

    b*² = 2F · (α + β)² / (β·(2α + β)),   bytes = √(2β(2α + β)·F).

So the best range is in the interior of a long document: late queries are work-dense but drag many keys along, early
ones need few keys but are many. The bytes grow with √F: few large ranges are cheaper than many small ones. Where [0, k)
is on the server already, an end below k gains nothing (the same work with more queries), so the best end is max(b*, k).

Where a row costs `row_keys` more than its keys, all this holds for positions shifted by as many (`work`), and keys are
β·(b − row_keys); where that would begin before the document, the best range is the document's head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

from steelyard.planner.work import RowWork

EXACT_LENGTHS_TRIED = 16  # each side of the cheapest number of queries


@dataclass(frozen=True)
class Prices:
    """Bytes per query token (out and back) and per key token, and what follows from them."""

    alpha: int
    beta: int
    row_keys: int = 0

    @cached_property
    def _end_ratio(self) -> tuple[int, int]:
        """Square of b* per pair, as a fraction."""
        return 2 * (self.alpha + self.beta) ** 2, self.beta * (2 * self.alpha + self.beta)

    @cached_property
    def _square_bytes(self) -> int:
        """Square of the cheapest bytes per pair."""
        return 2 * self.beta * (2 * self.alpha + self.beta)

    def best_end(self, work: int) -> int:
        """b* for `work`, rounded down."""
        above, below = self._end_ratio
        return isqrt(work * above // below) - self.row_keys

    def work_within(self, tokens: int) -> int:
        """Work of the cheapest range whose queries and keys are so many tokens: b* + m* = tokens. About, if rows cost
        more than their keys."""
        alpha, beta = self.alpha, self.beta
        return tokens**2 * beta * (2 * alpha + beta) // (2 * (alpha + 2 * beta) ** 2)

    def range_bytes(self, work: int) -> int:
        """Bytes of the cheapest range of `work`, rounded down."""
        extra = self.row_keys
        if not extra:
            return isqrt(self._square_bytes * work)
        alpha, beta = self.alpha, self.beta
        if 2 * work * alpha**2 < extra**2 * beta * (2 * alpha + beta):
            return (alpha + beta) * (isqrt(2 * work + extra**2) - extra)
        return isqrt(self._square_bytes * work) - beta * extra


def exact_ends(low: int, high: int, prices: Prices, work: int) -> list[int]:
    """Ends within [low, high] near b* of ranges that hold `work` or barely more; for cuts at any row, no window.

    A range of m queries that ends at b has m·(b + row_keys) − m(m − 1)/2 work: for each m near m* the smallest such b.
    """
    best = prices.best_end(work) + prices.row_keys
    near = max(1, best * prices.beta // (prices.alpha + prices.beta))
    ends = set()
    for count in range(max(1, near - EXACT_LENGTHS_TRIED), near + EXACT_LENGTHS_TRIED + 1):
        end = -(-(work + count * (count - 1) // 2) // count) - prices.row_keys
        if low + count <= end <= high:
            ends.add(end)
    return sorted(ends)


def fit_range(
    low: int, high: int, target_end: int, need: int, room: int, block: int, rows: RowWork
) -> tuple[int, int, int] | None:
    """Cut [start, end) out of [low, high), ending near `target_end`.

    Its work is at least `need`, by as little as the block allows, if they fit into `room`; otherwise as many as
    fit. Both cuts are multiples of `block`, or ends of [low, high).

    Returns:
        (start, end, work), or None if not even one block fits.
    """
    whole = rows.of(low, high)
    if whole <= room and whole <= need:
        return low, high, whole
    wanted, end = min(need, room, whole), target_end
    if end <= low or rows.of(low, end) < wanted:
        end = max(end, rows.smallest_end(low, wanted))
    end = min(high, -(-end // block) * block)
    if need <= room:
        start = rows.largest_start(end, need)
        start = low if start is None else max(low, start // block * block)
        if start < low + block:
            start = low if rows.of(low, end) <= room else start
        amount = rows.of(start, end)
        if amount <= room:
            return (start, end, amount) if start < end else None
    start = max(low, -(-rows.smallest_start(end, room) // block) * block)
    if start >= end:
        # A later row may be too long for the room where an earlier one is not.
        return _earlier_range(low, end, room, block, rows) if block == 1 else None
    return start, end, rows.of(start, end)


def _earlier_range(low: int, end: int, room: int, block: int, rows: RowWork) -> tuple[int, int, int] | None:
    """The range of one block at the start of [low, end), if it fits into `room`."""
    first = min(end, (low // block + 1) * block)
    amount = rows.of(low, first)
    return (low, first, amount) if low < first and amount <= room else None
