"""Chunks, and the rule by which documents fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.data.batches import DocumentBatch, doc_positions, shift_labels
from steelyard.domain.arrays import IntArray, int_column


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens [start, start + len(tokens)) of a document, as they enter a chunk."""

    tokens: IntArray
    source: int
    document_id: int
    start: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """At most `chunk_tokens` packed tokens that one rank computes on; a part of a document is a document of its own.

    Attributes:
        tokens, labels, positions: int64 (T,); labels shifted per document, -100 in the last row of each, positions
            from 0 in each. T may be 0: a lane that has run dry.
        doc_lengths: tokens of each document (or part), int64 (documents,), all positive.
        doc_source: index of the source each came from, int64 (documents,).
        doc_id: 63-bit hash of file name and place in the file, int64 (documents,).
        doc_start: tokens of the document that earlier chunks held, int64 (documents,).
        lane: the lane that filled it: its place in the global step.
    """

    tokens: IntArray
    labels: IntArray
    positions: IntArray
    doc_lengths: IntArray
    doc_source: IntArray
    doc_id: IntArray
    doc_start: IntArray
    lane: int

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_parts(cls, parts: Sequence[Part], lane: int = 0) -> Chunk:
        """Pack `parts` one after another."""
        tokens = np.concatenate([*(p.tokens for p in parts), np.zeros(0, dtype=np.int64)])
        lengths = np.array([len(p.tokens) for p in parts], dtype=np.int64)
        return cls(
            tokens=int_column(tokens),
            labels=int_column(shift_labels(tokens, lengths)),
            positions=int_column(doc_positions(lengths)),
            doc_lengths=int_column(lengths),
            doc_source=int_column(p.source for p in parts),
            doc_id=int_column(p.document_id for p in parts),
            doc_start=int_column(p.start for p in parts),
            lane=lane,
        )

    @property
    def pairs(self) -> int:
        """Causal (query, key) pairs: its core-attention work."""
        return int(np.sum(self.doc_lengths * (self.doc_lengths + 1) // 2))


def batch_of_chunks(chunks: Sequence[Chunk]) -> DocumentBatch:
    """The documents of several chunks, chunk after chunk; with `Layout.from_doc_lengths` of their `doc_lengths`, rank r
    holds chunk r."""
    tokens = np.concatenate([*(c.tokens for c in chunks), np.zeros(0, dtype=np.int64)])
    lengths = np.concatenate([*(c.doc_lengths for c in chunks), np.zeros(0, dtype=np.int64)])
    return DocumentBatch.from_tokens(tokens, lengths)


def tokens_to_take(rest: int, room: int, *, chunk_is_empty: bool, begun: bool, whole: bool) -> int:
    """How many of a document's `rest` remaining tokens enter a chunk with `room` left; 0 closes the chunk.

    Args:
        chunk_is_empty: nothing is in the chunk yet.
        begun: an earlier chunk holds the document's beginning.
        whole: documents are kept whole where they fit a chunk.
    """
    if whole and rest > room and not chunk_is_empty and not begun:
        return 0
    return min(rest, room)
