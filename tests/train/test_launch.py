"""`train` in this process, with one rank; and what the launcher makes of its workers' ends."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import filesystem

from steelyard.data.config import DataConfig, SourceConfig
from steelyard.errors import CheckpointError, DataError, SteelyardError, UsageError
from steelyard.model.config import ModelConfig
from steelyard.model.weights import load_hf
from steelyard.observe.records import read_records
from steelyard.settings import load_toml
from steelyard.train.checkpoint import claim, complete_checkpoints
from steelyard.train.config import CheckpointConfig, EvalConfig, LogConfig, OptimizerConfig, ParallelConfig, TrainConfig
from steelyard.train.launch import _cause, train


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the {number} quick brown foxes " * (number + 1), "utf-8")
    return TrainConfig(
        data=DataConfig(
            sources=(SourceConfig(str(tmp_path / "texts")),), chunk_tokens=128, batch_chunks=4, eval_fraction=0.2
        ),
        model=ModelConfig(
            vocab_size=257, hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=64, max_positions=128
        ),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1),
        checkpoint=CheckpointConfig(every_minutes=0, export_hf=True),
        eval=EvalConfig(every_steps=2, chunks=4),
        log=LogConfig(tensorboard=False, trace_steps=(2, 3)),
        out_dir=str(tmp_path / "out"),
        steps=5,
    )


def test_a_whole_run_and_what_it_leaves(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config, ranks=1, as_json=True) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert list(summary) == [
        "steps", "tokens", "loss_first", "loss_last", "eval_loss", "tokens_per_s", "idle_share", "work_max_over_mean",
        "exposed_comm_s", "checkpoint", "out_dir", "ranks",
    ]  # fmt: skip
    assert summary["steps"] == 5 and summary["tokens"] == 5 * 4 * 128 and summary["ranks"] == 1
    assert summary["loss_last"] < summary["loss_first"] and summary["work_max_over_mean"] == 1.0
    folder = Path(config.out_dir)
    assert summary["checkpoint"] == str(folder / "checkpoints" / "step-00000005")
    records = list(read_records(folder / "metrics.jsonl"))
    assert [r.step for r in records] == [1, 2, 3, 4, 5] and records[-1].loss == summary["loss_last"]
    assert load_toml(TrainConfig, folder / "config.toml") == config
    assert err.count("evaluation after step") == 3  # after 2, 4 and the last
    assert (folder / "trace.json.gz").stat().st_size > 0
    loaded, _ = load_hf(folder / "hf")
    assert dataclasses.replace(loaded, initializer_range=0.02, head_dim=None) == config.model

    assert train(config, ranks=1, as_json=True) == 0  # nothing left to do
    out, err = capsys.readouterr()
    assert "all 5 steps are done already" in err
    assert json.loads(out)["steps"] == 5 and json.loads(out)["loss_last"] is None

    longer = dataclasses.replace(config, steps=7)
    assert train(longer, ranks=1, as_json=True) == 0
    out, err = capsys.readouterr()
    assert "resumed from" in err and json.loads(out)["steps"] == 7
    assert [r.step for r in read_records(folder / "metrics.jsonl")] == list(range(1, 8))


def test_resuming_another_model_or_other_data_is_refused(config: TrainConfig) -> None:
    config = dataclasses.replace(config, steps=2, eval=EvalConfig(), log=LogConfig(tensorboard=False))
    assert train(config, ranks=1) == 0
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=3), steps=3)
    with pytest.raises(CheckpointError, match="layers=2, the configuration says 3"):
        train(wider, ranks=1)
    reseeded = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=9), steps=3)
    with pytest.raises(UsageError, match="seed was 0 and is 9"):
        train(reseeded, ranks=1)
    never = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume="never"), steps=3)
    with pytest.raises(UsageError, match="holds 1 checkpoints of an earlier run"):
        train(never, ranks=1)
    further = dataclasses.replace(config, steps=3)
    assert train(further, ranks=1) == 0
    older, newest = complete_checkpoints(config.checkpoint_dir)
    back = dataclasses.replace(further, checkpoint=dataclasses.replace(config.checkpoint, resume=str(older)), steps=4)
    with pytest.raises(UsageError, match=f"is older than {newest.name}"):
        train(back, ranks=1)


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"tied": True}, {"fsdp2": True}, {"from_hf": True}])
def test_variants_learn(config: TrainConfig, tmp_path: Path, changes: dict[str, object]) -> None:
    config = dataclasses.replace(config, steps=4, eval=EvalConfig(), log=LogConfig(tensorboard=False))
    if "precision" in changes:
        config = dataclasses.replace(config, precision="bf16")
    if "tied" in changes:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, tied_head=True))
    if "fsdp2" in changes:
        config = dataclasses.replace(config, parallel=ParallelConfig(data_parallel="fsdp2", checkpoint_token_wise=True))
    assert train(config, ranks=1) == 0
    first = list(read_records(Path(config.out_dir) / "metrics.jsonl"))
    assert first[-1].loss < first[0].loss
    if "from_hf" in changes:
        start = dataclasses.replace(config, from_hf=str(Path(config.out_dir) / "hf"), out_dir=str(tmp_path / "second"))
        assert train(start, ranks=1) == 0
        second = list(read_records(tmp_path / "second" / "metrics.jsonl"))
        assert second[0].loss < first[0].loss - 0.1  # it starts from what was learnt
    else:  # and goes on from its checkpoint
        assert train(dataclasses.replace(config, steps=6), ranks=1) == 0


def test_a_run_that_diverges_says_so(config: TrainConfig) -> None:
    wild = dataclasses.replace(
        config, optimizer=OptimizerConfig(lr=1e30, warmup_steps=0, clip_norm=0.0), eval=EvalConfig(), steps=20
    )
    with pytest.raises(SteelyardError, match="has diverged"):
        train(wild, ranks=1)


def test_wrong_numbers_of_ranks(config: TrainConfig) -> None:
    for ranks, said in ((0, "0 ranks"), (3, "not a multiple of the 3 ranks"), (8, "8 ranks for")):
        with pytest.raises(UsageError, match=said):
            train(config, ranks=ranks)
    assert not Path(config.out_dir).exists()


def test_a_second_run_in_the_same_folder_is_refused_before_it_changes_anything(config: TrainConfig) -> None:
    with (
        claim(config.checkpoint_dir),
        pytest.raises(UsageError, match=f"{config.checkpoint_dir}: another run") as caught,
    ):
        train(config, ranks=1)
    assert caught.value.exit_code == 2 and not (Path(config.out_dir) / "config.toml").exists()


def report(folder: Path, attempt: int, rank: int, kind: str, message: str) -> None:
    values = {"rank": rank, "type": kind, "message": message, "traceback": f"Traceback …\n{kind}: {message}\n"}
    (folder / f"error-{attempt}-{rank}.json").write_text(json.dumps(values), encoding="utf-8")


def test_the_cause_is_told_from_its_consequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, 0, 0, "DataError", "an earlier attempt")
    report(tmp_path, 1, 0, "PeerError", "rank 1 does not respond")
    killed = _cause(tmp_path, {0: 1, 1: -signal.SIGKILL}, 1)
    assert type(killed) is SteelyardError and "rank 1 was killed by signal 9 (SIGKILL)" in str(killed)
    report(tmp_path, 1, 1, "DataError", "texts/7.txt: cannot be read")
    cause = _cause(tmp_path, {0: 1, 1: 1}, 1)
    assert isinstance(cause, DataError) and str(cause) == "texts/7.txt: cannot be read"
    report(tmp_path, 2, 1, "ZeroDivisionError", "division by zero")
    bug = _cause(tmp_path, {1: 1}, 2)
    assert type(bug) is SteelyardError and "rank 1 failed with the error above" in str(bug)
    assert "ZeroDivisionError" in capsys.readouterr().err
    silent = _cause(tmp_path, {1: -signal.SIGKILL}, 3)
    assert "rank 1 was killed" in str(silent), "what an earlier attempt reported is not the cause of the last one"


def test_a_disk_that_fills_up_ends_the_run_with_the_earlier_checkpoint_intact(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every_steps=2), eval=EvalConfig(), steps=50)
    real_write, items = filesystem._write_item, itertools.count()

    def write(*args: Any, **kwargs: Any) -> Any:
        result = real_write(*args, **kwargs)
        if next(items) >= allowed[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return result

    allowed = [10**9]
    monkeypatch.setattr(filesystem, "_write_item", write)
    assert train(dataclasses.replace(config, steps=2), ranks=1) == 0
    allowed[0] = 0
    with pytest.raises(CheckpointError) as caught:
        train(config, ranks=1)
    assert "disk full while writing checkpoint" in str(caught.value) and caught.value.exit_code == 1
    assert "step-00000002 is intact" in str(caught.value)
    assert [p.name for p in config.checkpoint_dir.iterdir() if p.name != ".lock"] == ["step-00000002"]
    assert len(list(read_records(Path(config.out_dir) / "metrics.jsonl"))) < 50
    monkeypatch.undo()
    assert train(dataclasses.replace(config, steps=6), ranks=1) == 0


def test_what_was_left_out_is_counted(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(config.data.sources[0].path)
    (folder / "bad.txt").write_bytes(b"caf\xe9 " * 100)
    (folder / "empty.txt").write_bytes(b"")
    data = dataclasses.replace(config.data, on_error="skip", epochs=1, eval_fraction=0.0)
    config = dataclasses.replace(config, data=data, eval=EvalConfig(), log=LogConfig(tensorboard=False), steps=500)
    assert train(config, ranks=1) == 0
    err = capsys.readouterr().err
    assert "documents left out so far: 1 empty, 1 encoding" in err
    assert "the data ended after step" in err
