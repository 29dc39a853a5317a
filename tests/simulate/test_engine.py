"""The engine against closed forms, and against a slow twin that plays events one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.planner.schedules import interleaved, lockstep, one_f_one_b
from steelyard.planner.schedules.schedule import Schedule, StageOp
from steelyard.simulate.engine import IMBALANCE, LATE_TRANSFERS, Recording, Timeline, everybody, neighbours
from steelyard.simulate.graph import HalfCosts, PassCosts, run_layers, run_lockstep, run_pipeline

ZERO = np.zeros(2)


def test_waiting_is_split_into_transfer_and_slower_rank() -> None:
    line = Timeline((2,))
    first = line.compute("a", "token_wise", np.array([1.0, 3.0]))
    sent = line.transfer("x", "exchange", 0.5, [first], together=everybody)
    line.compute("b", "token_wise", 1.0, [sent])
    assert line.end_s.tolist() == [4.5, 4.5]
    assert line.waits_s["exchange"].tolist() == [0.5, 0.5]
    assert line.waits_s[IMBALANCE].tolist() == [2.0, 0.0]
    total = line.busy_s["token_wise"] + line.waits_s["exchange"] + line.waits_s[IMBALANCE]
    assert total.tolist() == line.end_s.tolist()


def test_who_waits_for_a_rank_is_told_whether_for_its_work_or_for_its_transfers() -> None:
    """Both ranks work as long; the transfers of one take longer, and the other meets it at the next collective."""
    line = Timeline((2,))
    ready = line.compute("a", "token_wise", 1.0)
    own = line.transfer("x", "exchange", np.array([0.5, 2.5]), [ready])
    after = line.compute("b", "attention", 1.0, [own])
    met = line.transfer("y", "exchange", 0.25, [after], together=everybody)
    line.compute("c", "token_wise", 1.0, [met])
    assert line.end_s.tolist() == [5.75, 5.75]
    assert line.work_s.tolist() == [3.0, 3.0]
    assert line.waits_s[LATE_TRANSFERS].tolist() == [2.0, 0.0]
    assert line.waits_s[IMBALANCE].tolist() == [0.0, 0.0]
    # Now the rank with slow transfers works two seconds longer as well, and the other one second longer than before.
    line = Timeline((2,))
    ready = line.compute("a", "token_wise", np.array([2.0, 3.0]))
    own = line.transfer("x", "exchange", np.array([0.5, 2.5]), [ready])
    met = line.transfer("y", "exchange", 0.25, [line.compute("b", "attention", 1.0, [own])], together=everybody)
    line.compute("c", "token_wise", 1.0, [met])
    assert line.waits_s[IMBALANCE].tolist() == [1.0, 0.0]
    assert line.waits_s[LATE_TRANSFERS].tolist() == [2.0, 0.0]


def test_work_that_others_waited_for_stands_on_their_chain_too() -> None:
    """Rank 1 works longer in the first part and rank 0 in the second: each waits for the other's work once."""
    line = Timeline((2,))
    for costs in ([1.0, 3.0], [3.0, 1.0]):
        done = line.compute("a", "token_wise", np.array(costs))
        met = line.transfer("x", "exchange", 0.5, [done], together=everybody)
        line.compute("b", "attention", 0.0, [met])
    assert line.end_s.tolist() == [7.0, 7.0]
    assert line.work_s.tolist() == [6.0, 6.0]
    assert line.waits_s[IMBALANCE].tolist() == [2.0, 2.0]
    assert line.waits_s[LATE_TRANSFERS].tolist() == [0.0, 0.0]


COSTS = st.lists(st.floats(0.0, 4.0), min_size=2, max_size=2)


@given(st.integers(1, 4), COSTS, COSTS, COSTS, COSTS, st.booleans())
def test_every_second_of_a_pass_has_one_cause(
    layers: int, local: list[float], received: list[float], out: list[float], back: list[float], pong: bool
) -> None:
    one = half(local, received, out, back)
    times = run_layers(PassCosts((one, one) if pong else (one,), "servers", everybody), layers, (2,))
    seconds = sum([*times.busy_s.values(), *times.waits_s.values()], ZERO)
    assert seconds == pytest.approx(times.duration_s)
    assert all(waited.min() >= 0 for waited in times.waits_s.values())
    assert np.all(times.chain_work_s <= times.duration_s + 1e-9)
    # With equal transfers nobody is late for them, and with equal work nobody is late for that. (Local work would hide
    # equal transfers on one rank more than on the other.)
    same = PassCosts((half(0.0, received, max(out), max(back)),), "servers", everybody)
    assert run_layers(same, layers, (2,)).waits_s.get(LATE_TRANSFERS, ZERO) == pytest.approx(ZERO)
    even = PassCosts((half(0.0, max(received), out, back),), "servers", everybody)
    assert run_layers(even, layers, (2,)).waits_s.get(IMBALANCE, ZERO) == pytest.approx(ZERO)


def test_transfers_of_a_stream_queue_and_hide_under_work() -> None:
    line = Timeline((1,))
    ready = line.compute("a", "token_wise", 1.0)
    x = line.transfer("x", "exchange", 2.0, [ready])
    y = line.transfer("y", "exchange", 2.0, [ready])
    line.compute("b", "attention", 10.0)
    line.compute("c", "token_wise", 1.0, [x, y])
    assert float(y.end_s[0]) == 5.0
    assert float(line.end_s[0]) == 12.0
    assert float(line.waits_s["exchange"][0]) == 0.0


