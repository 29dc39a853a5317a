"""What a `Balancer` says when a rank does not come, or does something else; several ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import failing_ranks as on_rank
import pytest

from steelyard.collectives import Exchange, exchange, wait_in_slices
from steelyard.errors import PeerError
from steelyard.observe.meter import Meter
from steelyard.testing.pool import WorkerPool


def test_a_missing_rank_is_named_and_later_calls_repeat_it(pool: WorkerPool) -> None:
    for rank, errors in enumerate(pool.run(on_rank.rank_1_does_not_come_to_plan, 4)):
        if rank == 1:
            continue
        first, *later = errors
        assert first.startswith("PeerError: planning of step 0: the lengths of all ranks did not arrive: "), first
        assert "rank 1 is alive elsewhere, last seen: before its first" in first or "rank 1 does not respond" in first
        assert not any(f"rank {other} is alive elsewhere" in first for other in (0, 2, 3)), "they came"
        for error in later:
            assert error.startswith("PeerError: nothing can be exchanged or planned any more after an earlier failure")
            assert error.endswith(f"It was: {first.removeprefix('PeerError: ')}")


@pytest.mark.parametrize("layers", [(2, 1), (2, None), (None, 1)])
def test_what_the_ranks_have_agreed_on_is_compared(pool: WorkerPool, layers: tuple[int | None, int | None]) -> None:
    for error in pool.run(on_rank.ranks_agree_on_layers, 4, layers):
        assert error.endswith(f"layers is {layers[0]} on rank 0 and {layers[1]} on rank 1; give every rank the same")


def test_ranks_with_types_of_one_size_all_say_so(pool: WorkerPool) -> None:
    for error in pool.run(on_rank.rank_1_has_another_dtype, 4):
        assert error.endswith("dtype is torch.float16 on rank 0 and torch.bfloat16 on rank 1; give every rank the same")


@pytest.mark.parametrize("what", ["plan", "transfer"])
def test_ctrl_c_ends_a_wait(pool: WorkerPool, what: str) -> None:
    for rank, (waited_s, later) in enumerate(pool.run(on_rank.ctrl_c_while_waiting, 4, what)):
        if rank != 1:
            assert waited_s < 10.0
            assert "nothing can be exchanged" in later
            assert "It was: KeyboardInterrupt on this rank" in later


class Work:
    """A transfer that ends after `takes_s`, and then has failed if it `fails`; `wait` raises at its end, as torch's."""

    def __init__(self, takes_s: float, *, fails: bool = False) -> None:
        self._end_s, self._fails = time.monotonic() + takes_s, fails
        self.waits = 0

    def is_completed(self) -> bool:
        return time.monotonic() >= self._end_s

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        time.sleep(min(timeout.total_seconds(), max(0.0, self._end_s - time.monotonic())))
        if not self.is_completed():
            raise RuntimeError("timed out")
        if self._fails:
            raise RuntimeError("connection closed")


def test_a_wait_in_slices_ends_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SLICE_S", 0.02)
    at_once, later = Work(0.0), Work(0.1)
    wait_in_slices(at_once, 1.0)  # type: ignore[arg-type]
    wait_in_slices(later, 1.0)  # type: ignore[arg-type]
    assert at_once.waits == 1 and later.waits > 3
    with pytest.raises(RuntimeError, match="connection closed"):
        wait_in_slices(Work(0.1, fails=True), 1.0)  # type: ignore[arg-type]
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        wait_in_slices(Work(60.0), 0.1)  # type: ignore[arg-type]
    assert 0.1 <= time.monotonic() - begin_s < 10.0


def test_without_a_store_the_text_says_how_to_have_ranks_named() -> None:
    alone = Exchange(None, progress=None, timeout_s=1.0, meter=Meter())
    assert "which rank is missing is not known" in alone.who_is_missing(None)
    assert "give store=" in alone.who_is_missing(3)
    alone.refuse_if_broken()
    first = PeerError("rank 3 is gone")
    assert alone.broken(first) is first
    with pytest.raises(PeerError, match=r"after an earlier failure.* It was: rank 3 is gone"):
        alone.refuse_if_broken()


def test_no_rank_leaves_a_new_group_before_all_are_connected(pool: WorkerPool) -> None:
    """It could destroy the group, as `attach(…).detach()` does, and cut off the others (seen: 1 in 240 on a busy
    machine)."""
    times = pool.run(on_rank.nobody_leaves_before_all_are_connected, 4)
    last_connected_s = max(connected_s for connected_s, _ in times)
    assert all(left_s >= last_connected_s for _, left_s in times)
