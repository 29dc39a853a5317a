"""What a run reports: one record a step, to JSON lines, TensorBoard and people.

Ranks gather their own figures only when a record is due (one small message), and rank 0 writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from steelyard.domain.units import format_count
from steelyard.model.config import ModelConfig
from steelyard.observe.records import StepRecord, idle_share, read_records, write_records
from steelyard.train.stopping import forget_lost_terminal

# Dense matrix-product peaks in FLOP/s as the makers state them, by a part of the device's name: (bf16, fp32 or TF32).
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2.25e15, 1.1e15),
    ("GH200", 989e12, 494e12),
    ("H200", 989e12, 494e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100 NVL", 835e12, 417e12),
    ("H100", 989e12, 494e12),
    ("A100", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("MI300X", 1307e12, 653e12),
    ("MI250X", 191e12, 48e12),
)


@dataclass(frozen=True)
class RankStep:
    """One rank's own figures of one step.

    Attributes:
        loss_sum: sum of its token losses.
        step_time_s: from asking for the batch until all ranks had agreed to go on.
        wait_s: of that, blocked: in an exchange, for gradients, for the batch or for the other ranks.
        exposed_comm_s: of that, in exchanges and for gradients.
        peak_memory_bytes: so far.
    """

    loss_sum: float
    step_time_s: float
    wait_s: float
    exposed_comm_s: float
    peak_memory_bytes: float

    def to_row(self) -> list[float]:
        return [self.loss_sum, self.step_time_s, self.wait_s, self.exposed_comm_s, self.peak_memory_bytes]


@dataclass(frozen=True)
class GlobalStep:
    """What every rank knows of a step.

    Attributes:
        step: from 1.
        tokens, loss_tokens: over all ranks; those that have a label.
        work_by_rank: (query, key) pairs that each rank computes as an attention server.
        learning_rate, grad_norm: of the update.
    """

    step: int
    tokens: int
    loss_tokens: int
    work_by_rank: tuple[int, ...]
    learning_rate: float
    grad_norm: float


def step_record(
    known: GlobalStep, by_rank: Sequence[RankStep], *, model: ModelConfig, peak_flops: float | None
) -> StepRecord:
    """Join the figures of all ranks. `peak_flops`: of one device, in FLOP/s; None where it is not known."""
    step_time_s = max(r.step_time_s for r in by_rank)
    busy_s = [max(0.0, r.step_time_s - r.wait_s) for r in by_rank]
    slowest = max(range(len(by_rank)), key=lambda rank: busy_s[rank])
    total_work = sum(known.work_by_rank)
    mean_work = total_work / len(known.work_by_rank) or 1.0
    flops = model.training_flops(known.tokens, total_work)
    return StepRecord(
        step=known.step,
        loss=sum(r.loss_sum for r in by_rank) / max(1, known.loss_tokens),
        learning_rate=known.learning_rate,
        grad_norm=known.grad_norm,
        tokens=known.tokens,
        step_time_s=step_time_s,
        tokens_per_s=known.tokens / step_time_s,
        mfu=flops / (step_time_s * peak_flops * len(by_rank)) if peak_flops else None,
        idle_share=idle_share(busy_s, step_time_s),
        work_max_over_mean=max(known.work_by_rank) / mean_work if total_work else 1.0,
        exposed_comm_s=sum(r.exposed_comm_s for r in by_rank) / len(by_rank),
        peak_memory_bytes=int(max(r.peak_memory_bytes for r in by_rank)),
        slowest_rank=slowest,
        slowest_rank_work=known.work_by_rank[slowest] / mean_work if total_work else 1.0,
    )


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of matrix products on `device`; None for a CPU or a device we do not know."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, bf16, fp32 in _PEAKS:
        if part.lower() in name.lower():
            return bf16 if precision == "bf16" else fp32
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated on the device, or resident of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


@dataclass(frozen=True)
class RunSummary:
    """What a run came to. Rates are over the steps of this process, its first one left out if there are others."""

    steps: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    idle_share: float | None
    work_max_over_mean: float | None
    exposed_comm_s: float | None
    checkpoint: str | None
    out_dir: str
    ranks: int
    interrupted: bool = False

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self))


def mean_figures(records: Sequence[StepRecord]) -> dict[str, float | None]:
    """The rates of `RunSummary`; None without a step."""
    timed = records[1:] or records
    time_s = sum(r.step_time_s for r in timed)
    names = ("tokens_per_s", "idle_share", "work_max_over_mean", "exposed_comm_s")
    if not timed:
        return dict.fromkeys(names)
    return {
        "tokens_per_s": sum(r.tokens for r in timed) / time_s,
        "idle_share": sum(r.idle_share * r.step_time_s for r in timed) / time_s,
        "work_max_over_mean": sum(r.work_max_over_mean for r in timed) / len(timed),
        "exposed_comm_s": sum(r.exposed_comm_s for r in timed) / len(timed),
    }


class Reporter:
    """Rank 0's outputs. Use it as a context manager; on other ranks there is none.

    Args:
        out_dir: gets `metrics.jsonl`, and `tensorboard/` if asked for.
        steps: of the whole run.
        first_step: the first step that this process does; records of this and later steps, left by a run that was
            killed after its last checkpoint, are dropped so that the file tells one story.
        every: steps between two log lines.
        tensorboard, progress: see `LogConfig`.
        console: where people read; stderr by default.
    """

    def __init__(
        self,
        out_dir: Path,
        *,
        steps: int,
        first_step: int = 1,
        every: int = 1,
        tensorboard: bool = True,
        progress: bool = True,
        console: Console | None = None,
    ) -> None:
        self.console = console if console is not None else Console(stderr=True)
        self._path = out_dir / "metrics.jsonl"
        self._steps, self._every = steps, every
        self._unwritten: list[StepRecord] = []
        self._drop_from(first_step)
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._board = SummaryWriter(str(out_dir / "tensorboard"), purge_step=first_step)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if progress and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task("training", total=steps, completed=first_step - 1)
            self._progress.start()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def log(self, message: str) -> None:
        """One line for people."""
        try:
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            forget_lost_terminal()  # closed in the middle of a step: the run is about to be told to save and leave

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Write records; a log line for the last of them."""
        if not records:
            return
        self._write(records)
        for record in records:
            self._to_board(record.step, _scalars(record))
        last = records[-1]
        self.log(last.log_line())
        if self._progress is not None and self._task is not None:
            text = f"loss {last.loss:.4f}  {format_count(last.tokens_per_s)} tokens/s  idle {last.idle_share:.0%}"
            self._progress.update(self._task, completed=last.step, description=text)

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """The loss of the evaluation split after `step`."""
        self.log(f"evaluation after step {step}: loss {loss:.4f} over {tokens} tokens")
        self._to_board(step, {"eval/loss": loss})

    def close(self) -> None:
        """End the progress line and close the files."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._unwritten:
            self._write([])
        if self._unwritten:
            self.log(f"warning: {self._path} still cannot be written: {len(self._unwritten)} records are lost")
        if self._board is not None:
            with self._board_may_fail():
                self._board.close()
            self._board = None

    def _write(self, records: Sequence[StepRecord]) -> None:
        """Append to `metrics.jsonl`. A full disk is no reason to lose a run: records wait until there is room."""
        waiting = bool(self._unwritten)
        self._unwritten += records
        try:
            write_records(self._path, self._unwritten)
        except OSError as error:
            if not waiting:
                self.log(
                    f"warning: {self._path} cannot be written ({error.strerror}); training goes on, and the records "
                    f"from step {records[0].step} on are kept until they can be"
                )
            return
        if waiting:
            self.log(f"{self._path} is written again, with all records since step {self._unwritten[0].step}")
        self._unwritten.clear()

    def _to_board(self, step: int, scalars: Mapping[str, float | None]) -> None:
        with self._board_may_fail():
            for name, value in scalars.items():
                if self._board is not None and value is not None:
                    self._board.add_scalar(name, value, step)

    @contextlib.contextmanager
    def _board_may_fail(self) -> Iterator[None]:
        """TensorBoard's files are a copy of `metrics.jsonl`: the run does without them if they cannot be written."""
        try:
            yield
        except OSError as error:
            self.log(
                f"warning: TensorBoard's files cannot be written ({error.strerror}); training goes on without them"
            )
            self._board = None

    def _drop_from(self, first_step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            return
        kept = [record for record in read_records(self._path) if record.step < first_step]
        rewritten = self._path.with_suffix(".partial")
        rewritten.unlink(missing_ok=True)
        write_records(rewritten, kept)
        rewritten.replace(self._path)


def _scalars(record: StepRecord) -> dict[str, float | None]:
    """TensorBoard's name of each figure."""
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/grad_norm": record.grad_norm,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/step_time_s": record.step_time_s,
        "speed/mfu": record.mfu,
        "balance/idle_share": record.idle_share,
        "balance/work_max_over_mean": record.work_max_over_mean,
        "balance/exposed_comm_s": record.exposed_comm_s,
        "balance/slowest_rank": record.slowest_rank,
        "memory/peak_bytes": record.peak_memory_bytes,
    }
