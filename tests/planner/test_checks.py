"""`verify` must fail when a plan or a table is wrong: each promise is broken on purpose, in each way we know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from random_layouts import SMALL_SHAPE

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan, DispatchTables, ReceivedRows, SentRows
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner import make_plan
from steelyard.planner.checks import PlanViolation, max_over_mean, verify
from steelyard.planner.packed import plan_packed
from steelyard.planner.replay import own_rows
from steelyard.planner.tables import build_all_tables

Tables = list[DispatchTables]


def balanced_plan() -> DispatchPlan:
    """Documents [4, 12]; 34 pairs of the long one move to rank 0, so that both have 44."""
    plan = make_plan(Layout.from_doc_lengths([[4], [12]]), shape=SMALL_SHAPE, tolerance=0.0)
    return with_tasks(plan, [(0, 0, 4, 0, 0), (1, 0, 6, 1, 1), (1, 6, 10, 0, 1), (1, 10, 12, 1, 1)])


def packed_plan() -> DispatchPlan:
    return make_plan(Layout.contiguous([10, 3], 5, 3), policy="packed", shape=SMALL_SHAPE)


def with_tasks(plan: DispatchPlan, rows: list[tuple[int, int, int, int, int]], **changes: object) -> DispatchPlan:
    return replace(plan, tasks=CATasks.from_columns(*np.array(rows, dtype=np.int64).T), **changes)  # type: ignore[arg-type]


def test_report_counts_bytes_from_the_tables() -> None:
    layout = Layout.from_doc_lengths([[4], [6]])
    plan = with_tasks(
        make_plan(layout, shape=SMALL_SHAPE),
        [(0, 0, 4, 0, 0), (1, 0, 2, 1, 1), (1, 2, 5, 0, 1), (1, 5, 6, 1, 1)],
        policy="by hand",
    )
    report = verify(plan)
    query, key = 4 * 8 * 2, 2 * 2 * 8 * 2
    assert report.bytes_total == 2 * 3 * query + 5 * key
    assert report.dispatch_bytes_out.tolist() == [0, 3 * query + 5 * key]
    assert report.dispatch_bytes_in.tolist() == [3 * query + 5 * key, 0]
    assert report.return_bytes_out.tolist() == [3 * query, 0]
    assert report.bytes_in.tolist() == [3 * query + 5 * key, 3 * query]
    assert report.busiest_bytes == 3 * query + 5 * key
    assert report.pairs_total == 10 + 21
    assert report.work_by_server.tolist() == [22, 9]
    assert report.work_max_over_mean == pytest.approx(22 / 15.5)
    assert report.received_tokens_max == 8
    assert report.bytes_out_max_over_mean == report.bytes_in_max_over_mean == 2.0
    kept = 3 * (2 * query + 4 * 4) + 5 * key
    assert report.memory.kept.tolist() == [kept, 0]
    # Rank 0 in backward: what it kept, dOut and dQ, and the sums of dK and dV in fp32.
    assert report.buffer_bytes_max("keep") == report.memory.keep_peak[0] == kept + 2 * 3 * query + 5 * 2 * key
    # Resent rows come with those that rank 0 sends to nobody: the same moment is the fullest.
    assert report.buffer_bytes_max("resend") == report.buffer_bytes_max("keep")
    assert (report.tasks, report.moved_tasks, report.cuts, report.unaligned_cuts) == (4, 1, 2, 2)


def test_max_over_mean() -> None:
    assert max_over_mean(np.array([1, 2, 3])) == 1.5
    assert max_over_mean(np.zeros(4, dtype=np.int64)) == 1.0


class _NotLooped(np.ndarray):  # type: ignore[type-arg]
    """Refuses a Python loop over all its elements."""

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("a loop over the stretches of all ranks")


def test_one_rank_of_many_is_named_without_a_look_at_the_others() -> None:
    """Pair by pair checks name every rank's rows: with a loop over all of them each time, 4,096 ranks took 18 s."""
    store = own_rows(Layout.from_doc_lengths([[2], [3, 1], [], [4]]))
    store.rank, store.token, store.length = (c.view(_NotLooped) for c in (store.rank, store.token, store.length))
    assert [store.names(rank) for rank in range(4)] == [[0, 1], [2, 3, 4, 5], [], [6, 7, 8, 9]]


