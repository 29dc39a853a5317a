"""From who computes what to who sends which rows where: the dispatch tables of a plan.

Everything is done on *global tokens*: document after document on one line, so that (document, position) is one number
and the shards, sorted by it, tile the line. A server's tasks of one document need intervals of that line; their union
(one interval per document without a window) cut at shard borders gives *pieces*: runs of key rows that live on one
rank. A piece that lives on the server itself is read where it is; each other piece is sent once and stored once, and
every task of that server reads it from there.

`exchange_of` computes all of it for a set of tasks in a fixed number of numpy calls. `build_tables` hands it only the
tasks that touch one rank, `build_all_tables` all of them; what is left per rank is to cut the columns, so that the
tables of all ranks are views of the same few arrays. The slow obvious twin is `planner.tables_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from steelyard.cost.attention import pairs_array
from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan, DispatchTables, KernelTasks, ReceivedRows, SentRows

Made = TypeVar("Made", SentRows, ReceivedRows, KernelTasks, DispatchTables)


@dataclass(frozen=True, eq=False)
class Transfers:
    """All rows of one kind that travel, as the columns of `SentRows` and `ReceivedRows` of all ranks.

    A *link* is a (source, server) pair between which rows travel.

    Attributes:
        run_row, run_length: runs by (source, server, global token), int64 (runs,).
        source, send_peer, send_rows, send_runs: links by (source, server), int64 (links,).
        server, receive_peer, receive_rows: the same links by (server, source).
    """

    run_row: IntArray
    run_length: IntArray
    source: IntArray
    send_peer: IntArray
    send_rows: IntArray
    send_runs: IntArray
    server: IntArray
    receive_peer: IntArray
    receive_rows: IntArray


@dataclass(frozen=True, eq=False)
class Exchange:
    """Transfers and kernel tasks of a whole plan, as columns.

    `kernel` holds the tasks of all servers, sorted by (server, received, global token). `kernel_list` is
    2 × server + 1 for a task that needs a received row, 2 × server for the others: a rank's two lists of tasks.
    """

    queries: Transfers
    keys: Transfers
    kernel: KernelTasks
    kernel_list: IntArray
    kernel_pairs: IntArray


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
    row: IntArray  # local row of the first query at home
    stride: int


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Keys that servers need, cut at shard borders; sorted by spot. `row` counts in `store` 0 (own) or 1 (received)."""

    spot: IntArray
    row: IntArray
    store: IntArray


