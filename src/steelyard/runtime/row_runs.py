"""Packs the rows that leave a rank and puts what comes back beside the local ones, by whole runs of rows.

The tables say which runs (`domain.plan.SentRows`); they become Python numbers once per plan, so that a layer takes
views and copies them: no index tensor, no index arithmetic. Packing is one `torch.cat` into the send buffer (on a GPU
one kernel per 128 runs). Coming back, rows of queries are at home in one place only and are copied; rows of keys may
have been to several servers and are summed one server after the other, so that the order of every sum is fixed.

Shapes: T local tokens, P rows that leave (a row counts once per destination), X any further dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steelyard.domain.arrays import IntArray
from steelyard.domain.plan import SentRows


def rows_per_rank(peer: IntArray, rows: IntArray, ranks: int) -> list[int]:
    """Rows to or from each rank, 0 where none travel: what an all-to-all takes."""
    counts = [0] * ranks
    for rank, count in zip(peer.tolist(), rows.tolist(), strict=True):
        counts[rank] = count
    return counts


class RowRuns:
    """The runs of one kind of rows that leave this rank.

    Args:
        sent: from the dispatch tables.
    """

    def __init__(self, sent: SentRows) -> None:
        self._first: list[int] = sent.run_row.tolist()
        self._length: list[int] = sent.run_length.tolist()
        self._runs_of_peer: list[int] = sent.runs.tolist()

    def _views(self, rows_TX: Tensor) -> list[Tensor]:
        return [rows_TX.narrow(0, row, length) for row, length in zip(self._first, self._length, strict=True)]

    def pack(self, rows_TX: Tensor, out_PX: Tensor) -> None:
        """Copy the rows that leave into `out_PX` (P, …), which may be strided, as `rows_TX` (T, …) may."""
        if self._first:
            torch.cat(self._views(rows_TX), out=out_PX)

    def put_back(self, rows_TX: Tensor, back_PX: Tensor) -> None:
        """Overwrite each row that left with the one that came back for it; each left for one destination only."""
        if self._first:
            torch._foreach_copy_(self._views(rows_TX), back_PX.split_with_sizes(self._length))

    def add_back(self, rows_TX: Tensor, back_PX: Tensor) -> None:
        """Add to each row those that came back for it, one server after the other, in the dtype of `rows_TX`."""
        if not self._first:
            return
        views, parts, first = self._views(rows_TX), back_PX.split_with_sizes(self._length), 0
        for runs in self._runs_of_peer:
            torch._foreach_add_(views[first : first + runs], parts[first : first + runs])
            first += runs
