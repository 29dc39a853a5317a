from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.data.packing import Chunk, Part, batch_of_chunks, tokens_to_take
from steelyard.domain.layout import Layout


def part(*tokens: int, start: int = 0) -> Part:
    return Part(np.array(tokens, dtype=np.int64), 0, 1, start)


def test_chunk_of_the_label_case() -> None:
    chunk = Chunk.from_parts([part(10, 11, 12), part(20, 21)])
    assert chunk.tokens.tolist() == [10, 11, 12, 20, 21]
    assert chunk.labels.tolist() == [11, 12, -100, 21, -100]
    assert chunk.positions.tolist() == [0, 1, 2, 0, 1]
    assert chunk.doc_lengths.tolist() == [3, 2]
    assert chunk.pairs == 6 + 3


def test_rest_of_a_document_is_one_of_its_own() -> None:
    chunk = Chunk.from_parts([part(5, 6, start=100)])
    assert chunk.positions.tolist() == [0, 1] and chunk.labels.tolist() == [6, -100]
    assert chunk.doc_start.tolist() == [100]


def test_empty_chunk() -> None:
    chunk = Chunk.from_parts([], lane=3)
    assert len(chunk) == chunk.pairs == len(chunk.doc_lengths) == 0
    assert chunk.tokens.dtype == np.int64 and chunk.lane == 3


def test_chunks_of_ranks_as_one_batch() -> None:
    chunks = [Chunk.from_parts([part(1, 2), part(3)]), Chunk.from_parts([]), Chunk.from_parts([part(4, 5, 6)])]
    batch = batch_of_chunks(chunks)
    layout = Layout.from_doc_lengths([c.doc_lengths.tolist() for c in chunks])
    for rank, chunk in enumerate(chunks):
        rows = batch.cut(layout, rank)
        for name in ("tokens", "labels", "positions"):
            assert np.array_equal(getattr(rows, name), getattr(chunk, name))


@given(st.integers(1, 50), st.integers(1, 50), st.booleans(), st.booleans())
def test_rule(rest: int, room: int, chunk_is_empty: bool, begun: bool) -> None:
    cut = tokens_to_take(rest, room, chunk_is_empty=chunk_is_empty, begun=begun, whole=False)
    whole = tokens_to_take(rest, room, chunk_is_empty=chunk_is_empty, begun=begun, whole=True)
    assert cut == min(rest, room)
    assert whole in (0, cut)
    assert (whole == 0) == (rest > room and not chunk_is_empty and not begun)
