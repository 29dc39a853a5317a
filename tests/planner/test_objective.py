"""What plans count: bytes by pass and memory mode, and kernel time instead of pairs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import SMALL_SHAPE, TOLERANCES, WINDOWS, layouts

from steelyard.cost.attention_kernels import TileKernel, UnfusedKernel, range_counts
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner import make_plan
from steelyard.planner.balanced import plan_balanced
from steelyard.planner.checks import verify
from steelyard.planner.objective import Memory, Objective, Passes, row_keys_of
from steelyard.planner.ranges import Prices

KERNEL = TileKernel(
    floor_s=58e-6, tile_s=0.568e-6, block_s=1.543e-6, masked_block_s=0.641e-6, multiprocessors=132,
    backward_ratio=2.5, narrow_penalty=1.2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("passes", "memory", "queries", "lse", "keys"),
    [
        ("forward", "keep", 2, 0, 1),
        ("backward", "keep", 2, 0, 1),
        ("both", "keep", 4, 0, 2),
        ("forward", "resend", 2, 1, 1),
        ("backward", "resend", 4, 1, 2),
        ("both", "resend", 6, 2, 3),
    ],
)
def test_bytes_by_pass_and_memory(passes: Passes, memory: Memory, queries: int, lse: int, keys: int) -> None:
    objective, shape = Objective(passes, memory), LLAMA3_8B
    assert objective.query_bytes(shape) == queries * shape.query_bytes + lse * 4 * shape.heads
    assert objective.key_bytes(shape) == keys * shape.key_value_bytes
    # Of these, in phases without keys: outputs on their way back, and under `keep` their gradients on their way out.
    keyless = {"forward": 1, "backward": memory == "keep", "both": 1 + (memory == "keep")}[passes]
    sent_with_keys = (queries - keyless) * shape.query_bytes + (
        memory == "resend" and passes != "forward"
    ) * 4 * shape.heads
    assert objective.keyed_query_bytes(shape) == sent_with_keys
    prices = objective.prices(shape)
    assert Fraction(prices.alpha, prices.beta) == Fraction(objective.query_bytes(shape), objective.key_bytes(shape))


def test_both_passes_of_keep_plan_as_forward_alone() -> None:
    layout = Layout.from_doc_lengths([[40_000], [3_000] * 5, [900] * 12, []])
    plans = [plan_balanced(layout, Topology(4), LLAMA3_8B, 0.02, None, Objective(p)) for p in ("forward", "both")]
    assert plans[0].tasks.start.tolist() == plans[1].tasks.start.tolist()


@pytest.mark.parametrize("changes", [{"passes": "all"}, {"memory": "forget"}, {"row_keys": -1}])
def test_unknown_objectives_are_explained(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        Objective(**changes)  # type: ignore[arg-type]


@settings(max_examples=150)
@given(layouts(), TOLERANCES, WINDOWS, st.integers(0, 300))
def test_promises_hold_for_work_with_a_row_cost(
    layout: Layout, tolerance: float, window: int | None, row_keys: int
) -> None:
    objective = Objective(memory="resend", row_keys=row_keys)
    plan = plan_balanced(layout, Topology(layout.ranks), SMALL_SHAPE, tolerance, window, objective)
    assert plan.row_keys == row_keys
    verify(plan)


@pytest.mark.parametrize("row_keys", [0, 7, 150])
@pytest.mark.parametrize("work", [1, 40, 900, 20_000, 400_000])
def test_no_range_is_cheaper_than_the_closed_form(work: int, row_keys: int) -> None:
    prices = Prices(16_384, 4_096, row_keys)
    cheapest = min(
        prices.alpha * count + prices.beta * max(count, -(-(work + count * (count - 1) // 2) // count) - row_keys)
        for count in range(1, 2_000)
    )
    assert prices.range_bytes(work) - prices.beta / 2 <= cheapest + 1
    assert cheapest <= prices.range_bytes(work) + 2 * (prices.alpha + prices.beta)


def kernel_times(plan: DispatchPlan) -> np.ndarray:
    """Seconds of each server, tile by tile."""
    seconds = KERNEL.forward_s(range_counts(plan.tasks.start, plan.tasks.end), 32, 128)
    return np.bincount(plan.tasks.server, weights=seconds, minlength=plan.topology.servers)


def test_row_keys_are_those_of_the_kernel() -> None:
    row_keys = row_keys_of(KERNEL, 128)
    ends = np.array([128, 1_280, 12_800, 128_000])
    seconds = KERNEL.forward_s(range_counts(np.zeros_like(ends), ends), 1, 128)
    units = ends * (ends + 1) / 2 + row_keys * ends
    assert np.allclose(seconds / units, seconds[-1] / units[-1], rtol=0.005)


def test_time_is_balanced_where_pairs_would_not_balance_it() -> None:
    """Short documents beside long ones: per pair they take longer."""
    layout = Layout.from_doc_lengths([[16_384], [512] * 200, [512] * 200, [8_192, 8_192]])
    by_pairs = make_plan(layout, shape=LLAMA3_8B, tolerance=0.01)
    by_time = make_plan(layout, shape=LLAMA3_8B, tolerance=0.01, objective="time", kernel=KERNEL)
    verify(by_time)
    uneven = [kernel_times(plan).max() / kernel_times(plan).mean() for plan in (by_pairs, by_time)]
    assert uneven[1] <= 1.015
    assert uneven[1] < uneven[0] - 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "energy"}, "objective='energy'"),
        ({"objective": "time"}, "kernel=None"),
        ({"objective": "time", "kernel": KERNEL, "policy": "packed"}, "policy='packed'"),
        ({"objective": "time", "kernel": UnfusedKernel(0, 1e12, 8, 1e11, 2.5)}, "UnfusedKernel"),
        ({"memory": "forget"}, "memory='forget'"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(Layout.from_doc_lengths([[4], [12]]), **{"shape": SMALL_SHAPE, **changes})  # type: ignore[arg-type]
