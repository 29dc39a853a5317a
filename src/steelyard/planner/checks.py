"""`verify`: does a plan keep its promises, and what does it send? Worked out from the tables alone.

The planner's own account is not asked: the tables of all ranks are carried out on row names (`replay`), and coverage,
bytes and work follow from what arrives and what is read. Small cases are checked pair by pair as well; 512 ranks take
some tens of milliseconds.

Promises are numbered as in the design: 1 coverage, 2 balance, 3 alignment, 4 nothing local and nothing twice, 6 memory
caps. (5, the same plan everywhere, is nothing that one plan can show.) What a plan says of itself excuses nothing: that
memory came before balance is believed only where a cap could have, and did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from steelyard.cost.attention import longest_row_pairs, pairs_array, pairs_before_array
from steelyard.cost.memory import ExchangeMemory, exchange_memory
from steelyard.domain.arrays import BoolArray, IntArray
from steelyard.domain.limits import require_countable
from steelyard.domain.plan import DispatchPlan, DispatchTables
from steelyard.planner.blocks import BLOCK_TOKENS, SHORT_DOCUMENT_TOKENS, aligned_cuts_promised
from steelyard.planner.replay import PlanViolation, Reads, Stores, deliver, own_rows, read, require, require_all
from steelyard.planner.shares import exact_tolerance, speed_weights
from steelyard.planner.tables import build_all_tables

__all__ = ["PlanReport", "PlanViolation", "max_over_mean", "verify"]

BALANCED_POLICIES = frozenset({"balanced", "reference"})  # those that owe promises 2 and 6
BRUTE_FORCE_PAIRS = 4_000  # up to here coverage is checked pair by pair as well


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What a plan costs, counted from the tables of all ranks. Bytes are one layer's forward pass.

    Attributes:
        bytes_total: all rows sent in both phases, all ranks together.
        dispatch_bytes_in, dispatch_bytes_out: queries, keys and values per rank, int64 (ranks,).
        return_bytes_in, return_bytes_out: outputs per rank, int64 (ranks,).
        busiest_bytes: largest of `dispatch_bytes_in` and `dispatch_bytes_out`.
        pairs_total: (query, key) pairs of all tasks.
        work_by_server: pairs per server, int64 (ranks,).
        work_max_over_mean: largest work ÷ share; the share is the mean when all servers are equally fast.
        received_tokens_max: query rows plus key rows that the fullest server receives.
        memory: bytes of each rank's exchange buffers, in both memory modes.
        tasks, moved_tasks: all of them, and those that are not computed where their queries live.
        cuts: task borders inside a shard.
        unaligned_cuts: those at no multiple of the kernel block, and those in short documents.
    """

    bytes_total: int
    dispatch_bytes_in: IntArray
    dispatch_bytes_out: IntArray
    return_bytes_in: IntArray
    return_bytes_out: IntArray
    busiest_bytes: int
    pairs_total: int
    work_by_server: IntArray
    work_max_over_mean: float
    received_tokens_max: int
    memory: ExchangeMemory
    tasks: int
    moved_tasks: int
    cuts: int
    unaligned_cuts: int

    @property
    def bytes_in(self) -> IntArray:
        """Bytes that each rank receives in both phases, int64 (ranks,)."""
        return self.dispatch_bytes_in + self.return_bytes_in

    @property
    def bytes_out(self) -> IntArray:
        """Bytes that each rank sends in both phases, int64 (ranks,)."""
        return self.dispatch_bytes_out + self.return_bytes_out

    @property
    def bytes_in_max_over_mean(self) -> float:
        """What the busiest receiver gets in the dispatch phase ÷ the mean of all ranks; 1 where nothing travels."""
        return max_over_mean(self.dispatch_bytes_in)

    @property
    def bytes_out_max_over_mean(self) -> float:
        """What the busiest sender sends in the dispatch phase ÷ the mean of all ranks; 1 where nothing travels."""
        return max_over_mean(self.dispatch_bytes_out)

    def buffer_bytes_max(self, memory: Literal["keep", "resend"] = "keep") -> int:
        """Exchange buffers of the fullest rank: what one layer's attention has alive at one moment, bytes."""
        return int((self.memory.keep_peak if memory == "keep" else self.memory.resend_peak).max())


