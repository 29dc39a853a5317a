"""The policy `balanced`: every server's work within the tolerance, for few bytes.

Servers above their cap are donors, servers below it have room. The donor with the largest surplus goes first and gives
a query range of one of its documents to one receiver; then the next. Four things make it cheap:

- bytes grow with the square root of the work moved (`ranges`), so a move is as large as the donor's surplus and the
  receiver's room allow, and is scored together with what the rest of the surplus would cost, poured into rooms as large
  as the largest;
- the receiver is the one whose room fits the surplus best, or else the one with most room: few rooms are split;
- servers that hold keys of the document already (their own shard, or an earlier task) are tried too;
- a receiver that many small surpluses fit would become the busiest: past the bytes that somebody must send or receive
  anyway, the next larger room is taken.

Three rounds make the balance a promise. The first cuts at kernel blocks and aims at (1 + tolerance) × share. Where
blocks are too coarse for the room that is left, the second cuts anywhere. Rows being indivisible, even that may miss
the aim when the tolerance is less than a row; the third aims at share + longest row, which always succeeds
(`WorkCaps`).

All decisions are made with integers and ties are broken by index: the same lengths give the same plan everywhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.tasks import CATasks
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError
from steelyard.planner.blocks import BLOCK_TOKENS, SHORT_DOCUMENT_TOKENS, blocks_suffice
from steelyard.planner.ledger import NO_LIMIT, Ledger
from steelyard.planner.objective import Objective
from steelyard.planner.ranges import exact_ends, fit_range
from steelyard.planner.shares import work_caps
from steelyard.planner.work import RowWork

RANGES_TRIED = 6  # the donor's longest ones; shorter ones cost more per pair
LEAST_RANGE = 2  # and none with less than half of what could be moved at once: a large one must follow, no cheaper
HOLDERS_TRIED = 4  # servers that hold keys of the document, those with most room
FITS_TRIED = 16  # rooms that fit a surplus, smallest first
ROOMS_TRIED = 4  # the largest ones, where memory is capped and nothing better fits
NEARLY = 5  # 4/5 of a surplus are placed rather than making a server the busiest with all of it
LEAST_ROOM = 16  # a holder is tried if its room is 1/16 of what could be moved: crumbs make tasks, not balance
NOTICEABLE = 512  # a move that may save less than 1/512 of the best one's score is not looked at
WEIGHT_UNITS = 1024  # resolution of `Topology.intra_node_weight`
DEFAULT_OBJECTIVE = Objective()


def weight_units(topology: Topology) -> int:
    """What a byte inside a node counts, `WEIGHT_UNITS` being one between nodes."""
    return round(topology.intra_node_weight * WEIGHT_UNITS)


def plan_balanced(
    layout: Layout,
    topology: Topology,
    shape: AttentionShape,
    tolerance: float,
    window: int | None = None,
    objective: Objective = DEFAULT_OBJECTIVE,
) -> DispatchPlan:
    """Balance the work of all servers within `tolerance`, moving few bytes: work and bytes as `objective` counts them.

    Raises:
        PlanError: under its memory cap a server cannot receive the keys that queries living there need, and no server
            that has those keys can take the queries.
    """
    rows = RowWork.for_documents(layout.doc_lengths, window, objective.row_keys)
    ledger = Ledger(layout, topology, rows)
    total, longest_row = sum(ledger.work), rows.longest_row(layout.doc_lengths)
    caps = work_caps(total, topology, tolerance, longest_row)
    balancing = _Balancing(ledger, topology, shape, objective)
    balancing.cuts_short = not blocks_suffice(total, topology.servers, tolerance, longest_row, rows.row_keys)
    balancing.settle_spanning_shards(caps.target)
    for aim, block in ((caps.target, BLOCK_TOKENS), (caps.target, 1), (caps.promise, 1)):
        balancing.relieve(aim, block)
        if not _overloaded(ledger.work, caps.target):
            break
    unfinished = _overloaded(ledger.work, caps.promise)
    assert not unfinished or topology.memory_tokens, "without memory caps the promised caps are always reached"
    tasks: CATasks = ledger.tasks()
    return DispatchPlan(
        layout, tasks, topology, shape, tolerance, "balanced", window,
        memory_limited=unfinished, row_keys=rows.row_keys,
    )  # fmt: skip


def _overloaded(work: list[int], caps: list[int]) -> bool:
    return any(done > cap for done, cap in zip(work, caps, strict=True))


class _Move(NamedTuple):
    """Queries [start, end) of the donor's range `kept` to `server`. Of equal scores the one tried first stays."""

    score: int
    kept: int
    start: int
    end: int
    server: int


