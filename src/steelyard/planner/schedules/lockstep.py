"""Lockstep ticks: all stages do the same phase at once, so that core attention of all of them can be balanced together.

Forward of micro-batch i on stage s runs in forward tick i + s; its backward in backward tick i + (P − 1) + (P − 1 − s),
backward ticks being numbered from P − 1. Once both have work, a forward and a backward tick alternate; M + P − 1 of
each, as in 1F1B. Backward tick t holds the micro-batches of forward tick t − (P − 1) with stages mirrored
(s ↔ P − 1 − s). Stages without work in a tick serve attention only. Stage s holds min(M, 2(P − 1 − s) + 1)
micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.planner.schedules.schedule import Phase, Schedule, StageOp, check_size


@dataclass(frozen=True)
class Tick:
    """One lockstep turn.

    Attributes:
        phase: of all stages.
        number: as in the module's text; forward ticks from 0, backward ticks from stages − 1.
        micro_batches: for each stage the micro-batch on which it works, or None.
    """

    phase: Phase
    number: int
    micro_batches: tuple[int | None, ...]


@dataclass(frozen=True)
class LockstepSchedule:
    """All ticks of a step, in order."""

    stages: int
    micro_batches: int
    ticks: tuple[Tick, ...]

    def as_schedule(self) -> Schedule:
        """The passes of each stage in the order of its ticks."""
        ops: list[list[StageOp]] = [[] for _ in range(self.stages)]
        for tick in self.ticks:
            for stage, micro_batch in enumerate(tick.micro_batches):
                if micro_batch is not None:
                    ops[stage].append(StageOp(tick.phase, micro_batch))
        return Schedule("lockstep", self.stages, self.micro_batches, 1, tuple(map(tuple, ops)))


def lockstep(stages: int, micro_batches: int) -> LockstepSchedule:
    """The ticks of `micro_batches` micro-batches on `stages` stages."""
    check_size("lockstep", stages, micro_batches)
    last = stages - 1

    def at(offset: int) -> int | None:
        return offset if 0 <= offset < micro_batches else None

    forward = [Tick("forward", t, tuple(at(t - s) for s in range(stages))) for t in range(micro_batches + last)]
    backward = [
        Tick("backward", t, tuple(at(t - last - (last - s)) for s in range(stages)))
        for t in range(last, micro_batches + 2 * last)
    ]
    # The last stage's first backward follows its first forward, in forward tick P - 1.
    ticks = forward[:last]
    for f, b in zip(forward[last:], backward, strict=False):
        ticks += [f, b]
    ticks += backward[len(forward) - last :]
    return LockstepSchedule(stages, micro_batches, tuple(ticks))
