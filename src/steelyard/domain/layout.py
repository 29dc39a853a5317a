"""Which rank holds which tokens, and in which rows.

A *shard* is a run of contiguous tokens of one document on one rank. A rank's local buffers hold its shards one
after another; `row` is the first local row of a shard. Tokens never move: the planner only decides where the
core attention of a query range is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.domain.arrays import IntArray, int_column
from steelyard.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """Tokens [start, start + length) of document `doc`, in local rows [row, row + length) of `rank`."""

    doc: int
    start: int
    length: int
    rank: int
    row: int


@dataclass(frozen=True, eq=False)
class Layout:
    """All shards of one nano-batch, as columns sorted by (rank, row). Build it with a classmethod.

    Attributes:
        ranks: number of ranks; a rank may hold no token.
        doc_lengths: tokens of each document, int64 (documents,).
        shard_doc, shard_start, shard_length, shard_rank, shard_row: the columns of the shard table.
    """

    ranks: int
    doc_lengths: IntArray
    shard_doc: IntArray
    shard_start: IntArray
    shard_length: IntArray
    shard_rank: IntArray
    shard_row: IntArray

    @classmethod
    def from_shards(cls, shards: Sequence[tuple[int, int, int, int]], ranks: int) -> Layout:
        """Build from (doc, start, length, rank) in the order in which each rank holds them.

        Raises:
            UsageError: a rank out of range, or shards that do not cover each document exactly once from 0.
        """
        table = np.array([tuple(s) for s in shards if s[2] != 0], dtype=np.int64).reshape(-1, 4)
        return cls.from_columns(table[:, 0], table[:, 1], table[:, 2], table[:, 3], ranks=ranks)

    @classmethod
    def from_columns(cls, doc: IntArray, start: IntArray, length: IntArray, rank: IntArray, *, ranks: int) -> Layout:
        """As `from_shards`, from int64 columns of positive lengths."""
        if ranks < 1:
            raise UsageError(f"layout: ranks={ranks}, expected at least 1")
        if len(rank) and (rank.min() < 0 or rank.max() >= ranks):
            raise UsageError(f"layout: shard on rank {rank.min()} … {rank.max()}, expected 0 … {ranks - 1}")
        if len(length) and length.min() < 1:
            raise UsageError(f"layout: shard of length {length.min()}, expected positive lengths")
        order = np.argsort(rank, kind="stable")
        doc, start, length, rank = doc[order], start[order], length[order], rank[order]
        ends = np.cumsum(length)
        first_of_rank = np.searchsorted(rank, np.arange(ranks), side="left")
        tokens_before = np.concatenate([[0], ends])[first_of_rank]
        row = ends - length - tokens_before[rank]
        doc_count = int(doc.max()) + 1 if len(doc) else 0
        doc_lengths = np.bincount(doc, weights=length, minlength=doc_count).astype(np.int64)
        by_position = np.lexsort((start, doc))
        expected = np.cumsum(length[by_position]) - length[by_position]
        doc_first = np.concatenate([[0], np.cumsum(doc_lengths)])[:-1]
        wrong = np.flatnonzero(start[by_position] != expected - doc_first[doc[by_position]])
        if len(wrong):
            bad = by_position[wrong[0]]
            raise UsageError(
                f"layout: shards of document {doc[bad]} do not cover it exactly once from position 0 "
                f"(the shard at {start[bad]} leaves a gap or an overlap)"
            )
        columns = [int_column(c) for c in (doc_lengths, doc, start, length, rank, row)]
        return cls(ranks, *columns)

    @classmethod
    def from_doc_lengths(cls, lengths_by_rank: Sequence[Sequence[int]]) -> Layout:
        """Each rank holds its documents whole, in the order given; lengths of 0 are skipped."""
        lengths, rank = [], []
        for r, rank_lengths in enumerate(lengths_by_rank):
            for length in rank_lengths:
                if length < 0:
                    raise UsageError(f"layout: document of length {length} on rank {r}, expected >= 0")
                if length:
                    lengths.append(int(length))
                    rank.append(r)
        count = len(lengths)
        zeros = np.zeros(count, dtype=np.int64)
        return cls.from_columns(
            np.arange(count),
            zeros,
            np.array(lengths, dtype=np.int64),
            np.array(rank, dtype=np.int64),
            ranks=len(lengths_by_rank),
        )

    @classmethod
    def contiguous(cls, doc_lengths: Sequence[int], tokens_per_rank: int, ranks: int) -> Layout:
        """Documents fill rank after rank in order; one that crosses a rank's end continues on the next.

        Raises:
            UsageError: the documents hold more than `ranks` × `tokens_per_rank` tokens.
        """
        lengths = np.array([n for n in doc_lengths if n], dtype=np.int64)
        if len(lengths) and lengths.min() < 0:
            raise UsageError(f"layout: document of length {lengths.min()}, expected >= 0")
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        if total > ranks * tokens_per_rank:
            raise UsageError(f"layout: {total} tokens do not fit {ranks} ranks of {tokens_per_rank} tokens")
        rank_ends = np.arange(1, ranks + 1, dtype=np.int64) * tokens_per_rank
        cuts = np.union1d(ends, rank_ends[rank_ends < total])
        starts = np.concatenate([[0], cuts[:-1]]).astype(np.int64) if len(cuts) else cuts
        doc = np.searchsorted(ends, starts, side="right")
        doc_first = (ends - lengths)[doc]
        return cls.from_columns(doc, starts - doc_first, cuts - starts, starts // max(1, tokens_per_rank), ranks=ranks)

    @classmethod
    def head_tail(cls, doc_lengths: Iterable[int] | IntArray, ranks: int) -> Layout:
        """Each document in 2 × `ranks` pieces; rank r holds pieces r and 2 × ranks − 1 − r of every document.

        The pieces differ by at most one token, so causal work is nearly equal. Documents of length 0 are skipped.

        Raises:
            UsageError: fewer than one rank, or a negative length.
        """
        if ranks < 1:
            raise UsageError(f"head-tail layout: ranks={ranks}, expected at least 1")
        lengths = np.array([int(n) for n in doc_lengths if n], dtype=np.int64)
        bounds = lengths[:, None] * np.arange(2 * ranks + 1, dtype=np.int64) // (2 * ranks)
        # The two middle pieces are neighbours on one rank: one shard.
        bounds = np.delete(bounds, ranks, axis=1)
        rank = np.concatenate([np.arange(ranks), np.arange(ranks - 1)[::-1]])
        sizes = np.diff(bounds, axis=1)
        doc = np.repeat(np.arange(len(lengths), dtype=np.int64), len(rank))
        columns = doc, bounds[:, :-1].reshape(-1), sizes.reshape(-1), np.tile(rank, len(lengths))
        kept = sizes.reshape(-1) != 0
        return cls.from_columns(*(column[kept] for column in columns), ranks=ranks)

    @property
    def docs(self) -> int:
        return len(self.doc_lengths)

    @property
    def shards(self) -> int:
        return len(self.shard_doc)

    @property
    def tokens_by_rank(self) -> IntArray:
        """Tokens that each rank holds, int64 (ranks,)."""
        return np.bincount(self.shard_rank, weights=self.shard_length, minlength=self.ranks).astype(np.int64)

    @property
    def spans_ranks(self) -> bool:
        """Whether any document lives on more than one rank."""
        some_rank = np.zeros(self.docs, dtype=np.int64)
        some_rank[self.shard_doc] = self.shard_rank  # of any one shard of the document
        return bool(np.any(some_rank[self.shard_doc] != self.shard_rank))

    def __iter__(self) -> Iterator[Shard]:
        for columns in zip(
            self.shard_doc, self.shard_start, self.shard_length, self.shard_rank, self.shard_row, strict=True
        ):
            yield Shard(*(int(c) for c in columns))
