"""How steps were balanced, from the plans and from what the ranks said: for log lines."""

from __future__ import annotations

import numpy as np

from steelyard.balance import StepPlan
from steelyard.domain.arrays import IntArray
from steelyard.integrations.transformers.batch_plan import Note


class BalanceReport:
    """Sums up the steps since the last `take`.

    Args:
        ranks: of the balancer.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._spread, self._spread_packed = 0.0, 0.0
        self._work: IntArray = np.zeros(self._ranks, dtype=np.int64)
        self._tokens: IntArray = np.zeros(self._ranks, dtype=np.int64)
        self._wall_s, self._wait_s = np.zeros(self._ranks), np.zeros(self._ranks)

    def add(self, step: StepPlan) -> None:
        """Count a step in; one that was planned by a single rank among several is left out."""
        if len(step.notes) != self._ranks:
            return
        self._steps += 1
        work = sum((nano.work_by_server for nano in step.nano_batches), np.zeros(self._ranks, dtype=np.int64))
        home = sum((nano.work_by_home for nano in step.nano_batches), np.zeros(self._ranks, dtype=np.int64))
        self._work += work
        self._spread += float(work.max() / max(work.mean(), 1.0))
        self._spread_packed += float(home.max() / max(home.mean(), 1.0))
        for rank, note in enumerate(step.notes):
            if isinstance(note, Note):
                self._tokens[rank] += note.tokens
                self._wall_s[rank] += note.wall_s
                self._wait_s[rank] += note.wait_s

    def take(self) -> dict[str, float]:
        """Figures since the last call; empty without a step.

        `work_max_over_mean` of what each rank computed, and `…_packed` of what it would have without moving anything;
        `idle_share` of the time in which ranks were blocked in transfers; `slowest_rank`, which was busy longest, its
        time over the median (`slowest_busy_over_median`) and its work over the mean (`slowest_work_over_mean`).
        """
        if not self._steps:
            return {}
        busy_s = np.maximum(self._wall_s - self._wait_s, 0.0)
        slowest = int(busy_s.argmax())
        figures = {
            "work_max_over_mean": self._spread / self._steps,
            "work_max_over_mean_packed": self._spread_packed / self._steps,
            "idle_share": float(self._wait_s.sum() / max(self._wall_s.sum(), 1e-9)),
            "slowest_rank": float(slowest),
            "slowest_busy_over_median": float(busy_s[slowest] / max(float(np.median(busy_s)), 1e-9)),
            "slowest_work_over_mean": float(self._work[slowest] / max(float(self._work.mean()), 1.0)),
        }
        self._clear()
        return figures
