"""What every plan must send: lower bounds on bytes, to tell how much a planner wastes.

They hold for causal documents without a window, each of which lives whole on one rank; for others the answer is None.
Bytes are one layer's forward pass, all links alike.
"""

from __future__ import annotations

from math import floor, sqrt

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_before_array
from steelyard.domain.arrays import FloatArray, IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.shares import work_caps

ROUNDING = 1e-12  # relative; keeps a bound a bound after sums of rounded square roots


def _range_bytes(work: FloatArray, query_bytes: int, key_bytes: int) -> FloatArray:
    """g of the docstrings below, for each element."""
    slope = sqrt(2 * key_bytes * (2 * query_bytes + key_bytes))
    return np.where(work >= 1, slope * np.sqrt(np.maximum(work, 1)) - key_bytes / 2, work * (slope - key_bytes / 2))


def _pour(amounts: IntArray, rooms: IntArray, query_bytes: int, key_bytes: int) -> FloatArray:
    """Φ of each amount: fill `rooms`, largest first, and add up g of what each takes."""
    descending = np.sort(rooms)[::-1]
    filled = np.concatenate([[0], np.cumsum(descending)])
    paid = np.concatenate([[0.0], np.cumsum(_range_bytes(descending.astype(np.float64), query_bytes, key_bytes))])
    full = np.minimum(np.searchsorted(filled, amounts, side="right") - 1, len(descending))
    rest = (amounts - filled[full]).astype(np.float64)
    return paid[full] + _range_bytes(rest, query_bytes, key_bytes)


def _surplus_and_room(layout: Layout, topology: Topology, tolerance: float) -> tuple[IntArray, IntArray]:
    amount = pairs_before_array(layout.shard_length)
    work = np.zeros(layout.ranks, dtype=np.int64)
    np.add.at(work, layout.shard_rank, amount)
    caps = work_caps(int(amount.sum()), topology, tolerance, longest_row_pairs(layout.doc_lengths)).promise
    gap = np.array(caps, dtype=np.int64) - work
    return -gap[gap < 0], gap[gap > 0]


def total_bytes_bound(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> int | None:
    """Bytes that any plan which keeps the balance promise sends at least, both phases, all ranks together.

    *One document, one server.* Let a server compute m queries, F >= 1 pairs together, of a document that lives
    elsewhere, the last of them at position b − 1. They have at most m·b − m(m − 1)/2 pairs (the m rows up to b), so
    with B = b + ½: F <= m·B − m²/2. The bytes are α·m + β·b = α·m + β·B − β/2, and B >= F/m + m/2 makes them at least
    (α + β/2)·m + β·F/m − β/2 >= 2·√((α + β/2)·β·F) − β/2 = c·√F − β/2 = g(F), c = √(2β(2α + β)). Extend g to [0, 1]
    by a straight line from g(0) = 0. Then g rises, and is concave since c >= β: the slope c − β/2 of the line is not
    below the slope c/2 that follows. A concave g with g(0) = 0 is subadditive.

    *A flow.* Let X[i, j] be the pairs of rank i's documents computed on j ≠ i. By subadditivity over documents the
    bytes are at least Σ g(X[i, j]). The net inflow of j is at most its room cap − work; of an overloaded rank i, at
    least its surplus S_i flows out, net. *Relaying does not help:* if j has an arc in (from i) and an arc out (to k),
    take the smaller of the two flows, δ, off both and send it from i to k directly. That costs at most g(δ) more there
    (subadditive) and saves g(δ), because one of the two arcs vanishes; if i = k it only saves. Nets stay, and a rank
    that has only arcs in, or only arcs out, keeps that, so doing this rank by rank ends in a flow without relays that
    costs no more. In it, no rank receives more than its room.

    *Pouring.* Among all ways to divide an amount S over rooms, filling them largest first majorises all others, hence
    the sum of a concave function over it is least: Φ(S). So the bytes are at least Σ_i Φ(S_i), taking each overloaded
    rank's arcs on their own; and, joining the arcs into each j first, at least Φ(Σ S_i). The larger one counts.
    """
    if layout.spans_ranks or window is not None:
        return None
    surplus, room = _surplus_and_room(layout, topology, tolerance)
    if not len(surplus):
        return 0
    together = np.array([surplus.sum()])
    alpha, beta = shape.alpha_bytes, shape.beta_bytes
    bound = max(float(_pour(together, room, alpha, beta)[0]), float(_pour(surplus, room, alpha, beta).sum()))
    return floor(bound * (1 - ROUNDING))


def busiest_bytes_bound(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> int | None:
    """Bytes that the busiest rank sends or receives in the dispatch phase, *among plans in which no receiver sends*.

    No such plan has a smaller max over ranks of max(bytes in, bytes out). Queries, keys and values count; outputs
    travel in the other phase. With Φ' and g' for the bytes of a query without its output: the rank with the largest
    surplus sends at least Φ'(S_max); the receiver with most room takes at least what the others together have no room
    for, and g' of that; and the ranks with room receive Σ Φ'(S_i) together, the busiest of them at least the mean.
    """
    if layout.spans_ranks or window is not None:
        return None
    surplus, room = _surplus_and_room(layout, topology, tolerance)
    if not len(surplus):
        return 0
    query_bytes, beta = shape.query_bytes, shape.beta_bytes
    poured = _pour(surplus, room, query_bytes, beta)
    unavoidable = max(0, int(surplus.sum() - (room.sum() - room.max())))
    alone = float(_range_bytes(np.array([unavoidable], dtype=np.float64), query_bytes, beta)[0])
    return floor(max(float(poured.max()), alone, float(poured.sum()) / len(room)) * (1 - ROUNDING))
