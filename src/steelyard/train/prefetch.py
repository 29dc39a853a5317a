"""One step ahead: a thread reads and plans the next batch while the current one is computed.

The main thread asks for batches in an order that is the same on every rank, and the thread makes them in that order.
Making one is collective (the plan needs all lengths), so at any moment every rank's thread works at the same batch, and
closing waits for the one under way instead of leaving the other ranks alone with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from steelyard.balance import Balancer, StepPlan
from steelyard.balance.background import Background
from steelyard.data.packing import Chunk
from steelyard.errors import PeerError
from steelyard.planner.rates import Rate

Batch = TypeVar("Batch")


class ChunkSource(Protocol):
    """What a run reads from: `steelyard.data.stream.ChunkStream`."""

    def next_chunks(self) -> list[Chunk]:
        """The next chunk of each lane that this rank owns, in order of lanes; empty chunks when a lane is dry."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Where the next call continues, as JSON values."""
        ...


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One global step, read and planned.

    Attributes:
        chunks: this rank's, one per nano-batch, in the plan's order.
        plan: of all nano-batches.
        tokens, loss_tokens: over all ranks: all of them, and those that have a label.
        loader: this rank's position in the data *after* this step: what a checkpoint of it must hold, however far the
            reader is ahead.
    """

    chunks: tuple[Chunk, ...]
    plan: StepPlan
    tokens: int
    loss_tokens: int
    loader: Mapping[str, Any]


@dataclass(frozen=True)
class _Note:
    """What each rank says along with its lengths."""

    tokens: int
    loss_tokens: int
    failure: str | None


def plan_next(source: ChunkSource, balancer: Balancer, rate: Rate | None = None) -> PlannedStep:
    """Read this rank's chunks of the next step and plan it with the other ranks. Collective.

    Which of a rank's chunks goes first is free, so the plan chooses what leaves least to move. `rate`: how fast this
    rank is; None: as fast as the others.

    Every rank takes part as long as any has data: a rank whose lanes are dry joins with empty chunks. A step without a
    token on any rank is the end of the data.

    Raises:
        DataError: this rank could not read.
        PeerError: another rank could not read, or did not come.
    """
    error: Exception | None = None
    chunks: Sequence[Chunk] = ()
    try:
        chunks = source.next_chunks()
    except Exception as caught:  # the others wait for this rank's lengths: tell them first
        error = caught
    tokens = sum(len(chunk.tokens) for chunk in chunks)
    loss_tokens = sum(int((chunk.labels >= 0).sum()) for chunk in chunks)
    note = _Note(tokens, loss_tokens, None if error is None else str(error))
    plan = balancer.plan([chunk.doc_lengths.tolist() for chunk in chunks], note, rate=rate, reorder=True)
    if error is not None:
        raise error
    failed = [(rank, other.failure) for rank, other in enumerate(plan.notes) if other.failure is not None]
    if failed:
        raise PeerError(f"rank {failed[0][0]} could not read its data: {failed[0][1]}")
    return PlannedStep(
        chunks=tuple(chunks[index] for index in plan.order),
        plan=plan,
        tokens=sum(other.tokens for other in plan.notes),
        loss_tokens=sum(other.loss_tokens for other in plan.notes),
        loader=source.state_dict(),
    )


class Prefetcher(Generic[Batch]):
    """Runs requests on one background thread, in order. `take` gives the results, also in order.

    An error of a request is raised by the `take` that would have returned its result; later requests fail alike. The
    thread is a daemon: a process that must end at once is not held up by a collective that will never complete.
    """

    def __init__(self) -> None:
        self._background = Background("steelyard-prefetch")
        self._made: deque[Future[Batch]] = deque()
        self._failure: BaseException | None = None

    def request(self, make: Callable[[], Batch]) -> None:
        """Have `make` called on the thread after all earlier requests."""
        self._made.append(self._background.submit(lambda: self._make(make)))

    def take(self) -> Batch:
        """Wait for the oldest request not yet taken and return its result, or raise its error."""
        assert self._made, "take() without a request would wait for ever"
        return self._made.popleft().result()

    def close(self) -> None:
        """Let the requests under way end, drop their results and end the thread."""
        self._made.clear()
        self._background.close()

    def _make(self, make: Callable[[], Batch]) -> Batch:
        if self._failure is not None:
            raise self._failure
        try:
            return make()
        except BaseException as error:
            self._failure = error
            raise
