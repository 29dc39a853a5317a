"""Who is where: each rank publishes its last exchange in the store, so that a time-out can name who is missing.

gloo and NCCL report that a transfer failed, never which rank did not come (see `runtime.md`, Failure). Publishing on
every exchange would put a store round trip on the critical path; a background thread publishes about once a second
instead, with a heartbeat that tells a rank that is elsewhere from one that is gone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from steelyard.errors import first_line


@dataclass(frozen=True)
class Point:
    """Where a rank is: which exchange of which layer."""

    phase: str
    layer: int
    nano_batch: int
    step: int

    def __str__(self) -> str:
        return f"{self.phase} of layer {self.layer}, nano-batch {self.nano_batch}, step {self.step}"


@dataclass(frozen=True)
class RankStatus:
    """What a rank last published: how many exchanges and plans it has begun, where it was, whether it still writes."""

    rank: int
    exchanges: int
    plans: int
    point: str
    alive: bool


class Progress:
    """Publishes this rank's position and reads the others'. `start` begins publishing; `close` ends it.

    Args:
        store: any torch store that all ranks of the group reach; a prefix keeps our keys apart.
        rank, ranks: within the group.
        period_s: time between two publications.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: int,
        *,
        period_s: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank, self.ranks, self.period_s = rank, ranks, period_s
        self._store = store
        self._sleep = sleep
        self._position: tuple[int, Point | None] = (0, None)
        self._plans = 0
        self._beats = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Publish once now and then once per period until `close`."""
        self._publish()
        self._thread = threading.Thread(target=self._run, name="steelyard-progress", daemon=True)
        self._thread.start()

    def enter(self, point: Point) -> int:
        """Note that this rank starts the exchange at `point`; how many it has started. Costs no message."""
        self._position = (self._position[0] + 1, point)
        return self._position[0]

    def enter_planning(self) -> int:
        """Note that this rank comes to plan, perhaps a step ahead; how often it has."""
        self._plans += 1
        return self._plans

    def close(self) -> None:
        """Stop publishing."""
        self._closed.set()
        if self._thread not in (None, threading.current_thread()):  # garbage may be collected on the thread itself
            self._thread.join(timeout=2 * self.period_s)

    def read(self) -> list[RankStatus]:
        """Status of every rank of the group. Takes two and a half periods: a heartbeat must be seen to move."""
        before = self._read_all()
        self._sleep(2.5 * self.period_s)
        after = self._read_all()
        statuses = []
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            if new is None:
                statuses.append(RankStatus(rank, 0, 0, "never reached its first exchange", alive=False))
                continue
            alive = rank == self.rank or old is None or new["beats"] != old["beats"]
            statuses.append(RankStatus(rank, new["exchanges"], new["plans"], new["point"], alive))
        return statuses

    def explain(self, exchanges: int | None = None, *, plans: int | None = None) -> str:
        """Say which ranks are missing, and where they were last: those that do not respond, and those that have begun
        fewer than `exchanges`, or `plans`. Without both (the failure is in neither) where all are, if all respond."""
        try:
            statuses = [s for s in self.read() if s.rank != self.rank]
        except (RuntimeError, OSError) as error:
            return f"the store that would name the missing rank does not answer either ({first_line(error)})"
        gone = [s for s in statuses if not s.alive]
        late = [s for s in statuses if s.alive and (s.exchanges < (exchanges or 0) or s.plans < (plans or 0))]
        parts = [f"rank {s.rank} does not respond (killed or unreachable), last seen: {s.point}" for s in gone]
        late = statuses if exchanges is None and plans is None and not gone else late
        parts += [f"rank {s.rank} is alive elsewhere, last seen: {s.point}" for s in late]
        if not parts:
            return "every other rank is alive and none is behind: the link is stuck or slower than the time-out"
        more = f" (+{len(parts) - 8} more)" if len(parts) > 8 else ""
        return "; ".join(parts[:8]) + more

    def _publish(self) -> None:
        exchanges, point = self._position
        self._beats += 1
        where = "before its first exchange" if point is None else str(point)
        record = {"beats": self._beats, "exchanges": exchanges, "plans": self._plans, "point": where}
        self._store.set(f"rank{self.rank}", json.dumps(record))

    def _run(self) -> None:
        while not self._closed.wait(self.period_s):
            try:
                self._publish()
            except (RuntimeError, OSError):
                return  # the store is gone: the run is ending, and an exchange will report it if it is not

    def _read_all(self) -> list[dict[str, Any] | None]:
        keys = [f"rank{r}" for r in range(self.ranks)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]
