"""Shares and caps are exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner.shares import exact_tolerance, speed_weights, work_caps


def test_tolerance_is_the_decimal_number_written() -> None:
    assert exact_tolerance(0.02) == Fraction(1, 50)
    assert exact_tolerance(1) == 1


@pytest.mark.parametrize("tolerance", [-0.01, 131_073, 1e13, float("inf"), float("nan")])
def test_impossible_tolerances(tolerance: float) -> None:
    with pytest.raises(UsageError, match=r"tolerance=.*expected a number from 0 to 131,072"):
        exact_tolerance(tolerance)


def test_speeds_keep_their_proportion() -> None:
    assert speed_weights(Topology(2)) == [1, 1]
    assert speed_weights(Topology(3, speeds=(1.0, 0.5, 0.0))) == [2, 1, 0]
    third, one = speed_weights(Topology(2, speeds=(1 / 3, 1.0)))
    assert Fraction(third, one) == Fraction(1 / 3)


@given(
    st.integers(0, 10**12),
    st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.5]), min_size=1, max_size=5).filter(any),
    st.sampled_from([0.0, 0.02, 0.5, 131_072.0]),
    st.integers(0, 10**6),
)
def test_caps_hold_all_work_and_are_as_tight_as_said(
    total: int, speeds: list[float], tolerance: float, longest: int
) -> None:
    caps = work_caps(total, Topology(len(speeds), speeds=tuple(speeds)), tolerance, longest)
    assert sum(caps.target) >= total
    exact, whole = Fraction(str(tolerance)), sum(map(Fraction, speeds))
    for target, promise, speed in zip(caps.target, caps.promise, speeds, strict=True):
        share = total * Fraction(speed) / whole
        assert min(share, total) <= target < max(share * (1 + exact), share) + 1
        assert max(target, promise) <= total
        if share * exact >= longest:
            assert promise == min(int(share * (1 + exact)), total)
        else:
            assert promise <= share + longest or promise == target
