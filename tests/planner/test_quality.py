"""How good plans are: bytes and the busiest rank against bounds, the published planner and `greedy`.

The limits are a little above what was measured, so that a heuristic that stops working is seen: a receiver chosen
without regard to what it receives already, or servers that hold a document's keys no longer tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.planner import make_plan
from steelyard.planner.baselines import plan_greedy
from steelyard.planner.bounds import total_bytes_bound
from steelyard.planner.checks import PlanReport, verify
from steelyard.planner.measure import bounds_of

TOLERANCE = 0.02
GB = 1e9


@dataclass(frozen=True)
class Measured:
    """One plan of `balanced` on a layout as given; ratios are None where no bound is known."""

    report: PlanReport
    bytes_over_bound: float | None
    busiest_over_bound: float | None


def measured(layout: Layout) -> Measured:
    plan = make_plan(layout, shape=LLAMA3_8B, tolerance=TOLERANCE)
    report = verify(plan)
    bounds = bounds_of(plan, report, spanning_ranks=0)
    assert report.work_max_over_mean <= 1 + TOLERANCE
    return Measured(
        report,
        report.bytes_total / bounds.total if bounds.total else None,
        report.busiest_bytes / bounds.busiest if bounds.busiest else None,
    )


# --- workloads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Of one workload: means over its batches, but for those of the bounds, which every batch keeps.

    Attributes:
        over_published: bytes ÷ those of the published planner at the same tolerance.
        busiest_gb: most bytes in or out of one rank on the way to the servers.
        over_bound: bytes ÷ the least possible, where no document spans ranks.
        busiest_over_bound: busiest rank ÷ its bound; and the mean of that.
    """

    over_published: float
    busiest_gb: float
    over_bound: float | None = None
    busiest_over_bound: tuple[float, float] | None = None


LIMITS = {
    "pretrain_ctx128K_T128K_n8": Limits(0.745, 1.02, 1.15),
    "prolong_ctx128K_T128K_n64": Limits(0.755, 1.35, 1.08, (1.15, 1.05)),
    "pretrain_ctx128K_T128K_n64": Limits(0.71, 1.36, 1.08, (1.15, 1.08)),
    "prolong_ctx512K_T128K_n8": Limits(0.96, 2.6),
    "prolong_ctx256K_T64K_n64": Limits(0.84, 2.4),
    "prolong_ctx512K_T64K_n64": Limits(0.76, 4.1),
    # Crumbs deep in long documents: all on the server with the largest room made it 12 GB, and 7.4 on average.
    "prolong_ctx512K_T128K_n512": Limits(0.86, 5.2),
}


@pytest.mark.parametrize("name", LIMITS)
def test_workloads_are_planned_as_well_as_ever(shared_dir: Path, name: str) -> None:
    limits, folder = LIMITS[name], shared_dir / "workloads"
    workload = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    published = json.loads((folder / "reference_results.json").read_text(encoding="utf-8"))["rows"]
    theirs = next(r for r in published if r["workload"] == name and r["tolerance"] == TOLERANCE)
    plans = [
        measured(Layout.contiguous(batch["docs"], workload["tokens_per_rank"], workload["ranks"]))
        for batch in workload["batches"]
    ]
    assert np.mean([p.report.bytes_total for p in plans]) / GB <= limits.over_published * theirs["gigabytes"]
    assert np.mean([p.report.busiest_bytes for p in plans]) / GB <= limits.busiest_gb
    ratios = [p.bytes_over_bound for p in plans]
    if limits.over_bound is None:
        assert ratios == [None] * len(plans)
    else:
        assert max(ratio for ratio in ratios if ratio is not None) <= limits.over_bound and None not in ratios
    if limits.busiest_over_bound is not None:
        busiest = [p.busiest_over_bound for p in plans if p.busiest_over_bound is not None]
        worst, mean = limits.busiest_over_bound
        assert len(busiest) == len(plans) and max(busiest) <= worst and np.mean(busiest) <= mean


# --- generated --------------------------------------------------------------------------------------------------------

RANKS = 64


def random_bits(seed: int) -> Iterator[int]:
    """Whole numbers of 64 bits, from a generator written out here: the same everywhere."""
    state = seed
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        yield state


def packed_documents(seed: int, tokens: int = 32_768, bits: int = 18) -> Layout:
    """Log-uniform lengths up to 2^bits that fill all ranks; many documents span some."""
    lengths: list[int] = []
    left, draw = RANKS * tokens, random_bits(seed)
    while left:
        state = next(draw)
        scale = 2 ** (8 + (state >> 40) % (bits - 8))
        lengths.append(min(left, scale + (state >> 20) % scale))
        left -= lengths[-1]
    return Layout.contiguous(lengths, tokens, RANKS)


def whole_documents(seed: int, tokens: int = 65_536) -> Layout:
    """A quarter of the ranks hold one document, a quarter 64 short ones, and the others two of unequal length."""
    ranks, draw = [], random_bits(seed)
    for _ in range(RANKS):
        state = next(draw)
        kind, longer = (state >> 40) % 4, tokens * (50 + (state >> 20) % 45) // 100
        ranks.append([[tokens], [tokens // 64] * 64, [longer, tokens - longer], [longer, tokens - longer]][kind])
    return Layout.from_doc_lengths(ranks)


def over_greedy(layouts: list[Layout]) -> tuple[float, float]:
    """Bytes, and the busiest rank's, of `balanced` ÷ those of `greedy`: means over the layouts."""
    ours = [measured(layout).report for layout in layouts]
    theirs = [verify(plan_greedy(layout, Topology(RANKS), LLAMA3_8B, TOLERANCE)) for layout in layouts]
    total = [a.bytes_total / b.bytes_total for a, b in zip(ours, theirs, strict=True)]
    busiest = [a.busiest_bytes / b.busiest_bytes for a, b in zip(ours, theirs, strict=True)]
    return float(np.mean(total)), float(np.mean(busiest))


def test_documents_that_span_ranks_send_less_than_greedy() -> None:
    """Measured: 0.708 and 0.756."""
    total, busiest = over_greedy([packed_documents(seed) for seed in range(1, 7)])
    assert total <= 0.725 and busiest <= 0.8


def test_whole_documents_send_less_than_greedy_and_little_more_than_they_must() -> None:
    """Measured: 0.667 and 0.532; at most 1.14 times the bound."""
    layouts = [whole_documents(seed) for seed in range(1, 13)]
    total, busiest = over_greedy(layouts)
    assert total <= 0.675 and busiest <= 0.56
    for layout in layouts[:4]:
        bound = total_bytes_bound(layout, Topology(RANKS), LLAMA3_8B, TOLERANCE)
        assert bound is not None and measured(layout).report.bytes_total <= 1.15 * bound
