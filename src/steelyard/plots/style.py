"""One look for all pictures: light background, few lines, colours that colour-blind readers tell apart.

Colours are those of Okabe and Ito (2008). Figures are made without pyplot, which keeps global state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, SKY, ORANGE, GREEN, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00"
INK, MUTED, RULE, PALE = "#22272E", "#5B6570", "#D5DAE0", "#E9ECF0"

# Work is blue, what is lost is red or grey.
TOKEN_WISE, ATTENTION, TRANSFER, WAIT, IDLE = "#9FD0F0", BLUE, GREEN, VERMILION, PALE
DOCUMENT_COLORS = (ORANGE, "#CC79A7", "#7A4FA3", "#8C6D31", "#F0E442", "#173B63")
"""Of the longest documents, where attention is coloured by document: none is a track's."""
TRACK_COLORS = {"compute": TOKEN_WISE, "attention": ATTENTION, "transfer": TRANSFER, "wait": WAIT}
TRACK_LABELS = {
    "compute": "token-wise layers",
    "attention": "core attention",
    "transfer": "transfer in flight",
    "wait": "blocked in a transfer",
}

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10.5,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.facecolor": "white",
    "hatch.linewidth": 0.8,
}


@contextmanager
def picture(
    path: str | Path, *, width_in: float = 9.0, height_in: float, title: str, note: str = ""
) -> Iterator[Figure]:
    """A figure to draw on, with the finding as its title; saved to `path` (by its ending) when the block ends well.

    At the default width a PNG is 1800 pixels wide: sharp in a README column of 900.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width_in, height_in), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        heading = figure.text(0.012, 1 - 0.12 / height_in, title, fontsize=14, fontweight="bold", va="top", color=INK)
        width_used = heading.get_window_extent().width / figure.bbox.width
        heading.set_fontsize(14 * min(1.0, 0.976 / width_used))
        below = 0.2 + 0.25 * (title.count("\n") + 1)
        if note:
            figure.text(0.012, 1 - below / height_in, note, fontsize=10, va="top", color=MUTED)
            below += 0.2 * (note.count("\n") + 1)
        engine = figure.get_layout_engine()
        assert engine is not None
        engine.set(rect=(0.01, 0.01, 0.98, 1 - (below + 0.08) / height_in - 0.01))  # type: ignore[call-arg]
        yield figure
        figure.savefig(path)


def horizontal_grid(axes: Axes) -> None:
    """Faint lines to read heights by; the left spine says nothing beside them."""
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
