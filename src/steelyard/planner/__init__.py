"""Planners: pure functions from a layout, a topology and a shape to a `DispatchPlan`. No torch, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from steelyard.cost.attention_kernels import AttentionKernel
from steelyard.domain.layout import Layout
from steelyard.domain.limits import MAX_DOCUMENT_TOKENS, require_countable
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner.balanced import plan_balanced
from steelyard.planner.baselines import plan_greedy, plan_head_tail, plan_per_document_cp, plan_wlb
from steelyard.planner.objective import Memory, Objective, Passes, row_keys_of
from steelyard.planner.packed import plan_packed
from steelyard.planner.reference import plan_reference
from steelyard.planner.shares import exact_tolerance

Policy = Callable[[Layout, Topology, AttentionShape, float, int | None], DispatchPlan]

POLICIES: MappingProxyType[str, Policy] = MappingProxyType(
    {
        "balanced": plan_balanced,
        "packed": plan_packed,
        "wlb": plan_wlb,
        "per_document_cp": plan_per_document_cp,
        "head_tail": plan_head_tail,
        "greedy": plan_greedy,
        "reference": plan_reference,
    }
)


def make_plan(
    layout: Layout,
    *,
    policy: str = "balanced",
    topology: Topology | None = None,
    shape: AttentionShape,
    tolerance: float = 0.05,
    window: int | None = None,
    passes: Passes = "both",
    memory: Memory = "keep",
    objective: Literal["pairs", "time"] = "pairs",
    kernel: AttentionKernel | None = None,
    row_keys: int | None = None,
) -> DispatchPlan:
    """Decide on which attention server each query range of `layout` is computed.

    Args:
        layout: where every token lives; one nano-batch.
        policy: `balanced`; `reference` (fewest bytes, small cases only); or a baseline, which moves nothing (`packed`)
            or takes no account of memory caps (`wlb`, `per_document_cp`, `head_tail`, `greedy`).
        topology: the attention servers, server j being rank j; equal ones by default.
        shape: heads and sizes, for the bytes of a query and of a key.
        tolerance: no server's work above (1 + tolerance) × its share.
        window: keys that a query sees at most, its own included; None: all earlier ones.
        passes: the pass whose bytes `balanced` makes few: `forward`, `backward` or `both`.
        memory: `keep` or `resend`: whether servers keep received rows until backward. It decides what both passes send.
        objective: the work that `balanced` balances: `pairs`, or the `time` of `kernel`, in which a query row costs
            more than the keys that it sees (`planner.objective`).
        kernel: for `time`; such as one of `load_profile("h200").kernels`.
        row_keys: for `time` instead of a kernel: what a query row costs besides its keys, in keys.

    Raises:
        UsageError: an unknown policy, a window below 1, a tolerance out of range, another number of servers than ranks,
            an objective that the policy or the kernel does not serve, or more work than 64-bit integers hold.
        PlanError: `balanced` found no plan that keeps the memory caps (only where a document spans ranks; it looks for
            a server for one shard after another, so that now and then a plan exists all the same), or `reference`
            proved that none keeps both them and the balance.
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
    if window is not None and not 1 <= window <= MAX_DOCUMENT_TOKENS:
        raise UsageError(
            f"window={window}, expected at least 1 key per query (None for no window), at most {MAX_DOCUMENT_TOKENS:,}"
        )
    exact_tolerance(tolerance)
    if objective == "pairs":
        row_keys = 0
    elif objective != "time" or policy != "balanced" or (kernel is None) == (row_keys is None):
        raise UsageError(
            f"objective={objective!r} with policy={policy!r}, kernel={kernel!r} and row_keys={row_keys}; expected "
            "'pairs', or 'time' with policy 'balanced' and either a kernel or row_keys"
        )
    elif kernel is not None:
        row_keys = row_keys_of(kernel, shape.head_dim)
    goal = Objective(passes, memory, row_keys or 0)
    require_countable(layout.doc_lengths, "plan", goal.row_keys)
    if policy == "balanced":
        return plan_balanced(layout, topology, shape, tolerance, window, goal)
    return POLICIES[policy](layout, topology, shape, tolerance, window)
