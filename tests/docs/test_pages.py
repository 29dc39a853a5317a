"""What README and docs tell people to type works: configurations load, flags exist, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.cli.advise import AdviseFlags
from steelyard.cli.calibrate import CalibrateFlags
from steelyard.cli.check import CheckFlags
from steelyard.cli.data_stats import DataStatsFlags
from steelyard.cli.demo import DemoFlags
from steelyard.cli.flags import flag_names
from steelyard.cli.plan import PlanFlags
from steelyard.cli.simulate import SimulateFlags
from steelyard.cli.train import TrainFlags
from steelyard.cli.validate import ValidateFlags
from steelyard.cli.version import VersionFlags
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.settings import load_toml
from steelyard.simulate.config import SimulateConfig
from steelyard.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
TRAIN_EXAMPLE = TrainFlags(
    config=Path("run.toml"), run=TrainConfig(data=DataConfig(sources=(SourceConfig("a"), SourceConfig("b"))))
)
FLAGS = {
    "train": {*flag_names(TrainFlags, TRAIN_EXAMPLE), "--debug"},
    "data stats": {*flag_names(DataStatsFlags), "--debug"},
    "check": {*flag_names(CheckFlags), "--debug"},
    "plan": {*flag_names(PlanFlags), "--debug"},
    "simulate": {*flag_names(SimulateFlags), "--debug"},
    "advise": {*flag_names(AdviseFlags), "--debug"},
    "validate": {*flag_names(ValidateFlags), "--debug"},
    "calibrate": {*flag_names(CalibrateFlags), "--debug"},
    "demo": {*flag_names(DemoFlags), "--debug"},
    "version": {*flag_names(VersionFlags), "--debug"},
}


def blocks(*kinds: str) -> Iterator[tuple[str, str]]:
    """(page, text) of the fenced blocks of these kinds."""
    for page in PAGES:
        for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if kind in kinds:
                yield page.relative_to(ROOT).as_posix(), text


def steelyard_calls() -> Iterator[tuple[str, str]]:
    """(page, arguments) of every call of `steelyard` in a shell block."""
    for page, text in blocks("", "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:.*-m )?steelyard (.+)", line.strip()):
                yield page, match[1]


TOML = list(blocks("toml"))
CALLS = list(steelyard_calls())


def test_there_is_something_to_check() -> None:
    assert len(TOML) >= 4
    assert len(CALLS) >= 8


@pytest.mark.parametrize(("page", "text"), TOML)
def test_configurations_load(page: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    if page == "docs/simulator.md":
        assert load_toml(SimulateConfig, path).scenario()
        return
    assert load_toml(TrainConfig, path).data.sources


@pytest.mark.parametrize(("page", "call"), CALLS)
def test_commands_and_flags_exist(page: str, call: str) -> None:
    words = shlex.split(call, comments=True)
    command = next((c for c in FLAGS if words[: len(c.split())] == c.split()), None)
    assert command is not None, f"{page}: no command steelyard {call}"
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in FLAGS[command], f"{page}: steelyard {command} has no flag {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_named_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
    for named in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / named).exists(), f"{page.name} names {named}, which does not exist"


def test_program_of_the_library_page_runs_and_balances(tmp_path: Path) -> None:
    [program] = [text for page, text in blocks("python") if page == "docs/library.md"]
    (tmp_path / "balanced.py").write_text(program, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **place, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "balanced.py"]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank_process in ranks:
            rank_process.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = map(int, re.findall(r"\d+", outputs[0]))
    assert first + second == 2048 * 2049 // 2 + 16 * 128 * 129 // 2
    assert max(first, second) <= 1.05 * (first + second) / 2
