"""What every plan must send: lower bounds on bytes, to tell how much a planner wastes.

They hold for causal documents, with or without a window, each of which lives whole on one rank; where one spans ranks
the answer is None, and `spanning_bounds` has another, weaker bound. Speeds may differ. Bytes are those of one layer,
all links alike, no memory cap before balance. The forward pass by default; for another pass or memory mode give its
bytes per token: the proofs use nothing of α and β but that they are positive.
"""

from __future__ import annotations

from math import floor, sqrt
from typing import NamedTuple

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_array
from steelyard.domain.arrays import FloatArray, IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner.shares import work_caps

ROUNDING = 1e-12  # relative; keeps a bound a bound after sums of rounded square roots


class _Price(NamedTuple):
    """Bytes per query and per key that travel, and the pairs of the longest row of any document."""

    alpha: int
    beta: int
    longest_row: int

    def least_bytes(self, work: FloatArray) -> FloatArray:
        """g of each element: see `total_bytes_bound`."""
        alpha, beta, w = self.alpha, self.beta, self.longest_row
        slope = sqrt(2 * beta * (2 * alpha + beta))
        per_pair = (alpha + beta) / w
        extra = beta / 2 * (w * (2 * alpha + beta) / (alpha + beta) - 1) - (alpha + beta) / (8 * w)
        bend = beta * (2 * alpha + beta) * w * w / (2 * (alpha + beta) ** 2)
        whole = np.maximum(work, 1.0)
        root, line = slope * np.sqrt(whole) - beta / 2, per_pair * whole + max(0.0, extra)
        return np.where(whole <= bend, np.minimum(root, line), line) * np.minimum(work, 1.0)


def _pour(amounts: IntArray, rooms: IntArray, price: _Price) -> FloatArray:
    """Φ of each amount: fill `rooms`, largest first, and add up g of what each takes."""
    descending = np.sort(rooms)[::-1]
    filled = np.concatenate([[0], np.cumsum(descending)])
    paid = np.concatenate([[0.0], np.cumsum(price.least_bytes(descending.astype(np.float64)))])
    full = np.minimum(np.searchsorted(filled, amounts, side="right") - 1, len(descending))
    rest = (amounts - filled[full]).astype(np.float64)
    return paid[full] + price.least_bytes(rest)


def _surplus_and_room(
    layout: Layout, topology: Topology, tolerance: float, window: int | None
) -> tuple[IntArray, IntArray]:
    """Pairs above the promised cap of the ranks that are above theirs, and below it of those below."""
    amount = pairs_array(layout.shard_start, layout.shard_start + layout.shard_length, window)
    work = np.zeros(layout.ranks, dtype=np.int64)
    np.add.at(work, layout.shard_rank, amount)
    longest_row = longest_row_pairs(layout.doc_lengths, window)
    caps = work_caps(int(amount.sum()), topology, tolerance, longest_row).promise
    gap = np.array(caps, dtype=np.int64) - work
    return -gap[gap < 0], gap[gap > 0]


def _positive(name: str, given: int | None, default: int) -> int:
    if given is not None and given < 1:
        raise UsageError(f"{name}={given}, expected at least 1 byte (None for the forward pass)")
    return default if given is None else given


