"""Dispatch tables against their slow twin, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_layouts import SMALL_SHAPE, WINDOWS, layouts

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.planner import make_plan
from steelyard.planner.tables import build_all_tables, build_tables, needs_exchange
from steelyard.planner.tables_reference import build_tables_reference


def assert_same(one: object, other: object, where: str = "tables") -> None:
    assert is_dataclass(one) and is_dataclass(other)
    for field in fields(one):
        left, right, name = getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}"
        if is_dataclass(left):
            assert_same(left, right, name)
        elif isinstance(left, np.ndarray):
            assert left.dtype == np.int64, name
            assert left.tolist() == right.tolist(), name
        else:
            assert type(left) is type(right) and left == right, name


@st.composite
def random_plans(draw: st.DrawFn) -> DispatchPlan:
    """Any cut of any layout, placed anywhere: what no planner of ours would do, tables must still carry out."""
    layout = draw(layouts(longest=16, most_ranks=4))
    rows = []
    for index, shard in enumerate(layout):
        end = shard.start + shard.length
        cuts = sorted({shard.start, end, *draw(st.lists(st.integers(shard.start, end), max_size=3))})
        for start, stop in pairwise(cuts):
            rows.append((shard.doc, start, stop, draw(st.integers(0, layout.ranks - 1)), index))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    window = draw(WINDOWS)
    return DispatchPlan(
        layout, CATasks.from_columns(*columns), Topology(layout.ranks), SMALL_SHAPE, 0.0, "random", window
    )


@settings(max_examples=200)
@given(random_plans())
def test_tables_equal_their_slow_twin(plan: DispatchPlan) -> None:
    together = build_all_tables(plan)
    for rank in range(plan.layout.ranks):
        expected = build_tables_reference(plan, rank)
        assert_same(together[rank], expected)
        assert_same(build_tables(plan, rank), expected)


def columns_of(part: object) -> dict[str, list[int]]:
    assert is_dataclass(part)
    return {field.name: getattr(part, field.name).tolist() for field in fields(part)}


def two_rank_plan() -> DispatchPlan:
    """Document 0 (4 tokens) on rank 0, document 1 (6 tokens) on rank 1; rank 0 computes its queries [2, 5)."""
    layout = Layout.from_doc_lengths([[4], [6]])
    tasks = CATasks.from_columns(
        *np.array([(0, 0, 4, 0, 0), (1, 0, 2, 1, 1), (1, 2, 5, 0, 1), (1, 5, 6, 1, 1)], dtype=np.int64).T
    )
    return DispatchPlan(layout, tasks, Topology(2), SMALL_SHAPE, 0.0, "random")


def test_a_moved_range_sends_its_queries_and_all_keys_before_its_end() -> None:
    server, home = build_all_tables(two_rank_plan())
    assert columns_of(home.q_send) == {"peer": [0], "rows": [3], "runs": [1], "run_row": [2], "run_length": [3]}
    assert columns_of(home.kv_send) == {"peer": [0], "rows": [5], "runs": [1], "run_row": [0], "run_length": [5]}
    assert columns_of(server.q_send) == {"peer": [], "rows": [], "runs": [], "run_row": [], "run_length": []}
    assert columns_of(server.q_receive) == {"peer": [1], "rows": [3]}
    assert columns_of(server.kv_receive) == {"peer": [1], "rows": [5]}
    assert (home.q_sent, home.kv_sent, server.q_received, server.kv_received) == (3, 5, 3, 5)
    assert (server.local_pairs, server.received_pairs) == (10, 3 + 4 + 5)
    task = server.received_tasks
    assert (task.q_store.tolist(), task.q_row.tolist(), task.q_position.tolist()) == ([1], [0], [2])
    assert (task.segment_store.tolist(), task.segment_row.tolist(), task.segment_length.tolist()) == ([1], [0], [5])
    assert home.local_pairs == 1 + 2 + 6
    assert len(home.received_tasks) == 0


def test_a_key_is_stored_once_for_two_tasks_of_one_document() -> None:
    layout = Layout.from_doc_lengths([[], [9]])
    tasks = CATasks.from_columns(*np.array([(0, 0, 4, 0, 0), (0, 4, 6, 1, 0), (0, 6, 9, 0, 0)], dtype=np.int64).T)
    plan = DispatchPlan(layout, tasks, Topology(2), SMALL_SHAPE, 0.0, "random")
    server = build_tables(plan, 0)
    assert server.kv_received == 9
    assert server.received_tasks.segment_row.tolist() == [0, 0]
    assert server.received_tasks.segment_length.tolist() == [4, 9]


def test_consecutive_rows_to_one_server_are_one_run() -> None:
    """Two tasks of a document and the whole document after it go from rank 1 to rank 0, one task to rank 2."""
    layout = Layout.from_doc_lengths([[], [6, 3, 4], []])
    rows = [(0, 0, 2, 0, 0), (0, 2, 6, 0, 0), (1, 0, 3, 0, 1), (2, 0, 1, 1, 2), (2, 1, 4, 2, 2)]
    plan = DispatchPlan(
        layout, CATasks.from_columns(*np.array(rows, dtype=np.int64).T), Topology(3), SMALL_SHAPE, 0.0, "random"
    )
    home = build_all_tables(plan)[1]
    assert columns_of(home.q_send) == {
        "peer": [0, 2], "rows": [9, 3], "runs": [1, 1], "run_row": [0, 10], "run_length": [9, 3]
    }  # fmt: skip
    assert columns_of(home.kv_send) == {
        "peer": [0, 2], "rows": [9, 4], "runs": [1, 1], "run_row": [0, 9], "run_length": [9, 4]
    }  # fmt: skip


def test_tables_grow_with_what_is_sent_not_with_the_square_of_ranks() -> None:
    def elements(part: object) -> int:
        if isinstance(part, np.ndarray):
            return part.size
        return sum(elements(getattr(part, f.name)) for f in fields(part)) if is_dataclass(part) else 0  # type: ignore[arg-type]

    def of(ranks: int) -> int:
        layout = Layout.from_doc_lengths([[64], [8] * 8] * (ranks // 2))
        return sum(elements(t) for t in build_all_tables(make_plan(layout, shape=SMALL_SHAPE, tolerance=0.1)))

    assert of(256) < 5 * of(64)


def test_head_tail_task_reads_three_segments() -> None:
    layout = Layout.from_shards([(0, 0, 2, 0), (0, 6, 2, 0), (0, 2, 2, 1), (0, 4, 2, 1)], 2)
    tables = build_tables(make_plan(layout, policy="packed", shape=SMALL_SHAPE), 0)
    last = tables.received_tasks
    assert last.q_position.tolist() == [6]
    assert last.segment_store.tolist() == [0, 1, 0]
    assert last.segment_position.tolist() == [0, 2, 6]
    assert last.segment_row.tolist() == [0, 0, 2]
    assert tables.local_tasks.q_position.tolist() == [0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_document_at_all(ranks: int) -> None:
    layout = Layout.from_doc_lengths([[] for _ in range(ranks)])
    for tables in build_all_tables(make_plan(layout, shape=SMALL_SHAPE)):
        assert tables.tokens == tables.q_received == tables.kv_received == len(tables.local_tasks) == 0
        assert not tables.exchanges


@settings(max_examples=200)
@given(layouts(longest=16, most_ranks=4), WINDOWS)
@example(Layout.contiguous([10], 5, 2), 1)
@example(Layout.contiguous([10], 5, 2), 2)
def test_whether_rows_travel_at_all(layout: Layout, window: int | None) -> None:
    """Where no query moves the layout alone says it, and it must agree with the tables."""
    plan = make_plan(layout, policy="packed", shape=SMALL_SHAPE, window=window)
    sent = sum(table.q_sent + table.kv_sent for table in build_all_tables(plan))
    assert needs_exchange(plan) == (sent > 0)


class _Counting:
    """Numpy, noting the most elements that any function that sorts, or any search, was given to work on."""

    def __init__(self) -> None:
        self.most = 0

    def __getattr__(self, name: str) -> object:
        function = getattr(np, name)
        if name in ("argsort", "sort", "lexsort", "unique", "union1d"):
            return lambda *args, **more: self.note(args[0][0] if name == "lexsort" else args[0], function, args, more)
        if name == "searchsorted":
            return lambda *args, **more: self.note(args[1], function, args, more)
        return function

    def note(self, worked_on: object, function: Callable[..., object], args: object, more: object) -> object:
        self.most = max(self.most, int(np.size(worked_on)))  # type: ignore[call-overload]
        return function(*args, **more)  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["packed", "balanced"])
@pytest.mark.parametrize("spans", [False, True])
def test_one_rank_sorts_only_its_share(monkeypatch: pytest.MonkeyPatch, policy: str, spans: bool) -> None:
    """Of a plan for 16 times as many ranks no more is sorted or searched for; all ranks' tables show that it counts."""
    from steelyard.planner import tables as module

    def most_sorted(ranks: int, build: Callable[[DispatchPlan], object]) -> int:
        documents = [[64], [8] * 8, [32, 32], [16] * 4] * (ranks // 4)
        layout = (
            Layout.contiguous([n for lengths in documents for n in lengths], 40, 2 * ranks)
            if spans
            else Layout.from_doc_lengths(documents)
        )
        plan = make_plan(layout, policy=policy, shape=SMALL_SHAPE, tolerance=0.1)
        counting = _Counting()
        with monkeypatch.context() as patch:
            patch.setattr(module, "np", counting)
            build(plan)
        return counting.most

    def of_one_in_eight(plan: DispatchPlan) -> None:
        for rank in range(0, plan.layout.ranks, plan.layout.ranks // 8):
            build_tables(plan, rank)

    assert most_sorted(256, build_all_tables) >= 12 * most_sorted(16, build_all_tables)
    few, many = (most_sorted(ranks, of_one_in_eight) for ranks in (16, 256))
    assert 0 < many <= 2 * few
