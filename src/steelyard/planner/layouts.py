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
  Where memory is capped, a rank whose late piece needs more earlier keys than it may receive gets the head first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, repeat
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
COMPARED_RANKS = 16  # up to as many, or for a document longer than as many, all candidates are planned and compared
HEADS_TRIED = 64  # parts, lightest first, of which the one that begins first is cut
GUESSES = 5  # of a tail's length; then halving is surer


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

    Up to 16 ranks, wherever a document is longer than 16 ranks, and wherever links or memory make ranks differ, every
    candidate is planned and the cheapest taken, or the best balanced where memory caps forbid the balance. Otherwise it
    is the woven one, unplanned: it was the cheapest in every batch measured at 64 and 512 ranks
    (`docs/results/planner.md`), and planning all would take longer than the step's other decisions together. Of
    documents over more ranks than that, woven parts are many and short, and each of the candidates is the cheapest in
    some batches.

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
    alike = not weighted and not topology.memory_tokens
    compared_tokens = COMPARED_RANKS * tokens_per_rank
    if alike and ranks > COMPARED_RANKS and max(doc_lengths, default=0) <= compared_tokens:
        return woven_layout(
            doc_lengths, tokens_per_rank, ranks,
            topology=topology, tolerance=tolerance, window=window, row_keys=objective.row_keys,
        )  # fmt: skip
    candidates = layout_candidates(
        doc_lengths, tokens_per_rank, ranks,
        topology=topology, tolerance=tolerance, window=window, row_keys=objective.row_keys,
    )  # fmt: skip
    best: tuple[tuple[int, int], Layout] | None = None
    refused: PlanError | None = None
    for layout in candidates.values():
        try:
            plan = plan_balanced(layout, topology, shape, tolerance, window, objective)
        except PlanError as error:
            refused = error
            continue
        cost = _work_over_promise(plan) if plan.memory_limited else 0, weighted_bytes_sent(plan, objective)
        if best is None or cost < best[0]:
            best = cost, layout
    if best is None:
        raise PlanError(f"no layout fits: {refused}")
    return best[1]


