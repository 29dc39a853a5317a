"""How good and how fast plans are: measures, and renews the page and pictures of docs/results.

    python benchmarks/planner.py                                  # everything, into docs/results (minutes)
    python benchmarks/planner.py --only '*n8' --growth 8 64 --out part   # a part, which needs a folder of its own
    python benchmarks/planner.py --redraw                         # page and pictures from docs/results/planner.json

Four parts. *workloads*: the policy `balanced` on every workload file and tolerance, every batch; where documents span
servers also with the layout chosen, which is what `steelyard plan` does. *policies*: all policies on every file at the
middle tolerance. *growth*: generated workloads of 8 to 4,096 servers with constant tokens per server
(`planner_workloads`), time of planning and of the tables of all ranks; spanning ones again with the layout chosen.
*alternatives*: what flattening the busiest of 8 servers costs, what forwarding keys inside nodes would save, and how
long transfers last beside attention (`planner_alternatives`).
`benchmarks/planner_gap.py` writes the page's last table.

Work, bytes and rows are counted by `planner.checks.verify` from the tables. Times are the fastest of three runs, in one
process on one core. The figures of the published planner are those of `reference_results.json` beside the workloads.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from planner_alternatives import flattening_rows, forwarding_rows, transfer_rows
from planner_pictures import draw_pictures
from planner_report import CHOSEN, GOAL_TOLERANCE, renew_page, summary_lines
from planner_workloads import generated_workload

from steelyard.data.workload import Workload, read_workload
from steelyard.library import attention_shape
from steelyard.planner.measure import COMPARED, REPEATS, fastest, measure_plan
from steelyard.planner.tables import build_tables

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ROOT / "../shared/workloads"
RESULTS = ROOT / "docs/results"
PARTS = ("workloads", "policies", "growth", "alternatives")
TOLERANCES = (0.1, 0.05, 0.02)
GROWTH = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROWTH_KINDS = ("whole", "spanning")
POLICY_TOLERANCE = 0.05
GROWTH_TOLERANCE = 0.02
FEW_SERVERS = 8  # where total bytes and the busiest server's trade; one node


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="none: all")
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="folder of workload files")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN", help="names of workload files")
    parser.add_argument("--tolerances", nargs="*", type=float, default=TOLERANCES)
    parser.add_argument("--policies", nargs="*", default=COMPARED)
    parser.add_argument("--growth", nargs="*", type=int, default=GROWTH, metavar="SERVERS")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--out", type=Path, help="folder of planner.md, planner.json and pictures; none: docs/results")
    parser.add_argument("--redraw", action="store_true", help="measure nothing, use planner.json")
    options = parser.parse_args(argv)
    usual = ("parts", "only", "tolerances", "policies", "growth", "model")
    changed = [f"--{name}" for name in usual if getattr(options, name) != parser.get_default(name)]
    if options.out is None and changed and not options.redraw:
        parser.error(f"{', '.join(changed)}: would leave only a part of docs/results/planner.json; add --out FOLDER")
    options.out = options.out or RESULTS
    record_path = options.out / "planner.json"
    if options.redraw:
        record = json.loads(record_path.read_text(encoding="utf-8"))
    else:
        record = measure(options)
        options.out.mkdir(parents=True, exist_ok=True)
        record_path.write_text(as_lines(record), encoding="utf-8")
    pictures = draw_pictures(record, options.out)
    renew_page(options.out / "planner.md", record)
    print("\n".join(summary_lines(record)))
    written = [] if options.redraw else [str(record_path)]
    written += [str(options.out / "planner.md"), f"{len(pictures)} pictures"]
    print(f"wrote {', '.join(written)}", file=sys.stderr)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as JSON values."""
    parts = options.parts or PARTS
    paths = sorted(
        (p for p in options.workloads.glob("*_n*.json") if any(fnmatch.fnmatch(p.stem, o) for o in options.only)),
        key=workload_order,
    )
    published = options.workloads / "reference_results.json"
    begin = time.monotonic()
    warm_up()
    record: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "model": options.model,
        "policy_tolerance": POLICY_TOLERANCE,
        "growth_tolerance": GROWTH_TOLERANCE,
        "workloads": [],
        "chosen": [],
        "policies": [],
        "growth": [],
        "flattening": [],
        "forwarding": [],
        "transfers": [],
        "published": json.loads(published.read_text(encoding="utf-8"))["rows"] if published.exists() else [],
    }
    workloads = [(path.stem, read_workload(path)) for path in paths]
    if "workloads" in parts:
        for name, workload in workloads:
            for tolerance in options.tolerances:
                record["workloads"] += rows(name, workload, ["balanced"], tolerance, options.model)
                if any(layout.spans_ranks for layout in workload.layouts()):
                    record["chosen"] += rows(name, workload, ["balanced"], tolerance, options.model, layout_chosen=True)
    if "policies" in parts:
        for name, workload in workloads:
            record["policies"] += rows(name, workload, options.policies, POLICY_TOLERANCE, options.model)
    if "growth" in parts:
        for servers in options.growth:
            for kind in GROWTH_KINDS:
                workload = generated_workload(servers, kind)
                record["growth"] += rows(kind, workload, ["balanced"], GROWTH_TOLERANCE, options.model)
                if kind == "spanning":
                    record["growth"] += rows(
                        kind + CHOSEN, workload, ["balanced"], GROWTH_TOLERANCE, options.model, layout_chosen=True
                    )
    if "alternatives" in parts:
        shape = attention_shape(options.model)
        for name, workload in workloads:
            print(f"{name}: alternatives", file=sys.stderr, flush=True)
            if workload.ranks == FEW_SERVERS:
                record["flattening"] += flattening_rows(name, workload, shape, GOAL_TOLERANCE)
            else:
                record["forwarding"] += forwarding_rows(name, workload, shape, GOAL_TOLERANCE)
            record["transfers"] += transfer_rows(name, workload, shape, GOAL_TOLERANCE)
    record["took_s"] = round(time.monotonic() - begin)
    return record


