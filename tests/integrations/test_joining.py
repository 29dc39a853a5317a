"""A rank that fails is named by the others, and joining leaves nothing behind."""

from __future__ import annotations

import joining_ranks as on_rank
import pytest

from steelyard.errors import UsageError
from steelyard.integrations.offset_passes import BalancerOptions
from steelyard.testing.pool import WorkerPool


@pytest.mark.parametrize("passes_before", [0, 1])
def test_bad_offsets_on_one_rank_are_told_to_the_others(pool: WorkerPool, passes_before: int) -> None:
    healthy, failed, *_ = pool.run(on_rank.bad_offsets_on_rank_1, 4, passes_before)
    assert failed["error"].startswith("UsageError: offsets of documents [0, 2, 5] for 6 tokens")
    assert healthy["error"].startswith("PeerError: rank 1 cannot take the step: offsets of documents [0, 2, 5]")
    assert max(healthy["took_s"], failed["took_s"]) < 30, "nobody waits for the time-out"


def test_a_rank_that_left_is_named_when_the_time_out_ends(pool: WorkerPool) -> None:
    waited, *_ = pool.run(on_rank.rank_1_leaves_after_the_first_layer, 4)
    assert "rank 1 is alive elsewhere" in waited and "layer 0" in waited


def test_attaching_again_and_again_leaves_no_threads(pool: WorkerPool) -> None:
    ranks = pool.run(on_rank.threads_after_attaching, 4, 4)
    for threads in ranks:
        assert threads[-1] == threads[1], threads


def test_a_part_of_the_world_that_attaches_again_and_again_leaves_nothing(pool: WorkerPool) -> None:
    first, _, third, _ = pool.run(on_rank.held_after_attaching, 4, 30)
    for held in (first, third):
        assert len(held) == 30 and held[-1] == held[1], held


def test_a_policy_that_moves_documents_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"balance: policy='wlb' places the tokens"):
        BalancerOptions(policy="wlb")
