"""The page docs/results/planner.md: tables between markers are written anew, the prose around them stays."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from steelyard.domain.units import format_time

Row = dict[str, Any]
GOAL_TOLERANCE = 0.02
GB = 1e9
OUTLINE = """\
# The planner: measured

<!-- planner:machine:begin -->
<!-- planner:machine:end -->

## Goals

<!-- planner:goals:begin -->
<!-- planner:goals:end -->

## Workloads

<!-- planner:workloads:begin -->
<!-- planner:workloads:end -->

## Policies

<!-- planner:policies:begin -->
<!-- planner:policies:end -->

## Growth

<!-- planner:growth:begin -->
<!-- planner:growth:end -->
"""


def renew_page(path: Path, record: dict[str, Any]) -> None:
    """Write every generated part of the page; a page that does not exist is begun with an outline."""
    text = path.read_text(encoding="utf-8") if path.exists() else OUTLINE
    parts = {
        "machine": machine_lines,
        "goals": goal_lines,
        "workloads": workload_lines,
        "policies": policy_lines,
        "growth": growth_lines,
    }
    for name, lines in parts.items():
        text = between_markers(text, name, "\n".join(lines(record)))
    path.write_text(text, encoding="utf-8")


def between_markers(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers of that name."""
    pattern = re.compile(rf"(<!-- planner:{name}:begin -->\n).*?(<!-- planner:{name}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"planner.md lacks the markers planner:{name}:begin and planner:{name}:end; put them back")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def summary_lines(record: dict[str, Any]) -> list[str]:
    """What to print at the end of a run."""
    return [*machine_lines(record), "", *goal_lines(record)]


def machine_lines(record: dict[str, Any]) -> list[str]:
    return [
        f"Commit {record['commit']}, model {record['model']}, bytes of one layer's forward pass. {record['machine']}; "
        f"a shared virtual machine, times are the fastest of three. The run took {format_time(record['took_s'])}."
    ]


# --- goals ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A limit on the worst of some values; `values` may be empty where that part was not measured."""

    what: str
    limit: float
    values: Sequence[float]
    unit: str = ""

    def line(self) -> str:
        if not self.values:
            return f"| {self.what} | ≤ {self.limit:g}{self.unit} | not measured | | |"
        worst, middle = max(self.values), median(self.values)
        within = sum(v <= self.limit + 1e-9 for v in self.values)
        state = "holds" if within == len(self.values) else f"{within} of {len(self.values)} hold"
        digits = 1 if self.unit else 3
        return (
            f"| {self.what} | ≤ {self.limit:g}{self.unit} | {middle:.{digits}f}{self.unit} | "
            f"{worst:.{digits}f}{self.unit} | {state} |"
        )


def goals(record: dict[str, Any]) -> list[Goal]:
    rows = [r for r in record["workloads"] if r["tolerance"] == GOAL_TOLERANCE]
    chosen = by_workload(record["chosen"], GOAL_TOLERANCE)
    spanning = [ratio for name, ratio in published_ratios(record, GOAL_TOLERANCE).items() if name in chosen]
    bound = [r for r in rows if r["lower_bound_bytes"]]

    def over_bound(keep: Callable[[Row], bool]) -> list[float]:
        return [r["bytes_total"] / r["lower_bound_bytes"] for r in bound if keep(r)]

    work = [r["work_max_over_mean"] for r in rows + [r for c in chosen.values() for r in c]]
    busiest = [
        r["busiest_bytes"] / r["busiest_lower_bound_bytes"]
        for r in bound
        if r["servers"] >= 64 and r["busiest_lower_bound_bytes"]
    ]
    total_ms = {n: [r["plan_ms"] + r["tables_ms"] for r in rows if r["servers"] == n] for n in (64, 512)}
    return [
        Goal("work of the busiest server ÷ mean, each batch", 1.02, work),
        Goal("bytes ÷ bound, 64 servers and more, each batch", 1.08, over_bound(lambda r: r["servers"] >= 64)),
        Goal("bytes ÷ bound, 8 servers, each batch", 1.15, over_bound(lambda r: r["servers"] == 8)),
        Goal("bytes ÷ published, documents span servers, each workload", 0.80, spanning),
        Goal("the same, layout chosen too", 0.80, list(published_ratios(record, GOAL_TOLERANCE, "chosen").values())),
        Goal("busiest server ÷ bound, 64 servers and more, each batch", 1.15, busiest),
        Goal("plan and all tables, 64 servers, each batch", 10, total_ms[64], " ms"),
        Goal("plan and all tables, 512 servers, each batch", 60, total_ms[512], " ms"),
        Goal("growth of that time from 512 to 4,096 servers: exponent", 1.2, growth_exponents(record)),
    ]


def published_ratios(record: dict[str, Any], tolerance: float, part: str = "workloads") -> dict[str, float]:
    """Mean bytes of our batches over the published mean, by workload."""
    published = {r["workload"]: r["gigabytes"] for r in record["published"] if r["tolerance"] == tolerance}
    return {
        name: mean(r["bytes_total"] for r in rows) / GB / published[name]
        for name, rows in by_workload(record[part], tolerance).items()
        if name in published
    }


def growth_exponents(record: dict[str, Any]) -> list[float]:
    """Slope of log(time) over log(servers) from 512 servers on, for each kind of workload. n log n has about 1.13."""
    slopes = []
    for rows in by_name(record["growth"]).values():
        large = [r for r in rows if r["servers"] >= 512]
        if len(large) > 1:
            servers, total_ms = ([r["servers"] for r in large], [r["plan_ms"] + r["tables_ms"] for r in large])
            slopes.append(float(np.polyfit(np.log(servers), np.log(total_ms), 1)[0]))
    return slopes


def goal_lines(record: dict[str, Any]) -> list[str]:
    return [
        f"| at tolerance {GOAL_TOLERANCE:g} | goal | median | worst | |",
        "|---|---|---|---|---|",
        *(goal.line() for goal in goals(record)),
    ]


# --- tables -----------------------------------------------------------------------------------------------------------


def by_name(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["workload"]].append(row)
    return dict(found)


def by_workload(rows: Sequence[Row], tolerance: float) -> dict[str, list[Row]]:
    return by_name([r for r in rows if r["tolerance"] == tolerance])


def workload_lines(record: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for tolerance in sorted({r["tolerance"] for r in record["workloads"]}):
        published = {r["workload"]: r for r in record["published"] if r["tolerance"] == tolerance}
        ratios = published_ratios(record, tolerance)
        chosen_ratios = published_ratios(record, tolerance, "chosen")
        chosen = by_workload(record["chosen"], tolerance)
        lines += [
            "",
            f"### Tolerance {tolerance:g}",
            "",
            "| workload | work ÷ mean | published | GB | ÷ bound | ÷ published | layout chosen | busiest ÷ bound "
            "| out, in ÷ mean | moved | plan ms | layout chosen | tables ms | published plan ms |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name, rows in by_workload(record["workloads"], tolerance).items():
            theirs = published.get(name, {})
            cells = [
                name,
                f"{worst(rows, 'work_max_over_mean'):.4f}",
                f"{theirs.get('work_max_over_mean_worst_batch', '–')}",
                f"{mean(r['bytes_total'] for r in rows) / GB:.2f}",
                worst_ratio(rows, "bytes_total", "lower_bound_bytes"),
                shown(ratios.get(name), 3),
                shown(chosen_ratios.get(name), 3),
                worst_ratio(rows, "busiest_bytes", "busiest_lower_bound_bytes"),
                f"{worst(rows, 'bytes_out_max_over_mean'):.1f}, {worst(rows, 'bytes_in_max_over_mean'):.1f}",
                f"{worst(rows, 'moved_tasks')}",
                f"{worst(rows, 'plan_ms'):.1f}",
                shown(worst(chosen[name], "plan_ms") if name in chosen else None, 1),
                f"{worst(rows, 'tables_ms'):.1f}",
                f"{theirs.get('plan_ms', '–')}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines or ["Not measured."]


def worst(rows: Sequence[Row], key: str) -> float:
    return max(r[key] for r in rows)


def shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def worst_ratio(rows: Sequence[Row], value: str, bound: str) -> str:
    """Largest value ÷ bound of the batches that have one."""
    ratios = [r[value] / r[bound] for r in rows if r[bound]]
    return f"{max(ratios):.3f}" if ratios else "–"


def policy_lines(record: dict[str, Any]) -> list[str]:
    rows = record["policies"]
    if not rows:
        return ["Not measured."]
    policies = list(dict.fromkeys(r["policy"] for r in rows))
    whole = {(r["workload"], r["batch"]): r for r in rows if r["policy"] == "balanced"}
    lines = [
        f"Tolerance {record['policy_tolerance']:g}, medians over all batches of all workloads (worst in brackets).",
        "",
        "| policy | work ÷ mean | bytes ÷ balanced | busiest ÷ balanced | pairs ÷ uncut | tokens ÷ mean "
        "| plan ms | tables ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy in policies:
        mine = [r for r in rows if r["policy"] == policy]

        def relative(key: str, mine: Sequence[Row] = mine) -> list[float]:
            others = [(r, whole.get((r["workload"], r["batch"]))) for r in mine]
            return [r[key] / o[key] for r, o in others if o and o[key]]

        cells = [
            middle_and_worst([r["work_max_over_mean"] for r in mine], 2),
            middle_and_worst(relative("bytes_total"), 2),
            middle_and_worst(relative("busiest_bytes"), 2),
            middle_and_worst(relative("pairs_total"), 2, extreme=min),
            middle_and_worst([r["tokens_max_over_mean"] for r in mine], 2),
            middle_and_worst([r["plan_ms"] for r in mine], 1),
            middle_and_worst([r["tables_ms"] for r in mine], 1),
        ]
        lines.append(f"| `{policy}` | " + " | ".join(cells) + " |")
    return lines


def middle_and_worst(values: Sequence[float], digits: int, extreme: Callable[[Sequence[float]], float] = max) -> str:
    return f"{median(values):.{digits}f} ({extreme(values):.{digits}f})" if values else "–"


def growth_lines(record: dict[str, Any]) -> list[str]:
    if not record["growth"]:
        return ["Not measured."]
    lines = [
        "| workload | servers | tasks | moved | work ÷ mean | plan ms | tables ms | tables of one rank ms "
        "| µs a server |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in by_name(record["growth"]).items():
        for r in rows:
            total_us = (r["plan_ms"] + r["tables_ms"]) * 1e3
            lines.append(
                f"| {name} | {r['servers']:,} | {r['tasks']:,} | {r['moved_tasks']:,} | {r['work_max_over_mean']:.4f} "
                f"| {r['plan_ms']:.1f} | {r['tables_ms']:.1f} | {r['tables_of_one_rank_ms']:.2f} "
                f"| {total_us / r['servers']:.0f} |"
            )
    return lines