def rows(
    name: str,
    workload: Workload,
    policies: Iterable[str],
    tolerance: float,
    model: str,
    *,
    layout_chosen: bool = False,
) -> list[dict[str, Any]]:
    """Figures of every batch under each policy; says on stderr what it is at."""
    found = []
    for policy in policies:
        for batch, layout in enumerate(workload.layouts()):
            measured = measure_plan(
                layout,
                policy=policy,
                shape=attention_shape(model),
                tolerance=tolerance,
                batch=batch,
                layout_chosen=layout_chosen,
                spanning_bound=policy == "balanced" and tolerance == GOAL_TOLERANCE,
            )
            place = {"workload": name, "servers": workload.ranks, "policy": policy, "tolerance": tolerance}
            one_s, _ = fastest(lambda plan=measured.plan: build_tables(plan, plan.layout.ranks // 2), REPEATS)
            figures = {**measured.figures.as_json(), "tables_of_one_rank_ms": one_s * 1e3}
            found.append({**place, **rounded(figures)})
        last = found[-1]
        what = f"{policy} and layout" if layout_chosen else policy
        print(
            f"{name} {workload.ranks} servers, {what}, {tolerance:g}: work {last['work_max_over_mean']:.4f}, "
            f"plan {last['plan_ms']:.1f} ms, tables {last['tables_ms']:.1f} ms",
            file=sys.stderr,
            flush=True,
        )
    return found


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}


def warm_up() -> None:
    """What is done once in a process (imports, first allocations) is no part of planning."""
    workload = generated_workload(64, "spanning", seed=1)
    for policy in COMPARED:
        measure_plan(workload.layouts()[0], policy=policy, shape=attention_shape("llama3-8b"), tolerance=0.05)


def workload_order(path: Path) -> tuple[int, str]:
    """By servers, then by name."""
    return int(path.stem.rpartition("_n")[2]), path.stem


def machine() -> str:
    """Processor, cores and versions, in words."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.partition(":")[2].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0] if names else cpu
    return f"{cpu}, {os.cpu_count()} cores (one used), Python {platform.python_version()}, numpy {np.__version__}"


def commit() -> str:
    """The commit measured, and whether there were changes on top of it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def as_lines(record: dict[str, Any]) -> str:
    """JSON with one measured row a line, so that changes show."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(row) for row in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]" if value else f" {json.dumps(key)}: []")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
