"""The max-plus engine: operations with a fixed order per stream, evaluated for all ranks at once.

An operation starts when its stream is free and everything it needs has ended; a collective, moreover, when all ranks of
its group are there. With a fixed order that is one pass of maxima and additions, and every quantity is an array over
ranks (and over micro-batches and sampled batches before them), so a step of thousands of ranks costs a few numpy calls
per operation. Operations are evaluated as they are added; what nothing needs any more is freed.

Waiting is explained as it arises: the time for which a compute stream stands still before an operation is the
transfer's own time as far as that reaches, and waiting for another rank beyond it. Why that rank was later is told by
what lies on its critical path, the chain of operations that ends then without a gap: beside each clock goes how much of
that chain is work. As far as the other's chain holds more work than the own one, its work was waited for, and beyond
that its transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from steelyard.domain.arrays import FloatArray
from steelyard.observe.trace import Span

Together = Callable[[FloatArray], FloatArray]
"""Replaces each rank's time by the latest of its group: what a collective waits for."""

IMBALANCE = "imbalance"
"""Waiting for a rank that works longer: it has more work, or is slower at it."""
LATE_TRANSFERS = "late transfers"
"""Waiting for a rank whose transfers take longer, or those that it waited for itself."""
TENSOR_TRANSFERS = "tensor transfers"
"""What stands on the compute stream and is no work."""

_SHOWN: Mapping[str, tuple[tuple[str, str], ...]] = {
    "attention": (("", "attention"),),
    TENSOR_TRANSFERS: (("", "transfer"), ("wait for ", "wait")),
    "launches": (("", "host"),),
}
"""What of the compute stream is no token-wise work: name's prefix and track of its spans in a trace."""


@dataclass(frozen=True, eq=False)
class Operation:
    """What was added: when it ends on every rank, how much of the chain that ends there is work, and how long it takes.

    With `cost_s` of 0 it is a moment, not an operation.
    """

    end_s: FloatArray
    work_s: FloatArray
    cost_s: FloatArray | float
    cause: str


@dataclass
class Recording:
    """Spans of sampled ranks: `index` selects one element of every array."""

    index: tuple[int, ...]
    spans: list[Span] = field(default_factory=list)


class Timeline:
    """Streams of all ranks and what happened on them.

    Args:
        shape: of every array; the last axis is the ranks.
        recordings: ranks whose spans are kept.
    """

    def __init__(self, shape: tuple[int, ...], recordings: Sequence[Recording] = ()) -> None:
        self.shape = shape
        self.recordings = list(recordings)
        self.busy_s: dict[str, FloatArray] = {}
        self.waits_s: dict[str, FloatArray] = {}
        self._streams: dict[str, tuple[FloatArray, FloatArray]] = {}

    def compute(self, name: str, track: str, cost_s: FloatArray | float, needs: Sequence[Operation] = ()) -> Operation:
        """Work on the compute stream of every rank, in the order of calls; `track` is where its time is counted."""
        now, work = self._stream("compute")
        begin = now
        for need in needs:
            late = np.maximum(need.end_s - begin, 0.0)
            own = np.minimum(late, need.cost_s)
            by_work, by_transfers = divided_wait(late - own, need.work_s - work)
            self._count(self.waits_s, need.cause, own)
            self._count(self.waits_s, IMBALANCE, by_work)
            self._count(self.waits_s, LATE_TRANSFERS, by_transfers)
            work = np.where(late > 0, need.work_s, work)
            begin = np.maximum(begin, need.end_s)
        end = begin + cost_s
        if track != TENSOR_TRANSFERS:
            work = work + cost_s
        self._streams["compute"] = end, work
        self._count(self.busy_s, track, cost_s)
        if self.recordings:
            self._record(f"wait for {name}", "wait", now, begin)
            for prefix, shown in _SHOWN.get(track, (("", "compute"),)):
                self._record(prefix + name, shown, begin, end)
        return Operation(end, work, cost_s, track)

    def now(self, cause: str) -> Operation:
        """The moment at which each rank's compute stream is, as a need of what follows it."""
        end, work = self._stream("compute")
        return Operation(end, work, 0.0, cause)

    def transfer(
        self,
        name: str,
        cause: str,
        cost_s: FloatArray | float,
        needs: Sequence[Operation] = (),
        *,
        stream: str = "network",
        together: Together | None = None,
    ) -> Operation:
        """A transfer on its own stream, in the order of calls; `together`: it starts when all of a group are ready."""
        begin, work = self._stream(stream)
        for need in needs:
            work = np.where(need.end_s > begin, need.work_s, work)
            begin = np.maximum(begin, need.end_s)
        if together is not None:
            latest = together(begin)
            work = together(np.where(begin == latest, work, 0.0))  # of those that come last, the one that worked most
            begin = latest
        end = begin + cost_s
        self._streams[stream] = end, work
        if self.recordings:
            self._record(name, "transfer", begin, end)
        return Operation(end, work, cost_s, cause)

    @property
    def end_s(self) -> FloatArray:
        """When the compute stream of each rank is done."""
        return self._stream("compute")[0]

    @property
    def work_s(self) -> FloatArray:
        """How much of the chain of operations that ends then is work."""
        return self._stream("compute")[1]

    def _stream(self, name: str) -> tuple[FloatArray, FloatArray]:
        if name not in self._streams:
            self._streams[name] = np.zeros(self.shape), np.zeros(self.shape)
        return self._streams[name]

    def _count(self, totals: dict[str, FloatArray], name: str, seconds: FloatArray | float) -> None:
        if name not in totals:
            totals[name] = np.zeros(self.shape)
        totals[name] += seconds

    def _record(self, name: str, track: str, begin: FloatArray, end: FloatArray) -> None:
        for recording in self.recordings:
            start_s, end_s = float(begin[recording.index]), float(end[recording.index])
            if end_s > start_s:
                recording.spans.append(Span(name, track, start_s, end_s))


def divided_wait(wait_s: FloatArray, more_work_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Waiting for another rank: for its work, and for its transfers.

    Args:
        wait_s: how long, 0 or more.
        more_work_s: by how much the chain that was waited for holds more work than the own one; its transfers are
            longer by the rest.
    """
    by_work = np.clip(more_work_s, 0.0, wait_s)
    return by_work, wait_s - by_work


def everybody(times: FloatArray) -> FloatArray:
    """All ranks of the last axis wait for each other."""
    return np.broadcast_to(times.max(axis=-1, keepdims=True), times.shape)


def neighbours(size: int) -> Together:
    """Groups of `size` ranks that follow each other on the last axis."""

    def together(times: FloatArray) -> FloatArray:
        grouped = times.reshape(*times.shape[:-1], times.shape[-1] // size, size)
        return np.broadcast_to(grouped.max(axis=-1, keepdims=True), grouped.shape).reshape(times.shape)

    return together
