"""The messages that `docs/errors.md` quotes are messages of ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(r"^\| (`.+`) \| .+ \|$", re.MULTILINE)
"""The first cell of a row; exit codes stand without quotes."""


def quoted() -> list[str]:
    """What is quoted, without the dots that stand for what changes."""
    cells = CELL.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    pieces = (piece.strip() for cell in cells for text in re.findall(r"`([^`]+)`", cell) for piece in text.split("…"))
    return sorted({piece for piece in pieces if len(piece) > 2})


@pytest.fixture(scope="module")
def texts() -> str:
    """All strings of the package, with dots for what is filled in."""
    found: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
    return "\n".join(found)


def test_there_is_something_quoted() -> None:
    assert len(quoted()) >= 20


@pytest.mark.parametrize("piece", quoted())
def test_messages_exist(texts: str, piece: str) -> None:
    assert piece in texts
