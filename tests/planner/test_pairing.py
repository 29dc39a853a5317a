"""Pairing of chunks: against brute force, against what may not happen, and its speed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.domain.arrays import BoolArray, IntArray
from steelyard.errors import UsageError
from steelyard.planner.pairing import pair_chunks


def total_surplus(work: IntArray, swap: BoolArray, speeds: list[float]) -> Fraction:
    """Work above the shares in both nano-batches, from the definition."""
    above, exact = Fraction(0), [Fraction(s) for s in speeds] or [Fraction(1)] * len(work)
    for chunk in (0, 1):
        mine = [int(row[chunk ^ int(turned)]) for row, turned in zip(work.tolist(), swap.tolist(), strict=True)]
        shares = [sum(mine) * speed / sum(exact) for speed in exact]
        above += sum((max(Fraction(0), have - share) for have, share in zip(mine, shares, strict=True)), Fraction(0))
    return above


def least_surplus(work: IntArray, speeds: list[float]) -> Fraction:
    swaps = (np.array(bits, dtype=np.bool_) for bits in itertools.product([False, True], repeat=len(work)))
    return min(total_surplus(work, swap, speeds) for swap in swaps)


def test_opposite_chunks_are_put_side_by_side() -> None:
    work = np.array([[900, 10], [10, 900]])
    swap = pair_chunks(work)
    assert sorted(swap.tolist()) == [False, True]
    assert total_surplus(work, swap, []) == 0


def test_nothing_changes_places_where_nothing_is_better() -> None:
    for work in ([[900, 10], [900, 10]], [[5, 5], [5, 5], [5, 5]], [[0, 0], [0, 0]], [[7, 3]], [[0, 9]]):
        assert not pair_chunks(np.array(work)).any()


def test_a_slow_rank_takes_what_suits_it() -> None:
    work, speeds = np.array([[400, 200], [100, 200]]), [2.0, 1.0]  # (400, 200) and (200, 100)
    swap = pair_chunks(work, speeds)
    assert sorted(swap.tolist()) == [False, True]
    assert total_surplus(work, swap, speeds) == least_surplus(work, speeds) == 0


WORK = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 50, 10_000]), st.integers(0, 1 << 40))
SPEED = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7])


@settings(max_examples=300)
@given(st.lists(st.tuples(WORK, WORK), min_size=1, max_size=40), st.data())
def test_it_is_never_worse_than_no_swap_and_deterministic(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    work = np.array(rows, dtype=np.int64)
    same = data.draw(st.booleans())
    speeds = [] if same else data.draw(st.lists(SPEED, min_size=len(rows), max_size=len(rows)).filter(any))
    swap = pair_chunks(work, speeds)
    assert swap.shape == (len(work),) and swap.dtype == np.bool_
    assert total_surplus(work, swap, speeds) <= total_surplus(work, np.zeros(len(work), dtype=np.bool_), speeds)
    assert swap.tolist() == pair_chunks(work.copy(), speeds).tolist()


def gap_to_the_best(ranks: int, cases: int, seed: int, slow: bool) -> tuple[Fraction, Fraction, Fraction]:
    """Surplus without a swap, as paired, and the least, over random cases with heavy tails."""
    draw = np.random.default_rng(seed)
    before = paired = least = Fraction(0)
    for _ in range(cases):
        work = np.floor(1_000 * draw.pareto(1.1, size=(ranks, 2))).astype(np.int64)
        speeds = draw.choice([1.0, 1.0, 0.5], size=ranks).tolist() if slow else []
        before += total_surplus(work, np.zeros(ranks, dtype=np.bool_), speeds)
        mine, best = total_surplus(work, pair_chunks(work, speeds), speeds), least_surplus(work, speeds)
        assert mine >= best
        paired, least = paired + mine, least + best
    return before, paired, least


@pytest.mark.parametrize("slow", [False, True])
def test_gap_to_brute_force(slow: bool, record_property: Callable[[str, object], None]) -> None:
    before, paired, least = (
        sum(part) for part in zip(*(gap_to_the_best(n, 12, n, slow) for n in (1, 2, 3, 5, 8)), strict=True)
    )
    record_property("surplus_over_least", float(paired / least))
    assert paired <= least * Fraction(1_001, 1_000)
    assert least < before


def test_heavier_first_alone_would_not_do() -> None:
    """With unequal speeds some ranks must start with their lighter chunk: a slow one beside fast light ones."""
    work, speeds = np.array([[0, 26], [20, 11], [25, 15]]), [5.0, 2.0, 5.0]
    heavier_first = work[:, 1] > work[:, 0]
    paired = total_surplus(work, pair_chunks(work, speeds), speeds)
    assert paired == least_surplus(work, speeds) < total_surplus(work, heavier_first, speeds)


def relaxed_surplus(work: IntArray) -> float:
    """No pairing has less: each rank's cheaper order, for the best total of the first nano-batch, reachable or not.

    For fixed totals the heavier chunk on the side of the larger total is never worse; the sum is piecewise linear in
    the total, so its least value lies where a chunk equals its share.
    """
    heavy, light, total = work.max(axis=1).astype(float), work.min(axis=1).astype(float), float(work.sum())
    corners = np.concatenate([len(work) * heavy, total - len(work) * light, [total / 2, heavy.sum()]])
    corners = corners[(corners >= total / 2) & (corners <= heavy.sum())]
    above = [(np.abs(heavy - c / len(work)) + np.abs(light - (total - c) / len(work))).sum() for c in corners.tolist()]
    return float(min(above)) / 2


@pytest.mark.parametrize("ranks", [64, 300])
@pytest.mark.parametrize("tail", [1.1, 2.0])
def test_many_ranks_come_close_to_a_bound(ranks: int, tail: float) -> None:
    work = np.floor(10_000 * np.random.default_rng(ranks).pareto(tail, size=(ranks, 2))).astype(np.int64)
    paired = float(total_surplus(work, pair_chunks(work), []))
    assert relaxed_surplus(work) * (1 - 1e-9) <= paired <= 1.01 * relaxed_surplus(work)


def test_growth_is_not_quadratic() -> None:
    draw = np.random.default_rng(0)
    times = []
    for ranks in (512, 4_096):
        work = np.floor(1e6 * draw.pareto(1.1, size=(ranks, 2))).astype(np.int64)
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            pair_chunks(work)
            best = min(best, time.perf_counter() - begin)
        times.append(best)
    assert times[1] < 30 * times[0]  # n log n: 11 times; n²: 64 times


@pytest.mark.parametrize(
    ("work", "speeds", "message"),
    [
        ([[1, 2, 3]], (), "shape \\(1, 3\\)"),
        ([1, 2], (), "shape \\(2,\\)"),
        ([[1, -2]], (), "-2"),
        ([[1, 2]], (1.0, 1.0), "2 speeds for 1 servers"),
        ([[1, 2]], (0.0,), "speeds"),
    ],
)
def test_mistakes_are_explained(work: list[object], speeds: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair_chunks(np.array(work), speeds)