def test_work_is_measured_against_the_share_of_a_slow_server() -> None:
    layout = Layout.from_doc_lengths([[4], [4]])
    plan = make_plan(layout, policy="packed", topology=Topology(2, speeds=(1.0, 0.5)), shape=SMALL_SHAPE)
    assert verify(plan).work_max_over_mean == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 0, 4, 0, 0), (1, 0, 12, 0, 1)], "promise 2"),
        ([(0, 0, 4, 0, 0), (1, 0, 6, 1, 1), (1, 5, 12, 1, 1)], "promise 1"),
        ([(0, 0, 4, 0, 0), (1, 0, 6, 1, 1)], "promise 1"),
        ([(0, 0, 5, 0, 0), (1, 0, 12, 1, 1)], "leaves its shard"),
        ([(0, 0, 4, 2, 0), (1, 0, 12, 1, 1)], "there are 2"),
    ],
)
def test_wrong_tasks_are_found(rows: list[tuple[int, int, int, int, int]], message: str) -> None:
    with pytest.raises(PlanViolation, match=message):
        verify(with_tasks(balanced_plan(), rows))


def test_unaligned_cuts_are_found_where_whole_blocks_would_do() -> None:
    layout = Layout.from_doc_lengths([[4096], [4096] * 3])
    plan = with_tasks(
        make_plan(layout, shape=SMALL_SHAPE, tolerance=1.0),
        [(0, 0, 100, 1, 0), (0, 100, 4096, 0, 0), *((d, 0, 4096, 1, d) for d in (1, 2, 3))],
        tolerance=2.0,
    )
    with pytest.raises(PlanViolation, match="promise 3"):
        verify(plan)


def test_cut_short_documents_are_found_where_whole_ones_would_do() -> None:
    layout = Layout.from_doc_lengths([[400] + [2048] * 40, [2048] * 40])
    plan = with_tasks(
        make_plan(layout, shape=SMALL_SHAPE, tolerance=1.0),
        [(0, 0, 128, 1, 0), (0, 128, 400, 0, 0), *((d, 0, 2048, int(d > 40), d) for d in range(1, 81))],
    )
    with pytest.raises(PlanViolation, match="promise 3"):
        verify(plan)


# --- what a plan says of itself ---------------------------------------------------------------------------------------


UNBALANCED = [(0, 0, 4, 0, 0), (1, 0, 12, 1, 1)]


@pytest.mark.parametrize(
    ("rows", "memory_tokens", "message"),
    [
        (UNBALANCED, (), "promise 2: .*memory cap came before balance, but none is set"),
        (UNBALANCED, (1_000, 1_000), "promise 2: .*but no cap is low enough"),
        (None, (20, 20), "promise 2: .*but no server has more work than promised"),
    ],
)
def test_a_plan_may_not_excuse_itself_by_memory(
    rows: list[tuple[int, int, int, int, int]] | None, memory_tokens: tuple[int, ...], message: str
) -> None:
    plan = balanced_plan()
    plan = replace(plan, topology=Topology(2, memory_tokens=memory_tokens))
    verify(plan)
    plan = with_tasks(plan, rows) if rows else plan
    with pytest.raises(PlanViolation, match=message):
        verify(replace(plan, memory_limited=True))


def test_a_memory_cap_excuses_where_it_binds() -> None:
    plan = with_tasks(replace(balanced_plan(), topology=Topology(2, memory_tokens=(3, 3))), UNBALANCED)
    with pytest.raises(PlanViolation, match="promise 2: server 1 has 78 pairs"):
        verify(plan)
    assert verify(replace(plan, memory_limited=True)).work_by_server.tolist() == [10, 78]


