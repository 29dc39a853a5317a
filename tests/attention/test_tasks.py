from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.attention import packed_tasks, selected_tasks
from steelyard.errors import UsageError


@given(docs=st.lists(st.integers(0, 30), max_size=8), range_length=st.none() | st.integers(1, 12))
def test_every_query_once_with_all_its_keys(docs: list[int], range_length: int | None) -> None:
    tasks = packed_tasks(docs, range_length=range_length)
    doc_of_row = [d for d, length in enumerate(docs) for _ in range(length)]
    first_row = [sum(docs[:d]) for d in range(len(docs))]
    seen: list[int] = []
    for t in range(len(tasks)):
        row, length, position = (int(c[t]) for c in (tasks.q_row, tasks.q_length, tasks.q_position))
        assert 0 < length <= (range_length or length)
        assert int(tasks.segment_row[t]) == row - position == first_row[doc_of_row[row]]
        assert int(tasks.segment_length[t]) == position + length
        seen += range(row, row + length)
    assert seen == list(range(sum(docs)))


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="negative"):
        packed_tasks([3, -1])
    with pytest.raises(UsageError, match="range_length=0"):
        packed_tasks([3], range_length=0)


def test_selected_tasks_keep_their_keys() -> None:
    every = packed_tasks([7, 9], range_length=3)
    some = selected_tasks(every, np.array([4, 1]))
    assert some.q_row.tolist() == [10, 3] and some.q_length.tolist() == [3, 3] and some.q_position.tolist() == [3, 3]
    assert some.segment_offset.tolist() == [0, 1, 2]
    assert some.segment_row.tolist() == [7, 0] and some.segment_length.tolist() == [6, 6]
    assert len(selected_tasks(every, np.zeros(0, dtype=np.int64))) == 0
