from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from steelyard.data.lengths import data_statistics
from steelyard.errors import UsageError
from steelyard.observe.trace import Span
from steelyard.plots.lengths import length_distribution
from steelyard.plots.style import ATTENTION, NARROW_IN, TRACK_COLORS, WIDE_IN, picture, wrapped
from steelyard.plots.timeline import step_timeline
from steelyard.plots.work import work_per_rank


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


@pytest.mark.parametrize("width_in", [WIDE_IN, NARROW_IN])
@pytest.mark.parametrize("ranks", [1, 4, 12, 512])
def test_work_per_rank_says_what_it_measures(
    ranks: int, width_in: float, tmp_path: Path, sketches: list[Figure], mistakes: Callable[[Figure], list[str]]
) -> None:
    work_per_rank(
        tmp_path / "work.png", np.linspace(1, 3, ranks), np.linspace(2, 2.2, ranks), width_in=width_in,
        quantity="attention kernel time", rank_name="rank (8 devices each)", pairs_kept=(0.33, 1.0),
        names=("packed", "per_document_cp"),
    )  # fmt: skip
    assert mistakes(sketches[-1]) == []
    said = [" ".join(text.split()) for text in words(sketches[-1])]
    assert {"attention kernel time, × mean", "rank (8 devices each)"} <= set(said)
    assert any(text.startswith("packed (33% of the pairs): ") for text in said)
    assert any(text.startswith("per_document_cp: ") for text in said)
    assert any("the mean attention kernel time" in text for text in said)


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


@pytest.mark.parametrize("width_in", [WIDE_IN, NARROW_IN])
@pytest.mark.parametrize("ratio", [0.02, 0.2, 0.4, 0.55, 0.7, 0.85, 0.97, 1.0, 1.3, 4.0, 40.0])
def test_no_text_of_a_timeline_lies_on_another(
    ratio: float, width_in: float, tmp_path: Path, sketches: list[Figure], mistakes: Callable[[Figure], list[str]]
) -> None:
    panels = {"packed": step(0.0, [0.7 * ratio, 0.35 * ratio]), "per_document_cp": step(0.0, [0.7, 0.7])}
    for kept in ({}, {"packed": 0.13}, {"packed": 0.13, "per_document_cp": 0.82}):
        step_timeline(tmp_path / "t.png", panels, pairs_kept=kept, width_in=width_in, note="a note", title="a title")
        assert mistakes(sketches[-1]) == []
        for axes, name in zip(sketches[-1].axes, panels, strict=True):
            title = " ".join(axes.get_title(loc="left").split())
            assert (f"on {kept[name]:.0%} of the pairs" in title) if name in kept else "pairs" not in title


def test_a_length_stands_at_its_line(tmp_path: Path, sketches: list[Figure]) -> None:
    """Beside it on either side, at the top of its panel: not somewhere where there happens to be room."""
    for ratio in (0.1, 0.5, 1.0):
        step_timeline(tmp_path / "t.png", {"packed": step(0.0, [ratio, ratio]), "balanced": step(0.0, [1.0, 1.0])})
        sketches[-1].draw_without_rendering()
        for axes, length_s in zip(sketches[-1].axes, (ratio, 1.0), strict=True):
            [label] = axes.texts
            box, line = label.get_window_extent(), axes.transData.transform((length_s, 0))
            assert min(abs(box.x0 - line[0]), abs(box.x1 - line[0])) < 20
            assert abs(box.y0 - line[1]) < 60


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


def test_text_is_broken_into_even_lines_that_fit(tmp_path: Path) -> None:
    with picture(tmp_path / "x.png", height_in=2, title="x") as figure:
        figure.subplots()
        text = "a title of some words that is too long for the width it has, by one word"
        room = 0.9 * figure.text(0, 0, text, fontsize=11).get_window_extent().width
        lines = wrapped(figure, text, room, fontsize=11).split("\n")
        assert " ".join(lines) == text
        assert len(lines) == 2
        assert min(map(len, lines)) > 0.7 * max(map(len, lines))
        assert wrapped(figure, "one" * 90, room, fontsize=11).replace("\n", "") == "one" * 90
        assert wrapped(figure, "short", room, fontsize=11) == "short"


def test_a_picture_grows_by_the_lines_of_its_title(tmp_path: Path, figures: list[Figure]) -> None:
    for title in ("short", "a long title " * 20):
        with picture(tmp_path / "x.png", height_in=2, title=title, width_in=NARROW_IN) as figure:
            figure.subplots()
    short, long = figures
    lines = long.texts[0].get_text().count("\n")
    assert lines > 2
    assert long.get_figheight() == pytest.approx(short.get_figheight() + 0.25 * lines)
    assert long.axes[0].get_window_extent().height == pytest.approx(short.axes[0].get_window_extent().height, rel=0.1)


def test_a_failed_drawing_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), picture(tmp_path / "x.png", height_in=2, title="x"):
        raise RuntimeError
    assert not (tmp_path / "x.png").exists()
