from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from steelyard.cli.output import command_output


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with command_output(as_json=True) as output:
        print("a library that prints")
        output.console.print("for people")
        output.result({"a": np.float64(1.5), "b": (1, float("nan")), "c": np.arange(2), "d": np.bool_(True), "e": None})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1.5, "b": [1, None], "c": [0, 1], "d": True, "e": None}
    assert captured.err == "a library that prints\nfor people\n"


def test_without_json_people_read_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    stdout = sys.stdout
    with command_output(as_json=False) as output:
        output.console.print("for people")
        output.result({"a": 1})
    assert capsys.readouterr().out == "for people\n"
    assert sys.stdout is stdout
