"""What the `cpu` back end computes together, from the task table alone: no tensor is touched here.

Three steps make few large products of many small tasks:

- tasks that continue each other, in their query rows and in their keys, are one task (`joined`);
- short tasks whose keys are their own rows are gathered with others of the same length (`short_squares`);
- of the rest, tasks of one document share the keys before the first of them. They are gathered into blocks (`blocks`),
  and the staircase of (query, key) pairs that a block covers is cut into rectangles, largest first, down to the
  diagonal (`Block.pieces`). A task alone would read the keys, and add to their gradients, once for its few queries.

With a sliding window, a block that reaches beyond it is cut into strips of queries instead, each with the keys that any
query of the strip sees; a mask at either end of these keys does the rest.

K: key/value heads, G: query heads that share one, R: queries of a block, N: keys, H = K · G, D: head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from steelyard.attention.tasks import selected_tasks
from steelyard.domain.arrays import BoolArray, IntArray
from steelyard.domain.plan import KernelTasks

Stores: TypeAlias = Sequence[torch.Tensor]
# Blocks begin at multiples of this many rows of their task, where the products are a little faster.
_ROW_UNIT = 32


class Keys(NamedTuple):
    """A run of key rows of one store."""

    store: int
    rows: slice

    def of(self, stores: Stores) -> torch.Tensor:
        """These rows of a (T, K, D) store as (K, N, D), a view."""
        return stores[self.store][self.rows].transpose(0, 1)


class Range(NamedTuple):
    """Consecutive queries of one document: their rows in a store, and how many keys come before the first of them."""

    store: int
    rows: slice
    before: int

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)


class Piece(NamedTuple):
    """Queries `rows` of a block against `keys`; causal: the queries are the last rows of the last run of keys.

    fresh: no earlier piece of the block has these queries.
    edge: of a strip under a sliding window: among its first keys, with the first of them numbered `edge.start` and
        `edge.stop` the number of queries, query i sees those from number i on; none of them if it is empty (then all
        queries see all of the first keys). None: no strip under a window.
    """

    rows: slice
    keys: tuple[Keys, ...]
    causal: bool
    fresh: bool
    edge: slice | None = None


class Cut(NamedTuple):
    """How the queries of one range are cut at the diagonal.

    strip: queries of a causal piece, at most; the keys before the range are a piece of their own.
    fused: ranges of at most so many queries (and at most `strip`) are one piece instead, with all their keys.
    whole_square: ranges of at least so many queries have a single causal piece, over their own rows alone.
    window: keys that a query sees at most, its own included; None: all.
    """

    strip: int
    fused: int
    whole_square: int
    window: int | None = None


@dataclass(frozen=True)
class Block:
    """Ranges of one document, in order of position, and all keys that the last of them sees."""

    ranges: tuple[Range, ...]
    runs: tuple[Keys, ...]

    @property
    def rows(self) -> int:
        return sum(part.length for part in self.ranges)

    def of(self, stores: Stores, kv_heads: int) -> torch.Tensor:
        """The block's rows of (T, H, D) stores as (K, G, R, D): a view of a single range, a copy of several."""
        views = [by_head(stores[part.store][part.rows], kv_heads) for part in self.ranges]
        return views[0] if len(views) == 1 else torch.cat(views, dim=2)

    def put(self, x_KGRD: torch.Tensor, stores: Stores) -> None:
        """The reverse of `of`: write the block's rows."""
        first = 0
        for part in self.ranges:
            target = by_head(stores[part.store][part.rows], len(x_KGRD))
            target.copy_(x_KGRD[:, :, first : first + part.length])
            first += part.length

    def pieces(self, shape: Cut) -> Iterator[Piece]:
        """Cover every visible (query, key) pair once; pieces with the same queries come in the order of their keys."""
        offsets = np.cumsum([0, *(part.length for part in self.ranges)]).tolist()
        last = self.ranges[-1]
        if shape.window is not None and last.before + last.length > shape.window:
            for offset, part in zip(offsets, self.ranges, strict=False):
                yield from self._strips(offset, part, shape.window, shape.strip)
            return
        yield from self._staircase(offsets, 0, len(self.ranges), 0, shape)

    def _strips(self, offset: int, part: Range, window: int, strip: int) -> Iterator[Piece]:
        """Pieces of one range under a window, each with all keys that its queries see."""
        for start in range(0, part.length, strip):
            stop = min(start + strip, part.length)
            from_window = part.before + start - window + 1
            low = max(0, from_window)
            yield Piece(
                slice(offset + start, offset + stop),
                self._keys(low, part.before + stop),
                causal=True,
                fresh=True,
                edge=slice(min(low - from_window, stop - start), stop - start),
            )

    def _staircase(self, offsets: list[int], low: int, high: int, seen: int, shape: Cut) -> Iterator[Piece]:
        """Pieces of the ranges [low, high), whose first `seen` keys are done."""
        before = self.ranges[low].before
        if high - low == 1:
            yield from self._diagonal(offsets[low], self.ranges[low], seen, shape)
            return
        if before > seen:
            yield Piece(slice(offsets[low], offsets[high]), self._keys(seen, before), causal=False, fresh=seen == 0)

        def rectangle(split: int) -> int:
            return (offsets[high] - offsets[split]) * (self.ranges[split].before - before)

        split = max(range(low + 1, high), key=rectangle)
        yield from self._staircase(offsets, low, split, before, shape)
        yield from self._staircase(offsets, split, high, before, shape)

    def _diagonal(self, offset: int, part: Range, seen: int, shape: Cut) -> Iterator[Piece]:
        """Pieces of one range, whose first `seen` keys are done."""
        whole = part.length >= shape.whole_square
        if part.length <= min(shape.strip, shape.fused) and not whole:
            keys = self._keys(seen, part.before + part.length)
            yield Piece(slice(offset, offset + part.length), keys, causal=True, fresh=seen == 0)
            return
        if part.before > seen:
            yield Piece(
                slice(offset, offset + part.length), self._keys(seen, part.before), causal=False, fresh=seen == 0
            )
        step = part.length if whole else shape.strip
        for start in range(0, part.length, step):
            stop = min(start + step, part.length)
            yield Piece(
                slice(offset + start, offset + stop),
                self._keys(part.before, part.before + stop),
                causal=True,
                fresh=part.before == 0,
            )

    def _keys(self, low: int, high: int) -> tuple[Keys, ...]:
        """Keys [low, high) of the document, counted from the first that the block sees."""
        found = []
        first = 0
        for store, rows in self.runs:
            start, stop = max(low - first, 0), min(high - first, rows.stop - rows.start)
            if start < stop:
                found.append(Keys(store, slice(rows.start + start, rows.start + stop)))
            first += rows.stop - rows.start
        return tuple(found)


