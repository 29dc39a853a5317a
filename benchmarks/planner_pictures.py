"""The pictures of docs/results/planner.md, from the record of `planner`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from planner_alternatives import curves, pareto
from planner_report import (
    BUSIEST_OVER_BOUND,
    BYTES_OVER_BOUND,
    BYTES_OVER_PUBLISHED,
    GOAL_TOLERANCE,
    by_name,
    by_workload,
    published_ratios,
)

from steelyard.plots.style import BLUE, GREEN, INK, MUTED, ORANGE, RULE, SKY, VERMILION, horizontal_grid, picture

Row = dict[str, Any]
TOLERANCE_COLORS = (BLUE, GREEN, ORANGE, VERMILION)
LABEL_GAP_DECADES = 0.34  # between numbers at the lines' ends
NAME_LINES = "stream, context, tokens a server, servers"
PUBLISHED_TOTAL_MS = {64: (170, 290), 512: (9_000, 11_000)}
"""Plan and tables of the published planner (arXiv 2510.18121, released code), as measured for the goals."""


def draw_pictures(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what was measured; returns the files."""
    drawn = []
    if record["growth"]:
        drawn.append(folder / "planner-growth.png")
        growth_picture(drawn[-1], record)
    if any(r["lower_bound_bytes"] for r in record["workloads"]):
        drawn.append(folder / "planner-bytes.png")
        bound_picture(drawn[-1], record, "bytes_total", "lower_bound_bytes", "Bytes of a plan over the least possible")
        drawn.append(folder / "planner-busiest.png")
        bound_picture(
            drawn[-1],
            record,
            "busiest_bytes",
            "busiest_lower_bound_bytes",
            "Bytes of the busiest server over its bound",
        )
    if record.get("flattening"):
        drawn.append(folder / "planner-flattening.png")
        flattening_picture(drawn[-1], record)
    if record["published"] and record["workloads"]:
        drawn.append(folder / "planner-published.png")
        published_picture(drawn[-1], record)
    return drawn


def growth_picture(path: Path, record: dict[str, Any]) -> None:
    """Time of plan and tables over the number of servers, both axes logarithmic."""
    note = (
        f"Generated workloads, 131,072 tokens a server, tolerance {record['growth_tolerance']:g}. "
        f"One core; commit {record['commit']}."
    )
    with picture(path, height_in=4.6, title=growth_title(record), note=note) as figure:
        axes = figure.subplots()
        servers: list[int] = []
        ends: list[tuple[float, str]] = []
        for (name, rows), color in zip(by_name(record["growth"]).items(), (BLUE, ORANGE, GREEN), strict=False):
            servers = [r["servers"] for r in rows]
            total = [r["plan_ms"] + r["tables_ms"] for r in rows]
            axes.plot(servers, total, color=color, marker="o", markersize=5, label=f"{name}: plan and all tables")
            axes.plot(servers, [r["plan_ms"] for r in rows], color=color, linestyle=(0, (2, 2)), label=f"{name}: plan")
            ends.append((total[-1], color))
        grown = [n * np.log2(n) for n in servers]
        first = by_name(record["growth"])
        start = min(rows[0]["plan_ms"] + rows[0]["tables_ms"] for rows in first.values())
        axes.plot(servers, [start * g / grown[0] for g in grown], color=MUTED, linewidth=1, label="n log n")
        for n, (low, high) in PUBLISHED_TOTAL_MS.items():
            if servers[0] <= n <= servers[-1]:
                label = "published planner" if n == 64 else None
                axes.plot([n, n], [low, high], color=VERMILION, linewidth=5, solid_capstyle="round", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(servers[0] / 1.2, servers[-1] * 1.9)
        heights = _apart([np.log10(time_ms) for time_ms, _ in ends], LABEL_GAP_DECADES)
        for (time_ms, color), height in zip(ends, heights, strict=True):
            axes.annotate(
                f"{time_ms:,.0f} ms", (servers[-1], 10**height), xytext=(9, 0), textcoords="offset points",
                va="center", color=color,
            )  # fmt: skip
        axes.xaxis.set_major_locator(FixedLocator(servers))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g} ms"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("servers")
        horizontal_grid(axes)
        figure.legend(loc="outside lower center", ncols=3, labelcolor=MUTED)


