"""Ctrl-C and termination: note the wish, finish the step, save, leave."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """Turns SIGINT and SIGTERM into a flag while it is entered; a second SIGINT interrupts at once.

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
            for number in (signal.SIGINT, signal.SIGTERM):
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
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
