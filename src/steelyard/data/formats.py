"""Readers of one file. A file is a sequence of *blocks*, each of which can be read alone; a block holds records.

    text     one block, one record: the file
    jsonl    byte ranges of BLOCK_BYTES: a block holds the lines that *start* inside its range, so that the number of
             blocks follows from the size of the file; a compressed file is decompressed once into a cache
    parquet  one block a row group
    arrow    one block a record batch (what `datasets` writes with save_to_disk)

Every failure of a reader is a `RecordError` with the path; `sources` and `stream` decide what becomes of it.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

from steelyard.data.config import SourceConfig
from steelyard.data.failures import RecordError
from steelyard.data.listing import FileEntry
from steelyard.data.stable import stable_hash
from steelyard.errors import DataError, UsageError

BLOCK_BYTES = 1 << 20
"""Size of a JSONL block. Part of the order of documents: changing it changes every run's data order."""

COPY_BYTES = 1 << 20
OPEN_FILES = 8

V = TypeVar("V")


class Block(Protocol):
    """Records that were read together; `key(i)` names record i inside its file (line's byte offset, or row)."""

    def __len__(self) -> int: ...

    def key(self, index: int) -> int: ...

    def place(self, index: int) -> str:
        """Where record i stands, for a message: `line 12`, `row 3`, or "" where the path says it all. May be slow."""
        ...

    def text(self, index: int) -> str:
        """The record's text. Raises `RecordError`."""
        ...


class Reader(Protocol):
    """Reads the files of one kind."""

    cheap_count: bool
    """Whether `block_count` needs no look into the file."""

    def block_count(self, file: FileEntry) -> int: ...

    def read_block(self, file: FileEntry, block: int) -> Block: ...


class Recent(Generic[V]):
    """The last few values by key; the least recently used one is let go (through `release`)."""

    def __init__(self, size: int, release: Callable[[V], None] | None = None) -> None:
        self._size = size
        self._release = release
        self._values: OrderedDict[tuple[object, ...], V] = OrderedDict()

    def get(self, key: tuple[object, ...], make: Callable[[], V]) -> V:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        self._values[key] = value
        if len(self._values) > self._size:
            _, oldest = self._values.popitem(last=False)
            if self._release is not None:
                self._release(oldest)
        return value


def make_reader(kind: str, config: SourceConfig, cache: DecompressedCache) -> Reader:
    """The reader of files of `kind`.

    Raises:
        UsageError: the package that reads it is not installed.
    """
    if kind == "text":
        return TextReader(config)
    if kind == "jsonl":
        return JsonlReader(config, cache)
    return ColumnReader(config, kind)


def open_binary(path: Path) -> IO[bytes]:
    """The one place where data files are opened."""
    return path.open("rb")


