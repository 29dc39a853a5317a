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
from planner_alternatives import flattening_lines, forwarding_lines, transfer_lines

from steelyard.domain.units import format_time

Row = dict[str, Any]
GOAL_TOLERANCE = 0.02
CHOSEN = ", layout chosen"  # ends the name of a generated workload whose layout is chosen too
NAMED = 4  # workloads that miss a goal and are named
GB = 1e9
OUTLINE = """\
# The planner: measured

<!-- planner:machine:begin -->
<!-- planner:machine:end -->

## Layout chosen

<!-- planner:chosen:begin -->
<!-- planner:chosen:end -->

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

## Alternatives

<!-- planner:flattening:begin -->
<!-- planner:flattening:end -->

<!-- planner:forwarding:begin -->
<!-- planner:forwarding:end -->

<!-- planner:transfers:begin -->
<!-- planner:transfers:end -->

## Gap to the best plan

<!-- planner:gap:begin -->
<!-- planner:gap:end -->
"""


def renew_page(path: Path, record: dict[str, Any]) -> None:
    """Write every generated part of the page; a page that does not exist is begun with an outline."""
    text = path.read_text(encoding="utf-8") if path.exists() else OUTLINE
    parts = {
        "machine": machine_lines,
        "chosen": chosen_lines,
        "goals": goal_lines,
        "workloads": workload_lines,
        "policies": policy_lines,
        "growth": growth_lines,
        "flattening": flattening_lines,
        "forwarding": forwarding_lines,
        "transfers": transfer_lines,
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
    """A limit on the worst of some values, each with its workload; none where that part was not measured."""

    what: str
    limit: float
    measured: Sequence[tuple[str, float]]
    unit: str = ""

    def line(self) -> str:
        if not self.measured:
            return f"| {self.what} | ≤ {self.limit:g}{self.unit} | not measured | | |"
        values = [value for _, value in self.measured]
        worst, middle = max(values), median(values)
        digits = 1 if self.unit else 3
        state = self._state()
        return (
            f"| {self.what} | ≤ {self.limit:g}{self.unit} | {middle:.{digits}f}{self.unit} | "
            f"{worst:.{digits}f}{self.unit} | {state} |"
        )

    def _state(self) -> str:
        """Whether it holds; if not, how often it is missed, and by which workloads, worst first."""
        missed = sorted((value, name) for name, value in self.measured if misses(value, self.limit))[::-1]
        if not missed:
            return "holds"
        names = list(dict.fromkeys(name for _, name in missed))
        named = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        return f"missed {len(missed)} times in {len(self.measured)}: {named}"


def misses(value: float, limit: float) -> bool:
    return value > limit + 1e-9


# Limits by number of servers; no entry: no goal.
BYTES_OVER_BOUND = {8: 1.15, 64: 1.08, 512: 1.08}
BUSIEST_OVER_BOUND = {64: 1.15, 512: 1.15}
TOTAL_MS = {64: 10.0, 512: 60.0}
BYTES_OVER_PUBLISHED = 0.80
EXPONENT = 1.2


def goals(record: dict[str, Any]) -> list[Goal]:
    rows = [r for r in record["workloads"] if r["tolerance"] == GOAL_TOLERANCE]
    chosen = by_workload(record["chosen"], GOAL_TOLERANCE)
    all_chosen = [r for c in chosen.values() for r in c]
    spanning = [pair for pair in published_ratios(record, GOAL_TOLERANCE).items() if pair[0] in chosen]
    bound = [r for r in rows if r["lower_bound_bytes"]]

    def each(rows: Sequence[Row], value: Callable[[Row], float], *servers: int) -> list[tuple[str, float]]:
        return [(r["workload"], value(r)) for r in rows if not servers or r["servers"] in servers]

    def over_bound(r: Row) -> float:
        return float(r["bytes_total"] / r["lower_bound_bytes"])

    def busiest_over_bound(r: Row) -> float:
        return float(r["busiest_bytes"] / r["busiest_lower_bound_bytes"])

    with_busiest = [r for r in bound if r["busiest_lower_bound_bytes"]]
    chosen_ratios = list(published_ratios(record, GOAL_TOLERANCE, "chosen").items())
    found = [
        Goal(
            "work of the busiest server ÷ mean, each batch", 1 + GOAL_TOLERANCE,
            each(rows + all_chosen, lambda r: r["work_max_over_mean"]),
        ),
        Goal("bytes ÷ bound, 64 servers and more, each batch", BYTES_OVER_BOUND[64], each(bound, over_bound, 64, 512)),
        Goal("bytes ÷ bound, 8 servers, each batch", BYTES_OVER_BOUND[8], each(bound, over_bound, 8)),
        Goal("bytes ÷ published, documents span servers, each workload", BYTES_OVER_PUBLISHED, spanning),
        Goal("the same, layout chosen too", BYTES_OVER_PUBLISHED, chosen_ratios),
        Goal(
            "busiest server ÷ bound, 64 servers and more, each batch", BUSIEST_OVER_BOUND[64],
            each(with_busiest, busiest_over_bound, 64, 512),
        ),
    ]  # fmt: skip
    for servers, limit_ms in TOTAL_MS.items():
        what = f"plan and all tables, {servers} servers, each batch"
        found.append(Goal(what, limit_ms, each(rows, total_ms, servers), " ms"))
        found.append(Goal("the same, layout chosen too", limit_ms, each(all_chosen, total_ms, servers), " ms"))
    what = "growth of that time from 512 servers on: exponent"
    return [*found, Goal(what, EXPONENT, list(growth_exponents(record).items()))]


def total_ms(r: Row) -> float:
    return float(r["plan_ms"] + r["tables_ms"])


def published_ratios(record: dict[str, Any], tolerance: float, part: str = "workloads") -> dict[str, float]:
    """Mean bytes of our batches over the published mean, by workload."""
    published = {r["workload"]: r["gigabytes"] for r in record["published"] if r["tolerance"] == tolerance}
    return {
        name: mean(r["bytes_total"] for r in rows) / GB / published[name]
        for name, rows in by_workload(record[part], tolerance).items()
        if name in published
    }


def growth_exponents(record: dict[str, Any]) -> dict[str, float]:
    """Slope of log(time) over log(servers) from 512 servers on, for each kind of workload. n log n has about 1.14."""
    slopes = {}
    for name, rows in by_name(record["growth"]).items():
        large = [r for r in rows if r["servers"] >= 512]
        if len(large) > 1:
            servers, times = [r["servers"] for r in large], [total_ms(r) for r in large]
            slopes[name] = float(np.polyfit(np.log(servers), np.log(times), 1)[0])
    return slopes


def goal_lines(record: dict[str, Any]) -> list[str]:
    return [
        f"| at tolerance {GOAL_TOLERANCE:g} | goal | median | worst | |",
        "|---|---|---|---|---|",
        *(goal.line() for goal in goals(record)),
    ]


def chosen_lines(record: dict[str, Any]) -> list[str]:
    """What choosing the layout brings and takes beside planning in packing order, batch by batch."""
    given = {(r["workload"], r["batch"]): r for r in record["workloads"] if r["tolerance"] == GOAL_TOLERANCE}
    chosen = [r for r in record["chosen"] if r["tolerance"] == GOAL_TOLERANCE and (r["workload"], r["batch"]) in given]
    if not chosen:
        return ["Not measured."]

    def ratios(key: str) -> list[tuple[float, str]]:
        return [(r[key] / given[r["workload"], r["batch"]][key], r["workload"]) for r in chosen]

    saved = [1 - ratio for ratio, _ in ratios("bytes_total")]
    busiest = ratios("busiest_bytes")
    heavier = [(ratio, name) for ratio, name in busiest if ratio > 1]
    lines = [
        f"- Choosing the layout saves {min(saved):.0%} to {max(saved):.0%} of a batch's bytes, {median(saved):.0%} in "
        f"the median of {len(chosen)} batches at tolerance {GOAL_TOLERANCE:g}. The busiest server is lighter in "
        f"{len(busiest) - len(heavier)} of them"
    ]
    if heavier:
        most, least = max(heavier)[0] - 1, min(heavier)[0] - 1
        where = ", ".join(dict.fromkeys(name for _, name in sorted(heavier)[::-1]))
        lines[0] += f", and {least:.0%} to {most:.0%} heavier in {len(heavier)} ({where})"
    lines[0] += "."
    late = []
    for servers, limit_ms in TOTAL_MS.items():
        times = [total_ms(r) for r in chosen if r["servers"] == servers]
        missed = sum(misses(time_ms, limit_ms) for time_ms in times)
        if missed:
            late.append(f"{missed} of {len(times)} at {servers} above {limit_ms:g} ms (worst {max(times):.1f})")
    if late:
        share = median(r["tables_ms"] / total_ms(r) for r in chosen if r["servers"] in TOTAL_MS)
        lines.append(
            f"- *Times with the layout chosen too*: {' and '.join(late)}. Of that, {share:.0%} in the median is the "
            "tables of all servers, which no rank of a training run builds."
        )
    return lines


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
            "| workload | work ÷ mean | published | GB | ÷ bound | ÷ published | layout chosen | busiest GB "
            "| layout chosen | busiest ÷ bound | out, in ÷ mean | moved | plan ms | tables ms | layout chosen "
            "| published plan ms |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name, rows in by_workload(record["workloads"], tolerance).items():
            theirs = published.get(name, {})
            servers, laid = rows[0]["servers"], chosen.get(name)
            # Goals are for one tolerance; only balance is promised at each.
            goal = tolerance == GOAL_TOLERANCE
            most_ms = TOTAL_MS.get(servers) if goal else None
            limit = BYTES_OVER_PUBLISHED if goal and laid else None
            late = most_ms is not None and any(misses(total_ms(r), most_ms) for r in rows)
            late_laid = most_ms is not None and laid is not None and any(misses(total_ms(r), most_ms) for r in laid)
            cells = [
                name,
                marked(worst([*rows, *(laid or [])], "work_max_over_mean"), 4, 1 + tolerance),
                f"{theirs.get('work_max_over_mean_worst_batch', '–')}",
                f"{mean(r['bytes_total'] for r in rows) / GB:.2f}",
                worst_ratio(rows, "bytes_total", "lower_bound_bytes", BYTES_OVER_BOUND.get(servers) if goal else None)
                if laid is None
                else worst_ratio(rows, "bytes_total", "spanning_lower_bound_bytes", sign="\\*"),
                marked(ratios.get(name), 3, limit),
                marked(chosen_ratios.get(name), 3, limit),
                f"{worst(rows, 'busiest_bytes') / GB:.2f}",
                marked(worst(laid, "busiest_bytes") / GB if laid else None, 2),
                worst_ratio(
                    rows, "busiest_bytes", "busiest_lower_bound_bytes",
                    BUSIEST_OVER_BOUND.get(servers) if goal else None,
                ),
                f"{worst(rows, 'bytes_out_max_over_mean'):.1f}, {worst(rows, 'bytes_in_max_over_mean'):.1f}",
                f"{worst(rows, 'moved_tasks')}",
                bold(f"{worst(rows, 'plan_ms'):.1f}", late),
                bold(f"{worst(rows, 'tables_ms'):.1f}", late),
                bold(f"{worst(laid, 'plan_ms'):.1f} + {worst(laid, 'tables_ms'):.1f}", late_laid) if laid else "–",
                f"{theirs.get('plan_ms', '–')}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines or ["Not measured."]


def bold(text: str, missed: bool) -> str:
    """In bold where a goal is missed."""
    return f"**{text}**" if missed else text


def marked(value: float | None, digits: int, limit: float | None = None) -> str:
    """A number, in bold if it misses its goal; a dash if there is none."""
    if value is None:
        return "–"
    return bold(f"{value:.{digits}f}", limit is not None and misses(value, limit))


def worst(rows: Sequence[Row], key: str) -> float:
    return max(r[key] for r in rows)


def worst_ratio(rows: Sequence[Row], value: str, bound: str, limit: float | None = None, sign: str = "") -> str:
    """Largest value ÷ bound of the batches that have one."""
    ratios = [r[value] / r[bound] for r in rows if r.get(bound)]
    return marked(max(ratios), 3, limit) + sign if ratios else "–"


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
