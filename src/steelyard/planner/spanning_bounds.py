"""A lower bound on total bytes that also holds where documents span ranks. Causal documents without a window.

`bounds.total_bytes_bound` is the better one where it applies. This one lets every server choose the work that is
cheapest for it, and asks only that all of them together do as much as there is: see `spanning_bytes_bound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import exp, floor, log, sqrt

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_array, pairs_before_array
from steelyard.domain.arrays import FloatArray, IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.shares import work_caps

ROUNDING = 1e-9  # relative; keeps the bound one after sums of rounded numbers
EXACT_KEYS = 64  # numbers of received keys that are tried one by one; beyond, in ranges
FINE, COARSE = 1.01, 1.06  # each range of numbers of keys ends this much above the last
SEARCH_STEPS = 40
GOLDEN = (sqrt(5) - 1) / 2


def spanning_bytes_bound(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> int | None:
    """Bytes that any plan which keeps the balance promise sends at least in a forward pass, both phases, all ranks.

    None with a window. The rounding of the search makes the bound smaller, never wrong.

    *One server.* Let server j receive k keys and m queries, α·m + β·k bytes, and compute w pairs. Three things limit w:

    (1) w <= cap_j.
    (2) Pairs of its own queries are at most A_j(k). An own query at position q of a document needs the missing_d(q)
        keys before it that live elsewhere. So with k_d keys of document d the own pairs of d are at most a step
        function of k_d, which rises at the beginning of each own shard; so is the smaller of it and cap_j − free_j,
        where free_j counts what needs no key. A_j(k) = free_j + the most that the steps' concave hulls give for Σ k_d =
        k, steepest pieces first.
    (3) A foreign query at position q of d sees keys [0, q]: no more than k_d received ones and own_d(q), those of j
        before q, and never more than L, the longest document. Let R_j(k) = k + the largest own_d(q) of any foreign
        q whose missing keys, its own included, are at most k. R_j rises by 1 or more per key. The m_d foreign queries
        of d, latest first, see at most R_j(k_d), R_j(k_d) − 1, … keys; m_d <= k_d, as a foreign query's own key is
        received. So R_j(k_d) <= R_j(k) − (k − k_d) <= R_j(k) − Σ of the other documents' m: listing document after
        document, the m foreign queries see at most Σ_{i<m} min(L, R_j(k) − i) keys together, and m <= k.

    *All servers.* Σ_j w_j is all work W, so for any price λ >= 0 per pair, the bytes are at least
    λ·W − Σ_j max over (k, m) of [λ·w − α·m − β·k], w the largest that (1) to (3) allow. This is concave in λ; every λ
    gives a bound and a search finds a good one. Numbers of keys are taken in ranges [low, high]: β·low is paid and
    `high` used, which only raises the maximum. m may be a fraction, which also only raises it: given k, the gain is
    concave in m.
    """
    if window is not None:
        return None
    total = int(pairs_before_array(layout.doc_lengths).sum())
    if not total:
        return 0
    longest = longest_row_pairs(layout.doc_lengths)
    caps = np.array(work_caps(total, topology, tolerance, longest).promise, dtype=np.int64)
    servers = _Servers.of(layout, caps)
    keys = int(layout.doc_lengths.sum())
    coarse, fine = (_Profit(servers, shape, longest, _ranges(keys, growth)) for growth in (COARSE, FINE))
    low = log((shape.alpha_bytes + shape.beta_bytes) / longest) - 3.0  # a pair costs no less in any document
    high = log(2.0 * shape.alpha_bytes + shape.beta_bytes)  # and no more than a document of one token
    # Golden-section search for the largest value of a function with one peak.
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = (coarse.bound(exp(x), total) for x in (left, right))
    for _ in range(SEARCH_STEPS):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = coarse.bound(exp(right), total)
        else:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = coarse.bound(exp(left), total)
    best = max(fine.bound(exp(x), total) for x in (left, (left + right) / 2, right))
    return max(0, floor(best))


def _ranges(keys: int, growth: float) -> IntArray:
    """First numbers of keys of the ranges that divide 0 … keys, and keys + 1."""
    exact = np.arange(min(keys, EXACT_KEYS) + 1)
    count = max(0, int(np.ceil(np.log(max(1.0, (keys + 1) / (EXACT_KEYS + 1))) / np.log(growth))))
    grown = ((EXACT_KEYS + 1) * growth ** np.arange(count)).astype(np.int64)
    return np.unique(np.concatenate([exact, grown[grown <= keys], [keys + 1]]))


@dataclass(frozen=True, eq=False)
class _Servers:
    """What each server holds.

    Attributes:
        cap: most work, int64 (ranks,).
        free: own pairs that need no received key, at most `cap`, int64 (ranks,).
        hull_keys, hull_pairs: for each server the corners of A_j − free_j, from (0, 0) on, in ascending order.
        reach_keys, reach_own: for each server, with how many received keys which own keys count for a foreign query.
    """

    cap: IntArray
    free: IntArray
    hull_keys: list[FloatArray]
    hull_pairs: list[FloatArray]
    reach_keys: list[IntArray]
    reach_own: list[IntArray]

    @classmethod
    def of(cls, layout: Layout, cap: IntArray) -> _Servers:
        order = np.lexsort((layout.shard_start, layout.shard_doc, layout.shard_rank))
        rank, doc, start, length = (
            column[order] for column in (layout.shard_rank, layout.shard_doc, layout.shard_start, layout.shard_length)
        )
        amount = pairs_array(start, start + length)
        first = np.ones(len(rank), dtype=bool)
        first[1:] = (rank[1:] != rank[:-1]) | (doc[1:] != doc[:-1])
        group = np.cumsum(first) - 1
        held, done = _within(length, first, group), _within(amount, first, group)  # up to and including each shard
        missing = start - (held - length)
        free = np.zeros(layout.ranks, dtype=np.int64)
        np.add.at(free, rank[missing == 0], amount[missing == 0])
        # Own pairs of a document that need no key; the steps count from there.
        head = np.zeros(int(group[-1]) + 1, dtype=np.int64)
        np.add.at(head, group[missing == 0], amount[missing == 0])
        gained = done - head[group]
        room = np.maximum(0, cap - free)
        last = np.append(first[1:], True)
        follows = np.append(start[1:], 0) > start + length  # a gap before the server's next shard
        gap_after = np.where(last, start + length < layout.doc_lengths[doc], follows)
        hulls: list[list[tuple[float, float]]] = [[] for _ in range(layout.ranks)]
        needing = np.flatnonzero(missing > 0)
        keys, steps = missing[needing].tolist(), np.minimum(gained, room[rank])[needing].tolist()
        servers = rank[needing].tolist()
        for document in _runs(group[needing]):
            hulls[servers[document.start]] += _hull_pieces(keys[document], steps[document])
        corners = [_join(pieces) for pieces in hulls]
        gaps = np.flatnonzero(gap_after)
        gaps = gaps[np.lexsort((missing[gaps], rank[gaps]))]
        edges = np.searchsorted(rank[gaps], np.arange(layout.ranks + 1)).tolist()
        by_keys = [gaps[a:b] for a, b in pairwise(edges)]
        return cls(
            cap,
            np.minimum(free, cap),
            [keys for keys, _ in corners],
            [gain for _, gain in corners],
            [missing[shards] + 1 for shards in by_keys],
            [np.maximum.accumulate(held[shards]) for shards in by_keys],
        )

    def own_pairs(self, keys: IntArray) -> FloatArray:
        """A_j for each number of keys, (ranks, numbers)."""
        return np.stack(
            [
                free + np.interp(keys, at, gain)
                for free, at, gain in zip(self.free, self.hull_keys, self.hull_pairs, strict=True)
            ]
        )

    def longest_foreign_row(self, keys: IntArray) -> IntArray:
        """R_j for each number of keys, (ranks, numbers)."""
        rows = []
        for at, own in zip(self.reach_keys, self.reach_own, strict=True):
            index = np.searchsorted(at, keys, side="right")
            rows.append(keys + np.concatenate([[0], own])[index])
        return np.stack(rows)


def _within(values: IntArray, first: np.ndarray, group: IntArray) -> IntArray:
    """Running sums that start anew with each group."""
    running = np.cumsum(values)
    before = (running - values)[first]
    result: IntArray = running - before[group]
    return result


def _runs(group: IntArray) -> list[slice]:
    """Slices of equal neighbours."""
    borders = np.flatnonzero(np.diff(group)) + 1
    edges = [0, *borders.tolist(), len(group)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]


def _hull_pieces(keys: list[int], gains: list[int]) -> list[tuple[float, float]]:
    """Pieces (keys, gain) of the concave hull of (0, 0) and the steps' upper corners, steepest first."""
    corners: list[tuple[int, int]] = [(0, 0)]
    for at, gain in zip(keys, gains, strict=True):
        while len(corners) > 1 and (corners[-1][1] - corners[-2][1]) * (at - corners[-2][0]) <= (
            gain - corners[-2][1]
        ) * (corners[-1][0] - corners[-2][0]):
            corners.pop()
        corners.append((at, gain))
    return [(float(b[0] - a[0]), float(b[1] - a[1])) for a, b in pairwise(corners)]


