"""Pictures of the simulator: memory with its band, the split of a step, predicted against measured, configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke
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
    WIDE_IN,
    horizontal_grid,
    laid_out,
    legend_below,
    picture,
    text_width,
)
from steelyard.simulate.answer import CAUSES
from steelyard.simulate.search import KEPT
from steelyard.simulate.step import StepEstimate
from steelyard.simulate.sweep import Outcome
from steelyard.simulate.validate import Comparison

_SPLIT: Mapping[str, tuple[str, str]] = {
    "token_wise": (TOKEN_WISE, ""), "attention": (ATTENTION, ""), "head": ("#1B2A49", ""),
    "tensor transfers": ("#DDF0B0", ""), "exchange": (GREEN, ""), "sharded parameters": ("#DDF0B0", "////"),
    "gradient reduction": (GREEN, "////"), "imbalance": (VERMILION, ""), "late transfers": (VERMILION, "////"),
    "pipeline bubble": ("#8C3B00", ""), "optimizer": ("#CC79A7", ""), "overhead": ("#4A525B", ""),
}  # fmt: skip
"""Colour and hatching of each cause: transfers are green, waiting is red, hatched is another kind of the same."""
_UNKNOWN_CAUSE = ("#F0E442", "xxxx")
_MEMORY = {
    "parameters": ATTENTION, "gradients": SKY, "optimizer state": "#C3E2F7", "gathered parameters": "#1B2A49",
    "activations": ORANGE, "logits": "#F7E39A", "exchange buffers": GREEN, "reserved": "#7A828C",
}  # fmt: skip
_HALO = (Stroke(linewidth=3.6, foreground="white"), Normal())


def memory_stack(
    path: str | Path, memory: MemoryEstimate, *, title: str | None = None, note: str = "", width_in: float = WIDE_IN
) -> None:
    """What fills the fullest device, with the band of fragmentation and the device's capacity."""
    gib = 2**30
    parts = {k: v / gib for k, v in memory.parts().items() if v > 0}
    heading = title or f"{memory.verdict.capitalize()}: {memory.expected / gib:.0f} of {memory.capacity / gib:.0f} GiB"
    with picture(path, width_in=width_in, height_in=2.35, title=heading, note=note) as figure:
        axes = figure.subplots()
        left = 0.0
        handles: list[Artist] = []
        for name, size in parts.items():
            color = _MEMORY.get(name, "#D6619E")
            axes.barh(0, size, left=left, height=0.5, color=color, edgecolor="white", linewidth=0.6)
            handles.append(Patch(color=color, label=f"{name} {size:.1f}"))
            left += size
        band: dict[str, Any] = {"facecolor": PALE, "edgecolor": MUTED, "hatch": "///"}
        axes.barh(0, memory.high / gib - left, left=left, height=0.5, linewidth=0, **band)
        axes.plot([memory.low / gib, memory.high / gib], [0.34, 0.34], color=INK, linewidth=1.5, marker="|")
        axes.set_yticks([])
        axes.set_ylim(-0.45, 0.5)
        axes.set_xlim(0, max(memory.capacity, memory.high) / gib * 1.03)
        axes.set_xlabel("GiB on the fullest device")
        axes.spines["left"].set_visible(False)
        handles.append(Patch(linewidth=0, label="fragmentation, its band", **band))
        dashed: dict[str, Any] = {"color": VERMILION, "linewidth": 1.6, "linestyle": (0, (4, 3))}
        axes.axvline(memory.capacity / gib, path_effects=_HALO, **dashed)
        handles.append(Line2D([], [], label="memory of the device", **dashed))
        legend_below(figure, handles, most=4)


def step_split(
    path: str | Path, estimates: Mapping[str, StepEstimate], *, note: str = "", width_in: float = WIDE_IN
) -> None:
    """Where the time of a step goes, one bar per policy or configuration, in seconds."""
    if not estimates:
        raise UsageError("step split: no estimate; expected at least one")
    causes = [n for n in CAUSES if any(e.shares.get(n, 0.0) >= 0.002 for e in estimates.values())]
    with picture(
        path, width_in=width_in, height_in=1.55 + 0.5 * len(estimates), title=_split_title(estimates), note=note
    ) as figure:
        axes = figure.subplots()
        for lane, estimate in enumerate(estimates.values()):
            left = 0.0
            for name in causes:
                width = estimate.shares.get(name, 0.0) * estimate.step_time_s
                axes.barh(lane, width, left=left, height=0.62, **_cause_style(name))
                left += width
            low, high = estimate.band_s
            axes.plot([low, high], [lane, lane], color=INK, linewidth=1.4, path_effects=_HALO)
            axes.plot([low, high], [lane, lane], color=INK, linestyle="", marker="|", markersize=8, markeredgewidth=1.4)
            axes.annotate(format_time(estimate.step_time_s), (high, lane), xytext=(6, 0), textcoords="offset points",
                          va="center", color=INK, fontweight="bold")  # fmt: skip
        axes.set_yticks(range(len(estimates)))
        axes.set_yticklabels([_with_pairs(name, e) for name, e in estimates.items()])
        axes.set_ylim(len(estimates) - 0.4, -0.6)
        # Numbers beside the bars need some 0.85 inches of what names of policies leave.
        axes.set_xlim(0, max(e.band_s[1] for e in estimates.values()) / (1 - 0.85 / (width_in - 1.5)))
        axes.set_xlabel("seconds per step (line: band of the estimate)")
        axes.spines["left"].set_visible(False)
        legend_below(figure, [Patch(label=CAUSES[n], **_cause_style(n)) for n in causes], most=2)


