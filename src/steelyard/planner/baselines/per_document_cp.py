"""The baseline `per_document_cp`: context parallelism that shards every document for itself, head–tail.

Each document is dealt to all ranks of its group in head–tail order, so that all have the same tokens and the same work
whatever the mix of lengths. Every rank then needs nearly all keys of every document, also of short ones. The usual
implementation gathers all keys everywhere; rows that no task of a rank reads are not sent, and not counted, here.

Per-document sharding is described for WLB-LLM (arXiv 2503.17924).
"""

from __future__ import annotations

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.baselines.relaid import grouped_documents, head_tail_pieces, plan_at_home


def plan_per_document_cp(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> DispatchPlan:
    """Deal every document to its group, head–tail; a document that crosses a group's end is two. `tolerance` and
    speeds change nothing."""
    documents = grouped_documents(layout, topology)
    group_ranks = documents.group_rank[1:] - documents.group_rank[:-1]
    part, start, end, rank = head_tail_pieces(documents.part_length, group_ranks[documents.part_group])
    rank = rank + documents.group_rank[documents.part_group[part]]
    relaid = Layout.from_columns(part, start, end - start, rank, ranks=layout.ranks)
    return plan_at_home(relaid, topology, shape, tolerance, "per_document_cp", window)
