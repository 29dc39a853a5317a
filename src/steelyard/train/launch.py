"""Starts a training run: one process here, several through torchrun's agent, or this rank of a run already launched.

A user's mistake comes out as one error, whichever rank noticed it: workers write theirs to a folder, and the launcher
raises the one that caused the others.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from steelyard import errors
from steelyard.errors import PeerError, SteelyardError, UsageError
from steelyard.settings import ProcessSettings, to_toml
from steelyard.train.assemble import uses_gpu
from steelyard.train.checkpoint import claim
from steelyard.train.config import TrainConfig
from steelyard.train.stopping import forget_lost_terminal, stop_signals
from steelyard.train.worker import (
    CONFIG_FILE,
    LAUNCHER_FILE,
    STOP_FILE,
    SUMMARY_FILE,
    TRACEBACKS_FILE,
    run_rank,
)

INTERRUPTED = 130
_SECONDS_TO_DIE = 10


def train(
    config: TrainConfig,
    *,
    ranks: int | None = None,
    max_restarts: int = 0,
    as_json: bool = False,
    debug: bool = False,
) -> int:
    """Train as `config` says.

    Inside torchrun (RANK is set) this process becomes its rank. Otherwise `ranks` processes are started (None: one per
    GPU, or one); with more than one, or with restarts, through torchrun's agent.

    Args:
        max_restarts: how often the ranks are started again, from the last checkpoint, after a process failed.
        as_json: print the summary of the run as one JSON object on stdout, where the last line of the log would be.
        debug: leave torchrun's own messages and all ranks' tracebacks on.

    Returns:
        Exit code: 0, or 130 after a run that was stopped (Ctrl-C, SIGTERM, SIGHUP) and saved.

    Raises:
        SteelyardError: why the run did not go through; `exit_code` says whether it was a usage error.
    """
    settings = ProcessSettings.from_environment()
    if settings.launched:
        return _train_as_launched(config, settings, as_json)
    ranks = ranks if ranks is not None else _default_ranks(config)
    if ranks < 1:
        raise UsageError(f"{ranks} ranks, expected at least 1")
    if max_restarts < 0:
        raise UsageError(f"max_restarts={max_restarts}, expected 0 or more")
    _warn(config.validate(ranks))
    with claim(config.checkpoint_dir):
        _save_config(config)
        if ranks == 1 and max_restarts == 0:
            summary = json.loads(run_rank(config, settings).to_json())
        else:
            summary = launch("steelyard.train.worker", config, ranks, max_restarts=max_restarts, debug=debug)
    return _report(summary, as_json)


def _train_as_launched(config: TrainConfig, settings: ProcessSettings, as_json: bool) -> int:
    try:
        warnings = config.validate(settings.world_size)
        if settings.rank == 0:
            _warn(warnings)
        with claim(config.checkpoint_dir) if settings.rank == 0 else nullcontext():
            if settings.rank == 0:
                _save_config(config)
            summary = json.loads(run_rank(config, settings).to_json())
    except SteelyardError as error:
        if settings.rank == 0:
            raise
        if not isinstance(error, PeerError):  # nobody else knows; that a peer is missing, rank 0 says
            print(f"steelyard: rank {settings.rank}: error: {error}", file=sys.stderr)
        return error.exit_code
    return _report(summary, as_json) if settings.rank == 0 else INTERRUPTED * summary["interrupted"]


def _warn(lines: tuple[str, ...]) -> None:
    for line in lines:
        print(f"steelyard: warning: {line}", file=sys.stderr)


def _default_ranks(config: TrainConfig) -> int:
    return max(1, torch.cuda.device_count()) if uses_gpu(config.device) else 1


def _save_config(config: TrainConfig) -> None:
    """`out_dir`/config.toml: what this run was told, all defaults included."""
    folder = Path(config.out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"out_dir={config.out_dir}: cannot be written ({error}); choose another folder") from error


def _report(summary: dict[str, Any], as_json: bool) -> int:
    interrupted = summary.pop("interrupted")
    if as_json:
        print(json.dumps(summary))
    else:
        loss = "" if summary["loss_last"] is None else f", loss {summary['loss_last']:.4f}"
        speed = "" if summary["tokens_per_s"] is None else f", {summary['tokens_per_s']:.0f} tokens/s"
        saved = "" if summary["checkpoint"] is None else f"; checkpoint {summary['checkpoint']}"
        print(f"{summary['steps']} steps, {summary['tokens']} tokens{loss}{speed}{saved}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def launch(module: str, config: Any, ranks: int, *, max_restarts: int = 0, debug: bool = False) -> dict[str, Any]:
    """Run `python -m module RUN_FOLDER` as `ranks` processes under torchrun's agent and return rank 0's answer.

    Args:
        module: a worker that uses `train.worker.serve`; it finds `config`, a dataclass, in the folder as TOML.

    Raises:
        SteelyardError: the error of the rank that caused the others.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="steelyard-") as name:
        folder = Path(name)
        (folder / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
        (folder / LAUNCHER_FILE).write_text(str(os.getpid()), encoding="utf-8")
        if debug:
            (folder / TRACEBACKS_FILE).touch()
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            role="steelyard",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            # SIGINT, SIGTERM and SIGHUP are ours: the agent would give the workers seconds, and a step may take longer.
            signals_to_handle="SIGQUIT",
            shutdown_timeout=_SECONDS_TO_DIE,
        )
        try:
            with _forward_stop(folder / STOP_FILE):
                elastic_launch(agent, sys.executable)("-m", module, str(folder))
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise _cause(folder, codes, max_restarts) from None
        values: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return values


@contextmanager
def _forward_stop(stop_file: Path) -> Iterator[None]:
    """Hand SIGINT, SIGTERM and SIGHUP to the workers as a wish; a second SIGINT ends everything at once."""
    interrupts = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        stop_file.touch()
        if number == signal.SIGHUP:
            forget_lost_terminal()
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(folder: Path, exit_codes: dict[int, int], last_attempt: int) -> SteelyardError:
    """The error of the last attempt that explains the others."""
    latest = [json.loads(p.read_text(encoding="utf-8")) for p in folder.glob(f"error-{last_attempt}-*.json")]
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM}
    first = min(latest, key=lambda r: (r["type"] == PeerError.__name__, r["rank"]), default=None)
    if killed and (first is None or first["type"] == PeerError.__name__):
        rank = min(killed)
        name = signal.Signals(killed[rank]).name
        advice = " (out of memory?)" if killed[rank] == signal.SIGKILL else ""
        return SteelyardError(
            f"rank {rank} was killed by signal {killed[rank]} ({name}){advice}: run the same command again, it goes on "
            "from the last checkpoint; --max-restarts does so by itself"
        )
    if first is None:
        return SteelyardError(f"workers ended with exit codes {exit_codes} and left no message; try --debug")
    kind = getattr(errors, first["type"], None)
    if isinstance(kind, type) and issubclass(kind, SteelyardError):
        return kind(first["message"])
    print(first["traceback"], file=sys.stderr, end="")
    return SteelyardError(
        f"rank {first['rank']} failed with the error above, which is a bug in Steelyard or in a plug-in"
    )
