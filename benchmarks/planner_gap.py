"""How far `balanced` is from the best plan there is: `python benchmarks/planner_gap.py [--json] [--cases N]`.

With `--page docs/results/planner.md` the table goes into that page.

Random layouts in four families, Llama-3-8B shape. *rows*: documents of some tokens, every row placed on its own by the
exact planner, so nothing is better. *blocks*: documents of up to some thousand tokens, the exact planner cuts at kernel
blocks of 128 queries; `balanced` may cut finer where balance needs it, so it can be below 1. Each once with whole
documents and once packed rank after rank, so that some span ranks. The solver's time sets the sizes.

Three ratios: bytes of `balanced` over the exact planner's fewest; the exact planner's over the lower bound (`bounds`,
or `spanning_bounds` where a document spans ranks); the busiest rank of `balanced` over the least possible busiest. The
bound is for the promised caps, which in small cases are up to a row above those that the exact planner keeps, and knows
nothing of blocks. Left out, and counted: cases in which nothing must be sent, in which one plan is within
(1 + tolerance) × share and the other only within the promised cap (rows being indivisible), and which the solver did
not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from planner_report import between_markers

from steelyard.cost.attention import longest_row_pairs
from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.domain.units import format_time
from steelyard.errors import PlanError
from steelyard.planner import make_plan
from steelyard.planner.bounds import total_bytes_bound
from steelyard.planner.checks import PlanReport, verify
from steelyard.planner.reference import FewestBytes, plan_reference
from steelyard.planner.shares import work_caps
from steelyard.planner.spanning_bounds import spanning_bytes_bound

BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Family:
    """Layouts of one kind, `cases` of them unless told otherwise: many of the smallest have nothing to send."""

    name: str
    cases: int
    ranks: tuple[int, ...]
    tokens_per_rank: tuple[int, int]
    longest: int
    block_tokens: int
    spanning: bool
    tolerance: float


FAMILIES = [
    Family("rows, whole", 60, (2, 3), (8, 14), 20, 1, False, 0.3),
    Family("rows, spanning", 60, (2, 3), (8, 14), 36, 1, True, 0.3),
    Family("blocks, whole", 20, (2, 3), (1_024, 1_800), 1_800, BLOCK_TOKENS, False, 0.02),
    Family("blocks, spanning", 20, (2, 3), (1_024, 1_800), 5_000, BLOCK_TOKENS, True, 0.02),
]


@dataclass
class Gaps:
    """What was found in one family."""

    family: str
    total: list[float] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    nothing_to_send: int = 0
    other_caps: int = 0
    unsolved: int = 0


def random_layout(family: Family, rng: np.random.Generator) -> Layout:
    """Documents with log-uniform lengths that fill ranks of equal size, the last one cut to fit."""
    ranks = int(rng.choice(family.ranks))
    tokens = int(rng.integers(*family.tokens_per_rank))
    if family.spanning:
        return Layout.contiguous(_fill(tokens * ranks, family.longest, rng), tokens, ranks)
    return Layout.from_doc_lengths([_fill(tokens, family.longest, rng) for _ in range(ranks)])


def _fill(tokens: int, longest: int, rng: np.random.Generator) -> list[int]:
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(np.exp(rng.uniform(np.log(longest / 30), np.log(longest)))) + 1))
    return lengths


def measure(family: Family, cases: int, seed: int, time_limit_s: float) -> Gaps:
    """`cases` random layouts of the family."""
    rng, gaps = np.random.default_rng(seed), Gaps(family.name)
    for _ in range(cases):
        layout = random_layout(family, rng)
        topology = Topology(layout.ranks)
        balanced = verify(make_plan(layout, shape=LLAMA3_8B, tolerance=family.tolerance))

        def exact(objective: FewestBytes, layout: Layout = layout, topology: Topology = topology) -> PlanReport:
            plan = plan_reference(
                layout,
                topology,
                LLAMA3_8B,
                family.tolerance,
                objective=objective,
                block_tokens=family.block_tokens,
                time_limit_s=time_limit_s,
            )
            return verify(plan)

        _compare(gaps, family, layout, balanced, exact)
    return gaps


def _compare(
    gaps: Gaps, family: Family, layout: Layout, balanced: PlanReport, exact: Callable[[FewestBytes], PlanReport]
) -> None:
    """Add the case to the gaps: with all its ratios, or to what is left out."""
    topology, tolerance = Topology(layout.ranks), family.tolerance
    try:
        fewest = exact("total")
        if not fewest.bytes_total:
            gaps.nothing_to_send += 1
            return
        flattest = exact("busiest")
    except PlanError:
        gaps.unsolved += 1
        return
    longest_row = longest_row_pairs(layout.doc_lengths, None)
    caps = work_caps(fewest.pairs_total, topology, tolerance, longest_row)
    if within(balanced.work_by_server, caps.target) != within(fewest.work_by_server, caps.target):
        gaps.other_caps += 1
        return
    bound = total_bytes_bound(layout, topology, LLAMA3_8B, tolerance)
    bound = spanning_bytes_bound(layout, topology, LLAMA3_8B, tolerance) if bound is None else bound
    gaps.total.append(balanced.bytes_total / fewest.bytes_total)
    gaps.busiest.append(balanced.busiest_bytes / flattest.busiest_bytes)
    if bound:
        gaps.bound.append(fewest.bytes_total / bound)


def within(work_by_server: IntArray, caps: list[int]) -> bool:
    """Whether no server has more work than its cap."""
    return bool(np.all(work_by_server <= np.array(caps)))


def summary(ratios: list[float]) -> dict[str, float] | None:
    if not ratios:
        return None
    return {"mean": float(np.mean(ratios)), "p95": float(np.quantile(ratios, 0.95)), "worst": max(ratios)}


def as_record(gaps: Gaps) -> dict[str, Any]:
    return {
        "family": gaps.family,
        "cases": len(gaps.total),
        "balanced_over_exact_total": summary(gaps.total),
        "balanced_over_exact_busiest": summary(gaps.busiest),
        "exact_total_over_bound": summary(gaps.bound),
        "nothing_to_send": gaps.nothing_to_send,
        "other_caps": gaps.other_caps,
        "unsolved": gaps.unsolved,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, mean / 95th percentile / worst."""
    lines = [
        "| family | cases | total bytes, balanced ÷ exact | busiest rank, balanced ÷ exact | exact ÷ lower bound "
        "| left out |",
        "|---|---|---|---|---|---|",
    ]
    for record in records:
        cells = [
            "-" if record[name] is None else " / ".join(f"{value:.2f}" for value in record[name].values())
            for name in ("balanced_over_exact_total", "balanced_over_exact_busiest", "exact_total_over_bound")
        ]
        left_out = ", ".join(
            f"{record[name]} {words}"
            for name, words in (
                ("nothing_to_send", "send nothing"),
                ("other_caps", "other caps"),
                ("unsolved", "unsolved"),
            )
            if record[name]
        )
        lines.append(f"| {record['family']} | {record['cases']} | {' | '.join(cells)} | {left_out or 'none'} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, help="per family; none: 60 of rows, 20 of blocks")
    parser.add_argument("--only", default="", metavar="TEXT", help="families with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit-s", type=float, default=10.0, help="for each program of the exact planner")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    parser.add_argument("--page", type=Path, help="a page with the markers planner:gap, to write the table into")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    # The solver writes notes to the process's standard output, behind Python's back: keep that for the result.
    result = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    records = [
        as_record(measure(f, f.cases if options.cases is None else options.cases, options.seed, options.time_limit_s))
        for f in FAMILIES
        if options.only in f.name
    ]
    if options.json:
        print(json.dumps({"seed": options.seed, "families": records}, indent=1), file=result)
    else:
        print("Mean / 95th percentile / worst.\n", table(records), sep="\n", file=result)
    if options.page is not None:
        took = f"Seed {options.seed}; each cell is mean / 95th percentile / worst. It took "
        took += f"{format_time(time.monotonic() - begin)} on a shared virtual machine.\n\n"
        page = between_markers(options.page.read_text(encoding="utf-8"), "gap", took + table(records))
        options.page.write_text(page, encoding="utf-8")
    result.close()


if __name__ == "__main__":
    main()
