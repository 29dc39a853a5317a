from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.errors import UsageError
from steelyard.plots.plans import PolicyWork, work_by_policy


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_any_number_of_panels(count: int, tmp_path: Path) -> None:
    panels = [PolicyWork(f"policy{i}", [1, 2, 3 + i], 5 * i, 1 + i / 10, 1 - i / 10) for i in range(count)]
    work_by_policy(tmp_path / "work.png", panels, note="a note")
    assert (tmp_path / "work.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_of_speed_zero_have_no_bar(tmp_path: Path) -> None:
    work_by_policy(tmp_path / "work.svg", [PolicyWork("packed", [5, 3, 4], 0)], speeds=(1.0, 0.0, 0.5))
    assert "<svg" in (tmp_path / "work.svg").read_text()


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
