"""Which rank holds which tokens, where the tokens of a nano-batch are not placed yet.

A document on several ranks costs bytes even if nobody balances: a rank that computes queries up to position b needs
all keys before b that it does not hold. A good layout makes these few *and* leaves each rank with about its share of
work, so that hardly any query travels. Every rank gets equally many tokens, whatever the layout.

Three layouts are known here:

- *contiguous*: documents fill rank after rank. Late parts of a long document are far more work than early ones.
- *head-tail*: every document on every rank, an early and a late piece each. Even, but nearly all keys go everywhere.
- *woven*: each rank gets a late piece of one long document, as long as its work allows, and fills up with what has the
  least work per token: short documents, which cost no byte, then the head of the same document. One document alone
  becomes head-tail over the ranks it fills; among many short ones it is cut into contiguous parts of equal *work*.
  Cutting at position a costs a keys once, while moving as much work afterwards costs queries and outputs as well.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from steelyard.domain.arrays import IntArray, int_column
from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError, UsageError
from steelyard.planner.balanced import DEFAULT_OBJECTIVE, WEIGHT_UNITS, plan_balanced, weight_units
from steelyard.planner.blocks import BLOCK_TOKENS, SHORT_DOCUMENT_TOKENS
from steelyard.planner.objective import Objective
from steelyard.planner.shares import work_caps
from steelyard.planner.tables import build_all_tables
from steelyard.planner.work import RowWork

FORWARD = Objective(passes="forward")
CHEAP_CUT = 16  # a document of up to 1/16 of a rank's tokens may be cut to fill a rank up: its keys are few
COMPARED_RANKS = 16  # up to as many, all candidates are planned and compared; with more, that costs more than it saves
HEADS_TRIED = 64  # parts, lightest first, of which the one that begins first is cut


def choose_layout(
    doc_lengths: Sequence[int],
    tokens_per_rank: int,
    ranks: int,
    *,
    shape: AttentionShape,
    topology: Topology | None = None,
    tolerance: float = 0.05,
    window: int | None = None,
    objective: Objective = DEFAULT_OBJECTIVE,
) -> Layout:
    """Place the tokens of one nano-batch so that its balanced plan sends few bytes (those inside a node count
    `intra_node_weight`).

    Up to 16 ranks, and wherever links or memory make ranks differ, every candidate is planned and the cheapest taken.
    Otherwise it is the woven one, unplanned: it was the cheapest in every batch measured at 64 and 512 ranks
    (`docs/results/planner.md`), and planning all three would take longer than the step's other decisions together.

    Documents keep their numbers (their place in `doc_lengths` without zeros). No rank holds more than
    `tokens_per_rank` tokens. Ties go to the first of `layout_candidates`.

    Args:
        doc_lengths: tokens of each document, in packing order.
        tokens_per_rank: most tokens on a rank.
        ranks: number of ranks, server j being rank j.
        shape, topology, tolerance, window: as for `make_plan`.
        objective: which bytes count, and what work is.

    Raises:
        UsageError: more tokens than fit, or a topology of another number of servers.
        PlanError: a memory cap that no plan of any candidate can keep.
    """
    topology = topology if topology is not None else Topology(ranks)
    weighted = topology.node_size > 1 and topology.intra_node_weight < 1
    if ranks > COMPARED_RANKS and not weighted and not topology.memory_tokens:
        return woven_layout(
            doc_lengths, tokens_per_rank, ranks,
            topology=topology, tolerance=tolerance, window=window, row_keys=objective.row_keys,
        )  # fmt: skip
    candidates = layout_candidates(
        doc_lengths, tokens_per_rank, ranks,
        topology=topology, tolerance=tolerance, window=window, row_keys=objective.row_keys,
    )  # fmt: skip
    best: tuple[int, Layout] | None = None
    refused: PlanError | None = None
    for layout in candidates.values():
        try:
            plan = plan_balanced(layout, topology, shape, tolerance, window, objective)
            cost = weighted_bytes_sent(plan, objective)
        except PlanError as error:
            refused = error
            continue
        if best is None or cost < best[0]:
            best = cost, layout
    if best is None:
        raise PlanError(f"no layout fits: {refused}")
    return best[1]


def bytes_sent(plan: DispatchPlan, objective: Objective = FORWARD) -> int:
    """Bytes of one layer, all ranks together, all phases of the passes that `objective` counts.

    A server receives the keys that its tasks see and that it does not hold: what both cover together, less what it
    holds. All servers lie one after another on one line of tokens here, so one sort does.
    """
    layout, tasks = plan.layout, plan.tasks
    tokens = int(layout.doc_lengths.sum())
    doc_first = np.cumsum(layout.doc_lengths) - layout.doc_lengths
    seen = np.zeros_like(tasks.start) if plan.window is None else np.maximum(0, tasks.start - plan.window + 1)
    seen_base = tasks.server * tokens + doc_first[tasks.doc]
    held_base = layout.shard_rank * tokens + doc_first[layout.shard_doc]
    low = np.concatenate([seen_base + seen, held_base + layout.shard_start])
    high = np.concatenate([seen_base + tasks.end, held_base + layout.shard_start + layout.shard_length])
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    covered = reach - np.maximum(low, np.concatenate([[0], reach[:-1]]))
    keys = int(covered.sum()) - tokens
    queries = int((tasks.end - tasks.start)[plan.home != tasks.server].sum())
    return objective.query_bytes(plan.shape) * queries + objective.key_bytes(plan.shape) * keys


def weighted_bytes_sent(plan: DispatchPlan, objective: Objective) -> int:
    """As `bytes_sent`, in 1/1024 of a byte: those inside a node count their weight, as `balanced` knows it."""
    size, weight = min(plan.topology.node_size, plan.topology.servers), weight_units(plan.topology)
    everywhere = WEIGHT_UNITS * bytes_sent(plan, objective)
    if size == 1 or weight == WEIGHT_UNITS:
        return everywhere
    inside = 0
    for table in build_all_tables(plan):
        for sent, row_bytes in (
            (table.q_send, objective.query_bytes(plan.shape)),
            (table.kv_send, objective.key_bytes(plan.shape)),
        ):
            inside += row_bytes * int(sent.rows[sent.peer // size == table.rank // size].sum())
    return everywhere - (WEIGHT_UNITS - weight) * inside


def layout_candidates(
    doc_lengths: Sequence[int],
    tokens_per_rank: int,
    ranks: int,
    *,
    topology: Topology | None = None,
    tolerance: float = 0.05,
    window: int | None = None,
    row_keys: int = 0,
) -> dict[str, Layout]:
    """Layouts worth planning, by name. Head-tail only where every document is too long for one rank."""
    candidates = {
        "woven": woven_layout(
            doc_lengths,
            tokens_per_rank,
            ranks,
            topology=topology,
            tolerance=tolerance,
            window=window,
            row_keys=row_keys,
        ),
        "contiguous": Layout.contiguous(doc_lengths, tokens_per_rank, ranks),
    }
    if min((length for length in doc_lengths if length), default=0) > tokens_per_rank:
        head_tail = Layout.head_tail(doc_lengths, ranks)
        if int(head_tail.tokens_by_rank.max()) <= tokens_per_rank:
            candidates["head_tail"] = head_tail
    return candidates


def woven_layout(
    doc_lengths: Sequence[int],
    tokens_per_rank: int,
    ranks: int,
    *,
    topology: Topology | None = None,
    tolerance: float = 0.05,
    window: int | None = None,
    row_keys: int = 0,
) -> Layout:
    """Equal tokens and, as far as the documents allow, work within the tolerance on every rank; see the module.

    Ranks are filled one by one, the fastest first, each up to (1 + tolerance) × its share: from the densest end of
    what is left (the tail of the longest document) and from the lightest end. What remains is always less extreme than
    before, so the last ranks can be filled as well. Whole documents are preferred where the work allows it.

    Raises:
        UsageError: more tokens than fit, a negative length, or a topology of another number of servers.
    """
    lengths = [int(length) for length in doc_lengths if length]
    topology = topology if topology is not None else Topology(ranks)
    if topology.servers != ranks:
        raise UsageError(f"layout: topology of {topology.servers} servers for {ranks} ranks; give as many")
    if lengths and min(lengths) < 0:
        raise UsageError(f"layout: document of length {min(lengths)}, expected >= 0")
    tokens = sum(lengths)
    if tokens > ranks * tokens_per_rank:
        raise UsageError(f"layout: {tokens} tokens do not fit {ranks} ranks of {tokens_per_rank} tokens")
    columns = int_column(lengths)
    rows = RowWork(window, row_keys)
    work, longest_row = rows.total(columns), rows.longest_row(columns)
    shares = work_caps(work, topology, 0.0, longest_row).target
    caps = work_caps(work, topology, tolerance, longest_row).target
    capacity = sum(caps)
    loom = _Loom(columns, rows, cheap_cut=tokens_per_rank // CHEAP_CUT)
    parts_by_rank: list[list[_Part]] = [[] for _ in range(ranks)]
    for place, rank in enumerate(sorted(range(ranks), key=lambda rank: (-caps[rank], rank))):
        capacity -= caps[rank]  # what the ranks after this one can take
        least = min(caps[rank], max(work - capacity, 2 * shares[rank] - caps[rank]))
        parts = loom.fill(-(-tokens // (ranks - place)), least, caps[rank])
        parts_by_rank[rank] = parts
        tokens -= sum(part.end - part.start for part in parts)
        work -= sum(part.work for part in parts)
    return _layout_of(_neighbours_together(parts_by_rank, caps))


class _Part(NamedTuple):
    """Tokens [start, end) of a document and their work. Ordered by end: the work of its last token."""

    end: int
    start: int
    doc: int
    work: int


class _Loom:
    """What is not placed yet, ascending by end: light parts first, dense ones last."""

    def __init__(self, doc_lengths: IntArray, rows: RowWork, *, cheap_cut: int) -> None:
        self.rows, self.cheap_cut = rows, cheap_cut
        work = rows.of_array(np.zeros_like(doc_lengths), doc_lengths).tolist()
        self.parts = sorted(_Part(n, 0, doc, work[doc]) for doc, n in enumerate(doc_lengths.tolist()))

    def part(self, start: int, end: int, doc: int) -> _Part:
        return _Part(end, start, doc, self.rows.of(start, end))

    def fill(self, tokens: int, least: int, most: int) -> list[_Part]:
        """Take `tokens` (or all that is left), with work just below `most`, or at least `least` if that saves a cut."""
        taken: list[_Part] = []
        light: _Light | None = None
        while tokens > 0 and self.parts:
            light = light or _Light(self.parts, tokens)
            mix = _Mix(self, self.parts.pop(), light, tokens)
            if mix.takes_all and mix.work(mix.longest) < least:
                found = [mix.dense]  # too little work even so: the next dense part joins it
            else:
                found = self._best_mix(mix, least, most)
                light = None
            taken += found
            tokens -= sum(part.end - part.start for part in found)
            work = sum(part.work for part in found)
            least, most = least - work, most - work
        return taken

    def _best_mix(self, mix: _Mix, least: int, most: int) -> list[_Part]:
        """Take the mix that suits."""
        count = self._tail(mix, least, most)
        if not least <= mix.work(count) <= most:
            mix.cut_any = True
            count = self._tail(mix, least, most)
        return mix.take(count)

    def _tail(self, mix: _Mix, least: int, most: int) -> int:
        """How many tokens of its dense part suit the mix best: all of it or none, rather than a cut."""
        if mix.work(mix.longest) <= most:
            return mix.longest
        if mix.work(0) >= least:
            return 0
        return _longest_within(mix, most)


class _Light:
    """Tokens and work of the first 0, 1, … parts together, as far as `tokens` reach."""

    def __init__(self, parts: list[_Part], tokens: int) -> None:
        self.tokens, self.work = [0], [0]
        have = work = 0
        for end, start, _, amount in parts:
            have += end - start
            work += amount
            self.tokens.append(have)
            self.work.append(work)
            if have > tokens:
                break


class _Mix:
    """The last tokens of one dense part, filled up with the lightest parts, then with the head of the dense one.

    Light parts go in whole, and the next one cut if that is cheap; with `cut_any`, the head of the part that begins
    first, however long. If the dense part ends up in the mix with all its tokens, and light ones are too long to be
    cut, the mix may hold fewer tokens than asked for.
    """

    def __init__(self, loom: _Loom, dense: _Part, light: _Light, tokens: int) -> None:
        self.loom, self.dense, self.light, self.tokens = loom, dense, light, tokens
        self.longest = min(tokens, dense.end - dense.start)
        self.takes_all = self.longest == dense.end - dense.start
        self.cut_any = False

    def _filling(self, count: int) -> tuple[int, int, int, int]:
        """Beside the last `count` tokens of the dense part: the number of whole light parts, the index of a further one
        and how many of its tokens, how many of the dense part's head."""
        parts, room = self.loom.parts, self.tokens - count
        whole = min(bisect_right(self.light.tokens, room) - 1, len(parts))
        room -= self.light.tokens[whole]
        next_one, cut = whole, 0
        if room and whole < len(parts):
            if self.cut_any:
                near = range(whole, min(len(parts), whole + HEADS_TRIED))
                next_one = min(near, key=lambda index: parts[index].start)
            if self.cut_any or parts[whole].end - parts[whole].start <= self.loom.cheap_cut:
                cut = min(room, parts[next_one].end - parts[next_one].start)
        return whole, next_one, cut, min(room - cut, self.dense.end - count - self.dense.start)

    def work(self, count: int) -> int:
        """Work with the last `count` tokens of the dense part."""
        whole, next_one, cut, head = self._filling(count)
        end, start, _, _ = self.dense
        rows = self.loom.rows
        amount = self.light.work[whole] + rows.of(end - count, end)
        if head:
            amount += rows.of(start, start + head)
        if cut:
            first = self.loom.parts[next_one].start
            amount += rows.of(first, first + cut)
        return amount

    def take(self, count: int) -> list[_Part]:
        """The mix with the last `count` tokens of the dense part; the loom keeps what is left of its parts."""
        whole, next_one, cut, head = self._filling(count)
        end, start, doc, _ = self.dense
        part, parts = self.loom.part, self.loom.parts
        taken, left = parts[:whole], [part(start + head, end - count, doc)]
        taken += [part(end - count, end, doc), part(start, start + head, doc)]
        if cut:
            light = parts.pop(next_one)
            taken.append(part(light.start, light.start + cut, light.doc))
            left.append(part(light.start + cut, light.end, light.doc))
        del parts[:whole]
        for remainder in left:
            if remainder.start < remainder.end:
                insort(parts, remainder)
        return [piece for piece in taken if piece.start < piece.end]


