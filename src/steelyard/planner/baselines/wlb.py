"""The baseline `wlb`: variable-length packing. Whole documents, evened out by work instead of by tokens.

Documents, longest first, go to the rank with the least attention work that has room under a cap of tokens. Nothing is
sent, and nothing is cut. What it costs is memory: a rank of many short documents holds more tokens than one of a few
long ones (`tokens_max_over_mean`), and a document that is longer than all others together cannot be balanced at all.

The idea is that of WLB-LLM (arXiv 2503.17924) within one batch; delaying outliers to later batches, which it
also does, would change the order of data and is left out.
"""

from __future__ import annotations

import numpy as np

from steelyard.cost.attention import pairs_before_array
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.baselines.relaid import plan_at_home

TOKEN_CAP_PERCENT = 150  # of the tokens of the fullest rank of the layout given: the memory that packing may use


def plan_wlb(
    layout: Layout, topology: Topology, shape: AttentionShape, tolerance: float, window: int | None = None
) -> DispatchPlan:
    """Lay whole documents out by work under a token cap; the cap gives way to the longest document.

    A document that fits nowhere under the cap goes to the rank with the fewest tokens. `tolerance` changes nothing; a
    rank of speed s counts its work divided by s, and one of speed 0 gets nothing.
    """
    lengths = layout.doc_lengths
    fullest = int(layout.tokens_by_rank.max())
    cap = max(fullest * TOKEN_CAP_PERCENT // 100, int(lengths.max(initial=0)))
    speeds = np.array(topology.speeds or (1.0,) * layout.ranks)
    amounts = pairs_before_array(lengths, window)
    work, tokens = np.zeros(layout.ranks), np.where(speeds > 0, 0, np.iinfo(np.int64).max // 2)
    speeds = np.maximum(speeds, np.finfo(np.float64).tiny)
    home = np.zeros(layout.docs, dtype=np.int64)
    for doc in np.argsort(-lengths, kind="stable").tolist():
        fits = tokens <= cap - lengths[doc]
        rank = int(np.argmin(np.where(fits, work, np.inf))) if fits.any() else int(np.argmin(tokens))
        home[doc] = rank
        work[rank] += amounts[doc] / speeds[rank]
        tokens[rank] += lengths[doc]
    docs = np.arange(layout.docs, dtype=np.int64)
    relaid = Layout.from_columns(docs, np.zeros_like(docs), lengths, home, ranks=layout.ranks)
    return plan_at_home(relaid, topology, shape, tolerance, "wlb", window)
