from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UsageError
from steelyard.settings import (
    ProcessSettings,
    child_environment,
    config_reference_markdown,
    field_help,
    load_toml,
    sections,
    to_toml,
)


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    path: Path
    """A folder or a file of documents. Relative to the working directory."""
    weight: float = 1.0
    """Share of the mix, relative to the other sources."""


@dataclass(frozen=True)
class Data:
    """The documents, and how they are packed.

    A second paragraph that no reference needs.
    """

    sources: tuple[Source, ...]
    """Where the documents come from."""
    chunk_tokens: int = 8192
    """Tokens of one chunk."""
    suffixes: tuple[str, ...] = (".py", ".md")


@dataclass(frozen=True)
class Optimizer:
    """AdamW with warm-up."""

    learning_rate: float = 3e-4
    """Peak learning
    rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    fused: bool = False

    def __post_init__(self) -> None:
        if self.learning_rate < 0:
            raise UsageError(f"learning_rate={self.learning_rate}, expected a number >= 0")


@dataclass(frozen=True)
class Config:
    data: Data
    optimizer: Optimizer = Optimizer()
    policy: Literal["packed", "balanced"] = "balanced"
    """Where core attention is computed: `packed` | `balanced`."""
    resume: Literal["auto"] | Path | None = None
    steps: int = 100
    labels: dict[str, str] = field(default_factory=dict)
    note: str | None = None


GOOD = """\
policy = "packed"
steps = 5
[labels]
team = "a"

[optimizer]
learning_rate = 1
betas = [0.9, 0.99]
[data]
chunk_tokens = 512
[[data.sources]]
path = "a"
[[data.sources]]
path = "b"
weight = 2.5
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_every_kind_of_value_arrives_with_its_type(tmp_path: Path) -> None:
    config = load_toml(Config, write(tmp_path, GOOD))
    assert config == Config(
        data=Data(sources=(Source(Path("a")), Source(Path("b"), 2.5)), chunk_tokens=512),
        optimizer=Optimizer(learning_rate=1.0, betas=(0.9, 0.99)),
        policy="packed",
        steps=5,
        labels={"team": "a"},
    )
    assert type(config.optimizer.learning_rate) is float
    assert isinstance(config.data.sources[0].path, Path)


