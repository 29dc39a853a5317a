"""The baseline `head_tail`: context parallelism that shards the packed sequence, head–tail.

The tokens of a group's documents, one after another, are one sequence, and that is dealt to the ranks in head–tail
order without a look at where documents begin. One document that fills the sequence is balanced; several are not.
"""

from __future__ import annotations

import numpy as np

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.baselines.relaid import grouped_documents, head_tail_pieces, plan_at_home


def plan_head_tail(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> DispatchPlan:
    """Deal every group's sequence to its ranks, head–tail; a document that crosses a group's end is two. `tolerance`
    and speeds change nothing."""
    documents = grouped_documents(layout, topology)
    sequence_tokens = np.diff(documents.group_end, prepend=0)
    group, _, piece_end, piece_rank = head_tail_pieces(
        sequence_tokens, documents.group_rank[1:] - documents.group_rank[:-1]
    )
    piece_end = piece_end + (documents.group_end - sequence_tokens)[group]
    ends = np.union1d(piece_end, documents.part_end)
    length = np.diff(ends, prepend=0)
    begins = ends - length
    part = np.searchsorted(documents.part_end, begins, side="right")
    piece = np.searchsorted(piece_end, begins, side="right")
    relaid = Layout.from_columns(
        part,
        begins - (documents.part_end - documents.part_length)[part],
        length,
        piece_rank[piece] + documents.group_rank[group[piece]],
        ranks=layout.ranks,
    )
    return plan_at_home(relaid, topology, shape, tolerance, "head_tail", window)