def _cause_style(name: str) -> dict[str, Any]:
    color, hatch = _SPLIT.get(name, _UNKNOWN_CAUSE)
    return {"facecolor": color, "edgecolor": "white", "hatch": hatch or None, "linewidth": 0}


def _split_title(estimates: Mapping[str, StepEstimate]) -> str:
    most = max(e.pairs_kept for e in estimates.values())
    whole = {n: e for n, e in estimates.items() if e.pairs_kept > 0.98 * most}  # the others compute another function
    ordered = sorted(whole.items(), key=lambda item: item[1].step_time_s)
    (first, fastest), (last, slowest) = ordered[0], ordered[-1]
    if len(estimates) == 1:
        return f"A step takes {format_time(fastest.step_time_s)}"
    if len(whole) == 1:
        return "Where the time of a step goes; policies that cut documents have less to compute"
    ratio = f"{slowest.step_time_s / fastest.step_time_s:.2f}× the speed of {last}"
    if len(whole) == len(estimates):
        return f"{first.capitalize()} is fastest: {ratio}"
    return f"Of the policies that cut fewest documents, {first} is fastest: {ratio}"


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
        for number, source in enumerate(sorted({c.source for c in times})):
            color = _SOURCE_COLORS[number % len(_SOURCE_COLORS)]
            shape = _SOURCE_SHAPES[number // len(_SOURCE_COLORS) % len(_SOURCE_SHAPES)]
            for role, face in (("fitted", "none"), ("held_out", color)):
                chosen = [c for c in times if c.source == source and c.role == role]
                measured, thin = [c.measured for c in chosen], 0.5 if len(chosen) > 200 else 0.9
                style: dict[str, Any] = {
                    "s": 13, "facecolors": face, "edgecolors": color, "linewidths": 0.7, "alpha": thin, "marker": shape
                }  # fmt: skip
                above.scatter(measured, [c.predicted for c in chosen], **style)
                below.scatter(measured, [min(100 * c.error, _LARGEST_ERROR) for c in chosen], **style)
            above.scatter([], [], s=24, color=color, marker=shape, label=source)
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
_SOURCE_COLORS, _SOURCE_SHAPES = (BLUE, ORANGE, INK, "#D6619E"), "os^D"
"""Every source has a pair of its own: as many colours as sources would not be told apart."""


_POLICY_COLORS = {"packed": MUTED, "wlb": ORANGE, "per_document_cp": SKY, "balanced": BLUE}
_REASONS_SHOWN = 6


@dataclass(frozen=True)
class _Mark:
    """How configurations of a kind are drawn, on top of the colour of their policy."""

    label: str
    marker: str
    size: float
    hollow: bool = False
    alpha: float = 0.85


_MARKS = {
    "fits": _Mark("fits", "o", 26),
    "tight": _Mark("fits tightly", "^", 30),
    "cut": _Mark(f"cuts documents: under {KEPT:.0%} of the pairs", "o", 24, hollow=True),
    "tight, cut": _Mark("cuts them and fits tightly", "^", 28, hollow=True),
    "refused": _Mark("does not fit", "x", 18, alpha=0.4),
}


def _kind_of(outcome: Outcome) -> str:
    """The key of `_MARKS`."""
    if outcome.refused:
        return "refused"
    kinds = [name for name, so in (("tight", outcome.verdict == "tight"), ("cut", outcome.pairs_kept < KEPT)) if so]
    return ", ".join(kinds) or "fits"


def configuration_map(
    path: str | Path, outcomes: Sequence[Outcome], *, refusals: Mapping[str, int] | None = None, note: str = ""
) -> None:
    """Every tried configuration: speed against memory; what does not fit is crossed out, what cuts documents is hollow
    and what fits only tightly a triangle. Below it, why others were refused.

    Args:
        outcomes: of a search, the best first.
        refusals: reasons with the number of configurations, most frequent first.
    """
    tried = [o for o in outcomes if o.step_time_s > 0]
    if not tried:
        raise UsageError("map of configurations: none could be estimated")
    fit = [o for o in tried if not o.refused]
    tight = sum(o.verdict == "tight" for o in fit)
    title = f"{len(fit):,} of {len(outcomes):,} tried configurations fit" + (
        f", {tight:,} of them tightly" if tight else ""
    )
    if fit:
        title += f"; the best makes {fit[0].tokens_per_s_per_device:,.0f} tokens/s per device"
    reasons = list((refusals or {}).items())
    if len(reasons) > _REASONS_SHOWN:
        rest = sum(number for _, number in reasons[_REASONS_SHOWN - 1 :])
        reasons = [*reasons[: _REASONS_SHOWN - 1], ("other reasons", rest)]
    below_in = 0.5 + 0.4 * len(reasons) if reasons else 0.0
    with picture(path, height_in=4.6 + below_in, title=title, note=note) as figure:
        rows = figure.subplots(2, 1, height_ratios=[3.8, below_in], squeeze=False) if reasons else [[figure.subplots()]]
        _draw_map(rows[0][0], tried)
        if reasons:
            _draw_reasons(rows[1][0], reasons)
        legend_below(figure, _map_legend(tried), most=4)
        laid_out(figure)
        _name_best(rows[0][0], fit[:1])


def _map_legend(tried: Sequence[Outcome]) -> list[Line2D]:
    """Policies by colour, then kinds by shape, as far as they occur."""
    handles = [
        Line2D([], [], color=color, marker="s", linestyle="", markersize=6, label=policy)
        for policy, color in _POLICY_COLORS.items()
        if any(o.scenario.policy == policy for o in tried)
    ]
    occurring = {_kind_of(o) for o in tried}
    handles += [
        Line2D([], [], color=INK, marker=mark.marker, linestyle="", markersize=5.5, label=mark.label,
               markerfacecolor="none" if mark.hollow else INK)
        for kind, mark in _MARKS.items()
        if kind in occurring
    ]  # fmt: skip
    return [*handles, Line2D([], [], color=VERMILION, linewidth=1.2, label="memory of the device")]


def _draw_map(axes: Axes, tried: Sequence[Outcome]) -> None:
    for kind in ("refused", "cut", "tight, cut", "tight", "fits"):  # what matters most comes on top
        mark = _MARKS[kind]
        for policy, color in _POLICY_COLORS.items():
            part = [o for o in tried if o.scenario.policy == policy and _kind_of(o) == kind]
            ink: dict[str, Any] = {"color": color, "linewidths": 0.8}
            if mark.hollow:
                ink = {"facecolors": "none", "edgecolors": color, "linewidths": 1.1}
            elif mark.marker != "x":
                ink = {"facecolors": color, "edgecolors": "white", "linewidths": 0.4}
            axes.scatter(
                [o.memory_gib for o in part], [o.tokens_per_s_per_device for o in part], s=mark.size,
                marker=mark.marker, alpha=mark.alpha, **ink,
            )  # fmt: skip
    axes.axvline(tried[0].scenario.profile.memory_bytes / 2**30, color=VERMILION, linewidth=1.2)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("GiB on the fullest device")
    axes.set_ylabel("tokens per second and device")
    axes.set_ylim(0, 1.2 * max(o.tokens_per_s_per_device for o in tried))
    horizontal_grid(axes)


def _name_best(axes: Axes, best: Sequence[Outcome]) -> None:
    """A ring around the best one, and its name at the top of the map, where no point is."""
    for outcome in best:
        place = (outcome.memory_gib, outcome.tokens_per_s_per_device)
        axes.scatter(*place, s=90, facecolors="none", edgecolors=INK, linewidths=1.6)
        name = f"{outcome.scenario.policy}: {outcome.scenario.degrees}"
        if outcome.pairs_kept < 0.995:
            name += f"; {outcome.pairs_kept:.0%} of the pairs"
        figure = axes.get_figure(root=True)
        assert isinstance(figure, Figure)
        style: dict[str, Any] = {"fontweight": "bold", "fontsize": 9.5}
        half = text_width(figure, name, **style) / 2
        box = axes.get_window_extent()
        x, memory = axes.transData.transform([place, (outcome.scenario.profile.memory_bytes / 2**30, 0)])[:, 0]
        left, right = box.x0 + half, (memory - 6 if x < memory and memory - 6 - half > box.x0 + half else box.x1) - half
        at = max(left, min(x, right))
        text = axes.annotate(
            name, place, xytext=((at - box.x0) / box.width, 0.955), textcoords="axes fraction", ha="center",
            va="center", color=INK, arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.8, "shrinkB": 5},
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, **style,
        )  # fmt: skip
        text.set_in_layout(False)


def _draw_reasons(axes: Axes, reasons: Sequence[tuple[str, int]]) -> None:
    places = range(len(reasons))
    axes.barh(places, [number for _, number in reasons], height=0.5, color=MUTED, linewidth=0)
    for place, (reason, number) in zip(places, reasons, strict=True):
        lines = wrap(f"{number:,} × {reason}", 85, max_lines=2, placeholder=" …")
        text = axes.annotate("\n".join(lines), (number, place), xytext=(5, 0), textcoords="offset points", va="center",
                             color=INK, fontsize=9.5, linespacing=1.05)  # fmt: skip
        text.set_in_layout(False)
    axes.set_xlim(0, 4.5 * max(number for _, number in reasons))
    axes.set_ylim(len(reasons) - 0.4, -0.6)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title("refused", loc="left")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
