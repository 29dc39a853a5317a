"""The policy `packed`: every rank computes the attention of the tokens that it holds. Nothing is balanced.

It is the reference of the product: what a balanced step must equal in numbers and beat in time. Documents that span
ranks still need their earlier keys, which travel; a document that is whole on its rank costs no byte.
"""

from __future__ import annotations

import numpy as np

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology


def plan_packed(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> DispatchPlan:
    """One task per shard, computed where the shard lives. Speeds, caps and `tolerance` change nothing."""
    tasks = CATasks.from_columns(
        layout.shard_doc,
        layout.shard_start,
        layout.shard_start + layout.shard_length,
        layout.shard_rank,
        np.arange(layout.shards, dtype=np.int64),
    )
    return DispatchPlan(layout, tasks, topology, shape, tolerance, "packed", window)