class Squares(NamedTuple):
    """Tasks of equal length whose keys are their own rows: first rows (M,) of queries and keys in their stores."""

    q_store: int
    k_store: int
    length: int
    q_row: IntArray
    k_row: IntArray


@dataclass(frozen=True, eq=False)
class Work:
    """A task table in which no task continues the one before it.

    follows: (tasks,) whether a task sees all keys of the task before it, and its queries come after them.
    """

    tasks: KernelTasks
    follows: BoolArray


def joined(tasks: KernelTasks) -> Work:
    """Join tasks that continue the one before them in the table. Tables list a document's tasks by position."""
    offset = tasks.segment_offset
    segments = np.diff(offset)
    sums = np.concatenate([[0], np.cumsum(tasks.segment_length)])
    keys = sums[offset[1:]] - sums[offset[:-1]]
    follows = _sees_keys_of_previous(tasks)
    distance = (keys - tasks.q_length)[1:] - keys[:-1]
    follows[1:] &= distance >= 0
    continues = follows.copy()
    continues[1:] &= (
        (distance == 0)
        & (segments[1:] == segments[:-1])
        & (tasks.q_store[1:] == tasks.q_store[:-1])
        & (tasks.q_row[1:] == tasks.q_row[:-1] + tasks.q_length[:-1])
    )
    if not continues.any():
        return Work(tasks, follows)
    first = np.flatnonzero(~continues)
    last = np.append(first[1:], len(tasks)) - 1
    table = replace(
        selected_tasks(tasks, last),
        q_row=tasks.q_row[first],
        q_length=np.add.reduceat(tasks.q_length, first),
        q_position=tasks.q_position[first],
    )
    return Work(table, follows[first])


