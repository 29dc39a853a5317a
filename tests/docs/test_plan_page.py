"""The example of docs/plan.md prints what the page shows, but for the times."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def without_times(text: str) -> list[str]:
    """Rows of figures lose their last two columns; other lines stay."""
    return [re.sub(r"(\s+[\d,]+\.\d){2}$", "", line) for line in text.splitlines()]


def test_the_example_of_the_planning_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("generate_plan", DOCS / "generate_plan.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.setenv(name, "")  # what the example sets is undone afterwards
    page = generator.TARGET.read_text(encoding="utf-8")
    found = generator.MARKED.search(page)
    shown = found[0].partition("```text\n")[2].rpartition("\n```")[0]
    assert "balanced" in shown
    assert without_times(shown) == without_times(generator.output_of(page)), (
        f"docs/plan.md is out of date: run `{generator.COMMAND}` and commit the result"
    )