def total_bytes_bound(
    layout: Layout,
    topology: Topology,
    shape: AttentionShape,
    tolerance: float,
    window: int | None = None,
    *,
    alpha_bytes: int | None = None,
    beta_bytes: int | None = None,
) -> int | None:
    """Bytes that any plan which keeps the balance promise sends at least, all phases and ranks together.

    Args:
        alpha_bytes, beta_bytes: per query and per key that a server computes with and does not hold, in the passes and
            the memory mode to be bounded. None: the forward pass, `shape.alpha_bytes` and `shape.beta_bytes`. The
            backward pass under `keep` mirrors the forward one: the same numbers again.

    Returns:
        Bytes, rounded down, or None if a document spans ranks. A plan that a memory cap forced to break the balance
        promise (`memory_limited`) may send less.

    Raises:
        UsageError: a price below 1.

    *One document, one server.* Let a server compute m >= 1 queries, F pairs together, of a document that lives
    elsewhere, and receive k of its keys. Let w be the longest row there is. The i-th query from the last (i = 0 …) sees
    no more than w keys; and since it does not see the i later queries' own keys, which are among the k, no more than
    k − i. Hence m <= k and F <= Σ_{i<m} min(w, k − i). What do α·m + β·k bytes come to at least?

    (a) With k − i alone and B = k + ½: F <= m·B − m²/2, so B >= F/m + m/2, and the bytes are
        α·m + β·B − β/2 >= (α + β/2)·m + β·F/m − β/2 >= 2·√((α + β/2)·β·F) − β/2 = c·√F − β/2, c = √(2β(2α + β)).
    (b) As m >= F/w and k >= m: at least A·F with A = (α + β)/w.
    (c) If k >= w: of the m rows at most k − w + 1 are w long and the next are w − 1, w − 2, …, t of them. So
        F <= m·w − t(t + 1)/2 and k >= w − 1 + m − t; the bytes are at least A·F + β(w − 1) + A·t(t + 1)/2 − β·t, which
        is least at t = β/A − ½ and then A·F + C, C = β/2·(w(2α + β)/(α + β) − 1) − A/8.
    (d) If k < w and F >= F* = β(2α + β)w²/(2(α + β)²): the least of (a) is at B = (α + β)·√(2F/(β(2α + β))) >= w, while
        here B < w. The set B >= F/m + m/2 is convex, so the least over B <= w is at B = w: α·m + β·w − β/2 where
        F = m·w − m²/2. That is convex in F, and at F* it is c·√F* − β/2 with slope A. So it is not below its tangent
        there, which is A·F + C + A/8.

    So, with C⁺ = max(C, 0): the bytes are at least g(F) = A·F + C⁺ for F >= F* (by b, c, d), and for 1 <= F < F* the
    smaller of that and c·√F − β/2 (by a if k < w, else by b and c). Extend g to [0, 1] by a straight line from
    g(0) = 0. Then g rises and is concave. Up to F* the root is no less steep than the line, A being its slope at F*;
    there it is not below the line, since c·√F* − β/2 − A·F* = C + A/8 and that is >= 0 as w >= 1. So g follows the root
    up to where they cross, if they do, and the line from there on. And g(1) is no less than the slope that follows:
    at most c/2 <= c − β/2 on the root (c >= β), A <= A + C⁺ on the line. Concave with g(0) = 0 is subadditive.

    *A flow.* Let X[i, j] be the pairs of rank i's documents computed on j ≠ i, whole numbers. By subadditivity over
    documents the bytes are at least Σ g(X[i, j]). The net inflow of j is at most its room cap − work; of an overloaded
    rank i, at least its surplus S_i flows out, net. *Relaying does not help:* if j has an arc in (from i) and an arc
    out (to k), take the smaller of the two flows, δ, off both and send it from i to k directly. That costs at most g(δ)
    more there (subadditive) and saves g(δ), because one of the two arcs vanishes; if i = k it only saves. Nets stay,
    and a rank that has only arcs in, or only arcs out, keeps that, so doing this rank by rank ends in a flow without
    relays that costs no more. In it, no rank receives more than its room, and an overloaded rank receives nothing.

    *Pouring.* Among all ways to divide an amount S over rooms, filling them largest first majorises all others, hence
    the sum of a concave function over it is least: Φ(S). So the bytes are at least Σ_i Φ(S_i), taking each overloaded
    rank's arcs on their own; and, joining the arcs into each j first, at least Φ(Σ S_i). The larger one counts.
    Nothing here asks the caps to be equal, so speeds may differ; a window shortens w and the documents' work.
    """
    price_alpha = _positive("alpha_bytes", alpha_bytes, shape.alpha_bytes)
    price_beta = _positive("beta_bytes", beta_bytes, shape.beta_bytes)
    if layout.spans_ranks:
        return None
    surplus, room = _surplus_and_room(layout, topology, tolerance, window)
    if not len(surplus):
        return 0
    price = _Price(price_alpha, price_beta, longest_row_pairs(layout.doc_lengths, window))
    together = float(_pour(np.array([surplus.sum()]), room, price)[0])
    return floor(max(together, float(_pour(surplus, room, price).sum())) * (1 - ROUNDING))


def busiest_bytes_bound(
    layout: Layout,
    topology: Topology,
    shape: AttentionShape,
    tolerance: float,
    window: int | None = None,
    *,
    query_bytes: int | None = None,
    beta_bytes: int | None = None,
) -> int | None:
    """Bytes that the busiest rank sends or receives in the dispatch phase, *among plans in which no receiver sends*.

    Exactly: no plan has a smaller max over ranks of max(bytes in, bytes out) if it keeps the balance promise and every
    rank that receives a row in the dispatch phase sends none in it. `balanced` makes such plans as a rule, not always:
    a donor that had to give a little more than its surplus, rows being indivisible, has room for a few rows of another.
    In such a plan, as in any that relays, the busiest rank may be less busy than this bound, and `measure` gives none
    for it. For all plans no bound is known to us.

    Queries, keys and values count; outputs travel in the other phase. Returns None if a document spans ranks.

    *Proof.* Take g and Φ of `total_bytes_bound` with the bytes of a query without its output for α: g' and Φ'. The flow
    X has no relays by assumption: it needs no rearranging, so what is said here of single ranks holds for the plan
    itself. An overloaded rank sends, so it receives nothing and its outflow is at least S_i; a receiver sends nothing,
    so its inflow is at most its room. Hence (1) overloaded rank i sends at least Σ_j g'(X[i, j]) >= Φ'(S_i); take
    the largest. (2) All surplus, M = Σ S_i, goes to the ranks with room. The one with most room takes at least M less
    the other rooms, and g' of that. (3) Those ranks receive Σ_i Φ'(S_i) together, the busiest of them at least the
    mean.
    """
    price_query = _positive("query_bytes", query_bytes, shape.query_bytes)
    price_beta = _positive("beta_bytes", beta_bytes, shape.beta_bytes)
    if layout.spans_ranks:
        return None
    surplus, room = _surplus_and_room(layout, topology, tolerance, window)
    if not len(surplus):
        return 0
    price = _Price(price_query, price_beta, longest_row_pairs(layout.doc_lengths, window))
    poured = _pour(surplus, room, price)
    unavoidable = max(0, int(surplus.sum() - (room.sum() - room.max())))
    alone = float(price.least_bytes(np.array([unavoidable], dtype=np.float64))[0])
    return floor(max(float(poured.max()), alone, float(poured.sum()) / len(room)) * (1 - ROUNDING))
