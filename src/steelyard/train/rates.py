"""How fast this rank was in its last steps, for planning with `attention.speeds = "measured"`."""

from __future__ import annotations

from collections import deque
from statistics import median

from steelyard.planner.rates import Rate


class RateMeter:
    """Keeps the last steps and gives their median: a single disturbed step changes nothing.

    Args:
        steps: how many are kept.
    """

    def __init__(self, steps: int = 5) -> None:
        self._rates: deque[Rate] = deque(maxlen=steps)

    def add(self, busy_s: float, attention_s: float, work: float, nano_batches: int = 1) -> None:
        """A step of this rank. One without attention says nothing of its speed there, so that stays as it was; without
        any step with attention there is no rate.

        Args:
            busy_s: its time, less all waiting.
            attention_s: the part of it in attention kernels.
            work: done in that time, in the unit of the plan.
            nano_batches: into which the step was divided.
        """
        if work > 0 and attention_s > 0:
            pair_s = attention_s / work
        elif self._rates:
            pair_s = self._rates[-1].pair_s
        else:
            return
        self._rates.append(Rate(max(0.0, busy_s - attention_s) / nano_batches, pair_s))

    @property
    def rate(self) -> Rate | None:
        """The median of the last steps; None before the first."""
        rates = list(self._rates)  # a copy: the planning thread reads while the step adds
        if not rates:
            return None
        return Rate(median(r.token_wise_s for r in rates), median(r.pair_s for r in rates))
