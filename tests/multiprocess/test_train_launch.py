"""`steelyard train` as a user runs it: real processes, real signals, one line for what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import train_ranks as on_rank
from train_ranks import small_config, with_attention, with_checkpoint, write_documents

from steelyard.observe.records import StepRecord, read_records
from steelyard.settings import child_environment, to_toml
from steelyard.testing.pool import WorkerPool
from steelyard.train.checkpoint import complete_checkpoints
from steelyard.train.config import TrainConfig

CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
needs_proc = pytest.mark.skipif(not CHILDREN.exists(), reason="needs /proc to find the workers")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


def start(config: TrainConfig, folder: Path, *flags: str) -> subprocess.Popen[str]:
    path = folder / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "steelyard", "train", str(path), "--json", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment({"OMP_NUM_THREADS": "1"}),
    )  # fmt: skip


def steps_done(config: TrainConfig) -> list[StepRecord]:
    path = Path(config.out_dir) / "metrics.jsonl"
    return list(read_records(path)) if path.exists() else []


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool], limit_s: float = 90.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None or time.monotonic() > end_s:
            out, err = process.communicate(timeout=10)
            raise AssertionError(f"ended with {process.returncode} before it came that far:\n{out}\n{err}")
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(p) for p in children if b"steelyard.train.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]


@needs_proc
def test_killed_worker_changes_nothing(pool: WorkerPool, documents: Path, tmp_path: Path) -> None:
    def config(name: str) -> TrainConfig:
        given = small_config(documents, tmp_path / name, steps=24)
        return with_checkpoint(given, every_steps=4)

    killed = config("killed")
    process = start(killed, tmp_path, "--nproc", "2", "--max-restarts", "1")
    wait_until(process, lambda: len(steps_done(killed)) >= 6 and len(complete_checkpoints(killed.checkpoint_dir)) > 0)
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "restart 1 after a worker failed" in err and "resumed from" in err
    assert "Traceback" not in err
    summary = json.loads(out)
    assert summary["steps"] == 24 and summary["ranks"] == 2
    undisturbed = pool.run(on_rank.train_rank, pool.ranks, 2, config("undisturbed"))[0]
    records = steps_done(killed)
    assert [r.step for r in records] == list(range(1, 25))
    assert [r.loss for r in records] == undisturbed.losses
    assert not list(killed.checkpoint_dir.glob(".partial-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupt_saves_and_exits_130(hang_ups: None, documents: Path, tmp_path: Path, number: signal.Signals) -> None:
    config = small_config(documents, tmp_path / "out", steps=100_000)
    process = start(config, tmp_path, "--nproc", "2")
    wait_until(process, lambda: len(steps_done(config)) >= 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    done = len(steps_done(config))
    assert f"stopped as asked after step {done}" in err and "Traceback" not in err
    summary = json.loads(out)
    assert summary["steps"] == done
    assert [p.name for p in complete_checkpoints(config.checkpoint_dir)] == [f"step-{done:08d}"]
    assert summary["checkpoint"].endswith(f"step-{done:08d}")


@needs_proc
def test_workers_save_and_end_when_their_launcher_is_killed(documents: Path, tmp_path: Path) -> None:
    config = small_config(documents, tmp_path / "out", steps=100_000)
    process = start(config, tmp_path, "--nproc", "2")
    wait_until(process, lambda: len(steps_done(config)) >= 2)
    second = start(config, tmp_path)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2 and "another run is using it" in err and len(err.splitlines()) == 1, err
    workers = workers_of(process)
    process.kill()
    try:
        _, err = process.communicate(timeout=60)  # until the workers have closed the pipes too
    except subprocess.TimeoutExpired:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        raise
    done = len(steps_done(config))
    assert f"stopped as asked after step {done}" in err and "Traceback" not in err, err
    assert [p.name for p in complete_checkpoints(config.checkpoint_dir)] == [f"step-{done:08d}"]
    assert len(workers) == 2 and not any(Path(f"/proc/{worker}/exe").exists() for worker in workers)


def test_what_one_rank_cannot_read_is_one_line(documents: Path, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "texts", count=12)
    (folder / "005.txt").write_bytes(b"caf\xe9 " * 200)
    config = with_attention(small_config(folder, tmp_path / "out", steps=50), timeout_s=20.0)
    process = start(config, tmp_path, "--nproc", "2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    lines = [line for line in err.splitlines() if not line.startswith("step ")]
    assert len(lines) <= 2 and "Traceback" not in err, err
    assert lines[-1].startswith("steelyard: error: ") and "005.txt" in lines[-1]
