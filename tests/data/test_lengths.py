from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.lengths import (
    LengthBin,
    ScanProgress,
    _chunk_work,
    _chunk_work_whole,
    data_statistics,
    imbalance,
    length_bins,
)
from steelyard.data.stream import ChunkStream
from steelyard.errors import DataError, UsageError


def test_statistics_of_known_lengths(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i:03d}.txt").write_text("x" * i)  # with its end of document: 2 … 100 tokens; one is empty
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "pic.png").write_bytes(b"\xff")
    s = data_statistics(tmp_path, chunk_tokens=64, ranks=(2, 4))
    assert sorted(s.lengths.tolist()) == list(range(2, 101))
    assert (s.documents, s.tokens, s.mean, s.max) == (99, sum(range(2, 101)), 51.0, 100)
    assert [s.percentile(p) for p in (50, 90, 99)] == [51, 91, 100]
    assert s.size_bytes == sum(range(100))
    assert s.skipped.counts == {"encoding": 1, "empty": 1}
    assert s.longest[0] == (str(tmp_path / "099.txt"), 100) and [t for _, t in s.longest] == [100, 99, 98, 97, 96]
    assert s.token_share_above(64) == sum(range(65, 101)) / s.tokens
    assert (s.files, s.ignored_files, s.complete) == (101, {".png": 1}, True)
    assert [i.ranks for i in s.imbalance] == [2, 4]
    assert json.loads(json.dumps(s.as_json()))["length"]["p90"] == 91


def test_bins_hold_everything_once() -> None:
    assert length_bins(np.array([1, 2, 3, 4, 16])) == (
        LengthBin(1, 2, 1, 1), LengthBin(2, 4, 2, 5), LengthBin(4, 8, 1, 4), LengthBin(8, 16, 0, 0),
        LengthBin(16, 32, 1, 16),
    )  # fmt: skip
    assert length_bins(np.zeros(0, dtype=np.int64)) == ()


def test_progress_and_limit(any_source: Path, texts: list[str]) -> None:
    seen: list[ScanProgress] = []
    s = data_statistics(any_source, max_documents=50, progress=seen.append)
    assert s.documents == 50 and not s.complete
    assert seen[-1].documents == 50 and seen[-1].done_bytes == s.size_bytes
    assert data_statistics(any_source, max_documents=len(texts)).complete


def test_a_scan_stops_once_it_has_the_tokens(any_source: Path) -> None:
    whole = data_statistics(any_source, ranks=())
    part = data_statistics(any_source, ranks=(), max_tokens=whole.tokens // 2)
    assert not part.complete
    assert part.tokens >= whole.tokens // 2 > part.tokens - int(part.lengths[-1])
    assert part.lengths.tolist() == whole.lengths[: part.documents].tolist()


def test_statistics_of_a_mix(write: object, texts: list[str]) -> None:
    paths = [write("text", texts), write("jsonl", texts)]  # type: ignore[operator]
    config = DataConfig(sources=tuple(SourceConfig(path=str(p)) for p in paths), chunk_tokens=32, eval_fraction=0.5)
    s = data_statistics(config, ranks=(2,))
    assert s.documents == 2 * len(texts) and s.chunk_tokens == 32


def test_even_documents_have_no_imbalance_and_one_giant_has() -> None:
    even = imbalance([64] * 64, 64, 4)
    assert even.max_over_mean == even.max_over_mean_p95 == 1.0
    # Each step: one rank computes a whole document of 64, the other 64 documents of one token.
    one = imbalance([64, 1] * 64 * 8, 64, 2)
    whole, ones = 64 * 65 / 2, 64.0
    assert one.max_over_mean == pytest.approx(whole / ((whole + ones) / 2))


def test_imbalance_is_that_of_the_stream(tmp_path: Path) -> None:
    """The simulated lanes are the lanes: the same ratio as the chunks of a real run with one lane a rank."""
    random = np.random.default_rng(0)
    for i in range(160):
        (tmp_path / f"{i:03d}.txt").write_text("x" * int(1 + random.pareto(1.1) * 20))
    config = DataConfig(sources=(SourceConfig(path=str(tmp_path)),), chunk_tokens=100, batch_chunks=4, epochs=1)
    for kept in ("cut", "whole"):
        stream = ChunkStream(DataConfig(**{**config.__dict__, "documents": kept}))
        ratios = []
        while not stream.exhausted:
            chunks = stream.next_chunks()
            if kept == "cut" and any(len(c) < 100 for c in chunks):
                break
            pairs = [c.pairs for c in chunks]
            ratios.append(max(pairs) / (sum(pairs) / 4))
        lengths = data_statistics(config).lengths
        found = imbalance(lengths, 100, 4, documents=kept)  # type: ignore[arg-type]
        ratios = ratios[: found.steps]
        assert len(ratios) == found.steps >= 8
        assert found.max_over_mean == pytest.approx(np.mean(ratios))
        assert found.max_over_mean_p95 == pytest.approx(np.percentile(ratios, 95))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 60))
def test_chunk_work_is_that_of_the_parts(lengths: list[int], chunk_tokens: int) -> None:
    """Against a plain walk: every (query, key) pair of a part counted one token at a time."""
    work, room, current = [], chunk_tokens, 0
    for length in lengths:
        position = 0
        for _ in range(length):
            position += 1
            current += position
            room -= 1
            if room == 0:
                work.append(current)
                room, current, position = chunk_tokens, 0, 0
    assert _chunk_work(np.array(lengths), chunk_tokens).tolist() == work


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_whole_equals_cut_where_chunks_are_larger_than_everything(lengths: list[int]) -> None:
    assert len(_chunk_work_whole(np.array(lengths), 10_000)) == 0
    singles = _chunk_work_whole(np.array(lengths), 1)
    assert singles.tolist() == [1.0] * sum(lengths)


def test_few_documents_are_repeated() -> None:
    found = imbalance([10, 500], 64, 8)
    assert found.steps >= 8 and 1.0 <= found.max_over_mean <= 8
    assert imbalance([10, 500], 64, 8) == found


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no document with a token"):
        imbalance([0, 0], 8, 2)
    with pytest.raises(UsageError, match="ranks=0"):
        imbalance([1], 8, 0)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"no document could be used: 1 encoding; for example .*a\.txt"):
        data_statistics(tmp_path)
    with pytest.raises(UsageError, match="max_documents=0"):
        data_statistics(tmp_path, max_documents=0)
