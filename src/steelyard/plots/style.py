"""One look for all pictures: light background, few lines, colours that colour-blind readers tell apart.

Colours are those of Okabe and Ito (2008). Figures are made without pyplot, which keeps global state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

BLUE, SKY, ORANGE, GREEN, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00"
INK, MUTED, RULE, PALE = "#22272E", "#5B6570", "#D5DAE0", "#E9ECF0"

# Work is blue, what is lost is red or grey.
TOKEN_WISE, ATTENTION, TRANSFER, WAIT, IDLE = "#9FD0F0", BLUE, GREEN, VERMILION, PALE
DOCUMENT_COLORS = ("#F0E442", "#D6619E", "#4B1F7A", "#6E5219", ORANGE, "#12263F")
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


WIDE_IN, NARROW_IN = 9.0, 4.8
"""Widths of a picture: for a desk, and for a phone, on whose screen the text of a wide one would be too small."""
_HEADING_PT, _SMALLEST_HEADING_PT, _NOTE_PT = 14.0, 12.0, 10.0
_HEADING_IN, _NOTE_IN = 0.25, 0.2


@contextmanager
def picture(
    path: str | Path, *, width_in: float = WIDE_IN, height_in: float, title: str, note: str = ""
) -> Iterator[Figure]:
    """A figure to draw on, with the finding as its title; saved to `path` (by its ending) when the block ends well.

    At the default width a PNG is 1800 pixels wide: sharp in a README column of 900. A title or note that is wider than
    the picture is broken into lines, for which the picture grows.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width_in, height_in), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        room = 0.976 * figure.bbox.width
        bold: dict[str, Any] = {"fontsize": _HEADING_PT, "fontweight": "bold"}
        too_wide = max(text_width(figure, line, **bold) for line in title.split("\n")) / room
        bold["fontsize"] = max(_SMALLEST_HEADING_PT, _HEADING_PT / max(1.0, too_wide))
        heading = wrapped(figure, title, room, **bold)
        below = wrapped(figure, note, room, fontsize=_NOTE_PT) if note else ""
        more_in = _HEADING_IN * (heading.count("\n") - title.count("\n"))
        more_in += _NOTE_IN * (below.count("\n") - note.count("\n"))
        figure.set_figheight(height_in + more_in)
        heading_text = figure.text(0.012, 1.0, heading, va="top", color=INK, **bold)
        note_text = figure.text(0.012, 1.0, below, fontsize=_NOTE_PT, va="top", color=MUTED) if below else None
        _place_texts(figure, heading_text, note_text)
        yield figure
        _place_texts(figure, heading_text, note_text)  # the block may have made the figure higher
        figure.savefig(path)


def _place_texts(figure: Figure, heading: Text, note: Text | None) -> None:
    """Put title and note at the top, and leave what is below them to the drawing."""
    height_in = figure.get_figheight()
    heading.set_y(1 - 0.12 / height_in)
    below_in = 0.2 + _HEADING_IN * (heading.get_text().count("\n") + 1)
    if note is not None:
        note.set_y(1 - below_in / height_in)
        below_in += _NOTE_IN * (note.get_text().count("\n") + 1)
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.01, 0.01, 0.98, 1 - (below_in + 0.08) / height_in - 0.01))  # type: ignore[call-arg]


def text_width(figure: Figure, text: str, **style: Any) -> float:
    """Pixels that a text would take."""
    drawn = figure.text(0, 0, text, **style)
    width = float(drawn.get_window_extent().width)
    drawn.remove()
    return width


def wrapped(figure: Figure, text: str, room: float, **style: Any) -> str:
    """The text in lines of at most `room` pixels, as few as that allows and about equally long."""
    lines: list[str] = []
    for line in text.split("\n"):
        letters = max(len(line), 4)
        while letters > 4 and any(text_width(figure, part, **style) > room for part in wrap(line, letters)):
            letters -= 1 if letters < 60 else 3
        count, longest_word = len(wrap(line, letters)), max((len(word) for word in line.split()), default=0)
        while letters > longest_word and len(wrap(line, letters - 1)) == count > 1:
            letters -= 1
        lines += wrap(line, letters) or [""]
    return "\n".join(lines)


def panel_title(axes: Axes, text: str, *, pad: float, room: float = 1.0) -> Text:
    """A title above the left end of a panel, in as many lines as it needs for `room` of the panel's width now."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    lines = wrapped(figure, text, room * axes.bbox.width, fontsize=_STYLE["axes.titlesize"])
    return axes.set_title(lines, loc="left", pad=pad)


def legend_below(figure: Figure, handles: Sequence[Artist], *, most: int = 5, share: bool = True) -> None:
    """A legend under everything in as few rows as the width allows; the figure becomes higher by what it takes.

    Args:
        most: columns.
        share: whether rows are filled evenly, as five handles make 3 + 2 rather than 4 + 1.
    """
    room = 0.985 * figure.bbox.width
    for columns in range(min(most, len(handles)), 0, -1):
        rows = -(-len(handles) // columns)
        legend = figure.legend(
            handles=list(handles), loc="outside lower center", ncols=-(-len(handles) // rows) if share else columns,
            labelcolor=MUTED, columnspacing=1.4, handlelength=1.6,
        )  # fmt: skip
        extent = legend.get_window_extent()
        if columns == 1 or extent.width <= room:
            figure.set_figheight(figure.get_figheight() + extent.height / figure.dpi)
            return
        legend.remove()


def laid_out(figure: Figure) -> None:
    """Give everything its place, so that pixels can be asked for."""
    figure.draw_without_rendering()


def horizontal_grid(axes: Axes) -> None:
    """Faint lines to read heights by; the left spine says nothing beside them."""
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
