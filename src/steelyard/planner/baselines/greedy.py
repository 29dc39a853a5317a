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

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_array
from steelyard.domain.arrays import FloatArray, IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.planner.shares import speed_weights


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
    moved: list[tuple[int, int, int, int]] = []
    for server in np.argsort(-deficits, kind="stable").tolist():
        deficit = int(deficits[server])
        while deficit > tolerance * shares[server]:
            limit = np.minimum(surplus[items.server], deficit)
            width = items.width_within(limit)
            amount, received_bytes = items.cut(width, shape)
            best = int(np.argmax(amount / received_bytes)) if len(amount) else 0
            if not len(amount) or amount[best] == 0:
                break
            deficit -= int(amount[best])
            surplus[items.server[best]] -= amount[best]
            moved += [(*piece, server) for piece in items.take(best, int(width[best]))]
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
        kept = np.flatnonzero(servers[self.server])
        for name in ("server", "head_shard", "tail_shard", "head_low", "head_high", "tail_low", "tail_high"):
            setattr(self, name, getattr(self, name)[kept])

    def amount(self) -> IntArray:
        """Pairs of each item."""
        return pairs_array(self.head_low, self.head_high, self.window) + pairs_array(
            self.tail_low, self.tail_high, self.window
        )

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
