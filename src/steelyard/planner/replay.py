"""Carries out dispatch tables on row *names* instead of rows, to see what every server would read.

A name is a global token: document after document on one line. Each rank's store of received rows is filled by
following runs and counts, as the transfers would; every task then says which queries and keys it reads. Nothing of the
planner or of `tables` is asked. Used by `checks`.

A store is kept as stretches of consecutive names, and the tables of all ranks are read at once, as columns with a
column that says whose they are: 512 ranks take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.domain.arrays import BoolArray, IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchTables, KernelTasks, ReceivedRows, SentRows


class PlanViolation(AssertionError):  # noqa: N818 - named for what it reports
    """A plan or its tables break a promise; the message names the first one found."""


def require(condition: bool, message: str) -> None:
    """Raise `PlanViolation` with `message` unless the condition holds."""
    if not condition:
        raise PlanViolation(message)


def require_all(fine: BoolArray, rank: IntArray, message: str) -> None:
    """Raise `PlanViolation` with `message` unless all are fine; "{rank}" in it becomes the first that is not."""
    if not fine.all():
        raise PlanViolation(message.replace("{rank}", str(int(rank[np.argmin(fine)]))))


def _owners(count: IntArray) -> IntArray:
    """0 count[0] times, 1 count[1] times, …"""
    return np.repeat(np.arange(len(count)), count)


class Store:
    """The global tokens in the rows of one kind of store of all ranks, given run by run, by rank and row.

    Attributes:
        rows: rows of each rank's store, int64 (ranks,).
        rank, token, length: the stretches of consecutive tokens, as long as they can be, by rank and row.
    """

    def __init__(self, ranks: int, rank: IntArray, token: IntArray, length: IntArray) -> None:
        self.rows = np.zeros(ranks, dtype=np.int64)
        np.add.at(self.rows, rank, length)
        self._first = np.cumsum(self.rows) - self.rows  # of each rank, when all stores stand in one line
        follows = (rank[1:] == rank[:-1]) & (token[1:] == token[:-1] + length[:-1])
        opens = np.flatnonzero(np.concatenate([np.ones(min(1, len(rank)), dtype=bool), ~follows]))
        self._line = (np.cumsum(length) - length)[opens]
        self.rank, self.token = rank[opens], token[opens]
        self.length = np.diff(np.append(self._line, length.sum()))

    def inside(self, rank: IntArray, row: IntArray, length: IntArray) -> BoolArray:
        """Whether rows [row, row + length) exist, and at least one."""
        fine: BoolArray = (row >= 0) & (length >= 1) & (row + length <= self.rows[rank])
        return fine

    def _stretch(self, rank: IntArray, row: IntArray) -> IntArray:
        found: IntArray = np.searchsorted(self._line, self._first[rank] + row, side="right") - 1
        return found

    def first_token(self, rank: IntArray, row: IntArray) -> IntArray:
        """The token in `row`, which must exist."""
        stretch = self._stretch(rank, row)
        found: IntArray = self.token[stretch] + self._first[rank] + row - self._line[stretch]
        return found

    def contiguous(self, rank: IntArray, row: IntArray, length: IntArray) -> BoolArray:
        """Whether rows [row, row + length) exist and hold consecutive tokens."""
        fine = self.inside(rank, row, length)
        rank, row, length = rank[fine], row[fine], length[fine]
        fine[fine] = self._stretch(rank, row) == self._stretch(rank, row + length - 1)
        return fine

    def tokens(self, rank: IntArray, row: IntArray, length: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """What rows [row, row + length), which must exist, hold: which of them, first token, number of tokens."""
        first, last = self._stretch(rank, row), self._stretch(rank, row + length - 1)
        owner = _owners(last - first + 1)
        stretch = np.arange(len(owner)) - (np.cumsum(last - first + 1) - 1 - last)[owner]
        line = self._first[rank[owner]] + row[owner]
        low = np.maximum(self._line[stretch], line)
        high = np.minimum(self._line[stretch] + self.length[stretch], line + length[owner])
        return owner, self.token[stretch] + low - self._line[stretch], high - low

    def names(self, rank: int) -> list[int]:
        """The token in each row of one rank's store."""
        own = slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())  # stretches are sorted by rank
        return [
            token + i
            for token, length in zip(self.token[own].tolist(), self.length[own].tolist(), strict=True)
            for i in range(length)
        ]