def _longest_within(mix: _Mix, most: int) -> int:
    """The most tokens of the dense part with at most this work; of a long document, cut at a multiple of the block."""
    end = mix.dense.end
    block = BLOCK_TOKENS if end >= SHORT_DOCUMENT_TOKENS else 1
    fits, over = -(-end // block), -(-(end - mix.longest) // block) - 1  # the cut, in blocks: none of it, too much
    while fits - over > 1:
        middle = (fits + over) // 2
        if mix.work(end - middle * block) <= most:
            fits = middle
        else:
            over = middle
    return max(0, end - fits * block)


def _neighbours_together(parts_by_rank: list[list[_Part]], caps: list[int]) -> list[list[_Part]]:
    """Ranks that share a long document next to each other, hence in one node, where ranks are equally fast."""
    arranged = list(parts_by_rank)
    for cap in sorted(set(caps)):
        ranks = [rank for rank, own in enumerate(caps) if own == cap]
        densest = [max(parts_by_rank[rank], default=_Part(0, 0, 0, 0)) for rank in ranks]
        order = sorted(range(len(ranks)), key=lambda i: (densest[i].doc, densest[i].end, i))
        for rank, source in zip(ranks, order, strict=True):
            arranged[rank] = parts_by_rank[ranks[source]]
    return arranged


def _layout_of(parts_by_rank: list[list[_Part]]) -> Layout:
    """Parts of a rank in order of document and position, neighbouring ones as one shard."""
    ranks = len(parts_by_rank)
    counts = [len(parts) for parts in parts_by_rank]
    table = np.array([part[:3] for parts in parts_by_rank for part in parts], dtype=np.int64).reshape(-1, 3)
    rank = np.repeat(np.arange(ranks, dtype=np.int64), counts)
    order = np.lexsort((table[:, 1], table[:, 2], rank))
    (end, start, doc), rank = table[order].T, rank[order]
    opens = np.ones(len(start), dtype=np.bool_)
    opens[1:] = (rank[1:] != rank[:-1]) | (doc[1:] != doc[:-1]) | (start[1:] != end[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start))[: len(first)] - 1
    return Layout.from_columns(doc[first], start[first], end[last] - start[first], rank[first], ranks=ranks)