def test_groups_of_neighbours() -> None:
    times = np.array([[1.0, 5.0, 2.0, 3.0]])
    assert neighbours(2)(times).tolist() == [[5.0, 5.0, 3.0, 3.0]]
    assert everybody(times).tolist() == [[5.0] * 4]


def half(local: object, received: object, out: object = 0.0, back: object = 0.0, first: float = 1.0) -> HalfCosts:
    a = [np.asarray(x, dtype=float) + np.zeros(2) for x in (first, 2.0, local, received)]
    return HalfCosts(a[0], a[1], 0.0, a[2], a[3], np.asarray(out) + ZERO, np.asarray(back) + ZERO, 0.0)


def test_a_pass_without_transfers_adds_up() -> None:
    times = run_layers(PassCosts((half(0.0, [1.0, 4.0]),), "none", everybody), 5, (2,))
    assert times.duration_s.tolist() == [5 * 4.0, 5 * 7.0]


def test_dispatch_without_ping_pong_waits_for_every_transfer() -> None:
    times = run_layers(PassCosts((half(1.0, 3.0, 0.25, 0.5),), "servers", everybody), 4, (2,))
    # Local work of a layer hides the transfer out; nothing hides the transfer back.
    assert times.duration_s.tolist() == [4 * (1 + 2 + 1 + 3 + 0.5)] * 2
    assert times.waits_s["exchange"] == pytest.approx([2.0, 2.0])


def test_ping_pong_hides_transfers_under_the_other_half() -> None:
    alone = half(1.0, 1.0, 0.9, 0.9)
    times = run_layers(PassCosts((alone, alone), "servers", everybody), 16, (2,))
    work = 16 * 2 * (1 + 2 + 1 + 1)
    assert times.duration_s == pytest.approx([work + 0.9] * 2, abs=1.0)
    plain = run_layers(PassCosts((alone,), "servers", everybody), 16, (2,))
    assert 2 * plain.duration_s[0] > work + 10


def test_an_exchange_makes_all_wait_for_the_slowest_rank() -> None:
    slow = half(0.0, [1.0, 2.0], 0.1, 0.1)
    times = run_layers(PassCosts((slow,), "servers", everybody), 3, (2,))
    assert times.duration_s.tolist() == pytest.approx([3 * (1 + 2 + 2 + 0.2)] * 2)
    assert times.waits_s[IMBALANCE][0] == pytest.approx(3.0)


def test_gathers_of_parameters_are_prefetched() -> None:
    hidden = run_layers(PassCosts((half(0.0, 1.0),), "none", everybody, gather_s=3.0), 10, (2,))
    assert hidden.duration_s[0] == pytest.approx(10 * 4.0 + 3.0)  # only the first one is exposed
    exposed = run_layers(PassCosts((half(0.0, 1.0),), "none", everybody, gather_s=9.0), 10, (2,))
    assert exposed.duration_s[0] > 80


def test_recordings_cover_the_pass() -> None:
    recording = Recording((1,))
    times = run_layers(PassCosts((half(0.5, 1.0, 0.5, 0.5),), "servers", everybody), 3, (2,), [recording])
    work = sum(s.duration_s for s in recording.spans if s.track in ("compute", "attention", "wait"))
    assert work == pytest.approx(float(times.duration_s[1]))
    assert {s.track for s in recording.spans} >= {"compute", "attention", "transfer"}


def slow_twin(schedule: Schedule, forward: np.ndarray, backward: np.ndarray, transfer_s: float) -> float:
    """Ends by repeated relaxation: no order is given, nothing is vectorised."""
    end: dict[tuple[int, StageOp], float] = {}
    for _ in range(sum(map(len, schedule.ops)) + 1):
        changed = False
        for stage, ops in enumerate(schedule.ops):
            previous = 0.0
            for op in ops:
                needs = schedule.needs(stage, op)
                if any(n not in end for n in needs) or previous == float("inf"):
                    previous = float("inf")
                    continue
                arrive = [end[n] + (transfer_s if n[0] != stage else 0.0) for n in needs]
                cost = (forward if op.phase == "forward" else backward)[stage, op.chunk, op.micro_batch]
                found = max([previous, *arrive]) + float(cost)
                changed |= end.get((stage, op)) != found
                end[stage, op] = previous = found
        if not changed:
            break
    return max(end.values())


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_pipelines_equal_the_slow_twin(stages: int, groups: int, chunks: int, seed: int) -> None:
    micro_batches = groups * stages
    schedule = interleaved(stages, micro_batches, chunks) if stages > 1 else one_f_one_b(1, micro_batches)
    random = np.random.default_rng(seed)
    shape = (stages, schedule.chunks, micro_batches)
    forward, backward = random.uniform(0.1, 2, shape), random.uniform(0.1, 2, shape)
    found = run_pipeline(schedule, forward[..., None], backward[..., None], 0.05)
    assert float(found.end_s.max()) == pytest.approx(slow_twin(schedule, forward, backward, 0.05))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (4, 4), (4, 16)])
def test_equal_micro_batches_have_the_textbook_bubble(stages: int, micro_batches: int) -> None:
    forward = np.full((stages, 1, 1, 1), 1.0)
    found = run_pipeline(one_f_one_b(stages, micro_batches), forward, 2 * forward, 0.0)
    assert float(found.end_s.max()) == pytest.approx(3 * (micro_batches + stages - 1))


def test_lockstep_lasts_as_long_as_its_slowest_ranks() -> None:
    schedule = lockstep(2, 3)
    forward = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    assert run_lockstep(schedule, forward, 2 * forward, 0.0) == pytest.approx(3 * 5)
