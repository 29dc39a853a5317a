"""Ctrl-C, termination, a closed terminal, a launcher that died: note the wish, finish the step, save, leave."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

Handler = Callable[[int, FrameType | None], object] | int | None
_WATCH_S = 0.5


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that mean "save and leave"; SIGHUP is none where it is ignored, as `nohup` has it."""
    hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)


def forget_lost_terminal() -> None:
    """Let stdout and stderr lead nowhere if they led to a terminal that is gone: a write would fail before the save."""
    for descriptor in (1, 2):
        try:
            os.ttyname(descriptor)
        except OSError as error:
            if error.errno != errno.EIO:
                continue  # a file or a pipe
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def watch_launcher(pid: int) -> None:
    """Send this process SIGTERM once its parent is no longer `pid`, as when the launcher was killed."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(_WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


class StopRequest:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag while it is entered; a second SIGINT interrupts at once.

    Args:
        stop_file: the launcher's way to ask: the file exists once somebody wants to stop.
        install: whether to handle signals (only a main thread can).
    """

    def __init__(self, stop_file: Path | None = None, *, install: bool = True) -> None:
        self._file, self._install = stop_file, install
        self._signalled = False
        self._interrupts = 0
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> StopRequest:
        if self._install:
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._signalled or (self._file is not None and self._file.exists())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if number == signal.SIGHUP:
            forget_lost_terminal()
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
