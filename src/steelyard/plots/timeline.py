"""What every rank did during a step, from the spans of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from steelyard.domain.units import format_time
from steelyard.errors import UsageError
from steelyard.observe.trace import Span, busy_s
from steelyard.plots.style import IDLE, INK, MUTED, TRACK_COLORS, TRACK_LABELS, picture

_LANE, _STRIP = (0.06, 0.66), (0.77, 0.13)
"""Bottom and height, within a rank's unit, of the bar of its work and of the strip of its transfers below it."""


def step_timeline(
    path: str | Path,
    panels: Mapping[str, Mapping[int, Sequence[Span]]],
    *,
    title: str | None = None,
    note: str = "",
) -> None:
    """Draw one step of every rank, one panel below another on one time axis, coloured by track.

    Args:
        panels: {"packed": {rank: spans}, "balanced": {rank: spans}}; each panel's time starts at its first span.

    Raises:
        UsageError: no panel, or one without spans.
    """
    empty = [name for name, spans_by_rank in panels.items() if not any(spans_by_rank.values())]
    if not panels or empty:
        raise UsageError(
            f"step timeline: no spans for {', '.join(empty) or 'any panel'}; expected a traced step of each"
        )
    length_s = {name: _length_s(spans_by_rank) for name, spans_by_rank in panels.items()}
    lanes = sum(max(2.0, len(spans_by_rank)) for spans_by_rank in panels.values())
    height_in = 1.7 + 0.45 * len(panels) + min(0.62 * lanes, 7.0)
    with picture(path, height_in=height_in, title=title or _finding(length_s), note=note) as figure:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[*map(len, panels.values())])
        for axes, (name, spans_by_rank) in zip(rows[:, 0], panels.items(), strict=True):
            _draw_panel(axes, spans_by_rank, length_s[name])
            axes.set_title(
                f"{name}: {_busy_share(spans_by_rank, length_s[name]):.0%} of device time is work", loc="left", pad=7
            )
        rows[-1, 0].set_xlabel("seconds since the step began")
        rows[-1, 0].set_xlim(0, max(length_s.values()) * 1.005)
        tracks = [
            t for t in TRACK_COLORS if any(s.track == t for p in panels.values() for ss in p.values() for s in ss)
        ]
        handles = [Patch(color=TRACK_COLORS[t], label=TRACK_LABELS[t]) for t in tracks]
        handles.append(Patch(color=IDLE, label="idle"))
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), labelcolor=MUTED, columnspacing=1.6
        )


def _draw_panel(axes: Axes, spans_by_rank: Mapping[int, Sequence[Span]], length_s: float) -> None:
    origin_s = _origin_s(spans_by_rank)
    for lane, rank in enumerate(sorted(spans_by_rank)):
        axes.broken_barh([(0, length_s)], (lane + _LANE[0], _LANE[1]), color=IDLE, linewidth=0)
        for track, color in TRACK_COLORS.items():
            spans = [s for s in spans_by_rank[rank] if s.track == track]
            bottom, height = _STRIP if track == "transfer" else _LANE
            bars = [(start_s - origin_s, end_s - start_s) for start_s, end_s in _merged(spans, length_s / 4000)]
            axes.broken_barh(bars, (lane + bottom, height), color=color, linewidth=0)
    axes.axvline(length_s, color=INK, linewidth=1.2)
    axes.annotate(
        format_time(length_s), (length_s, 0), xytext=(-5, 4), textcoords="offset points", ha="right", va="bottom",
        color=INK, fontweight="bold",
    )  # fmt: skip
    ranks = sorted(spans_by_rank)
    step = max(1, len(ranks) // 16)
    axes.set_yticks([i + _LANE[0] + _LANE[1] / 2 for i in range(0, len(ranks), step)])
    axes.set_yticklabels([f"rank {ranks[i]}" for i in range(0, len(ranks), step)])
    axes.set_ylim(len(ranks), 0)
    axes.spines["left"].set_visible(False)


def _finding(length_s: Mapping[str, float]) -> str:
    (first, first_s), (last, last_s) = next(iter(length_s.items())), list(length_s.items())[-1]
    if len(length_s) < 2:
        return f"One step, {format_time(first_s)}"
    faster = first_s / last_s
    if faster < 1.005:
        return f"The {last} step takes {format_time(last_s)}, the {first} one {format_time(first_s)}"
    return f"The {last} step is {faster:.2f}× as fast: nobody waits for the long document"


def _origin_s(spans_by_rank: Mapping[int, Sequence[Span]]) -> float:
    return min(s.start_s for spans in spans_by_rank.values() for s in spans)


def _length_s(spans_by_rank: Mapping[int, Sequence[Span]]) -> float:
    return max(s.end_s for spans in spans_by_rank.values() for s in spans) - _origin_s(spans_by_rank)


def _busy_share(spans_by_rank: Mapping[int, Sequence[Span]], length_s: float) -> float:
    busy = [busy_s(spans, ("compute", "attention")) for spans in spans_by_rank.values()]
    return sum(busy) / len(busy) / length_s if length_s else 0.0


def _merged(spans: Sequence[Span], gap_s: float) -> list[tuple[float, float]]:
    """Intervals that overlap or lie closer than a fraction of a pixel become one: hairlines would only blur."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        if merged and span.start_s - merged[-1][1] <= gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end_s))
        else:
            merged.append((span.start_s, span.end_s))
    return merged
