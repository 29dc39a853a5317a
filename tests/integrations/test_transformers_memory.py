"""An attached model takes no more memory than the stock one and the exchange buffers that its plans state."""

from __future__ import annotations

import pytest
import transformers_memory_ranks as on_rank

from steelyard.runtime.dispatch import Memory
from steelyard.testing.allocations import peak_of
from steelyard.testing.pool import WorkerPool

MIB = 2**20
ROUNDING = 32 * 1024
"""Ranges of the arena are multiples of 512 bytes, and each step of each layer hands on a token of one element."""

SECOND_GRADIENTS = 64 * 1024
"""Ping-pong is two passes: the second gradient of a parameter or two stands beside the first until they are summed."""

ONE_LONG = [[1536, 512], [256] * 8]
MANY_CUTS = [[1024, 64, 300, 660], [300, 300, 700, 96, 64, 128, 460]]
STEPS = [ONE_LONG, MANY_CUTS]


@pytest.fixture(scope="module")
def stock(pool: WorkerPool) -> list[dict[str, int]]:
    """The model with our kernel, every rank computing what it holds: nothing is exchanged."""
    return pool.run(on_rank.peak, 2, STEPS, "packed")


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("memory", ["keep", "resend"])
def test_memory_above_stock_is_what_the_plan_states(
    pool: WorkerPool, stock: list[dict[str, int]], memory: Memory, ping_pong: bool
) -> None:
    """Over two steps with other documents."""
    attached = pool.run(on_rank.peak, 2, STEPS, "balanced", memory, ping_pong)
    for own, other in zip(attached, stock, strict=True):
        slack = ROUNDING + (SECOND_GRADIENTS if ping_pong else 0)
        assert own["peak"] <= other["peak"] + own["stated"] + slack
        assert own["arena"] <= own["stated"] + ROUNDING
    assert max(own["stated"] for own in attached) > 1 * MIB, "something must be received, or this shows nothing"
    if not ping_pong:  # of two halves, one is in attention while the other holds less
        assert any(own["peak"] > other["peak"] + MIB // 4 for own, other in zip(attached, stock, strict=True))


def test_the_stock_kernel_of_transformers_takes_more(pool: WorkerPool) -> None:
    """Where no flash kernel is, Transformers keeps documents apart by a mask of tokens × tokens."""
    by_mask = pool.run(on_rank.peak, 2, [ONE_LONG], "sdpa")
    attached = pool.run(on_rank.peak, 2, [ONE_LONG], "balanced")
    tokens = sum(ONE_LONG[0])
    for own, other in zip(attached, by_mask, strict=True):
        assert own["peak"] + tokens**2 < other["peak"]


def test_the_peak_counts_what_is_there_at_once() -> None:
    """A block of before is freed, an address is used twice, and the largest sum is in the middle."""
    assert peak_of([(1, 100), (9, -50), (2, 30), (1, -100), (1, 60), (2, -30), (3, 10)]) == 130
    assert peak_of([]) == 0
