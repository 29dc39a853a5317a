"""`steelyard train CONFIG.toml`: the file says what to train, flags of the same names replace its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from steelyard.cli.flags import Flatten, Switch, parse_flags
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.errors import UsageError
from steelyard.settings import load_toml
from steelyard.train.config import TrainConfig

DESCRIPTION = """\
Train on your documents with balanced core attention. CONFIG.toml holds the settings; every flag below is one of its
keys and replaces its value. Ctrl-C saves a checkpoint and ends; the same command goes on from there."""


@dataclass(frozen=True)
class TrainFlags:
    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml")]
    """The configuration, a TOML file."""
    run: Annotated[TrainConfig, Flatten]
    nproc: int | None = None
    """Processes to start; None: one per GPU, or one. Inside torchrun it is torchrun's own."""
    max_restarts: int = 0
    """How often all processes are started again, from the last checkpoint, after one failed."""
    json: Switch = False
    """Print one JSON object on stdout at the end and everything else on stderr."""


def run(argv: Sequence[str], *, debug: bool = False) -> int:
    flags = parse_flags(TrainFlags, argv, prog="steelyard train", description=DESCRIPTION, default=_from_file(argv))
    from steelyard.train.launch import train  # torch: not for --help or a wrong flag

    return train(flags.run, ranks=flags.nproc, max_restarts=flags.max_restarts, as_json=flags.json, debug=debug)


def _from_file(argv: Sequence[str]) -> TrainFlags:
    """What the file alone says: the defaults of the flags. For `--help`, an example."""
    if any(a in ("-h", "--help") for a in argv):
        example = DataConfig(sources=(SourceConfig("texts/"),))
        return TrainFlags(config=Path("CONFIG.toml"), run=TrainConfig(data=example))
    if not argv or argv[0].startswith("-"):
        given = f"{argv[0]} stands first" if argv else "nothing is given"
        raise UsageError(f"{given}, expected a configuration file: steelyard train CONFIG.toml [flags]")
    return TrainFlags(config=Path(argv[0]), run=load_toml(TrainConfig, argv[0]))
