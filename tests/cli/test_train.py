from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli.main import main
from steelyard.train import launch
from steelyard.train.config import TrainConfig


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('steps = 7\n[optimizer]\nlr = 0.5\n[data]\nsources = [{path = "a"}, {path = "b"}]\n')
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, dict[str, Any]]]:
    """What the command hands to `train`, which is not run."""
    made: list[tuple[TrainConfig, dict[str, Any]]] = []

    def train(config: TrainConfig, **options: Any) -> int:
        made.append((config, options))
        return 0

    monkeypatch.setattr(launch, "train", train)
    return made


def test_flags_replace_what_the_file_says(config_path: Path, calls: list[tuple[TrainConfig, dict[str, Any]]]) -> None:
    argv = [
        "train",
        str(config_path),
        "--data.sources.1.weight",
        "2",
        "--optimizer.lr",
        "0.25",
        "--nproc",
        "3",
        "--json",
    ]
    assert main([*argv, "--debug"]) == 0
    [(config, options)] = calls
    assert (config.steps, config.optimizer.lr) == (7, 0.25)
    assert [(s.path, s.weight) for s in config.data.sources] == [("a", 1.0), ("b", 2.0)]
    assert options == {"ranks": 3, "max_restarts": 0, "as_json": True, "debug": True}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing is given, expected a configuration file: steelyard train CONFIG.toml [flags]"),
        (["--steps", "3"], "--steps stands first, expected a configuration file: steelyard train CONFIG.toml [flags]"),
        (["{}/rum.toml"], "no configuration file {}/rum.toml (did you mean {}/run.toml?)"),
        (["{}/run.toml", "--optimizer.lrr", "3"], "unknown flag --optimizer.lrr; did you mean --optimizer.lr?"),
        (["{}/run.toml", "--data.sources.0.weight", "-1"],
         "data source a: weight=-1.0, expected a number above 0; see steelyard train --help"),
    ],
)  # fmt: skip
def test_wrong_usage(config_path: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(config_path.parent)
    assert main(["train", *(a.replace("{}", folder) for a in argv)]) == 2
    assert capsys.readouterr().err == f"steelyard: error: {message.replace('{}', folder)}\n"


def test_a_wrong_key_of_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[data]\nsources = [{path = "a"}]\n[optimizer]\nwarmup_step = 3\n')
    assert main(["train", str(path)]) == 2
    assert capsys.readouterr().err == (
        f'steelyard: error: {path}: unknown key "warmup_step" in [optimizer] (line 4); did you mean "warmup_steps"?\n'
    )


def test_every_key_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--optimizer.lr FLOAT" in out
    assert "--data.sources.0.path STR" in out
    json.dumps(out)
