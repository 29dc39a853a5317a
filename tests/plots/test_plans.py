from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from steelyard.errors import UsageError
from steelyard.plots.plans import PolicyWork, work_by_policy
from steelyard.plots.work import draw_work_panel


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_any_number_of_panels(count: int, tmp_path: Path) -> None:
    panels = [PolicyWork(f"policy{i}", [1, 2, 3 + i], 5 * i, 1 + i / 10, 1 - i / 10) for i in range(count)]
    work_by_policy(tmp_path / "work.png", panels, note="a note")
    assert (tmp_path / "work.png").read_bytes().startswith(b"\x89PNG")


def drawn(tmp_path: Path, panels: list[PolicyWork], speeds: tuple[float, ...] = ()) -> str:
    """The texts of the picture, one a line."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        work_by_policy(tmp_path / "work.svg", panels, speeds=speeds)
    return "\n".join(re.findall(r">([^<>]+)</text>", (tmp_path / "work.svg").read_text()))


def test_ranks_of_speed_zero_keep_their_place(tmp_path: Path) -> None:
    panels = [PolicyWork("packed", [5, 3, 4], 0), PolicyWork("balanced", [8, 0, 4], 0)]
    texts = drawn(tmp_path, panels, speeds=(1.0, 0.0, 0.5)).splitlines()
    assert "Work of the busiest rank over its share: packed cannot finish, balanced 1.00×" in texts
    assert "packed: cannot finish" in texts and "balanced: 0% waiting" in texts
    assert texts.count("speed 0, has work") == texts.count("speed 0") == 1
    assert [label for label in texts if label in ("0", "1", "2")] == ["0", "1", "2"] * 2
    assert not [text for text in texts if "inf" in text or "nan" in text]


def test_nothing_but_ranks_of_speed_zero_at_work(tmp_path: Path) -> None:
    assert "packed: cannot finish" in drawn(tmp_path, [PolicyWork("packed", [0, 3], 0)], speeds=(1.0, 0.0))


@pytest.mark.parametrize("speeds", [(), (0.0, *[1.0] * 999)])
def test_many_ranks_are_few_shapes(tmp_path: Path, speeds: tuple[float, ...]) -> None:
    texts = drawn(tmp_path, [PolicyWork("packed", [0, *[1] * 998, 999], 0)], speeds=speeds)
    assert ("no bar: 1 of speed 0" in texts) == bool(speeds)
    assert (tmp_path / "work.svg").read_text().count("<path") < 100


@pytest.mark.parametrize("ranks", [4, 12, 13, 64, 600])
@pytest.mark.parametrize("busiest", [0, -1])
def test_the_busiest_ranks_number_stays_in_its_panel(busiest: int, ranks: int) -> None:
    figure = Figure(figsize=(9.0, 4.0), dpi=200, layout="constrained")  # as `picture`
    panels = figure.subplots(1, 2)
    work = np.ones(ranks)
    work[busiest] = 1.59
    for axes in panels:
        draw_work_panel(axes, work, np.zeros(ranks), work)
        axes.set_ylim(0, 3)
    FigureCanvasAgg(figure).draw()
    for axes in panels:
        (number,) = [text for text in axes.texts if text.get_text().startswith("1.59")]
        box, panel = number.get_window_extent(), axes.get_window_extent()
        assert panel.x0 <= box.x0 and box.x1 <= panel.x1


def test_one_rank_is_number_0(tmp_path: Path) -> None:
    assert not re.search("^1$", drawn(tmp_path, [PolicyWork("packed", [7], 0)]), re.MULTILINE)


@pytest.mark.parametrize(
    ("panels", "speeds"),
    [
        ([], ()),
        ([PolicyWork("a", [1, 2], 0), PolicyWork("b", [1, 2, 3], 0)], ()),
        ([PolicyWork("a", [0, 0], 0)], ()),
        ([PolicyWork("a", [1, 2], 0)], (1.0,)),
    ],
)
def test_what_cannot_be_drawn(panels: list[PolicyWork], speeds: tuple[float, ...], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="work by policy"):
        work_by_policy(tmp_path / "work.png", panels, speeds=speeds)
