"""How times are taken; that they are those of this machine is for a benchmark to say."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from steelyard.simulate.calibrate import AttentionSample
from steelyard.train.measure_device import Clock, _scaled, _slowest_rank


class Hands:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_window_holds_as_many_calls_as_fill_it() -> None:
    hands, calls = Hands(), itertools.count()

    def work() -> None:
        next(calls)
        hands.now_s += 0.125

    assert Clock(None, rounds=2, window_s=1.0, now=hands).seconds(work) == 0.125
    assert next(calls) == 1 + 2 * 8  # once to warm up


def test_the_median_of_the_windows_counts() -> None:
    hands, lengths = Hands(), itertools.chain([9.0, 1.0, 5.0, 2.0], itertools.repeat(1.0))

    def work() -> None:
        hands.now_s += next(lengths)

    assert Clock(None, rounds=3, window_s=0.5, now=hands).seconds(work) == 2.0


def test_parts_of_a_call_are_timed_apart() -> None:
    hands = Hands()

    def work(lap: Callable[[str], None]) -> None:
        hands.now_s += 1.0
        lap("forward")
        hands.now_s += 3.0
        lap("backward")

    assert Clock(None, rounds=1, window_s=10.0, now=hands).parts(work) == {"forward": 1.0, "backward": 3.0}


def test_the_slowest_rank_counts_and_samples_are_put_to_one_speed() -> None:
    one, two = AttentionSample(64, 2, 8, 32, 2.0, 2.0), AttentionSample(64, 2, 8, 32, 1.0, 4.0)
    [slowest] = _slowest_rank([(one,), (two,)])
    assert slowest == AttentionSample(64, 2, 8, 32, 2.0, 4.0)
    assert _scaled(slowest, 0.5) == AttentionSample(64, 2, 8, 32, 1.0, 2.0)
