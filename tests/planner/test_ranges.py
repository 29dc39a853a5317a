"""The closed form against trying every range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.attention import pairs
from steelyard.planner.ranges import Prices, exact_ends, fit_range
from steelyard.planner.work import RowWork

PRICES = [Prices(1, 1), Prices(16_384, 4_096), Prices(100, 7), Prices(3, 50)]


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("work", [1, 34, 1_000, 54_321])
def test_no_range_is_cheaper_than_the_closed_form(prices: Prices, work: int) -> None:
    costs = {}
    for start in range(400):
        for end in range(start + 1, 800):
            if pairs(start, end) >= work:
                costs[start, end] = prices.alpha * (end - start) + prices.beta * end
                break
    cheapest = min(costs.values())
    bound = prices.range_bytes(work) - prices.beta / 2
    assert bound <= cheapest + 1
    found = fit_range(0, 10_000, prices.best_end(work), work, 1 << 60, 1, RowWork())
    assert found is not None
    start, end, amount = found
    assert amount >= work
    # Whole rows cost at most one more query and key than the ideal range, and b* is rounded.
    assert prices.alpha * (end - start) + prices.beta * end <= bound + 2 * (prices.alpha + prices.beta)


@given(
    st.integers(0, 300),
    st.integers(1, 300),
    st.integers(0, 700),
    st.integers(1, 50_000),
    st.integers(0, 50_000),
    st.sampled_from([1, 16, 128]),
    st.none() | st.integers(1, 64),
)
def test_a_fitted_range_is_legal(
    low: int, length: int, target: int, need: int, room: int, block: int, window: int | None
) -> None:
    high = low + length
    found = fit_range(low, high, target, need, room, block, RowWork(window))
    if found is None:
        if block == 1:
            assert pairs(low, low + 1, window) > room, "the first row fits and was not taken"
        assert pairs(max(0, high - block), high, window) > room, "any block fits and none was taken"
        return
    start, end, amount = found
    assert low <= start < end <= high
    assert amount == pairs(start, end, window) <= room
    assert start in (low, high) or start % block == 0
    assert end in (low, high) or end % block == 0


@given(st.integers(1, 400), st.integers(1, 20_000))
def test_what_is_needed_is_moved_where_room_is_ample(length: int, need: int) -> None:
    found = fit_range(0, length, length // 2, need, 1 << 60, 1, RowWork())
    assert found is not None
    start, end, amount = found
    assert amount >= min(need, pairs(0, length))
    assert end - start == length or amount - need < end, "more rows than needed"


@given(st.integers(1, 5_000))
def test_exact_ends_hold_the_work_or_barely_more(work: int) -> None:
    for end in exact_ends(0, 10_000, Prices(4, 1), work):
        found = fit_range(0, 10_000, end, work, 1 << 60, 1, RowWork())
        assert found is not None and work <= found[2] < work + end


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("tokens", [300, 4_001, 90_000])
def test_work_within_is_that_of_the_cheapest_range_of_so_many_rows(prices: Prices, tokens: int) -> None:
    work = prices.work_within(tokens)
    end = prices.best_end(work)
    found = fit_range(0, end, end, work, 1 << 60, 1, RowWork())
    assert found is not None
    start, end, _ = found
    assert abs(end - start + end - tokens) <= 3 + tokens // 1_000  # starts and ends are rounded
