"""What happens to documents that cannot be read, with `on_error` "stop" and "skip". Tests may run as root, so
unreadable files are dangling links, wrong bytes, or an injected disk error rather than missing permissions."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from steelyard.data import formats
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.failures import RecordError, SkipReport
from steelyard.data.stream import ChunkStream
from steelyard.errors import DataError, UsageError


def config_of(path: Path, **settings: Any) -> DataConfig:
    defaults: dict[str, Any] = {"chunk_tokens": 1000, "batch_chunks": 1, "epochs": 1, "on_error": "skip"}
    return DataConfig(sources=(SourceConfig(path=str(path)),), **{**defaults, **settings})


def texts_of(stream: ChunkStream) -> list[str]:
    tokens: list[int] = []
    while not stream.exhausted:
        for chunk in stream.next_chunks():
            tokens += chunk.tokens.tolist()
    text = "".join(chr(t) if t < 256 else "\0" for t in tokens)
    return sorted(text.split("\0")[:-1])


def broken_encoding(folder: Path) -> None:
    (folder / "bad.txt").write_bytes(b"\xff\xfe")


def dangling_link(folder: Path) -> None:
    (folder / "bad.txt").symlink_to(folder / "gone")


def vanished(folder: Path) -> None:
    (folder / "bad.txt").write_text("here for the listing only")


def truncated_gzip(folder: Path) -> None:
    (folder / "bad.txt.gz").write_bytes(gzip.compress(b"x" * 5000)[:-9])


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [(broken_encoding, "encoding"), (dangling_link, "unreadable"), (vanished, "unreadable"),
     (truncated_gzip, "malformed")],
)  # fmt: skip
def test_stop_names_the_file_and_skip_counts_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, break_it: Callable[[Path], None], reason: str
) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "c.txt").write_text("also good")
    break_it(tmp_path)
    stopping, skipping = ChunkStream(config_of(tmp_path, on_error="stop")), ChunkStream(config_of(tmp_path))
    if break_it is vanished:
        (tmp_path / "bad.txt").unlink()
    with pytest.raises(DataError, match=r"bad\.txt.*set on_error = \"skip\" to go on"):
        stopping.next_chunks()
    with caplog.at_level(logging.WARNING, logger="steelyard"):
        assert texts_of(skipping) == ["also good", "good"]
    assert skipping.skipped.counts == {reason: 1}
    assert "bad.txt" in skipping.skipped.examples[reason][0]
    assert len(caplog.records) == 1 and "bad.txt" in caplog.text


def test_disk_error_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("txt", "jsonl", "jsonl.gz"):
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("a", "bad", "c"):
            content = name if kind == "txt" else json.dumps({"text": name}) + "\n"
            raw = content.encode()
            (folder / f"{name}.{kind}").write_bytes(gzip.compress(raw) if kind.endswith("gz") else raw)
    original = formats.open_binary

    def failing(path: Path) -> IO[bytes]:
        if path.name.startswith("bad"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return original(path)

    monkeypatch.setattr(formats, "open_binary", failing)
    for kind in ("txt", "jsonl", "jsonl.gz"):
        stream = ChunkStream(config_of(tmp_path / kind))
        assert texts_of(stream) == ["a", "c"]
        assert stream.skipped.counts == {"unreadable": 1}
        with pytest.raises(DataError, match=rf"bad\.{re.escape(kind)}: cannot be read: Input/output error"):
            texts_of(ChunkStream(config_of(tmp_path / kind, on_error="stop")))


@pytest.mark.parametrize("broken", range(6))
def test_after_an_error_the_stream_stands_where_it_stood(tmp_path: Path, broken: int) -> None:
    """Whichever lane meets it: so that a transient error can be tried again without losing a token."""
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(str(i) * 30)
    config = config_of(tmp_path, on_error="stop", chunk_tokens=40, batch_chunks=2)
    expected = ChunkStream(config)
    whole = [[c.tokens.tolist() for c in expected.next_chunks()] for _ in range(3)]
    bad = tmp_path / f"{broken}.txt"
    stream = ChunkStream(config)
    bad.write_bytes(b"\xff" * 30)
    found = []
    for _ in range(3):
        state = stream.state_dict()
        try:
            found.append([c.tokens.tolist() for c in stream.next_chunks()])
        except DataError:
            assert stream.state_dict() == state
            bad.write_text(str(broken) * 30)
            found.append([c.tokens.tolist() for c in stream.next_chunks()])
    assert bad.read_text() == str(broken) * 30, "the broken file must have been met"
    assert found == whole


def test_one_warning_a_file_and_every_line_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ['{"text": "good"}', "{", '{"text": 3}', '{"other": "x"}', "[]", '{"text": ""}', '{"text": "  \\n"}',
             '{"text": "\\ud800"}', '{"text": null}']  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    stream = ChunkStream(config_of(tmp_path))
    with caplog.at_level(logging.WARNING, logger="steelyard"):
        assert texts_of(stream) == ["good"]
    assert stream.skipped.counts == {"malformed": 2, "missing_field": 2, "encoding": 1, "empty": 3}
    assert (stream.skipped.total, stream.skipped.errors) == (8, 5)
    assert len(caplog.records) == 1
    assert any(re.search(r"a\.jsonl, line 4: no field 'text'", e) for e in stream.skipped.examples["missing_field"])
    assert str(stream.skipped) == "3 empty, 1 encoding, 2 malformed, 2 missing field"


def test_empty_documents_and_filters_are_counted_but_never_stop(tmp_path: Path) -> None:
    for name, text in (("a", ""), ("b", "xx"), ("c", "x" * 50), ("d", "é" * 5), ("e", " \n")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    config = config_of(tmp_path, on_error="stop")
    stream = ChunkStream(replace(config, sources=(SourceConfig(path=str(tmp_path), min_bytes=3, max_bytes=10),)))
    assert len(texts_of(stream)) == 1
    assert stream.skipped.counts == {"empty": 2, "below_min_bytes": 1, "above_max_bytes": 1}
    assert stream.skipped.errors == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_counts_do_not_depend_on_the_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """A file that cannot be opened is met by every lane when records are dealt, and counted by one."""
    (tmp_path / "a.jsonl").write_text("\n".join(['{"text": "x"}', "{", '{"text": ""}'] * 10))
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    streams = [ChunkStream(config_of(tmp_path, batch_chunks=4), rank=r, ranks=ranks) for r in range(ranks)]
    assert sum(len(texts_of(s)) for s in streams) == 10
    assert SkipReport.merged(s.skipped for s in streams).counts == {"malformed": 11, "empty": 10}


def test_nothing_readable_is_an_error_and_not_an_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_text("")
    stream = ChunkStream(config_of(tmp_path, epochs=None))
    with pytest.raises(DataError, match=r"no document for split 'train': 1 empty, 1 encoding; for example .*\.txt"):
        stream.next_chunks()
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text("")
    with pytest.raises(UsageError, match="all 1 files are empty"):
        ChunkStream(config_of(tmp_path / "lines", epochs=None))
    (tmp_path / "lines" / "a.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="no document for split 'train'"):
        ChunkStream(config_of(tmp_path / "lines", epochs=None)).next_chunks()


def test_a_document_that_shrank_since_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 90)
    (tmp_path / "b.txt").write_text("y" * 90)
    stream = ChunkStream(config_of(tmp_path, chunk_tokens=60, shuffle=False))
    stream.next_chunks()
    state = stream.state_dict()
    # As many bytes as before, but fewer characters, each one token of this tokenizer: sizes do not give it away.
    path.write_text("é" * 45, encoding="utf-8")

    class Characters:
        name, vocab_size, eos_id, bos_id, fingerprint = "bytes", 257, 256, None, "bytes"

        def encode(self, text: str) -> Any:
            return np.array([ord(c) % 256 for c in text], dtype=np.int64)

        def decode(self, tokens: Any) -> str:
            return ""

    stopping = ChunkStream(config_of(tmp_path, shuffle=False, on_error="stop"), tokenizer=Characters())
    stopping.load_state_dict(state)
    with pytest.raises(DataError, match="46 tokens, of which 60 were read before the checkpoint: it has changed"):
        stopping.next_chunks()
    skipping = ChunkStream(config_of(tmp_path, shuffle=False), tokenizer=Characters())
    skipping.load_state_dict(state)
    assert texts_of(skipping) == ["y" * 90]


def test_report() -> None:
    report = SkipReport()
    for i in range(5):
        report = report.plus(RecordError("empty", f"p{i}", "an empty document", lambda: "line 1"))
    assert report.counts == {"empty": 5}
    assert report.examples["empty"] == tuple(f"p{i}, line 1: an empty document" for i in range(3))
    assert SkipReport.merged([report, report]).counts == {"empty": 10}
    assert str(report) == "5 empty" and str(SkipReport()) == "nothing skipped"