def _apart(heights: list[float], gap: float) -> list[float]:
    """The same heights, moved as little as possible so that all are `gap` apart."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    # Least squares under x[i + 1] >= x[i] + gap: neighbours that would touch become one block around their mean.
    blocks: list[list[int]] = []
    for i in order:
        blocks.append([i])
        while len(blocks) > 1 and _low(blocks[-1], heights, gap) - _high(blocks[-2], heights, gap) < gap:
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    moved = list(heights)
    for block in blocks:
        for place, i in enumerate(block):
            moved[i] = _low(block, heights, gap) + place * gap
    return moved


def _low(block: list[int], heights: list[float], gap: float) -> float:
    """Where the lowest of a block comes to lie."""
    return float(np.mean([heights[i] for i in block])) - gap * (len(block) - 1) / 2


def _high(block: list[int], heights: list[float], gap: float) -> float:
    return _low(block, heights, gap) + gap * (len(block) - 1)


def growth_title(record: dict[str, Any]) -> str:
    largest = max(record["growth"], key=lambda r: (r["servers"], r["plan_ms"] + r["tables_ms"]))
    return (
        f"{largest['servers']:,} servers are planned, with all tables, in "
        f"{(largest['plan_ms'] + largest['tables_ms']) / 1e3:.2f} s"
    )


def bound_picture(path: Path, record: dict[str, Any], value: str, bound: str, what: str) -> None:
    """Value ÷ bound of every batch, a column a workload, a colour a tolerance; the goals as steps."""
    rows = [r for r in record["workloads"] if r[bound]]
    names = list(by_name(rows))
    worst = max(r[value] / r[bound] for r in rows)
    title = f"{what}: at most {worst:.3f} in {len(rows)} plans"
    note = f"Workloads in which no document spans servers; each dot is a batch. Commit {record['commit']}."
    with picture(path, height_in=4.2, title=title, note=note) as figure:
        axes = figure.subplots()
        tolerances = sorted({r["tolerance"] for r in rows}, reverse=True)
        for i, (tolerance, color) in enumerate(zip(tolerances, TOLERANCE_COLORS, strict=False)):
            mine = [r for r in rows if r["tolerance"] == tolerance]
            shift = (i - (len(tolerances) - 1) / 2) * 0.2
            axes.plot(
                [names.index(r["workload"]) + shift for r in mine], [r[value] / r[bound] for r in mine],
                "o", markersize=6, color=color, alpha=0.75, markeredgewidth=0, label=f"tolerance {tolerance:g}",
            )  # fmt: skip
        _draw_goals(axes, names, rows, value)
        axes.axhline(1.0, color=INK, linewidth=1.1)
        axes.set_ylim(bottom=1 - 0.05 * (max(worst, 1.15) - 1))
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.xaxis.set_major_locator(FixedLocator(list(range(len(names)))))
        axes.set_xticklabels([short_name(n) for n in names], fontsize=9)
        axes.set_xlabel(NAME_LINES)
        axes.set_ylabel("÷ lower bound")
        horizontal_grid(axes)
        figure.legend(loc="outside lower center", ncols=4, labelcolor=MUTED)


def flattening_picture(path: Path, record: dict[str, Any]) -> None:
    """Total against busiest, each over its bound: the free plan, and those under caps that no other beats in both."""
    colors = (BLUE, SKY, GREEN, ORANGE, VERMILION, INK)
    found = {batch: [points[0], *pareto(points)] for batch, points in curves(record["flattening"]).items()}
    dearest = max(best[-1]["total_over_bound"] - best[0]["total_over_bound"] for best in found.values())
    gained = max(best[0]["busiest_over_bound"] - best[-1]["busiest_over_bound"] for best in found.values())
    title = f"8 servers: {dearest:.0%} more bytes make the busiest server at most {gained:.0%} lighter"
    note = (
        f"Tolerance {GOAL_TOLERANCE:g}; a line is a batch. Filled: as planned; open: under ever lower caps on what a "
        "server may receive,\nas far as they leave the balance alone and no other plan is better in both. "
        f"Commit {record['commit']}."
    )
    with picture(path, height_in=4.6, title=title, note=note) as figure:
        axes = figure.subplots()
        for ((name, batch), best), color in zip(found.items(), colors, strict=False):
            x, y = ([r[key] for r in best] for key in ("total_over_bound", "busiest_over_bound"))
            label = f"{name.split('_')[0]} {name.split('_')[1].removeprefix('ctx')}, batch {batch}"
            axes.plot(x, y, color=color, linewidth=1.4, marker="o", markersize=5, markerfacecolor="white", label=label)
            axes.plot(x[0], y[0], "o", color=color, markersize=8)
        axes.set_xlim(left=0.995)
        axes.set_ylim(bottom=0.98)
        axes.set_xlabel("total bytes ÷ bound")
        axes.set_ylabel("busiest server ÷ bound")
        horizontal_grid(axes)
        figure.legend(loc="outside lower center", ncols=3, labelcolor=MUTED)


def _draw_goals(axes: Axes, names: list[str], rows: list[Row], value: str) -> None:
    servers = {r["workload"]: r["servers"] for r in rows}
    label: str | None = f"goal at tolerance {GOAL_TOLERANCE:g}"
    for i, name in enumerate(names):
        goal = (BYTES_OVER_BOUND if value == "bytes_total" else BUSIEST_OVER_BOUND).get(servers[name])
        if goal is not None:
            axes.plot([i - 0.4, i + 0.4], [goal, goal], color=VERMILION, linewidth=1.6, label=label)
            label = None


def published_picture(path: Path, record: dict[str, Any]) -> None:
    """Above: work of the busiest server, ours and published; below: our bytes over the published planner's."""
    rows = by_workload(record["workloads"], GOAL_TOLERANCE)
    published = {r["workload"]: r for r in record["published"] if r["tolerance"] == GOAL_TOLERANCE}
    names = [n for n in rows if n in published]
    ratios = published_ratios(record, GOAL_TOLERANCE)
    ours = [max(r["work_max_over_mean"] for r in rows[n]) for n in names]
    theirs = [published[n]["work_max_over_mean_worst_batch"] for n in names]
    title = (
        f"Busiest server at most {max(ours):.2f}× the mean (published {max(theirs):.2f}×), "
        f"for {min(ratios.values()):.2f} to {max(ratios.values()):.2f} of its bytes"
    )
    note = (
        f"Tolerance {GOAL_TOLERANCE:g}, every workload file; the worst batch above, the mean of batches below. "
        f"Commit {record['commit']}."
    )
    with picture(path, height_in=5.6, title=title, note=note) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        x = np.arange(len(names))
        above.vlines(x, ours, theirs, color=RULE, linewidth=2)
        above.plot(x, theirs, "o", color=VERMILION, zorder=3, label="published planner")
        above.plot(x, ours, "o", color=BLUE, label="balanced")
        above.axhline(1 + GOAL_TOLERANCE, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), label="promised")
        excess = max(*theirs, *ours) - 1
        above.set_ylim(1 - 0.06 * excess, 1 + 1.1 * excess)
        above.set_ylabel("work ÷ mean")
        spans = [any(r["lower_bound_bytes"] is None for r in rows[n]) for n in names]
        below.bar(x, [ratios[n] for n in names], 0.7, color=[BLUE if s else GREEN for s in spans], linewidth=0)
        chosen = published_ratios(record, GOAL_TOLERANCE, "chosen")
        below.plot(
            [names.index(n) for n in chosen if n in names], [r for n, r in chosen.items() if n in names], "D",
            color=ORANGE, markersize=5, label="balanced, layout chosen",
        )  # fmt: skip
        below.axhline(1.0, color=INK, linewidth=1.1)
        below.axhline(BYTES_OVER_PUBLISHED, color=VERMILION, linewidth=1.4, linestyle=(0, (4, 3)))
        for i, name in enumerate(names):
            below.annotate(
                f"{ratios[name]:.2f}", (i, ratios[name]), xytext=(0, 2), textcoords="offset points", ha="center",
                va="bottom", fontsize=7.5, color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4}, zorder=4,
            )  # fmt: skip
        below.set_ylim(0, max(1.05, *ratios.values()) * 1.12)
        below.set_ylabel("bytes ÷ published")
        below.set_title(
            f"blue: documents span servers (goal {BYTES_OVER_PUBLISHED:.2f}); green: none does", loc="left", fontsize=10
        )
        below.xaxis.set_major_locator(FixedLocator(list(range(len(names)))))
        below.set_xticklabels([short_name(n) for n in names], fontsize=8)
        below.set_xlabel(NAME_LINES)
        below.set_xlim(-0.6, len(names) - 0.4)
        for axes in (above, below):
            horizontal_grid(axes)
        figure.legend(loc="outside lower center", ncols=4, labelcolor=MUTED)
        figure.align_ylabels()


def short_name(name: str) -> str:
    """`pretrain_ctx128K_T64K_n64` on four short lines: stream, context, tokens a server, servers."""
    for long, short in (("pretrain", "pre"), ("prolong", "pro"), ("_ctx", "\n"), ("_T", "\n"), ("_n", "\n")):
        name = name.replace(long, short)
    return name
