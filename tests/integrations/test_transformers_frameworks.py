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


@pytest.mark.parametrize("framework", ["trainer", "accumulated", "ping_pong", "accelerate"])
def test_two_ranks_are_the_documents_one_by_one(two: dict[str, Any], framework: str) -> None:
    stock, found = by_hand.stock(), two[framework]
    assert found["losses"][: by_hand.STEPS] == pytest.approx(stock["losses"], rel=2e-6)
    weights = found.get("trained_weights", found["weights"])  # the Trainer goes on training after losses are taken
    assert weights == pytest.approx(stock["weights"], rel=2e-6)


def test_trl_s_packed_rows_are_the_documents_one_by_one(two: dict[str, Any]) -> None:
    found = two["trl"]
    documents = [ids for step in found["documents_by_step"] for ids in step]
    known = [doc["input_ids"] for doc in by_hand.DOCS]
    assert len(documents) > 2 * by_hand.STEPS, "rows must hold several documents"
    assert all(ids in known for ids in documents), "TRL must not have cut any"
    stock = by_hand.stock(found["documents_by_step"])
    assert found["losses"] == pytest.approx(stock["losses"], rel=2e-6)
    assert found["weights"] == pytest.approx(stock["weights"], rel=2e-6)


def test_ping_pong_under_the_trainer_interleaves_and_evaluates(two: dict[str, Any]) -> None:
    """`Trainer(model=PingPong(model))`, which it wraps into DDP: both halves' transfers start before either is back."""
    order = list(dict.fromkeys(two["ping_pong"]["order"]))  # queries, and keys with values: two transfers each
    assert order[:2] == ["dispatch layer 0 nano 0", "dispatch layer 0 nano 1"]
    assert not any("nano 1" in point for point in two["trainer"]["order"])
    assert two["ping_pong"]["eval_loss"] == pytest.approx(two["trainer"]["eval_loss"], rel=1e-5)


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
    assert log["steelyard/slowest_busy_over_median"] == 1.0, "both ranks' clocks go alike"
    slow = two["trainer"]["slow"]
    assert slow["steelyard/slowest_rank"] == 1 and slow["steelyard/slowest_busy_over_median"] == 1.5  # 3 s, and 1 s
    assert 0.9 < slow["steelyard/slowest_work_over_mean"] < 1.1, "it is slow, not overloaded"


def test_evaluation_of_a_ragged_last_batch(two: dict[str, Any]) -> None:
    assert two["trainer"]["eval_loss"] > 0  # the Trainer's own goes through, as a mean of means
    for name in ("evaluated", "evaluated_by_loader"):
        assert two["trainer"][name] == pytest.approx(two["trainer"]["evaluated_by_hand"], rel=2e-6)
