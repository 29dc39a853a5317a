from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from steelyard.data.lengths import data_statistics
from steelyard.errors import UsageError
from steelyard.observe.trace import Span
from steelyard.plots.lengths import length_distribution
from steelyard.plots.style import ATTENTION, TRACK_COLORS, picture
from steelyard.plots.timeline import step_timeline
from steelyard.plots.work import work_per_rank


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


def words(figure: Figure) -> list[str]:
    found = [t.get_text() for t in figure.texts]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel(), *(t.get_text() for t in axes.texts)]
    return found


def bars(axes: Axes, color: str) -> list[float]:
    from matplotlib.colors import to_rgba

    return [p.get_height() for p in axes.patches if p.get_facecolor() == to_rgba(color)]  # type: ignore[attr-defined]


def test_work_per_rank_draws_multiples_of_the_mean(tmp_path: Path, figures: list[Figure]) -> None:
    path = tmp_path / "work.png"
    work_per_rank(path, [30, 10], [20, 20], token_wise=[20, 20])
    assert path.read_bytes().startswith(b"\x89PNG")
    packed, balanced = figures[0].axes
    assert bars(packed, ATTENTION) == pytest.approx([0.75, 0.25])
    assert bars(balanced, ATTENTION) == pytest.approx([0.5, 0.5])
    said = words(figures[0])
    assert "Packed, the busiest rank has 1.25× the mean work; balanced, 1.00×" in said
    assert "packed: 20% of device time is waiting" in said
    assert {"1.25×", "0.75×"} <= set(said)


def test_work_per_rank_measures_against_unequal_shares(tmp_path: Path, figures: list[Figure]) -> None:
    work_per_rank(tmp_path / "work.svg", [20, 20], [30, 10], share=[30, 10])
    assert bars(figures[0].axes[0], ATTENTION) == pytest.approx([2 / 3, 2])
    assert bars(figures[0].axes[1], ATTENTION) == pytest.approx([1, 1])


@pytest.mark.parametrize("ranks", [1, 13, 64])
def test_work_per_rank_draws_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "work.png"
    work_per_rank(path, np.arange(ranks) + 1.0, np.full(ranks, 1.0))
    assert path.stat().st_size > 0


@pytest.mark.parametrize(("before", "after"), [([], []), ([1, 2], [1]), ([0, 0], [0, 0])])
def test_work_per_rank_refuses_what_it_cannot_draw(tmp_path: Path, before: list[float], after: list[float]) -> None:
    with pytest.raises(UsageError, match="work per rank"):
        work_per_rank(tmp_path / "work.png", before, after)


def step(origin_s: float, lengths_s: list[float]) -> dict[int, list[Span]]:
    end_s = origin_s + max(lengths_s)
    return {
        rank: [
            Span("mlp", "compute", origin_s, origin_s + length_s / 2),
            Span("attend", "attention", origin_s + length_s / 2, origin_s + length_s),
            Span("send", "transfer", origin_s + length_s / 3, origin_s + length_s),
            Span("sum", "wait", origin_s + length_s, end_s),
        ]
        for rank, length_s in enumerate(lengths_s)
    }


def test_timeline_starts_each_panel_at_zero_on_one_axis(tmp_path: Path, figures: list[Figure]) -> None:
    path = tmp_path / "timeline.png"
    step_timeline(path, {"packed": step(100.0, [3.0, 1.0]), "balanced": step(500.0, [2.0, 2.0])})
    assert path.read_bytes().startswith(b"\x89PNG")
    packed, balanced = figures[0].axes
    assert packed.get_xlim() == balanced.get_xlim() == pytest.approx((0, 3.0 * 1.005))
    for axes, end_s in ((packed, 3.0), (balanced, 2.0)):
        right = max(p.vertices[:, 0].max() for c in axes.collections for p in c.get_paths())
        assert right == pytest.approx(end_s)
    said = words(figures[0])
    assert "The balanced step is 1.50× as fast: nobody waits for the long document" in said
    assert {"3.00 s", "2.00 s", "packed: 67% of device time is work", "balanced: 100% of device time is work"} <= set(
        said
    )


def test_timeline_colours_each_track(tmp_path: Path, figures: list[Figure]) -> None:
    from matplotlib.colors import to_hex

    step_timeline(tmp_path / "timeline.png", {"packed": step(0.0, [3.0, 1.0])})
    [axes] = figures[0].axes
    drawn = {to_hex(c.get_facecolor()[0]) for c in axes.collections if isinstance(c, PolyCollection) and c.get_paths()}  # type: ignore[index]
    assert {color.lower() for color in TRACK_COLORS.values()} <= drawn


def test_timeline_does_not_claim_a_gain_that_is_not_there(tmp_path: Path, figures: list[Figure]) -> None:
    step_timeline(tmp_path / "timeline.png", {"packed": step(0.0, [1.0]), "balanced": step(0.0, [1.2])})
    assert "The balanced step takes 1.20 s, the packed one 1.00 s" in words(figures[0])


def test_timeline_without_spans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no spans for balanced"):
        step_timeline(tmp_path / "t.png", {"packed": step(0.0, [1.0]), "balanced": {0: []}})


def test_length_distribution_draws_shares_and_imbalance(tmp_path: Path, figures: list[Figure]) -> None:
    for number, length in enumerate([10, 10, 10, 10, 5000]):
        (tmp_path / f"{number}.txt").write_text("a" * (length - 1))
    statistics = data_statistics(tmp_path, chunk_tokens=512, ranks=(2, 8))
    path = tmp_path / "lengths.png"
    length_distribution(path, statistics)
    assert path.read_bytes().startswith(b"\x89PNG")
    left, right = sorted(figures[0].axes, key=lambda a: a.get_position().x0)
    assert bars(left, ATTENTION)[-1] == pytest.approx(5000 / 5040)
    said = words(figures[0])
    assert "20% of the documents hold half of the tokens" in said
    worst = statistics.imbalance[-1].max_over_mean
    assert f"Packed on 8 ranks, {1 - 1 / worst:.0%} of the attention time would be spent waiting" in said
    assert f"{worst:.2f}" in [t.get_text() for t in right.texts]
    length_distribution(path, data_statistics(tmp_path, chunk_tokens=512, ranks=()))
    assert len(figures[-1].axes) == 1


def test_a_long_title_is_made_to_fit(tmp_path: Path, figures: list[Figure]) -> None:
    with picture(tmp_path / "x.png", height_in=2, title="a long title " * 12) as figure:
        figure.subplots()
    heading = figure.texts[0].get_window_extent()
    assert heading.x1 <= figure.bbox.width


def test_a_failed_drawing_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), picture(tmp_path / "x.png", height_in=2, title="x"):
        raise RuntimeError
    assert not (tmp_path / "x.png").exists()
