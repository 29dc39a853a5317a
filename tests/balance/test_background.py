"""The thread behind the main one: order, errors, and an end that waits for nobody."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from steelyard.balance.background import Background
from steelyard.errors import DataError, UsageError


def test_results_and_errors_are_the_futures_and_it_goes_on() -> None:
    background = Background("behind")

    def fail() -> int:
        raise DataError("no such file")

    futures = [background.submit(lambda n=number: (n, threading.current_thread().name)) for number in range(3)]
    failed, after = background.submit(fail), background.submit(lambda: 7)
    assert not failed.cancel(), "the other ranks take part in it"
    assert [future.result(10) for future in futures] == [(n, "behind") for n in range(3)]
    with pytest.raises(DataError, match="no such file"):
        failed.result(10)
    assert after.result(10) == 7
    background.close()
    with pytest.raises(UsageError, match="closed already"):
        background.submit(lambda: 1)
    background.close()


def test_the_thread_of_one_that_is_dropped_ends() -> None:
    background = Background("dropped")
    thread = background._thread
    assert background.submit(lambda: 1).result(10) == 1
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


NEVER_PLANNED = """
import threading
from steelyard.balance import Balancer
from steelyard.domain.shapes import AttentionShape

begun = threading.Event()

class Stuck(Balancer):
    def plan_layout(self, *args, **options):
        begun.set()
        threading.Event().wait(60)

Stuck(shape=AttentionShape(2, 1, 4)).prefetch([[5]])
assert begun.wait(20)
print("the end")
"""


def test_a_process_ends_while_a_plan_is_under_way() -> None:
    """As when an error ends a rank whose peer is gone: no waiting for the time-out."""
    found = subprocess.run(
        [sys.executable, "-c", NEVER_PLANNED], timeout=45, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "the end\n"), found.stderr
