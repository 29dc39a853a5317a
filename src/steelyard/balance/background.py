"""One thread that works off functions in order, behind the main one: planning, and reading, a step ahead.

The thread is a daemon, unlike those of `concurrent.futures`, which Python joins when it exits: a process that must end
at once is not held up by a collective that will never complete.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from steelyard.errors import UsageError

Result = TypeVar("Result")
_Job: TypeAlias = tuple[Callable[[], Any], "Future[Any]"]


class Background:
    """Calls what it is given on one daemon thread, in order.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)  # dropped without `close`: the thread ends, too
        self._end.atexit = False

    def submit(self, make: Callable[[], Result]) -> Future[Result]:
        """Have `make` called after everything that was submitted before; its result or error is the future's.

        The future cannot be cancelled: what is submitted is mostly collective, and the other ranks would wait.

        Raises:
            UsageError: closed already.
        """
        if not self._end.alive:
            raise UsageError(f"{self._thread.name}: closed already; nothing can be submitted any more")
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        self._jobs.put((make, future))
        return future

    def close(self) -> None:
        """Wait for what was submitted, and end the thread."""
        self._end()
        self._thread.join()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """The thread's loop; it holds nothing of a job while it waits for the next one."""
    while (job := jobs.get()) is not None:
        make, future = job
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)
        del job, make, future
