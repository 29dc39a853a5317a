from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from steelyard.errors import DataError, UsageError
from steelyard.observe.records import StepRecord, idle_share, read_records, write_records

RECORD = StepRecord(
    step=7, loss=2.5, learning_rate=3e-4, grad_norm=1.25, tokens=32768, step_time_s=2.0, tokens_per_s=16384.0,
    mfu=None, idle_share=0.125, work_max_over_mean=1.28, exposed_comm_s=0.011, peak_memory_bytes=3 * 2**30,
    slowest_rank=5, slowest_rank_work=1.28,
)  # fmt: skip


@pytest.mark.parametrize("record", [RECORD, dataclasses.replace(RECORD, mfu=0.41, loss=math.inf)])
def test_json_line_gives_the_record_back(record: StepRecord) -> None:
    line = record.to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert StepRecord.from_json(line) == record


def test_unknown_keys_are_ignored_and_missing_ones_named() -> None:
    values = json.loads(RECORD.to_json())
    assert StepRecord.from_json(json.dumps({**values, "later": 1})) == RECORD
    del values["grad_norm"]
    with pytest.raises(UsageError, match="grad_norm"):
        StepRecord.from_json(json.dumps(values))


@pytest.mark.parametrize("line", ["", "3", "{", '{"step": "x"}'])
def test_a_line_that_is_no_record_says_so(line: str) -> None:
    with pytest.raises(UsageError, match="step record"):
        StepRecord.from_json(line)


def test_log_line_names_the_straggler_and_its_work() -> None:
    line = RECORD.log_line()
    assert "slowest rank 5 (work 1.28 of mean)" in line
    assert "MFU" not in line
    assert "MFU 41.0%" in dataclasses.replace(RECORD, mfu=0.41).log_line()


def test_idle_share_is_the_mean_over_ranks() -> None:
    assert idle_share([2.0, 1.0], 2.0) == 0.25
    assert idle_share([2.0, 2.1], 2.0) == 0.0
    with pytest.raises(UsageError):
        idle_share([], 1.0)


def test_records_append_and_a_cut_last_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_records(path, [RECORD])
    write_records(path, [dataclasses.replace(RECORD, step=8)])
    with path.open("a") as file:
        file.write(RECORD.to_json()[:40])
    assert [r.step for r in read_records(path)] == [7, 8]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(RECORD.to_json() + "\noops\n" + RECORD.to_json() + "\n")
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2"):
        list(read_records(path))
