"""Tokens, shifted labels and positions of documents, cut by a layout: the one place where they are cut.

Labels are shifted and positions counted over each *whole* document before anything is cut, so a rank that holds a part
of a document has the label of its last row from the next rank, and positions that go on where the part before ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.domain.arrays import IntArray, int_column
from steelyard.domain.layout import Layout
from steelyard.errors import UsageError

IGNORED_LABEL = -100
"""Label of a row without a next token; the value that torch's cross-entropy leaves out by default."""


def shift_labels(tokens: IntArray, doc_lengths: IntArray) -> IntArray:
    """The next token of the same document, IGNORED_LABEL in its last row; int64 (T,).

    Args:
        tokens: int64 (T,), documents one after another.
        doc_lengths: int64 (documents,), sums to T; zeros are allowed.
    """
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    ends = np.cumsum(doc_lengths)[np.asarray(doc_lengths) > 0]
    labels[ends - 1] = IGNORED_LABEL
    return labels


def doc_positions(doc_lengths: IntArray) -> IntArray:
    """0, 1, … within each document; int64 (T,)."""
    starts = np.cumsum(doc_lengths) - doc_lengths
    return np.arange(int(np.sum(doc_lengths)), dtype=np.int64) - np.repeat(starts, doc_lengths)


@dataclass(frozen=True, eq=False)
class RankBatch:
    """What one rank computes on, in the layout's row order: int64 columns (rows,)."""

    tokens: IntArray
    labels: IntArray
    positions: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def label_count(self) -> int:
        """Rows that count in the loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    """The documents of one nano-batch, one after another, with labels and positions of the whole documents.

    Attributes:
        tokens, labels, positions: int64 (T,).
        doc_lengths: int64 (documents,), without zeros: document d here is document d of the layouts that cut it.
    """

    tokens: IntArray
    labels: IntArray
    positions: IntArray
    doc_lengths: IntArray

    @classmethod
    def from_tokens(cls, tokens: Iterable[int] | IntArray, doc_lengths: Iterable[int] | IntArray) -> DocumentBatch:
        """Build from packed tokens; documents of length 0 are dropped.

        Raises:
            UsageError: the lengths do not sum to the number of tokens.
        """
        token_column, lengths = int_column(tokens), int_column(doc_lengths)
        if len(lengths) and lengths.min() < 0:
            raise UsageError(f"batch: document of length {lengths.min()}, expected >= 0")
        if int(lengths.sum()) != len(token_column):
            raise UsageError(f"batch: document lengths sum to {lengths.sum()}, the tokens are {len(token_column)}")
        lengths = int_column(lengths[lengths > 0])
        labels = int_column(shift_labels(token_column, lengths))
        return cls(token_column, labels, int_column(doc_positions(lengths)), lengths)

    @classmethod
    def from_documents(cls, documents: Sequence[Iterable[int] | IntArray]) -> DocumentBatch:
        """Build from one token sequence per document; empty ones are dropped."""
        columns = [int_column(d) for d in documents]
        tokens = np.concatenate([*columns, np.zeros(0, dtype=np.int64)])
        return cls.from_tokens(tokens, int_column(len(c) for c in columns))

    def cut(self, layout: Layout, rank: int) -> RankBatch:
        """The rows of `rank`.

        Raises:
            UsageError: the layout is one of other documents, or has no such rank.
        """
        if not np.array_equal(layout.doc_lengths, self.doc_lengths):
            raise UsageError(
                f"batch: the layout is of documents {_short(layout.doc_lengths)}, "
                f"the batch holds {_short(self.doc_lengths)}"
            )
        if not 0 <= rank < layout.ranks:
            raise UsageError(f"batch: rank {rank} of a layout of {layout.ranks} ranks")
        mine = layout.shard_rank == rank
        doc_first = np.cumsum(self.doc_lengths) - self.doc_lengths
        first = doc_first[layout.shard_doc[mine]] + layout.shard_start[mine]
        lengths = layout.shard_length[mine]
        rows = np.repeat(first, lengths) + doc_positions(lengths)
        return RankBatch(*(int_column(column[rows]) for column in (self.tokens, self.labels, self.positions)))

    def uncut(self, layout: Layout, by_rank: Sequence[IntArray]) -> IntArray:
        """The inverse of `cut` for any per-row column: (rows of rank r,) for each rank → (T,)."""
        whole = np.zeros(len(self.tokens), dtype=np.result_type(*by_rank) if by_rank else np.int64)
        index = DocumentBatch(np.arange(len(whole)), self.labels, self.positions, self.doc_lengths)
        for rank, column in enumerate(by_rank):
            whole[index.cut(layout, rank).tokens] = column
        return whole


def _short(lengths: IntArray) -> str:
    shown = ", ".join(str(n) for n in lengths[:6])
    return f"[{shown}{', …' if len(lengths) > 6 else ''}] ({len(lengths)})"
