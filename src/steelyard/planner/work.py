"""The unit of work that a plan balances: the keys that a query row sees, and a fixed number of keys more.

With `row_keys` = 0 this is (query, key) pairs. A row at position p costs min(p + 1, window) + row_keys. That is a row
of plain pairs at position p + row_keys under a window of window + row_keys, so every formula of `cost.attention` holds
after a shift, in exact integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from steelyard.cost.attention import (
    largest_start,
    longest_row_pairs,
    pairs,
    pairs_array,
    pairs_before_array,
    smallest_end,
    smallest_start,
)
from steelyard.domain.arrays import IntArray


@dataclass(frozen=True)
class RowWork:
    """Work of query ranges in whole numbers, and its inverses.

    Attributes:
        window: keys that a query sees at most, its own included; None: all earlier ones.
        row_keys: what a query costs besides the keys that it sees, in keys.
    """

    window: int | None = None
    row_keys: int = 0

    @classmethod
    def for_documents(cls, doc_lengths: IntArray, window: int | None, row_keys: int) -> RowWork:
        """The work of these documents. A window that none is longer than is none: the closed forms then hold."""
        binds = window is not None and len(doc_lengths) > 0 and window < int(doc_lengths.max())
        return cls(window if binds else None, row_keys)

    @property
    def _width(self) -> int | None:
        return None if self.window is None else self.window + self.row_keys

    def of(self, start: int, end: int) -> int:
        """Work of the queries [start, end) of one document."""
        if self.window is None:  # the planner's innermost question: no detour
            return (end - start) * (start + end + 1 + 2 * self.row_keys) // 2
        return pairs(start + self.row_keys, end + self.row_keys, self._width)

    def of_array(self, start: IntArray, end: IntArray) -> IntArray:
        """`of` for each element."""
        return pairs_array(start + self.row_keys, end + self.row_keys, self._width)

    def longest_row(self, doc_lengths: IntArray) -> int:
        """Work of the longest query row of any document; 0 without documents."""
        return longest_row_pairs(doc_lengths, self.window) + self.row_keys if len(doc_lengths) else 0

    def total(self, doc_lengths: IntArray) -> int:
        """Work of whole documents together."""
        return int(pairs_before_array(doc_lengths, self.window).sum()) + self.row_keys * int(doc_lengths.sum())

    def largest_start(self, end: int, at_least: int) -> int | None:
        """The largest start for which [start, end) has `at_least` work or more; None if [0, end) has less."""
        if self.window is None:  # asked for most moves that are tried
            shifted = end + self.row_keys
            budget = shifted * (shifted + 1) // 2 - max(0, at_least)
            found = -1 if budget < 0 else (isqrt(8 * budget + 1) - 1) // 2 - self.row_keys
            return None if found < 0 else found
        start = largest_start(end + self.row_keys, at_least, self._width)
        return None if start is None or start < self.row_keys else start - self.row_keys

    def smallest_start(self, end: int, at_most: int) -> int:
        """The smallest start for which [start, end) has `at_most` work or less."""
        return max(0, smallest_start(end + self.row_keys, at_most, self._width) - self.row_keys)

    def smallest_end(self, start: int, at_least: int) -> int:
        """The smallest end for which [start, end) has `at_least` work or more."""
        return smallest_end(start + self.row_keys, at_least, self._width) - self.row_keys