@dataclass(frozen=True, eq=False)
class Stores:
    """What servers can read: their own rows (queries and keys alike) and those that they received."""

    own: Store
    queries: Store
    keys: Store

    def of_queries(self, store: int) -> Store:
        return self.queries if store else self.own

    def of_keys(self, store: int) -> Store:
        return self.keys if store else self.own


@dataclass(frozen=True, eq=False)
class Reads:
    """What tasks read, in global tokens: queries [first, end) and keys [key_first, end) on `server`, int64 (tasks,)."""

    server: IntArray
    first: IntArray
    end: IntArray
    key_first: IntArray


def own_rows(layout: Layout) -> Store:
    """The global token in each local row of each rank, straight from the shard table."""
    order = np.lexsort((layout.shard_row, layout.shard_rank))
    rank, row, length = (column[order] for column in (layout.shard_rank, layout.shard_row, layout.shard_length))
    token = (np.cumsum(layout.doc_lengths) - layout.doc_lengths)[layout.shard_doc] + layout.shard_start
    store = Store(layout.ranks, rank, token[order], length)
    before = np.cumsum(length) - length
    require_all(row == before - (np.cumsum(store.rows) - store.rows)[rank], rank, "rank {rank}: its shards leave a gap")
    return store


def deliver(tables: Sequence[DispatchTables], own: Store) -> Stores:
    """Carry out the dispatch phase; returns what every rank can read."""
    queries = _all_to_all("query", own, [t.q_send for t in tables], [t.q_receive for t in tables])
    keys = _all_to_all("key", own, [t.kv_send for t in tables], [t.kv_receive for t in tables])
    for kind, store, sent, received in (
        ("query", queries, [t.q_sent for t in tables], [t.q_received for t in tables]),
        ("key", keys, [t.kv_sent for t in tables], [t.kv_received for t in tables]),
    ):
        parts = [t.q_send if kind == "query" else t.kv_send for t in tables]
        require_all(
            (np.array(received) == store.rows) & (np.array(sent) == [int(p.run_length.sum()) for p in parts]),
            np.arange(len(tables)),
            f"rank {{rank}}: other {kind} rows leave or arrive than its totals say",
        )
    return Stores(own, queries, keys)


def _all_to_all(kind: str, own: Store, sends: list[SentRows], receives: list[ReceivedRows]) -> Store:
    """What each rank has received, by source, in the order sent."""
    ranks = len(sends)
    source, server, rows, runs = _links(
        f"sends {kind} rows to", ranks, [s.peer for s in sends], [s.rows for s in sends], [s.runs for s in sends]
    )
    expecting, expected_source, expected_rows, _ = _links(
        f"receives {kind} rows from", ranks, [r.peer for r in receives], [r.rows for r in receives]
    )
    order = np.argsort(server, kind="stable")  # of the links, sorted by source: now by server, then source
    agree = len(order) == len(expecting) and all(
        np.array_equal(sent[order], expected)
        for sent, expected in ((server, expecting), (source, expected_source), (rows, expected_rows))
    )
    require(agree, f"{kind} rows sent are not as many as the peer expects")

    row, length = (np.concatenate([getattr(s, name) for s in sends]) for name in ("run_row", "run_length"))
    sender = np.arange(ranks)
    runs_sent = np.zeros(ranks, dtype=np.int64)
    np.add.at(runs_sent, source, runs)
    require_all(
        (runs_sent == [len(s.run_row) for s in sends]) & (runs_sent == [len(s.run_length) for s in sends]),
        sender,
        f"rank {{rank}}: {kind} runs are not as many as its counts add up to",
    )
    link = _owners(runs)  # of each run
    require_all(
        own.inside(source[link], row, length), source[link], f"rank {{rank}}: {kind} rows outside its own rows leave"
    )
    sent_rows = np.zeros(len(rows), dtype=np.int64)
    np.add.at(sent_rows, link, length)
    require_all(sent_rows == rows, source, f"rank {{rank}}: {kind} counts add up to another number than its runs")

    run, token, count = own.tokens(source[link], row, length)
    link = link[run]
    ascends = (link[1:] != link[:-1]) | (token[1:] >= token[:-1] + count[:-1])
    require_all(
        ascends, source[link[1:]], f"promise 4: rank {{rank}} sends {kind} rows twice or not in order of position"
    )
    arrival = np.argsort(server[link], kind="stable")
    return Store(ranks, server[link[arrival]], token[arrival], count[arrival])


