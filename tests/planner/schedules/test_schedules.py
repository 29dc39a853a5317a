"""Every schedule runs each pass once, in an order that never waits for itself, and holds what its text says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UsageError
from steelyard.planner.schedules import Schedule, StageOp, interleaved, lockstep, one_f_one_b

SIZES = (st.integers(1, 7), st.integers(1, 9))


def assert_complete(schedule: Schedule) -> None:
    """Each (micro-batch, chunk) has one forward and, later, one backward pass on every stage; the order is feasible."""
    for ops in schedule.ops:
        assert len(ops) == len(set(ops)) == 2 * schedule.micro_batches * schedule.chunks
        for op in ops:
            if op.phase == "backward":
                assert ops.index(op._replace(phase="forward")) < ops.index(op)
    done: set[tuple[int, StageOp]] = set()
    for stage, op in schedule.in_order():
        assert all(need in done for need in schedule.needs(stage, op))
        done.add((stage, op))
    assert len(done) == sum(map(len, schedule.ops))


@given(*SIZES)
def test_one_f_one_b(stages: int, micro_batches: int) -> None:
    schedule = one_f_one_b(stages, micro_batches)
    assert_complete(schedule)
    for stage in range(stages):
        assert schedule.in_flight(stage) == min(micro_batches, stages - stage)


@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 4))
def test_interleaved(stages: int, groups: int, chunks: int) -> None:
    schedule = interleaved(stages, groups * stages, chunks)
    assert_complete(schedule)
    for stage in range(stages):
        passes = min(groups * stages * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)
        assert schedule.in_flight(stage) == passes


@given(*SIZES)
def test_lockstep(stages: int, micro_batches: int) -> None:
    schedule = lockstep(stages, micro_batches)
    forward = [t for t in schedule.ticks if t.phase == "forward"]
    backward = [t for t in schedule.ticks if t.phase == "backward"]
    assert len(forward) == len(backward) == micro_batches + stages - 1
    for tick in forward:
        for stage, micro_batch in enumerate(tick.micro_batches):
            expected = tick.number - stage
            assert micro_batch == (expected if 0 <= expected < micro_batches else None)
    for tick in backward:
        mirrored = forward[tick.number - (stages - 1)].micro_batches[::-1]
        assert tick.micro_batches == mirrored
    assert_complete(schedule.as_schedule())
    for stage in range(stages):
        assert schedule.as_schedule().in_flight(stage) == min(micro_batches, 2 * (stages - 1 - stage) + 1)


def test_lockstep_alternates_once_both_have_work() -> None:
    phases = "".join(t.phase[0] for t in lockstep(3, 4).ticks)
    assert phases == "ff" + "fb" * 4 + "bb"


@given(*SIZES)
def test_held_together_is_what_in_flight_counts(stages: int, micro_batches: int) -> None:
    schedule = one_f_one_b(stages, micro_batches)
    for stage in range(stages):
        assert max(map(len, schedule.held_together(stage))) == schedule.in_flight(stage)


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    wrong = Schedule("wrong", 1, 1, 1, ((StageOp("backward", 0), StageOp("forward", 0)),))
    with pytest.raises(UsageError, match="stage 0 waits for ever"):
        list(wrong.in_order())


def test_interleaved_names_the_nearest_number_of_micro_batches() -> None:
    with pytest.raises(UsageError, match="nearest: 8"):
        interleaved(4, 6, 2)
    with pytest.raises(UsageError, match="expected at least 1"):
        one_f_one_b(0, 4)
