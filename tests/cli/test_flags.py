from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from steelyard.cli.flags import Flatten, Switch, flag_names, parse_flags
from steelyard.errors import UsageError


@dataclass(frozen=True)
class Scaling:
    factor: float = 2.0


@dataclass(frozen=True)
class Source:
    path: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise UsageError(f"source {self.path}: weight={self.weight}, expected a number >= 0")


@dataclass(frozen=True)
class Run:
    sources: tuple[Source, ...]
    learning_rate: float = 0.1
    """Peak learning rate."""
    fused: bool = True
    policy: Literal["packed", "balanced"] = "balanced"
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Flags:
    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.toml")]
    """The file."""
    run: Annotated[Run, Flatten]
    chunk_tokens: int = 8
    """Tokens of a chunk."""
    json: Switch = False
    ranks: tuple[int, ...] = field(default=(2, 4))


LONG_PATH = "/a/" + "very-long-name/" * 20 + "end.toml"
DEFAULT = Flags(config=Path("x"), run=Run(sources=(Source("a"), Source(LONG_PATH))))


def parse(*argv: str) -> Flags:
    return parse_flags(Flags, argv, prog="steelyard try", description="Try it.", default=DEFAULT)


def test_flags_replace_defaults_wherever_they_stand() -> None:
    flags = parse(
        "y.toml", "--learning_rate", "0.5", "--sources.1.weight=3", "--no-fused", "--json", "--ranks", "1", "3"
    )
    assert flags == Flags(
        config=Path("y.toml"),
        run=Run(sources=(Source("a"), Source(LONG_PATH, 3.0)), learning_rate=0.5, fused=False),
        json=True,
        ranks=(1, 3),
    )


def test_flag_names_follow_the_default_instance() -> None:
    names = set(flag_names(Flags, DEFAULT))
    assert {"--learning-rate", "--fused", "--no-fused", "--sources.1.path", "--chunk-tokens", "--json"} <= names
    assert not {"--config", "--no-json", "--run.learning-rate", "--sources", "--scaling.factor"} & names
    with_scaling = Flags(config=Path("x"), run=Run(sources=(), scaling=Scaling()))
    assert "--scaling.factor" in set(flag_names(Flags, with_scaling))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x", "--learning-rat", "3"], "unknown flag --learning-rat; did you mean --learning-rate?"),
        (["--chunk_token=3"], "unknown flag --chunk-token; did you mean --chunk-tokens?"),
        (["--weight", "3"], "unknown flag --weight; did you mean --sources.1.weight?"),
        (["--zzzzzzzz"], "unknown flag --zzzzzzzz; see steelyard try --help"),
        (["--chunk-tokens", "x"], "--chunk-tokens 'x': expected a whole number; see steelyard try --help"),
        (["--learning-rate", "x"], "--learning-rate 'x': expected a number; see steelyard try --help"),
        (["--chunk-tokens"], "--chunk-tokens has no value; see steelyard try --help"),
        (["--policy", "best"], "invalid choice 'best' for argument '--policy'. Expected one of ('packed', 'balanced'); "
         "see steelyard try --help"),
        (["--sources.1.weight", "-1"], f"source {LONG_PATH}: weight=-1.0, expected a number >= 0; "
         "see steelyard try --help"),
        (["--learning-rate", "inf"], "--learning-rate inf: expected a finite number; see steelyard try --help"),
        (["--chunk-tokens", "9" * 23], f"--chunk-tokens {'9' * 23}: expected a whole number of at most 64 bits; "
         "see steelyard try --help"),
        (["x", "y"], "unknown argument y; see steelyard try --help"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])  # tyro draws its boxes accordingly
def test_a_wrong_flag_is_one_line(
    argv: list[str], message: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert str(caught.value) == message


def test_a_missing_argument_says_what_it_is() -> None:
    @dataclass(frozen=True)
    class Needed:
        path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH", help="Where the documents are.")]

    with pytest.raises(UsageError, match=r"^missing PATH: Where the documents are; see steelyard try --help$"):
        parse_flags(Needed, [], prog="steelyard try", description="")


def test_help_shows_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "Tokens of a chunk. (default: 8)" in out
    assert "CONFIG.toml" in out