def _links(
    what: str, ranks: int, peers: list[IntArray], rows: list[IntArray], runs: list[IntArray] | None = None
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """All ranks' peers as columns: rank, peer, rows, runs; checked to be in order and to have something to do."""
    runs = rows if runs is None else runs
    lengths = [(len(a), len(b), len(c)) for a, b, c in zip(peers, rows, runs, strict=True)]
    require(all(a == b == c for a, b, c in lengths), f"a rank {what} peers, but not one count each")
    rank = _owners(np.array([a for a, _, _ in lengths]))
    peer, row_count, run_count = (np.concatenate(part) for part in (peers, rows, runs))
    require_all(
        (peer >= 0) & (peer < ranks) & (peer != rank), rank, f"promise 4: rank {{rank}} {what} itself or a stranger"
    )
    require_all(
        (rank[1:] != rank[:-1]) | (peer[1:] > peer[:-1]), rank[1:], f"rank {{rank}} {what} peers twice or not in order"
    )
    require_all((row_count >= 1) & (run_count >= 1), rank, f"rank {{rank}} {what} a peer, but none")
    return rank, peer, row_count, run_count


def read(
    server: IntArray,
    kernels: Sequence[KernelTasks],
    local: BoolArray,
    stores: Stores,
    layout: Layout,
    window: int | None,
) -> Reads:
    """Check lists of tasks against what the stores hold, and say what they read.

    Args:
        server: whose each list is, int64 (lists,).
        kernels: the lists.
        local: whether a list must hold tasks that need no received row, or only tasks that need one.
        stores: of all servers.
    """
    kernel = _joined(server, kernels)
    owner = _owners(np.array([len(k) for k in kernels]))
    server, local = server[owner], local[owner]
    count = np.diff(kernel.segment_offset)
    first, segment_first = _first_tokens(server, kernel, stores)
    received = np.concatenate([[0], np.cumsum(kernel.segment_store)])
    uses_received = (kernel.q_store > 0) | (np.diff(received[kernel.segment_offset]) > 0)
    require_all(
        uses_received != local, server, "server {rank}: a task stands among the local or received ones, and is not one"
    )
    doc_base = np.cumsum(layout.doc_lengths) - layout.doc_lengths
    doc = np.searchsorted(doc_base, first, side="right") - 1
    position, end = kernel.q_position, kernel.q_position + kernel.q_length
    require_all(
        first - doc_base[doc] == position,
        server,
        "server {rank}: a task's query position is not that of the query rows it reads",
    )
    require_all(end <= layout.doc_lengths[doc], server, "server {rank}: a task's queries run past their document")
    low = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    _check_segments(server, kernel, segment_first - np.repeat(doc_base[doc], count), low)
    return Reads(server, first, first + kernel.q_length, low + doc_base[doc])


def _joined(server: IntArray, kernels: Sequence[KernelTasks]) -> KernelTasks:
    """All lists one after another, their offsets checked and counted on."""

    def column(name: str) -> IntArray:
        return np.concatenate([getattr(k, name) for k in kernels])

    fields = KernelTasks.__dataclass_fields__
    tasks = {name: column(name) for name in fields if name.startswith("q_")}
    segments = {name: column(name) for name in fields if name.startswith("segment_") and name != "segment_offset"}

    def lengths(of: Callable[[KernelTasks], int]) -> IntArray:
        return np.array([of(k) for k in kernels])

    for kind, names in (("q_row", tasks), ("segment_row", segments)):
        whole = lengths(lambda k, kind=kind: len(getattr(k, kind)))  # type: ignore[misc]
        for name in names:
            same = lengths(lambda k, name=name: len(getattr(k, name))) == whole  # type: ignore[misc]
            require_all(same, server, f"server {{rank}}: {name} has another length than {kind}")
    offset, offsets = column("segment_offset"), lengths(lambda k: len(k.segment_offset))
    size = lengths(lambda k: len(k.segment_row))
    fine = offsets == lengths(len) + 1
    require_all(fine, server, "server {rank}: there is not one segment offset more than there are tasks")
    last = np.cumsum(offsets) - 1
    steps = np.diff(offset)
    inner = np.ones(len(steps), dtype=bool)
    inner[last[:-1]] = False  # from the last offset of a list to the first of the next
    divides = (offset[last - offsets + 1] == 0) & (offset[last] == size)
    require_all(divides, server, "server {rank}: segment offsets do not divide the segments into tasks")
    list_of_step = _owners(offsets)[1:]
    require_all(
        (steps >= 1) | ~inner, server[list_of_step], "server {rank}: segment offsets do not divide the segments"
    )
    return KernelTasks(**tasks, segment_offset=np.concatenate([[0], np.cumsum(steps[inner])]), **segments)


def _first_tokens(server: IntArray, kernel: KernelTasks, stores: Stores) -> tuple[IntArray, IntArray]:
    """Global token of each task's first query and of each segment's first key."""
    segment_server = np.repeat(server, np.diff(kernel.segment_offset))
    found = []
    for what, owner, number, row, length, store_of in (
        ("query rows", server, kernel.q_store, kernel.q_row, kernel.q_length, stores.of_queries),
        (
            "a segment", segment_server, kernel.segment_store, kernel.segment_row, kernel.segment_length,
            stores.of_keys,
        ),
    ):  # fmt: skip
        require_all((number == 0) | (number == 1), owner, f"server {{rank}}: {what} in a store other than 0 and 1")
        first = np.zeros(len(row), dtype=np.int64)
        for index in (0, 1):
            store, chosen = store_of(index), np.flatnonzero(number == index)
            require_all(
                store.contiguous(owner[chosen], row[chosen], length[chosen]),
                owner[chosen],
                f"server {{rank}}: {what} in store {index} are no contiguous run",
            )
            first[chosen] = store.first_token(owner[chosen], row[chosen])
        found.append(first)
    return found[0], found[1]


def _check_segments(server: IntArray, kernel: KernelTasks, position: IntArray, low: IntArray) -> None:
    """Each task's segments, found at `position` of its document, are the keys [low, end of its queries) in order."""
    task = _owners(np.diff(kernel.segment_offset))
    require_all(
        position == kernel.segment_position,
        server[task],
        "server {rank}: a segment's position is not that of the key rows it reads, or of another document",
    )
    after = position + kernel.segment_length
    follows = (task[1:] != task[:-1]) | (position[1:] == after[:-1])
    require_all(follows, server[task[1:]], "promise 1: server {rank}: a task's keys leave a gap or come twice")
    firsts, lasts = kernel.segment_offset[:-1], kernel.segment_offset[1:] - 1
    require_all(
        (position[firsts] == low) & (after[lasts] == kernel.q_position + kernel.q_length),
        server,
        "promise 1: server {rank}: a task does not see exactly the keys from its first to its own last query",
    )
    require_all(
        kernel.segment_length[lasts] >= kernel.q_length,
        server,
        "server {rank}: a task's last segment is shorter than its queries",
    )
