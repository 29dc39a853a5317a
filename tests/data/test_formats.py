from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.data import formats
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.failures import RecordError
from steelyard.data.formats import DecompressedCache, JsonlReader, make_reader
from steelyard.data.listing import FileEntry, list_source
from steelyard.data.sources import Source
from steelyard.errors import DataError, UsageError


def entry(path: Path, kind: str = "jsonl") -> FileEntry:
    return FileEntry(path, path.name, path.stat().st_size, kind)


def read_all(path: Path, **settings: object) -> list[str]:
    config = SourceConfig(path=str(path), **settings)  # type: ignore[arg-type]
    source = Source(config, 0, DataConfig(sources=(config,)), lanes=1)
    texts = []
    for record in source.scan():
        if isinstance(record, RecordError):
            raise record
        texts.append(record.block.text(record.index))
    return texts


def test_every_format_gives_every_document(any_source: Path, texts: list[str]) -> None:
    assert sorted(read_all(any_source)) == sorted(texts)


@given(st.lists(st.text("ab \u00e9\n", max_size=60), max_size=12), st.integers(1, 80), st.booleans())
def test_jsonl_blocks_hold_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block_bytes: int, last_newline: bool
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "f.jsonl"
    content = "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts) + "\n" * last_newline
    path.write_text(content, encoding="utf-8")
    reader = JsonlReader(SourceConfig(path=str(path)), DecompressedCache(None), block_bytes)
    blocks = [reader.read_block(entry(path), b) for b in range(reader.block_count(entry(path)))]
    assert [block.text(i) for block in blocks for i in range(len(block))] == texts
    for number, block in enumerate(blocks):
        assert all(number * block_bytes <= block.key(i) < (number + 1) * block_bytes for i in range(len(block)))


