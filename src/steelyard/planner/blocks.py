"""Where documents may be cut: at multiples of the kernel's block of queries, unless balance needs finer cuts."""

from __future__ import annotations

from steelyard.cost.attention import longest_row_pairs, pairs_before, pairs_before_array
from steelyard.domain.plan import DispatchPlan
from steelyard.planner.shares import exact_tolerance

BLOCK_TOKENS = 128
SHORT_DOCUMENT_TOKENS = 512  # shorter documents move whole: kernels lose most of their speed on their parts


def granule_pairs(longest_row: int) -> int:
    """The most work that one block of queries, or one short document, can hold when no row is longer than this."""
    return max(BLOCK_TOKENS * longest_row, pairs_before(SHORT_DOCUMENT_TOKENS - 1))


def blocks_suffice(total_pairs: int, servers: int, tolerance: float, longest_row: int) -> bool:
    """Whether balance can be had with aligned cuts and whole short documents alone.

    The caps of all servers together exceed the work by tolerance × work. While a server is above its cap, the others
    have at least that much room in all, so one of them has room for a granule if tolerance × work is `servers`
    granules (and one pair per server for rounding the caps down).
    """
    return exact_tolerance(tolerance) * total_pairs >= servers * (granule_pairs(longest_row) + 1)


def aligned_cuts_promised(plan: DispatchPlan) -> bool:
    """Whether a plan owes only aligned cuts and whole short documents.

    The policy `balanced` does where they suffice, unless a memory cap came first. Other policies owe nothing.
    """
    if plan.policy != "balanced" or plan.memory_limited:
        return False
    lengths = plan.layout.doc_lengths
    work = int(pairs_before_array(lengths, plan.window).sum())
    return blocks_suffice(work, plan.topology.servers, plan.tolerance, longest_row_pairs(lengths, plan.window))
