"""What a user can get wrong in a configuration, and what he is told before anything starts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.data.config import DataConfig, SourceConfig
from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig
from steelyard.settings import field_help, load_toml, sections, to_toml
from steelyard.train.config import TrainConfig


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("hello", encoding="utf-8")
    data = DataConfig(sources=(SourceConfig(str(tmp_path / "texts")),), chunk_tokens=512, batch_chunks=4)
    return TrainConfig(data=data, model=ModelConfig(max_positions=1024), out_dir=str(tmp_path / "out"))


def change(config: TrainConfig, dotted: str, value: Any) -> TrainConfig:
    *parents, last = dotted.split(".")
    if not parents:
        return dataclasses.replace(config, **{last: value})
    section = getattr(config, parents[0])
    return dataclasses.replace(config, **{parents[0]: dataclasses.replace(section, **{last: value})})


def test_a_right_configuration_passes_on_every_fitting_number_of_ranks(config: TrainConfig) -> None:
    for ranks in (1, 2, 4):
        assert config.validate(ranks) == ()


def test_files_that_are_left_aside_are_warned_of(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "texts" / "more.jsonl").write_text("x", encoding="utf-8")
    [warning] = config.validate(1)
    assert "reads its text files (1) and leaves others aside (1 jsonl)" in warning


@pytest.mark.parametrize(
    ("dotted", "value", "ranks", "said"),
    [
        (
            "data.chunk_tokens",
            2048,
            1,
            ["data.chunk_tokens=2048", "model.max_positions=1024", "lower data"],
        ),
        ("model.vocab_size", 100, 1, ["'bytes' has 257", "model.vocab_size=100", "set model.vocab_size to 257"]),
        ("data.batch_chunks", 4, 8, ["8 ranks", "data.batch_chunks=4", "raise data.batch_chunks to 8"]),
        ("data.batch_chunks", 4, 3, ["not a multiple of the 3 ranks", "to 3 or 6"]),
        ("parallel.ping_pong", True, 4, ["even number of chunks", "set data.batch_chunks to 8"]),
        ("data.sources", (SourceConfig("no/such/folder"),), 1, ["no/such/folder", "no such file or folder"]),
        ("eval.every_steps", 5, 1, ["data.eval_fraction=0", "set data.eval_fraction"]),
        ("checkpoint.resume", "no/checkpoint", 1, ["checkpoint.resume=no/checkpoint", "auto, never"]),
        ("from_hf", "no/model", 1, ["from_hf=no/model", "config.json"]),
        ("steps", 0, 1, ["steps=0", "at least 1"]),
        ("optimizer.lr", 0.0, 1, ["optimizer.lr=0.0"]),
        ("checkpoint.keep_last", 0, 1, ["checkpoint.keep_last=0"]),
        ("log.trace_steps", (5, 3), 1, ["log.trace_steps=(5, 3)"]),
        ("attention.tolerance", -0.1, 1, ["attention.tolerance=-0.1"]),
    ],
)
def test_a_mistake_is_named(config: TrainConfig, dotted: str, value: Any, ranks: int, said: list[str]) -> None:
    wrong = change(config, dotted, value)
    with pytest.raises(UsageError) as caught:
        wrong.validate(ranks)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 2
    for part in said:
        assert part in message


def test_folders_that_cannot_be_used(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        change(config, "out_dir", str(tmp_path / "file" / "out")).validate(1)
    with pytest.raises(UsageError, match=r"checkpoint\.dir=.*is a file"):
        change(config, "checkpoint.dir", str(tmp_path / "file")).validate(1)


def test_the_shape_of_a_transformers_folder_counts(config: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    values = ModelConfig(max_positions=256, vocab_size=200).to_hf()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    from_hf = change(config, "from_hf", str(folder))
    assert from_hf.model_config().max_positions == 256
    with pytest.raises(UsageError, match=r"max_positions of .*=256"):
        from_hf.validate(1)
    with pytest.raises(UsageError, match="use the tokenizer of that model"):
        change(from_hf, "data.chunk_tokens", 256).validate(1)


def test_ping_pong_where_it_fits(config: TrainConfig) -> None:
    assert [config.nano_batches_at_once(ranks) for ranks in (1, 2, 4)] == [2, 2, 1]
    off = change(config, "parallel.ping_pong", False)
    assert off.nano_batches_at_once(2) == 1


def test_ten_lines_of_toml_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 5\n[data]\nbatch_chunks = 4\nsources = [{path = "texts"}]\n', encoding="utf-8")
    config = load_toml(TrainConfig, path)
    assert config.steps == 5 and config.data.batch_chunks == 4
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config), encoding="utf-8")
    assert load_toml(TrainConfig, again) == config


def test_every_field_has_a_help_text() -> None:
    for section, owner in sections(TrainConfig):
        meanings = field_help(owner)
        missing = [f.name for f in dataclasses.fields(owner) if not meanings.get(f.name)]
        assert not missing, f"[{section}] {missing}"


def test_configuration_does_not_load_torch() -> None:
    code = "import sys, steelyard.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
