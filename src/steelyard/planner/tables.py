"""From who computes what to who sends which rows where: the dispatch tables of a plan.

Everything is done on *global tokens*: document after document on one line, so that (document, position) is one number
and the shards, sorted by it, tile the line. A server's tasks of one document need intervals of that line; their union
(one interval per document without a window) cut at shard borders gives *pieces*: runs of key rows that live on one
rank. A piece that lives on the server itself is read where it is; each other piece is sent once and stored once, and
every task of that server reads it from there.

`exchange_of` computes all of it for a set of tasks in a fixed number of numpy calls; `build_tables` hands it only the
tasks that touch one rank, `build_all_tables` all of them. The slow obvious twin is `planner.tables_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steelyard.cost.attention import pairs_array
from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan, DispatchTables, KernelTasks


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Runs of rows that travel, sorted by (server, source, global token): the order in which they arrive.

    Attributes:
        server, source: ranks, int64 (runs,); never equal.
        token: first global token of the run.
        length: rows.
        source_row: first local row on the source.
        server_row: first row among those that the server receives.
    """

    server: IntArray
    source: IntArray
    token: IntArray
    length: IntArray
    source_row: IntArray
    server_row: IntArray


@dataclass(frozen=True, eq=False)
class Exchange:
    """Transfers and kernel tasks of a whole plan, as columns.

    `queries` and `keys` are what travels; `queries_by_source` and `keys_by_source` give their runs in the order in
    which sources send them: (source, server, global token). `kernel` holds the tasks of all servers, sorted by (server,
    received, global token), where `kernel_received` says which tasks need a received row.
    """

    queries: RowRuns
    queries_by_source: IntArray
    keys: RowRuns
    keys_by_source: IntArray
    kernel_server: IntArray
    kernel_received: IntArray
    kernel_pairs: IntArray
    kernel: KernelTasks


def _sums_before(group: IntArray, length: IntArray) -> IntArray:
    """Sum of the lengths before each element within its group; equal groups stand together."""
    before = np.cumsum(length) - length
    if not len(group):
        return before
    first = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    return before - np.repeat(before[first], np.diff(np.append(first, len(group))))


