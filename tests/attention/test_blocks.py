"""Blocks and their pieces cover every visible (query, key) pair once, however tasks are joined, gathered and cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.attention import packed_tasks, selected_tasks
from steelyard.attention.blocks import Block, Cut, Piece, blocks, joined, short_squares
from steelyard.domain.plan import KernelTasks

Pair = tuple[tuple[int, int], tuple[int, int]]


@st.composite
def tables(draw: st.DrawFn) -> KernelTasks:
    """Some ranges of some documents, whose runs of rows lie in two stores in any order; keys that touch are one run.

    Queries lie one behind another in their stores, also where the document goes on elsewhere between them.
    """
    columns: dict[str, list[int]] = {name: [] for name in KernelTasks.__dataclass_fields__}
    columns["segment_offset"].append(0)
    used, q_used = [0, 0], [0, 0]
    for length in draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)):
        cuts = draw(st.sets(st.integers(1, length), max_size=7)) - {length}
        runs: list[list[int]] = []
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), length], strict=True):
            store = draw(st.integers(0, 1))
            used[store] += draw(st.sampled_from([0, 0, 0, 5]))  # now and then rows of others lie between
            row, size = used[store], end - start
            used[store] += size
            if runs and runs[-1][0] == store and runs[-1][1] + runs[-1][2] == row:
                runs[-1][2] += size
            else:
                runs.append([store, row, size, start])
            if not draw(st.integers(0, 3)):
                continue  # another server's queries
            q_store = draw(st.sampled_from([store, store, 1 - store]))
            q_row = q_used[q_store]
            q_used[q_store] += size
            for name, value in (("q_store", q_store), ("q_row", q_row), ("q_length", size), ("q_position", start)):
                columns[name].append(value)
            for run in runs:
                for name, value in zip(("store", "row", "length", "position"), run, strict=True):
                    columns[f"segment_{name}"].append(value)
            columns["segment_offset"].append(len(columns["segment_row"]))
    return KernelTasks(**{name: np.array(values, dtype=np.int64) for name, values in columns.items()})


def keys_of(tasks: KernelTasks, task: int) -> list[tuple[int, int]]:
    found = []
    for s in range(int(tasks.segment_offset[task]), int(tasks.segment_offset[task + 1])):
        row = int(tasks.segment_row[s])
        found += [(int(tasks.segment_store[s]), row + i) for i in range(int(tasks.segment_length[s]))]
    return found


def pairs_of(tasks: KernelTasks) -> Counter[Pair]:
    """What the table's definition says: the i-th last query of a task sees all keys but the last i."""
    seen: Counter[Pair] = Counter()
    for task in range(len(tasks)):
        keys, length = keys_of(tasks, task), int(tasks.q_length[task])
        for i in range(length):
            query = (int(tasks.q_store[task]), int(tasks.q_row[task]) + i)
            seen.update((query, key) for key in keys[: len(keys) - length + 1 + i])
    return seen


def queries_of(block: Block) -> list[tuple[int, int]]:
    return [(part.store, row) for part in block.ranges for row in range(part.rows.start, part.rows.stop)]


def pairs_of_piece(block: Block, piece: Piece) -> list[Pair]:
    queries = queries_of(block)[piece.rows]
    keys = [(run.store, row) for run in piece.keys for row in range(run.rows.start, run.rows.stop)]
    if not piece.causal:
        return [(query, key) for query in queries for key in keys]
    assert piece.keys[-1].rows.stop - piece.keys[-1].rows.start >= len(queries), "the square lies in the last run"
    cut = len(keys) - len(queries) + 1
    return [(query, key) for i, query in enumerate(queries) for key in keys[: cut + i]]


@given(
    tasks=tables(),
    limit=st.integers(1, 40),
    gather=st.integers(1, 90),
    strip=st.integers(1, 20),
    fused=st.integers(0, 25),
    whole_square=st.integers(1, 30),
)
def test_every_pair_once(
    tasks: KernelTasks, limit: int, gather: int, strip: int, fused: int, whole_square: int
) -> None:
    work = joined(tasks)
    alone, squares = short_squares(work, strip)
    found: Counter[Pair] = Counter()
    for square in squares:
        for q_row, k_row in zip(square.q_row.tolist(), square.k_row.tolist(), strict=True):
            found.update(
                ((square.q_store, q_row + i), (square.k_store, k_row + j))
                for i in range(square.length)
                for j in range(i + 1)
            )
    for block in blocks(work, alone, limit, gather):
        begun: set[tuple[int, int]] = set()
        assert block.rows == len(queries_of(block))
        for piece in block.pieces(Cut(strip, fused, whole_square)):
            queries = set(queries_of(block)[piece.rows])
            assert not begun & queries if piece.fresh else queries <= begun
            begun |= queries
            found.update(pairs_of_piece(block, piece))
    assert found == pairs_of(tasks)


def test_ranges_side_by_side_are_one_task() -> None:
    work = joined(packed_tasks([100, 1, 64], range_length=16))
    assert work.tasks.q_length.tolist() == [100, 1, 64]
    assert work.tasks.segment_length.tolist() == [100, 1, 64]
    assert not work.follows.any()


def test_every_other_range_is_gathered_over_its_common_keys() -> None:
    """Eight ranges of 16 queries: the last seven see 32 keys; then the largest rectangle of what remains."""
    cut = packed_tasks([256], range_length=16)
    work = joined(selected_tasks(cut, np.arange(0, 16, 2)))
    alone, squares = short_squares(work, 16)
    assert [len(square.q_row) for square in squares] == [1] and work.follows.tolist() == [False] + [True] * 7
    (block,) = blocks(work, alone, 64, 1000)
    first, second = list(block.pieces(Cut(16, 16, 1000)))[:2]
    assert (first.rows, first.keys[0].rows, first.causal, first.fresh) == (slice(0, 112), slice(0, 32), False, True)
    assert not second.fresh
    # Products with the 16 queries of a single range are left only next to the diagonal.
    single = [piece for piece in block.pieces(Cut(16, 16, 1000)) if piece.rows.stop - piece.rows.start == 16]
    assert all(piece.causal and len(piece.keys) == 1 for piece in single) and len(single) == 7
    assert max(piece.keys[0].rows.stop - piece.keys[0].rows.start for piece in single) <= 48


@pytest.mark.parametrize("gather", [1, 33, 64])
def test_gathering_stops_at_the_limit(gather: int) -> None:
    cut = packed_tasks([1024], range_length=16)
    work = joined(selected_tasks(cut, np.arange(1, 64, 2)))
    rows = [block.rows for block in blocks(work, np.arange(len(work.tasks)), 64, gather)]
    assert sum(rows) == 512 and all(gather <= n < 3 * gather + 16 for n in rows[:-1])


def test_an_empty_table() -> None:
    work = joined(KernelTasks.empty())
    alone, squares = short_squares(work, 16)
    assert not squares and not list(blocks(work, alone, 64, 64))
