"""Which files a source consists of: a sorted walk that is the same on every machine, and errors that help."""

from __future__ import annotations

import difflib
import fnmatch
import glob
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from steelyard.data.config import SourceConfig
from steelyard.errors import DataError, UsageError

logger = logging.getLogger(__name__)

COMPRESSIONS = (".gz", ".zst")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
_SPECIAL = "special file"
_TEXT_ENDINGS = """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini .cfg .conf
    .py .pyi .pyx .ipynb .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .java .kt .scala .js .jsx .mjs .ts .tsx .vue .css .scss
    .go .rs .rb .php .pl .pm .lua .r .jl .m .swift .cs .fs .hs .ml .mli .ex .exs .erl .clj .lisp .el .scm .sh .bash .zsh
    .ps1 .bat .sql .proto .cmake .mk .dockerfile .tf .v .sv .vhd .asm .s .f90 .f .zig .nim .dart .srt .log"""
TEXT_SUFFIXES = tuple(_TEXT_ENDINGS.split())


@dataclass(frozen=True)
class FileEntry:
    """One file of a source. `name` is relative to the source, with forward slashes: part of a document's identity."""

    path: Path
    name: str
    size_bytes: int
    kind: str
    """`text`, `jsonl`, `parquet` or `arrow`."""

    @property
    def compression(self) -> str | None:
        """ ".gz", ".zst" or None."""
        return next((c for c in COMPRESSIONS if self.name.endswith(c)), None)


@dataclass(frozen=True)
class Listing:
    """The files of a source in order of name, and how many files were not taken, by their ending.

    Pipes, sockets and devices count as `special file`. `readable` are those of `ignored` that another format or other
    suffixes would read, by their kind: with the format `auto`, the user may have meant them too.
    """

    files: tuple[FileEntry, ...]
    ignored: Mapping[str, int]
    readable: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)

    def unread(self, config: SourceConfig) -> str | None:
        """One line on files of other formats that nobody decided to leave aside: of a source that names neither format
        nor suffixes. None where there are none."""
        if config.format != "auto" or config.suffixes or not self.readable:
            return None
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.readable.items()))
        return (
            f"data source {config.path}: reads its {self.files[0].kind} files ({len(self.files):,}) and leaves others "
            f"aside ({counts}); to read those, give them a source of their own with its format"
        )


def list_source(config: SourceConfig) -> Listing:
    """Find the files of a source.

    Raises:
        UsageError: nothing is there, or nothing that matches; says what is nearest.
        DataError: a folder cannot be read.
    """
    root = Path(config.path).expanduser()
    if root.is_file():
        kind = config.format if config.format != "auto" else kind_of(root.name) or "text"
        if kind == "datasets":
            raise UsageError(f"data source {config.path}: format 'datasets' needs the folder that save_to_disk wrote")
        return Listing((_entry(root, root.name, kind),), {})
    if _is_special(root) and not root.is_dir():
        raise UsageError(f"data source {config.path}: a pipe, socket or device; give a regular file or a folder")
    if root.is_dir():
        if config.format == "datasets" or (config.format == "auto" and _is_saved_dataset(root)):
            return _list_saved_dataset(config, root)
        return _select(config, list(_walk(root, root, config.exclude)))
    if glob.has_magic(config.path):
        base = Path(*_without_magic(root))
        found = [Path(p) for p in sorted(glob.glob(str(root), recursive=True))]  # noqa: PTH207
        pairs: dict[str, Path] = {}
        for path in found:
            inside = _walk(path, base, config.exclude) if path.is_dir() else [(path, path.relative_to(base).as_posix())]
            pairs.update({name: p for p, name in inside})
        if not pairs:
            raise UsageError(f"data source {config.path}: no file matches the pattern; {nearest_existing(base)}")
        if not config.suffixes and all(p.is_file() for p in found):
            # The pattern names the files themselves: their endings are the user's choice.
            config = replace(config, suffixes=("*",))
        return _select(config, [(p, name) for name, p in sorted(pairs.items())])
    raise UsageError(f"data source {config.path}: no such file or folder; {nearest_existing(root)}")


def kind_of(name: str) -> str | None:
    """Kind of file by its name; None where the ending says nothing."""
    lower = name.lower()
    packed = next((c for c in COMPRESSIONS if lower.endswith(c)), "")
    stem = lower.removesuffix(packed)
    if stem.endswith(JSONL_SUFFIXES) or (packed and stem.endswith(".json")):
        return "jsonl"
    if lower.endswith(PARQUET_SUFFIXES):
        return "parquet"
    return "text" if stem.endswith(TEXT_SUFFIXES) else None


def nearest_existing(path: Path) -> str:
    """'did you mean X?' where a similar name stands beside, else the nearest folder that exists."""
    current = path
    while not current.exists() and current != current.parent:
        missing, current = current.name, current.parent
        if current.is_dir():
            try:
                names = sorted(p.name for p in current.iterdir())
            except OSError:
                break
            close = difflib.get_close_matches(missing, names, n=1)
            if close:
                return f"did you mean {current / close[0]}?"
            return f"{current} exists and holds {', '.join(names[:5]) or 'nothing'}{', …' if len(names) > 5 else ''}"
    return f"{current} exists"


