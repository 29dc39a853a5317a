"""Rates of a rank from its steps."""

from __future__ import annotations

import pytest

from steelyard.planner.rates import speeds_of
from steelyard.train.rates import RateMeter


def test_before_the_first_step_nothing_is_known() -> None:
    assert RateMeter().rate is None


def test_busy_time_is_split_into_token_wise_and_attention() -> None:
    meter = RateMeter()
    meter.add(busy_s=5.0, attention_s=2.0, work=3_000_000, nano_batches=2)
    rate = meter.rate
    assert rate is not None
    assert rate.pair_s == pytest.approx(2.0 / 3_000_000)
    assert rate.token_wise_s == pytest.approx(1.5)


def test_one_disturbed_step_changes_nothing_and_a_lasting_change_counts() -> None:
    meter = RateMeter(3)
    for attention_s in (1.0, 9.0, 1.0):
        meter.add(attention_s + 1, attention_s, work=1000)
    assert meter.rate is not None and meter.rate.pair_s == pytest.approx(1e-3)
    for attention_s in (2.0, 2.0):
        meter.add(attention_s + 1, attention_s, work=1000)
    assert meter.rate.pair_s == pytest.approx(2e-3)


def test_before_any_attention_there_is_no_rate() -> None:
    meter = RateMeter()
    meter.add(1.0, 0.0, work=0)
    assert meter.rate is None


def test_a_rank_that_was_disturbed_gets_attention_again() -> None:
    """While it gets none, its token-wise time goes on being measured."""
    meters = [RateMeter(), RateMeter()]
    for meter in meters:
        meter.add(2.0, 1.0, work=1000)
    given: list[float] = []
    for step in range(40):
        disturbed = 30.0 if step < 7 else 1.0
        rates = [meter.rate for meter in meters]
        speeds = speeds_of(2000, [rate for rate in rates if rate is not None])
        work = [2000 * speed / sum(speeds) for speed in speeds]
        meters[0].add(1.0 + work[0] / 1000, work[0] / 1000, work[0])
        meters[1].add(disturbed + work[1] / 1000, work[1] / 1000, work[1])
        given.append(work[1])
    assert min(given) == 0 and given[-1] == pytest.approx(1000)
