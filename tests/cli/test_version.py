from __future__ import annotations

import json
import platform

import pytest

import steelyard
from steelyard.cli.main import main


def test_version_names_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    captured = capsys.readouterr()
    versions = json.loads(captured.out)
    assert versions["steelyard"] == steelyard.__version__
    assert versions["python"] == platform.python_version()
    assert versions["torch"]
    assert "numpy" in captured.err
