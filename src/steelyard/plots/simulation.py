"""Pictures of the simulator: memory with its band, the split of a step, predicted against measured, configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from steelyard.cost.peak_memory import MemoryEstimate
from steelyard.domain.units import format_time
from steelyard.errors import UsageError
from steelyard.plots.style import (
    ATTENTION,
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    RULE,
    SKY,
    TOKEN_WISE,
    VERMILION,
    horizontal_grid,
    picture,
)
from steelyard.simulate.answer import CAUSES
from steelyard.simulate.step import StepEstimate
from steelyard.simulate.sweep import Outcome
from steelyard.simulate.validate import Comparison

_SPLIT = {
    "token_wise": TOKEN_WISE, "attention": ATTENTION, "head": SKY, "tensor transfers": "#7FC8A9", "exchange": GREEN,
    "sharded parameters": "#3C9A7A", "imbalance": VERMILION, "pipeline bubble": "#E8A07A",
    "gradient reduction": "#1B6F55", "optimizer": ORANGE, "overhead": "#9AA3AD",
}  # fmt: skip
_MEMORY = ("#0072B2", "#3C8FC4", "#7FB5DA", "#56B4E9", "#E69F00", "#F0C05A", "#009E73", "#9AA3AD")


def memory_stack(path: str | Path, memory: MemoryEstimate, *, title: str | None = None, note: str = "") -> None:
    """What fills the fullest device, with the band of fragmentation and the device's capacity."""
    gib = 2**30
    parts = {k: v / gib for k, v in memory.parts().items() if v > 0}
    heading = title or f"{memory.verdict.capitalize()}: {memory.expected / gib:.0f} of {memory.capacity / gib:.0f} GiB"
    with picture(path, height_in=2.9, title=heading, note=note) as figure:
        axes = figure.subplots()
        left = 0.0
        for (name, size), color in zip(parts.items(), _MEMORY, strict=False):
            axes.barh(0, size, left=left, height=0.5, color=color, linewidth=0, label=f"{name} {size:.1f}")
            left += size
        axes.barh(0, memory.high / gib - left, left=left, height=0.5, color=PALE, linewidth=0, hatch="///",
                  edgecolor=MUTED, label="fragmentation (band)")  # fmt: skip
        axes.plot([memory.low / gib, memory.high / gib], [0.34, 0.34], color=INK, linewidth=1.5, marker="|")
        axes.axvline(memory.capacity / gib, color=VERMILION, linewidth=1.4, linestyle=(0, (4, 3)))
        axes.set_yticks([])
        axes.set_ylim(-0.45, 0.5)
        axes.set_xlim(0, max(memory.capacity, memory.high) / gib * 1.03)
        axes.set_xlabel("GiB on the fullest device (dashed: its capacity)")
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside lower center", ncols=4, labelcolor=MUTED)


def step_split(path: str | Path, estimates: Mapping[str, StepEstimate], *, note: str = "") -> None:
    """Where the time of a step goes, one bar per policy or configuration, in seconds."""
    if not estimates:
        raise UsageError("step split: no estimate; expected at least one")
    ordered = sorted(estimates.items(), key=lambda item: item[1].step_time_s)
    fastest, slowest = ordered[0], ordered[-1]
    comparable = min(e.pairs_kept for e in estimates.values()) > 0.98 * max(e.pairs_kept for e in estimates.values())
    if len(ordered) == 1:
        title = f"A step takes {format_time(fastest[1].step_time_s)}"
    elif not comparable:
        title = "Where the time of a step goes; policies that cut documents have less to compute"
    else:
        ratio = slowest[1].step_time_s / fastest[1].step_time_s
        title = f"{fastest[0].capitalize()} is fastest: {ratio:.2f}× the speed of {slowest[0]}"
    shown = [n for n in _SPLIT if any(e.shares[n] >= 0.002 for e in estimates.values())]
    legend_in = 0.24 * ((len(shown) + 1) // 2)
    with picture(path, height_in=1.5 + legend_in + 0.5 * len(estimates), title=title, note=note) as figure:
        axes = figure.subplots()
        for lane, (_, estimate) in enumerate(estimates.items()):
            left = 0.0
            for name in shown:
                color = _SPLIT[name]
                width = estimate.shares[name] * estimate.step_time_s
                axes.barh(lane, width, left=left, height=0.62, color=color, linewidth=0,
                          label=CAUSES[name] if lane == 0 else None)  # fmt: skip
                left += width
            low, high = estimate.band_s
            axes.plot([low, high], [lane, lane], color=INK, linewidth=1.4, marker="|")
            axes.annotate(format_time(estimate.step_time_s), (high, lane), xytext=(6, 0), textcoords="offset points",
                          va="center", color=INK, fontweight="bold")  # fmt: skip
        axes.set_yticks(range(len(estimates)))
        axes.set_yticklabels([_with_pairs(name, e) for name, e in estimates.items()])
        axes.set_ylim(len(estimates) - 0.4, -0.6)
        axes.set_xlim(0, max(e.band_s[1] for e in estimates.values()) * 1.12)
        axes.set_xlabel("seconds per step (line: band of the estimate)")
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, labelcolor=MUTED)


