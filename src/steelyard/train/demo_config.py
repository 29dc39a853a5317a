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
    steps: int = 4
    """Batches; each is run both ways."""
    repeats: int = 4
    """How often each batch is run each way, in turn; the fastest of its runs counts, since whatever else the machine
    does only adds time."""
    seconds: float = 130.0
    """Time for all runs together; where it is short, batches are repeated less often."""
    nproc: int = 2
    """Processes, each with its part of the cores."""
    chunk_tokens: int = 8192
    """Tokens of a chunk; every process computes on two chunks a step."""
    seed: int = 11
    """Seed of the parameters and of the order of documents. With the default one, batches are less even than on average
    over seeds: predicted speed-ups of other seeds lie between 1.07 and 1.4, 1.2 on average."""

    def validate(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: a number that is too small, or a folder that cannot be written.
        """
        for name, least in (("steps", 1), ("repeats", 1), ("nproc", 2), ("chunk_tokens", 256), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {least}")
        if not self.seconds > 0:
            raise UsageError(f"--seconds {self.seconds}: expected a time above 0")
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
