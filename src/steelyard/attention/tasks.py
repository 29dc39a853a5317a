"""Task tables of whole documents that all live in this process: what core attention without any exchange computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steelyard.domain.arrays import IntArray, int_column
from steelyard.domain.plan import KernelTasks
from steelyard.errors import UsageError


def packed_tasks(doc_lengths: Sequence[int] | IntArray, *, range_length: int | None = None) -> KernelTasks:
    """One task per document of a packed row of documents; documents of length 0 have none.

    Args:
        doc_lengths: tokens of each document, in the order in which their rows follow each other in store 0.
        range_length: cut each document into tasks of at most so many queries (the same function, in more pieces).

    Raises:
        UsageError: a negative length, or a range length below 1.
    """
    lengths = int_column(doc_lengths)
    if (lengths < 0).any():
        raise UsageError(f"document lengths {lengths.tolist()}: a length cannot be negative")
    if range_length is not None and range_length < 1:
        raise UsageError(f"range_length={range_length}, expected at least 1 (or None for whole documents)")
    first_row = np.cumsum(lengths) - lengths
    step = np.maximum(lengths, 1) if range_length is None else np.full_like(lengths, range_length)
    ranges = -(-lengths // step)
    doc = np.repeat(np.arange(len(lengths)), ranges)
    start = (np.arange(len(doc)) - np.repeat(np.cumsum(ranges) - ranges, ranges)) * step[doc]
    end = np.minimum(start + step[doc], lengths[doc])
    local = np.zeros(len(doc), dtype=np.int64)
    return KernelTasks(
        q_store=local,
        q_row=int_column(first_row[doc] + start),
        q_length=int_column(end - start),
        q_position=int_column(start),
        segment_offset=int_column(np.arange(len(doc) + 1)),
        segment_store=local,
        segment_row=int_column(first_row[doc]),
        segment_length=int_column(end),
        segment_position=local,
    )


def selected_tasks(tasks: KernelTasks, chosen: IntArray) -> KernelTasks:
    """The tasks with the indices `chosen`, in that order, over the same rows."""
    count = np.diff(tasks.segment_offset)[chosen]
    offset = int_column(np.concatenate([[0], np.cumsum(count)]))
    segment = np.repeat(tasks.segment_offset[:-1][chosen] - offset[:-1], count) + np.arange(offset[-1])
    return KernelTasks(
        q_store=tasks.q_store[chosen],
        q_row=tasks.q_row[chosen],
        q_length=tasks.q_length[chosen],
        q_position=tasks.q_position[chosen],
        segment_offset=offset,
        segment_store=tasks.segment_store[segment],
        segment_row=tasks.segment_row[segment],
        segment_length=tasks.segment_length[segment],
        segment_position=tasks.segment_position[segment],
    )
