"""The order of one source's documents, and how it is dealt to lanes.

A *lane* feeds one chunk of every global step. The order must not depend on the number of ranks, so a source's endless
order (epoch after epoch) is dealt to `lanes` lanes, and a rank reads only the lanes that it owns. What is dealt:

    file      unit = file, in an order drawn from (seed, epoch); its blocks are in an order of their own. Used for text
              files, and for many files whose blocks cannot be counted without opening each (compressed, Parquet)
    block     unit = block; the blocks of all files in one order, so that a step mixes files. Used if there are at least
              UNITS_PER_LANE blocks a lane
    document  as block, but every lane reads every block and takes each `lanes`-th of its records

The u-th unit of epoch e belongs to lane (u + e) mod lanes; with `document`, the p-th record of the block's order
belongs to lane (u + e + p) mod lanes. The deal moves on with the epoch, so that a source with fewer units than lanes
serves all lanes in turn. The choice of what is dealt depends only on the files and on `lanes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.failures import RecordError
from steelyard.data.formats import Block, DecompressedCache, Reader, Recent, make_reader
from steelyard.data.listing import FileEntry, Listing, list_source
from steelyard.data.stable import stable_hash, stable_permutation
from steelyard.domain.arrays import IntArray
from steelyard.errors import UsageError

UNITS_PER_LANE = 8
"""Least blocks (or files) a lane before whole blocks (files) are dealt. Part of the order of documents."""

SPARE = 4
"""Blocks, decompressed copies and orders kept in memory beyond one for each lane that a rank owns."""

Deal = Literal["file", "block", "document"]


@dataclass(frozen=True, order=True)
class Cursor:
    """A place in a source's endless order: positions in the orders drawn for that epoch, not file numbers."""

    epoch: int = 0
    unit: int = 0
    block: int = 0
    record: int = 0


@dataclass(frozen=True)
class Record:
    """A record that was found; its text has not been read yet."""

    cursor: Cursor
    file: FileEntry
    block: Block
    index: int

    @property
    def key(self) -> int:
        """Byte offset of the line, or number of the row, in its file (text files: 0)."""
        return self.block.key(self.index)

    @property
    def document_id(self) -> int:
        """63-bit hash of file name and key: the same on every machine and in every order."""
        return stable_hash(self.file.name, self.key)

    @property
    def after(self) -> Cursor:
        return replace(self.cursor, record=self.cursor.record + 1)


class LocatedError(Exception):
    """A block could not be read. `owner`: this lane counts it; `after`: where to go on."""

    def __init__(self, failure: RecordError, owner: bool, after: Cursor) -> None:
        super().__init__(str(failure))
        self.failure, self.owner, self.after = failure, owner, after


