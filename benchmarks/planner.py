"""How good and how fast plans are, on workload files: `python benchmarks/planner.py [--json] [--tolerance T] FILE …`.

A workload is `{"tokens_per_rank": T, "ranks": n, "batches": [{"docs": [lengths in packing order]}, …]}`. For each file
the worst batch is shown, except for bytes, which are the mean over batches. Work, bytes and rows are counted by
`planner.checks.verify` from the tables. Times are the best of three, on one core; `tables_ms` is all tables of all
ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B, LLAMA_34B, AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner import POLICIES, make_plan
from steelyard.planner.bounds import busiest_bytes_bound, total_bytes_bound
from steelyard.planner.checks import verify
from steelyard.planner.tables import build_all_tables

SHAPES = {"llama3-8b": LLAMA3_8B, "llama-34b": LLAMA_34B}
REPEATS = 3
Result = TypeVar("Result")


def best_time_s(work: Callable[[], Result]) -> tuple[float, Result]:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begin)
    return min(times), result


def measure_batch(layout: Layout, shape: AttentionShape, policy: str, tolerance: float) -> dict[str, Any]:
    plan_s, plan = best_time_s(lambda: make_plan(layout, policy=policy, shape=shape, tolerance=tolerance))
    tables_s, tables = best_time_s(lambda: build_all_tables(plan))
    report = verify(plan, tables)
    topology = Topology(layout.ranks)
    return {
        "plan_ms": plan_s * 1e3,
        "tables_ms": tables_s * 1e3,
        "work_max_over_mean": report.work_max_over_mean,
        "bytes_total": report.bytes_total,
        "lower_bound_bytes": total_bytes_bound(layout, topology, shape, tolerance),
        "busiest_bytes": report.busiest_bytes,
        "busiest_lower_bound_bytes": busiest_bytes_bound(layout, topology, shape, tolerance),
        "received_tokens_max": report.received_tokens_max,
        "tasks": report.tasks,
        "moved_tasks": report.moved_tasks,
    }


def measure_workload(path: Path, shape: AttentionShape, policy: str, tolerance: float) -> list[dict[str, Any]]:
    workload = json.loads(path.read_text())
    return [
        measure_batch(
            Layout.contiguous(batch["docs"], workload["tokens_per_rank"], workload["ranks"]), shape, policy, tolerance
        )
        for batch in workload["batches"]
    ]


def worst_ratio(rows: list[dict[str, Any]], value: str, bound: str) -> str:
    """Largest value ÷ bound, or a dash where there is no bound."""
    ratios = [row[value] / row[bound] for row in rows if row[bound]]
    return f"{max(ratios):.3f}" if len(ratios) == len(rows) else "-"


def table_line(name: str, rows: list[dict[str, Any]]) -> str:
    cells = [
        f"{max(row['plan_ms'] for row in rows):.2f}",
        f"{max(row['tables_ms'] for row in rows):.2f}",
        f"{max(row['work_max_over_mean'] for row in rows):.4f}",
        f"{sum(row['bytes_total'] for row in rows) / len(rows) / 1e9:.2f}",
        worst_ratio(rows, "bytes_total", "lower_bound_bytes"),
        worst_ratio(rows, "busiest_bytes", "busiest_lower_bound_bytes"),
        f"{max(row['moved_tasks'] for row in rows)}",
    ]
    return name.ljust(28) + "".join(cell.rjust(15) for cell in cells)


COLUMNS = ["plan ms", "tables ms", "max/mean", "GB", "GB/bound", "busiest/bound", "moved tasks"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="balanced")
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    options = parser.parse_args()
    results = {}
    if not options.json:
        print("workload".ljust(28) + "".join(column.rjust(15) for column in COLUMNS))
    for path in options.files:
        results[path.stem] = measure_workload(path, SHAPES[options.model], options.policy, options.tolerance)
        if not options.json:
            print(table_line(path.stem, results[path.stem]), flush=True)
    if options.json:
        json.dump(
            {"policy": options.policy, "tolerance": options.tolerance, "workloads": results}, sys.stdout, indent=1
        )
        print()


if __name__ == "__main__":
    main()