def test_more_than_a_memory_cap_is_found() -> None:
    """Rank 0 receives 4 queries and 10 keys."""
    for cap, policy in ((14, "balanced"), (13, "greedy")):
        verify(replace(balanced_plan(), topology=Topology(2, memory_tokens=(cap, 0)), policy=policy))
    for policy in ("balanced", "reference"):
        plan = replace(balanced_plan(), topology=Topology(2, memory_tokens=(13, 0)), policy=policy)
        with pytest.raises(PlanViolation, match="promise 6: server 0 receives 14 query and key rows, its cap is 13"):
            verify(plan)


def test_unaligned_cuts_are_excused_only_where_memory_may_have_asked_for_them() -> None:
    """A surplus of some rows: a whole block of them with its keys is more than the cap, the rows alone are not."""
    layout = Layout.from_doc_lengths([[2_048] * 41 + [2_049], [2_048] * 38])
    plan = make_plan(layout, shape=SMALL_SHAPE, tolerance=0.05, topology=Topology(2, memory_tokens=(100, 100)))
    assert not plan.memory_limited
    assert verify(plan).unaligned_cuts > 0
    for caps in ((), (10**9, 10**9)):
        with pytest.raises(PlanViolation, match="promise 3"):
            verify(replace(plan, topology=Topology(2, memory_tokens=caps)))


def test_more_pairs_than_integers_hold_are_refused_at_once() -> None:
    layout = Layout.contiguous([2**30 - 1] * 20, 2**30, 20)
    with pytest.raises(UsageError, match=r"verify: its 20 documents have 1\.15e\+19 .* more than 4\.61e\+18"):
        verify(plan_packed(layout, Topology(20), SMALL_SHAPE, 0.05))


# --- tables -----------------------------------------------------------------------------------------------------------


def change(rank: int, **fields: Callable[[DispatchTables], object]) -> Callable[[Tables], Tables]:
    """Replace fields of one rank's tables by what the functions make of them."""

    def apply(tables: Tables) -> Tables:
        tables[rank] = replace(tables[rank], **{name: make(tables[rank]) for name, make in fields.items()})  # type: ignore[arg-type]
        return tables

    return apply


def part(name: str, **columns: Callable[[np.ndarray], np.ndarray]) -> Callable[[DispatchTables], object]:
    """Replace columns of one part of the tables."""
    return lambda t: replace(
        getattr(t, name), **{field: make(getattr(getattr(t, name), field).copy()) for field, make in columns.items()}
    )


def kernel(name: str, field: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[DispatchTables], object]:
    return part(name, **{field: make})


def bump(index: int, by: int) -> Callable[[np.ndarray], np.ndarray]:
    def apply(column: np.ndarray) -> np.ndarray:
        column[index] += by
        return column

    return apply


PEERS = ("peer", "rows", "runs")


