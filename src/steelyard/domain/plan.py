"""What a planner decides (`DispatchPlan`) and the arrays with which one rank carries it out (`DispatchTables`).

One exchange of a nano-batch has two phases. In *dispatch*, home ranks send query rows and key/value rows to servers;
in *return*, servers send output rows back. The backward pass is the mirror image with the same tables: dOut travels
like queries, dQ like outputs, and dK, dV travel home along the key/value rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Who computes what, for one nano-batch. Who sends what to whom follows from it: see `planner.tables`.

    Attributes:
        layout: where every token lives.
        tasks: every query of every document in exactly one task.
        topology: the attention servers; in place, server j is rank j.
        shape: the attention shape whose bytes were minimised.
        tolerance: the promise: no server's work above (1 + tolerance) × its share.
        policy: name of the planner that made it.
        window: keys that a query sees at most (its own included); None: all earlier ones.
        memory_limited: a memory cap came before the balance promise.
        row_keys: what a query row costs besides the keys that it sees, in keys, in the work that is balanced: 0 for
            pairs, more where the time of a kernel is.
    """

    layout: Layout
    tasks: CATasks
    topology: Topology
    shape: AttentionShape
    tolerance: float
    policy: str
    window: int | None = None
    memory_limited: bool = False
    row_keys: int = 0

    @property
    def home(self) -> IntArray:
        """Rank on which each task's queries live, int64 (tasks,)."""
        return self.layout.shard_rank[self.tasks.shard]


@dataclass(frozen=True, eq=False)
class KernelTasks:
    """Tasks of one server as a kernel reads them: int64 columns, rows relative to a *store*.

    Store 0 is the rank's own q, k, v; store 1 holds the received rows. Task t computes the query rows
    [q_row, q_row + q_length) of store `q_store`, at document positions from `q_position`. Its keys are the segments
    [segment_offset[t], segment_offset[t + 1]), in order of position, each a run of contiguous rows of one store,
    together the positions [low, q_position + q_length) without gaps. All segments but the last are seen by every
    query of the task (without a window); the last one ends at the task's last query: its mask is causal, aligned to
    the bottom right, and its length is at least q_length.
    """

    q_store: IntArray
    q_row: IntArray
    q_length: IntArray
    q_position: IntArray
    segment_offset: IntArray
    segment_store: IntArray
    segment_row: IntArray
    segment_length: IntArray
    segment_position: IntArray

    def __len__(self) -> int:
        return len(self.q_row)

    @classmethod
    def empty(cls) -> KernelTasks:
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, none, none, np.zeros(1, dtype=np.int64), none, none, none, none)


@dataclass(frozen=True, eq=False)
class SentRows:
    """Local rows of one kind that leave, as runs: by destination, then by (document, position).

    A run is as long as it can be: consecutive rows to one destination are one run. A row may go to several
    destinations, but to each only once.

    Attributes:
        peer: destinations, ascending, never the rank itself, int64 (peers,).
        rows: rows that go to each, at least 1, int64 (peers,).
        runs: runs that go to each, int64 (peers,).
        run_row: first local row of each run, int64 (runs,).
        run_length: its rows, int64 (runs,).
    """

    peer: IntArray
    rows: IntArray
    runs: IntArray
    run_row: IntArray
    run_length: IntArray

    @classmethod
    def empty(cls) -> SentRows:
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, none, none, none)


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """How many rows of one kind arrive; they stand by source, then by (document, position).

    Attributes:
        peer: sources, ascending, never the rank itself, int64 (peers,).
        rows: rows from each, at least 1, int64 (peers,).
    """

    peer: IntArray
    rows: IntArray

    @classmethod
    def empty(cls) -> ReceivedRows:
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none)


@dataclass(frozen=True, eq=False)
class DispatchTables:
    """Everything one rank needs to carry out a plan; the runtime copies runs of rows and computes no index.

    Rows arrive in the order in which an all-to-all delivers them. Peers are listed only where rows travel, so that the
    tables of n ranks together grow with what is sent, not with n².

    Attributes:
        rank, ranks: this rank and the size of the group.
        tokens: rows of the rank's own q, k, v.
        q_send, kv_send: query rows and key/value rows that leave.
        q_receive, kv_receive: those that arrive, in store 1 of the tasks.
        q_sent, kv_sent, q_received, kv_received: how many those are, over all peers.
        local_tasks: tasks whose queries and keys are all local.
        received_tasks: tasks that need any received row.
        local_pairs, received_pairs: (query, key) pairs in each.
        window: as in the plan.
        exchanges: whether any rank of the plan sends anything; False lets all ranks skip the transfers.
    """

    rank: int
    ranks: int
    tokens: int
    q_send: SentRows
    q_receive: ReceivedRows
    kv_send: SentRows
    kv_receive: ReceivedRows
    q_sent: int
    kv_sent: int
    q_received: int
    kv_received: int
    local_tasks: KernelTasks
    received_tasks: KernelTasks
    local_pairs: int
    received_pairs: int
    window: int | None = None
    exchanges: bool = True
