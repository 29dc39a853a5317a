"""The asynchronous exchange of rows: uneven and zero-sized all-to-all over any torch process group.

Every rank of the group enters every exchange, also with nothing to send. The same code runs over gloo (CPU) and NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.collectives.progress import Point, Progress
from steelyard.errors import PeerError, first_line
from steelyard.observe.meter import Meter

_SLICE_S = 0.5
"""A wait gives Python a turn this often: Ctrl-C ends it, and not only when the other ranks come or the time is over."""


class Transfer:
    """One all-to-all under way. `wait` blocks until the received rows are there."""

    def __init__(self, exchange: Exchange, work: dist.Work, point: Point, number: int | None, send: Tensor) -> None:
        self._exchange, self._work, self._point, self._number = exchange, work, point, number
        self._send = send  # alive until the transfer has read it

    def wait(self) -> None:
        """Wait for the rows.

        Raises:
            PeerError: a rank did not take part in time, or is gone; names it and the layer.
        """
        exchange, start_s = self._exchange, time.monotonic()
        with exchange.meter.span(f"wait {self._point.phase}", "wait", layer=self._point.layer):
            try:
                if self._send.is_cuda:
                    # Makes the stream wait, not the host: given a time-out, NCCL would hold up the host until the rows
                    # are there, and with it all launches. Its own watchdog ends a job that hangs.
                    self._work.wait()
                else:
                    wait_in_slices(self._work, exchange.timeout_s)
            except RuntimeError as error:
                raise exchange.failure(self._point, self._number, time.monotonic() - start_s, error) from error
            except BaseException as end:
                exchange.interrupted(str(self._point), end)
                raise
        del self._send


class Exchange:
    """Starts transfers over one process group and gives failures a name.

    Args:
        group: all ranks that exchange; None with a single rank (then nothing is ever exchanged).
        progress: publishes where this rank is; None leaves time-outs without names.
        timeout_s: longest wait for a transfer on CPUs; on GPUs the process group has its own.
        meter: where waiting and transfer times go.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, progress: Progress | None, timeout_s: float, meter: Meter
    ) -> None:
        self.group, self.progress, self.timeout_s, self.meter = group, progress, timeout_s, meter
        self._first_failure: str | None = None

    def start(
        self,
        send: Tensor,
        receive: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        point: Point,
    ) -> Transfer:
        """Start sending `send_counts[j]` rows to each rank j and receiving `receive_counts[j]` rows from it.

        Args:
            send: (sum of send_counts, …), contiguous, rows by destination.
            receive: (sum of receive_counts, …), contiguous, filled by source.

        Raises:
            PeerError: the group is broken, now or since an earlier failure.
        """
        self.refuse_if_broken()
        assert send.is_contiguous() and receive.is_contiguous()
        number = self.progress.enter(point) if self.progress is not None else None
        start_s = self.meter.clock()
        try:
            work = dist.all_to_all_single(
                receive, send, list(receive_counts), list(send_counts), group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise self.failure(point, number, 0.0, error) from error
        assert work is not None
        trace = self.meter.trace
        if trace is not None and trace.enabled:
            bytes_sent = send.numel() * send.element_size()
            bytes_received = receive.numel() * receive.element_size()

            def note_end(_: torch.futures.Future[object]) -> None:
                self.meter.add(
                    point.phase,
                    "transfer",
                    start_s,
                    self.meter.clock(),
                    layer=point.layer,
                    nano_batch=point.nano_batch,
                    bytes_sent=bytes_sent,
                    bytes_received=bytes_received,
                )

            work.get_future().add_done_callback(note_end)
        return Transfer(self, work, point, number, send)

    def failure(self, point: Point, number: int | None, waited_s: float, error: BaseException) -> PeerError:
        """The error that names who is missing at `point`, this rank's exchange `number`."""
        if self._first_failure is not None:
            return self.broken(PeerError(first_line(error)))
        who = self.who_is_missing(number)
        if waited_s >= 0.9 * self.timeout_s:
            what = f"did not complete within {self.timeout_s:g} s"
            advice = "Every rank must enter every exchange: look at the log of the rank named, or raise the time-out"
        else:
            what = f"failed after {waited_s:.1f} s"
            advice = "Look at the log of the rank named"
        return self.broken(PeerError(f"the exchange {what} ({point}): {who}. {advice}. [{first_line(error)}]"))

    def who_is_missing(self, number: int | None = None, *, plans: int | None = None) -> str:
        """In words, the ranks that have not come to exchange number `number` of this rank, or to its plan `plans`."""
        if self.progress is None:
            return (
                "which rank is missing is not known, since the ranks share no store (give store=…, a torch store that "
                "all of them reach, such as a TCPStore, to have it named)"
            )
        return self.progress.explain(number, plans=plans)

    def broken(self, error: PeerError) -> PeerError:
        """Note that a rank was missing: the ranks no longer agree on which message is whose, so nothing may follow.

        Returns:
            The error to raise: the one given, or one that repeats the first failure.
        """
        if self._first_failure is None:
            self._first_failure = str(error)
            return error
        return PeerError(
            "nothing can be exchanged or planned any more after an earlier failure, which is the one to look at; end "
            f"all ranks and start them again. It was: {self._first_failure}"
        )

    def interrupted(self, where: str, end: BaseException) -> None:
        """Note that this rank left a wait, by Ctrl-C say: what it waited for is still under way, between all ranks."""
        self.broken(PeerError(f"{type(end).__name__} on this rank, while it waited for the others ({where})"))

    @property
    def is_broken(self) -> bool:
        """Whether there was a failure before."""
        return self._first_failure is not None

    def refuse_if_broken(self) -> None:
        """Raise if there was a failure before.

        Raises:
            PeerError: repeats the first one.
        """
        if self._first_failure is not None:
            raise self.broken(PeerError())


def wait_in_slices(work: dist.Work, timeout_s: float) -> None:
    """Wait for a transfer on CPUs, giving signals a turn.

    Raises:
        RuntimeError: it failed, or did not complete in time.
    """
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > _SLICE_S and not work.is_completed():
        with suppress(RuntimeError):  # the end of the slice; a failure completes it, and is raised below
            work.wait(timedelta(seconds=_SLICE_S))
    work.wait(timedelta(seconds=max(left_s, 0.001)))
