"""The slow, obvious twin of `tables`: one row at a time, with sets and dictionaries. For tests."""

from __future__ import annotations

from typing import NamedTuple

from steelyard.domain.arrays import int_column
from steelyard.domain.plan import DispatchPlan, DispatchTables, KernelTasks, ReceivedRows, SentRows

Token = tuple[int, int]  # (document, position)


class Segment(NamedTuple):
    """Rows [row, row + length) of a store, from `position` of the document."""

    store: int
    row: int
    length: int
    position: int


class TaskRow(NamedTuple):
    """One kernel task: its queries as for a segment, and its keys."""

    store: int
    row: int
    length: int
    position: int
    segments: list[Segment]


def _homes(plan: DispatchPlan) -> dict[Token, tuple[int, int]]:
    """Rank and local row of every token."""
    return {
        (shard.doc, shard.start + i): (shard.rank, shard.row + i) for shard in plan.layout for i in range(shard.length)
    }


def _needs(plan: DispatchPlan, server: int) -> tuple[set[Token], set[Token]]:
    """Tokens whose queries, and tokens whose keys, the server works on."""
    queries: set[Token] = set()
    keys: set[Token] = set()
    for task in plan.tasks:
        if task.server == server:
            for q in range(task.start, task.end):
                queries.add((task.doc, q))
                lowest = 0 if plan.window is None else max(0, q - plan.window + 1)
                keys.update((task.doc, k) for k in range(lowest, q + 1))
    return queries, keys


def _sends(homes: dict[Token, tuple[int, int]], rank: int, wanted: list[set[Token]]) -> SentRows:
    """Local rows that leave `rank`, by destination and token, consecutive ones in one run."""
    peer, rows, runs = [], [], []
    row_runs: list[list[int]] = []
    for server, tokens in enumerate(wanted):
        leaving = [homes[t][1] for t in sorted(tokens) if homes[t][0] == rank and server != rank]
        if not leaving:
            continue
        new: list[list[int]] = []
        for row in leaving:
            if new and row == sum(new[-1]):
                new[-1][1] += 1
            else:
                new.append([row, 1])
        peer.append(server)
        rows.append(len(leaving))
        runs.append(len(new))
        row_runs += new
    columns = (peer, rows, runs, [row for row, _ in row_runs], [length for _, length in row_runs])
    return SentRows(*(int_column(column) for column in columns))


def _arrivals(
    homes: dict[Token, tuple[int, int]], rank: int, ranks: int, wanted: set[Token]
) -> tuple[dict[Token, int], ReceivedRows]:
    """Row in the received store of every token that arrives, and how many come from each source."""
    remote = sorted((homes[t][0], t) for t in wanted if homes[t][0] != rank)
    counts = [sum(source == r for source, _ in remote) for r in range(ranks)]
    peers = [r for r in range(ranks) if counts[r]]
    received = ReceivedRows(int_column(peers), int_column(counts[r] for r in peers))
    return {t: row for row, (_, t) in enumerate(remote)}, received


def _kernel(rows: list[TaskRow]) -> KernelTasks:
    segments = [segment for task in rows for segment in task.segments]
    offset = [0]
    for task in rows:
        offset.append(offset[-1] + len(task.segments))
    return KernelTasks(
        int_column(task.store for task in rows),
        int_column(task.row for task in rows),
        int_column(task.length for task in rows),
        int_column(task.position for task in rows),
        int_column(offset),
        int_column(segment.store for segment in segments),
        int_column(segment.row for segment in segments),
        int_column(segment.length for segment in segments),
        int_column(segment.position for segment in segments),
    )


def build_tables_reference(plan: DispatchPlan, rank: int) -> DispatchTables:
    """What `build_tables` builds, in time proportional to pairs."""
    ranks = plan.layout.ranks
    homes = _homes(plan)
    wanted = [_needs(plan, server) for server in range(ranks)]
    q_send = _sends(homes, rank, [w[0] for w in wanted])
    kv_send = _sends(homes, rank, [w[1] for w in wanted])
    q_store, q_receive = _arrivals(homes, rank, ranks, wanted[rank][0])
    kv_store, kv_receive = _arrivals(homes, rank, ranks, wanted[rank][1])

    def place(store: dict[Token, int], token: Token) -> tuple[int, int]:
        return (1, store[token]) if token in store else (0, homes[token][1])

    lists: tuple[list[TaskRow], list[TaskRow]] = ([], [])
    pairs = [0, 0]
    for task in sorted((t for t in plan.tasks if t.server == rank), key=lambda t: (t.doc, t.start)):
        low = 0 if plan.window is None else max(0, task.start - plan.window + 1)
        segments: list[Segment] = []
        for k in range(low, task.end):
            store, row = place(kv_store, (task.doc, k))
            last = segments[-1] if segments else None
            if last and last.store == store and last.row + last.length == row:
                segments[-1] = last._replace(length=last.length + 1)
            else:
                segments.append(Segment(store, row, 1, k))
        q_place, q_row = place(q_store, (task.doc, task.start))
        received = int(q_place == 1 or any(segment.store for segment in segments))
        lists[received].append(TaskRow(q_place, q_row, task.end - task.start, task.start, segments))
        for q in range(task.start, task.end):
            pairs[received] += q + 1 if plan.window is None else min(q + 1, plan.window)
    return DispatchTables(
        rank=rank,
        ranks=ranks,
        tokens=sum(home[0] == rank for home in homes.values()),
        q_send=q_send,
        q_receive=q_receive,
        kv_send=kv_send,
        kv_receive=kv_receive,
        q_sent=int(q_send.rows.sum()),
        kv_sent=int(kv_send.rows.sum()),
        q_received=len(q_store),
        kv_received=len(kv_store),
        local_tasks=_kernel(lists[0]),
        received_tasks=_kernel(lists[1]),
        local_pairs=pairs[0],
        received_pairs=pairs[1],
        window=plan.window,
        exchanges=any(homes[t][0] != server for server, w in enumerate(wanted) for t in w[0] | w[1]),
    )
