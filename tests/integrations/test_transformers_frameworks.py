"""Trainer, accelerate and TRL, unchanged: the same losses and parameters on one rank and on two, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import by_hand
import pytest

HERE = Path(__file__).parent


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "multiprocess"), str(HERE)]),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    return json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[len("RESULT ") :])


def run(folder: Path, ranks: int) -> dict[str, Any]:
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    return result_of(start(folder, *launch, str(HERE / "frameworks_run.py")))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found."""
    return run(tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("framework", ["trainer", "accumulated", "accelerate"])
def test_two_ranks_are_the_documents_one_by_one(two: dict[str, Any], framework: str) -> None:
    stock, found = by_hand.stock(), two[framework]
    assert found["losses"][: by_hand.STEPS] == pytest.approx(stock["losses"], rel=2e-6)
    if framework == "accelerate":  # the Trainer goes on training after the losses are taken
        assert found["weights"] == pytest.approx(stock["weights"], rel=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_is_the_same(two: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    other = run(tmp_path, ranks)
    for framework in ("trainer", "accumulated", "accelerate", "trl") if ranks == 1 else ("trainer", "accelerate"):
        assert other[framework]["losses"] == pytest.approx(two[framework]["losses"], rel=2e-6)
        assert other[framework]["weights"] == pytest.approx(two[framework]["weights"], rel=1e-6)
    assert other["trainer"]["evaluated"] == pytest.approx(two["trainer"]["evaluated"], rel=2e-6)


def test_log_lines_name_the_balance_and_a_slow_rank(two: dict[str, Any]) -> None:
    log = two["trainer"]["log"]
    assert log["steelyard/work_max_over_mean"] <= 1.05 < log["steelyard/work_max_over_mean_packed"]
    slow = two["trainer"]["slow"]
    assert slow["steelyard/slowest_rank"] == 1 and slow["steelyard/slowest_busy_over_median"] > 1.2
    assert 0.9 < slow["steelyard/slowest_work_over_mean"] < 1.1, "it is slow, not overloaded"


def test_evaluation_of_a_ragged_last_batch(two: dict[str, Any]) -> None:
    assert two["trainer"]["eval_loss"] > 0  # the Trainer's own goes through, as a mean of means
    assert two["trainer"]["evaluated"] == pytest.approx(two["trainer"]["evaluated_by_hand"], rel=2e-6)
