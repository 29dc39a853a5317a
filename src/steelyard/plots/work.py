"""Work of each rank, before and after balancing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from steelyard.errors import UsageError
from steelyard.plots.style import (
    ATTENTION,
    IDLE,
    INK,
    TOKEN_WISE,
    WIDE_IN,
    horizontal_grid,
    laid_out,
    legend_below,
    panel_title,
    picture,
)

_LABELLED_RANKS = 12
"""With more ranks than this, numbers above the bars would touch; only the largest keeps its own."""
_CLOSE_RANKS = 8
"""With more ranks than this, the numbers are smaller."""
_LABEL_WIDTH = 0.2
"""Of a number above a bar, as part of a panel, with something to spare."""
_SIDE_BY_SIDE_IN = 6.0
"""Of a narrower picture, the panels stand below each other."""
_HALO = (Stroke(linewidth=3.0, foreground="white"), Normal())
_SINGLE_BARS = 200
"""With more ranks than this, bars are narrower than a pixel or two, and one outline is drawn instead of all of them."""


def work_per_rank(
    path: str | Path,
    before: Sequence[float],
    after: Sequence[float],
    *,
    share: Sequence[float] | None = None,
    token_wise: Sequence[float] | None = None,
    names: tuple[str, str] = ("packed", "balanced"),
    quantity: str = "work",
    rank_name: str = "rank",
    pairs_kept: tuple[float, float] = (1.0, 1.0),
    title: str | None = None,
    note: str = "",
    width_in: float = WIDE_IN,
) -> None:
    """Draw the core-attention work of every rank before and after balancing, side by side on one scale.

    Bars are in multiples of the mean, or of each rank's share, so any unit of work will do; the pale part above a bar
    is how long its rank waits for the busiest.

    Args:
        before, after: work of each rank, in one unit (pairs or seconds).
        share: a rank's fair part of the work, where ranks are not equally fast; None: the mean.
        token_wise: work of the token-wise layers of each rank, in the same unit, drawn below; None: left out.
        names: of the two panels.
        quantity: what `before` and `after` measure.
        rank_name: what a rank is.
        pairs_kept: by panel, the share of the attention work that is left where documents are cut.
        width_in: of the picture; the panels of a narrow one stand below each other.

    Raises:
        UsageError: no rank, or columns of different lengths, or no work at all.
    """
    attention = [np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)]
    ranks = len(attention[0])
    base = np.zeros(ranks) if token_wise is None else np.asarray(token_wise, dtype=np.float64)
    if not ranks or len(attention[1]) != ranks or len(base) != ranks or (share is not None and len(share) != ranks):
        raise UsageError(
            f"work per rank: {ranks} ranks before, {len(attention[1])} after, "
            f"{len(base)} token-wise; expected one figure for each rank, the same number in all"
        )
    fair = np.full(ranks, attention[0].mean()) if share is None else np.asarray(share, dtype=np.float64)
    fair = fair + base
    if not np.all(fair > 0):
        raise UsageError("work per rank: a rank's fair share of the work is 0; expected some work for each")
    heights = [(a / fair, base / fair) for a in attention]
    totals = [a + b for a, b in heights]
    top = max(float(t.max()) for t in totals)
    whose = "the mean" if share is None else "its share of the"
    if title is None:
        most = [float(t.max()) for t in totals]
        title = f"{names[0].capitalize()}, the busiest rank has {most[0]:.2f}× {whose} {quantity}"
        title += f"; {names[1]}, {most[1]:.2f}×"
    rows = 1 if width_in > _SIDE_BY_SIDE_IN else 2
    height_in = 3.9 if rows == 1 else 6.4
    with picture(path, width_in=width_in, height_in=height_in, title=title, note=note) as figure:
        panels = figure.subplots(rows, 3 - rows, sharey=True)
        for axes, (work, below), total in zip(panels, heights, totals, strict=True):
            draw_work_panel(axes, work, below, total)
            axes.set_ylim(0, top * 1.14)
        fair_name = "mean" if share is None else "its share"
        for axes in panels[:1] if rows == 1 else panels:
            axes.set_ylabel(f"{quantity}, × {fair_name}")
        for axes in panels:
            axes.set_xlabel(rank_name)
        draw_work_legend(panels[1], with_base=token_wise is not None, fair_name=fair_name)
        laid_out(figure)
        for axes, name, total, kept in zip(panels, names, totals, pairs_kept, strict=True):
            time = "attention time" if token_wise is None else "device time"
            cut = "" if kept > 0.995 else f" ({kept:.0%} of the pairs)"
            panel_title(axes, f"{name}{cut}: {1 - total.mean() / total.max():.0%} of {time} is waiting", pad=8)
        figure.align_ylabels()


def draw_work_panel(
    axes: Axes, work: npt.NDArray[np.float64], below: npt.NDArray[np.float64], total: npt.NDArray[np.float64]
) -> None:
    """Bars of one panel: `below`, `work` on it, and the wait above. A rank whose `total` is not a number has a place,
    but no bar."""
    ranks = len(work)
    highest = float(np.nanmax(total))
    _draw_bars(axes, np.full(ranks, highest) - total, total, IDLE)
    if np.any(below > 0):
        _draw_bars(axes, below, np.zeros(ranks), TOKEN_WISE)
    _draw_bars(axes, work, below, ATTENTION)
    axes.axhline(1.0, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    sign = "×" if ranks <= 4 or ranks > _LABELLED_RANKS else ""
    for i in np.flatnonzero(~np.isnan(total)) if ranks <= _LABELLED_RANKS else [int(np.nanargmax(total))]:
        busiest = total[i] == highest
        side = _side_of_label(int(i), ranks)
        axes.annotate(
            f"{total[i]:.2f}{sign}",
            (i, total[i]),
            xytext=({"left": 2, "center": 0, "right": -2}[side], 4),
            textcoords="offset points",
            ha=side,
            va="bottom",
            color=INK,
            fontweight="bold" if busiest else "normal",
            fontsize=8.5 if _CLOSE_RANKS < ranks <= _LABELLED_RANKS else None,
            zorder=4,
            path_effects=_HALO,
        )
    horizontal_grid(axes)
    axes.set_xlabel("rank")
    axes.set_xlim(-0.5 - (0.4 if ranks <= 4 else 0.1), ranks - 0.5 + (0.4 if ranks <= 4 else 0.1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9) if ranks > 12 else FixedLocator(range(ranks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}" if 0 <= value < ranks else ""))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def _side_of_label(rank: int, ranks: int) -> Literal["left", "center", "right"]:
    """The side of a number that stands at its rank: among many ranks, those at the ends have no room for half of it."""
    if ranks > _LABELLED_RANKS and not _LABEL_WIDTH / 2 <= rank / ranks <= 1 - _LABEL_WIDTH / 2:
        return "left" if rank < ranks / 2 else "right"
    return "center"


def _draw_bars(axes: Axes, height: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64], color: str) -> None:
    """One bar a rank from `bottom` up; none where the height is not a number."""
    ranks = len(height)
    if ranks > _SINGLE_BARS:
        axes.stairs(bottom + height, np.arange(ranks + 1) - 0.5, baseline=bottom, fill=True, color=color, linewidth=0)
        return
    drawn = np.flatnonzero(~np.isnan(height))
    width = 0.62 if ranks <= 4 else 0.8 if ranks <= 32 else 1.0
    axes.bar(drawn, height[drawn], width, bottom=bottom[drawn], color=color, linewidth=0)


def draw_work_legend(axes: Axes, *, with_base: bool, fair_name: str = "mean") -> None:
    handles: list[Patch | Line2D] = [Patch(color=ATTENTION, label="core attention")]
    if with_base:
        handles.append(Patch(color=TOKEN_WISE, label="token-wise layers"))
    handles.append(Patch(color=IDLE, label="waiting for the busiest rank"))
    handles.append(Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (4, 3)), label=fair_name))
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    legend_below(figure, handles)
