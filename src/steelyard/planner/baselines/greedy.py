"""The baseline `greedy`: the published idea of core attention disaggregation (arXiv 2510.18121), from its description.

Servers below their share have a *deficit*, those above it a *surplus*. Deficits are filled in descending order. Each
time, of all documents on servers with a surplus, the one that gives most work per byte is taken: whole if it fits into
surplus and deficit, else cut head–tail, the same number of queries from its front and from its back. A server is done
when its deficit is within the tolerance of its share, and that is all that is promised: nothing is said of servers with
a surplus, and where all deficits are small nothing moves, however large one surplus is.

Documents that span ranks are laid out head–tail over the ranks that hold them (tokens per rank stay as they are), since
such a pair of pieces is what this planner moves. Speeds are honoured, memory caps are not. It is our program after
their description: its figures are near those of the released code, not the same.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_array
from steelyard.domain.arrays import FloatArray, IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.planner.shares import speed_weights

FEW_ITEMS = 2_048  # up to so many, pricing them all costs less than knowing which to price


def plan_greedy(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> DispatchPlan:
    """Fill deficits in descending order, each time by the move with most work per byte."""
    layout = head_tail_where_spanning(layout)
    items = _Items(layout, window)
    work = np.zeros(layout.ranks, dtype=np.int64)
    np.add.at(work, items.server, items.amount())
    weights = speed_weights(topology)
    shares = np.array([int(work.sum()) * w // sum(weights) for w in weights], dtype=np.int64)
    surplus = np.maximum(work - shares, 0)
    deficits = np.maximum(shares - work, 0)
    items.restrict(surplus > 0)
    many = len(items.server) > FEW_ITEMS
    offers = _BestOffers(items, layout, shape) if many else _AllOffers(items, shape)
    moved: list[tuple[int, int, int, int]] = []
    for server in np.argsort(-deficits, kind="stable").tolist():
        deficit = int(deficits[server])
        while deficit > tolerance * shares[server]:
            offer = offers.best(np.minimum(surplus, deficit))
            if offer is None:
                break
            deficit -= offer.amount
            surplus[items.server[offer.item]] -= offer.amount
            moved += [(*piece, server) for piece in offers.take(offer)]
    tasks = _tasks(layout, moved)
    return DispatchPlan(layout, tasks, topology, shape, tolerance, "greedy", window)


def head_tail_where_spanning(layout: Layout) -> Layout:
    """Documents that live on several ranks, dealt to those ranks in head–tail order; each keeps its tokens.

    A rank with t tokens of the document gets t/2 from the front, after those of the ranks before it, and t/2 from the
    back, before those of the ranks before it.
    """
    shards_of_doc = np.bincount(layout.shard_doc, minlength=layout.docs)
    whole = np.flatnonzero(shards_of_doc[layout.shard_doc] == 1)
    columns = [
        c[whole].tolist() for c in (layout.shard_doc, layout.shard_start, layout.shard_length, layout.shard_rank)
    ]
    shards = list(zip(*columns, strict=True))
    for doc in np.flatnonzero(shards_of_doc > 1).tolist():
        held: dict[int, int] = {}
        of_doc = np.flatnonzero(layout.shard_doc == doc)
        for index in of_doc[np.argsort(layout.shard_start[of_doc])].tolist():
            rank = int(layout.shard_rank[index])
            held[rank] = held.get(rank, 0) + int(layout.shard_length[index])
        head, tail = 0, int(layout.doc_lengths[doc])
        for rank, tokens in held.items():
            front, back = tokens - tokens // 2, tokens // 2
            tail -= back
            shards += [(doc, head, front, rank), (doc, tail, back, rank)]
            head += front
    return Layout.from_shards(sorted(shards), layout.ranks)


class _Items:
    """What a server holds of a document: head queries [head_low, head_high) and tail queries [tail_low, tail_high).

    The halves of a whole document, or the two pieces of a head–tail layout. A cut takes the first queries of the head
    and the last ones of the tail, equally many: a short and a long row together have about as many pairs as the
    document has tokens, wherever the cut is.
    """

    def __init__(self, layout: Layout, window: int | None) -> None:
        self.window = window
        first = np.ones(layout.shards, dtype=bool)
        first[1:] = (np.diff(layout.shard_doc) != 0) | (np.diff(layout.shard_rank) != 0)
        head = np.flatnonzero(first)
        tail = np.append(head[1:], layout.shards)[: len(head)] - 1
        start, end = layout.shard_start, layout.shard_start + layout.shard_length
        middle = (start[head] + end[head]) // 2
        alone = head == tail
        self.server = layout.shard_rank[head]
        self.head_shard, self.tail_shard = head, tail
        self.head_low, self.head_high = start[head], np.where(alone, middle, end[head])
        self.tail_low, self.tail_high = np.where(alone, middle, start[tail]), end[tail]
        self.longest_row = longest_row_pairs(layout.doc_lengths, window)

    def restrict(self, servers: np.ndarray) -> None:
        """Forget the items of servers that are not marked."""
        self.restrict_to(np.flatnonzero(servers[self.server]))

    def restrict_to(self, kept: IntArray) -> None:
        for name in ("server", "head_shard", "tail_shard", "head_low", "head_high", "tail_low", "tail_high"):
            setattr(self, name, getattr(self, name)[kept])

    def amount(self) -> IntArray:
        """Pairs of each item."""
        return pairs_array(self.head_low, self.head_high, self.window) + pairs_array(
            self.tail_low, self.tail_high, self.window
        )

    def some(self, chosen: IntArray) -> _Items:
        """Copies of the chosen items."""
        part = copy(self)
        part.restrict_to(chosen)
        return part

    def width_within(self, limit: IntArray) -> IntArray:
        """Queries to cut from head and from tail so that the pairs stay within `limit`; -1: take the whole item."""
        heads, tails = self.head_high - self.head_low, self.tail_high - self.tail_low
        # Rows p from the front and p from the back have head_low + tail_high + 1 pairs together. With a window, or
        # where only one half is left, it is a bound: cuts are smaller than they might be, and more.
        row = np.where(heads > 0, self.head_low + 1, 0) + self.tail_high
        if self.window is not None:
            row = np.minimum(row, 2 * self.window)
        width = np.minimum(limit // np.maximum(row, 1), np.where(heads > 0, np.minimum(heads, tails), tails))
        return np.where(self.amount() <= limit, -1, width)

    def cut(self, width: IntArray, shape: AttentionShape) -> tuple[IntArray, FloatArray]:
        """Pairs that cuts of these widths move, and the bytes that their server would receive and send back."""
        whole = width < 0
        heads = np.where(whole, self.head_high - self.head_low, np.minimum(width, self.head_high - self.head_low))
        tails = np.where(whole, self.tail_high - self.tail_low, np.minimum(width, self.tail_high - self.tail_low))
        amount = pairs_array(self.head_low, self.head_low + heads, self.window) + pairs_array(
            self.tail_high - tails, self.tail_high, self.window
        )
        keys = np.where(tails > 0, self.tail_high, self.head_low + heads)
        received = shape.alpha_bytes * (heads + tails) + shape.beta_bytes * keys
        return amount, np.maximum(received, 1).astype(np.float64)

    def take(self, item: int, width: int) -> list[tuple[int, int, int]]:
        """Remove the cut from the item: shard, start and end of its pieces."""
        head_low, head_high = int(self.head_low[item]), int(self.head_high[item])
        tail_low, tail_high = int(self.tail_low[item]), int(self.tail_high[item])
        heads = head_high - head_low if width < 0 else min(width, head_high - head_low)
        tails = tail_high - tail_low if width < 0 else min(width, tail_high - tail_low)
        self.head_low[item] += heads
        self.tail_high[item] -= tails
        pieces = [
            (int(self.head_shard[item]), head_low, head_low + heads),
            (int(self.tail_shard[item]), tail_high - tails, tail_high),
        ]
        return [piece for piece in pieces if piece[1] < piece[2]]


class _Offer(NamedTuple):
    """A cut of an item that moves `amount` pairs; `width` as in `_Items.width_within`."""

    item: int
    width: int
    amount: int


class _AllOffers:
    """The cut with most pairs per byte, among all items each time."""

    def __init__(self, items: _Items, shape: AttentionShape) -> None:
        self.items, self.shape = items, shape

    def best(self, limit: IntArray) -> _Offer | None:
        """The best offer of any server whose items may give so many pairs; None if no query fits."""
        width = self.items.width_within(limit[self.items.server])
        amount, received_bytes = self.items.cut(width, self.shape)
        if not np.any(amount):
            return None
        best = int(np.argmax(amount / received_bytes))  # of equal ones the first
        return _Offer(best, int(width[best]), int(amount[best]))

    def take(self, offer: _Offer) -> list[tuple[int, int, int]]:
        """Remove the cut from its item: shard, start and end of its pieces."""
        return self.items.take(offer.item, offer.width)


class _BestOffers(_AllOffers):
    """The same offers, without a look at all items each time: for many documents.

    A limit is what an item's server may give and the receiver may take. Of the whole documents of a server that fit its
    limit the longest has most pairs per byte, so that only it, longer ones and what has been cut are looked at; and a
    server's best offer is looked for anew only when its limit is another one than last time. A receiver's deficit is
    above its tolerance, which few documents exceed; a surplus changes only when something is taken from it.
    """

    def __init__(self, items: _Items, layout: Layout, shape: AttentionShape) -> None:
        super().__init__(items, shape)
        self.ranks = layout.ranks
        alone = items.head_shard == items.tail_shard
        whole = alone & (items.tail_high == layout.doc_lengths[layout.shard_doc[items.head_shard]])
        whole &= items.head_low == 0
        self._others = np.flatnonzero(~whole)  # parts of documents, and what is cut later
        # Whole documents in one line: server after server, most pairs first; after each server's a stop.
        line = np.flatnonzero(whole)
        amount = items.amount()[line]
        self._levels = np.unique(amount)
        below = len(self._levels) - 1 - np.searchsorted(self._levels, amount)  # documents with more pairs come first
        server = np.concatenate([items.server[line], np.arange(self.ranks)])
        key = server * (len(self._levels) + 1) + np.concatenate([below, np.full(self.ranks, len(self._levels))])
        line = np.concatenate([line, np.full(self.ranks, -1, dtype=np.int64)])
        order = np.argsort(key, kind="stable")
        self._key, self._line = key[order], line[order]
        self._place = np.zeros(len(items.server), dtype=np.int64)
        self._place[self._line[self._line >= 0]] = np.flatnonzero(self._line >= 0)
        self._first = np.searchsorted(self._key, np.arange(self.ranks) * (len(self._levels) + 1))
        self._following = np.arange(len(self._line))  # the next place that is not taken; itself if it is not
        self._limit = np.zeros(self.ranks, dtype=np.int64)  # for which `_best` was looked for
        self._ratio = np.zeros(self.ranks)  # pairs per byte of each server's best offer, 0 where it has none
        self._best = np.zeros((3, self.ranks), dtype=np.int64)  # the offers: item, width, amount

    def best(self, limit: IntArray) -> _Offer | None:
        changed = limit != self._limit
        self._ratio[changed] = 0.0
        self._look(np.flatnonzero(changed & (limit > 0)), limit)
        self._limit = limit
        server = int(np.argmax(self._ratio))  # of equal ratios the first server
        return _Offer(*self._best[:, server].tolist()) if self._ratio[server] > 0 else None

    def take(self, offer: _Offer) -> list[tuple[int, int, int]]:
        place = int(self._place[offer.item])
        if self._line[place] == offer.item and self._following[place] == place:
            self._following[place] = place + 1
            if offer.width >= 0:
                self._others = np.append(self._others, offer.item)
        elif offer.width < 0:
            self._others = self._others[self._others != offer.item]
        self._limit[self.items.server[offer.item]] = -1  # look again, whatever its limit is
        return super().take(offer)

    def _look(self, servers: IntArray, limit: IntArray) -> None:
        items = self.items
        fits = np.searchsorted(self._levels, limit[servers], side="right") - 1
        stop = np.searchsorted(self._key, servers * (len(self._levels) + 1) + len(self._levels) - 1 - fits)
        place = self._untaken(stop)
        too_long = _ranges(self._first[servers], stop)
        too_long = too_long[self._following[too_long] == too_long]
        chosen = np.concatenate([self._line[place], self._line[too_long], self._others])
        chosen = chosen[chosen >= 0]
        chosen.sort()
        looked_for = np.zeros(self.ranks, dtype=bool)
        looked_for[servers] = True
        chosen = chosen[looked_for[items.server[chosen]]]
        if not len(chosen):
            return
        part = items.some(chosen)
        width = part.width_within(limit[part.server])
        amount, received_bytes = part.cut(width, self.shape)
        ratio = amount / received_bytes
        order = np.lexsort((-ratio, part.server))  # of equal ratios the first item stays first
        server = part.server[order]
        first = order[np.concatenate([[True], server[1:] != server[:-1]])]
        self._ratio[part.server[first]] = ratio[first]
        self._best[:, part.server[first]] = chosen[first], width[first], amount[first]

    def _untaken(self, place: IntArray) -> IntArray:
        """From each place the first that is not taken. Remembered, so that no stretch is walked twice."""
        found: IntArray = self._following[place]
        while np.any(self._following[found] != found):
            found = self._following[found]
        self._following[place] = found
        return found


def _ranges(first: IntArray, end: IntArray) -> IntArray:
    """The numbers of all [first, end), one range after another."""
    count = end - first
    numbers: IntArray = np.arange(int(count.sum())) + np.repeat(first - (np.cumsum(count) - count), count)
    return numbers


def _tasks(layout: Layout, moved: list[tuple[int, int, int, int]]) -> CATasks:
    """Moved pieces (shard, start, end, server), and the rest of every shard at home; pieces that touch are joined."""
    table = np.array(moved, dtype=np.int64).reshape(-1, 4)
    shards = np.arange(layout.shards, dtype=np.int64)
    shard_end = layout.shard_start + layout.shard_length
    # Every border of a piece starts a run of queries; a run belongs to the piece that starts there, or to its home.
    shard = np.concatenate([shards, table[:, 0], table[:, 0]])
    start = np.concatenate([layout.shard_start, table[:, 1], table[:, 2]])
    server = np.concatenate([layout.shard_rank, table[:, 3], layout.shard_rank[table[:, 0]]])
    rank_of_kind = np.repeat([1, 0, 2], [len(shards), len(table), len(table)])  # a piece says more than a border
    order = np.lexsort((rank_of_kind, start, shard))
    shard, start, server = shard[order], start[order], server[order]
    new = np.ones(len(shard), dtype=bool)
    new[1:] = (np.diff(shard) != 0) | (np.diff(start) != 0)
    shard, start, server = shard[new], start[new], server[new]
    joins = np.zeros(len(shard), dtype=bool)
    joins[1:] = (np.diff(shard) == 0) & (np.diff(server) == 0)
    shard, start, server = shard[~joins], start[~joins], server[~joins]
    last = np.append(shard[1:] != shard[:-1], True)[: len(shard)]
    end = np.where(last, shard_end[shard], np.append(start[1:], 0)[: len(shard)])
    kept = np.flatnonzero(end > start)
    return CATasks.from_columns(layout.shard_doc[shard[kept]], start[kept], end[kept], server[kept], shard[kept])