def max_over_mean(values: IntArray) -> float:
    """Largest value over the mean; 1 where all are 0."""
    total = int(values.sum())
    return int(values.max()) * len(values) / total if total else 1.0


def verify(plan: DispatchPlan, tables: Sequence[DispatchTables] | None = None) -> PlanReport:
    """Check promises 1 to 4 and 6 on the tables of all ranks (built here when not given) and count what is sent.

    Raises:
        PlanViolation: the first promise found broken, with where.
        UsageError: more work than 64-bit integers hold.
    """
    require_countable(plan.layout.doc_lengths, "verify", plan.row_keys)
    _check_tasks(plan)
    tables = build_all_tables(plan) if tables is None else tables
    ranks = plan.layout.ranks
    require([t.rank for t in tables] == list(range(ranks)), "the tables are not one per rank, in rank order")
    own = own_rows(plan.layout)
    for table, tokens in zip(tables, own.rows.tolist(), strict=True):
        require(
            table.tokens == tokens and table.window == plan.window and table.ranks == ranks,
            f"rank {table.rank}: tokens, ranks or window differ from the plan",
        )
    stores = deliver(tables, own)
    travels = bool(len(stores.queries.token) or len(stores.keys.token))
    require(
        all(t.exchanges == travels for t in tables),
        f"the tables do not agree that rows {'travel' if travels else 'do not travel'}",
    )
    reads, work = _read_tasks(plan, tables, stores)
    _check_no_waste(plan, reads, stores)
    _check_coverage(plan, tables, stores, reads, work)
    memory_may_bind = _check_memory(plan, stores)
    worst = _check_balance(plan, work + plan.row_keys * _rows_by_server(tables), memory_may_bind)
    cuts, unaligned = _count_cuts(plan)
    require(
        # Where balance was reached under a cap, whole blocks may have been too large for it.
        unaligned == 0 or memory_may_bind or not aligned_cuts_promised(plan),
        f"promise 3: {unaligned} of {cuts} cuts fall on no multiple of {BLOCK_TOKENS} queries or cut a short document",
    )
    return _report(plan, tables, stores, work, worst, cuts, unaligned)


def _check_tasks(plan: DispatchPlan) -> None:
    """The plan's own tasks lie in their shards, are not empty, and name servers that exist."""
    tasks, layout = plan.tasks, plan.layout
    if not len(tasks):
        return
    require(
        int(tasks.server.min()) >= 0 and int(tasks.server.max()) < plan.topology.servers,
        f"a task is placed on server {int(tasks.server.max())}, there are {plan.topology.servers}",
    )
    low, high = layout.shard_start[tasks.shard], (layout.shard_start + layout.shard_length)[tasks.shard]
    require(
        bool(np.all((tasks.start >= low) & (tasks.end <= high) & (tasks.start < tasks.end)))
        and bool(np.all(tasks.doc == layout.shard_doc[tasks.shard])),
        "a task is empty, leaves its shard, or names another document",
    )


