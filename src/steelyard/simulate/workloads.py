"""From document lengths to what every rank must do: batches, plans, and their work in numbers.

The stream of documents is sampled (the sampler is part of the answer: the order of the data matters most), packed into
chunks, planned by the product's planner, and each plan is reduced to a few numbers per rank: tokens, kernel tiles of
tasks on local and on received rows, and rows that leave and arrive inside a node and over the network. Those numbers
depend neither on the device nor on the model, so a sweep plans once and prices many times.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from steelyard.cost.attention_kernels import AttentionKernel, RangeCounts, TileKernel, range_counts
from steelyard.domain.arrays import FloatArray, IntArray, int_column
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.planner import POLICIES, make_plan
from steelyard.planner.layouts import choose_layout
from steelyard.planner.tables import exchange_of, needs_exchange
from steelyard.simulate.documents import Documents, cut_at_multiples
from steelyard.simulate.packing import pack_by_work
from steelyard.simulate.worker_processes import WorkerProcesses

PolicyName: TypeAlias = Literal["packed", "wlb", "per_document_cp", "balanced"]
LayoutName: TypeAlias = Literal["contiguous", "chosen"]
Columns: TypeAlias = dict[str, FloatArray]
"""The work of one round, as columns over ranks."""
MANY = 4096
"""Servers of all rounds together, from which on several processes plan: for fewer, starting them takes longer."""


@dataclass(frozen=True, eq=False)
class RankWork:
    """What every rank does in every round (nano-batch or tick); float64 (rounds, ranks).

    Attributes:
        tokens: that live on the rank.
        local, received: kernel counts of tasks on local rows only, and of tasks that need a received row.
        query_out, query_in, key_out, key_in: rows, in two parts: inside the node and over the network.
        squares: sum of the squares of document lengths of a round, float64 (rounds,): full attention counting.
        pairs: (query, key) pairs of a round as the policy computes them.
        whole_pairs: of a batch, if no document were cut, float64 (batches,).
    """

    tokens: FloatArray
    local: RangeCounts
    received: RangeCounts
    query_out: tuple[FloatArray, FloatArray]
    query_in: tuple[FloatArray, FloatArray]
    key_out: tuple[FloatArray, FloatArray]
    key_in: tuple[FloatArray, FloatArray]
    squares: FloatArray
    pairs: FloatArray
    whole_pairs: FloatArray


@dataclass(frozen=True)
class WorkRequest:
    """Everything that a round's work depends on. Hashable: the key of the cache.

    Attributes:
        policy: how documents are placed.
        data, context, stage: degrees; `stage` > 1 only where the ticks of all stages are planned together.
        chunk_tokens: tokens of a rank in one nano-batch.
        micro_batches, nano_batches: per step, and per micro-batch.
        ranks_per_node: ranks of one tensor index that share a node.
        tolerance, planner: of the balanced policy.
        layout: balanced, documents not cut: `contiguous`, or `chosen` by the planner for few bytes.
        kernel: balanced: whose time is balanced; None: pairs are.
        memory: balanced: whether servers keep received rows until backward.
        shape: heads and sizes on one device of the tensor axis: the bytes that the planner weighs.
        speeds: relative speed of each rank of data × context; () means equal.
        cut_documents: balanced only: documents end with their chunk, as packed training cuts them; else they go on.
        packing_breakpoint: wlb only: 0 packs with the planner's policy, else as `pack_by_work` with this breakpoint.
        batches, seed: how many batches are sampled, and from which seed.
    """

    policy: PolicyName
    data: int
    context: int
    stage: int
    chunk_tokens: int
    micro_batches: int
    nano_batches: int
    ranks_per_node: int
    tolerance: float
    planner: str
    layout: LayoutName
    kernel: AttentionKernel | None
    memory: Literal["keep", "resend"]
    shape: AttentionShape
    speeds: tuple[float, ...]
    cut_documents: bool
    batches: int
    seed: int
    packing_breakpoint: int = 0

    @property
    def rounds(self) -> int:
        """Of one batch: nano-batches, or those of all forward ticks of a lockstep pipeline."""
        return (self.micro_batches + self.stage - 1) * self.nano_batches

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.data * self.context * self.chunk_tokens * self.micro_batches * self.nano_batches


class WorkloadCache:
    """Plans documents once for all configurations that ask for the same placement.

    Args:
        documents: the stream.
        processes: that plan the rounds of a large step side by side; results do not depend on it.
    """

    def __init__(self, documents: Documents, *, processes: int = 1) -> None:
        self.documents, self.processes = documents, processes
        self._get = lru_cache(maxsize=64)(self._plan)
        self._begun: dict[WorkRequest, tuple[list[Columns], Iterator[Columns]]] = {}

    def work(self, request: WorkRequest) -> RankWork:
        """The work of all rounds of all batches, in the order batch, micro-batch (or tick), nano-batch."""
        return self._get(request)

    def first_rounds(self, request: WorkRequest, count: int) -> RankWork:
        """The work of the first `count` rounds, so that a search need not plan the others. They are planned once."""
        if request not in self._begun:
            self._begun[request] = [], self._all_rounds(request)
        rounds, more = self._begun[request]
        try:
            rounds += itertools.islice(more, count - len(rounds))
        except BaseException:  # it gives nothing more: begun again, it would pass for all there is
            del self._begun[request]
            raise
        return _stack(rounds[:count], np.zeros(0), request.stage)

    def _plan(self, request: WorkRequest) -> RankWork:
        begun, more = self._begun.pop(request, ([], self._all_rounds(request)))
        rounds = [*begun, *more]
        assert len(rounds) == request.rounds * request.batches
        return _stack(rounds, whole_pairs(self.documents, request), request.stage)

    def _all_rounds(self, request: WorkRequest) -> Iterator[Columns]:
        """Work of all rounds of all batches, one after another."""
        whole = [(request, number, slice(None)) for number in range(request.batches)]
        planner = _RoundPlanner(self.documents)
        servers = request.data * request.context * request.stage
        if self.processes == 1 or request.policy != "balanced" or servers * request.rounds * request.batches < MANY:
            for task in whole:
                yield from planner.planned(task)
            return
        parts = min(request.rounds, -(-4 * self.processes // request.batches))
        with WorkerProcesses(planner, min(self.processes, parts * request.batches)) as workers:
            given = [
                [workers.give((request, number, slice(first, None, parts))) for first in range(parts)]
                for number in range(request.batches)
            ]
            for of_batch in given:
                found = [workers.answer(task) for task in of_batch]
                for index in range(request.rounds):
                    yield found[index % parts][index // parts]


class _RoundPlanner:
    """Plans some rounds of one batch."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    def __call__(self, task: tuple[WorkRequest, int, slice]) -> list[Columns]:
        return list(self.planned(task))

    def planned(self, task: tuple[WorkRequest, int, slice]) -> Iterator[Columns]:
        """One round after another."""
        request, number, which = task
        lengths = self.documents.batch(number, request.tokens, request.seed)
        if request.policy == "wlb":
            yield from _packed_by_work(lengths, request)[which]
            return
        pieces = _rounds(lengths, request)
        for index in range(request.rounds)[which]:
            yield _tick(pieces, request, index) if request.stage > 1 else _place(pieces[index], request)


