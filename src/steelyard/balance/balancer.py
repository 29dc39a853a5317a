"""`Balancer`: exchange lengths, plan, and hand out core attention that carries the plan out.

All ranks learn all document lengths of a step over a small CPU group of its own, so that planning messages cannot fall
between two exchanges, and then compute the same plan: the planner is deterministic, so nothing else is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from steelyard.attention import build_backend
from steelyard.attention.interface import Backend
from steelyard.collectives import Exchange, Progress
from steelyard.cost.attention import pairs_array
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan, DispatchTables
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import PeerError, UsageError, first_line
from steelyard.observe.meter import Meter
from steelyard.planner import make_plan
from steelyard.planner.tables import build_tables
from steelyard.runtime.arena import Arena
from steelyard.runtime.dispatch import CoreAttention, Memory


@dataclass(frozen=True, eq=False)
class NanoBatchPlan:
    """The plan of one nano-batch and this rank's tables for it."""

    plan: DispatchPlan
    tables: DispatchTables
    index: int
    step: int = 0

    @property
    def work_by_server(self) -> np.ndarray:
        """(query, key) pairs that each server computes, int64 (servers,)."""
        tasks = self.plan.tasks
        work = np.zeros(self.plan.topology.servers, dtype=np.int64)
        np.add.at(work, tasks.server, pairs_array(tasks.start, tasks.end, self.plan.window))
        return work


@dataclass(frozen=True, eq=False)
class StepPlan:
    """All nano-batches of a step, and the note that each rank sent along with its lengths."""

    nano_batches: tuple[NanoBatchPlan, ...]
    notes: tuple[Any, ...]
    step: int


class Balancer:
    """Balanced core attention for any model whose ranks form `group`.

    Args:
        group: the ranks that share attention work; None with a single process.
        shape: heads, key/value heads and head size of the model's attention.
        tolerance: no server's work exceeds (1 + tolerance) × its share.
        policy: planner to use: "balanced", or "packed" (every rank computes what it holds).
        backend: attention kernels: "auto", "cpu", "reference".
        dtype, device: of q, k and v.
        timeout_s: longest wait for a transfer.
        planning_group: a CPU (gloo) group of the same ranks, used for lengths only. Needed when there is a group.
        store: any store that the ranks share; with it a time-out names who is missing.
        speeds: relative speed of each rank; () means equal.
        window: keys that a query sees at most, its own included; None: all earlier ones of its document.
        memory: "keep" holds received rows on the server until backward, "resend" sends them again then.
        meter: where times go; a new one by default.

    Raises:
        UsageError: an argument that cannot be honoured; it is named.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        shape: AttentionShape,
        tolerance: float = 0.05,
        policy: str = "balanced",
        backend: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        timeout_s: float = 300.0,
        planning_group: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
        speeds: Sequence[float] = (),
        window: int | None = None,
        memory: Memory = "keep",
        meter: Meter | None = None,
        progress_period_s: float = 1.0,
    ) -> None:
        self.group, self.planning_group = group, planning_group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        if self.ranks > 1 and planning_group is None:
            raise UsageError(
                "Balancer: planning_group=None with more than one rank; pass a gloo group of the same ranks "
                '(torch.distributed.new_group(backend="gloo")): planning messages need a group of their own'
            )
        if not 0 <= tolerance < float("inf"):
            raise UsageError(f"Balancer: tolerance={tolerance}, expected a number >= 0 such as 0.05")
        if memory not in get_args(Memory):
            raise UsageError(f"Balancer: memory={memory!r}, expected one of {', '.join(get_args(Memory))}")
        self.shape, self.tolerance, self.policy = shape, tolerance, policy
        self.window, self.memory = window, memory
        self.topology = Topology(self.ranks, speeds=tuple(speeds))
        self.meter = meter if meter is not None else Meter()
        self.device = device if device is not None else torch.device("cpu")
        self.backend: Backend = build_backend(
            backend,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            device=self.device,
            dtype=dtype,
            window=window,
        )
        self.arena = Arena(self.device)
        self.timeout_s = timeout_s
        self.progress: Progress | None = None
        if store is not None and self.ranks > 1:
            self.progress = Progress(store, self.rank, self.ranks, period_s=progress_period_s)
            self.progress.start()
        self.exchange = Exchange(group, progress=self.progress, timeout_s=timeout_s, meter=self.meter)
        self._planned_steps = 0
        self._planning = threading.Lock()

    def plan(self, doc_lengths_by_nano_batch: Sequence[Sequence[int]], note: Any = None) -> StepPlan:
        """Plan one step. Every rank calls it, in the same order; it may run on a background thread.

        Args:
            doc_lengths_by_nano_batch: lengths of this rank's documents in packing order, per nano-batch. Ranks may
                give different numbers of nano-batches: all get plans for the largest number, joined with no documents.
            note: any small picklable value; every rank receives every rank's note with the plan.

        Raises:
            PeerError: a rank did not come to plan within the time-out.
        """
        with self._planning:
            step = self._planned_steps
            self._planned_steps += 1
            own = ([[int(n) for n in lengths] for lengths in doc_lengths_by_nano_batch], note)
            messages = self._gather(own, step)
            rounds = max(len(lengths) for lengths, _ in messages)
            nano_batches = []
            for index in range(rounds):
                lengths_by_rank = [lengths[index] if index < len(lengths) else [] for lengths, _ in messages]
                nano_batches.append(self.plan_layout(Layout.from_doc_lengths(lengths_by_rank), index, step=step))
            return StepPlan(tuple(nano_batches), tuple(note for _, note in messages), step)

    def plan_layout(self, layout: Layout, index: int = 0, *, policy: str | None = None, step: int = 0) -> NanoBatchPlan:
        """Plan a layout that all ranks know already; no message. `policy` overrides the balancer's."""
        plan = make_plan(
            layout,
            policy=policy if policy is not None else self.policy,
            topology=self.topology,
            shape=self.shape,
            tolerance=self.tolerance,
            window=self.window,
        )
        return NanoBatchPlan(plan, build_tables(plan, self.rank), index, step)

    def core_attention(self, nano_batch: NanoBatchPlan, step: int | None = None) -> CoreAttention:
        """Core attention that carries out `nano_batch` on this rank: `attention(q, k, v, layer)`. `step` is what errors
        and traces call this step; None: the number of the plan."""
        return CoreAttention(
            nano_batch.tables, self.backend, self.exchange, self.arena,
            memory=self.memory, nano_batch=nano_batch.index, step=nano_batch.step if step is None else step,
        )  # fmt: skip

    def close(self) -> None:
        """Stop publishing progress."""
        if self.progress is not None:
            self.progress.close()

    def _gather(self, message: tuple[list[list[int]], Any], step: int) -> list[tuple[list[list[int]], Any]]:
        if self.ranks == 1:
            return [message]
        gathered: list[Any] = [None] * self.ranks
        try:
            dist.all_gather_object(gathered, message, group=self.planning_group)
        except RuntimeError as error:
            who = self.progress.explain(None) if self.progress is not None else "no progress is published"
            raise PeerError(
                f"planning of step {step}: the lengths of all ranks did not arrive: {who}. Look at the log of the rank "
                f"that is missing. [{first_line(error)}]"
            ) from error
        return gathered
