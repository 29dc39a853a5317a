"""Signals become a wish, not an end."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.train.stopping import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_the_handlers_come_back(hang_ups: None, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_nohup_stays_in_force() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_lost_terminal_does_not_fail_writes(hang_ups: None) -> None:
    program = """
import os, signal, sys, time
from steelyard.train.stopping import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    end = time.monotonic() + 20
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.01)
    print("saved", flush=True)
    open(sys.argv[1], "w").write(str(stop.requested))
"""
    master, slave = pty.openpty()
    read, write = os.pipe()
    command = [sys.executable, "-c", program, f"/dev/fd/{write}"]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, pass_fds=(write,))
    os.close(slave)
    os.close(write)
    said = b""
    while not said.endswith(b"\n"):  # closed earlier, the terminal would fail the line that says it
        said += os.read(master, 100)
    os.close(master)
    child.send_signal(signal.SIGHUP)
    assert child.wait(30) == 0
    assert os.read(read, 100) == b"True"
    os.close(read)


@pytest.mark.parametrize("before_it_looks", [False, True])
def test_a_process_whose_launcher_dies_is_terminated(before_it_looks: bool) -> None:
    worker = f"""
import time
print("begun", flush=True)
time.sleep({0.5 * before_it_looks})
import os, sys
from steelyard.train.stopping import StopRequest, watch_launcher
with StopRequest() as stop:
    watch_launcher(int(sys.argv[1]))
    print("ready", flush=True)
    end = time.monotonic() + 20
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.01)
    print("asked", stop.requested, flush=True)
"""
    launcher = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {worker!r}, str(os.getpid())])
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    if not before_it_looks:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
    process.kill()
    assert process.stdout.read().endswith("asked True\n")
    process.wait()


def test_a_second_interrupt_ends_at_once_but_not_a_termination_after_it() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # an agent that was interrupted too passes this on
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.01)  # the handler has run by then


def test_the_launcher_asks_through_a_file(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "stop", install=False)
    with stop:
        assert not stop.requested
        (tmp_path / "stop").touch()
        assert stop.requested
