"""Packing and putting back by runs, against plain indexing with the rows that the runs stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.domain.plan import SentRows
from steelyard.runtime.row_runs import RowRuns, rows_per_rank

SENT = SentRows(
    peer=np.array([0, 3]), rows=np.array([5, 4]), runs=np.array([2, 2]),
    run_row=np.array([6, 1, 0, 7]), run_length=np.array([2, 3, 3, 1]),
)  # fmt: skip
ROWS = torch.tensor([6, 7, 1, 2, 3, 0, 1, 2, 7])
ONCE = SentRows(
    peer=np.array([1, 2]), rows=np.array([2, 4]), runs=np.array([1, 2]),
    run_row=np.array([6, 1, 0]), run_length=np.array([2, 3, 1]),
)  # fmt: skip
ONCE_ROWS = torch.tensor([6, 7, 1, 2, 3, 0])
NONE = SentRows(*(np.zeros(0, dtype=np.int64) for _ in range(5)))


def test_rows_per_rank() -> None:
    assert rows_per_rank(SENT.peer, SENT.rows, 5) == [5, 0, 0, 4, 0]
    assert rows_per_rank(NONE.peer, NONE.rows, 2) == [0, 0]


@pytest.mark.parametrize("strided", [False, True])
def test_pack(strided: bool) -> None:
    rows_TX = torch.randn(8, 6, 4)[:, ::2] if strided else torch.randn(8, 3, 4)
    out_PX = torch.full((9, 2, 3, 4), torch.nan)[:, 1] if strided else torch.full((9, 3, 4), torch.nan)
    address = out_PX.data_ptr()
    RowRuns(SENT).pack(rows_TX, out_PX)
    assert torch.equal(out_PX, rows_TX[ROWS]) and out_PX.data_ptr() == address


def test_put_back() -> None:
    rows_TX, back_PX = torch.randn(8, 3, 4), torch.randn(6, 3, 4)
    expected = rows_TX.clone()
    expected[ONCE_ROWS] = back_PX
    RowRuns(ONCE).put_back(rows_TX, back_PX)
    assert torch.equal(rows_TX, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_back_sums_one_server_after_the_other(dtype: torch.dtype) -> None:
    """Values so far apart that another order gives other bits; rows 1, 2 and 7 come back from both servers."""
    generator = torch.Generator().manual_seed(1)
    rows_TX = torch.randn(8, 3, 4, generator=generator)
    scale = 10.0 ** torch.arange(9)[:, None, None, None]
    back_PX = (torch.randn(9, 2, 3, 4, generator=generator) * scale).to(dtype)[:, 1]
    expected = rows_TX.clone()
    for row, back in zip(ROWS.tolist(), back_PX, strict=True):
        expected[row] += back
    other = rows_TX.clone()
    for row, back in reversed(list(zip(ROWS.tolist(), back_PX, strict=True))):
        other[row] += back
    RowRuns(SENT).add_back(rows_TX, back_PX)
    assert torch.equal(rows_TX, expected) and not torch.equal(rows_TX, other)


def test_no_row_leaves() -> None:
    runs, rows_TX, none_PX = RowRuns(NONE), torch.ones(3, 2), torch.zeros(0, 2)
    runs.pack(rows_TX, none_PX)
    runs.put_back(rows_TX, none_PX)
    runs.add_back(rows_TX, none_PX)
    assert torch.equal(rows_TX, torch.ones(3, 2)) and none_PX.shape == (0, 2)
