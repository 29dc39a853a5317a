"""Carries out dispatch tables on row *names* instead of rows, to see what every server would read.

A name is a global token: document after document on one line. Each rank's store of received rows is filled by
following rows and counts, as the transfers would; every task then says which queries and keys it reads. Nothing of the
planner or of `tables` is asked. Used by `checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchTables, KernelTasks


class PlanViolation(AssertionError):  # noqa: N818 - named for what it reports
    """A plan or its tables break a promise; the message names the first one found."""


def require(condition: bool, message: str) -> None:
    """Raise `PlanViolation` with `message` unless the condition holds."""
    if not condition:
        raise PlanViolation(message)


class Store:
    """The global tokens in the rows of one store, and where consecutive tokens break off."""

    def __init__(self, names: IntArray) -> None:
        self.names = names
        breaks = np.cumsum(np.diff(names) != 1)
        self._stretch = np.concatenate([np.zeros(min(1, len(names)), dtype=np.int64), breaks])

    def __len__(self) -> int:
        return len(self.names)

    def contiguous(self, row: IntArray, length: IntArray) -> bool:
        """Whether rows [row, row + length) exist and hold consecutive tokens, for all of them."""
        if not len(row):
            return True
        if int(row.min()) < 0 or int(length.min()) < 1 or int((row + length).max()) > len(self.names):
            return False
        return bool(np.all(self._stretch[row] == self._stretch[row + length - 1]))

    def runs(self) -> tuple[IntArray, IntArray]:
        """First token and end of each run of consecutive ones, sorted by token."""
        if not len(self.names):
            return self.names, self.names
        breaks = np.flatnonzero(np.diff(self._stretch)) + 1
        first = self.names[np.concatenate([[0], breaks])]
        end = self.names[np.concatenate([breaks - 1, [len(self.names) - 1]])] + 1
        order = np.argsort(first, kind="stable")
        return first[order], end[order]


@dataclass(frozen=True, eq=False)
class Stores:
    """What one server can read: its own rows (queries and keys alike) and those that it received."""

    own: Store
    queries: Store
    keys: Store

    def of_queries(self, store: int) -> Store:
        return self.queries if store else self.own

    def of_keys(self, store: int) -> Store:
        return self.keys if store else self.own


@dataclass(frozen=True, eq=False)
class Reads:
    """What tasks read, in global tokens: queries [first, end) and keys [key_first, end), int64 (tasks,)."""

    first: IntArray
    end: IntArray
    key_first: IntArray


def own_names(layout: Layout) -> list[IntArray]:
    """The global token in each local row of each rank, straight from the shard table."""
    base = np.cumsum(layout.doc_lengths) - layout.doc_lengths
    names = [np.full(int(n), -1, dtype=np.int64) for n in layout.tokens_by_rank]
    for shard in layout:
        first = int(base[shard.doc]) + shard.start
        names[shard.rank][shard.row : shard.row + shard.length] = np.arange(first, first + shard.length)
    return names


def deliver(tables: Sequence[DispatchTables], names: list[IntArray]) -> list[Stores]:
    """Carry out the dispatch phase; returns every rank's stores."""
    queries = _all_to_all(
        "query",
        names,
        [t.q_send_rows for t in tables],
        [t.q_send_counts for t in tables],
        [t.q_receive_counts for t in tables],
    )
    keys = _all_to_all(
        "key",
        names,
        [t.kv_send_rows for t in tables],
        [t.kv_send_counts for t in tables],
        [t.kv_receive_counts for t in tables],
    )
    return [Stores(Store(own), Store(q), Store(k)) for own, q, k in zip(names, queries, keys, strict=True)]


def _all_to_all(
    kind: str, names: list[IntArray], rows: list[IntArray], sent: list[IntArray], expected: list[IntArray]
) -> list[IntArray]:
    """What each rank has received, by source, in the order sent."""
    ranks = len(names)
    for rank in range(ranks):
        require(
            len(sent[rank]) == ranks and len(expected[rank]) == ranks,
            f"rank {rank}: {kind} counts are not one per rank",
        )
    differ = np.argwhere(np.stack(sent) != np.stack(expected).T)
    require(
        not len(differ), f"rank and peer {differ[:1].tolist()}: {kind} rows sent are not as many as the peer expects"
    )
    arriving: list[list[IntArray]] = [[] for _ in range(ranks)]
    for source in range(ranks):
        leaving, counts = rows[source], sent[source]
        require(int(counts[source]) == 0, f"promise 4: rank {source} sends {kind} rows to itself")
        require(
            int(counts.sum()) == len(leaving),
            f"rank {source}: {kind} counts add up to {int(counts.sum())}, but {len(leaving)} rows leave",
        )
        require(
            not len(leaving) or (int(leaving.min()) >= 0 and int(leaving.max()) < len(names[source])),
            f"rank {source}: {kind} rows outside its {len(names[source])} rows leave",
        )
        names_sent, ends = names[source][leaving], np.cumsum(counts)
        for server in np.flatnonzero(counts).tolist():
            part = names_sent[ends[server] - counts[server] : ends[server]]
            require(
                bool(np.all(np.diff(part) > 0)),
                f"promise 4: rank {source} sends {kind} rows to {server} twice or not in order of position",
            )
            arriving[server].append(part)
    none = np.zeros(0, dtype=np.int64)
    return [np.concatenate(parts) if parts else none for parts in arriving]


