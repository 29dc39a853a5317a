"""Checkpoints: complete or absent, whatever fails and whenever; what is loaded is what was saved."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import filesystem

from steelyard.errors import CheckpointError, UsageError
from steelyard.train.checkpoint import (
    Checkpointer,
    RunState,
    _AtomicWriter,
    claim,
    complete_checkpoints,
    read_run_state,
)
from steelyard.train.config import OptimizerConfig
from steelyard.train.optimizer import build_adamw


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def parts(seed: int, width: int = 8) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))
    return module, build_adamw(module, OptimizerConfig(lr=0.1))


def train(module: nn.Module, optimizer: torch.optim.AdamW, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = module(torch.ones(3, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(step: int) -> RunState:
    return RunState(step, 100 * step, {"lanes": {"0": step}}, {"seed": 1, "model": {"layers": 2}})


def save_steps(checkpointer: Checkpointer, steps: list[int]) -> None:
    module, optimizer = parts(0)
    train(module, optimizer, 1)
    for step in steps:
        checkpointer.save(module, optimizer, state(step))
    checkpointer.wait()


def test_training_goes_on_exactly(group: dist.ProcessGroup, tmp_path: Path) -> None:
    module, optimizer = parts(seed=1)
    train(module, optimizer, 5)
    checkpointer = Checkpointer(tmp_path / "c", keep_last=2, group=group)
    path = checkpointer.save(module, optimizer, state(5))
    random_state = torch.get_rng_state()
    expected = train(module, optimizer, 5)  # while the write is under way: it must not see these steps
    checkpointer.wait()
    assert checkpointer.last == path == tmp_path / "c" / "step-00000005"

    other, other_optimizer = parts(seed=2)
    run = Checkpointer(tmp_path / "c", keep_last=2, group=group).load(path, other, other_optimizer)
    assert run == state(5)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert train(other, other_optimizer, 5) == expected


def test_the_last_ones_are_kept(group: dist.ProcessGroup, tmp_path: Path) -> None:
    save_steps(Checkpointer(tmp_path, keep_last=2, group=group), [1, 2, 3, 10])
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step-00000003", "step-00000010"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_the_same_step_again_replaces_it(group: dist.ProcessGroup, tmp_path: Path) -> None:
    save_steps(Checkpointer(tmp_path, keep_last=2, group=group), [4, 4])
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step-00000004"]


def test_what_a_killed_writer_left_is_not_a_checkpoint(group: dist.ProcessGroup, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2, group=group)
    save_steps(checkpointer, [3])
    (tmp_path / ".partial-step-00000009").mkdir()
    (tmp_path / ".partial-step-00000009" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step-00000003"]
    checkpointer.remove_partial()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-00000003"]
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_killed_between_the_two_renames_of_a_replaced_checkpoint(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2, group=group)
    save_steps(checkpointer, [4])
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target.name == "step-00000004":
            os._exit(7)
        return real(path, target)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Path, "rename", rename)
        (tmp_path / ".partial-step-00000004").mkdir()
        writer = _AtomicWriter(tmp_path / "step-00000004", state(4), 2)
        monkeypatch.setattr(filesystem.FileSystemWriter, "finish", lambda *_: None)
        writer.finish(None, [])  # type: ignore[arg-type]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert complete_checkpoints(tmp_path) == []
    checkpointer.remove_partial()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]
    assert checkpointer.load(tmp_path / "step-00000004", *parts(3)) == state(4)


def test_a_claim_keeps_other_runs_out_and_lets_its_own_workers_in(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with contextlib.ExitStack() as worker:
        with claim(folder):
            worker.enter_context(claim(folder, join=True))
        with pytest.raises(UsageError, match="another run"), claim(folder):  # the launcher was killed, a worker saves
            pass
    with claim(folder):
        pass


def test_killed_at_any_point_of_the_write_leaves_the_earlier_one(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every rename and sync in turn the process "dies": afterwards there is a complete one, old or new."""
    calls = 0
    die_at = 0

    def count(real: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == die_at:
                raise OSError(errno.EIO, "the process is killed here")
            return real(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "fsync", count(os.fsync))
    monkeypatch.setattr(Path, "rename", count(Path.rename))
    survived = []
    for point in range(1, 30):
        folder = tmp_path / str(point)
        die_at = 0
        save_steps(Checkpointer(folder, keep_last=1, group=group), [1])
        calls, die_at = 0, point
        with contextlib.suppress(CheckpointError):
            save_steps(Checkpointer(folder, keep_last=1, group=group), [2])
        die_at = 0
        complete = complete_checkpoints(folder)
        assert complete, f"nothing is left after dying at call {point}"
        module, optimizer = parts(3)
        run = Checkpointer(folder, keep_last=1, group=group).load(complete[-1], module, optimizer)
        survived.append(run.step)
        if calls < point:
            break
    assert survived[0] == 1 and survived[-1] == 2 and calls < 29


@pytest.mark.parametrize("on", ["tmpfs", "simulated"])
def test_full_disk(group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if on == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        try:
            mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            mounted = False
        if not mounted:
            pytest.skip("needs the right to mount a small file system")
    try:
        checkpointer = Checkpointer(folder, keep_last=3, group=group)
        save_steps(checkpointer, [1])
        if on == "simulated":
            real_write = filesystem._write_item

            def full(*args: Any, **kwargs: Any) -> Any:
                real_write(*args, **kwargs)
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(filesystem, "_write_item", full)
        large, optimizer = parts(0, width=20_000)
        checkpointer.save(large, optimizer, state(2))
        with pytest.raises(CheckpointError) as caught:
            checkpointer.wait()
        message = str(caught.value)
        assert "disk full" in message and "step-00000002" in message and "\n" not in message
        assert "step-00000001 is intact" in message and "checkpoint.dir" in message
        monkeypatch.undo()
        module, optimizer = parts(5)
        assert checkpointer.load(complete_checkpoints(folder)[-1], module, optimizer).step == 1
        assert [p.name for p in folder.iterdir()] == ["step-00000001"]
        save_steps(checkpointer, [3])  # there is room again for a small one
        assert complete_checkpoints(folder)[-1].name == "step-00000003"
    finally:
        if on == "tmpfs":
            subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def test_a_failed_save_shows_at_the_next_look(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    checkpointer = Checkpointer(tmp_path / "file" / "c", keep_last=1, group=group)
    module, optimizer = parts(0)
    assert checkpointer.poll() is None
    checkpointer.save(module, optimizer, state(1))
    while (error := checkpointer.poll()) is None:
        assert checkpointer._pending is not None
    assert isinstance(error, CheckpointError) and "could not be written" in str(error)
    assert checkpointer.poll() is None and checkpointer.last is None


def test_unreadable_checkpoints_are_named(group: dist.ProcessGroup, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2, group=group)
    save_steps(checkpointer, [1, 2])
    path = tmp_path / "step-00000002"
    wide, optimizer = parts(0, width=16)
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be loaded.*go on from step-00000001"):
        checkpointer.load(path, wide, optimizer)
    with pytest.raises(CheckpointError, match=r"step-00000001 cannot be loaded") as oldest:
        checkpointer.load(tmp_path / "step-00000001", wide, optimizer)
    assert "go on from" not in str(oldest.value)
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**run, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read_run_state(path)
    (path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        read_run_state(path)
