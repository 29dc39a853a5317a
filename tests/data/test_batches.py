from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.data.batches import DocumentBatch, doc_positions, shift_labels
from steelyard.domain.layout import Layout
from steelyard.errors import UsageError

LENGTHS = st.lists(st.integers(0, 40), max_size=8)


def labels_one_by_one(documents: list[list[int]]) -> list[int]:
    """The obvious twin of `shift_labels`."""
    return [label for d in documents if d for label in [*d[1:], -100]]


def test_label_shift_case() -> None:
    labels = shift_labels(np.array([10, 11, 12, 20, 21]), np.array([3, 2]))
    assert labels.tolist() == [11, 12, -100, 21, -100]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_label_shift_does_not_depend_on_the_cut(ranks: int) -> None:
    batch = DocumentBatch.from_tokens([10, 11, 12, 20, 21], [3, 2])
    for layout in (Layout.head_tail([3, 2], ranks), Layout.contiguous([3, 2], -(-5 // ranks), ranks)):
        parts = [batch.cut(layout, r) for r in range(ranks)]
        assert batch.uncut(layout, [p.labels for p in parts]).tolist() == [11, 12, -100, 21, -100]
        assert sum(p.label_count for p in parts) == 3


def test_positions_case() -> None:
    batch = DocumentBatch.from_tokens(range(8), [4, 4])
    layout = Layout.head_tail([4, 4], 2)
    held = [batch.cut(layout, r) for r in range(2)]
    assert held[0].tokens.tolist() == [0, 3, 4, 7]
    assert held[0].positions.tolist() == [0, 3, 0, 3]
    assert held[1].tokens.tolist() == [1, 2, 5, 6]
    assert held[1].positions.tolist() == [1, 2, 1, 2]


def test_empty_documents_change_nothing() -> None:
    with_empty = DocumentBatch.from_tokens(range(8), [0, 0, 5, 0, 3, 0, 0])
    without = DocumentBatch.from_tokens(range(8), [5, 3])
    for name in ("tokens", "labels", "positions", "doc_lengths"):
        assert np.array_equal(getattr(with_empty, name), getattr(without, name))


def test_no_document_at_all() -> None:
    batch = DocumentBatch.from_documents([])
    rows = batch.cut(Layout.from_doc_lengths([[], []]), 1)
    assert len(batch.tokens) == len(rows) == rows.label_count == 0


@given(LENGTHS, st.integers(1, 5), st.booleans())
def test_cut_and_uncut(lengths: list[int], ranks: int, head_tail: bool) -> None:
    first = np.cumsum([0, *lengths])
    documents = [list(range(int(first[d]), int(first[d + 1]))) for d in range(len(lengths))]
    batch = DocumentBatch.from_documents(documents)
    per_rank = -(-sum(lengths) // ranks)
    layout = Layout.head_tail(lengths, ranks) if head_tail else Layout.contiguous(lengths, per_rank, ranks)
    rows = [batch.cut(layout, r) for r in range(ranks)]
    assert batch.labels.tolist() == labels_one_by_one(documents)
    assert batch.positions.tolist() == [p for d in documents for p in range(len(d))]
    assert sorted(t for r in rows for t in r.tokens.tolist()) == list(range(sum(lengths)))
    for name in ("tokens", "labels", "positions"):
        assert np.array_equal(batch.uncut(layout, [getattr(r, name) for r in rows]), getattr(batch, name))
    assert [len(r) for r in rows] == layout.tokens_by_rank.tolist()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.integers(1, 6))
def test_head_tail_is_even(lengths: list[int], ranks: int) -> None:
    """Tokens of a document differ by at most two between ranks, and its causal work by about two rows a piece."""
    for length in lengths:
        layout = Layout.head_tail([length], ranks)
        tokens = layout.tokens_by_rank
        assert tokens.max() - tokens.min() <= 2
        work = np.zeros(ranks)
        for shard in layout:
            end = shard.start + shard.length
            work[shard.rank] += (end * (end + 1) - shard.start * (shard.start + 1)) / 2
        assert work.max() - work.min() <= 3 * length


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="sum to 7, the tokens are 8"):
        DocumentBatch.from_tokens(range(8), [4, 3])
    batch = DocumentBatch.from_tokens(range(8), [4, 4])
    with pytest.raises(UsageError, match="layout is of documents"):
        batch.cut(Layout.head_tail([5, 3], 2), 0)
    with pytest.raises(UsageError, match="rank 2"):
        batch.cut(Layout.head_tail([4, 4], 2), 2)


def test_positions_of_nothing() -> None:
    assert doc_positions(np.zeros(0, dtype=np.int64)).tolist() == []
