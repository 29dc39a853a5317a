"""Figures that were saved, and what is wrong with the texts in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SMALLEST_PT = 7.0


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, *args: Any, **options: Any) -> None:
        saved.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that would have been saved: drawing pixels takes longer than giving everything its place."""
    kept: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: kept.append(self))
    return kept


@pytest.fixture
def mistakes() -> Callable[[Figure], list[str]]:
    """Says which texts of a saved figure lie on each other, stick out of it, or are too small."""
    return _mistakes


def _mistakes(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    texts = _drawn_texts(figure)
    boxes = [(t.get_text(), Text.get_window_extent(t)) for t in texts]  # without the arrows of annotations
    assert len(boxes) > 3
    wrong = [
        f"{a!r} on {b!r}" for (a, box), (b, other) in itertools.combinations(boxes, 2) if _common(box, other) > 1.0
    ]
    page = figure.bbox
    wrong += [
        f"{text!r} sticks out"
        for text, box in boxes
        if box.x0 < page.x0 - 1 or box.y0 < page.y0 - 1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1
    ]
    return wrong + [f"{t.get_text()!r} is small" for t in texts if t.get_fontsize() < SMALLEST_PT]


def _drawn_texts(figure: Figure) -> list[Text]:
    """All texts that a reader sees."""
    found: list[Text] = list(figure.texts)
    for axes in (a for a in figure.axes if a.get_visible()):
        found += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        found += [c for c in axes.get_children() if isinstance(c, Text)]  # titles among them
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    for legend in figure.legends:
        found += legend.get_texts()
    return [t for t in dict.fromkeys(found) if t.get_visible() and t.get_text().strip()]


def _common(one: Bbox, other: Bbox) -> float:
    """Pixels by which two boxes overlap in both directions."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(min(width, height))
