"""Workers: answers by number, errors handed on, and a quiet end when the process that started them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.errors import DataError, PeerError
from steelyard.simulate.worker_processes import WorkerProcesses


def work(task: int) -> int:
    if task < 0:
        raise DataError(f"{task} is negative")
    if task == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return task * task


@pytest.mark.parametrize("processes", [1, 3])
def test_answers_come_by_the_number_of_their_task(processes: int) -> None:
    with WorkerProcesses(work, processes) as workers:
        given = [workers.give(n) for n in range(1, 8)]
        assert [workers.answer(g) for g in reversed(given)] == [n * n for n in range(7, 0, -1)]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_task_is_raised_where_its_answer_is_fetched(processes: int) -> None:
    with WorkerProcesses(work, processes) as workers:
        bad, *good = [workers.give(n) for n in (-3, 2, 3, 4)]
        assert [workers.answer(number) for number in good] == [4, 9, 16]
        with pytest.raises(DataError, match="-3 is negative"):
            workers.answer(bad)
        assert workers.answer(workers.give(5)) == 25, "who raised it goes on"
        for number in (bad, 99):
            with pytest.raises(AssertionError, match=f"task {number} was not given, or its answer was fetched"):
                workers.answer(number)


def test_an_answer_that_cannot_be_sent_is_told() -> None:
    with WorkerProcesses(lambda task: (lambda: task) if task else task, 2) as workers:
        wrong, right = workers.give(1), workers.give(0)
        with pytest.raises(TypeError, match="the answer of a worker process cannot be sent"):
            workers.answer(wrong)
        assert workers.answer(right) == 0


def test_a_worker_that_was_killed_while_it_had_nothing_to_do_is_told() -> None:
    with WorkerProcesses(work, 2) as workers:
        for process in workers._processes:
            process.kill()
            process.join()
        with pytest.raises(PeerError, match=r"a worker process has ended \(exit code -9\)"):
            workers.answer(workers.give(1))


def test_a_killed_worker_is_told() -> None:
    with WorkerProcesses(work, 2) as workers:
        number = workers.give(0)
        with pytest.raises(PeerError, match=r"a worker process has ended \(exit code -9\)"):
            workers.answer(number)


PARENT = """
import time
from steelyard.simulate.worker_processes import WorkerProcesses

def work(task):
    end = time.monotonic() + task
    while time.monotonic() < end:
        sum(range(1000))
    return bytes(1 << 20)  # more than a pipe holds

workers = WorkerProcesses(work, 3).__enter__()
for seconds in (0.0, 0.3, 60.0, 0.0, 0.3):
    workers.give(seconds)
print(*[p.pid for p in workers._processes], flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks up processes in /proc")
@pytest.mark.parametrize("after_s", [0.05, 0.6])
def test_workers_of_a_killed_process_end_at_once_and_say_nothing(after_s: float) -> None:
    """One has an answer that nobody fetches, one is about to have one, one computes for a minute."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = parent.stdout.readline().split()
    assert len(workers) == 3
    time.sleep(after_s)
    parent.kill()
    deadline = time.monotonic() + 20
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, workers))
    out, err = parent.communicate(timeout=20)  # until the last process that could write has ended
    assert (out, err) == ("", "")


def _runs(process: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
