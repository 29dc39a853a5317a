"""Where a run starts: which checkpoint, and whether it belongs to this run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from steelyard.errors import CheckpointError, UsageError
from steelyard.train.checkpoint import RunState, complete_checkpoints, read_run_state
from steelyard.train.config import TrainConfig


def checkpoint_to_resume(config: TrainConfig) -> Path | None:
    """The checkpoint to start from, or None.

    Raises:
        UsageError: "never", and there are checkpoints that this run would mix with its own.
        CheckpointError: it cannot be read, or is of another model.
    """
    resume = config.checkpoint.resume
    complete = complete_checkpoints(config.checkpoint_dir)
    if resume == "never" and complete:
        raise UsageError(
            f"checkpoint.resume=never, but {config.checkpoint_dir} holds {len(complete)} checkpoints of an earlier "
            "run: choose another out_dir (or delete them), or resume with auto"
        )
    newest = complete[-1] if complete else None
    path = newest if resume in ("auto", "never") else Path(resume)
    if path is not None and newest is not None and path.resolve() in [old.resolve() for old in complete[:-1]]:
        raise UsageError(
            f"checkpoint.resume={resume} is older than {newest.name} beside it, and a run from there would write among "
            "later ones: choose another out_dir or checkpoint.dir for it, or delete the later checkpoints"
        )
    if path is not None:
        _check_same_run(path, read_run_state(path), config)
    return path


def config_json(config: TrainConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return values


def _check_same_run(path: Path, run: RunState, config: TrainConfig) -> None:
    """The shape of the model must be the one that was saved; the data check themselves."""
    saved, given = run.config.get("model", {}), config_json(config)["model"]
    if run.config.get("from_hf") or config.from_hf:
        return  # shapes are compared tensor by tensor
    for key, value in given.items():
        if key in saved and saved[key] != value and key not in ("max_positions", "initializer_range"):
            raise CheckpointError(
                f"checkpoint {path} is of a model with {key}={saved[key]}, the configuration says {value}: "
                "restore model." + key + ", or choose another out_dir"
            )
