from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from steelyard.data.config import SourceConfig
from steelyard.data.listing import kind_of, list_source
from steelyard.errors import UsageError


def names(path: Path | str, **settings: object) -> list[str]:
    return [f.name for f in list_source(SourceConfig(path=str(path), **settings)).files]  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.py", "a/z.md", "a/b/c.txt", ".hidden/x.py", "a/__pycache__/y.py", ".secret.txt", "pic.png", "B.py"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("some text")
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.py", "text"), ("a.txt.gz", "text"), ("a.JSONL", "jsonl"), ("a.jsonl.zst", "jsonl"), ("c4.json.gz", "jsonl"),
     ("a.json", "text"), ("a.parquet", "parquet"), ("a.png", None), ("noending", None)],
)  # fmt: skip
def test_kind(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_walk_is_sorted_and_leaves_hidden_files(tree: Path) -> None:
    assert names(tree) == ["B.py", "a/b/c.txt", "a/z.md", "b.py"]


def test_suffixes_and_exclude(tree: Path) -> None:
    assert names(tree, suffixes=(".py",)) == ["B.py", "b.py"]
    assert names(tree, suffixes=("*",)) == ["B.py", "a/b/c.txt", "a/z.md", "b.py", "pic.png"]
    assert names(tree, exclude=("a/*", "B*")) == ["b.py"]
    assert names(tree, exclude=("*.py",)) == ["a/b/c.txt", "a/z.md"]
    assert names(tree, exclude=("*/b/*",)) == ["B.py", "a/z.md", "b.py"]
    assert names(f"{tree}/*", exclude=("a/b/*",)) == ["B.py", "a/z.md", "b.py"]


def test_globs(tree: Path) -> None:
    assert names(f"{tree}/**/*.txt") == ["a/b/c.txt"]
    assert names(f"{tree}/a*") == ["a/b/c.txt", "a/z.md"]
    (tree / "one.unknown").write_text("text")
    assert names(f"{tree}/*.unknown") == ["one.unknown"]


def test_single_file_of_any_name(tree: Path) -> None:
    assert [f.kind for f in list_source(SourceConfig(path=str(tree / "pic.png"))).files] == ["text"]


def test_auto_takes_the_kind_with_most_bytes_and_says_what_it_leaves(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tree / "big.jsonl").write_text('{"text": "' + "x" * 1000 + '"}\n')
    with caplog.at_level(logging.INFO, logger="steelyard"):
        listing = list_source(SourceConfig(path=str(tree)))
    assert [f.name for f in listing.files] == ["big.jsonl"]
    assert listing.ignored == {".py": 2, ".txt": 1, ".md": 1, ".png": 1}
    assert "5 others left aside" in caplog.text
    assert listing.readable == {"text": 4}


def test_what_nobody_chose_to_leave_aside_is_said(tree: Path) -> None:
    def unread(**more: Any) -> str | None:
        config = SourceConfig(path=str(tree), **more)
        return list_source(config).unread(config)

    assert unread() is None  # a picture could not be read anyway
    (tree / "big.jsonl.gz").write_bytes(b"x" * 1000)
    (tree / "table.parquet").write_bytes(b"x")
    assert unread() == (
        f"data source {tree}: reads its jsonl files (1) and leaves others aside (1 parquet, 4 text); to read those, "
        "give them a source of their own with its format"
    )
    assert unread(format="jsonl") is unread(suffixes=(".py",)) is None


def test_linked_folders_are_followed_once(tree: Path) -> None:
    (tree / "a" / "loop").symlink_to(tree, target_is_directory=True)
    (tree / "other").symlink_to(tree / "a" / "b", target_is_directory=True)
    assert sum(n.endswith("c.txt") for n in names(tree)) == 1


def test_only_regular_files_are_read(tree: Path) -> None:
    os.mkfifo(tree / "pipe.txt")
    (tree / "linked.txt").symlink_to(tree / "pipe.txt")
    (tree / "null.py").symlink_to("/dev/null")
    (tree / "fine.txt").symlink_to(tree / "b.py")
    listing = list_source(SourceConfig(path=str(tree)))
    assert [f.name for f in listing.files] == ["B.py", "a/b/c.txt", "a/z.md", "b.py", "fine.txt"]
    assert listing.ignored == {"special file": 3, ".png": 1}
    assert names(f"{tree}/*.txt") == ["fine.txt"]
    with pytest.raises(UsageError, match=r"pipe.txt: a pipe, socket or device"):
        list_source(SourceConfig(path=str(tree / "pipe.txt")))


def test_missing_folder_names_what_is_near(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"no such file or folder; did you mean .*/tree\?"):
        list_source(SourceConfig(path=str(tree.parent / "tre")))
    with pytest.raises(UsageError, match=r"tree exists and holds"):
        list_source(SourceConfig(path=str(tree / "qqqqqq" / "deeper")))
    with pytest.raises(UsageError, match="no file matches the pattern"):
        list_source(SourceConfig(path=f"{tree}/*.nothing"))


def test_empty_folder_and_no_match(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="found no file at all"):
        list_source(SourceConfig(path=str(tmp_path / "empty")))
    with pytest.raises(UsageError, match=r"expected \.cpp, found .*2 × \.py"):
        list_source(SourceConfig(path=str(tree), suffixes=(".cpp",)))


def test_saved_dataset_with_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds the splits test, train; give one"):
        list_source(SourceConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"weight": 0.0}, "weight=0.0"), ({"weight": float("nan")}, "weight=nan"), ({"format": "csv"}, "format='csv'"),
     ({"encoding": "utf8000"}, "encoding='utf8000' is unknown"), ({"min_bytes": 9, "max_bytes": 3}, "min_bytes=9"),
     ({"suffixes": ".py"}, "expected a list")],
)  # fmt: skip
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SourceConfig(path="x", **settings)  # type: ignore[arg-type]
