"""From the ranks' figures to one record, and the files it goes to."""

from __future__ import annotations

import contextlib
import errno
import io
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from steelyard.model.config import ModelConfig
from steelyard.observe.records import StepRecord, read_records, write_records
from steelyard.train.metrics import GlobalStep, RankStep, Reporter, step_record

MODEL = ModelConfig()


def record(step: int, **changes: object) -> StepRecord:
    known = GlobalStep(step, 100, 90, (50, 50), 1e-3, 2.0)
    made = step_record(known, [RankStep(45.0, 1.0, 0.1, 0.1, 1e6)] * 2, model=MODEL, peak_flops=None)
    return made


def test_loss_is_divided_by_the_tokens_of_all_ranks() -> None:
    """The case of practice: 2.0 of one token and 9.0 of nine are 1.1 a token."""
    known = GlobalStep(step=1, tokens=12, loss_tokens=10, work_by_rank=(1, 3), learning_rate=0.1, grad_norm=1.0)
    ranks = [RankStep(2.0, 1.0, 0.5, 0.0, 10), RankStep(9.0, 2.0, 0.0, 0.4, 20)]
    made = step_record(known, ranks, model=MODEL, peak_flops=None)
    assert made.loss == pytest.approx(1.1)
    assert made.step_time_s == 2.0 and made.tokens_per_s == 6.0
    assert made.idle_share == pytest.approx(1 - (0.5 + 2.0) / 2 / 2.0)
    assert made.work_max_over_mean == 1.5
    assert made.exposed_comm_s == pytest.approx(0.2)
    assert made.peak_memory_bytes == 20 and made.mfu is None


def test_the_line_names_the_straggler_and_its_work() -> None:
    """A rank that is slow with no more work than the others is a slow device; one with more work drew the document."""
    known = GlobalStep(7, 100, 90, (100, 100, 100, 100), 1e-3, 1.0)
    waits = [0.8, 0.7, 0.0, 0.9]
    slow_device = step_record(
        known, [RankStep(1.0, 1.0, wait, wait, 0) for wait in waits], model=MODEL, peak_flops=None
    )
    assert "slowest rank 2 (work 1.00 of mean)" in slow_device.log_line()
    known = GlobalStep(8, 100, 90, (100, 100, 400, 200), 1e-3, 1.0)
    drew_more = step_record(known, [RankStep(1.0, 1.0, w, w, 0) for w in waits], model=MODEL, peak_flops=None)
    assert "slowest rank 2 (work 2.00 of mean)" in drew_more.log_line()


def test_mfu_counts_model_flops_over_all_devices() -> None:
    known = GlobalStep(1, 1000, 900, (4000, 6000), 1e-3, 1.0)
    ranks = [RankStep(1.0, 0.5, 0.0, 0.0, 0)] * 2
    made = step_record(known, ranks, model=MODEL, peak_flops=1e12)
    assert made.mfu == pytest.approx(MODEL.training_flops(1000, 10_000) / (0.5 * 2e12))


def test_a_step_without_attention_work() -> None:
    known = GlobalStep(1, 0, 0, (0, 0), 1e-3, 0.0)
    made = step_record(known, [RankStep(0.0, 0.5, 0.5, 0.0, 0)] * 2, model=MODEL, peak_flops=None)
    assert made.loss == 0.0 and made.work_max_over_mean == 1.0 and made.idle_share == 1.0


def test_records_reach_the_file_the_board_and_the_reader(tmp_path: Path) -> None:
    text = io.StringIO()
    with Reporter(tmp_path, steps=4, console=Console(file=text, width=60)) as reporter:
        reporter.steps([record(1), record(2)])
        reporter.steps([])
        reporter.evaluation(2, 1.25, 64)
    assert [r.step for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2]
    lines = text.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 2 | loss") and "evaluation after step 2: loss 1.25" in lines[1]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [e.step for e in board.Scalars("train/loss")] == [1, 2]
    assert board.Scalars("eval/loss")[0].value == 1.25


def test_a_resumed_run_drops_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    write_records(tmp_path / "metrics.jsonl", [record(step) for step in range(1, 8)])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 8, "lo')  # its writer was killed
    with Reporter(tmp_path, steps=9, first_step=6, tensorboard=False, console=Console(file=io.StringIO())) as reporter:
        reporter.steps([record(6)])
    assert [r.step for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_terminal_that_closes_does_not_end_the_run(tmp_path: Path) -> None:
    class Screen(io.StringIO):
        failure = errno.EIO

        def write(self, text: str) -> int:
            raise OSError(self.failure, "gone")

    screen = Screen()
    reporter = Reporter(tmp_path, steps=1, tensorboard=False, progress=False, console=Console(file=screen))
    reporter.log("step 1")
    screen.failure = errno.ENOSPC
    with pytest.raises(OSError, match="gone"):
        reporter.log("step 2")


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to let files of this process grow beyond this, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_records_until_there_is_room(tmp_path: Path) -> None:
    """A run of days must not end because a log cannot be written, and must not end with half a line."""
    screen = io.StringIO()
    path = tmp_path / "metrics.jsonl"
    with Reporter(tmp_path, steps=5, tensorboard=False, console=Console(file=screen, width=400)) as reporter:
        reporter.steps([record(1)])
        written = path.read_bytes()
        with largest_file(len(written) + 10):
            reporter.steps([record(2)])
            assert path.read_bytes() == written
            reporter.steps([record(3)])
        reporter.steps([record(4)])
    assert [r.step for r in read_records(path)] == [1, 2, 3, 4]
    shown = screen.getvalue()
    assert shown.count("cannot be written") == 1 and "from step 2 on" in shown and "is written again" in shown


def test_records_that_never_found_room_are_named(tmp_path: Path) -> None:
    screen = io.StringIO()
    with largest_file(0), Reporter(tmp_path, steps=5, tensorboard=False, console=Console(file=screen, width=400)) as r:
        r.steps([record(1), record(2)])
    assert "2 records are lost" in screen.getvalue()
