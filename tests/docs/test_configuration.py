"""The configuration reference is the one that the dataclasses say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_configuration_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_configuration", DOCS / "generate_configuration.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = generator.TARGET.read_text(encoding="utf-8")
    assert "| `chunk_tokens` | whole number | `8192` |" in written
    assert written == generator.page(), (
        f"docs/configuration.md is out of date: run `{generator.COMMAND}` and commit the result"
    )