def runs(row: list[int], length: list[int], listed: int | None = None) -> Callable[[DispatchTables], object]:
    """Other runs of key rows to the only peer, with the count of rows left as it was."""
    return part(
        "kv_send",
        run_row=lambda _: np.array(row),
        run_length=lambda _: np.array(length),
        runs=lambda _: np.array([len(row) if listed is None else listed]),
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(1, kv_send=runs([5, 0], [5, 5])), "promise 4"),  # not in order of position
        (change(1, kv_send=runs([0, 4], [5, 5])), "promise 4"),  # a row twice
        (change(1, kv_send=runs([0], [9])), "counts add up"),
        (change(1, kv_send=runs([0], [0])), "outside"),
        (change(1, kv_send=runs([3], [10])), "outside"),
        (change(1, kv_send=runs([-1], [10])), "outside"),
        (change(1, kv_send=runs([0, 0], [10, 10], listed=1)), "runs are not as many"),
        (change(1, kv_send=part("kv_send", run_length=lambda c: np.append(c, 1))), "runs are not as many"),
        (change(1, kv_send=part("kv_send", peer=bump(0, 1))), "itself"),
        (change(1, kv_send=part("kv_send", peer=bump(0, -1))), "stranger"),
        (change(1, kv_send=part("kv_send", rows=lambda c: c[:0])), "one count each"),
        (change(1, kv_send=part("kv_send", **{name: lambda c: np.repeat(c, 2) for name in PEERS})), "twice"),
        (change(0, q_receive=part("q_receive", rows=bump(0, 1))), "peer expects"),
        (change(0, q_receive=part("q_receive", rows=bump(0, -4))), "but none"),
        (change(0, q_receive=part("q_receive", peer=lambda c: c[:0], rows=lambda c: c[:0])), "peer expects"),
        (change(1, q_send=part("q_send", run_row=bump(0, 1))), "position"),
        (change(1, q_sent=lambda t: t.q_sent + 1), "totals"),
        (change(0, kv_received=lambda t: t.kv_received - 1), "totals"),
        (change(0, received_tasks=kernel("received_tasks", "segment_offset", bump(0, 1))), "segment offsets"),
        (change(0, received_tasks=kernel("received_tasks", "segment_offset", lambda c: c[1:])), "segment offset more"),
        (change(0, received_tasks=kernel("received_tasks", "q_position", lambda c: c[:0])), "another length"),
        (change(0, received_tasks=kernel("received_tasks", "segment_store", bump(0, 1))), "other than 0 and 1"),
        (change(0, received_pairs=lambda t: t.received_pairs + 1), "its tables say"),
        (change(0, exchanges=lambda t: False), "travel"),
        (change(0, tokens=lambda t: t.tokens + 1), "tokens, ranks or window"),
        (change(0, received_tasks=kernel("received_tasks", "segment_length", bump(0, -1))), "promise 1"),
        (change(0, received_tasks=kernel("received_tasks", "segment_row", bump(0, 1))), "position|contiguous"),
        (change(0, received_tasks=kernel("received_tasks", "q_length", bump(0, -1))), "promise 1"),
        (change(0, received_tasks=kernel("received_tasks", "q_store", bump(0, -1))), "contiguous|position"),
        (change(0, local_tasks=lambda t: t.received_tasks), "stands among"),
    ],
)
def test_damaged_tables_are_found(damage: Callable[[Tables], Tables], message: str) -> None:
    plan = balanced_plan()
    tables = build_all_tables(plan)
    verify(plan, tables)
    with pytest.raises(PlanViolation, match=message):
        verify(plan, damage(tables))


def test_rows_that_nobody_reads_are_found() -> None:
    """Rank 0 sends rank 1 its last key, of another document: harmless to results, but paid for."""
    plan = balanced_plan()
    sender, server = build_all_tables(plan)
    one = np.array([1])
    sender = replace(sender, kv_sent=1, kv_send=SentRows(one, one, one, np.array([3]), one))
    server = replace(server, kv_received=1, kv_receive=ReceivedRows(np.array([0]), one))
    with pytest.raises(PlanViolation, match="no task reads"):
        verify(plan, [sender, server])


def test_a_key_from_two_sources_is_read_in_order() -> None:
    """Received segments swapped: every row arrives, but at the wrong place."""
    plan = packed_plan()
    tables = build_all_tables(plan)
    verify(plan, tables)
    last = tables[1].received_tasks
    assert len(last.segment_row) >= 2
    swapped = replace(last, segment_store=1 - last.segment_store)
    tables[1] = replace(tables[1], received_tasks=swapped)
    with pytest.raises(PlanViolation):
        verify(plan, tables)


def test_tables_in_the_wrong_order_are_refused() -> None:
    plan = balanced_plan()
    with pytest.raises(PlanViolation, match="rank order"):
        verify(plan, build_all_tables(plan)[::-1])