def read(
    server: int, kernel: KernelTasks, local: bool, stores: Stores, doc_length: IntArray, window: int | None
) -> Reads:
    """Check one list of tasks of one server against what its stores hold, and say what it reads."""
    count, offset = len(kernel), kernel.segment_offset
    require(
        len(offset) == count + 1
        and bool(np.all(np.diff(offset) >= 1))
        and int(offset[0]) == 0
        and int(offset[-1]) == len(kernel.segment_row),
        f"server {server}: segment offsets do not divide the segments into tasks",
    )
    first, segment_first = _first_tokens(server, kernel, stores)
    received = np.concatenate([[0], np.cumsum(kernel.segment_store)])
    uses_received = (kernel.q_store > 0) | (received[offset[1:]] > received[offset[:-1]])
    require(
        bool(np.all(uses_received != local)),
        f"server {server}: a {'received' if local else 'local'} task stands among the others",
    )
    doc_base = np.cumsum(doc_length) - doc_length
    doc = np.searchsorted(doc_base, first, side="right") - 1
    position, end = kernel.q_position, kernel.q_position + kernel.q_length
    require(
        bool(np.all(first - doc_base[doc] == position)),
        f"server {server}: a task's query position is not that of the query rows it reads",
    )
    require(bool(np.all(end <= doc_length[doc])), f"server {server}: a task's queries run past their document")
    low = np.zeros(count, dtype=np.int64) if window is None else np.maximum(0, position - window + 1)
    _check_segments(server, kernel, segment_first - np.repeat(doc_base[doc], np.diff(offset)), low)
    return Reads(first, first + kernel.q_length, low + doc_base[doc])


def _first_tokens(server: int, kernel: KernelTasks, stores: Stores) -> tuple[IntArray, IntArray]:
    """Global token of each task's first query and of each segment's first key."""
    first = np.zeros(len(kernel), dtype=np.int64)
    segment_first = np.zeros(len(kernel.segment_row), dtype=np.int64)
    for number in (0, 1):
        store, chosen = stores.of_queries(number), kernel.q_store == number
        row, length = kernel.q_row[chosen], kernel.q_length[chosen]
        require(store.contiguous(row, length), f"server {server}: query rows in store {number} are no contiguous run")
        first[chosen] = store.names[row]
        store, chosen = stores.of_keys(number), kernel.segment_store == number
        row, length = kernel.segment_row[chosen], kernel.segment_length[chosen]
        require(store.contiguous(row, length), f"server {server}: a segment in store {number} is no contiguous run")
        segment_first[chosen] = store.names[row]
    return first, segment_first


def _check_segments(server: int, kernel: KernelTasks, position: IntArray, low: IntArray) -> None:
    """Each task's segments, found at `position` of its document, are the keys [low, end of its queries) in order."""
    require(
        bool(np.all(position == kernel.segment_position)),
        f"server {server}: a segment's position is not that of the key rows it reads, or of another document",
    )
    if not len(kernel):
        return
    after = position + kernel.segment_length
    firsts, lasts = kernel.segment_offset[:-1], kernel.segment_offset[1:] - 1
    inner = np.ones(len(position), dtype=bool)
    inner[firsts] = False
    follows = np.concatenate([[0], after[:-1]])
    require(
        bool(np.all((position == follows)[inner])),
        f"promise 1: server {server}: a task's keys leave a gap or come twice",
    )
    require(
        bool(np.all(position[firsts] == low)) and bool(np.all(after[lasts] == kernel.q_position + kernel.q_length)),
        f"promise 1: server {server}: a task does not see exactly the keys from its first to its own last query",
    )
    require(
        bool(np.all(kernel.segment_length[lasts] >= kernel.q_length)),
        f"server {server}: a task's last segment is shorter than its queries",
    )
