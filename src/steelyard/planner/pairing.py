"""Which of a rank's two chunks goes first when two nano-batches alternate, so that each is as balanced as it can be.

Nothing travels for this: both chunks are on the rank anyway, and a chunk that goes first on one rank may go second on
another. Rank 0 with chunks (long, short) and rank 1 with (short, long) make two lopsided nano-batches as they stand,
and two even ones once one of them swaps. What is left is the planner's to move.

Shapes: R ranks, C = 2 chunks of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from steelyard.domain.arrays import BoolArray, IntArray
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner.shares import speed_weights

MAX_IMPROVEMENTS = 16  # turns of one rank or two; each lowers the surplus
LEAST_GAIN = 512  # with many ranks a turn must gain 1/512 of the surplus, or the search ends
FEW_RANKS = 16
PAIR_CANDIDATES = 16  # ranks that are tried in twos, of each direction
WEIGHT_BITS, PRODUCT_BITS = 24, 61  # in the search Σ weights < 2²⁴ (or R), Σ work × Σ weights < 2⁶¹: int64 holds it all


def pair_chunks(work_RC: IntArray, speeds: Sequence[float] = ()) -> BoolArray:
    """Decide on which ranks the second chunk goes first.

    A nano-batch's surplus is what its ranks have above their shares of it (total × speed / sum of speeds): the work
    that must move. The surpluses of both nano-batches together are made small. All start with the heavier chunk: for
    given totals of the two nano-batches that is never worse, because of two sorted pairs of numbers, matching them in
    order costs least; only the totals ask for turning any back. Then one rank or two turn at a time while that helps.
    Near n log n, deterministic, and never worse than leaving all chunks as they are.

    Args:
        work_RC: pairs of each rank's two chunks, int64 (ranks, 2).
        speeds: relative speed of each rank; () means equal.

    Returns:
        bool (ranks,): True where the chunks change places. All False if nothing is better.

    Raises:
        UsageError: another shape, negative work, or speeds that do not fit.
    """
    work_RC = np.asarray(work_RC, dtype=np.int64)
    if work_RC.ndim != 2 or work_RC.shape[1] != 2 or not len(work_RC):
        raise UsageError(f"pairing: work of shape {work_RC.shape}, expected (ranks, 2): two chunks of each rank")
    if work_RC.min() < 0:
        raise UsageError(f"pairing: work {work_RC.min()}, expected numbers >= 0")
    weights = speed_weights(Topology(len(work_RC), speeds=tuple(speeds)))
    scaled_RC, small_weights = _fit_int64(work_RC, weights)
    none = np.zeros(len(work_RC), dtype=np.bool_)
    best, least = none, surplus(work_RC, none, weights)
    heavier_first: BoolArray = scaled_RC[:, 1] > scaled_RC[:, 0]
    starts = [heavier_first] + [none] * (len(weights) <= FEW_RANKS)
    for start in starts:
        swap = _improve(scaled_RC, small_weights, start)
        if 2 * np.count_nonzero(swap) > len(swap):
            swap = ~swap  # the same two nano-batches in the other order
        found = surplus(work_RC, swap, weights)
        if found < least:
            best, least = swap, found
    return best


def surplus(work_RC: IntArray, swap: BoolArray, weights: Sequence[int]) -> int:
    """Work above the shares in both nano-batches together × 2 × the sum of the weights: an exact whole number."""
    whole, doubled = sum(weights), 0
    first, second = _in_order(work_RC, swap)
    for chunk in (first.tolist(), second.tolist()):
        total = sum(chunk)
        doubled += sum(abs(work * whole - total * weight) for work, weight in zip(chunk, weights, strict=True))
    return doubled


def _in_order(work_RC: IntArray, swap: BoolArray) -> tuple[IntArray, IntArray]:
    return np.where(swap, work_RC[:, 1], work_RC[:, 0]), np.where(swap, work_RC[:, 0], work_RC[:, 1])


def _fit_int64(work_RC: IntArray, weights: list[int]) -> tuple[IntArray, IntArray]:
    """Work and weights with fewer digits where products would overflow; the search may round, its verdict is exact."""
    limit = max(1 << WEIGHT_BITS, len(weights))
    over = max(0, sum(weights).bit_length() - limit.bit_length() + 1)
    small = [weight >> over for weight in weights]
    room = PRODUCT_BITS - sum(small).bit_length()
    over = max(0, sum(work_RC.reshape(-1).tolist()).bit_length() - room)
    return work_RC >> over, np.array(small, dtype=np.int64)


class _Deviation:
    """Σ |work × Σ weights − total × weight| over all ranks as a function of `total`, in O(log R) each."""

    def __init__(self, work: IntArray, weights: IntArray) -> None:
        whole = int(weights.sum())
        scaled = work * whole
        # Rank r is above its share up to this total; a rank of speed 0 always is.
        turns = np.where(weights > 0, scaled // np.maximum(weights, 1), np.iinfo(np.int64).max)
        order = np.argsort(turns, kind="stable")
        self._turns = turns[order]
        self._work = np.array([0, *accumulate(scaled[order].tolist())], dtype=np.int64)
        self._weights = np.array([0, *accumulate(weights[order].tolist())], dtype=np.int64)

    def at(self, total: IntArray) -> IntArray:
        below = np.searchsorted(self._turns, total, side="left")
        all_work, all_weights = self._work[-1], self._weights[-1]
        under = total * self._weights[below] - self._work[below]
        over = all_work - self._work[below] - total * (all_weights - self._weights[below])
        deviation: IntArray = under + over
        return deviation


class _Search:
    """One arrangement, and what it would cost after turning some ranks round."""

    def __init__(self, work_RC: IntArray, weights: IntArray, swap: BoolArray) -> None:
        self.first, self.second = _in_order(work_RC, swap)
        self.weights, self.whole = weights, int(weights.sum())
        self.total, self.both = int(self.first.sum()), int(work_RC.sum())
        self._first, self._second = _Deviation(self.first, weights), _Deviation(self.second, weights)
        now = np.array([self.total], dtype=np.int64)
        self.cost = int(self._others(now)[0])

    def _others(self, total: IntArray) -> IntArray:
        return self._first.at(total) + self._second.at(self.both - total)

    def _turn(self, ranks: IntArray, total: IntArray) -> IntArray:
        """What turning each of `ranks` changes while the first nano-batch has `total` work."""
        first, second = self.first[ranks] * self.whole, self.second[ranks] * self.whole
        share, other = total * self.weights[ranks], (self.both - total) * self.weights[ranks]
        change: IntArray = np.abs(second - share) + np.abs(first - other)
        change -= np.abs(first - share) + np.abs(second - other)
        return change

    def best_turn(self) -> tuple[int, list[int]]:
        """The cheapest arrangement that turns one rank or two: (cost, ranks); no ranks if none is cheaper."""
        ranks = np.flatnonzero(self.first != self.second)
        if not len(ranks):
            return self.cost, []
        shift = (self.second - self.first)[ranks]
        single = self._others(self.total + shift) + self._turn(ranks, self.total + shift)
        lowest = int(np.argmin(single))
        best = (int(single[lowest]), [int(ranks[lowest])])
        near = self._candidates(ranks, shift, single)
        one, other = np.triu_indices(len(near), k=1)
        one, other = near[one], near[other]
        if len(one):
            total = self.total + (self.second - self.first)[one] + (self.second - self.first)[other]
            double = self._others(total) + self._turn(one, total) + self._turn(other, total)
            lowest = int(np.argmin(double))
            if double[lowest] < best[0]:
                best = (int(double[lowest]), [int(one[lowest]), int(other[lowest])])
        return best if best[0] < self.cost else (self.cost, [])

    def _candidates(self, ranks: IntArray, shift: IntArray, single: IntArray) -> IntArray:
        """Ranks worth trying in twos: cheap to turn where the totals are now, or on their own; of both directions."""
        now = np.full(len(ranks), self.total, dtype=np.int64)
        alone = self._turn(ranks, now)
        chosen = [np.argsort(single, kind="stable")[:PAIR_CANDIDATES]]
        for side in (shift > 0, shift < 0):
            members = np.flatnonzero(side)
            chosen.append(members[np.argsort(alone[members], kind="stable")[:PAIR_CANDIDATES]])
        unique: IntArray = ranks[np.unique(np.concatenate(chosen))]
        return unique


def _improve(work_RC: IntArray, weights: IntArray, swap: BoolArray) -> BoolArray:
    swap = swap.copy()
    for _ in range(MAX_IMPROVEMENTS):
        search = _Search(work_RC, weights, swap)
        cost, ranks = search.best_turn()
        if not ranks:
            break
        swap[ranks] = ~swap[ranks]
        if len(weights) > FEW_RANKS and (search.cost - cost) * LEAST_GAIN < search.cost:
            break
    return swap
