"""`steelyard demo`, small, as a user runs it: two processes, JSON, pictures and a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.cli.main import main

WAY_KEYS = {"tokens_per_s", "idle_share", "work_max_over_mean", "loss_last"}
KEYS = {"packed", "balanced", "speedup", "speedup_predicted", "loss_max_abs_diff", "grad_max_rel_diff"} | {
    "ranks",
    "steps",
    "out_dir",
}


def test_both_ways_compute_the_same_and_leave_what_they_promise(tmp_path: Path) -> None:
    out_dir = tmp_path / "demo"
    argv = ["demo", "--json", "--steps", "2", "--repeats", "2", "--chunk-tokens", "512", "--out-dir", str(out_dir)]
    done = subprocess.run(
        [sys.executable, "-m", "steelyard.cli.main", *argv], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) == KEYS
    assert set(figures["packed"]) == set(figures["balanced"]) == WAY_KEYS
    assert figures["loss_max_abs_diff"] < 1e-5 and figures["grad_max_rel_diff"] < 1e-4
    assert figures["ranks"] == 2 and figures["steps"] == 2
    assert 1 <= figures["balanced"]["work_max_over_mean"] < 1.1
    written = {path.name for path in out_dir.iterdir()}
    assert {"demo.json", "work-per-rank.png", "step-timeline.png", "trace-packed.json.gz"} <= written
    runs = json.loads((out_dir / "demo.json").read_text())["runs"]
    assert [run["batch"] for run in runs["packed"]] == [run["batch"] for run in runs["balanced"]] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [("--steps", "0", "at least 1"), ("--seconds", "0", "above 0"), ("--chunk-tokens", "8", "at least 256")],
)
def test_what_cannot_run_is_refused(flag: str, value: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", flag, value]) == 2
    assert told in capsys.readouterr().err
