"""Other layouts of the same documents: cut at the ends of ranks or groups, or in head–tail order.

A *head–tail* order deals 2c pieces of equal length to c ranks: rank i gets piece i from the front and piece i from the
back. Causal rows grow with their position, so a short row is paired with a long one and all ranks get the same work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.packed import plan_packed

GROUP_RANKS = 8  # a context-parallel group where no node size is given: the usual number of devices of a node


@dataclass(frozen=True, eq=False)
class GroupedDocuments:
    """Documents on one line in packing order, cut where a group's tokens end: a part is a document of its own.

    Attributes:
        group_rank: first rank of each group, and the number of ranks at the end, int64 (groups + 1,).
        group_end: end of each group's tokens on the line, int64 (groups,).
        part_end, part_length, part_group: parts in order, int64 (parts,).
    """

    group_rank: IntArray
    group_end: IntArray
    part_end: IntArray
    part_length: IntArray
    part_group: IntArray


def cut_at_ranks(layout: Layout) -> Layout:
    """Every shard as a document of its own, where it is: what is computed if each rank sees only its own tokens."""
    shards = np.arange(layout.shards, dtype=np.int64)
    return Layout.from_columns(
        shards, np.zeros_like(shards), layout.shard_length, layout.shard_rank, ranks=layout.ranks
    )


def grouped_documents(layout: Layout, topology: Topology) -> GroupedDocuments:
    """Divide the ranks into context-parallel groups, and the documents over them in packing order.

    A group is a node, or GROUP_RANKS ranks where no node size is given, or as many more as the longest document needs;
    where that does not divide the number of ranks, some groups have more. It keeps the tokens that its ranks held.
    """
    tokens = layout.tokens_by_rank
    fullest = max(1, int(tokens.max()))
    needed = -(-int(layout.doc_lengths.max(initial=0)) // fullest)
    size = max(needed, topology.node_size if topology.node_size > 1 else GROUP_RANKS)
    groups = max(1, layout.ranks // size)
    group_rank = np.arange(groups + 1, dtype=np.int64) * layout.ranks // groups
    group_end = np.cumsum(tokens)[group_rank[1:] - 1]
    part_end = np.union1d(np.cumsum(layout.doc_lengths), group_end[group_end > 0])
    part_length = np.diff(part_end, prepend=0)
    part_group = np.searchsorted(group_end, part_end - part_length, side="right")
    return GroupedDocuments(group_rank, group_end, part_end, part_length, part_group)


def head_tail_pieces(length: IntArray, ranks: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Deal each of some lines of tokens to so many ranks, in head–tail order.

    Returns:
        line, start, end, rank of each piece that is not empty, in order; ranks count from 0 within the line. The two
        middle pieces belong to one rank and are one.
    """
    pieces = 2 * ranks - 1
    line = np.repeat(np.arange(len(length)), pieces)
    piece = np.arange(len(line)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    middle, halves = (ranks - 1)[line], (2 * ranks)[line]
    start = (piece + (piece > middle)) * length[line] // halves
    end = (piece + 1 + (piece >= middle)) * length[line] // halves
    kept = np.flatnonzero(end > start)
    rank = np.minimum(piece, 2 * middle - piece)
    return line[kept], start[kept], end[kept], rank[kept]


def plan_at_home(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, policy: str, window: int | None
) -> DispatchPlan:
    """Every shard is computed where `layout` puts it; keys of other shards of its document travel there."""
    return replace(plan_packed(layout, topology, shape, tolerance, window), policy=policy)
