"""Where documents may be cut: at multiples of the kernel's block of queries, unless balance needs finer cuts."""

from __future__ import annotations

from steelyard.domain.plan import DispatchPlan
from steelyard.planner.shares import exact_tolerance
from steelyard.planner.work import RowWork

BLOCK_TOKENS = 128
SHORT_DOCUMENT_TOKENS = 512  # shorter documents move whole: kernels lose most of their speed on their parts


def granule_work(longest_row: int, row_keys: int = 0) -> int:
    """The most work that one block of queries, or one short document, can hold when no row is longer than this."""
    short = SHORT_DOCUMENT_TOKENS - 1
    return max(BLOCK_TOKENS * longest_row, RowWork(None, row_keys).of(0, short))


def blocks_suffice(total_work: int, servers: int, tolerance: float, longest_row: int, row_keys: int = 0) -> bool:
    """Whether balance can be had with aligned cuts and whole short documents alone.

    The caps of all servers together exceed the work by tolerance × work. While a server is above its cap, the others
    have at least that much room in all, so one of them has room for a granule if tolerance × work is `servers`
    granules (and one unit per server for rounding the caps down).
    """
    return exact_tolerance(tolerance) * total_work >= servers * (granule_work(longest_row, row_keys) + 1)


def aligned_cuts_promised(plan: DispatchPlan) -> bool:
    """Whether a plan owes only aligned cuts and whole short documents.

    The policy `balanced` does where they suffice, unless a memory cap came first. Other policies owe nothing.
    """
    if plan.policy != "balanced" or plan.memory_limited:
        return False
    lengths, rows = plan.layout.doc_lengths, RowWork(plan.window, plan.row_keys)
    return blocks_suffice(
        rows.total(lengths), plan.topology.servers, plan.tolerance, rows.longest_row(lengths), plan.row_keys
    )