def _read_tasks(plan: DispatchPlan, tables: Sequence[DispatchTables], stores: Stores) -> tuple[Reads, IntArray]:
    """What all tasks of all servers read, and the pairs of each server, int64 (ranks,), checked against its account."""
    kernels = [kernel for t in tables for kernel in (t.local_tasks, t.received_tasks)]
    lists = np.arange(len(kernels))
    reads = read(lists // 2, kernels, lists % 2 == 0, stores, plan.layout, plan.window)
    position, length = (np.concatenate([getattr(k, name) for k in kernels]) for name in ("q_position", "q_length"))
    amount = np.zeros(len(kernels), dtype=np.int64)
    np.add.at(
        amount, np.repeat(lists, [len(k) for k in kernels]), pairs_array(position, position + length, plan.window)
    )
    stated = np.array([pairs for t in tables for pairs in (t.local_pairs, t.received_pairs)])
    require_all(amount == stated, lists // 2, "rank {rank}: its tasks have other pairs than its tables say")
    return reads, amount.reshape(-1, 2).sum(axis=1)


def _check_no_waste(plan: DispatchPlan, reads: Reads, stores: Stores) -> None:
    """Promise 4: every received row is read. (None comes twice: it lives on one rank only, which sends it once.)"""
    stride = int(plan.layout.doc_lengths.sum()) + 1  # servers one after another on a line, and not touching
    base = reads.server * stride
    for kind, store, begins in (("query", stores.queries, reads.first), ("key", stores.keys, reads.key_first)):
        first = store.rank * stride + store.token
        require_all(
            _inside_union(first, first + store.length, base + begins, base + reads.end),
            store.rank,
            f"promise 4: server {{rank}} receives a {kind} row that no task reads",
        )


def _inside_union(first: IntArray, end: IntArray, low: IntArray, high: IntArray) -> BoolArray:
    """Whether each [first, end) lies in the union of the intervals [low, high)."""
    if not len(low):
        return np.zeros(len(first), dtype=bool)
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    opens = np.flatnonzero(np.concatenate([[True], low[1:] > reach[:-1]]))
    closes = reach[np.append(opens[1:], len(low)) - 1]
    at = np.searchsorted(low[opens], first, side="right") - 1
    inside: BoolArray = (at >= 0) & (end <= closes[at])
    return inside


def _check_coverage(
    plan: DispatchPlan, tables: Sequence[DispatchTables], stores: Stores, reads: Reads, work: IntArray
) -> None:
    """Promise 1: every query in one task. That each task sees the right keys was checked when it was read."""
    order = np.argsort(reads.first, kind="stable")
    borders = np.concatenate([[0], reads.end[order]])
    wrong = np.flatnonzero(borders != np.append(reads.first[order], plan.layout.doc_lengths.sum()))
    require(not len(wrong), f"promise 1: query {borders[wrong[:1]].tolist()} (global token) is not in exactly one task")
    expected = int(pairs_before_array(plan.layout.doc_lengths, plan.window).sum())
    require(int(work.sum()) == expected, f"promise 1: {int(work.sum())} pairs computed, the documents have {expected}")
    if 0 <= expected <= BRUTE_FORCE_PAIRS:
        _check_pairs_one_by_one(plan, tables, stores)


def _check_pairs_one_by_one(plan: DispatchPlan, tables: Sequence[DispatchTables], stores: Stores) -> None:
    """Promise 1 again, with sets of pairs and no arithmetic that could share a mistake with the rest."""
    expected: set[tuple[int, int]] = set()
    first = 0
    for length in plan.layout.doc_lengths.tolist():
        for q in range(length):
            lowest = 0 if plan.window is None else max(0, q - plan.window + 1)
            expected.update((first + q, first + k) for k in range(lowest, q + 1))
        first += length
    seen: set[tuple[int, int]] = set()
    for table in tables:
        query_names, key_names = (
            [of(i).names(table.rank) for i in (0, 1)] for of in (stores.of_queries, stores.of_keys)
        )
        for kernel in (table.local_tasks, table.received_tasks):
            for t in range(len(kernel)):
                keys: list[int] = []
                for s in range(int(kernel.segment_offset[t]), int(kernel.segment_offset[t + 1])):
                    names = key_names[int(kernel.segment_store[s])]
                    keys += names[int(kernel.segment_row[s]) :][: int(kernel.segment_length[s])]
                queries = query_names[int(kernel.q_store[t])][int(kernel.q_row[t]) :][: int(kernel.q_length[t])]
                for later, q in zip(range(len(queries) - 1, -1, -1), queries, strict=True):
                    visible = keys[: len(keys) - later]
                    for k in visible if plan.window is None else visible[-plan.window :]:
                        require((q, k) not in seen, f"promise 1: pair ({q}, {k}) is computed twice")
                        seen.add((q, k))
    require(seen == expected, f"promise 1: {len(expected ^ seen)} pairs are missing or should not be there")


def _rows_by_server(tables: Sequence[DispatchTables]) -> IntArray:
    """Query rows that each server computes, int64 (ranks,)."""
    rows = [int(t.local_tasks.q_length.sum()) + int(t.received_tasks.q_length.sum()) for t in tables]
    return np.array(rows, dtype=np.int64)


def _check_memory(plan: DispatchPlan, stores: Stores) -> bool:
    """Promise 6: no server of a plan that balances receives more than its cap.

    Returns whether a cap may have come before anything else: one is below all query and key rows that live elsewhere.
    With a window any cap may, since keys that two tasks of a server see count twice when it is planned.
    """
    caps = plan.topology.memory_tokens
    if not caps or plan.policy not in BALANCED_POLICIES:
        return False
    received = (stores.queries.rows + stores.keys.rows).tolist()
    for server, (rows, cap) in enumerate(zip(received, caps, strict=True)):
        require(rows <= cap, f"promise 6: server {server} receives {rows} query and key rows, its cap is {cap}")
    elsewhere = (plan.layout.doc_lengths.sum() - plan.layout.tokens_by_rank).tolist()
    return plan.window is not None or any(cap < 2 * rows for cap, rows in zip(caps, elsewhere, strict=True))


def _check_balance(plan: DispatchPlan, work: IntArray, memory_may_bind: bool) -> float:
    """Promise 2; returns the largest work ÷ share. Policies outside `BALANCED_POLICIES` promise nothing."""
    require(
        memory_may_bind or not plan.memory_limited,
        "promise 2: the plan says that a memory cap came before balance, but "
        + ("no cap is low enough for that" if plan.topology.memory_tokens else "none is set"),
    )
    total, weights = int(work.sum()), speed_weights(plan.topology)
    longest = longest_row_pairs(plan.layout.doc_lengths, plan.window) + plan.row_keys
    tolerance, whole, worst = exact_tolerance(plan.tolerance), sum(weights), 0.0
    promised, beyond = plan.policy in BALANCED_POLICIES and not plan.memory_limited, 0
    for server, (weight, done) in enumerate(zip(weights, work.tolist(), strict=True)):
        share = Fraction(total * weight, whole)
        if done:
            worst = max(worst, float(done / share) if share else float("inf"))
        cap = (1 + tolerance) * share if share * tolerance >= longest else share + longest
        beyond += done > cap
        require(
            done <= cap or not promised,
            f"promise 2: server {server} has {done} pairs, its share is {float(share):.1f}, its cap {float(cap):.1f} "
            f"(tolerance {plan.tolerance}, longest row {longest})",
        )
    require(
        bool(beyond) or not plan.memory_limited,
        "promise 2: the plan says that a memory cap came before balance, but no server has more work than promised",
    )
    return worst


def _count_cuts(plan: DispatchPlan) -> tuple[int, int]:
    """Task borders inside shards, and those of them that promise 3 would rather not see."""
    tasks, layout = plan.tasks, plan.layout
    inside = tasks.start > layout.shard_start[tasks.shard]
    short = layout.doc_lengths[tasks.doc] < SHORT_DOCUMENT_TOKENS
    return int(inside.sum()), int((inside & (short | (tasks.start % BLOCK_TOKENS != 0))).sum())


def _report(
    plan: DispatchPlan,
    tables: Sequence[DispatchTables],
    stores: Stores,
    work: IntArray,
    worst: float,
    cuts: int,
    unaligned: int,
) -> PlanReport:
    query_bytes, key_value_bytes = plan.shape.query_bytes, plan.shape.key_value_bytes
    q_sent, kv_sent = (np.array([int(s.run_length.sum()) for s in sends]) for sends in (
        [t.q_send for t in tables], [t.kv_send for t in tables]
    ))  # fmt: skip
    q_received, kv_received = stores.queries.rows, stores.keys.rows
    dispatch_in = q_received * query_bytes + kv_received * key_value_bytes
    dispatch_out = q_sent * query_bytes + kv_sent * key_value_bytes
    return PlanReport(
        bytes_total=int((dispatch_out + q_received * query_bytes).sum()),
        dispatch_bytes_in=dispatch_in,
        dispatch_bytes_out=dispatch_out,
        return_bytes_in=q_sent * query_bytes,
        return_bytes_out=q_received * query_bytes,
        busiest_bytes=int(max(dispatch_in.max(), dispatch_out.max())),
        pairs_total=int(work.sum()),
        work_by_server=work,
        work_max_over_mean=worst,
        received_tokens_max=int((q_received + kv_received).max()),
        memory=exchange_memory(q_sent, kv_sent, q_received, kv_received, plan.shape),
        tasks=len(plan.tasks),
        moved_tasks=int((plan.home != plan.tasks.server).sum()),
        cuts=cuts,
        unaligned_cuts=unaligned,
    )
