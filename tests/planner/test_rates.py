"""Measured rates become speeds with which all ranks end together."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UsageError
from steelyard.planner.rates import Rate, speeds_of

rates = st.builds(Rate, st.floats(0, 10), st.floats(1e-9, 1e-6))


@given(
    st.integers(1, 10),
    st.lists(rates, min_size=1, max_size=20) | st.integers(1, 9).map(lambda n: [Rate(0.5, 1e-8)] * n),
)
def test_next_to_no_work_is_shared_by_those_who_are_first(work: int, measured: list[Rate]) -> None:
    speeds = speeds_of(work, measured)
    assert min(speeds) >= 0 and sum(speeds) > 0 and all(map(isfinite, speeds))


@pytest.mark.parametrize("measured", [[Rate(0.3, 1e-8)] * 3, [Rate(0.3, 1e-8), Rate(0.1, 3e-8)], [Rate(0.0, 1e-9)]])
def test_without_work_the_speeds_are_those_at_attention(measured: list[Rate]) -> None:
    assert speeds_of(0, measured) == tuple(1 / rate.pair_s for rate in measured)


@given(st.integers(10**6, 10**12), st.lists(rates, min_size=1, max_size=20))
def test_ranks_that_compute_end_together_and_others_are_later_anyway(work: int, measured: list[Rate]) -> None:
    speeds = speeds_of(work, measured)
    assert min(speeds) >= 0 and sum(speeds) > 0
    part = [work * speed / sum(speeds) for speed in speeds]
    ends = [rate.token_wise_s + w * rate.pair_s for rate, w in zip(measured, part, strict=True)]
    together = [end for end, w in zip(ends, part, strict=True) if w > 0]
    assert max(together) == pytest.approx(min(together), rel=1e-6, abs=1e-9)
    assert all(end >= max(together) * (1 - 1e-6) - 1e-9 for end, w in zip(ends, part, strict=True) if w == 0)


def test_equal_rates_give_equal_speeds() -> None:
    assert len(set(speeds_of(1000, [Rate(0.5, 1e-8)] * 3))) == 1


def test_a_rank_that_is_slow_at_everything_gets_less_than_its_kernel_alone_says() -> None:
    slow, fast = speeds_of(10**8, [Rate(1.0, 2e-8), Rate(0.5, 1e-8)])
    assert slow < fast / 2


def test_a_rank_that_is_late_without_attention_gets_none() -> None:
    assert speeds_of(100, [Rate(5.0, 1e-3), Rate(0.0, 1e-3)]) == (0.0, pytest.approx(100.0))


@pytest.mark.parametrize("numbers", [(-1.0, 1e-8), (0.0, 0.0), (float("nan"), 1e-8), (0.0, float("inf"))])
def test_a_rate_that_cannot_be_is_refused(numbers: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="expected token_wise_s"):
        Rate(*numbers)
