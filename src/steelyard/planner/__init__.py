"""Planners: pure functions from a layout, a topology and a shape to a `DispatchPlan`. No torch, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from types import MappingProxyType

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner.balanced import plan_balanced
from steelyard.planner.packed import plan_packed
from steelyard.planner.reference import plan_reference
from steelyard.planner.shares import exact_tolerance

Policy = Callable[[Layout, Topology, AttentionShape, float, int | None], DispatchPlan]

POLICIES: MappingProxyType[str, Policy] = MappingProxyType(
    {"balanced": plan_balanced, "packed": plan_packed, "reference": plan_reference}
)


def make_plan(
    layout: Layout,
    *,
    policy: str = "balanced",
    topology: Topology | None = None,
    shape: AttentionShape,
    tolerance: float = 0.05,
    window: int | None = None,
) -> DispatchPlan:
    """Decide on which attention server each query range of `layout` is computed.

    Args:
        layout: where every token lives; one nano-batch.
        policy: `balanced`, `packed` (everything at home) or `reference` (fewest bytes, small cases only).
        topology: the attention servers, server j being rank j; equal ones by default.
        shape: heads and sizes, for the bytes of a query and of a key.
        tolerance: no server's work above (1 + tolerance) × its share.
        window: keys that a query sees at most, its own included; None: all earlier ones.

    Raises:
        UsageError: an unknown policy, a window below 1, a negative tolerance, or another number of servers than ranks.
        PlanError: a memory cap that no plan can keep.
    """
    if policy not in POLICIES:
        close = get_close_matches(policy, POLICIES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"policy={policy!r}, expected one of {', '.join(POLICIES)}{hint}")
    if topology is None:
        topology = Topology(layout.ranks)
    if topology.servers != layout.ranks:
        raise UsageError(
            f"topology has {topology.servers} servers and the layout {layout.ranks} ranks; server j is rank j, "
            "so give as many servers as ranks"
        )
    if window is not None and window < 1:
        raise UsageError(f"window={window}, expected at least 1 key per query (None for no window)")
    exact_tolerance(tolerance)
    return POLICIES[policy](layout, topology, shape, tolerance, window)