class Source:
    """The documents of one `SourceConfig`, ordered and dealt. Holds no position: cursors are the caller's.

    Raises:
        UsageError: nothing to read, or a missing package.
        DataError: a folder cannot be read.
    """

    def __init__(
        self,
        config: SourceConfig,
        index: int,
        data: DataConfig,
        *,
        lanes: int,
        owned_lanes: int | None = None,
        listing: Listing | None = None,
    ) -> None:
        keep = (lanes if owned_lanes is None else owned_lanes) + SPARE
        self.config = config
        self.index = index
        self.lanes = lanes
        self.listing = listing if listing is not None else list_source(config)
        self.files = self.listing.files
        self._seed, self._shuffle = data.seed, data.shuffle
        self._cache = DecompressedCache(data.cache_dir)
        self._reader: Reader = make_reader(self.files[0].kind, config, self._cache)
        self._blocks: Recent[Block] = Recent(keep)
        self._unit_orders: Recent[IntArray] = Recent(SPARE)
        self._orders: Recent[IntArray] = Recent(2 * keep)
        self._counts: dict[int, int] = {}
        self.deal: Deal = self._choose_deal()
        if self.deal == "file":
            self.units = len(self.files)
            self._first_block = np.zeros(0, dtype=np.int64)
            self._cache.keep(keep)
        else:
            counts = np.array([self._block_count(f) for f in range(len(self.files))], dtype=np.int64)
            self._first_block = np.concatenate([[0], np.cumsum(counts)])
            self.units = int(self._first_block[-1])
        if self.units == 0:
            raise UsageError(f"data source {config.path}: all {len(self.files)} files are empty")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the names and sizes of all files: equal on all ranks, and before and after a restart."""
        parts = [part for f in self.files for part in (f.name, f.size_bytes)]
        return f"{len(self.files)} files {stable_hash(*parts):016x}"

    def locate(self, cursor: Cursor, lane: int, end_epoch: int) -> Record | Cursor:
        """The first record of `lane` at or after `cursor`, or the cursor at the start of `end_epoch`.

        Raises:
            LocatedError: a block on the way cannot be read.
        """
        while cursor.epoch < end_epoch:
            if cursor.unit >= self.units:
                cursor = Cursor(cursor.epoch + 1)
                continue
            deal_number = cursor.unit + cursor.epoch
            if self.deal != "document" and deal_number % self.lanes != lane:
                cursor = Cursor(cursor.epoch, cursor.unit + (lane - deal_number) % self.lanes)
                continue
            place = self._resolve(cursor)
            if place is None:
                cursor = Cursor(cursor.epoch, cursor.unit + 1)
                continue
            next_block = Cursor(cursor.epoch, cursor.unit, cursor.block + 1)
            try:
                block = self._read(*place)
            except RecordError as failure:
                owner = self.deal != "document" or deal_number % self.lanes == lane
                raise LocatedError(failure, owner, next_block) from failure
            record = cursor.record
            if self.deal == "document":
                record += (lane - deal_number - record) % self.lanes
            if record < len(block):
                file = self.files[place[0]]
                order = self._order("records", cursor.epoch, len(block), file.name, place[1])
                return Record(replace(cursor, record=record), file, block, int(order[record]))
            cursor = next_block
        return cursor

    def scan(self) -> Iterator[Record | RecordError]:
        """All records in order of names, blocks and lines, and the failures to read a block."""
        for file_index, file in enumerate(self.files):
            for block_index in range(self._block_count(file_index)):
                try:
                    block = self._read(file_index, block_index)
                except RecordError as failure:
                    yield failure
                    continue
                for index in range(len(block)):
                    yield Record(Cursor(0, file_index, block_index, index), file, block, index)

    def _choose_deal(self) -> Deal:
        enough = UNITS_PER_LANE * self.lanes
        if self.files[0].kind == "text":
            return "file"
        dear = not self._reader.cheap_count or any(f.compression for f in self.files)
        if dear and len(self.files) >= enough:
            return "file"
        return "block" if sum(self._block_count(f) for f in range(len(self.files))) >= enough else "document"

    def _block_count(self, file_index: int) -> int:
        """Blocks of a file; one that cannot be opened counts as one block, whose reading reports the failure."""
        if file_index not in self._counts:
            try:
                self._counts[file_index] = self._reader.block_count(self.files[file_index])
            except RecordError:
                self._counts[file_index] = 1
        return self._counts[file_index]

    def _resolve(self, cursor: Cursor) -> tuple[int, int] | None:
        """(file, block in it) under a cursor; None past the unit's last block."""
        epoch = cursor.epoch
        units = self._unit_orders.get((epoch,), lambda: self._make_order(self.units, "units", epoch))
        unit = int(units[cursor.unit])
        if self.deal != "file":
            file_index = int(np.searchsorted(self._first_block, unit, side="right")) - 1
            return (file_index, unit - int(self._first_block[file_index])) if cursor.block == 0 else None
        blocks = self._block_count(unit)
        if cursor.block >= blocks:
            return None
        return unit, int(self._order("blocks", epoch, blocks, self.files[unit].name)[cursor.block])

    def _order(self, what: str, epoch: int, count: int, *names: str | int) -> IntArray:
        return self._orders.get((what, epoch, count, *names), lambda: self._make_order(count, what, epoch, *names))

    def _make_order(self, count: int, what: str, epoch: int, *names: str | int) -> IntArray:
        if not self._shuffle:
            return np.arange(count, dtype=np.int64)
        return stable_permutation(count, what, self._seed, self.index, epoch, *names)

    def _read(self, file_index: int, block_index: int) -> Block:
        return self._blocks.get(
            (file_index, block_index), lambda: self._reader.read_block(self.files[file_index], block_index)
        )