def test_a_long_line_is_not_read_by_the_blocks_it_covers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else n blocks inside one line of n blocks would read n² / 2 of them."""
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({"text": "x" * 10_000}) + "\n")
    read: list[int] = []

    class Counting:
        def __init__(self, file: object) -> None:
            self.file = file

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()  # type: ignore[attr-defined]

        def seek(self, offset: int) -> None:
            self.file.seek(offset)  # type: ignore[attr-defined]

        def readline(self, size: int = -1) -> bytes:
            line: bytes = self.file.readline(size)  # type: ignore[attr-defined]
            read.append(len(line))
            return line

    monkeypatch.setattr(formats, "open_binary", lambda p: Counting(p.open("rb")))
    reader = JsonlReader(SourceConfig(path=str(path)), DecompressedCache(None), 100)
    for block in range(1, reader.block_count(entry(path)) - 1):
        assert len(reader.read_block(entry(path), block)) == 0
    assert max(read) <= 101


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read_all(tmp_path / "a.jsonl") == read_all(tmp_path / "a.txt") == ["hello"]


def test_other_encoding_and_field(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    assert read_all(tmp_path / "a.txt", encoding="latin-1") == ["é"]
    (tmp_path / "a.jsonl").write_text('\n{"content": "c", "text": "t"}\n\n   \n{"content": null}\n')
    assert read_all(tmp_path / "a.jsonl", field="content") == ["c", ""]


def test_compressed_text_and_several_frames(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    frames = [zstandard.ZstdCompressor().compress(part) for part in (b"one ", b"two")]
    (tmp_path / "a.txt.zst").write_bytes(b"".join(frames))
    assert read_all(tmp_path / "a.txt.gz") == read_all(tmp_path / "a.txt.zst") == ["one two"]


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_zstd_file_that_was_cut_off(tmp_path: Path, kind: str) -> None:
    zstandard = pytest.importorskip("zstandard")
    content = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(40_000)).encode()
    whole = zstandard.ZstdCompressor().compress(content)
    path = tmp_path / f"a.{kind}.zst"
    path.write_bytes(whole + whole)
    assert len(read_all(path)) == (1 if kind == "txt" else 80_000)
    for keep in (len(whole) // 2, len(whole) + 9, 2 * len(whole) - 1):
        path.write_bytes((whole + whole)[:keep])
        with pytest.raises(RecordError, match=r"not a valid \.zst file: it ends in the middle of a frame"):
            read_all(path)


def test_real_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"document {i}" for i in range(30)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert read_all(tmp_path / "saved") == texts


@pytest.mark.parametrize(
    ("name", "content", "reason", "message"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "malformed", r"a\.jsonl, line 2: not a JSON value"),
        ("a.jsonl", b'{"text": "ok"}\n[1]\n', "malformed", r"line 2: a JSON list, expected an object with 'text'"),
        ("a.jsonl", b'{"a": 1, "id": 1}\n', "missing_field", r"line 1: no field 'text'; the record has 'a', 'id'"),
        ("a.jsonl", b'{"text": 5}\n', "missing_field", r"line 1: field 'text' holds a int, expected a string"),
        ("a.jsonl", b'{"text": "\xff"}\n', "encoding", r"line 1: not valid utf-8 \(at byte 10 of the line\)"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "malformed", r"line 1: not a JSON value"),
        ("a.txt", b"fine\nbad \xe9 byte", "encoding", r"a\.txt, line 2: not valid utf-8 \(byte 0xe9 at offset 9\)"),
        ("a.txt.gz", b"no gzip", "malformed", r"a\.txt\.gz: not a valid \.gz file"),
        # No time in it: it is in the test's name, which must be the same in all processes that collect.
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-12], "malformed", r"not a valid \.gz file"),
        ("a.txt.zst", b"no zstd at all", "malformed", r"not a valid \.zst file"),
        ("a.jsonl.gz", b"no gzip", "malformed", r"a\.jsonl\.gz: not a valid \.gz file"),
        ("a.parquet", b"no parquet at all", "malformed", r"a\.parquet: not a readable parquet file"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, reason: str, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read_all(tmp_path / name)
    assert caught.value.reason == reason
    assert re.search(message, caught.value.describe()), caught.value.describe()


def test_parquet_without_the_column(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(RecordError, match="no column 'text'; there are 'body'; set the source's field"):
        read_all(tmp_path / "a.parquet")


@pytest.mark.parametrize(("package", "kind"), [("pyarrow", "parquet"), ("zstandard", "jsonl.zst")])
def test_missing_package_names_the_extra(
    write: object, texts: list[str], monkeypatch: pytest.MonkeyPatch, package: str, kind: str
) -> None:
    path = write(kind, texts)  # type: ignore[operator]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf'{package}: pip install "steelyard\[data\]"'):
        read_all(path)


def test_cache_is_private_and_removed_or_shared_and_kept(tmp_path: Path) -> None:
    paths = []
    for i in range(4):
        (tmp_path / f"f{i}.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * (i + 1)))
        paths.append(entry(tmp_path / f"f{i}.jsonl.gz"))
    private = DecompressedCache(None)
    private.keep(2)
    copies = [private.copy_of(p) for p in paths]
    assert [c.exists() for c in copies] == [False, False, True, True]
    assert copies[3].stat().st_size == 4 * 14
    folder = copies[0].parent
    del private
    assert not folder.exists()

    shared = DecompressedCache(str(tmp_path / "cache"))
    copies = [shared.copy_of(p) for p in paths]
    assert all(c.exists() for c in copies) and len(list((tmp_path / "cache").iterdir())) == 4
    copies[0].write_bytes(b"kept")  # a second process finds the copy and does not make it again
    assert DecompressedCache(str(tmp_path / "cache")).copy_of(paths[0]).read_bytes() == b"kept"


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cannot write its decompressed copy.*set data\.cache_dir"):
        DecompressedCache(str(tmp_path / "file")).copy_of(entry(tmp_path / "f.jsonl.gz"))


def test_reader_of_a_folder_of_arrow_files_needs_no_datasets_package(any_source: Path) -> None:
    config = SourceConfig(path=str(any_source))
    files = list_source(config).files
    reader = make_reader(files[0].kind, config, DecompressedCache(None))
    assert all(reader.block_count(f) >= 1 for f in files)