@contextmanager
def _reading(path: Path | str) -> Iterator[None]:
    """Turn what can go wrong while reading `path` into a `RecordError`."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecordError("malformed", str(path), f"not a valid .gz file: {error}") from error
    except OSError as error:
        raise RecordError("unreadable", str(path), f"cannot be read: {error.strerror or error}") from error


# --- compressed files -------------------------------------------------------------------------------------------


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UsageError('reading .zst files needs zstandard: pip install "steelyard[data]"') from None
    return zstandard


def _decompressed_parts(file: FileEntry) -> Iterator[bytes]:
    """The content of a .gz, .zst or plain file, piece by piece. Raises `RecordError`."""
    zstandard = _zstandard() if file.compression == ".zst" else None
    with _reading(file.path), open_binary(file.path) as raw:
        if zstandard is not None:
            try:
                yield from _zstd_parts(zstandard, raw)
            except (zstandard.ZstdError, EOFError) as error:
                raise RecordError("malformed", str(file.path), f"not a valid .zst file: {error}") from error
            return
        with gzip.GzipFile(fileobj=raw) if file.compression == ".gz" else raw as stream:
            while part := stream.read(COPY_BYTES):
                yield part


def _zstd_parts(zstandard: Any, raw: IO[bytes]) -> Iterator[bytes]:
    """Frame after frame; zstandard's own `stream_reader` takes a file that was cut off for one that ends there."""
    decompressor = zstandard.ZstdDecompressor()
    frame: Any = None
    while part := raw.read(COPY_BYTES // 8):
        while part:
            if frame is None or frame.eof:
                frame = decompressor.decompressobj()
            content = frame.decompress(part)
            part = frame.unused_data if frame.eof else b""
            if content:
                yield content
    if frame is not None and not frame.eof:
        raise EOFError("it ends in the middle of a frame")


class DecompressedCache:
    """Decompressed copies of compressed files, made when first asked for.

    In a folder given by the user, copies stay and are shared by processes (each is written under a name of its own and
    then renamed). In a private temporary folder at most `keep` copies stay, and all are removed at exit.
    """

    def __init__(self, folder: str | None) -> None:
        self._shared = Path(folder).expanduser() if folder is not None else None
        self._private: tempfile.TemporaryDirectory[str] | None = None
        self._recent: Recent[Path] = Recent(1 << 30)

    def keep(self, copies: int) -> None:
        """Let the private folder hold that many copies (the default is all)."""
        self._recent = Recent(copies, release=lambda path: path.unlink(missing_ok=True))

    def copy_of(self, file: FileEntry) -> Path:
        """Path of the decompressed copy.

        Raises:
            RecordError: the file cannot be read or decompressed.
            DataError: the copy cannot be written.
        """
        if self._shared is None:
            return self._recent.get((file.path,), lambda: self._make(file, self._private_folder()))
        return self._make(file, self._shared)

    def _private_folder(self) -> Path:
        if self._private is None:
            self._private = tempfile.TemporaryDirectory(prefix="steelyard-data-", ignore_cleanup_errors=True)
        return Path(self._private.name)

    def _make(self, file: FileEntry, folder: Path) -> Path:
        with _reading(file.path):
            status = file.path.stat()
        name = f"{stable_hash(str(file.path.resolve()), status.st_size, status.st_mtime_ns):016x}.jsonl"
        target, unfinished = folder / name, folder / f"{name}.{os.getpid()}.partial"
        if target.exists():
            return target
        parts = _decompressed_parts(file)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as out:
                for part in parts:
                    out.write(part)
            unfinished.replace(target)
        except OSError as error:
            raise DataError(
                f"{file.path}: cannot write its decompressed copy to {folder}: {error.strerror}; "
                "set data.cache_dir to a folder with room"
            ) from error
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        return target


# --- text -------------------------------------------------------------------------------------------------------


class TextReader:
    """One file is one document."""

    cheap_count = True

    def __init__(self, config: SourceConfig) -> None:
        self._encoding = config.encoding

    def block_count(self, file: FileEntry) -> int:
        return 1

    def read_block(self, file: FileEntry, block: int) -> Block:
        return _TextBlock(file, self._encoding)


class _TextBlock:
    def __init__(self, file: FileEntry, encoding: str) -> None:
        self._file, self._encoding = file, encoding

    def __len__(self) -> int:
        return 1

    def key(self, index: int) -> int:
        return 0

    def place(self, index: int) -> str:
        return ""

    def text(self, index: int) -> str:
        raw = b"".join(_decompressed_parts(self._file))
        try:
            return raw.decode(self._encoding).removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            line = raw[: error.start].count(b"\n") + 1
            raise RecordError(
                "encoding", str(self._file.path),
                f"not valid {self._encoding} (byte {raw[error.start]:#04x} at offset {error.start}); "
                "set the source's encoding or suffixes", lambda: f"line {line}",
            ) from error  # fmt: skip


# --- JSON lines -------------------------------------------------------------------------------------------------


class JsonlReader:
    """One line is one record; lines of white space hold none."""

    def __init__(self, config: SourceConfig, cache: DecompressedCache, block_bytes: int = BLOCK_BYTES) -> None:
        self._field, self._cache, self._block_bytes = config.field, cache, block_bytes

    cheap_count = True

    def block_count(self, file: FileEntry) -> int:
        if file.compression is None:
            return -(-file.size_bytes // self._block_bytes)
        copy = self._cache.copy_of(file)
        return -(-copy.stat().st_size // self._block_bytes)

    def read_block(self, file: FileEntry, block: int) -> Block:
        path = file.path if file.compression is None else self._cache.copy_of(file)
        with _reading(file.path):
            return _JsonlBlock(file, path, self._field, list(self._lines(path, block)))

    def _lines(self, path: Path, block: int) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line) of the lines that start in the block's range."""
        start, end = block * self._block_bytes, (block + 1) * self._block_bytes
        with open_binary(path) as file:
            if start:
                # A line that starts exactly at `start` belongs to this block: look for the end of the line before it.
                file.seek(start - 1)
                start = start - 1 + len(file.readline(end - start + 1))
                if start >= end:
                    return
            file.seek(start)
            while start < end and (line := file.readline()):
                if not line.isspace():
                    yield start, line
                start += len(line)


class _JsonlBlock:
    def __init__(self, file: FileEntry, path: Path, field: str, lines: list[tuple[int, bytes]]) -> None:
        self._file, self._path, self._field, self._lines = file, path, field, lines

    def __len__(self) -> int:
        return len(self._lines)

    def key(self, index: int) -> int:
        return self._lines[index][0]

    def place(self, index: int) -> str:
        offset = self._lines[index][0]
        try:
            return f"line {_line_number(self._path, offset)}"
        except OSError:
            return f"byte offset {offset}"

    def text(self, index: int) -> str:
        offset, line = self._lines[index]
        path, place = str(self._file.path), partial(self.place, index)
        try:
            record = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            detail = f"not valid utf-8 (at byte {error.start} of the line)"
            raise RecordError("encoding", path, detail, place) from error
        except (ValueError, RecursionError) as error:
            raise RecordError("malformed", path, f"not a JSON value: {error}", place) from error
        if not isinstance(record, dict):
            found = type(record).__name__
            raise RecordError("malformed", path, f"a JSON {found}, expected an object with {self._field!r}", place)
        if self._field not in record:
            known = ", ".join(repr(k) for k in list(record)[:8]) or "none"
            detail = f"no field {self._field!r}; the record has {known}; set the source's field"
            raise RecordError("missing_field", path, detail, place)
        return _as_text(record[self._field], self._field, path, place)


def _line_number(path: Path, offset: int) -> int:
    """1-based number of the line that starts at `offset`."""
    newlines, left = 0, offset
    with open_binary(path) as file:
        while left > 0 and (part := file.read(min(left, COPY_BYTES))):
            newlines += part.count(b"\n")
            left -= len(part)
    return newlines + 1


def _as_text(value: object, field: str, path: str, place: Callable[[], str]) -> str:
    """The field's text; null is an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecordError(
            "missing_field", path, f"field {field!r} holds a {type(value).__name__}, expected a string", place
        )
    return value


# --- Parquet and datasets ---------------------------------------------------------------------------------------


class ColumnReader:
    """Parquet files and the arrow files that `datasets` saves, through pyarrow; reads the text column alone."""

    cheap_count = False

    def __init__(self, config: SourceConfig, kind: str) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise UsageError(f'reading {config.path} needs pyarrow: pip install "steelyard[data]"') from None
        self._pa, self._pq = pa, pq
        self._field, self._kind = config.field, kind
        self._open: Recent[Any] = Recent(OPEN_FILES)

    def block_count(self, file: FileEntry) -> int:
        with self._guard(file):
            opened = self._file(file)
            return opened.num_row_groups if self._kind == "parquet" else len(opened)

    def read_block(self, file: FileEntry, block: int) -> Block:
        with self._guard(file):
            opened = self._file(file)
            if self._kind == "parquet":
                metadata = opened.metadata
                first_row = sum(metadata.row_group(b).num_rows for b in range(block))
                column = opened.read_row_group(block, columns=[self._field]).column(0)
            else:
                first_row = sum(opened[b].num_rows for b in range(block))
                column = opened[block].column(self._field)
        return _ColumnBlock(file, self._field, first_row, column)

    def _file(self, file: FileEntry) -> Any:
        return self._open.get((file.path,), lambda: self._open_file(file))

    def _open_file(self, file: FileEntry) -> Any:
        if self._kind == "parquet":
            opened = self._pq.ParquetFile(file.path)
            names = opened.schema_arrow.names
        else:
            # Memory-mapped: the batches are views of the file, so that listing them reads only their headers.
            opened = list(self._pa.ipc.open_stream(self._pa.memory_map(str(file.path))))
            names = opened[0].schema.names if opened else [self._field]
        if self._field not in names:
            known = ", ".join(repr(n) for n in names[:8])
            raise RecordError(
                "missing_field", str(file.path), f"no column {self._field!r}; there are {known}; set the source's field"
            )
        return opened

    @contextmanager
    def _guard(self, file: FileEntry) -> Iterator[None]:
        try:
            with _reading(file.path):
                yield
        except self._pa.ArrowException as error:
            raise RecordError("malformed", str(file.path), f"not a readable {self._kind} file: {error}") from error


class _ColumnBlock:
    def __init__(self, file: FileEntry, field: str, first_row: int, column: Any) -> None:
        self._file, self._field, self._first_row, self._column = file, field, first_row, column

    def __len__(self) -> int:
        return len(self._column)

    def key(self, index: int) -> int:
        return self._first_row + index

    def place(self, index: int) -> str:
        return f"row {self._first_row + index}"

    def text(self, index: int) -> str:
        path, place = str(self._file.path), partial(self.place, index)
        try:
            value = self._column[index].as_py()
        except UnicodeDecodeError as error:
            detail = f"not valid utf-8 (at byte {error.start} of the value)"
            raise RecordError("encoding", path, detail, place) from error
        return _as_text(value, self._field, path, place)
