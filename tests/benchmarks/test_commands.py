"""Every file of benchmarks/ can be loaded, and those with flags print their help: what they import exists."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_it_starts(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    if "argparse.ArgumentParser" not in path.read_text(encoding="utf-8"):
        assert runpy.run_path(str(path), run_name=path.stem)
        return
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith(f"usage: {path.name}")
