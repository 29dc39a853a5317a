"""Plans of several policies beside each other: the work of every rank, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steelyard.domain.units import format_bytes
from steelyard.errors import UsageError
from steelyard.plots.style import MUTED, picture
from steelyard.plots.work import draw_work_legend, draw_work_panel

PANELS_PER_ROW = 2
PANEL_HEIGHT_IN = 2.7


@dataclass(frozen=True)
class PolicyWork:
    """One panel.

    Attributes:
        policy: its name.
        work: (query, key) pairs of each rank.
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
        speeds: of the ranks; () means equal. A rank of speed 0 has no share and is left out.

    Raises:
        UsageError: no panel, no work, or panels of different numbers of ranks.
    """
    ranks = {len(panel.work) for panel in panels}
    if len(ranks) != 1 or not all(sum(panel.work) for panel in panels) or len(speeds) not in (0, *ranks):
        raise UsageError(
            f"work by policy: {sorted(ranks)} ranks in the panels; expected one number, and some work in each"
        )
    speed = np.array(speeds or (1.0,) * ranks.pop())
    heights = []
    for panel in panels:
        share = sum(panel.work) * speed[speed > 0] / speed.sum()
        heights.append(np.asarray(panel.work, dtype=np.float64)[speed > 0] / share)
    top = max(float(h.max()) for h in heights)
    columns = min(PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    if title is None:
        first, last = (f"{p.policy} {h.max():.2f}×" for p, h in ((panels[0], heights[0]), (panels[-1], heights[-1])))
        title = f"Work of the busiest rank over its share: {first}" + (f", {last}" if len(panels) > 1 else "")
    height_in = 1.3 + PANEL_HEIGHT_IN * rows
    with picture(path, height_in=height_in, title=title, note=note) as figure:
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes, panel, height in zip(grid.flat, panels, heights, strict=False):
            draw_work_panel(axes, height, np.zeros(len(height)), height)
            axes.set_title(f"{panel.policy}: {1 - height.mean() / height.max():.0%} waiting", loc="left", pad=20)
            axes.text(0, 1.03, _cost(panel), transform=axes.transAxes, color=MUTED, fontsize=9, va="bottom")
            axes.set_ylim(0, top * 1.14)
        for axes in grid[:, 0]:
            axes.set_ylabel("work, × share")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:-1, :].flat:
            axes.set_xlabel("")
        draw_work_legend(grid.flat[0], with_base=False, fair_name="its share")
        figure.align_ylabels()


def _cost(panel: PolicyWork) -> str:
    parts = [f"{format_bytes(panel.sent_bytes)} sent a layer" if panel.sent_bytes else "nothing sent"]
    if panel.tokens_max_over_mean > 1.005:
        parts.append(f"fullest rank {panel.tokens_max_over_mean:.2f}× the tokens")
    if panel.pairs_share < 0.9995:
        parts.append(f"documents cut: {panel.pairs_share:.1%} of the pairs")
    return ", ".join(parts)
