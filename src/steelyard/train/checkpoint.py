"""Checkpoints: written in the background, complete or absent, readable by any number of ranks.

A checkpoint is a folder `step-00000120` with torch's distributed checkpoint (parameters, optimizer state, random
state; the same for DDP and FSDP2) and `run.json` (step, position in the data, configuration). It is written as
`.partial-step-00000120`, forced to disk and renamed: a folder with the final name is complete, whatever was killed
and whenever. The newest one is found by its name; there is no pointer that could be wrong.

All ranks must see the same folder. Writing uses a process group of its own, because its messages travel while the
next steps run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from steelyard.domain.units import format_bytes
from steelyard.errors import CheckpointError, UsageError

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"
_REPLACED = ".replaced"
_RUN_FILE = "run.json"
_LOCK_FILE = ".lock"
_FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says beside the tensors.

    Attributes:
        step: optimizer steps done.
        tokens: tokens trained on so far, over all ranks.
        loader: position of every lane in the data, as `data` gave it (JSON).
        config: the run's configuration (JSON), to compare with the one that resumes.
    """

    step: int
    tokens: int
    loader: Mapping[str, Any]
    config: Mapping[str, Any]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first; none if there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_run_state(path: Path) -> RunState:
    """Read `run.json` of the checkpoint at `path`.

    Raises:
        CheckpointError: there is no readable checkpoint.
    """
    try:
        values = json.loads((path / _RUN_FILE).read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {values['format']}, this version reads {_FORMAT}: "
                "resume with the version that wrote it"
            )
        return RunState(values["step"], values["tokens"], values["loader"], values["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no readable checkpoint ({type(error).__name__}: {error}); "
            f"expected a folder named step-… that holds run.json{_older_one(path)}"
        ) from error


@contextlib.contextmanager
def claim(folder: Path, *, join: bool = False) -> Iterator[None]:
    """Keep the checkpoints in `folder` to one run while this is entered; the kernel ends a claim with its process.

    The claim is advisory: a file system that knows no locks grants every one.

    Args:
        join: share the claim of the run that this process belongs to, so that it lasts when the launcher is killed.

    Raises:
        UsageError: another run has it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"checkpoint folder {folder}: cannot be written ({error}); choose another") from error
    try:
        # An exclusive lock shows that nobody else is there; a shared one lets our own workers in and no other run.
        for kind in (fcntl.LOCK_SH,) if join else (fcntl.LOCK_EX, fcntl.LOCK_SH):
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"checkpoint folder {folder}: another run is using it; wait until that has ended, or choose "
                    "another out_dir"
                ) from None
            except OSError:  # no locks here
                break
        yield
    finally:
        os.close(descriptor)


class Checkpointer:
    """Saves and loads checkpoints in one folder. All methods are collective unless they say otherwise.

    Args:
        folder: where checkpoints are; seen by all ranks; made by the first save.
        keep_last: complete checkpoints that remain after a save.
        group: a process group with a CPU backend that nothing else uses.
    """

    def __init__(self, folder: Path, *, keep_last: int, group: dist.ProcessGroup) -> None:
        self.folder, self.keep_last = folder, keep_last
        self._group = group
        self._pending: tuple[Path, Future[Any]] | None = None
        self._last: Path | None = None

    def remove_partial(self) -> None:
        """Delete what a killed run left half written, and put back a checkpoint that it was just replacing.

        Call it on one rank, before any save; not collective.
        """
        if self.folder.is_dir():
            for path in self.folder.glob(f"{_PARTIAL}step-*{_REPLACED}"):
                final = path.with_name(path.name.removeprefix(_PARTIAL).removesuffix(_REPLACED))
                if not final.exists():
                    path.rename(final)
                    _sync_folder(self.folder)
            for path in self.folder.glob(f"{_PARTIAL}*"):
                shutil.rmtree(path, ignore_errors=True)

    def save(self, module: nn.Module, optimizer: torch.optim.Optimizer, run: RunState) -> Path:
        """Copy the state and start writing it; returns once the copy is made.

        Waits for the previous save first: there is never more than one copy in memory.

        Returns:
            The folder that will exist when the write is complete.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "random": torch.get_rng_state()}
        path = self.folder / f"step-{run.step:08d}"
        writer = _AtomicWriter(path, run, self.keep_last)
        future = async_save(state, storage_writer=writer, process_group=self._group)
        assert isinstance(future, Future)  # the writer stages at once; only other stagers give two futures
        self._pending = (path, future)
        return path

    def poll(self) -> CheckpointError | None:
        """Look whether a save has ended, without waiting: its error if it failed. Not collective."""
        if self._pending is None or not self._pending[1].done():
            return None
        return self._collect()

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are as they were.
        """
        if self._pending is not None:
            error = self._collect()
            if error is not None:
                raise error

    @property
    def last(self) -> Path | None:
        """The checkpoint that this object wrote last and that is known to be complete."""
        return self._last

    def load(self, path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> RunState:
        """Load parameters, optimizer state and random state in place; any number of ranks, DDP or FSDP2.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
        """
        run = read_run_state(path)
        model_state, optimizer_state = get_state_dict(module, optimizer)
        random_state: Tensor = torch.get_rng_state()
        state = {"model": model_state, "optimizer": optimizer_state, "random": random_state}
        try:
            load(state, storage_reader=FileSystemReader(path), process_group=self._group)
        except CheckpointException as error:
            raise CheckpointError(_not_loadable(path, _first_failure(error)[1])) from error
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(_not_loadable(path, error)) from error
        set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        torch.set_rng_state(random_state)
        return run

    def _collect(self) -> CheckpointError | None:
        assert self._pending is not None
        path, future = self._pending
        try:
            future.result()
        except (CheckpointException, Exception) as error:  # the former is a BaseException
            self._pending = None
            return self._failure(path, error)
        self._pending = None
        self._last = path
        return None

    def _failure(self, path: Path, error: BaseException) -> CheckpointError:
        rank, cause = _first_failure(error) if isinstance(error, CheckpointException) else (None, error)
        partial = path.with_name(_PARTIAL + path.name)
        written = sum(f.stat().st_size for f in partial.glob("*")) if partial.is_dir() else 0
        with contextlib.suppress(OSError):
            if dist.get_rank(self._group) == 0:
                shutil.rmtree(partial, ignore_errors=True)
        earlier = complete_checkpoints(path.parent)
        kept = f"the earlier checkpoint {earlier[-1].name} is intact" if earlier else "there is no earlier checkpoint"
        where = f" on rank {rank}" if rank is not None else ""
        if _is_disk_full(cause):
            return CheckpointError(
                f"disk full while writing checkpoint {path}{where} (after {format_bytes(written)}); {kept}. "
                "Free space there, lower checkpoint.keep_last or set checkpoint.dir to another disk, then run again: "
                "it resumes"
            )
        reason = (str(cause).strip().splitlines() or [""])[0]
        return CheckpointError(
            f"checkpoint {path} could not be written{where}: {type(cause).__name__}: {reason}; {kept}. "
            "Check that every rank can write there"
        )


class _AtomicWriter(FileSystemWriter):
    """Writes to a partial folder; the coordinator gives it its final name once every rank's data are on disk."""

    def __init__(self, path: Path, run: RunState, keep_last: int) -> None:
        self._final, self._run, self._keep_last = path, run, keep_last
        super().__init__(path.with_name(_PARTIAL + path.name), sync_files=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on one rank, after all have written; an error here reaches every rank."""
        super().finish(metadata, results)
        partial = self._final.with_name(_PARTIAL + self._final.name)
        values = {
            "format": _FORMAT,
            "step": self._run.step,
            "tokens": self._run.tokens,
            "loader": self._run.loader,
            "config": self._run.config,
        }
        with (partial / _RUN_FILE).open("w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        replaced = partial.with_name(f"{partial.name}{_REPLACED}")
        if self._final.exists():  # the same step again, after resuming from an older one
            self._final.rename(replaced)
        partial.rename(self._final)
        _sync_folder(self._final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in complete_checkpoints(self._final.parent)[: -max(1, self._keep_last)]:
            # Take the name away first: a checkpoint that is half deleted must not look complete.
            doomed = old.with_name(f"{_PARTIAL}{old.name}.old")
            old.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _not_loadable(path: Path, cause: BaseException) -> str:
    return f"checkpoint {path} cannot be loaded: {cause}{_older_one(path)}"


def _older_one(path: Path) -> str:
    """What to do about a damaged checkpoint, if there is an older one."""
    complete = complete_checkpoints(path.parent)
    older = complete[: complete.index(path)] if path in complete else []
    return f"; to go on from {older[-1].name}, move {path.name} out of its folder" if older else ""


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # torch's zip writer reports a failed write as a RuntimeError that lost the errno
        if "No space left on device" in str(error) or "unexpected pos" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
