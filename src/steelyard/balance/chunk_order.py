"""Which of a rank's nano-batches comes when: the order is free, so it is what leaves least to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from steelyard.cost.attention import pairs_before
from steelyard.planner.pairing import pair_chunks


def orders_of(
    lengths_by_rank: Sequence[Sequence[Sequence[int]]],
    window: int | None,
    *,
    row_keys: int = 0,
    speeds: Callable[[int], Sequence[float]] = lambda work: (),
) -> list[list[int]]:
    """Per rank, the numbers of its nano-batches in the order in which they go; in twos they may change places.

    Args:
        lengths_by_rank: document lengths of each rank's nano-batches, as many on every rank.
        window: keys that a query sees at most; None: all earlier ones.
        row_keys: work of a query besides its pairs, in pairs.
        speeds: relative speeds of the ranks for a nano-batch of that much work; () means equal.
    """
    work = np.array(
        [
            [sum(pairs_before(n, window) + row_keys * n for n in lengths) for lengths in rank]
            for rank in lengths_by_rank
        ],
        dtype=np.int64,
    )
    orders = [list(range(work.shape[1])) for _ in lengths_by_rank]
    for first in range(0, work.shape[1] - 1, 2):
        both = work[:, first : first + 2]
        for rank in np.flatnonzero(pair_chunks(both, speeds(int(both.sum()) // 2))):
            orders[rank][first : first + 2] = first + 1, first
    return orders