def _with_pairs(name: str, estimate: StepEstimate) -> str:
    """A bar's name; with the share of the attention work that is left where documents are cut."""
    return name if estimate.pairs_kept > 0.995 else f"{name}\n{estimate.pairs_kept:.0%} of the pairs"


def predicted_against_measured(path: str | Path, comparisons: Sequence[Comparison], *, note: str = "") -> None:
    """Every compared step time, and its error below: fitted rows hollow, held-out ones filled."""
    times = [c for c in comparisons if c.quantity == "time" and not c.source.startswith("kernel")]
    if not times:
        raise UsageError("predicted against measured: nothing was compared")
    held = [c for c in times if c.role == "held_out"]
    mean = 100 * float(np.mean([abs(c.error) for c in held or times]))
    title = f"{'Held-out step' if held else 'Step'} times are predicted within {mean:.0f} % on average"
    note = note or "hollow: rows that constants were fitted on; filled: rows held out; grey: within 10 %"
    with picture(path, width_in=7.5, height_in=8.2, title=title, note=note) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.3, 1])
        limits = [min(min(c.measured, c.predicted) for c in times), max(max(c.measured, c.predicted) for c in times)]
        grid = np.array(limits) * [0.8, 1.25]
        above.fill_between(grid, grid * 0.9, grid * 1.1, color=RULE, linewidth=0)
        above.plot(grid, grid, color=INK, linewidth=0.8)
        below.fill_between(grid, [-10, -10], [10, 10], color=RULE, linewidth=0)
        below.axhline(0, color=INK, linewidth=0.8)
        for source, color in zip(sorted({c.source for c in times}), _SOURCE_COLORS, strict=False):
            for role, face in (("fitted", "none"), ("held_out", color)):
                chosen = [c for c in times if c.source == source and c.role == role]
                measured, thin = [c.measured for c in chosen], 0.5 if len(chosen) > 200 else 0.9
                style = {"s": 13, "facecolors": face, "edgecolors": color, "linewidths": 0.7, "alpha": thin}
                above.scatter(measured, [c.predicted for c in chosen], **style)
                below.scatter(measured, [min(100 * c.error, _LARGEST_ERROR) for c in chosen], **style)
            above.scatter([], [], s=24, color=color, label=source)
        above.set_yscale("log")
        above.set_ylim(*grid)
        above.set_ylabel("predicted, seconds per step")
        below.set_xscale("log")
        below.set_xlim(*grid)
        worst = max(20.0, min(_LARGEST_ERROR, 100 * max(abs(c.error) for c in times)))
        below.set_ylim(-1.08 * worst, 1.08 * worst)
        below.set_ylabel("error, %")
        below.set_xlabel("measured, seconds per step")
        for axis in (above.xaxis, above.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        figure.legend(loc="outside lower center", ncols=3, labelcolor=MUTED, fontsize=8.5)


_LARGEST_ERROR = 80.0
_SOURCE_COLORS = (
    BLUE, ORANGE, GREEN, VERMILION, SKY, "#CC79A7", "#B8A800", INK, "#7F5AA2", "#8C6D31", "#3C9A7A", MUTED, "#C04080",
    "#4060C0",
)  # fmt: skip


_POLICY_COLORS = {"packed": MUTED, "wlb": ORANGE, "per_document_cp": SKY, "balanced": BLUE}
_REASONS_SHOWN = 6


def configuration_map(
    path: str | Path, outcomes: Sequence[Outcome], *, refusals: Mapping[str, int] | None = None, note: str = ""
) -> None:
    """Every tried configuration: speed against memory; what does not fit is crossed out. Below it, why others were
    refused.

    Args:
        outcomes: of a search, the best first.
        refusals: reasons with the number of configurations, most frequent first.
    """
    tried = [o for o in outcomes if o.step_time_s > 0]
    if not tried:
        raise UsageError("map of configurations: none could be estimated")
    fit = [o for o in tried if not o.refused]
    tight = sum(o.verdict == "tight" for o in fit)
    title = f"{len(fit):,} of {len(outcomes):,} configurations fit" + (f", {tight:,} of them tightly" if tight else "")
    if fit:
        title += f"; the best makes {fit[0].tokens_per_s_per_device:,.0f} tokens/s per device"
    reasons = list((refusals or {}).items())
    if len(reasons) > _REASONS_SHOWN:
        rest = sum(number for _, number in reasons[_REASONS_SHOWN - 1 :])
        reasons = [*reasons[: _REASONS_SHOWN - 1], ("other reasons", rest)]
    below_in = 0.7 + 0.3 * len(reasons) if reasons else 0.0
    with picture(path, height_in=4.8 + below_in, title=title, note=note) as figure:
        rows = figure.subplots(2, 1, height_ratios=[3.8, below_in], squeeze=False) if reasons else [[figure.subplots()]]
        _draw_map(rows[0][0], tried)
        if reasons:
            _draw_reasons(rows[1][0], reasons)
        handles = [
            Line2D([], [], color=color, marker="o", linestyle="", markersize=5, label=policy)
            for policy, color in _POLICY_COLORS.items()
            if any(o.scenario.policy == policy for o in tried)
        ]
        if len(fit) < len(tried):
            handles.append(Line2D([], [], color=MUTED, marker="x", linestyle="", markersize=5, label="does not fit"))
        handles.append(Line2D([], [], color=VERMILION, linewidth=1.2, label="memory of the device"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), labelcolor=MUTED)


def _draw_map(axes: Axes, tried: Sequence[Outcome]) -> None:
    for policy, color in _POLICY_COLORS.items():
        chosen = [o for o in tried if o.scenario.policy == policy]
        for crossed in (True, False):
            part = [o for o in chosen if bool(o.refused) == crossed]
            axes.scatter(
                [o.memory_gib for o in part], [o.tokens_per_s_per_device for o in part], s=18 if crossed else 24,
                marker="x" if crossed else "o", color=color, linewidths=0.8, alpha=0.35 if crossed else 0.85,
            )  # fmt: skip
    best = next((o for o in tried if not o.refused), None)
    if best is not None:
        place = (best.memory_gib, best.tokens_per_s_per_device)
        axes.scatter(*place, s=90, facecolors="none", edgecolors=INK, linewidths=1.6)
        axes.annotate(
            f"{best.scenario.policy}: {best.scenario.degrees}", place, xytext=(-9, 6), textcoords="offset points",
            ha="right", color=INK, fontweight="bold", fontsize=9.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
        )  # fmt: skip
    axes.axvline(tried[0].scenario.profile.memory_bytes / 2**30, color=VERMILION, linewidth=1.2)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("GiB on the fullest device")
    axes.set_ylabel("tokens per second and device")
    axes.set_ylim(0, 1.12 * max(o.tokens_per_s_per_device for o in tried))
    horizontal_grid(axes)


def _draw_reasons(axes: Axes, reasons: Sequence[tuple[str, int]]) -> None:
    places = range(len(reasons))
    axes.barh(places, [number for _, number in reasons], height=0.62, color=MUTED, linewidth=0)
    for place, (reason, number) in zip(places, reasons, strict=True):
        text = reason if len(reason) <= 90 else reason[:89] + "…"
        axes.annotate(f"{number:,} × {text}", (number, place), xytext=(5, 0), textcoords="offset points", va="center",
                      color=INK, fontsize=9.5)  # fmt: skip
    axes.set_xlim(0, 3.0 * max(number for _, number in reasons))
    axes.set_ylim(len(reasons) - 0.4, -0.6)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title("refused", loc="left")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
