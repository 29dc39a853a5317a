"""What `steelyard demo` runs and what it writes; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import UsageError

WAYS = ("packed", "balanced")


@dataclass(frozen=True)
class DemoConfig:
    """What `steelyard demo` runs. The defaults take two to three minutes on two cores."""

    out_dir: str = "steelyard-demo"
    """Folder for the pictures, the trace and the figures."""
    steps: int = 6
    """Batches; each is run both ways."""
    repeats: int = 3
    """How often each batch is run each way; the fastest run counts, since the machine may be busy with other things."""
    nproc: int = 2
    """Processes, each with its part of the cores."""
    chunk_tokens: int = 8192
    """Tokens of a chunk; every process computes on two chunks a step."""
    seed: int = 6
    """Seed of the parameters and of the order of documents."""

    def validate(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: a number that is too small, or a folder that cannot be written.
        """
        for name, least in (("steps", 1), ("repeats", 1), ("nproc", 2), ("chunk_tokens", 256), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {least}")
        try:
            Path(self.out_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out-dir {self.out_dir}: cannot be made ({error}); choose another folder") from error


@dataclass(frozen=True)
class DemoFiles:
    """Everything that the demo leaves behind."""

    record: Path
    traces: Mapping[str, Path]
    work: Path
    timeline: Path


def demo_files(folder: Path) -> DemoFiles:
    """The files of a demo in `folder`."""
    return DemoFiles(
        record=folder / "demo.json",
        traces={way: folder / f"trace-{way}.json.gz" for way in WAYS},
        work=folder / "work-per-rank.png",
        timeline=folder / "step-timeline.png",
    )
