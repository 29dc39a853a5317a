"""benchmarks/planner*.py: what they say of figures, and what they count and leave out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.errors import PlanError
from steelyard.planner import make_plan
from steelyard.planner.checks import PlanReport, verify

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))


def benchmark(name: str) -> ModuleType:
    return importlib.import_module(name)


# --- planner ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [["--only", "*n8"], ["--parts", "growth"], ["--tolerances", "0.1"], ["--growth", "8"]])
def test_a_part_does_not_take_the_place_of_the_whole(part: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = (BENCHMARKS.parent / "docs/results/planner.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        benchmark("planner").main(part)
    assert ended.value.code == 2
    assert f"{part[0]}: would leave only a part of docs/results/planner.json; add --out" in capsys.readouterr().err
    assert (BENCHMARKS.parent / "docs/results/planner.json").read_bytes() == before


def test_a_part_has_a_page_of_its_own(tmp_path: Path) -> None:
    growth = ["--parts", "growth", "--growth", "8", "16", "--out", str(tmp_path)]
    benchmark("planner").main(growth)
    page = (tmp_path / "planner.md").read_text(encoding="utf-8")
    assert "| spanning, layout chosen | 16 |" in page and page.count("Not measured.") == 6
    assert (tmp_path / "planner-growth.png").read_bytes().startswith(b"\x89PNG")


# --- the page ---------------------------------------------------------------------------------------------------------


def batch(number: int, total: int, busiest: int, plan_ms: float, workload: str = "w_n64") -> dict[str, Any]:
    return {
        "workload": workload, "servers": 64, "batch": number, "tolerance": 0.02, "bytes_total": total,
        "busiest_bytes": busiest, "plan_ms": plan_ms, "tables_ms": 2.0,
    }  # fmt: skip


def test_what_choosing_the_layout_brings_is_counted() -> None:
    given = [batch(0, 100, 10, 1.0), batch(1, 100, 10, 1.0), batch(2, 100, 10, 1.0), batch(3, 7, 1, 1.0, "whole_n64")]
    other = {**batch(0, 1, 1, 99.0), "tolerance": 0.1}
    chosen = [batch(0, 50, 11, 5.0), batch(1, 80, 9, 8.5), batch(2, 60, 12, 6.0), other]
    lines = benchmark("planner_report").chosen_lines({"workloads": given, "chosen": chosen})
    assert lines == [
        "- Choosing the layout saves 20% to 50% of a batch's bytes, 40% in the median of 3 batches at tolerance 0.02. "
        "The busiest server is lighter in 1 of them, and 10% to 20% heavier in 2 (w_n64).",
        "- *Times with the layout chosen too*: 1 of 3 at 64 above 10 ms (worst 10.5). Of that, 25% in the median is "
        "the tables of all servers, which no rank of a training run builds.",
    ]
    easy = benchmark("planner_report").chosen_lines({"workloads": given, "chosen": [batch(0, 50, 9, 5.0)]})
    assert len(easy) == 1 and easy[0].endswith("The busiest server is lighter in 1 of them.")


def test_what_transfers_take_is_counted() -> None:
    def row(transfer: float, by_time: float, *, chosen: bool = False) -> dict[str, Any]:
        return {
            "workload": "w", "servers": 8, "batch": 2, "layout_chosen": chosen, "transfer_over_attention": transfer,
            "slowest_over_mean": 1.02, "slowest_over_mean_by_time": 1.02 * by_time,
        }  # fmt: skip

    lines = benchmark("planner_alternatives").transfer_lines
    assert lines({"transfers": [row(0.5, 1.0), row(1.04, 0.997), row(1.21, 1.002, chosen=True)]})[-1] == (
        "In 2 of 3 plans a server's transfers last longer than its attention, by up to 21% (w, batch 2, layout "
        "chosen). Balancing time instead of pairs changes the slowest server of a plan by -0.30% to +0.20%."
    )
    assert (
        "In 0 of 1 plans a server's transfers last longer than its attention. " in lines({"transfers": [row(1, 1)]})[-1]
    )


# --- the gap ----------------------------------------------------------------------------------------------------------


def compared(reports: dict[str, PlanReport | None], balanced: PlanReport, layout: Layout) -> Any:
    gap = benchmark("planner_gap")

    def exact(objective: str) -> PlanReport:
        report = reports[objective]
        if report is None:
            raise PlanError("time is up")
        return report

    gaps = gap.Gaps("rows, whole")
    gap._compare(gaps, gap.FAMILIES[0], layout, balanced, exact)
    return gaps


def test_a_case_is_counted_once() -> None:
    layout = Layout.from_doc_lengths([[20], [4] * 5])
    tolerance = benchmark("planner_gap").FAMILIES[0].tolerance
    report, still = (verify(make_plan(layout, shape=LLAMA3_8B, tolerance=t)) for t in (tolerance, 5.0))
    assert report.bytes_total and not still.bytes_total
    good = compared({"total": report, "busiest": report}, report, layout)
    assert good.total == good.busiest == [1.0] and len(good.bound) == 1
    assert (good.unsolved, good.nothing_to_send, good.other_caps) == (0, 0, 0)
    for reports, name in (
        ({"total": report, "busiest": None}, "unsolved"),
        ({"total": None, "busiest": report}, "unsolved"),
        ({"total": still, "busiest": None}, "nothing_to_send"),
    ):
        left_out = compared(reports, report, layout)
        assert getattr(left_out, name) == 1
        assert left_out.total == left_out.busiest == left_out.bound == []
        assert left_out.unsolved + left_out.nothing_to_send + left_out.other_caps == 1


def test_plans_of_other_caps_are_not_compared() -> None:
    layout = Layout.from_doc_lengths([[20], [4] * 5])
    tolerance = benchmark("planner_gap").FAMILIES[0].tolerance
    tight, loose = (verify(make_plan(layout, shape=LLAMA3_8B, tolerance=t)) for t in (tolerance, 0.6))
    assert loose.bytes_total and loose.work_max_over_mean > 1 + tolerance
    gaps = compared({"total": loose, "busiest": loose}, tight, layout)
    assert gaps.other_caps == 1 and gaps.total == []
    assert benchmark("planner_gap").within(np.array([3, 4]), [3, 4])
    assert not benchmark("planner_gap").within(np.array([3, 4]), [4, 3])
