"""One rank of a training run: joins the others, trains, leaves. Also what `torchrun` starts, as a module.

The launcher hands a *run folder* to its workers: `config.toml` in it says what to do, `summary.json` and `error-….json`
are the answers, a file `stop` asks them to stop, and `launcher` holds the process id of who waits for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from steelyard.errors import SteelyardError
from steelyard.settings import ProcessSettings, load_toml
from steelyard.train.assemble import assemble, choose_device, process_groups
from steelyard.train.checkpoint import claim, complete_checkpoints
from steelyard.train.config import TrainConfig
from steelyard.train.loop import Trainer
from steelyard.train.metrics import Reporter, RunSummary
from steelyard.train.stopping import StopRequest, watch_launcher

CONFIG_FILE, SUMMARY_FILE, STOP_FILE, TRACEBACKS_FILE = "config.toml", "summary.json", "stop", "debug"
LAUNCHER_FILE = "launcher"


def run_rank(config: TrainConfig, settings: ProcessSettings, stop_file: Path | None = None) -> RunSummary:
    """Train as the rank that `settings` says. Signals SIGINT, SIGTERM and SIGHUP end the run after the current step.

    Raises:
        SteelyardError: see `Trainer.run`.
    """
    if settings.restart_count and complete_checkpoints(config.checkpoint_dir):
        # What stands there was written before the restart, whatever the run started from.
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume="auto"))
    device = choose_device(settings, config.device)

    def make_reporter(first_step: int) -> Reporter:
        reporter = Reporter(
            Path(config.out_dir),
            steps=config.steps,
            first_step=first_step,
            tensorboard=config.log.tensorboard,
            progress=config.log.progress,
        )
        if settings.restart_count:
            reporter.log(f"restart {settings.restart_count} after a worker failed")
        return reporter

    in_main_thread = threading.current_thread() is threading.main_thread()
    with (
        StopRequest(stop_file, install=in_main_thread) as stop,
        process_groups(settings, device, config.attention.timeout_s) as groups,
    ):
        parts = assemble(config, groups, device)
        summary = Trainer(parts, stop_requested=lambda: stop.requested, reporter_factory=make_reporter).run()
        parts.balancer.close()
    return summary


def serve(run_folder: Path, run: Callable[[ProcessSettings], str]) -> int:
    """Be one rank for the launcher: `run` returns the answer of rank 0 as JSON; an error is written for the launcher
    to raise. The exit code is 0 also when the run was stopped on request."""
    settings = ProcessSettings.from_environment()
    with contextlib.suppress(FileNotFoundError):
        watch_launcher(int((run_folder / LAUNCHER_FILE).read_text(encoding="utf-8")))
    try:
        answer = run(settings)
    except BaseException as error:
        is_ours = isinstance(error, SteelyardError)
        report = {
            "rank": settings.rank,
            "type": type(error).__name__,
            "message": str(error) if is_ours else f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        path = run_folder / f"error-{settings.restart_count}-{settings.rank}.json"
        path.write_text(json.dumps(report), encoding="utf-8")
        if (run_folder / TRACEBACKS_FILE).exists():
            traceback.print_exc()
        return error.exit_code if isinstance(error, SteelyardError) else 1
    if settings.rank == 0:
        (run_folder / SUMMARY_FILE).write_text(answer, encoding="utf-8")
    return 0


def leave(code: int) -> None:
    """End this process with `code`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # Threads of a run that broke may wait for peers that will never answer; nothing is left to save.
        os._exit(code)


def main(run_folder: Path) -> int:
    """Train one rank for the launcher."""

    def run(settings: ProcessSettings) -> str:
        config = load_toml(TrainConfig, run_folder / CONFIG_FILE)
        with claim(config.checkpoint_dir, join=True):
            return run_rank(config, settings, run_folder / STOP_FILE).to_json()

    return serve(run_folder, run)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
