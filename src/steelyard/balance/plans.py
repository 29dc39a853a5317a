"""Plans of a step, and what each rank says when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from steelyard.cost.attention import pairs_array
from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan, DispatchTables


@dataclass(frozen=True, eq=False)
class NanoBatchPlan:
    """The plan of one nano-batch and this rank's tables for it."""

    plan: DispatchPlan
    tables: DispatchTables
    index: int
    step: int = 0

    @property
    def layout(self) -> Layout:
        """Where every token of all ranks lives."""
        return self.plan.layout

    @property
    def work_by_server(self) -> IntArray:
        """Work of each server: (query, key) pairs, and `plan.row_keys` more for a query; int64 (servers,)."""
        return self._work_of(self.plan.tasks.server)

    @property
    def work_by_home(self) -> IntArray:
        """Work that each rank would do if nothing moved, int64 (ranks,)."""
        return self._work_of(self.plan.home)

    def _work_of(self, server: IntArray) -> IntArray:
        tasks = self.plan.tasks
        work = np.zeros(self.plan.topology.servers, dtype=np.int64)
        of_task = pairs_array(tasks.start, tasks.end, self.plan.window) + self.plan.row_keys * (tasks.end - tasks.start)
        np.add.at(work, server, of_task)
        return work


@dataclass(frozen=True, eq=False)
class StepPlan:
    """All nano-batches of a step, and the note that each rank sent along with its lengths.

    Attributes:
        order: nano-batch i of the plan is the one that this rank gave as number `order[i]`, or an empty one if it gave
            fewer; as given unless the call let them be reordered.
    """

    nano_batches: tuple[NanoBatchPlan, ...]
    notes: tuple[Any, ...]
    step: int
    order: tuple[int, ...] = ()
