"""Work of query ranges, against counting pairs one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost import attention
from steelyard.domain.limits import MAX_DOCUMENT_TOKENS

WINDOWS = st.none() | st.integers(1, 12)
SPOTS = st.integers(0, 40)


def counted(start: int, end: int, window: int | None) -> int:
    lowest = (lambda q: 0) if window is None else (lambda q: max(0, q - window + 1))
    return sum(1 for q in range(start, end) for k in range(q + 1) if k >= lowest(q))


@given(SPOTS, SPOTS, WINDOWS)
def test_pairs_are_those_counted(start: int, length: int, window: int | None) -> None:
    assert attention.pairs(start, start + length, window) == counted(start, start + length, window)


def test_window_of_four_sees_at_most_four_keys() -> None:
    assert [attention.row_pairs(p, 4) for p in range(6)] == [1, 2, 3, 4, 4, 4]


@given(st.lists(st.tuples(SPOTS, SPOTS), max_size=8), WINDOWS)
def test_arrays_agree_with_scalars(ranges: list[tuple[int, int]], window: int | None) -> None:
    start = np.array([a for a, _ in ranges], dtype=np.int64)
    end = start + np.array([n for _, n in ranges], dtype=np.int64)
    expected = [attention.pairs(int(a), int(b), window) for a, b in zip(start, end, strict=True)]
    assert attention.pairs_array(start, end, window).tolist() == expected


@given(SPOTS, st.integers(0, 900), WINDOWS)
def test_inverses_are_the_exact_borders(spot: int, amount: int, window: int | None) -> None:
    starts = range(spot + 1)
    reaching = [a for a in starts if counted(a, spot, window) >= amount]
    assert attention.largest_start(spot, amount, window) == (max(reaching) if reaching else None)
    assert attention.smallest_start(spot, amount, window) == min(
        a for a in starts if counted(a, spot, window) <= amount
    )
    end = attention.smallest_end(spot, amount, window)
    assert counted(spot, end, window) >= amount
    assert end == spot or counted(spot, end - 1, window) < amount


@given(st.integers(1, MAX_DOCUMENT_TOKENS - 1), WINDOWS)
def test_inverse_does_not_lose_a_row_to_rounding(end: int, window: int | None) -> None:
    budget = attention.pairs_before(end, window)
    following = attention.pairs_before(end + 1, window)
    budgets = [budget - 1, budget, following - 1, following]
    expected = [end - 1, end, end, end + 1]
    assert [attention.end_within(b, window) for b in budgets] == expected


def test_longest_row() -> None:
    assert attention.longest_row_pairs(np.array([3, 9, 1])) == 9
    assert attention.longest_row_pairs(np.array([3, 9, 1]), 4) == 4
    assert attention.longest_row_pairs(np.zeros(0, dtype=np.int64)) == 0
