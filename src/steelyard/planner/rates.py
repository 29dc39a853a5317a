"""From what was measured on each rank to the speeds with which to plan: no rank waits for a slower one.

Ranks are not equally fast: a card throttles, a core is shared with somebody else. What counts is the whole time of a
nano-batch: a rank that is slow at the token-wise layers too must get so little attention that it still ends with the
others. With token-wise time b_r and s_r seconds per pair of attention, all ranks end at the same time T if rank r gets

    w_r = (T − b_r) / s_r      where Σ w_r = W,  so  T = (W + Σ b_r / s_r) / Σ 1 / s_r.

A rank whose token-wise time alone exceeds T gets nothing, and the others share its part. The w_r are the speeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.errors import UsageError


@dataclass(frozen=True)
class Rate:
    """How fast one rank is.

    Attributes:
        token_wise_s: time of a nano-batch besides core attention, in seconds.
        pair_s: seconds per pair, the plan's unit of work, over all layers, forward and backward.

    Raises:
        UsageError: a time below 0, `pair_s` not above 0, or a number that is not finite.
    """

    token_wise_s: float
    pair_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.token_wise_s < math.inf and 0 < self.pair_s < math.inf):
            raise UsageError(f"rate: {self}, expected token_wise_s >= 0 and pair_s > 0, both finite")


def speeds_of(work_pairs: int, rates: Sequence[Rate]) -> tuple[float, ...]:
    """Relative speeds, for a `Topology`, with which every rank ends a nano-batch of `work_pairs` at the same time.

    Args:
        work_pairs: of the whole nano-batch.
        rates: of each rank.

    Returns:
        Numbers >= 0, of which at least one is above 0; without work, the ranks' speeds at attention.
    """
    # Ranks by token-wise time: those that are late even without attention are the last ones, so the first ones work.
    by_time = sorted(range(len(rates)), key=lambda r: (rates[r].token_wise_s, r))
    working = len(by_time)
    while True:
        inverse = math.fsum(1 / rates[r].pair_s for r in by_time[:working])
        waited = math.fsum(rates[r].token_wise_s / rates[r].pair_s for r in by_time[:working])
        ends_s = (work_pairs + waited) / inverse
        if working == 1 or rates[by_time[working - 1]].token_wise_s <= ends_s:
            break
        working -= 1
    pairs = [0.0] * len(rates)
    for r in by_time[:working]:
        pairs[r] = max(0.0, (ends_s - rates[r].token_wise_s) / rates[r].pair_s)
    return tuple(pairs) if work_pairs > 0 and sum(pairs) > 0 else tuple(1 / rate.pair_s for rate in rates)