def whole_pairs(documents: Documents, request: WorkRequest) -> FloatArray:
    """(query, key) pairs of each sampled batch with all documents whole."""
    batches = [documents.batch(n, request.tokens, request.seed) for n in range(request.batches)]
    return np.array([float((b * (b + 1) // 2).sum()) for b in batches])


def is_uniform(documents: Documents, request: WorkRequest) -> bool:
    """Whether every chunk of every step holds the same documents, so that one stands for all."""
    lengths = np.unique(documents.lengths)
    group = request.chunk_tokens * (request.context if request.policy != "balanced" or request.context > 1 else 1)
    return len(lengths) == 1 and group % int(lengths[0]) == 0 and not request.speeds


def _rounds(lengths: IntArray, request: WorkRequest) -> list[IntArray]:
    """Divide a batch into rounds of data × context chunks, whole documents first-fit in packing order.

    Documents never cross nano-batches; those that fit nowhere any more are cut over the rooms that are left.

    Raises:
        UsageError: a document that may not be cut is longer than a round.
    """
    room = request.data * request.context * request.chunk_tokens
    count = request.micro_batches * request.nano_batches
    if count == 1:
        return [lengths]
    if request.policy == "packed":
        return cut_at_multiples(lengths, room)
    longest = int(lengths.max())
    if longest > room and request.policy == "balanced" and not request.cut_documents:
        needed = -(-longest // (request.data * request.context))
        raise UsageError(
            f"documents: one has {longest} tokens, more than the {room} that data × context × chunk_tokens hold "
            f"together; nearest: chunk_tokens={needed}, or documents.cut_at_chunks=true, which cuts it"
        )
    rooms = np.full(count, room, dtype=np.int64)
    members: list[list[int]] = [[] for _ in range(count)]
    left: list[int] = []
    for length in lengths.tolist():
        place = int(np.argmax(rooms >= length))
        if rooms[place] >= length:
            members[place].append(length)
            rooms[place] -= length
        else:
            left.append(length)
    for length in left:
        rest = length
        while rest:
            place = int(np.argmax(rooms))
            taken = min(rest, int(rooms[place]))
            members[place].append(taken)
            rooms[place] -= taken
            rest -= taken
    return [int_column(m) for m in members]


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise UsageError(f"policy={name!r} is not available; expected one of packed, balanced, {', '.join(POLICIES)}")
    return name


def _place(lengths: IntArray, request: WorkRequest) -> Columns:
    """The work of one round, as columns over ranks."""
    plan = _plan_of(lengths, request)
    if plan is None:
        groups = _chunks_of(lengths, request.chunk_tokens * request.context, request.data)
        return _evenly([int_column(g) for g in groups], request)
    return _columns(plan, request.ranks_per_node, plan.layout.doc_lengths)


def first_full_tick(request: WorkRequest) -> int:
    """The first tick of a lockstep pipeline in which as many stages have work as ever; without one, 0."""
    return min(request.stage, request.micro_batches) - 1


def first_plans(documents: Documents, request: WorkRequest) -> list[DispatchPlan]:
    """Plans of the nano-batches of the first micro-batch (or full tick) of the first batch, for pictures; [] where all
    ranks of a group share every document alike, so that nothing is planned."""
    lengths = documents.batch(0, request.tokens, request.seed)
    if request.stage > 1:
        pieces = _rounds(lengths, request)
        return [_tick_plan(pieces, request, first_full_tick(request), half) for half in range(request.nano_batches)]
    if request.policy == "wlb":
        return _wlb_plans(lengths, request, 0, request.nano_batches)
    plans = [_plan_of(part, request) for part in _rounds(lengths, request)[: request.nano_batches]]
    return [p for p in plans if p is not None]


def _plan_of(lengths: IntArray, request: WorkRequest) -> DispatchPlan | None:
    """The plan of one round; None where the ranks of a group share whole sequences evenly."""
    ranks, room = request.data * request.context, request.chunk_tokens
    if request.policy == "balanced":
        topology = Topology(ranks, request.speeds, node_size=request.ranks_per_node)
        if request.cut_documents:
            layout = Layout.from_doc_lengths(_chunks_of(lengths, room, ranks))
        elif request.layout == "chosen":
            layout = choose_layout(
                lengths.tolist(), room, ranks, shape=request.shape, topology=topology, tolerance=request.tolerance
            )
        else:
            layout = Layout.contiguous(lengths.tolist(), room, ranks)
        return _balanced(layout, topology, request)
    groups = _chunks_of(lengths, room * request.context, request.data)
    if request.policy == "per_document_cp" and request.context > 1:  # documents are cut where a group's tokens end
        return _context_parallel(Layout.contiguous([n for g in groups for n in g], room, ranks), request)
    if request.context > 1:
        return None
    return make_plan(Layout.from_doc_lengths(groups), policy="packed", shape=request.shape, tolerance=0.0)


def _packed_by_work(lengths: IntArray, request: WorkRequest) -> list[Columns]:
    """A whole step packed by `wlb`: every chunk of every micro-batch is a place for whole documents."""
    plans = _wlb_plans(lengths, request, 0, request.micro_batches * request.nano_batches)
    return [_columns(plan, request.ranks_per_node, plan.layout.doc_lengths) for plan in plans]


def _wlb_plans(lengths: IntArray, request: WorkRequest, first: int, last: int) -> list[DispatchPlan]:
    """The rounds [first, last) of that step."""
    found = []
    for groups in _wlb_groups(lengths, request)[first:last]:
        if request.context > 1:
            shares = [_shared_out(group, request.context) for group in groups]
            found.append(_context_parallel(_side_by_side(shares), request))
        else:
            layout = Layout.from_doc_lengths(groups)
            found.append(make_plan(layout, policy="packed", shape=request.shape, tolerance=0.0))
    return found


def _wlb_groups(lengths: IntArray, request: WorkRequest) -> list[list[list[int]]]:
    """Documents of every group of ranks that shares a sequence, round by round."""
    places = request.data * request.micro_batches * request.nano_batches
    if request.packing_breakpoint:
        cap = request.context * request.chunk_tokens // request.micro_batches
        documents = pack_by_work(lengths, places, request.packing_breakpoint, cap)
    else:
        documents = _packed_by_planner(lengths, places, request)
    return [documents[first : first + request.data] for first in range(0, places, request.data)]


def placed_groups(lengths: IntArray, request: WorkRequest) -> list[list[list[int]]]:
    """What is known without a plan: pieces of documents of every group of ranks that shares sequences, round by round.

    Groups are the `context` ranks of each lane of the data axis; of policy `balanced`, which moves work between all
    ranks, all of them are one group.

    Args:
        lengths: of the documents of one batch.
    """
    if request.policy == "wlb":
        return _wlb_groups(lengths, request)
    rounds = _rounds(lengths, request)
    if request.policy != "balanced":
        return [_chunks_of(part, request.chunk_tokens * request.context, request.data) for part in rounds]
    if request.cut_documents:
        ranks = request.data * request.context
        return [[[n for chunk in _chunks_of(part, request.chunk_tokens, ranks) for n in chunk]] for part in rounds]
    return [[part.tolist()] for part in rounds]


def _packed_by_planner(lengths: IntArray, places: int, request: WorkRequest) -> list[list[int]]:
    layout = Layout.contiguous(lengths.tolist(), request.context * request.chunk_tokens, places)
    plan = make_plan(layout, policy=_policy("wlb"), shape=request.shape, tolerance=request.tolerance)
    placed = plan.layout
    order = np.argsort(placed.shard_rank, kind="stable")
    borders = np.searchsorted(placed.shard_rank[order], np.arange(1, places))
    return [placed.shard_length[part].tolist() for part in np.split(order, borders)]


def _shared_out(lengths: list[int], ranks: int) -> Layout:
    return Layout.contiguous(lengths, max(1, -(-sum(lengths) // ranks)), ranks)


def _side_by_side(layouts: Sequence[Layout]) -> Layout:
    """One layout of several groups of ranks."""
    doc = np.cumsum([0] + [layout.docs for layout in layouts])
    ranks = np.cumsum([0] + [layout.ranks for layout in layouts])
    return Layout.from_columns(
        np.concatenate([layout.shard_doc + d for layout, d in zip(layouts, doc, strict=False)]),
        np.concatenate([layout.shard_start for layout in layouts]),
        np.concatenate([layout.shard_length for layout in layouts]),
        np.concatenate([layout.shard_rank + r for layout, r in zip(layouts, ranks, strict=False)]),
        ranks=int(ranks[-1]),
    )


def _context_parallel(layout: Layout, request: WorkRequest) -> DispatchPlan:
    """Documents over the ranks of their group, head-tail, keys gathered: the planner's policy."""
    topology = Topology(layout.ranks, node_size=request.context)
    return make_plan(
        layout, policy=_policy("per_document_cp"), topology=topology, shape=request.shape, tolerance=request.tolerance
    )


def _evenly(groups: Sequence[IntArray], request: WorkRequest) -> Columns:
    """Context parallelism of whole sequences, as frameworks do it for unpacked data: every rank has an equal share."""
    share = 1 / request.context
    columns = {name: np.zeros(request.data * request.context) for name in _COLUMNS}
    for number, lengths in enumerate(groups):
        counts = range_counts(np.zeros_like(lengths), lengths)
        place = slice(number * request.context, (number + 1) * request.context)
        columns["tokens"][place] = lengths.sum() * share
        columns["squares"][place] = float((lengths.astype(np.float64) ** 2).sum()) * share
        for field in dataclasses.fields(RangeCounts):
            # Of the pairs, 1/context need only keys of the own two pieces.
            whole = float(getattr(counts, field.name).sum()) * share
            columns[f"local_{field.name}"][place] = whole * share
            columns[f"received_{field.name}"][place] = whole * (1 - share)
    return columns


_COUNTS = tuple(f.name for f in dataclasses.fields(RangeCounts))
_ROWS = tuple(
    f"{what}_{way}_{where}" for what in ("query", "key") for way in ("out", "in") for where in ("node", "network")
)
_COLUMNS = ("tokens", "squares", *(f"{p}_{c}" for p in ("local", "received") for c in _COUNTS), *_ROWS)


def _columns(plan: DispatchPlan, ranks_per_node: int, lengths: IntArray) -> Columns:
    """A plan in numbers per rank."""
    ranks = plan.layout.ranks
    columns = {name: np.zeros(ranks) for name in _COLUMNS}
    columns["tokens"] = plan.layout.tokens_by_rank.astype(np.float64)
    columns["squares"] = np.full(ranks, float((lengths.astype(np.float64) ** 2).sum()) / ranks)
    if not needs_exchange(plan):
        _add_counts(columns, "local", plan.tasks.server, plan.tasks.start, plan.tasks.end)
        return columns
    exchange = exchange_of(plan)
    start = exchange.kernel.q_position
    end = start + exchange.kernel.q_length
    server, far = exchange.kernel_list // 2, exchange.kernel_list % 2 == 1
    _add_counts(columns, "local", server[~far], start[~far], end[~far])
    _add_counts(columns, "received", server[far], start[far], end[far])
    for what, links in (("query", exchange.queries), ("key", exchange.keys)):
        near = links.source // ranks_per_node == links.send_peer // ranks_per_node
        for where, chosen in (("node", near), ("network", ~near)):
            rows = links.send_rows[chosen].astype(np.float64)
            columns[f"{what}_out_{where}"] = _sums(links.source[chosen], rows, ranks)
            columns[f"{what}_in_{where}"] = _sums(links.send_peer[chosen], rows, ranks)
    return columns


def _sums(rank: IntArray, weights: FloatArray, ranks: int) -> FloatArray:
    return np.bincount(rank, weights=weights, minlength=ranks).astype(np.float64)


def _add_counts(columns: Columns, prefix: str, server: IntArray, start: IntArray, end: IntArray) -> None:
    counts = range_counts(start, end)
    ranks = len(columns["tokens"])
    for name in _COUNTS:
        columns[f"{prefix}_{name}"] = _sums(server, getattr(counts, name), ranks)


def _tick(pieces: Sequence[IntArray], request: WorkRequest, index: int) -> Columns:
    """A round of a lockstep pipeline: tick t holds micro-batch t − s on stage s, all planned together.

    Ranks are stage after stage. Only forward ticks are planned: backward ones are their mirror images.
    """
    tick, half = divmod(index, request.nano_batches)
    plan = _tick_plan(pieces, request, tick, half)
    return _columns(plan, request.ranks_per_node, plan.layout.doc_lengths)


def _tick_plan(pieces: Sequence[IntArray], request: WorkRequest, tick: int, half: int) -> DispatchPlan:
    """The plan of one nano-batch of a tick. `pieces`: documents of every nano-batch of the step."""
    stages, layouts = request.stage, []
    for stage in range(stages):
        number = tick - stage
        busy = 0 <= number < request.micro_batches
        piece = pieces[number * request.nano_batches + half] if busy else int_column([])
        layouts.append(_stage_layout(piece, request))
    servers = stages * request.data * request.context
    topology = Topology(servers, request.speeds * stages, node_size=request.ranks_per_node)
    return _balanced(_side_by_side(layouts), topology, request)


def _chunks_of(lengths: IntArray, room: int, ranks: int) -> list[list[int]]:
    chunks = [c.tolist() for c in cut_at_multiples(lengths, room)] if len(lengths) else []
    return chunks + [[] for _ in range(ranks - len(chunks))]


def _stage_layout(lengths: IntArray, request: WorkRequest) -> Layout:
    """One micro-batch on the ranks of one stage."""
    lanes, room = request.data * request.context, request.chunk_tokens
    if request.cut_documents:
        return Layout.from_doc_lengths(_chunks_of(lengths, room, lanes))
    return Layout.contiguous(lengths.tolist(), room, lanes)


def _balanced(layout: Layout, topology: Topology, request: WorkRequest) -> DispatchPlan:
    """The plan of the product's planner, or of the published idea of one."""
    by_time = request.planner == "balanced" and isinstance(request.kernel, TileKernel)
    return make_plan(
        layout, policy=request.planner, topology=topology, shape=request.shape, tolerance=request.tolerance,
        memory=request.memory, objective="time" if by_time else "pairs", kernel=request.kernel if by_time else None,
    )  # fmt: skip


def _stack(rounds: Sequence[Columns], whole: FloatArray, repeats: int) -> RankWork:
    """Rounds one after another. `repeats`: rounds in which every document stands (stages of a lockstep pipeline)."""
    table = {name: np.stack([r[name] for r in rounds]) for name in _COLUMNS}

    def counts(prefix: str) -> RangeCounts:
        return RangeCounts(*(table[f"{prefix}_{name}"] for name in _COUNTS))

    def rows(name: str) -> tuple[FloatArray, FloatArray]:
        return table[f"{name}_node"], table[f"{name}_network"]

    local, received = counts("local"), counts("received")
    return RankWork(
        tokens=table["tokens"],
        local=local,
        received=received,
        query_out=rows("query_out"),
        query_in=rows("query_in"),
        key_out=rows("key_out"),
        key_in=rows("key_in"),
        squares=table["squares"].sum(axis=-1) / repeats,
        pairs=(local.pairs + received.pairs).sum(axis=-1) / repeats,
        whole_pairs=whole,
    )