def _join(pieces: list[tuple[float, float]]) -> tuple[FloatArray, FloatArray]:
    """Corners of the pieces of all documents, steepest first, from (0, 0)."""
    pieces = sorted(pieces, key=lambda piece: -piece[1] / piece[0])
    keys = np.cumsum([0.0, *(piece[0] for piece in pieces)])
    return keys, np.cumsum([0.0, *(piece[1] for piece in pieces)])


class _Profit:
    """max over (k, m) of λ·w − α·m − β·k, for all servers and ranges of k at once."""

    def __init__(self, servers: _Servers, shape: AttentionShape, longest: int, ranges: IntArray) -> None:
        low, high = ranges[:-1], ranges[1:] - 1
        self.alpha, self.paid = shape.alpha_bytes, (shape.beta_bytes * low).astype(np.float64)
        cap = servers.cap.astype(np.float64)[:, None]
        self.own = np.minimum(servers.own_pairs(high), cap)
        row = servers.longest_foreign_row(high)
        # Rows of m foreign queries: `full` of them `top` long, then one less each.
        self.top = np.minimum(row, longest).astype(np.float64)
        self.full = (row - np.minimum(row, longest) + 1).astype(np.float64)
        self.most = np.minimum(high.astype(np.float64)[None, :], self._queries_for(cap - self.own))

    def _queries_for(self, pairs: FloatArray) -> FloatArray:
        """The fewest foreign queries, a fraction, that have so many pairs; infinite where none have."""
        beyond = np.maximum(0.0, pairs - self.top * self.full)
        root = (2 * self.top - 1) ** 2 - 8 * beyond
        tail = np.where(root >= 0, (2 * self.top - 1 - np.sqrt(np.maximum(root, 0.0))) / 2, np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            flat = np.where(self.top > 0, pairs / self.top, np.inf)
        return np.where(beyond > 0, self.full + tail, flat)

    def bound(self, price: float, total: int) -> float:
        """Bytes at least, for `price` per pair."""
        # Row i beyond the full ones gains price × (top − i): worth it while that is above α.
        shorter = np.maximum(0.0, self.top - 0.5 - self.alpha / price)
        worth = np.where(price * self.top > self.alpha, self.full + shorter, 0.0)
        queries = np.minimum(worth, self.most)
        tail = np.maximum(0.0, queries - self.full)
        gain = self.own + self.top * queries - tail * (tail + 1) / 2
        profit = (price * gain - self.alpha * queries - self.paid[None, :]).max(axis=1)
        return float(price * total - profit.sum() - ROUNDING * price * total)