def _expand(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """For each i the numbers first[i] … last[i], and beside each the i that it belongs to."""
    count = last - first + 1
    owner = np.repeat(np.arange(len(first)), count)
    return owner, np.arange(len(owner)) + (first - np.cumsum(count) + count)[owner]


def _begins(key: IntArray) -> IntArray:
    """Index of the first of each stretch of equal elements."""
    return np.flatnonzero(np.concatenate([np.ones(min(1, len(key)), dtype=bool), key[1:] != key[:-1]]))


def _sorted_tasks(plan: DispatchPlan, chosen: IntArray | None, doc_token: IntArray) -> _Tasks:
    layout, tasks = plan.layout, plan.tasks
    columns = (tasks.doc, tasks.start, tasks.end, tasks.server, tasks.shard)
    doc, start, end, server, shard = columns if chosen is None else (column[chosen] for column in columns)
    stride = (int(doc_token[-1] + layout.doc_lengths[-1]) if len(doc_token) else 0) + 1
    base = doc_token[doc] + server * stride
    order = np.argsort(base + start, kind="stable")
    start, end, server, base, shard = start[order], end[order], server[order], base[order], shard[order]
    return _Tasks(
        start=start,
        end=end,
        server=server,
        home=layout.shard_rank[shard],
        base=base,
        low=np.zeros_like(start) if plan.window is None else np.maximum(0, start - plan.window + 1),
        row=layout.shard_row[shard] + start - layout.shard_start[shard],
        stride=stride,
    )


def _needed_keys(tasks: _Tasks) -> tuple[IntArray, IntArray, IntArray]:
    """Union of the key intervals of each server's tasks: servers, first and end global tokens, by spot."""
    low = tasks.base + tasks.low  # ascends, since a later query of a document sees no earlier first key
    reach = np.maximum.accumulate(tasks.base + tasks.end)
    opens = np.flatnonzero(np.concatenate([np.ones(min(1, len(low)), dtype=bool), low[1:] > reach[:-1]]))
    closes = np.append(opens[1:], len(low))[: len(opens)] - 1
    server = tasks.server[opens]
    return server, low[opens] - server * tasks.stride, reach[closes] - server * tasks.stride


def _key_transfers(
    layout: Layout, shards: IntArray | None, tasks: _Tasks, doc_token: IntArray
) -> tuple[_Pieces, Transfers]:
    """Cut what each server needs at shard borders; what does not live there travels."""
    union_server, union_low, union_high = _needed_keys(tasks)
    line = np.arange(layout.shards) if shards is None else shards
    token = doc_token[layout.shard_doc[line]] + layout.shard_start[line]
    by_token = np.argsort(token, kind="stable")  # shards in the order of global tokens
    token, line = token[by_token], line[by_token]
    owner, place = _expand(
        np.searchsorted(token, union_low, side="right") - 1, np.searchsorted(token, union_high - 1, side="right") - 1
    )
    server, shard, token = union_server[owner], line[place], token[place]
    low = np.maximum(union_low[owner], token)
    high = np.minimum(union_high[owner], token + layout.shard_length[shard])
    source = layout.shard_rank[shard]
    row = layout.shard_row[shard] + low - token
    store = (source != server).astype(np.int64)
    sent = np.flatnonzero(store)
    keys, server_row = _transfers(layout.ranks, server[sent], source[sent], row[sent], (high - low)[sent])
    row[sent] = server_row
    return _Pieces(server * tasks.stride + low, row, store), keys


def _transfers(
    ranks: int, server: IntArray, source: IntArray, row: IntArray, length: IntArray
) -> tuple[Transfers, IntArray]:
    """What becomes of rows [row, row + length) of `source` that `server` needs, given by (server, global token).

    Returns also the first row of each among those that its server receives.
    """
    arriving = np.argsort(server * ranks + source, kind="stable")
    before = np.cumsum(length[arriving]) - length[arriving]
    opens = _begins(server[arriving])
    server_row = np.empty_like(row)
    server_row[arriving] = before - np.repeat(before[opens], np.diff(np.append(opens, len(before))))

    link = source * ranks + server
    leaving = np.argsort(link, kind="stable")
    link, row, length = link[leaving], row[leaving], length[leaving]
    joins = (link[1:] == link[:-1]) & (row[1:] == row[:-1] + length[:-1])
    run = np.flatnonzero(np.concatenate([np.ones(min(1, len(row)), dtype=bool), ~joins]))
    opens = _begins(link)
    rows = np.add.reduceat(length, opens) if len(length) else length
    link_source, link_server = np.divmod(link[opens], ranks)
    by_server = np.argsort(link_server * ranks + link_source)
    return Transfers(
        run_row=row[run],
        run_length=np.add.reduceat(length, run) if len(length) else length,
        source=link_source,
        send_peer=link_server,
        send_rows=rows,
        send_runs=np.diff(np.searchsorted(run, np.append(opens, len(row)))),
        server=link_server[by_server],
        receive_peer=link_source[by_server],
        receive_rows=rows[by_server],
    ), server_row


def _key_segments(tasks: _Tasks, pieces: _Pieces) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """The pieces under each task, joined where rows follow each other: task, store, row, length, position."""
    low = tasks.base + tasks.low
    task, piece = _expand(
        np.searchsorted(pieces.spot, low, side="right") - 1,
        np.searchsorted(pieces.spot, tasks.base + tasks.end - 1, side="right") - 1,
    )
    spot = np.maximum(pieces.spot[piece], low[task])
    row, store = pieces.row[piece] + spot - pieces.spot[piece], pieces.store[piece]
    position = spot - tasks.base[task]
    joins = (task[1:] == task[:-1]) & (store[1:] == store[:-1]) & (np.diff(row) == np.diff(position))
    kept = np.flatnonzero(np.concatenate([np.ones(min(1, len(task)), dtype=bool), ~joins]))
    task, position = task[kept], position[kept]
    last = np.append(task[1:] != task[:-1], True)[: len(task)]
    ends = np.where(last, tasks.end[task], np.append(position[1:], 0)[: len(task)])
    return task, store[kept], row[kept], ends - position, position


def exchange_of(plan: DispatchPlan, chosen: IntArray | None = None, shards: IntArray | None = None) -> Exchange:
    """Transfers and kernel tasks of the tasks `chosen`, for which the `shards` of their documents are enough.

    Both are indices into the tables of `plan`; all by default.
    """
    doc_token = np.cumsum(plan.layout.doc_lengths) - plan.layout.doc_lengths  # global token of position 0
    tasks = _sorted_tasks(plan, chosen, doc_token)
    pieces, keys = _key_transfers(plan.layout, shards, tasks, doc_token)
    length = tasks.end - tasks.start
    q_store, q_row = (tasks.home != tasks.server).astype(np.int64), tasks.row.copy()
    moved = np.flatnonzero(q_store)
    queries, server_row = _transfers(
        plan.layout.ranks, tasks.server[moved], tasks.home[moved], q_row[moved], length[moved]
    )
    q_row[moved] = server_row

    task, store, row, segment_length, position = _key_segments(tasks, pieces)
    received = q_store.copy()
    received[task[store > 0]] = 1
    kernel_list = 2 * tasks.server + received
    order = np.argsort(kernel_list, kind="stable")
    count = np.bincount(task, minlength=len(length))
    first, count = (np.cumsum(count) - count)[order], count[order]
    _, segments = _expand(first, first + count - 1)
    return Exchange(
        queries=queries,
        keys=keys,
        kernel=KernelTasks(
            q_store=q_store[order],
            q_row=q_row[order],
            q_length=length[order],
            q_position=tasks.start[order],
            segment_offset=np.concatenate([[0], np.cumsum(count)]),
            segment_store=store[segments],
            segment_row=row[segments],
            segment_length=segment_length[segments],
            segment_position=position[segments],
        ),
        kernel_list=kernel_list[order],
        kernel_pairs=pairs_array(tasks.start, tasks.end, plan.window)[order],
    )


def _made(kind: type[Made], **columns: object) -> Made:
    """A frozen dataclass with all its fields given. Its own `__init__` sets them one by one through
    `object.__setattr__`; that alone was two fifths of the time of building the tables of all ranks."""
    instance = object.__new__(kind)
    object.__setattr__(instance, "__dict__", columns)
    return instance


def _cut(column: IntArray, groups: IntArray) -> list[int]:
    """Where each of the consecutive `groups` begins in a sorted column, and where the last one ends."""
    return np.searchsorted(column, groups).tolist()  # type: ignore[no-any-return]


def _sums_between(values: IntArray, borders: list[int]) -> list[int]:
    """Sum of the values between each border and the next."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[borders]).tolist()  # type: ignore[no-any-return]


class _Traffic(NamedTuple):
    """One rank's rows of one kind."""

    send: SentRows
    receive: ReceivedRows
    sent: int
    received: int


def _traffic_of(transfers: Transfers, ranks: IntArray) -> Iterator[_Traffic]:
    """The part of each rank; `ranks` are consecutive numbers, one more than there are ranks."""
    t = transfers
    out, into = _cut(t.source, ranks), _cut(t.server, ranks)
    run = np.concatenate([[0], np.cumsum(t.send_runs)])[out].tolist()
    sent, received = _sums_between(t.send_rows, out), _sums_between(t.receive_rows, into)
    sends_none, receives_none = SentRows.empty(), ReceivedRows.empty()
    for a, b, c, d, e, f, rows_sent, rows_received in zip(
        out, out[1:], run, run[1:], into, into[1:], sent, received, strict=False
    ):
        send, receive = sends_none, receives_none
        if rows_sent:
            links, runs = slice(a, b), slice(c, d)
            send = _made(
                SentRows,
                peer=t.send_peer[links],
                rows=t.send_rows[links],
                runs=t.send_runs[links],
                run_row=t.run_row[runs],
                run_length=t.run_length[runs],
            )
        if rows_received:
            receive = _made(ReceivedRows, peer=t.receive_peer[e:f], rows=t.receive_rows[e:f])
        yield _Traffic(send, receive, rows_sent, rows_received)


def _kernels_of(exchange: Exchange, ranks: IntArray) -> tuple[list[KernelTasks], list[int]]:
    """The lists of tasks of each rank, local and received in turn, and the pairs of each list."""
    k, lists = exchange.kernel, np.arange(2 * ranks[0], 2 * ranks[-1] + 1)
    task = np.searchsorted(exchange.kernel_list, lists)
    segment = k.segment_offset[task]
    # Each list has one offset more than it has tasks, counted from its own first segment.
    owner = np.repeat(np.arange(len(lists) - 1), np.diff(task) + 1)
    offset = k.segment_offset[task[0] + np.arange(len(owner)) - owner] - segment[owner]
    first_offset = (task - task[0] + np.arange(len(lists))).tolist()
    borders, segment_borders = task.tolist(), segment.tolist()
    kernels, none = [], KernelTasks.empty()
    for a, b, c, d, e, f in zip(
        borders, borders[1:], segment_borders, segment_borders[1:], first_offset, first_offset[1:], strict=False
    ):
        if a == b:
            kernels.append(none)
            continue
        own, keys = slice(a, b), slice(c, d)
        kernels.append(
            _made(
                KernelTasks,
                q_store=k.q_store[own],
                q_row=k.q_row[own],
                q_length=k.q_length[own],
                q_position=k.q_position[own],
                segment_offset=offset[e:f],
                segment_store=k.segment_store[keys],
                segment_row=k.segment_row[keys],
                segment_length=k.segment_length[keys],
                segment_position=k.segment_position[keys],
            )
        )
    return kernels, _sums_between(exchange.kernel_pairs, borders)


def needs_exchange(plan: DispatchPlan) -> bool:
    """Whether any row of any rank travels. Every rank answers alike, from the plan alone, without sorting it."""
    layout, tasks = plan.layout, plan.tasks
    if bool(np.any(layout.shard_rank[tasks.shard] != tasks.server)):
        return True
    # Where all queries stay at home, keys travel where two neighbouring shards of a document live on different ranks:
    # the later one's first query sees the key before it, unless it sees no other at all.
    return plan.window != 1 and layout.spans_ranks


def _cut_into_tables(
    plan: DispatchPlan, exchange: Exchange, first: int, tokens: list[int], exchanges: bool
) -> list[DispatchTables]:
    """The tables of the ranks from `first` on, which hold `tokens` each."""
    borders = np.arange(first, first + len(tokens) + 1)
    kernels, pairs = _kernels_of(exchange, borders)
    ranks, window = plan.layout.ranks, plan.window
    return [
        _made(
            DispatchTables,
            rank=first + i,
            ranks=ranks,
            tokens=held,
            q_send=q.send,
            q_receive=q.receive,
            kv_send=kv.send,
            kv_receive=kv.receive,
            q_sent=q.sent,
            kv_sent=kv.sent,
            q_received=q.received,
            kv_received=kv.received,
            local_tasks=kernels[2 * i],
            received_tasks=kernels[2 * i + 1],
            local_pairs=pairs[2 * i],
            received_pairs=pairs[2 * i + 1],
            window=window,
            exchanges=exchanges,
        )
        for i, (held, q, kv) in enumerate(
            zip(tokens, _traffic_of(exchange.queries, borders), _traffic_of(exchange.keys, borders), strict=True)
        )
    ]


def build_tables(plan: DispatchPlan, rank: int) -> DispatchTables:
    """The tables of one rank, from the tasks that it computes and those of the documents of which it holds a part.

    A few passes over the plan's columns choose them and number their tokens: some nanoseconds for each task, shard and
    document of the whole plan, a few milliseconds where 4,096 ranks have 32 documents each. Everything that sorts or
    searches sees only the rank's own share.
    """
    layout, tasks = plan.layout, plan.tasks
    own = slice(*np.searchsorted(layout.shard_rank, [rank, rank + 1]).tolist())  # shards are sorted by rank
    held = np.zeros(layout.docs, dtype=bool)
    held[layout.shard_doc[own]] = True
    chosen = np.flatnonzero((tasks.server == rank) | held[tasks.doc])
    held[tasks.doc[chosen]] = True
    exchange = exchange_of(plan, chosen, np.flatnonzero(held[layout.shard_doc]))
    return _cut_into_tables(plan, exchange, rank, [int(layout.shard_length[own].sum())], needs_exchange(plan))[0]


def build_all_tables(plan: DispatchPlan) -> list[DispatchTables]:
    """The tables of every rank, in rank order. They share memory: none of their arrays may be changed."""
    exchange = exchange_of(plan)
    exchanges = len(exchange.queries.run_row) + len(exchange.keys.run_row) > 0
    return _cut_into_tables(plan, exchange, 0, plan.layout.tokens_by_rank.tolist(), exchanges)
