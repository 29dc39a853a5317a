"""Processes of this machine that share the work of a search, or of planning a step.

Answers are fetched by the number of their task, so that a search can look at them in an order that does not depend on
who was faster. Workers leave without a word when the process that started them is gone, whatever ended it, and do not
hear of Ctrl-C: a terminal sends it to all processes of a command, and each would print a traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from types import TracebackType
from typing import Generic, TypeVar, cast

from steelyard.errors import PeerError

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class WorkerProcesses(Generic[Task, Answer]):
    """`processes` workers; with one, tasks are done here when they are given. A context: entering it starts them.

    Args:
        work: done with each task, in the worker; picklable where processes cannot be forked.
    """

    def __init__(self, work: Callable[[Task], Answer], processes: int) -> None:
        self._work, self._number = work, processes
        self._answers: dict[int, tuple[bool, Answer | Exception]] = {}
        self._queue: deque[tuple[int, Task]] = deque()
        self._given = 0
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._busy: dict[Connection, int] = {}

    def _start(self, processes: int) -> None:
        forks = "fork" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
        with _interrupts_held_back():
            for _ in range(processes):
                ours, theirs = context.Pipe()
                # A forked worker holds our ends too; while one does, another would not see that we are gone.
                not_theirs = [*self._connections, ours] if forks else []
                process = context.Process(target=_serve, args=(theirs, not_theirs, self._work), daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)

    def give(self, task: Task) -> int:
        """Have a task done; its number."""
        number, self._given = self._given, self._given + 1
        if self._processes:
            self._queue.append((number, task))
            self._hand_out()
        else:
            self._answers[number] = _done(self._work, task)
        return number

    def answer(self, number: int) -> Answer:
        """Wait for the answer to a task, once.

        Raises:
            PeerError: a worker was ended from outside.
            Exception: what the task raised, whatever other tasks did.
        """
        waiting = [*self._answers, *self._busy.values(), *(given for given, _ in self._queue)]
        assert number in waiting, f"task {number} was not given, or its answer was fetched before"
        while number not in self._answers:
            for connection in wait(list(self._busy)):
                assert isinstance(connection, Connection)
                self._receive(connection)
            self._hand_out()
        done, content = self._answers.pop(number)
        if not done:
            assert isinstance(content, Exception)
            raise content
        return cast(Answer, content)

    def _hand_out(self) -> None:
        for connection in self._connections:
            if self._queue and connection not in self._busy:
                number, task = self._queue.popleft()
                self._busy[connection] = number
                try:
                    connection.send(task)
                except OSError as error:
                    raise self._ended(connection) from error

    def _receive(self, connection: Connection) -> None:
        try:
            answer = connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended(connection) from error
        self._answers[self._busy.pop(connection)] = answer

    def _ended(self, connection: Connection) -> PeerError:
        process = self._processes[self._connections.index(connection)]
        process.join(1)
        return PeerError(
            f"a worker process has ended (exit code {process.exitcode}), expected an answer; if memory ran out, "
            "a step of fewer tokens or fewer worker processes need less"
        )

    def __enter__(self) -> WorkerProcesses[Task, Answer]:
        if self._number > 1:
            self._start(self._number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()


def cores() -> int:
    """Of this machine, as far as this process may use them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(connection: Connection, not_ours: list[Connection], work: Callable[[Task], Answer]) -> None:
    """What a worker does until the other end of its connection is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in not_ours:
        other.close()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        answer = _done(work, task)
        try:
            connection.send(answer)
        except OSError:  # nobody is there to hear it
            return
        except Exception as error:  # what cannot be pickled is told, and this worker goes on
            connection.send((False, TypeError(f"the answer of a worker process cannot be sent: {error}")))


def _done(work: Callable[[Task], Answer], task: Task) -> tuple[bool, Answer | Exception]:
    """True and the answer to a task, or False and what it raised."""
    try:
        return True, work(task)
    except Exception as error:
        return False, error


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C in here comes afterwards. What is started in here has time to say that it does not want it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
