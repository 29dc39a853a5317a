"""CA-tasks: query ranges of one document with the keys they may see.

A task's queries always lie in one shard, so they live on one rank (its *home*) in contiguous rows. The queries
[start, end) of a causal document see the keys [0, end); with a window of w keys, query q sees [max(0, q − w + 1), q].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from steelyard.domain.arrays import IntArray, int_column


@dataclass(frozen=True)
class CATask:
    """Queries [start, end) of `doc`, computed on `server`; they live in shard `shard` of the layout."""

    doc: int
    start: int
    end: int
    server: int
    shard: int


@dataclass(frozen=True, eq=False)
class CATasks:
    """A table of CA-tasks, as int64 columns sorted by (shard, start)."""

    doc: IntArray
    start: IntArray
    end: IntArray
    server: IntArray
    shard: IntArray

    @classmethod
    def from_columns(cls, doc: IntArray, start: IntArray, end: IntArray, server: IntArray, shard: IntArray) -> CATasks:
        """Sort the columns by (shard, start) and freeze them."""
        order = np.lexsort((start, shard))
        return cls(*(int_column(c[order]) for c in (doc, start, end, server, shard)))

    def __len__(self) -> int:
        return len(self.doc)

    def __iter__(self) -> Iterator[CATask]:
        for columns in zip(self.doc, self.start, self.end, self.server, self.shard, strict=True):
            yield CATask(*(int(c) for c in columns))
