"""Layouts: where tokens live."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.domain.layout import Layout, Shard
from steelyard.errors import UsageError


def test_case_positions_of_a_head_tail_layout() -> None:
    """Documents of 4 on two ranks, head–tail: rank 0 holds positions 0 and 3 of both, rank 1 the middle."""
    layout = Layout.from_shards([(0, 0, 1, 0), (0, 3, 1, 0), (1, 0, 1, 0), (1, 3, 1, 0), (0, 1, 2, 1), (1, 1, 2, 1)], 2)
    positions = {0: [0] * 4, 1: [0] * 4}
    for shard in layout:
        positions[shard.rank][shard.row : shard.row + shard.length] = range(shard.start, shard.start + shard.length)
    assert positions == {0: [0, 3, 0, 3], 1: [1, 2, 1, 2]}


def test_rows_count_from_zero_on_each_rank() -> None:
    layout = Layout.from_shards([(1, 0, 3, 1), (0, 0, 2, 0), (2, 0, 4, 1), (0, 2, 5, 1)], 3)
    assert list(layout) == [Shard(0, 0, 2, 0, 0), Shard(1, 0, 3, 1, 0), Shard(2, 0, 4, 1, 3), Shard(0, 2, 5, 1, 7)]
    assert layout.tokens_by_rank.tolist() == [2, 12, 0]
    assert layout.doc_lengths.tolist() == [7, 3, 4]
    assert (layout.docs, layout.shards, layout.spans_ranks) == (3, 4, True)


def test_whole_documents_skip_empty_ones() -> None:
    layout = Layout.from_doc_lengths([[0, 3], [], [5, 0]])
    assert layout.doc_lengths.tolist() == [3, 5]
    assert layout.shard_rank.tolist() == [0, 2]
    assert not layout.spans_ranks


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 5), st.integers(0, 4))
def test_contiguous_fills_rank_after_rank(lengths: list[int], ranks: int, spare: int) -> None:
    per_rank = max(1, -(-sum(lengths) // ranks) + spare)
    layout = Layout.contiguous(lengths, per_rank, ranks)
    assert layout.doc_lengths.tolist() == [n for n in lengths if n]
    line = [(doc, p) for doc, n in enumerate(n for n in lengths if n) for p in range(n)]
    held = [(s.doc, s.start + i, s.rank, s.row + i) for s in layout for i in range(s.length)]
    assert [(doc, p) for doc, p, _, _ in held] == line
    assert [(rank, row) for _, _, rank, row in held] == [divmod(i, per_rank) for i in range(len(line))]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Layout.from_shards([(0, 0, 3, 2)], 2), "expected 0 … 1"),
        (lambda: Layout.from_shards([(0, 0, 3, 0), (0, 4, 1, 1)], 2), "document 0"),
        (lambda: Layout.from_shards([(0, 0, 3, 0), (0, 2, 3, 1)], 2), "document 0"),
        (lambda: Layout.from_shards([(0, 1, 3, 0)], 2), "position 0"),
        (lambda: Layout.from_shards([], 0), "ranks=0"),
        (lambda: Layout.from_shards([(0, 0, -3, 0)], 1), "length -3"),
        (lambda: Layout.from_doc_lengths([[4, -1]]), "length -1 on rank 0"),
        (lambda: Layout.contiguous([5, 6], 5, 2), "11 tokens do not fit 2 ranks of 5"),
    ],
)
def test_mistakes_are_explained(build: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()  # type: ignore[operator]


def test_columns_cannot_be_changed_from_outside() -> None:
    length = np.array([3], dtype=np.int64)
    zero = np.zeros(1, dtype=np.int64)
    layout = Layout.from_columns(zero, zero, length, zero, ranks=1)
    length[0] = 9
    assert layout.shard_length.tolist() == [3]
    with pytest.raises(ValueError, match="read-only"):
        layout.shard_length[0] = 9
