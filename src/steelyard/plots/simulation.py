"""Pictures of the simulator: memory with its band, the split of a step, predicted against measured, configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter

from steelyard.cost.peak_memory import MemoryEstimate
from steelyard.errors import UsageError
from steelyard.plots.style import (
    ATTENTION,
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
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
    if len(ordered) == 1:
        title = f"A step takes {fastest[1].step_time_s:.2f} s"
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
            axes.annotate(f"{estimate.step_time_s:.2f} s", (high, lane), xytext=(6, 0), textcoords="offset points",
                          va="center", color=INK, fontweight="bold")  # fmt: skip
        axes.set_yticks(range(len(estimates)))
        axes.set_yticklabels(list(estimates))
        axes.set_ylim(len(estimates) - 0.4, -0.6)
        axes.set_xlim(0, max(e.band_s[1] for e in estimates.values()) * 1.12)
        axes.set_xlabel("seconds per step (line: band of the estimate)")
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, labelcolor=MUTED)


def predicted_against_measured(path: str | Path, comparisons: Sequence[Comparison], *, note: str = "") -> None:
    """Every compared step time: on the diagonal is right; fitted rows hollow, held-out ones filled."""
    times = [c for c in comparisons if c.quantity == "time" and not c.source.startswith("kernel")]
    if not times:
        raise UsageError("predicted against measured: nothing was compared")
    held = [c for c in times if c.role == "held_out"]
    mean = 100 * float(np.mean([abs(c.error) for c in held or times]))
    sources = sorted({c.source for c in times})
    colors = (BLUE, ORANGE, GREEN, VERMILION, SKY, "#CC79A7", "#F0E442", INK, "#7F5AA2", "#8C6D31", "#3C9A7A", MUTED)
    title = f"Held-out step times are predicted within {mean:.0f} % on average"
    with picture(path, width_in=7.5, height_in=6.4, title=title, note=note) as figure:
        axes = figure.subplots()
        limits = [min(min(c.measured, c.predicted) for c in times), max(max(c.measured, c.predicted) for c in times)]
        grid = np.array(limits) * [0.8, 1.25]
        axes.fill_between(grid, grid * 0.9, grid * 1.1, color=PALE, linewidth=0, label="±10 %")
        axes.plot(grid, grid, color=INK, linewidth=1)
        for source, color in zip(sources, colors, strict=False):
            for role, face in (("fitted", "none"), ("held_out", color)):
                chosen = [c for c in times if c.source == source and c.role == role]
                axes.scatter([c.measured for c in chosen], [c.predicted for c in chosen], s=14, facecolors=face,
                             edgecolors=color, linewidths=0.7, label=source if face != "none" else None)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("measured, seconds per step")
        axes.set_ylabel("predicted, seconds per step")
        axes.set_xlim(*grid)
        axes.set_ylim(*grid)
        figure.legend(loc="outside lower center", ncols=3, labelcolor=MUTED, fontsize=8)


def configuration_map(path: str | Path, outcomes: Sequence[Outcome], *, note: str = "") -> None:
    """Every tried configuration: speed against memory; what does not fit is crossed out."""
    tried = [o for o in outcomes if o.step_time_s > 0]
    if not tried:
        raise UsageError("map of configurations: none could be estimated")
    fit = [o for o in tried if not o.refused]
    title = f"{len(fit)} of {len(tried)} configurations fit; the best makes "
    title += f"{max((o.tokens_per_s_per_device for o in fit), default=0):,.0f} tokens/s per device"
    colors = {"packed": MUTED, "wlb": ORANGE, "per_document_cp": SKY, "balanced": BLUE}
    with picture(path, height_in=4.6, title=title, note=note) as figure:
        axes = figure.subplots()
        for policy, color in colors.items():
            chosen = [o for o in tried if o.scenario.policy == policy]
            for crossed in (False, True):
                part = [o for o in chosen if bool(o.refused) == crossed]
                axes.scatter(
                    [o.memory_gib for o in part], [o.tokens_per_s_per_device for o in part], s=22,
                    marker="x" if crossed else "o", color=color, linewidths=0.9,
                    label=policy if part and not crossed else None, alpha=0.45 if crossed else 0.9,
                )  # fmt: skip
        axes.axvline(tried[0].scenario.profile.memory_bytes / 2**30, color=VERMILION, linewidth=1.2)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("GiB on the fullest device (line: capacity; crosses: refused)")
        axes.set_ylabel("tokens per second and device")
        horizontal_grid(axes)
        if any(axes.get_legend_handles_labels()[1]):
            figure.legend(loc="outside lower center", ncols=4, labelcolor=MUTED)
