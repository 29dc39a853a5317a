from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.stream import ChunkStream
from steelyard.data.workload import Workload, chunk_workload, pack_workload, parse_workload, read_workload
from steelyard.errors import UsageError

GOOD: dict[str, Any] = {"tokens_per_rank": 10, "ranks": 3, "batches": [{"docs": [12, 3, 0, 15]}, {"docs": [30]}]}


def test_a_workload_is_read_and_laid_out(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({**GOOD, "comment": "more keys are fine"}))
    workload = read_workload(path)
    assert (workload.name, workload.tokens_per_rank, workload.ranks) == (str(path), 10, 3)
    assert [b.tolist() for b in workload.batches] == [[12, 3, 0, 15], [30]]
    first, second = workload.layouts()
    assert first.doc_lengths.tolist() == [12, 3, 15]
    assert second.tokens_by_rank.tolist() == [10, 10, 10]


def test_a_mark_of_the_encoding_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert read_workload(path).ranks == 3


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.json")
    with pytest.raises(UsageError, match=r"w\.json: a pipe, socket or device; give a regular file"):
        read_workload(tmp_path / "w.json")


def test_chunks_of_training_become_batches(tmp_path: Path) -> None:
    for number, length in enumerate([50, 7, 20, 31, 18, 9]):
        (tmp_path / f"{number}.txt").write_text("a" * length)
    config = DataConfig(sources=(SourceConfig(str(tmp_path)),), chunk_tokens=16, batch_chunks=3)
    workload = chunk_workload(ChunkStream(config), name="texts", batches=4)
    stream = ChunkStream(config)
    assert (workload.ranks, workload.tokens_per_rank, len(workload.batches)) == (3, 16, 4)
    for layout in workload.layouts():
        chunks = stream.next_chunks()
        assert not layout.spans_ranks
        for rank, chunk in enumerate(chunks):
            assert layout.doc_lengths[layout.shard_rank == rank].tolist() == chunk.doc_lengths.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": None}, 'w: lacks the key "ranks", for example {"tokens_per_rank"'),
        ({"ranks": None, "rank": 3}, 'w: lacks the key "ranks"; did you mean it by "rank"?'),
        ({"ranks": 0}, "w: ranks is 0, expected a whole number of at least 1"),
        ({"tokens_per_rank": True}, "w: tokens_per_rank is true, expected"),
        ({"tokens_per_rank": "8K"}, 'w: tokens_per_rank is "8K", expected'),
        ({"batches": {}}, 'w: "batches" is {}, expected a list'),
        ({"batches": []}, 'w: "batches" is empty, expected at least one'),
        ({"batches": [[5]]}, 'w: batches[0] is [5], expected a JSON object such as {"docs": [lengths]}'),
        ({"batches": [{"docs": [5]}, {"doc": [5]}]}, 'w: batches[1] lacks the key "docs"; did you mean it by "doc"?'),
        ({"batches": [{"docs": 5}]}, "w: batches[0].docs is 5, expected a list of document lengths"),
        ({"batches": [{"docs": [5]}, {"docs": [5, -1]}]}, "w: batches[1].docs[1] is -1, expected the length"),
        ({"batches": [{"docs": [5.5]}]}, "w: batches[0].docs[0] is 5.5, expected the length"),
        ({"batches": [{"docs": [True]}]}, "w: batches[0].docs[0] is true, expected the length"),
        (
            {"batches": [{"docs": [5]}, {"docs": [1, 31]}]},
            "w: batches[1].docs[1] is a document of 31 tokens, longer than 3 ranks × 10 tokens = 30",
        ),
        ({"ranks": 10**12}, "w: ranks is 1000000000000, expected at most 131,072"),
        ({"tokens_per_rank": 10**21}, "w: tokens_per_rank is 1000000000000000000000, expected at most 1,073,741,824"),
        ({"tokens_per_rank": 10**5_000}, "w: tokens_per_rank is a value of type int, expected at most"),
        ({"tokens_per_rank": 1e21}, "w: tokens_per_rank is 1e+21, expected a whole number"),
        ({"batches": [{"docs": [10**21]}]}, "w: batches[0].docs[0] is 1000000000000000000000, expected the length"),
        (
            {"tokens_per_rank": 2**30, "ranks": 20, "batches": [{"docs": [5]}, {"docs": [2**30 - 1] * 20}]},
            "w: batches[1]: its 20 documents have 1.15e+19 (query, key) pairs, more than 4.61e+18 (2^62); use fewer",
        ),
        (
            {"tokens_per_rank": 2**30, "ranks": 300, "batches": [{"docs": [2**20] * 2**18 + [1]}]},
            "w: the documents of batches[0] hold 274,877,906,945 tokens, expected at most 274,877,906,944",
        ),
        ({"batches": [{"docs": [20, 11]}]}, "w: the documents of batches[0] hold 31 tokens, more than 3 ranks × 10"),
    ],
)
def test_mistakes_name_batch_and_key(changes: dict[str, Any], message: str) -> None:
    values = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(UsageError) as caught:
        parse_workload(values, name="w")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"ranks": 3,\n "tokens_per_rank" 5}', "not JSON: line 2, column 20"),
        ("[1, 2]", "is [1, 2], expected a JSON object such as {"),
        ("[" * 100_000, "lists or objects within each other too deep, expected {"),
        ('{"ranks":' * 100_000, "lists or objects within each other too deep, expected {"),
        ('{"ranks": ' + "9" * 5_000 + "}", "a number of thousands of digits, expected lengths in tokens"),
    ],
)
def test_what_is_no_workload_says_so(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_workload(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5))
def test_packing_fills_batches_and_cuts_where_they_end(
    lengths: list[int], tokens_per_rank: int, ranks: int, batches: int
) -> None:
    room = tokens_per_rank * ranks
    column = np.array(lengths, dtype=np.int64)
    if sum(lengths) < room:
        with pytest.raises(UsageError, match="less than one batch"):
            pack_workload(column, name="d", tokens_per_rank=tokens_per_rank, ranks=ranks, batches=batches)
        return
    workload = pack_workload(column, name="d", tokens_per_rank=tokens_per_rank, ranks=ranks, batches=batches)
    assert len(workload.batches) == min(batches, sum(lengths) // room)
    assert all(int(b.sum()) == room for b in workload.batches)
    # The same tokens on one line: borders of documents are borders of parts, and all others are borders of batches.
    parts = set(np.cumsum(np.concatenate(workload.batches)).tolist())
    used = room * len(workload.batches)
    documents = {end for end in np.cumsum(column).tolist() if end <= used}
    assert parts == documents | {room * (i + 1) for i in range(len(workload.batches))}


def test_numbers_are_checked_without_a_file() -> None:
    with pytest.raises(UsageError, match="ranks is 0"):
        Workload("w", 10, 0, (np.array([5]),))
    with pytest.raises(UsageError, match="batches is 0"):
        pack_workload(np.array([50]), name="d", tokens_per_rank=5, ranks=2, batches=0)
