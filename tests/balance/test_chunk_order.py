"""The order of nano-batches goes by the work and the speeds with which they will be planned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from steelyard.balance import Balancer
from steelyard.balance.chunk_order import orders_of
from steelyard.domain.shapes import AttentionShape
from steelyard.planner.rates import Rate

MIXED = [[[100], [10] * 30], [[10] * 30, [100]]]
"""Two ranks with a long document and many short ones, in turn: pairs 5050 and 1650, tokens 100 and 300."""


def surplus(work: Sequence[Sequence[int]], orders: Sequence[Sequence[int]], speeds: Sequence[float]) -> float:
    """Work above the shares in both nano-batches."""
    over = 0.0
    for index in range(2):
        chunk = [rank[order[index]] for rank, order in zip(work, orders, strict=True)]
        over += sum(max(0.0, w - sum(chunk) * s / sum(speeds)) for w, s in zip(chunk, speeds, strict=True))
    return over


def test_what_a_query_costs_counts() -> None:
    assert orders_of(MIXED, None) != [[0, 1], [0, 1]], "by pairs the long documents belong together"
    # With 17 pairs more for a query both kinds are 6750 of work: nothing is better than leaving them.
    assert orders_of(MIXED, None, row_keys=17) == [[0, 1], [0, 1]]


def test_speeds_are_asked_for_the_work_of_one_nano_batch_and_count() -> None:
    asked = []
    lengths = [[[20], [5]], [[30], [20]], [[20], [45]]]
    work = [[sum(n * (n + 1) // 2 for n in chunk) for chunk in rank] for rank in lengths]

    def speeds(total: int) -> tuple[float, ...]:
        asked.append(total)
        return (1.0, 2.0, 4.0)

    found = orders_of(lengths, None, speeds=speeds)
    assert asked == [sum(map(sum, work)) // 2]
    least = min(surplus(work, orders, speeds(0)) for orders in itertools.product([(0, 1), (1, 0)], repeat=3))
    assert surplus(work, found, speeds(0)) == least
    assert surplus(work, orders_of(lengths, None), speeds(0)) > least, "or this shows nothing"


def test_the_balancer_orders_by_its_own_settings() -> None:
    """One process plans; what it would do with several ranks is in tests/multiprocess/test_balancer.py."""
    balancer = Balancer(shape=AttentionShape(2, 1, 4), row_keys=17)
    ahead = balancer.prefetch([[5], [9]], rate=Rate(0.0, 1e-6), reorder=True)
    assert ahead.result(10).order in ((0, 1), (1, 0)) and ahead.result(10).notes == (None,)
    balancer.close()