def _sees_keys_of_previous(tasks: KernelTasks) -> BoolArray:
    """(tasks,) whether a task's keys begin with all those of the task before it."""
    sees = np.arange(len(tasks)) > 0
    offset, count = tasks.segment_offset, np.diff(tasks.segment_offset)
    if len(tasks) < 2:
        return sees
    # Every segment of all tasks but the last, and the one in its place in the next task.
    own = np.arange(offset[-2])
    next_task = np.repeat(np.arange(len(tasks) - 1), count[:-1]) + 1
    place = own - offset[next_task - 1]
    exists = place < count[next_task]
    other = np.where(exists, offset[next_task] + place, 0)
    is_last = place == count[next_task - 1] - 1
    longer = tasks.segment_length[other] - tasks.segment_length[own]
    same = (
        exists
        & (tasks.segment_store[other] == tasks.segment_store[own])
        & (tasks.segment_row[other] == tasks.segment_row[own])
        & np.where(is_last, longer >= 0, longer == 0)
    )
    sees[next_task[~same]] = False
    return sees


def short_squares(work: Work, longest: int) -> tuple[IntArray, list[Squares]]:
    """Split the table: indices of tasks that go into blocks, and groups of equal squares of at most `longest` rows."""
    tasks = work.tasks
    first = tasks.segment_offset[:-1]
    short = (np.diff(tasks.segment_offset) == 1) & (tasks.q_length <= longest) & (tasks.q_length > 0)
    short[short] = tasks.segment_length[first[short]] == tasks.q_length[short]
    index = np.flatnonzero(short)
    groups: list[Squares] = []
    if len(index):
        segment = first[index]
        keys = np.stack([tasks.q_store[index], tasks.segment_store[segment], tasks.q_length[index]])
        kinds, kind = np.unique(keys, axis=1, return_inverse=True)
        for number, (q_store, k_store, length) in enumerate(kinds.T.tolist()):
            member = kind.reshape(-1) == number
            groups.append(
                Squares(q_store, k_store, length, tasks.q_row[index[member]], tasks.segment_row[segment[member]])
            )
    return np.flatnonzero(~short & (tasks.q_length > 0)), groups


def blocks(work: Work, chosen: IntArray, limit: int, gather: int) -> Iterator[Block]:
    """Blocks of the chosen tasks, in the order of the table.

    Args:
        limit: a task of twice as many rows or more is cut into blocks of `limit` to twice `limit`.
        gather: tasks that follow each other are gathered until a block has so many rows.
    """
    tasks = work.tasks
    columns = (tasks.q_store, tasks.q_row, tasks.q_length, tasks.segment_offset[:-1], tasks.segment_offset[1:])
    segment_store, segment_row, segment_length = (
        column.tolist() for column in (tasks.segment_store, tasks.segment_row, tasks.segment_length)
    )
    chain: list[Block] = []
    previous = -1
    rows = zip(chosen.tolist(), *(column[chosen].tolist() for column in columns), strict=True)
    for task, store, row, length, first, end in rows:
        if not (work.follows[task] and previous == task - 1):
            yield from _gathered(chain, gather)
            chain = []
        previous = task
        runs = tuple(
            Keys(segment_store[s], slice(segment_row[s], segment_row[s] + segment_length[s])) for s in range(first, end)
        )
        before = sum(segment_length[first:end]) - length
        for start, stop in pairwise(_cuts(length, limit)):
            chain.append(Block((Range(store, slice(row + start, row + stop), before + start),), runs))
    yield from _gathered(chain, gather)


def _gathered(chain: list[Block], enough: int) -> list[Block]:
    """Put neighbours together until a block has `enough` rows; what remains at the end goes to the block before it."""
    found: list[Block] = []
    for block in chain:
        if found and found[-1].rows < enough:
            found[-1] = Block(found[-1].ranges + block.ranges, block.runs)
        else:
            found.append(block)
    if len(found) > 1 and found[-1].rows + found[-2].rows < 2 * enough:
        last = found.pop()
        found[-1] = Block(found[-1].ranges + last.ranges, last.runs)
    return found


def _cuts(length: int, limit: int) -> list[int]:
    """Borders of nearly equal blocks of `limit` to twice `limit` rows: a short last block would be a slow one."""
    count = max(1, length // limit)
    return sorted({0, *(length * i // count // _ROW_UNIT * _ROW_UNIT for i in range(1, count)), length})


def by_head(x_RHD: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(R, H, D) as (K, G, R, D), a view."""
    x_RKGD: torch.Tensor = x_RHD.unflatten(1, (kv_heads, -1))  # type: ignore[no-untyped-call]
    return x_RKGD.permute(1, 2, 0, 3)
