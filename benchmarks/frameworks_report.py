"""The page docs/results/frameworks.md and its picture: parts between markers are made anew, the prose stays."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from steelyard.domain.units import format_time
from steelyard.plots.style import BLUE, GREEN, INK, MUTED, ORANGE, PALE, SKY, VERMILION, horizontal_grid, picture

Row = dict[str, Any]
BASE = "packed"
LABELS = {
    "stock": "stock, `sdpa` with a mask",
    BASE: "stock, our kernel",
    "plain": "**Steelyard**",
    "ping_pong": "**Steelyard, ping-pong**",
    "head_tail": "torch all-gather, head–tail",
    "per_document": "torch all-gather, per document",
    "ptrr": "torch all-gather, by processing time",
}
SHORT = {
    "stock": "stock\nsdpa",
    BASE: "stock\nour kernel",
    "plain": "Steelyard",
    "ping_pong": "Steelyard\nping-pong",
    "head_tail": "all-gather\nhead–tail",
    "per_document": "all-gather\nper doc.",
    "ptrr": "all-gather\nby time",
}
COLORS = {
    "stock": PALE, BASE: MUTED, "plain": BLUE, "ping_pong": SKY, "head_tail": ORANGE, "per_document": GREEN,
    "ptrr": VERMILION,
}  # fmt: skip
PARTS = ("machine", "speed", "same", "memory")
MIB = 2**20


def renew_page(path: Path, record: Row) -> None:
    """Write every generated part of the page; a page that does not exist is begun with an outline."""
    outline = ["# Transformers: measured", ""]
    for name in PARTS:
        outline += [f"<!-- frameworks:{name}:begin -->", f"<!-- frameworks:{name}:end -->", ""]
    text = path.read_text(encoding="utf-8") if path.exists() else "\n".join(outline)
    for name, lines in zip(
        PARTS, (machine_lines(record), speed_lines(record), same_lines(record), memory_lines(record)), strict=True
    ):
        pattern = re.compile(rf"(<!-- frameworks:{name}:begin -->\n).*?(<!-- frameworks:{name}:end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{path} lacks the markers frameworks:{name}:begin and frameworks:{name}:end")
        content = "\n".join(lines)
        text = pattern.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)
    path.write_text(text, encoding="utf-8")


def summary_lines(record: Row) -> list[str]:
    """What to print at the end of a run."""
    return [*machine_lines(record), "", *speed_lines(record), "", *same_lines(record), "", *memory_lines(record)]


def machine_lines(record: Row) -> list[str]:
    if "speed_run" not in record:
        return ["Not measured."]
    run = record["speed_run"]
    model = ", ".join(f"{name} {value}" for name, value in record["model"].items())
    return [
        f"Commit {run['commit']}. {run['machine']}; a shared virtual machine. {record['tokens_per_rank']:,} "
        f"tokens on each of two ranks, one thread each, gloo, fp32; Llama of {model}. {run['rounds']} rounds; the "
        f"run took {format_time(run['took_s'])}."
    ]


# --- speed ------------------------------------------------------------------------------------------------------------


def steps_of(record: Row, skew: str, variant: str) -> list[Row]:
    rows = [r for r in record["steps"] if r["skew"] == skew and r["variant"] == variant]
    return sorted(rows, key=lambda r: r["round"])


def variants_of(record: Row) -> list[str]:
    return list(dict.fromkeys(r["variant"] for r in record["steps"]))


def tokens_per_s(record: Row, row: Row) -> float:
    return float(2 * record["tokens_per_rank"] / row["time_s"])


def ratios(record: Row, skew: str, variant: str) -> list[float]:
    """How much faster than the base, round by round; empty without a base."""
    base = steps_of(record, skew, BASE)
    return [b["time_s"] / v["time_s"] for b, v in zip(base, steps_of(record, skew, variant), strict=False)]


def predicted_ratio(record: Row, skew: str, variant: str) -> float | None:
    flops = {r["variant"]: r["flops_max"] for r in record["predicted"] if r["skew"] == skew}
    return flops[BASE] / flops[variant] if BASE in flops else None


def speed_lines(record: Row) -> list[str]:
    if not record.get("steps"):
        return ["Not measured."]
    lines = ["![Tokens per second of all variants](frameworks.png)"]
    for skew in record["skews"]:
        name = skew["skew"]
        longest = [max(lengths) for lengths in skew["lengths_by_rank"]]
        count = [len(lengths) for lengths in skew["lengths_by_rank"]]
        lines += [
            "",
            f"### {name.capitalize()}: {skew['text']}",
            "",
            f"{count[0]} and {count[1]} documents on the two ranks, the longest of {longest[0]:,} and {longest[1]:,} "
            "tokens.",
            "",
            "| variant | tokens/s | lowest – highest | ÷ stock, our kernel | lowest – highest | predicted | idle "
            "| predicted |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for variant in variants_of(record):
            rows = steps_of(record, name, variant)
            rates = [tokens_per_s(record, r) for r in rows]
            times = ratios(record, name, variant)
            expected = next(r for r in record["predicted"] if r["skew"] == name and r["variant"] == variant)
            ratio = predicted_ratio(record, name, variant)
            cells = [
                LABELS[variant],
                f"{median(rates):,.0f}",
                f"{min(rates):,.0f} – {max(rates):,.0f}",
                f"{median(times):.2f}" if times else "–",
                f"{min(times):.2f} – {max(times):.2f}" if times else "–",
                f"{ratio:.2f}" if ratio else "–",
                f"{100 * median(r['idle_share'] for r in rows):.0f} %",
                f"{100 * expected['idle_share']:.0f} %",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def same_lines(record: Row) -> list[str]:
    if not record.get("compared"):
        return ["Not measured."]
    lines = [
        "| variant | loss, relative difference | gradients, largest difference ÷ largest entry |",
        "|---|---:|---:|",
    ]
    for variant in dict.fromkeys(r["variant"] for r in record["compared"]):
        rows = [r for r in record["compared"] if r["variant"] == variant]
        loss, gradient = (max(r[key] for r in rows) for key in ("loss_rel_diff", "gradient_max_rel_diff"))
        lines.append(f"| {LABELS[variant]} | {loss:.0e} | {gradient:.0e} |")
    return lines


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_lines(record: Row) -> list[str]:
    if not record.get("memory"):
        return ["Not measured."]
    lines = [
        f"Commit {record['memory_run']['commit']}. MiB; peaks over the first three steps, all with the same documents.",
        "",
        "| documents | attention | rank | peak | over stock, our kernel | the plan states | arena holds |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for skew in dict.fromkeys(r["skew"] for r in record["memory"]):
        rows = {r["way"]: r["by_rank"] for r in record["memory"] if r["skew"] == skew}
        for way, by_rank in rows.items():
            label = LABELS[BASE] if way == BASE else LABELS["stock"] if way == "stock" else f"Steelyard, {way}"
            label = label.replace(", plain", "").replace("_", "-")
            for rank, own in enumerate(by_rank):
                over = own["peak_bytes"] - rows[BASE][rank]["peak_bytes"]
                cells = [skew, label, str(rank), f"{own['peak_bytes'] / MIB:.1f}"]
                cells += [f"{over / MIB:+.1f}" if way != BASE else "", *("" for _ in range(2))]
                if way not in ("stock", BASE):
                    cells[5:] = [f"{own['stated_bytes'] / MIB:.1f}", f"{own['arena_bytes'] / MIB:.1f}"]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


# --- picture ----------------------------------------------------------------------------------------------------------


def draw_picture(record: Row, path: Path) -> None:
    """Tokens per second of every variant, every round a dot, and the arithmetic's prediction as a line."""
    variants = [v for v in variants_of(record) if v in LABELS]
    note = (
        f"Two ranks with {record['tokens_per_rank']:,} tokens each. Bars: medians; dots: rounds; lines: what pairs and "
        f"tokens predict.\nPercentages: share of a step in which a rank waits. Commit {record['speed_run']['commit']}."
    )
    with picture(path, height_in=2.3 * len(record["skews"]) + 1.5, title=title_of(record), note=note) as figure:
        grid = figure.subplots(len(record["skews"]), 1, sharex=True, squeeze=False)
        for axes, skew in zip(grid[:, 0], record["skews"], strict=True):
            name = skew["skew"]
            rates = [[tokens_per_s(record, r) for r in steps_of(record, name, v)] for v in variants]
            middle = [median(r) for r in rates]
            x = np.arange(len(variants))
            axes.bar(x, middle, 0.66, color=[COLORS[v] for v in variants], linewidth=0)
            for place, (variant, own) in enumerate(zip(variants, rates, strict=True)):
                axes.plot([place] * len(own), own, "o", markersize=3, color=INK, alpha=0.55, markeredgewidth=0)
                ratio = predicted_ratio(record, name, variant)
                if ratio:
                    level = ratio * middle[variants.index(BASE)]
                    axes.plot([place - 0.4, place + 0.4], [level, level], color=INK, linewidth=1.2)
                idle = median(r["idle_share"] for r in steps_of(record, name, variant))
                axes.annotate(
                    f"{100 * idle:.0f} %", (place, 0), xytext=(0, 4), textcoords="offset points", ha="center",
                    fontsize=9.5, color=INK if variant in ("stock", "ping_pong", "head_tail") else "white",
                )  # fmt: skip
            axes.set_title(f"{name}: {skew['text']}", loc="left")
            axes.set_ylabel("tokens/s")
            axes.set_xticks(x, [SHORT[v] for v in variants])
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            horizontal_grid(axes)


def title_of(record: Row) -> str:
    first = record["skews"][0]["skew"]
    found = {v: ratios(record, first, v) for v in ("plain", "ping_pong")}
    best = max((median(times) for times in found.values() if times), default=None)
    if best is None or best < 1.05:
        return "Tokens per second of a Transformers model on two ranks"
    return f"Balanced attention trains a Transformers model {best:.2f}× as fast where one document is long"
