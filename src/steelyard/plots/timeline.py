"""What every rank did during a step, from the spans of a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text

from steelyard.domain.units import format_time
from steelyard.errors import UsageError
from steelyard.observe.trace import Span, busy_s
from steelyard.plots.style import (
    ATTENTION,
    DOCUMENT_COLORS,
    IDLE,
    INK,
    TRACK_COLORS,
    TRACK_LABELS,
    WIDE_IN,
    laid_out,
    legend_below,
    panel_title,
    picture,
    text_width,
)

_LANE, _STRIP = (0.06, 0.66), (0.77, 0.13)
"""Bottom and height, within a rank's unit, of the bar of its work and of the strip of its transfers below it."""


def step_timeline(
    path: str | Path,
    panels: Mapping[str, Mapping[int, Sequence[Span]]],
    *,
    title: str | None = None,
    note: str = "",
    lane: Callable[[int], str] = "rank {}".format,
    since: str = "the step began",
    pairs_kept: Mapping[str, float] | None = None,
    width_in: float = WIDE_IN,
) -> None:
    """Draw one step of every rank, one panel below another on one time axis, coloured by track.

    Attention spans with a `document` (0: the longest, 1, …; −1: any other) among their arguments are coloured by it.

    Args:
        panels: {"packed": {rank: spans}, "balanced": {rank: spans}}; each panel's time starts at its first span.
        lane: the name of a rank.
        since: what happens at time 0.
        pairs_kept: by panel, the share of the attention work that is left where documents are cut.

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
    height_in = 1.2 + 0.45 * len(panels) + min(0.62 * lanes, 7.0)
    with picture(path, width_in=width_in, height_in=height_in, title=title or _finding(length_s), note=note) as figure:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[*map(len, panels.values())])
        rows[-1, 0].set_xlabel(f"seconds since {since}")
        rows[-1, 0].set_xlim(0, max(length_s.values()) * 1.005)
        drawn = []
        for axes, (name, spans_by_rank) in zip(rows[:, 0], panels.items(), strict=True):
            _draw_panel(axes, spans_by_rank, length_s[name], lane)
            text = f"{name}: {_busy_share(spans_by_rank, length_s[name]):.0%} of device time is work"
            if (kept := (pairs_kept or {}).get(name, 1.0)) < _WHOLE:
                text += f", on {kept:.0%} of the pairs"
            drawn.append((axes, text, length_s[name]))
        legend_below(figure, _legend(panels), most=4)
        laid_out(figure)
        for axes, text, end_s in drawn:
            _write_length(axes, panel_title(axes, text, pad=_TITLE_PAD), end_s)


_TITLE_PAD = 7.0
"""Points between a panel and its title."""
_WHOLE = 0.995
"""A larger share of the pairs is told as all of them."""


def _legend(panels: Mapping[str, Mapping[int, Sequence[Span]]]) -> list[Patch]:
    """Tracks, then documents, as far as they occur."""
    every = [span for panel in panels.values() for spans in panel.values() for span in spans]
    occurring, documents = {s.track for s in every}, _documents(panels)
    handles = [Patch(color=TRACK_COLORS[t], label=TRACK_LABELS[t]) for t in TRACK_COLORS if t in occurring]
    if documents:
        handles = [h for h in handles if h.get_label() != TRACK_LABELS["attention"]]
        handles += [Patch(color=_document_color(d), label=_document_label(d, n)) for d, n in documents.items()]
        if -1 not in documents and any(s.track == "attention" and "document" not in s.args for s in every):
            handles.append(Patch(color=ATTENTION, label=_document_label(-1, 0)))
    return [*handles, Patch(color=IDLE, label="idle")]


def _draw_panel(
    axes: Axes, spans_by_rank: Mapping[int, Sequence[Span]], length_s: float, name: Callable[[int], str]
) -> None:
    origin_s = _origin_s(spans_by_rank)
    for lane, rank in enumerate(sorted(spans_by_rank)):
        axes.broken_barh([(0, length_s)], (lane + _LANE[0], _LANE[1]), color=IDLE, linewidth=0)
        for track, color in TRACK_COLORS.items():
            spans = [s for s in spans_by_rank[rank] if s.track == track]
            bottom, height = _STRIP if track == "transfer" else _LANE
            by_color: dict[str, list[Span]] = {}
            for span in spans:
                by_color.setdefault(_document_color(span.args.get("document"), color), []).append(span)
            for own_color, alike in by_color.items():
                bars = [(start_s - origin_s, end_s - start_s) for start_s, end_s in _merged(alike, length_s / 4000)]
                axes.broken_barh(bars, (lane + bottom, height), color=own_color, linewidth=0)
    axes.axvline(length_s, color=INK, linewidth=1.2)
    ranks = sorted(spans_by_rank)
    step = max(1, len(ranks) // 16)
    axes.set_yticks([i + _LANE[0] + _LANE[1] / 2 for i in range(0, len(ranks), step)])
    axes.set_yticklabels([name(ranks[i]) for i in range(0, len(ranks), step)])
    axes.set_ylim(len(ranks), 0)
    axes.spines["left"].set_visible(False)


def _write_length(axes: Axes, title: Text, length_s: float) -> None:
    """The length beside the line at its end: above the bars where the panel's title leaves room on either side of the
    line, else right of the line where the shorter step leaves room, else above the bars with the title one line
    higher."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    text, gap = format_time(length_s), 5 * figure.dpi / 72
    width = text_width(figure, text, fontweight="bold")
    line = float(axes.transData.transform((length_s, 0))[0])
    taken, right = float(title.get_window_extent().x1), float(axes.get_window_extent().x1)
    beside = line + gap + width <= right
    if line - gap - width > taken + gap:
        at, side, row = (-5, 4), "right", "bottom"
    elif beside and line > taken:
        at, side, row = (5, 4), "left", "bottom"
    elif beside:
        at, side, row = (5, -4), "left", "top"
    else:
        at, side, row = (-5, 4), "right", "bottom"
        axes.set_title(title.get_text(), loc="left", pad=_TITLE_PAD + 16)
    label = axes.annotate(
        text, (length_s, 0), xytext=at, textcoords="offset points", ha=side, va=row, color=INK, fontweight="bold"
    )
    label.set_in_layout(False)


def _document_color(document: object, otherwise: str = ATTENTION) -> str:
    """Of an attention span of the document of that number; `otherwise` where there is none or it has no name."""
    known = isinstance(document, int) and 0 <= document < len(DOCUMENT_COLORS)
    return DOCUMENT_COLORS[document] if known and isinstance(document, int) else otherwise


def _document_label(document: int, tokens: int) -> str:
    return "attention, others" if document < 0 else f"attention, {tokens:,} tokens"


def _documents(panels: Mapping[str, Mapping[int, Sequence[Span]]]) -> dict[int, int]:
    """Numbers of the documents that occur, with their tokens; the longest first, the others last."""
    found: dict[int, int] = {}
    for panel in panels.values():
        for span in (s for spans in panel.values() for s in spans):
            document, tokens = span.args.get("document"), span.args.get("tokens", 0)
            if isinstance(document, int) and isinstance(tokens, int):
                found[document] = tokens
    return {d: found[d] for d in sorted(found, key=lambda d: (d < 0, d))}


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