class _Balancing:
    """The rounds.

    `room_of` says how much work each server below its cap may take. `rooms` lists (room, server) of these, ascending;
    where memory is capped, a room there is no larger than what the server has memory for: to count on more would make
    every move look as if the rest could follow easily, down to moves of single rows.
    """

    def __init__(self, ledger: Ledger, topology: Topology, shape: AttentionShape, objective: Objective) -> None:
        self.ledger, self.window = ledger, ledger.window
        self.prices, self.busy_prices = objective.prices(shape), objective.busy_prices(shape)
        self.doc_lengths = ledger.layout.doc_lengths.tolist()
        self.memory_bound = bool(topology.memory_tokens)
        self.longest_row = ledger.rows.longest_row(ledger.layout.doc_lengths)
        self.near_weight = weight_units(topology)
        self.node_size = topology.node_size
        self.weighted = self.near_weight < WEIGHT_UNITS
        self.caps: list[int] = []
        self.rooms: list[tuple[int, int]] = []
        self.room_of: dict[int, int] = {}
        self.cuts_short = False  # short documents may be cut, at any row, before all else was tried
        self.busy_bytes = 0  # received in the dispatch phase; more than this makes a server the busiest

    # --- documents that span ranks ---------------------------------------------------------------------------------

    def settle_spanning_shards(self, caps: list[int]) -> None:
        """Decide where each part of a cut document starts out: at home, or with a server that has its keys anyway.

        A short tail is cheaper to compute where the long part before it is than to bring all earlier keys to it.
        """
        for shard in self.ledger.spanning_shards():
            self._settle(shard, caps)

    def _settle(self, shard: int, caps: list[int]) -> None:
        ledger = self.ledger
        doc, start, home = ledger.doc[shard], ledger.start[shard], ledger.home[shard]
        length = ledger.length[shard]
        end = start + length
        keys_at_home = ledger.new_keys(doc, home, start, end)
        fits_home = keys_at_home <= ledger.memory_left[home]
        best, place = (self.prices.beta * keys_at_home, home) if fits_home else (NO_LIMIT, home)
        keys_there, query_bytes = keys_at_home, self.prices.alpha * length  # what another server costs at least
        if query_bytes < best and (length < keys_at_home or not fits_home):
            for server in ledger.holders.get(doc, ()):
                if server == home:
                    continue
                keys = ledger.new_keys(doc, server, start, end)
                cost = query_bytes + self.prices.beta * keys
                if cost >= best or keys + length > ledger.memory_left[server]:
                    continue
                cost += self.prices.range_bytes(self._surplus_made(shard, server, caps))
                if cost < best:
                    best, place, keys_there = cost, server, keys
        if best == NO_LIMIT:
            raise PlanError(
                f"rank {home} may still receive {ledger.memory_left[home]} tokens, but tokens {start} … {end} of "
                f"document {doc} need {keys_at_home} earlier keys there; raise its memory_tokens or cut the document "
                "into fewer parts"
            )
        if place != home:
            ledger.place_whole(shard, place)
        ledger.receive(doc, place, end, queries=length if place != home else 0, keys=keys_there)

    def _surplus_made(self, shard: int, server: int, caps: list[int]) -> int:
        """How much the surplus of all servers together grows if the shard moves from its home to `server`."""
        work, home, amount = self.ledger.work, self.ledger.home[shard], self.ledger.shard_work[shard]
        there = max(0, work[server] + amount - caps[server]) - max(0, work[server] - caps[server])
        here = max(0, work[home] - caps[home]) - max(0, work[home] - amount - caps[home])
        return max(0, there - here)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def relieve(self, caps: list[int], block: int) -> None:
        """Move ranges cut at multiples of `block` until no server is above its cap, or nothing more fits."""
        work, self.caps = self.ledger.work, caps
        self.room_of = {j: cap - done for j, (cap, done) in enumerate(zip(caps, work, strict=True)) if cap > done}
        self.rooms = sorted((self._usable(j), j) for j in self.room_of)
        donors = [(cap - done, i) for i, (cap, done) in enumerate(zip(caps, work, strict=True)) if done > cap]
        self.ledger.become_donors([i for _, i in donors])
        heapq.heapify(donors)
        self.busy_bytes = self._unavoidable_bytes(-donors[0][0]) if donors and self.rooms else 0
        while donors and self.rooms:
            _, donor = heapq.heappop(donors)
            move = self._best_move(donor, block)
            if move is None:
                continue
            usable = self._usable(move.server)
            self.ledger.move(donor, move.kept, move.start, move.end, move.server)
            self._update_room(move.server, usable)
            if work[donor] > caps[donor]:
                heapq.heappush(donors, (caps[donor] - work[donor], donor))

    def _unavoidable_bytes(self, surplus: int) -> int:
        """Bytes that some rank sends or receives in the dispatch phase anyway: home keys, or to give `surplus` away."""
        busiest = max(self._bytes_in(server) for server in range(self.ledger.servers))
        sent = 0
        for room, _ in reversed(self.rooms):
            sent += self.busy_prices.range_bytes(min(room, surplus))
            surplus -= room
            if surplus <= 0:
                break
        return max(busiest, sent, self.busy_prices.range_bytes(self.rooms[-1][0]))

    def _bytes_in(self, server: int) -> int:
        prices, ledger = self.busy_prices, self.ledger
        return prices.alpha * ledger.queries_in[server] + prices.beta * ledger.keys_in[server]

    def _fit(self, rooms: list[tuple[int, int]], need: int, keys: int) -> int:
        """The smallest room for `need`, on a server that does not become the busiest by it, or else one that is nearly
        large enough; otherwise the least busy server of those or, if none has room for `need`, the largest room. At
        least so many `keys` come along: all that a rank can give away may lie deep in its documents."""
        first = bisect_left(rooms, (need + need // 64, -1))  # a little more, for rounding up to blocks
        least = self.busy_prices.beta * keys
        spare = self.busy_bytes - max(least, self.busy_prices.range_bytes(need))
        for _, server in rooms[first : first + FITS_TRIED]:
            if self._bytes_in(server) <= spare:
                return server
        if first == len(rooms):
            return rooms[-1][1]
        for room, server in reversed(rooms[max(0, first - FITS_TRIED) : first]):
            if NEARLY * room < (NEARLY - 1) * need:
                break
            if self._bytes_in(server) + max(least, self.busy_prices.range_bytes(room)) <= self.busy_bytes:
                return server
        return min(rooms[first : first + FITS_TRIED], key=lambda room: self._bytes_in(room[1]))[1]

    def _usable(self, server: int) -> int:
        """How much of a server's room it has memory for, about: all of it where memory is not capped."""
        room = self.room_of[server]
        if not self.memory_bound:
            return room
        tokens = self.ledger.memory_left[server]
        return min(room, self.prices.work_within(tokens), tokens * self.longest_row // 2)

    def _update_room(self, server: int, listed: int) -> None:
        """After a move to `server`, whose room was listed as so much."""
        del self.rooms[bisect_left(self.rooms, (listed, server))]
        room = self.caps[server] - self.ledger.work[server]
        if room > 0:
            self.room_of[server] = room
            insort(self.rooms, (self._usable(server), server))
        else:
            del self.room_of[server]

    def _best_move(self, donor: int, block: int) -> _Move | None:
        """The move after which the rest of the donor's surplus is cheapest to move; None if nothing fits anywhere."""
        need = self.ledger.work[donor] - self.caps[donor]
        kept = self.ledger.kept[donor]
        count = len(kept)
        least = min(need, self.rooms[-1][0], kept[-1].work) // LEAST_RANGE
        longest = [i for i in range(count - 1, max(-1, count - 1 - RANGES_TRIED), -1) if kept[i].work >= least]
        best: _Move | None = None
        for server in self._receivers(donor, need, longest):
            for index in longest:
                if best is None or not self._hopeless(best, donor, index, server, need):
                    best = self._cheaper(best, donor, index, server, need, block)
        if best is not None:
            return best
        # Nothing that was tried fits: blocks may be larger than the surplus. What does not fit into the largest room
        # fits nowhere, but for memory caps.
        lightest = min(kept, key=lambda part: self.ledger.rows.of(part.start, min(part.end, part.start + block)))
        one_block = self.ledger.rows.of(lightest.start, min(lightest.end, lightest.start + block))
        largest = [server for _, server in reversed(self.rooms[-ROOMS_TRIED if self.memory_bound else -1 :])]
        keys = lightest.start if self.window is None else 0
        for server in (self._fit(self.rooms, max(need, one_block), keys), *largest):
            for index in range(count):
                best = self._cheaper(best, donor, index, server, need, block)
            if best is not None:
                return best
        return None

    def _hopeless(self, best: _Move, donor: int, kept: int, server: int, need: int) -> bool:
        """Whether no range of `kept` can score noticeably lower than `best` on a server without keys of its document.

        The closed form says so without cutting anything; most of the donor's ranges are equally good.
        """
        if self.window is not None:
            return False
        ledger = self.ledger
        amount, _, _, shard = ledger.kept[donor][kept]
        doc = ledger.doc[shard]
        if (doc, server) in ledger.prefix or (
            ledger.cut[doc] and ((doc, donor) in ledger.own or (doc, server) in ledger.own)
        ):
            return False
        amount = min(need, amount, self.room_of[server])
        least = self.prices.range_bytes(amount)
        if self.weighted:
            least = self._near(least, donor, server)
        if need > amount:
            least += self._rest(need - amount)
        return best.score * NOTICEABLE <= least * (NOTICEABLE + 1)

    def _receivers(self, donor: int, need: int, longest: list[int]) -> list[int]:
        """The best fit or else the one with most room, the same within the node, and holders of keys."""
        starts = [self.ledger.kept[donor][index].start for index in longest]
        keys = min(starts, default=0) if self.window is None else 0
        receivers = [self._fit(self.rooms, need, keys)]
        if self.weighted and self.node_size > 1:
            receivers += self._best_in_node(donor, need, keys)
        least = min(need, self.rooms[-1][0]) // LEAST_ROOM
        kept, room_of, seen = self.ledger.kept[donor], self.room_of, {donor, *receivers}
        for doc in dict.fromkeys([self.ledger.doc[kept[index].shard] for index in longest]):
            holders = [
                (-room_of[j], j)
                for j in self.ledger.holders.get(doc, ())
                if j in room_of and room_of[j] > least and j not in seen
            ]
            chosen = [j for _, j in sorted(holders)[:HOLDERS_TRIED]]
            receivers += chosen
            seen.update(chosen)
        return receivers

    def _best_in_node(self, donor: int, need: int, keys: int) -> list[int]:
        first = donor // self.node_size * self.node_size
        rooms = sorted((self._usable(j), j) for j in range(first, first + self.node_size) if j in self.room_of)
        return [self._fit(rooms, need, keys)] if rooms else []

    def _cheaper(self, best: _Move | None, donor: int, kept: int, server: int, need: int, block: int) -> _Move | None:
        """`best`, or a cheaper range of the donor's `kept` for this server."""
        ledger = self.ledger
        amount, low, high, shard = ledger.kept[donor][kept]
        doc, room = ledger.doc[shard], self.room_of[server]
        if block > 1 and self.doc_lengths[doc] < SHORT_DOCUMENT_TOKENS:
            if not self.cuts_short:
                whole = (low, high, amount)
                fits = amount <= room and (not self.memory_bound or self._remembers(donor, kept, server, whole))
                return self._priced(best, donor, kept, server, need, whole) if fits else best
            block = 1
        if self.memory_bound and server != ledger.home[shard]:
            room = min(room, self._most_received(doc, server))
        refused = True
        while refused and room > 0:
            refused, allowed = False, False
            for end in self._ends(doc, server, low, high, min(need, room, amount), block):
                found = fit_range(low, high, end, need, room, block, ledger.rows)
                if found is None:
                    continue
                if self.memory_bound and not self._remembers(donor, kept, server, found):
                    refused = True
                    continue
                allowed = True
                best = self._priced(best, donor, kept, server, need, found)
            refused = refused and not allowed
            room //= 2  # memory may refuse a range and allow a smaller one
        return best

    def _remembers(self, donor: int, kept: int, server: int, found: tuple[int, int, int]) -> bool:
        """Whether the server has memory for what it would receive."""
        ledger, (start, end, _) = self.ledger, found
        shard = ledger.kept[donor][kept].shard
        tokens = ledger.new_keys(ledger.doc[shard], server, start, end)
        if server != ledger.home[shard]:
            tokens += end - start
        return tokens <= ledger.memory_left[server]

    def _most_received(self, doc: int, server: int) -> int:
        """No range of `doc` that comes to a server from elsewhere, within its memory, has more work than this."""
        ledger, tokens = self.ledger, self.ledger.memory_left[server]
        if (doc, server) in ledger.prefix or (doc, server) in ledger.own:
            return tokens * self.longest_row
        # m queries and k >= m keys have at most m·k − m(m − 1)/2 pairs: for m + k = tokens at most (tokens + 1)² / 6.
        return (tokens + 1) ** 2 // 6 + tokens * ledger.rows.row_keys

    def _ends(self, doc: int, server: int, low: int, high: int, wanted: int, block: int) -> list[int]:
        """Ends to try: the closed form's or that of the keys the server has, the later one; ends of its own shards."""
        if self.window is not None:
            return [high]
        ends = [max(self.ledger.prefix.get((doc, server), 0), self.prices.best_end(wanted))]
        if self.ledger.cut[doc]:
            ends += [last for _, last in self.ledger.own.get((doc, server), ()) if low < last < high]
        if block == 1:
            ends += exact_ends(low, high, self.prices, wanted)
        return ends

    def _priced(
        self, best: _Move | None, donor: int, kept: int, server: int, need: int, found: tuple[int, int, int]
    ) -> _Move | None:
        """`best`, or the move of the range `found` if it scores lower."""
        ledger = self.ledger
        start, end, amount = found
        whole = ledger.kept[donor][kept]
        doc, home = ledger.doc[whole.shard], ledger.home[whole.shard]
        keys, queries = ledger.new_keys(doc, server, start, end), end - start
        score = self.prices.beta * keys
        if donor == home:
            score += self.prices.alpha * queries
        elif server == home:
            score -= self.prices.alpha * queries
        if queries == whole.end - whole.start and ledger.cut[doc]:
            score -= self.prices.beta * ledger.freed_keys(donor, whole)
        if self.weighted:
            score = self._near(score, donor, server)
        if need > amount:
            score += self._rest(need - amount)
        if best is not None and best.score <= score:
            return best
        return _Move(score, kept, start, end, server)

    def _near(self, cost: int, donor: int, server: int) -> int:
        """`cost`, or less if both are in one node."""
        if server // self.node_size == donor // self.node_size:
            return cost * self.near_weight // WEIGHT_UNITS
        return cost

    def _rest(self, surplus: int) -> int:
        """What it costs to move the rest of a surplus, poured into rooms as large as the largest."""
        largest = max(1, self.rooms[-1][0])
        if surplus <= largest:
            return self.prices.range_bytes(surplus)
        rooms_filled, rest = divmod(surplus, largest)
        return rooms_filled * self.prices.range_bytes(largest) + self.prices.range_bytes(rest)
