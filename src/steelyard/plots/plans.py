"""Plans of several policies beside each other: the work of every rank, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from steelyard.domain.units import format_bytes
from steelyard.errors import UsageError
from steelyard.plots.style import MUTED, VERMILION, picture
from steelyard.plots.work import draw_work_legend, draw_work_panel

PANELS_PER_ROW = 2
PANEL_HEIGHT_IN = 2.7
MARKED_RANKS = 32  # more are too narrow for words


@dataclass(frozen=True)
class PolicyWork:
    """One panel.

    Attributes:
        policy: its name.
        work: of each rank, in any one unit.
        sent_bytes: all ranks together, one layer's forward pass.
        tokens_max_over_mean: tokens of the fullest rank over the mean.
        pairs_share: pairs of all ranks, relative to those of uncut documents.
    """

    policy: str
    work: Sequence[int]
    sent_bytes: int
    tokens_max_over_mean: float = 1.0
    pairs_share: float = 1.0


def work_by_policy(
    path: str | Path,
    panels: Sequence[PolicyWork],
    *,
    speeds: Sequence[float] = (),
    title: str | None = None,
    note: str = "",
) -> None:
    """Draw the core-attention work of every rank under each policy, on one scale.

    Bars are in multiples of the rank's share of that policy's work; the pale part above a bar is waiting.

    Args:
        speeds: of the ranks; () means equal. A rank of speed 0 has no share: it keeps its place, without a bar, and a
            policy that gives it work cannot finish.

    Raises:
        UsageError: no panel, no work, or panels of different numbers of ranks.
    """
    ranks = {len(panel.work) for panel in panels}
    if len(ranks) != 1 or not all(sum(panel.work) for panel in panels) or len(speeds) not in (0, *ranks):
        raise UsageError(
            f"work by policy: {sorted(ranks)} ranks in the panels; expected one number, and some work in each"
        )
    speed = np.array(speeds or (1.0,) * ranks.pop())
    heights = [_heights(panel, speed) for panel in panels]
    top = max(1.0, *(float(np.nanmax(h)) for h in heights))
    columns = min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    if title is None:
        first, last = (f"{p.policy} {busiest(p, speed)}" for p in (panels[0], panels[-1]))
        title = f"Work of the busiest rank over its share: {first}" + (f", {last}" if len(panels) > 1 else "")
    height_in = 1.3 + PANEL_HEIGHT_IN * rows
    with picture(path, height_in=height_in, title=title, note=note) as figure:
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes, panel, height in zip(grid.flat, panels, heights, strict=False):
            draw_work_panel(axes, height, np.zeros(len(height)), height)
            stuck = _stuck(panel, speed)
            finding = "cannot finish" if stuck.any() else f"{1 - np.nanmean(height) / np.nanmax(height):.0%} waiting"
            axes.set_title(f"{panel.policy}: {finding}", loc="left", pad=20)
            _mark_stopped(axes, np.flatnonzero(speed == 0), stuck, top)
            cost = axes.text(
                0, 1.03, _cost(panel, speed), transform=axes.transAxes, color=MUTED, fontsize=9, va="bottom"
            )
            cost.set_in_layout(False)  # a long line would push the panels apart
            axes.set_ylim(0, top * 1.14)
        for axes in grid[:, 0]:
            axes.set_ylabel("work, × share")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:-1, :].flat:
            axes.set_xlabel("")
        draw_work_legend(grid.flat[0], with_base=False, fair_name="its share")
        figure.align_ylabels()


def busiest(panel: PolicyWork, speeds: Sequence[float] | npt.NDArray[np.float64] = ()) -> str:
    """The busiest rank's multiple of its share in words: `1.88×`, or that it cannot finish."""
    speed = np.array(speeds if len(speeds) else (1.0,) * len(panel.work))
    return "cannot finish" if _stuck(panel, speed).any() else f"{np.nanmax(_heights(panel, speed)):.2f}×"


def _heights(panel: PolicyWork, speed: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Multiples of each rank's share; not a number for ranks of speed 0."""
    works, heights = speed > 0, np.full(len(speed), np.nan)
    share = sum(panel.work) * (speed[works] / speed.sum())
    heights[works] = np.asarray(panel.work, dtype=np.float64)[works] / share
    return heights


def _stuck(panel: PolicyWork, speed: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Ranks of speed 0 that have work."""
    stuck: npt.NDArray[np.bool_] = (speed == 0) & (np.asarray(panel.work) > 0)
    return stuck


def _mark_stopped(axes: Axes, stopped: npt.NDArray[np.int64], stuck: npt.NDArray[np.bool_], top: float) -> None:
    """Words where ranks of speed 0 have no bar, as far as there is room for them."""
    for rank in stopped if len(stuck) <= MARKED_RANKS else ():
        text, color = ("speed 0, has work", VERMILION) if stuck[rank] else ("speed 0", MUTED)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        axes.text(rank, 0.05 * top, text, rotation=90, ha="center", va="bottom", color=color, fontsize=9, bbox=box)


def _cost(panel: PolicyWork, speed: npt.NDArray[np.float64]) -> str:
    parts = [f"{format_bytes(panel.sent_bytes)} sent a layer" if panel.sent_bytes else "nothing sent"]
    if panel.tokens_max_over_mean > 1.005:
        parts.append(f"fullest rank {panel.tokens_max_over_mean:.2f}× tokens")
    if panel.pairs_share < 0.9995:
        parts.append(f"cut: {panel.pairs_share:.1%} of pairs")
    if len(speed) > MARKED_RANKS and (stopped := int((speed == 0).sum())):
        parts.append(f"no bar: {stopped:,} of speed 0")
    return ", ".join(parts)
