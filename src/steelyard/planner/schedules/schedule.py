"""The form of a schedule: per stage a list of forward and backward passes of micro-batches.

With `chunks` > 1 (interleaved stages) the layers are cut into stages × chunks pieces; piece c·stages + s is chunk c of
stage s. A forward pass of piece k needs that of piece k − 1 of the same micro-batch; a backward pass needs the backward
of piece k + 1 and its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from steelyard.errors import UsageError

Phase: TypeAlias = Literal["forward", "backward"]


class StageOp(NamedTuple):
    """One pass of one micro-batch through one chunk of one stage."""

    phase: Phase
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True)
class Schedule:
    """What every stage does, in order.

    Attributes:
        name: of the schedule.
        stages, micro_batches, chunks: its size.
        ops: one tuple of passes per stage.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    ops: tuple[tuple[StageOp, ...], ...]

    def needs(self, stage: int, op: StageOp) -> list[tuple[int, StageOp]]:
        """The (stage, pass) pairs that must end before this pass; an earlier pass of the same stage is not listed."""
        phase, micro_batch, chunk = op
        piece, last = chunk * self.stages + stage, self.stages * self.chunks - 1
        found: list[tuple[int, StageOp]] = []
        if phase == "forward":
            if piece > 0:
                found.append(((piece - 1) % self.stages, StageOp("forward", micro_batch, (piece - 1) // self.stages)))
        else:
            found.append((stage, StageOp("forward", micro_batch, chunk)))
            if piece < last:
                found.append(((piece + 1) % self.stages, StageOp("backward", micro_batch, (piece + 1) // self.stages)))
        return found

    def in_order(self) -> Iterator[tuple[int, StageOp]]:
        """All passes in an order in which what a pass needs comes before it.

        Raises:
            UsageError: there is none: the schedule would wait for itself.
        """
        done: set[tuple[int, StageOp]] = set()
        place = [0] * self.stages
        waiting: dict[tuple[int, StageOp], list[int]] = {}
        ready = list(range(self.stages - 1, -1, -1))
        while ready:
            stage = ready.pop()
            while place[stage] < len(self.ops[stage]):
                op = self.ops[stage][place[stage]]
                missing = next((n for n in self.needs(stage, op) if n not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(stage)
                    break
                done.add((stage, op))
                place[stage] += 1
                yield stage, op
                ready.extend(waiting.pop((stage, op), ()))
        if len(done) != sum(map(len, self.ops)):
            stage = next(s for s in range(self.stages) if place[s] < len(self.ops[s]))
            raise UsageError(f"schedule {self.name}: stage {stage} waits for ever at {self.ops[stage][place[stage]]}")

    def in_flight(self, stage: int) -> int:
        """Most (micro-batch, chunk) pairs whose activations a stage holds at once."""
        held = most = 0
        for op in self.ops[stage]:
            held += 1 if op.phase == "forward" else -1
            most = max(most, held)
        return most

    def held_together(self, stage: int) -> list[list[StageOp]]:
        """The forward passes whose activations a stage holds after each of its forward passes.

        Memory is the largest *sum* over one of these lists: with unequal micro-batches it is not the mean × in_flight.
        """
        held: dict[tuple[int, int], StageOp] = {}
        sets: list[list[StageOp]] = []
        for op in self.ops[stage]:
            if op.phase == "forward":
                held[op.micro_batch, op.chunk] = op
                sets.append(list(held.values()))
            else:
                held.pop((op.micro_batch, op.chunk), None)
        return sets


def check_size(name: str, stages: int, micro_batches: int, chunks: int = 1) -> None:
    """Refuse sizes below 1."""
    if stages < 1 or micro_batches < 1 or chunks < 1:
        raise UsageError(
            f"schedule {name}: stages={stages}, micro_batches={micro_batches}, chunks={chunks}, "
            "expected at least 1 each"
        )
