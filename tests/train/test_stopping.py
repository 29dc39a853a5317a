"""Signals become a wish, not an end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from steelyard.train.stopping import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


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
