"""Read-only integer columns: the storage of every table in `domain`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def int_column(values: Iterable[int] | IntArray) -> IntArray:
    """Return `values` as a read-only, contiguous int64 vector that the caller cannot change afterwards."""
    column = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int64).reshape(-1)
    column.setflags(write=False)
    return column