def _walk(folder: Path, base: Path, exclude: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Files under `folder`, sorted, without hidden and excluded ones; linked folders are followed once."""
    seen: set[str] = set()

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: folder cannot be read: {error.strerror}") from error

    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        within = Path(here).relative_to(base)
        folders[:] = sorted(
            f
            for f in folders
            # "tests/*" leaves out everything below, so there is no need to look.
            if not (f.startswith(".") or f == "__pycache__" or _matches(f"{(within / f).as_posix()}/", exclude))
        )
        for name in sorted(names):
            path = Path(here, name)
            if not name.startswith("."):
                yield path, path.relative_to(base).as_posix()


def _select(config: SourceConfig, found: list[tuple[Path, str]]) -> Listing:
    """Keep the files that the format and the suffixes ask for; count the others."""
    wanted: str = config.format
    found = [(path, name) for path, name in found if not _matches(name, config.exclude)]
    regular = [(path, name) for path, name in found if not _is_special(path)]
    ignored = Counter({_SPECIAL: len(found) - len(regular)} if len(regular) < len(found) else {})
    found = regular
    entries = [_entry(path, name, kind_of(name) or "other") for path, name in found]
    if wanted == "auto":
        if config.suffixes:
            entries = [e for e in entries if _has_suffix(e.name, config.suffixes)]
        sizes = Counter[str]()
        for entry in entries:
            # A file chosen by its suffix and of no known kind is text: the user named it.
            kind = "text" if entry.kind == "other" and config.suffixes else entry.kind
            if kind != "other":
                sizes[kind] += entry.size_bytes + 1
        wanted = max(sorted(sizes), key=lambda kind: sizes[kind]) if sizes else "text"
    taken = []
    readable = Counter[str]()
    for path, name in found:
        if _is_wanted(config, wanted, name):
            taken.append(_entry(path, name, wanted))
        else:
            ignored[Path(name).suffix or Path(name).name] += 1
            if (own := kind_of(name)) is not None:
                readable[own] += 1
    taken.sort(key=lambda e: e.name)
    if not taken:
        most = ", ".join(f"{n} × {suffix}" for suffix, n in ignored.most_common(5)) or "no file at all"
        expected = " ".join(config.suffixes) or f"{wanted} files"
        raise UsageError(
            f"data source {config.path}: nothing to read: expected {expected}, found {most}; "
            "set suffixes or format, or another path"
        )
    if ignored:
        logger.info(
            "%s: %d %s files taken, %d others left aside (%s)", config.path, len(taken), wanted, sum(ignored.values()),
            ", ".join(f"{n} × {suffix}" for suffix, n in ignored.most_common(5)),
        )  # fmt: skip
    return Listing(tuple(taken), dict(ignored), dict(readable))


def _is_wanted(config: SourceConfig, kind: str, name: str) -> bool:
    own = kind_of(name)
    if config.suffixes:
        matches = _has_suffix(name, config.suffixes)
        # With an explicit format the suffixes alone decide; with "auto" they narrow down the chosen kind.
        return matches and (config.format != "auto" or own == kind or (own is None and kind == "text"))
    if kind == "jsonl" and config.format == "jsonl":
        return own == "jsonl" or name.lower().endswith(".json")
    return own == kind


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    return "*" in suffixes or name.lower().endswith(tuple(s.lower() for s in suffixes))


def _is_special(path: Path) -> bool:
    """Whether `path`, its links followed, is there and no regular file: opening a pipe would wait for a writer."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False  # reading it reports the error


def _entry(path: Path, name: str, kind: str) -> FileEntry:
    try:
        size_bytes = path.stat().st_size
    except OSError:
        # A dangling link, or a file that vanished: reading it reports the error under the rules of `on_error`.
        size_bytes = 0
    return FileEntry(path, name, size_bytes, kind)


def _without_magic(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts or ["."]


def _is_saved_dataset(root: Path) -> bool:
    return (root / "dataset_dict.json").is_file() or ((root / "state.json").is_file() and any(root.glob("*.arrow")))


def _list_saved_dataset(config: SourceConfig, root: Path) -> Listing:
    if (root / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in root.glob("*/state.json"))
        raise UsageError(
            f"data source {config.path}: holds the splits {', '.join(splits) or '(none)'}; "
            f"give one of them as the path, for example {root / (splits[0] if splits else 'train')}"
        )
    files = tuple(_entry(p, p.name, "arrow") for p in sorted(root.glob("data*.arrow")) or sorted(root.glob("*.arrow")))
    if not files:
        raise UsageError(
            f"data source {config.path}: no *.arrow file, so not a folder written by datasets' save_to_disk; "
            "set format to text, jsonl or parquet, or give another path"
        )
    return Listing(files, {})