def _work_over_promise(plan: DispatchPlan) -> int:
    """By how much the most overloaded server is above what was promised."""
    rows = RowWork.for_documents(plan.layout.doc_lengths, plan.window, plan.row_keys)
    work = np.zeros(plan.topology.servers, dtype=np.int64)
    np.add.at(work, plan.tasks.server, rows.of_array(plan.tasks.start, plan.tasks.end))
    promise = work_caps(
        int(work.sum()), plan.topology, plan.tolerance, rows.longest_row(plan.layout.doc_lengths)
    ).promise  # fmt: skip
    return int((work - np.asarray(promise)).max())


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
    rows = RowWork.for_documents(columns, window, row_keys)
    work, longest_row = rows.total(columns), rows.longest_row(columns)
    shares = work_caps(work, topology, 0.0, longest_row).target
    caps = work_caps(work, topology, tolerance, longest_row).target
    capacity = sum(caps)
    loom = _Loom(columns, rows, cheap_cut=tokens_per_rank // CHEAP_CUT)
    parts_by_rank: list[list[_Part]] = [[] for _ in range(ranks)]
    # With a window the keys that a tail needs are just before it, where its head is of no use.
    memory = topology.memory_tokens if window is None and topology.memory_tokens else [None] * ranks
    for place, rank in enumerate(sorted(range(ranks), key=lambda rank: (-caps[rank], rank))):
        capacity -= caps[rank]  # what the ranks after this one can take
        least = min(caps[rank], max(loom.work - capacity, 2 * shares[rank] - caps[rank]))
        parts_by_rank[rank] = loom.fill(-(-loom.tokens // (ranks - place)), least, caps[rank], memory[rank])
    return _layout_of(_neighbours_together(parts_by_rank, list(zip(caps, memory, strict=True))))


class _Part(NamedTuple):
    """Tokens [start, end) of a document and their work. Ordered by end: the work of its last token."""

    end: int
    start: int
    doc: int
    work: int


class _Shelf:
    """Parts ascending by end, from `first` on: light ones first, dense ones last. They are taken from both ends.

    `tokens[i]` and `work[i]` are running totals of what stands before `parts[i]`, from an arbitrary origin, for as many
    parts as were asked for. Slots before `first` are free: what was taken there makes room for what is left of it.
    """

    def __init__(self, doc_lengths: IntArray, doc_work: IntArray) -> None:
        doc = np.argsort(doc_lengths, kind="stable")
        length, work = doc_lengths[doc], doc_work[doc]
        self.parts = list(map(_Part._make, zip(length.tolist(), repeat(0), doc.tolist(), work.tolist(), strict=False)))
        self.first = 0
        self.tokens: list[int] = [0, *np.cumsum(length).tolist()]
        self.work: list[int] = [0, *np.cumsum(work).tolist()]

    def reach(self, tokens: int) -> None:
        """Extend the totals to more than so many tokens, or to the last part."""
        parts, totals, work = self.parts, self.tokens, self.work
        last, amount, beyond = totals[-1], work[-1], totals[self.first] + tokens
        for index in range(len(totals) - 1, len(parts)):
            if last > beyond:
                break
            end, start, _, part_work = parts[index]
            last += end - start
            amount += part_work
            totals.append(last)
            work.append(amount)

    def pop_dense(self) -> _Part:
        """Take the last part."""
        dense = self.parts.pop()
        del self.tokens[len(self.parts) + 1 :], self.work[len(self.parts) + 1 :]
        return dense

    def pop_light(self, whole: int, further: int | None) -> list[_Part]:
        """Take the parts up to index `whole`, and then the one at index `further`."""
        parts, taken = self.parts, self.parts[self.first : whole]
        self.first = whole
        if further is not None:
            taken.append(parts[further])
            parts[whole + 1 : further + 1] = parts[whole:further]
            self.first += 1
            self._count_back(further + 1)
        return taken

    def insert(self, part: _Part) -> None:
        """Put a part where it belongs: near the first one into a free slot, near the last one by making room."""
        parts, first = self.parts, self.first
        index = bisect_right(parts, part, first)
        if first and index - first <= HEADS_TRIED and index < len(self.tokens):
            parts[first - 1 : index - 1] = parts[first:index]
            parts[index - 1] = part
            self.first -= 1
            self._count_back(index)
        else:
            parts.insert(index, part)
            del self.tokens[index + 1 :], self.work[index + 1 :]

    def _count_back(self, index: int) -> None:
        """Renew the totals before `index`. Where there are none yet, those from `first` on begin anew."""
        tokens, work, first = self.tokens, self.work, self.first
        if index >= len(tokens):
            del tokens[first + 1 :], work[first + 1 :]
            return
        for i in range(index - 1, first - 1, -1):
            end, start, _, amount = self.parts[i]
            tokens[i], work[i] = tokens[i + 1] - (end - start), work[i + 1] - amount


class _Loom:
    """What is not placed yet, and how many tokens and how much work that is."""

    def __init__(self, doc_lengths: IntArray, rows: RowWork, *, cheap_cut: int) -> None:
        self.rows, self.cheap_cut = rows, cheap_cut
        self.shelf = _Shelf(doc_lengths, rows.of_array(np.zeros_like(doc_lengths), doc_lengths))
        self.tokens, self.work = self.shelf.tokens[-1], self.shelf.work[-1]

    def part(self, start: int, end: int, doc: int) -> _Part:
        return _Part(end, start, doc, self.rows.of(start, end))

    def fill(self, tokens: int, least: int, most: int, memory: int | None = None) -> list[_Part]:
        """Take `tokens` (or all that is left), with work just below `most`, or at least `least` if that saves a cut.

        With `memory`, not more earlier keys of one document are missing than that, where its head is left to take.
        """
        taken: list[_Part] = []
        shelf = self.shelf
        while tokens > 0 and shelf.first < len(shelf.parts):
            dense = shelf.pop_dense()
            mix = _Mix(self, dense, tokens, memory)
            longest = mix.weigh(mix.longest)
            if mix.takes_all and longest.work < least:
                found, count, work = [dense], mix.longest, dense.work  # too little even so: the next one joins it
            else:
                filling = self._best_filling(mix, longest, least, most)
                found, count, work = mix.take(filling), filling.tokens, filling.work
            taken += found
            tokens, least, most = tokens - count, least - work, most - work
            self.tokens, self.work = self.tokens - count, self.work - work
        return taken

    def _best_filling(self, mix: _Mix, longest: _Filling, least: int, most: int) -> _Filling:
        """Of the mix, the filling that suits."""
        filling = self._tail(mix, longest, least, most)
        if not least <= filling.work <= most:
            mix.cut_any = True
            filling = self._tail(mix, mix.weigh(mix.longest), least, most)
        return filling

    def _tail(self, mix: _Mix, longest: _Filling, least: int, most: int) -> _Filling:
        """As much of the dense part as suits the mix best: all of it or none, rather than a cut."""
        if longest.work <= most:
            return longest
        none = mix.weigh(0)
        if none.work >= least:
            return none
        guess = longest.tail * (most - none.work) // (longest.work - none.work)
        return _longest_within(mix, none, guess, most)


class _Filling(NamedTuple):
    """What a mix is made of: the last `tail` tokens of its dense part, whole light parts up to the index `whole`,
    `cut` tokens of the one at index `further`, and the first `head` tokens of the dense part.

    `tokens` and `work` are those of all together. `rise` is by how much the work grows with one more token of the dense
    part, as long as the filling stays of the same kind (without a window).
    """

    tail: int
    whole: int
    further: int
    cut: int
    head: int
    tokens: int
    work: int
    rise: int


class _Mix:
    """The last tokens of one dense part, filled up with the lightest parts, then with the head of the dense one.

    Light parts go in whole, and the next one cut if that is cheap; with `cut_any`, the head of the part that begins
    first, however long. With `memory`, so much of the dense part's head goes in before the light ones that its tail
    needs no more keys from elsewhere. If the dense part ends up in the mix with all its tokens, and light ones are too
    long to be cut, the mix may hold fewer tokens than asked for.
    """

    def __init__(self, loom: _Loom, dense: _Part, tokens: int, memory: int | None) -> None:
        self.loom, self.dense, self.tokens, self.shelf = loom, dense, tokens, loom.shelf
        self.memory = dense.end if memory is None else memory
        self.longest = min(tokens, dense.end - dense.start)
        self.takes_all = self.longest == dense.end - dense.start
        self.cut_any = False
        self.heads: dict[int, int] = {}
        self.shelf.reach(tokens)

    def weigh(self, count: int) -> _Filling:
        """The mix with the last `count` tokens of the dense part."""
        end, start, _, _ = self.dense
        shelf, work_of, room = self.shelf, self.loom.rows.of, self.tokens - count
        needed = end - count - self.memory if count else 0
        own = min(needed, room, end - count - start) if needed > 0 else 0  # keys that the tail must find here
        room -= own
        parts, first, before = shelf.parts, shelf.first, shelf.tokens
        whole = bisect_right(before, before[first] + room, first) - 1
        light_tokens = before[whole] - before[first]
        room -= light_tokens
        work = shelf.work[whole] - shelf.work[first] + work_of(end - count, end)
        further, cut = whole, 0
        filled = parts[whole - 1].end if whole > first else 0  # position of the filling's last token, plus one
        if room and whole < len(parts):
            if self.cut_any:
                further = self._first_to_begin(whole)
            light_end, light_start, _, _ = parts[further]
            if self.cut_any or light_end - light_start <= self.loom.cheap_cut:
                cut = min(room, light_end - light_start)
                filled = light_start + cut
                work += work_of(light_start, filled)
        head = min(room - cut + own, end - count - start)
        if head:
            filled = start + head
            work += work_of(start, filled)
        tokens = count + light_tokens + cut + head
        return _Filling(count, whole, further, cut, head, tokens, work, end - count - filled)

    def _first_to_begin(self, whole: int) -> int:
        """Of the parts from index `whole` on, the one that begins first."""
        found = self.heads.get(whole)
        if found is None:
            starts = [part.start for part in self.shelf.parts[whole : whole + HEADS_TRIED]]
            found = self.heads[whole] = whole + starts.index(min(starts))
        return found

    def take(self, filling: _Filling) -> list[_Part]:
        """The mix so filled; the loom keeps what is left of its parts."""
        tail, whole, further, cut, head, _, _, _ = filling
        end, start, doc, _ = self.dense
        part, shelf = self.loom.part, self.shelf
        left = [part(start + head, end - tail, doc)]
        taken = shelf.pop_light(whole, further if cut else None)
        if cut:
            light = taken.pop()
            taken.append(part(light.start, light.start + cut, light.doc))
            left.append(part(light.start + cut, light.end, light.doc))
        taken += [part(end - tail, end, doc), part(start, start + head, doc)]
        for remainder in left:
            if remainder.start < remainder.end:
                shelf.insert(remainder)
        return [piece for piece in taken if piece.start < piece.end]


def _longest_within(mix: _Mix, none: _Filling, guess: int, most: int) -> _Filling:
    """As many tokens of the dense part as hold at most this work; of a long document, cut at a multiple of the block.

    Nothing of the dense part is known to hold less, all of it more. A tail one token longer, and its filling one
    shorter, adds the same whatever the length, as long as the filling stays of its kind: one step leads to the answer
    within a kind, and says that it is one. The rest is halving.
    """
    end, linear = mix.dense.end, mix.loom.rows.window is None
    block = BLOCK_TOKENS if end >= SHORT_DOCUMENT_TOKENS else 1
    fits, over = -(-end // block), -(-(end - mix.longest) // block) - 1  # the cut, in blocks: none of it, too much
    best = none
    steps = 0
    while fits - over > 1:
        steps += 1
        middle = min(max(-((guess - end) // block), over + 1), fits - 1)
        found = mix.weigh(end - middle * block)
        if found.work <= most:
            fits, best = middle, found
            if linear and (found.head or found.cut) >= block and found.work + block * found.rise > most:
                return best
        else:
            over = middle
        if steps < GUESSES and found.rise > 0:
            guess = found.tail + (most - found.work) // found.rise
        else:
            guess = end - (fits + over) // 2 * block
    return best


def _neighbours_together(
    parts_by_rank: list[list[_Part]], limits: Sequence[tuple[int, int | None]]
) -> list[list[_Part]]:
    """Ranks that share a long document next to each other, hence in one node, where ranks are alike in what they may do
    and hold."""
    arranged = list(parts_by_rank)
    for limit in set(limits):
        ranks = [rank for rank, own in enumerate(limits) if own == limit]
        densest = [max(parts_by_rank[rank], default=_Part(0, 0, 0, 0)) for rank in ranks]
        order = sorted(range(len(ranks)), key=lambda i: (densest[i].doc, densest[i].end, i))
        for rank, source in zip(ranks, order, strict=True):
            arranged[rank] = parts_by_rank[ranks[source]]
    return arranged


def _layout_of(parts_by_rank: list[list[_Part]]) -> Layout:
    """Parts of a rank in order of document and position, neighbouring ones as one shard."""
    ranks = len(parts_by_rank)
    counts = [len(parts) for parts in parts_by_rank]
    numbers = chain.from_iterable(chain.from_iterable(parts_by_rank))
    table = np.fromiter(numbers, dtype=np.int64, count=len(_Part._fields) * sum(counts)).reshape(-1, len(_Part._fields))
    rank = np.repeat(np.arange(ranks, dtype=np.int64), counts)
    end, start, doc = table[:, 0], table[:, 1], table[:, 2]
    length = np.bincount(doc, weights=end - start).astype(np.int64)
    place = (np.cumsum(length) - length)[doc] + start  # on one line of all tokens
    order = np.argsort(rank * (int(length.sum()) + 1) + place, kind="stable")
    end, start, doc, rank = end[order], start[order], doc[order], rank[order]
    opens = np.ones(len(start), dtype=np.bool_)
    opens[1:] = (rank[1:] != rank[:-1]) | (doc[1:] != doc[:-1]) | (start[1:] != end[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start))[: len(first)] - 1
    return Layout.from_columns(doc[first], start[first], end[last] - start[first], rank[first], ranks=ranks)