def test_overrides_replace_values_of_the_file_and_reach_into_arrays(tmp_path: Path) -> None:
    overrides = {"optimizer.learning_rate": 0.5, "steps": 9, "data.sources.1.weight": 4, "resume": "auto"}
    config = load_toml(Config, write(tmp_path, GOOD), overrides)
    assert (config.optimizer.learning_rate, config.steps, config.resume) == (0.5, 9, "auto")
    assert [s.weight for s in config.data.sources] == [1.0, 4.0]
    with pytest.raises(UsageError, match=r'stepz" in the top level \(override\); did you mean "steps"'):
        load_toml(Config, write(tmp_path, GOOD), {"stepz": 9})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("learning_rate", "lerning_rate", r'unknown key "lerning_rate" in \[optimizer\] \(line 7\); '
         r'did you mean "learning_rate"\?'),
        ("team", "zzz", None),
        ("steps = 5", "learning_rate = 5", r'"learning_rate" in the top level \(line 2\); did you mean the key of '
         r"\[optimizer\]"),
        ("steps = 5", "qqqq = 5", r"qqqq.*known keys: data, optimizer, policy, resume, steps"),
        ("steps = 5", 'steps = "5"', r'steps = "5" in the top level \(line 2\); expected whole number'),
        ("steps = 5", "steps = true", r"steps = true .* expected whole number"),
        ("steps = 5", "steps = 5.0", r"steps = 5.0 .* expected whole number"),
        ('"packed"', '"balancd"', r'policy = "balancd".*expected "packed" or "balanced"; did you mean "balanced"'),
        ("[0.9, 0.99]", "[0.9]", r"betas = \[0.9\] in \[optimizer\] \(line 8\); expected list of 2: number, number"),
        ("[0.9, 0.99]", '[0.9, "x"]', r'betas\[1\] = "x" in .* expected number'),
        ("weight = 2.5", "weight = nan", r"weight = nan in .* expected number that is finite"),
        ("steps = 5", "steps = 99999999999999999999999", r"steps = 9+ in .* expected whole number of at most 64 bits"),
        ("weight = 2.5", 'weight = "x"', r'weight = "x" in \[data.sources\] number 2 \(line 15\); expected number'),
        ('path = "b"', "", r'\[data.sources\] number 2 \(line 13\) lacks the key "path": A folder or a file of '
         r"documents$"),
        ("[optimizer]", "[optimiser]", r'"optimiser" in the top level \(line 6\); did you mean "optimizer"'),
        ("learning_rate = 1", "learning_rate = -1", r"\[optimizer\] \(line 6\): learning_rate=-1.0, expected"),
        ("[optimizer]", "[optimizer", r"config.toml: not valid TOML: .*line 6"),
    ],
)  # fmt: skip
def test_a_slip_is_named_with_its_line_and_what_was_meant(
    tmp_path: Path, old: str, new: str, message: str | None
) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    if message is None:  # keys of a free table are the user's own
        load_toml(Config, path)
        return
    with pytest.raises(UsageError, match=message) as caught:
        load_toml(Config, path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_left_out_still_needs_its_keys(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Run:
        data: Data = field(default_factory=Data)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=r'\[data\] lacks the key "sources": Where the documents come from'):
        load_toml(Run, write(tmp_path, ""))


@dataclass(frozen=True)
class Filter:
    field: str = "text"


@dataclass(frozen=True)
class Part:
    filter: Filter = Filter()


@dataclass(frozen=True)
class Parts:
    parts: tuple[Part, ...] = ()


def test_a_table_inside_an_array_belongs_to_the_latest_element(tmp_path: Path) -> None:
    text = '[[parts]]\n[parts.filter]\nfield = "a"\n[[parts]]\n[parts.filter]\nfeild = "b"\n'
    with pytest.raises(UsageError, match=r'"feild" in \[parts.filter\] number 2 \(line 6\); did you mean "field"'):
        load_toml(Parts, write(tmp_path, text))


def test_a_union_names_all_its_members(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'resume = 3 in the top level \(line 1\); expected "auto" or path'):
        load_toml(Config, write(tmp_path, "resume = 3\n" + GOOD))


def test_a_table_where_a_value_stands_and_the_reverse(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[optimizer\] \(line 1\) is 3; expected a table"):
        load_toml(Config, write(tmp_path, "optimizer = 3\n[data]\nsources = []\n"))
    with pytest.raises(UsageError, match=r"steps = \{a = 1\}"):
        load_toml(Config, write(tmp_path, "[data]\nsources = []\n[steps]\na = 1\n"))


def test_missing_file_suggests_its_sibling(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(UsageError, match=r"did you mean .*config\.toml\?"):
        load_toml(Config, tmp_path / "confg.toml")
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere\)"):
        load_toml(Config, tmp_path / "nowhere" / "deep" / "c.toml")
    with pytest.raises(UsageError, match="is a folder"):
        load_toml(Config, tmp_path)


text = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8)


@given(
    st.builds(
        Config,
        data=st.builds(
            Data,
            sources=st.lists(
                st.builds(Source, path=text.map(Path), weight=st.floats(0, 1e9)), min_size=1, max_size=3
            ).map(tuple),
            chunk_tokens=st.integers(-(2**40), 2**40),
            suffixes=st.lists(text, max_size=3).map(tuple),
        ),
        optimizer=st.builds(
            Optimizer,
            learning_rate=st.floats(0, allow_infinity=False),
            betas=st.tuples(
                st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False)
            ),
            fused=st.booleans(),
        ),
        resume=st.sampled_from(["auto", None]),
        labels=st.dictionaries(text, text, max_size=2),
        note=st.none() | text,
    )
)
def test_written_configurations_are_read_back(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load_toml(Config, path) == config


def test_field_help_is_the_literal_below_the_field() -> None:
    assert field_help(Optimizer) == {"learning_rate": "Peak learning rate."}
    made_at_run_time = dataclasses.make_dataclass("Made", [("a", int)])
    assert field_help(made_at_run_time) == {}


def test_reference_has_a_table_for_every_section() -> None:
    reference = config_reference_markdown(Config)
    assert [name for name, _ in sections(Config)] == ["", "data", "data.sources", "optimizer"]
    assert "## `[data]`\n\nThe documents, and how they are packed.\n\n| Key" in reference
    assert "| `path` | path | **required** | A folder or a file of documents. Relative" in reference
    assert "| `learning_rate` | number | `0.0003` | Peak learning rate. |" in reference
    assert '| `policy` | "packed" or "balanced" | `"balanced"` |' in reference
    assert "`packed` \\| `balanced`" in reference
    assert '| `resume` | "auto" or path | unset |' in reference
    assert "second paragraph" not in reference
    assert "| `optimizer`" not in reference


def test_environment_of_a_lone_process() -> None:
    assert ProcessSettings.from_environment({}) == ProcessSettings()
    assert not ProcessSettings.from_environment({"NO_COLOR": "1"}).color
    assert ProcessSettings.from_environment({"COLUMNS": "wide"}).columns is None


def test_environment_of_a_launched_process() -> None:
    environ = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host",
        "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1", "COLUMNS": "90", "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    assert ProcessSettings.from_environment(environ) == ProcessSettings(
        rank=3, world_size=4, local_rank=1, local_world_size=2, master_addr="host", master_port=29500, launched=True,
        restart_count=2, threads=1, columns=90,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x', expected a whole number"),
        ({"RANK": "0"}, "RANK is set without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set without RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProcessSettings.from_environment(environ)


def test_child_environment_adds_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_A", "1")
    changes: dict[str, Any] = {"STEELYARD_A": None, "STEELYARD_B": "2"}
    child = child_environment(changes)
    assert "STEELYARD_A" not in child
    assert child["STEELYARD_B"] == "2"
