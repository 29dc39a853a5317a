"""What a plan in the making looks like: who computes which query ranges, who has which keys, how much work that is.

The ledger decides nothing. `balanced` asks it what a move would need and tells it which one to make.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from typing import NamedTuple

import numpy as np

from steelyard.domain.layout import Layout
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.planner.work import RowWork

NO_LIMIT = 1 << 62  # tokens; more than any server can be sent


class Kept(NamedTuple):
    """Queries [start, end) of a shard that a donor still computes. Ordered by work."""

    work: int
    start: int
    end: int
    shard: int


class Ledger:
    """Every shard starts whole on its home; `place_whole` and `move` change that.

    Attributes:
        doc, start, length, home: the shard table, as lists.
        cut: for each document, whether it lies in several shards.
        rows: the unit of work.
        shard_work: work of each shard.
        work: work on each server.
        memory_left: tokens that each server may still receive.
        queries_in, keys_in: query and key rows that each server receives.
        kept: for each donor what it still computes, least work first. Servers that never were donors have no entry.
        parts: how many of those there are, by (document, donor).
        own: the shards that a server holds of a document that spans ranks, as (start, end), by (document, server).
        prefix: by (document, server), up to which position all keys are on the server: its own, or received. Without an
            entry none are; with a window there are no entries.
        holders: servers with received keys or shards of a document, in the order in which they came to it.
    """

    def __init__(self, layout: Layout, topology: Topology, rows: RowWork) -> None:
        self.layout, self.rows, self.window, self.servers = layout, rows, rows.window, topology.servers
        shards_of_doc = np.bincount(layout.shard_doc, minlength=layout.docs)
        self.cut: list[bool] = (shards_of_doc > 1).tolist()
        amount = rows.of_array(layout.shard_start, layout.shard_start + layout.shard_length)
        work = np.zeros(self.servers, dtype=np.int64)
        np.add.at(work, layout.shard_rank, amount)
        self.doc: list[int] = layout.shard_doc.tolist()
        self.start: list[int] = layout.shard_start.tolist()
        self.length: list[int] = layout.shard_length.tolist()
        self.home: list[int] = layout.shard_rank.tolist()
        self.shard_work: list[int] = amount.tolist()
        self.work: list[int] = work.tolist()
        self.memory_left = list(topology.memory_tokens) or [NO_LIMIT] * self.servers
        self.queries_in, self.keys_in = [0] * self.servers, [0] * self.servers
        self.kept: dict[int, list[Kept]] = {}
        self.parts: Counter[tuple[int, int]] = Counter()
        self.own: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.holders: dict[int, dict[int, None]] = {}
        self._place = layout.shard_rank.copy()
        self._moved: list[tuple[int, int, int, int]] = []  # start, end, server, shard
        self.prefix: dict[tuple[int, int], int] = {}

    def spanning_shards(self) -> list[int]:
        """Shards of documents that are cut, by document and position. Notes who holds them."""
        cut = np.flatnonzero(np.array(self.cut, dtype=np.bool_)[self.layout.shard_doc])
        order = np.lexsort((self.layout.shard_start[cut], self.layout.shard_doc[cut]))
        spanning: list[int] = cut[order].tolist()
        for shard in spanning:
            held = self.own.setdefault((self.doc[shard], self.home[shard]), [])
            held.append((self.start[shard], self.start[shard] + self.length[shard]))
        return spanning

    def new_keys(self, doc: int, server: int, start: int, end: int) -> int:
        """Keys that queries [start, end) see and that the server neither holds nor receives yet.

        With a window, keys received for other tasks are not credited: an upper bound.
        """
        low = self.prefix.get((doc, server), 0) if self.window is None else max(0, start - self.window + 1)
        if end <= low:
            return 0
        own = self.own.get((doc, server)) if self.cut[doc] else None
        return end - low - (_overlap(own, low, end) if own else 0)

    def freed_keys(self, server: int, kept: Kept) -> int:
        """Keys that the server need no longer receive once it gives away all of `kept`, its last part of a document."""
        doc = self.doc[kept.shard]
        own = self.own.get((doc, server))
        if not own or self.parts[doc, server] > 1:
            return 0
        low = 0 if self.window is None else max(0, kept.start - self.window + 1)
        return kept.end - low - _overlap(own, low, kept.end)

    def receive(self, doc: int, server: int, end: int, *, queries: int, keys: int) -> None:
        """The server gets `keys` that it lacked, and has all that queries before `end` see; and `queries` rows."""
        self.memory_left[server] -= keys + queries
        self.queries_in[server] += queries
        self.keys_in[server] += keys
        if self.window is None and end > self.prefix.get((doc, server), 0):
            self.prefix[doc, server] = end
        self.holders.setdefault(doc, {})[server] = None

    def place_whole(self, shard: int, server: int) -> None:
        """Compute a whole shard on `server`; only before any `move`."""
        self._place[shard] = server
        self.work[self.home[shard]] -= self.shard_work[shard]
        self.work[server] += self.shard_work[shard]

    def become_donors(self, servers: list[int]) -> None:
        """List what these servers compute, so that it can be moved."""
        fresh = np.zeros(self.servers, dtype=bool)
        fresh[[server for server in servers if server not in self.kept]] = True
        for server in servers:
            self.kept.setdefault(server, [])
        for shard in np.flatnonzero(fresh[self._place]).tolist():
            start = self.start[shard]
            whole = Kept(self.shard_work[shard], start, start + self.length[shard], shard)
            server = int(self._place[shard])
            self.kept[server].append(whole)
            self.parts[self.doc[shard], server] += 1
        for server in np.flatnonzero(fresh).tolist():
            self.kept[server].sort()

    def move(self, donor: int, index: int, start: int, end: int, server: int) -> None:
        """Compute queries [start, end) of the donor's `kept[index]` on `server`."""
        whole = self.kept[donor].pop(index)
        self.parts[self.doc[whole.shard], donor] -= 1
        for low, high in ((whole.start, start), (end, whole.end)):
            if low < high:
                insort(self.kept[donor], Kept(self.rows.of(low, high), low, high, whole.shard))
                self.parts[self.doc[whole.shard], donor] += 1
        self._moved.append((start, end, server, whole.shard))
        doc, away = self.doc[whole.shard], server != self.home[whole.shard]
        keys = self.new_keys(doc, server, start, end)
        self.receive(doc, server, end, queries=end - start if away else 0, keys=keys)
        amount = self.rows.of(start, end)
        self.work[donor] -= amount
        self.work[server] += amount

    def tasks(self) -> CATasks:
        """Moved ranges, what donors kept, and the whole shards of all others."""
        layout = self.layout
        donors = np.zeros(self.servers, dtype=bool)
        donors[list(self.kept)] = True
        whole = np.flatnonzero(~donors[self._place])
        cut = self._moved + [(k.start, k.end, donor, k.shard) for donor, kept in self.kept.items() for k in kept]
        start, end, server, shard = np.array(cut, dtype=np.int64).reshape(-1, 4).T
        shards = np.concatenate([whole, shard])
        return CATasks.from_columns(
            layout.shard_doc[shards],
            np.concatenate([layout.shard_start[whole], start]),
            np.concatenate([(layout.shard_start + layout.shard_length)[whole], end]),
            np.concatenate([self._place[whole], server]),
            shards,
        )


def _overlap(own: list[tuple[int, int]], low: int, high: int) -> int:
    """Tokens of [low, high) that lie in the given shards."""
    tokens = 0
    for first, last in own:
        if first < high and last > low:
            tokens += (last if last < high else high) - (first if first > low else low)
    return tokens
