"""Seconds per track, always on: where a rank's step went. Feeds the step records; the trace adds the single spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from steelyard.observe.trace import Trace


class Meter:
    """Adds up time per track ("compute", "attention", "wait") and passes spans on to an enabled trace.

    Args:
        trace: where single spans go when it is enabled; None keeps totals only.
        clock: seconds, monotonic; a test passes its own.
    """

    def __init__(self, trace: Trace | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.trace = trace
        self.clock = clock
        self._totals_s: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, track: str, **args: int | float | str) -> Iterator[None]:
        """Measure the body."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(name, track, start_s, self.clock(), **args)

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: int | float | str) -> None:
        """Record a span that was measured elsewhere (a transfer ends on another thread)."""
        with self._lock:
            self._totals_s[track] = self._totals_s.get(track, 0.0) + end_s - start_s
        if self.trace is not None and self.trace.enabled:
            self.trace.add(name, track, start_s, end_s, **args)

    def take(self) -> dict[str, float]:
        """Seconds per track since the last call."""
        with self._lock:
            totals, self._totals_s = self._totals_s, {}
        return totals
