"""What is worth knowing about one training step, over all ranks: the line that is logged and stored.

Records are written as JSON lines, one object a step, so that pictures and reports can be made later, elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.domain.units import format_bytes, format_count, format_time
from steelyard.errors import DataError, UsageError


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Every figure is over all ranks.

    Attributes:
        step: number of the step, from 1.
        loss: sum of the token losses divided by the number of tokens that have a label (nats).
        learning_rate: used in this step.
        grad_norm: global 2-norm of the gradient before clipping.
        tokens: tokens that all ranks trained on.
        step_time_s: from the first rank's start to the last rank's end.
        tokens_per_s: `tokens` / `step_time_s`.
        mfu: model FLOPs / (`step_time_s` × peak FLOP/s of all devices); None where the device's peak is not known.
        idle_share: 1 − mean over ranks of (busy time / `step_time_s`), 0 … 1; see `idle_share`.
        work_max_over_mean: largest over mean of the ranks' work as planned; 1 is perfect.
        exposed_comm_s: mean over ranks of the time blocked until a transfer completed.
        peak_memory_bytes: of the rank that used most.
        slowest_rank: the rank that was busy longest: it holds the others up.
        slowest_rank_work: its work over the mean of the ranks. Near 1: the device is slow. Far above: it drew more.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    step_time_s: float
    tokens_per_s: float
    mfu: float | None
    idle_share: float
    work_max_over_mean: float
    exposed_comm_s: float
    peak_memory_bytes: int
    slowest_rank: int
    slowest_rank_work: float

    def to_json(self) -> str:
        """One line, without the line end. A number that is not finite is stored as text ("nan", "inf")."""
        values = dataclasses.asdict(self)
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = str(value)
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Read a line of `to_json`.

        Raises:
            UsageError: the line is no JSON object, or lacks a figure. Keys it has beside them are ignored, so that
                files of later versions can be read.
        """
        try:
            values = dict(json.loads(line))
            figures: dict[str, Any] = {f.name: _number(f, values[f.name]) for f in dataclasses.fields(cls)}
            return cls(**figures)
        except KeyError as error:
            raise UsageError(f"step record without {error}: {line[:80]!r}") from error
        except (TypeError, ValueError) as error:
            raise UsageError(f"not a step record ({error}): {line[:80]!r}") from error

    def log_line(self) -> str:
        """The line for people: what happened, how fast, and which rank everybody waited for."""
        parts = [
            f"step {self.step}",
            f"loss {self.loss:.4f}",
            f"lr {self.learning_rate:.2e}",
            f"grad {self.grad_norm:.3g}",
            f"{format_time(self.step_time_s)}",
            f"{format_count(self.tokens_per_s)} tokens/s",
            *([f"MFU {self.mfu:.1%}"] if self.mfu is not None else []),
            f"idle {self.idle_share:.1%}",
            f"work max/mean {self.work_max_over_mean:.3f}",
            f"exposed {format_time(self.exposed_comm_s)}",
            f"peak {format_bytes(self.peak_memory_bytes)}",
            f"slowest rank {self.slowest_rank} (work {self.slowest_rank_work:.2f} of mean)",
        ]
        return " | ".join(parts)


def idle_share(busy_by_rank_s: Sequence[float], step_time_s: float) -> float:
    """The share of all ranks' time in which nothing was computed: 1 − mean(busy time) / step time, at least 0.

    A rank is *busy* while it computes (tracks `compute` and `attention`; overlap counts once). Everything else inside
    the step is idle: blocked in a transfer or a collective, or done and waiting for the slowest rank.

    Raises:
        UsageError: no rank, or a step that took no time.
    """
    if not busy_by_rank_s or step_time_s <= 0:
        raise UsageError(f"idle share of {len(busy_by_rank_s)} ranks over {step_time_s} s; expected some of both")
    return max(0.0, 1.0 - sum(busy_by_rank_s) / len(busy_by_rank_s) / step_time_s)


def write_records(path: str | Path, records: Iterable[StepRecord]) -> None:
    """Append the records to a JSON-lines file, creating it if need be: all of them, or none.

    Raises:
        OSError: they cannot be written; the file is as it was.
    """
    data = "".join(record.to_json() + "\n" for record in records).encode()
    with Path(path).open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            file.truncate(before)
            raise


def read_records(path: str | Path) -> Iterator[StepRecord]:
    """The records of a JSON-lines file. A last line cut short by a killed writer is passed over.

    Raises:
        DataError: another line cannot be read; names the path and the line.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = StepRecord.from_json(line)
        except UsageError as error:
            if number == len(lines):  # no line end after it: its writer did not finish
                return
            raise DataError(f"{path}, line {number}: {error}") from error
        yield record


def _number(field: dataclasses.Field[Any], value: Any) -> int | float | None:
    if value is None and "None" in str(field.type):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{field.name} is {value!r}, expected a number")
    return int(value) if field.type == "int" else float(value)