def _expand(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """For each i the numbers first[i] … last[i], and beside each the i that it belongs to."""
    count = last - first + 1
    owner = np.repeat(np.arange(len(first)), count)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return owner, first[owner] + offset


def _rows(first: IntArray, length: IntArray, numbers: IntArray) -> IntArray:
    """The rows of all runs, one run after another, copied from `numbers` = 0, 1, 2, …: faster than computing them."""
    if not len(first):
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([numbers[a:b] for a, b in zip(first.tolist(), (first + length).tolist(), strict=True)])


@dataclass(frozen=True, eq=False)
class _Tasks:
    """Columns of the tasks in question, sorted by (server, global token of the first query).

    A *spot* is server × stride + global token: one number for "this token, on that server". Servers never touch, since
    the stride is one more than there are tokens.
    """

    start: IntArray
    end: IntArray
    server: IntArray
    home: IntArray
    base: IntArray  # spot of position 0 of the task's document on its server
    low: IntArray  # first key position seen
    token: IntArray  # global token of the first query
    row: IntArray  # its local row at home
    stride: int


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Keys that servers need, cut at shard borders; sorted by spot. `row` counts in `store` 0 (own) or 1 (received)."""

    spot: IntArray
    row: IntArray
    store: IntArray


def _sorted_tasks(plan: DispatchPlan, chosen: IntArray | None) -> _Tasks:
    layout, tasks = plan.layout, plan.tasks
    doc, start, end, server, shard = (
        column if chosen is None else column[chosen]
        for column in (tasks.doc, tasks.start, tasks.end, tasks.server, tasks.shard)
    )
    stride = int(layout.doc_lengths.sum()) + 1
    first_token = (np.cumsum(layout.doc_lengths) - layout.doc_lengths)[doc]
    base = first_token + server * stride
    order = np.argsort(base + start, kind="stable")
    low = np.zeros_like(start) if plan.window is None else np.maximum(0, start - plan.window + 1)
    return _Tasks(
        start=start[order],
        end=end[order],
        server=server[order],
        home=layout.shard_rank[shard][order],
        base=base[order],
        low=low[order],
        token=(first_token + start)[order],
        row=(layout.shard_row[shard] + start - layout.shard_start[shard])[order],
        stride=stride,
    )


def _needed_keys(tasks: _Tasks) -> tuple[IntArray, IntArray, IntArray]:
    """Union of the key intervals of each server's tasks: servers, first and end global tokens, by spot."""
    by_low = np.argsort(tasks.base + tasks.low, kind="stable")
    low = (tasks.base + tasks.low)[by_low]
    reach = np.maximum.accumulate((tasks.base + tasks.end)[by_low])
    opens = np.flatnonzero(np.concatenate([np.ones(min(1, len(low)), dtype=bool), low[1:] > reach[:-1]]))
    closes = np.append(opens[1:], len(low))[: len(opens)] - 1
    server = tasks.server[by_low][opens]
    return server, low[opens] - server * tasks.stride, reach[closes] - server * tasks.stride


def _key_transfers(layout: Layout, tasks: _Tasks) -> tuple[_Pieces, RowRuns]:
    """Cut what each server needs at shard borders; what does not live there travels."""
    union_server, union_low, union_high = _needed_keys(tasks)
    shard_token = (np.cumsum(layout.doc_lengths) - layout.doc_lengths)[layout.shard_doc] + layout.shard_start
    line = np.argsort(shard_token, kind="stable")  # shards in the order of global tokens, which they tile
    owner, place = _expand(
        np.searchsorted(shard_token[line], union_low, side="right") - 1,
        np.searchsorted(shard_token[line], union_high - 1, side="right") - 1,
    )
    server, shard = union_server[owner], line[place]
    low = np.maximum(union_low[owner], shard_token[shard])
    high = np.minimum(union_high[owner], shard_token[shard] + layout.shard_length[shard])
    source = layout.shard_rank[shard]
    row = layout.shard_row[shard] + low - shard_token[shard]
    store = (source != server).astype(np.int64)
    runs, sent = _runs(np.flatnonzero(store), server, source, low, high - low, row)
    row[sent] = runs.server_row
    return _Pieces(server * tasks.stride + low, row, store), runs


def _runs(
    chosen: IntArray, server: IntArray, source: IntArray, token: IntArray, length: IntArray, row: IntArray
) -> tuple[RowRuns, IntArray]:
    """The chosen runs in the order in which they arrive, and their indices in that order."""
    chosen = chosen[np.lexsort((token[chosen], source[chosen], server[chosen]))]
    runs = RowRuns(
        server=server[chosen],
        source=source[chosen],
        token=token[chosen],
        length=length[chosen],
        source_row=row[chosen],
        server_row=_sums_before(server[chosen], length[chosen]),
    )
    return runs, chosen


def _key_segments(tasks: _Tasks, pieces: _Pieces) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """The pieces under each task, joined where rows follow each other: task, store, row, length, position."""
    task, piece = _expand(
        np.searchsorted(pieces.spot, tasks.base + tasks.low, side="right") - 1,
        np.searchsorted(pieces.spot, tasks.base + tasks.end - 1, side="right") - 1,
    )
    spot = np.maximum(pieces.spot[piece], (tasks.base + tasks.low)[task])
    row, store = pieces.row[piece] + spot - pieces.spot[piece], pieces.store[piece]
    position = spot - tasks.base[task]
    joins = (task[1:] == task[:-1]) & (store[1:] == store[:-1]) & (np.diff(row) == np.diff(position))
    kept = np.flatnonzero(np.concatenate([np.ones(min(1, len(task)), dtype=bool), ~joins]))
    task, position = task[kept], position[kept]
    last = np.append(task[1:] != task[:-1], True)[: len(task)]
    ends = np.where(last, tasks.end[task], np.append(position[1:], 0)[: len(task)])
    return task, store[kept], row[kept], ends - position, position


def exchange_of(plan: DispatchPlan, chosen: IntArray | None = None) -> Exchange:
    """Transfers and kernel tasks of the tasks `chosen` (indices into `plan.tasks`; all by default)."""
    tasks = _sorted_tasks(plan, chosen)
    pieces, keys = _key_transfers(plan.layout, tasks)
    length = tasks.end - tasks.start
    q_store, q_row = (tasks.home != tasks.server).astype(np.int64), tasks.row.copy()
    queries, moved = _runs(np.flatnonzero(q_store), tasks.server, tasks.home, tasks.token, length, tasks.row)
    q_row[moved] = queries.server_row

    task, store, row, segment_length, position = _key_segments(tasks, pieces)
    received = q_store.copy()
    np.maximum.at(received, task, store)
    count = np.bincount(task, minlength=len(length))
    order = np.lexsort((tasks.token, received, tasks.server))
    first = (np.cumsum(count) - count)[order]
    _, segments = _expand(first, first + count[order] - 1)
    return Exchange(
        queries=queries,
        queries_by_source=np.lexsort((queries.token, queries.server, queries.source)),
        keys=keys,
        keys_by_source=np.lexsort((keys.token, keys.server, keys.source)),
        kernel_server=tasks.server[order],
        kernel_received=received[order],
        kernel_pairs=pairs_array(tasks.start, tasks.end, plan.window)[order],
        kernel=KernelTasks(
            q_store=q_store[order],
            q_row=q_row[order],
            q_length=length[order],
            q_position=tasks.start[order],
            segment_offset=np.concatenate([[0], np.cumsum(count[order])]),
            segment_store=store[segments],
            segment_row=row[segments],
            segment_length=segment_length[segments],
            segment_position=position[segments],
        ),
    )


def _kernel_slice(kernel: KernelTasks, low: int, high: int) -> KernelTasks:
    """Tasks [low, high), with segments counted from 0."""
    offset = kernel.segment_offset[low : high + 1]
    segments = slice(int(offset[0]), int(offset[-1]))
    return KernelTasks(
        kernel.q_store[low:high],
        kernel.q_row[low:high],
        kernel.q_length[low:high],
        kernel.q_position[low:high],
        offset - offset[0],
        kernel.segment_store[segments],
        kernel.segment_row[segments],
        kernel.segment_length[segments],
        kernel.segment_position[segments],
    )


def _sends(
    runs: RowRuns, by_source: IntArray, rank: int, ranks: int, numbers: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Rows that `rank` sends, how many to each peer, and how many it receives from each."""
    sources = runs.source[by_source]
    low, high = np.searchsorted(sources, [rank, rank + 1])
    chosen = by_source[low:high]
    length = runs.length[chosen]
    sent = np.bincount(runs.server[chosen], weights=length, minlength=ranks).astype(np.int64)
    low, high = np.searchsorted(runs.server, [rank, rank + 1])
    received = np.bincount(runs.source[low:high], weights=runs.length[low:high], minlength=ranks).astype(np.int64)
    return _rows(runs.source_row[chosen], length, numbers), sent, received


def needs_exchange(plan: DispatchPlan) -> bool:
    """Whether any row of any rank travels. Every rank answers alike, from the plan alone."""
    layout, tasks = plan.layout, plan.tasks
    if bool(np.any(layout.shard_rank[tasks.shard] != tasks.server)):
        return True
    line = np.lexsort((layout.shard_start, layout.shard_doc))
    rank = layout.shard_rank[line]
    stretch = np.zeros(layout.shards, dtype=np.int64)  # shards one after another on one rank share a number
    stretch[line[1:]] = np.cumsum(rank[1:] != rank[:-1])
    token = (np.cumsum(layout.doc_lengths) - layout.doc_lengths)[layout.shard_doc] + layout.shard_start
    low = np.zeros_like(tasks.start) if plan.window is None else np.maximum(0, tasks.start - plan.window + 1)
    low_token = token[tasks.shard] + low - layout.shard_start[tasks.shard]
    low_shard = line[np.searchsorted(token[line], low_token, side="right") - 1]
    return bool(np.any(stretch[low_shard] != stretch[tasks.shard]))


def _tables_of_rank(
    plan: DispatchPlan, exchange: Exchange, rank: int, tokens: int, numbers: IntArray, exchanges: bool
) -> DispatchTables:
    ranks = plan.layout.ranks
    q_rows, q_sent, q_received = _sends(exchange.queries, exchange.queries_by_source, rank, ranks, numbers)
    kv_rows, kv_sent, kv_received = _sends(exchange.keys, exchange.keys_by_source, rank, ranks, numbers)
    low, high = (int(x) for x in np.searchsorted(exchange.kernel_server, [rank, rank + 1]))
    middle = low + int(np.searchsorted(exchange.kernel_received[low:high], 1))
    return DispatchTables(
        rank=rank,
        ranks=ranks,
        tokens=tokens,
        q_send_rows=q_rows,
        q_send_counts=q_sent,
        q_receive_counts=q_received,
        kv_send_rows=kv_rows,
        kv_send_counts=kv_sent,
        kv_receive_counts=kv_received,
        local_tasks=_kernel_slice(exchange.kernel, low, middle),
        received_tasks=_kernel_slice(exchange.kernel, middle, high),
        local_pairs=int(exchange.kernel_pairs[low:middle].sum()),
        received_pairs=int(exchange.kernel_pairs[middle:high].sum()),
        window=plan.window,
        exchanges=exchanges,
    )


def build_tables(plan: DispatchPlan, rank: int) -> DispatchTables:
    """The tables of one rank, from the tasks that it computes and those of the documents of which it holds a part."""
    held = np.zeros(plan.layout.docs, dtype=bool)
    held[plan.layout.shard_doc[plan.layout.shard_rank == rank]] = True
    touching = np.flatnonzero((plan.tasks.server == rank) | held[plan.tasks.doc])
    tokens = int(plan.layout.shard_length[plan.layout.shard_rank == rank].sum())
    return _tables_of_rank(
        plan, exchange_of(plan, touching), rank, tokens, np.arange(tokens, dtype=np.int64), needs_exchange(plan)
    )


def build_all_tables(plan: DispatchPlan) -> list[DispatchTables]:
    """The tables of every rank, in rank order."""
    exchange = exchange_of(plan)
    exchanges = len(exchange.queries.length) + len(exchange.keys.length) > 0
    tokens = plan.layout.tokens_by_rank
    numbers = np.arange(int(tokens.max()), dtype=np.int64)
    return [
        _tables_of_rank(plan, exchange, rank, held, numbers, exchanges) for rank, held in enumerate(tokens.tolist())
    ]
