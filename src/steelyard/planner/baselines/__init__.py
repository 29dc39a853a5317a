"""What others do, as policies beside `balanced`: each returns a `DispatchPlan` that `checks.verify` accepts.

`wlb` gives whole documents to the least-loaded rank, `per_document_cp` and `head_tail` cut documents or sequences in
head–tail order over a group of ranks, `greedy` moves work from surplus to deficit servers by work per byte. Most need
tokens to lie elsewhere than the layout that they are given says: their plan then brings a layout of its own (`relaid`),
so tokens per rank, and where documents are cut also the pairs in total, differ from those of other policies.

They promise nothing but coverage, and ignore memory caps.
"""

from steelyard.planner.baselines.greedy import plan_greedy
from steelyard.planner.baselines.head_tail import plan_head_tail
from steelyard.planner.baselines.per_document_cp import plan_per_document_cp
from steelyard.planner.baselines.wlb import plan_wlb

__all__ = ["plan_greedy", "plan_head_tail", "plan_per_document_cp", "plan_wlb"]
