"""Work with a fixed cost of each row, against adding up rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.planner.work import RowWork

ROWS = st.builds(RowWork, st.none() | st.integers(1, 30), st.integers(0, 40))


def row(rows: RowWork, position: int) -> int:
    seen = position + 1 if rows.window is None else min(position + 1, rows.window)
    return seen + rows.row_keys


def added(rows: RowWork, start: int, end: int) -> int:
    return sum(row(rows, position) for position in range(start, end))


@given(ROWS, st.integers(0, 90), st.integers(0, 90))
def test_work_is_the_sum_of_its_rows(rows: RowWork, start: int, length: int) -> None:
    expected = added(rows, start, start + length)
    assert rows.of(start, start + length) == expected
    assert rows.of_array(np.array([start]), np.array([start + length])).tolist() == [expected]


@given(ROWS, st.lists(st.integers(1, 60), max_size=4))
def test_totals_and_longest_rows(rows: RowWork, lengths: list[int]) -> None:
    column = np.array(lengths, dtype=np.int64)
    assert rows.total(column) == sum(added(rows, 0, length) for length in lengths)
    assert rows.longest_row(column) == max((row(rows, length - 1) for length in lengths), default=0)


@given(ROWS, st.integers(0, 80), st.integers(0, 3_000))
def test_inverses(rows: RowWork, border: int, amount: int) -> None:
    enough = [start for start in range(border + 1) if added(rows, start, border) >= amount]
    assert rows.largest_start(border, amount) == (max(enough) if enough else None)
    assert rows.smallest_start(border, amount) == min(
        start for start in range(border + 1) if added(rows, start, border) <= amount
    )
    end = rows.smallest_end(border, amount)
    assert end == border if amount == 0 else added(rows, border, end - 1) < amount <= added(rows, border, end)
