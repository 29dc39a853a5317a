"""One lane: the next document by the mix's shares, read, filtered and tokenized, and packed into the lane's chunks.

A lane's whole state is a small frozen value (`LaneState`): setting it resumes, and going back to an earlier one undoes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from steelyard.data.config import DataConfig, Split
from steelyard.data.failures import FailurePolicy, RecordError, SkipReport
from steelyard.data.packing import Chunk, Part, tokens_to_take
from steelyard.data.sources import Cursor, LocatedError, Record, Source
from steelyard.data.stable import stable_hash
from steelyard.data.tokenizers import Tokenizer
from steelyard.domain.arrays import IntArray
from steelyard.errors import DataError


@dataclass(frozen=True, eq=False)
class Document:
    """A tokenized document and where it stood."""

    tokens: IntArray
    source: int
    document_id: int
    path: str
    size_bytes: int
    record: Record


@dataclass(frozen=True)
class LaneState:
    """Where a lane stands.

    Attributes:
        cursors, tokens: place in each source, and tokens of the documents finished from it.
        offset: tokens already taken of the document at the cursor of the source whose turn it is.
        steps: chunks made.
        skipped: what was left out on the way.
    """

    cursors: tuple[Cursor, ...]
    tokens: tuple[int, ...]
    offset: int = 0
    steps: int = 0
    skipped: SkipReport = field(default_factory=SkipReport)

    @classmethod
    def start(cls, sources: int) -> LaneState:
        return cls((Cursor(),) * sources, (0,) * sources)

    def as_json(self) -> dict[str, Any]:
        return {
            "cursors": [[c.epoch, c.unit, c.block, c.record] for c in self.cursors],
            "tokens": list(self.tokens),
            "offset": self.offset,
            "steps": self.steps,
            "skipped": dict(self.skipped.counts),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LaneState:
        return cls(
            tuple(Cursor(*(int(n) for n in c)) for c in value["cursors"]),
            tuple(int(n) for n in value["tokens"]),
            int(value["offset"]),
            int(value["steps"]),
            SkipReport({str(k): int(n) for k, n in value["skipped"].items()}),
        )


class DocumentReader:
    """Reads, filters and tokenizes records for all lanes of a rank."""

    def __init__(self, config: DataConfig, split: Split, tokenizer: Tokenizer, sources: Sequence[Source]) -> None:
        self.config, self.split, self.tokenizer, self.sources = config, split, tokenizer, tuple(sources)
        self.policy = FailurePolicy(config.on_error)
        self.weights = [Fraction(str(s.weight)) for s in config.sources]
        self._known_nonempty: set[int] = set()

    def read(self, source: Source, record: Record) -> Document | None:
        """The document, or None if it belongs to the other split.

        Raises:
            RecordError: it cannot be used.
        """
        text = record.block.text(record.index)
        path, settings = str(record.file.path), source.config
        place = partial(record.block.place, record.index)

        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RecordError("encoding", path, f"text with half a surrogate pair: {error.reason}", place) from error
        if not raw or raw.isspace():
            raise RecordError("empty", path, "an empty document", place)
        if len(raw) < settings.min_bytes:
            raise RecordError("below_min_bytes", path, f"{len(raw)} bytes, min_bytes={settings.min_bytes}", place)
        if settings.max_bytes is not None and len(raw) > settings.max_bytes:
            raise RecordError("above_max_bytes", path, f"{len(raw)} bytes, max_bytes={settings.max_bytes}", place)
        if not self._in_split(raw):
            return None
        tokens = self._encode(text)
        if not len(tokens):
            raise RecordError("empty", path, "no token in the document", place)
        limit = self.config.chunk_tokens
        if self.config.documents == "whole" and self.config.oversize == "refuse" and len(tokens) > limit:
            raise RecordError(
                "oversize", path,
                f"{len(tokens)} tokens, more than a chunk of {limit}; "
                'raise chunk_tokens, set max_bytes, or oversize = "split"', place,
            )  # fmt: skip
        return Document(tokens, source.index, record.document_id, path, len(raw), record)

    def check_nonempty(self, source: Source) -> None:
        """Called after two passes without a document for some lane: endless only if there is one at all.

        Raises:
            DataError: the source has no document for this split.
        """
        if source.index in self._known_nonempty:
            return
        report = SkipReport()
        for record in source.scan():
            try:
                if isinstance(record, RecordError):
                    raise record
                if self.read(source, record) is not None:
                    self._known_nonempty.add(source.index)
                    return
            except RecordError as failure:
                report = report.plus(failure)
        held = f" (eval_fraction={self.config.eval_fraction})" if self.config.eval_fraction else ""
        examples = "; ".join(line for lines in report.examples.values() for line in lines[:1])
        raise DataError(
            f"data source {source.config.path}: no document for split {self.split!r}{held}: {report}"
            + (f"; for example {examples}" if examples else "")
        )

    def _in_split(self, raw: bytes) -> bool:
        fraction = self.config.eval_fraction
        if fraction == 0:
            return self.split == "train"
        is_eval = stable_hash("split", raw) < fraction * 2**63
        return is_eval == (self.split == "eval")

    def _encode(self, text: str) -> IntArray:
        tokens = self.tokenizer.encode(text)
        before = [self.tokenizer.bos_id] if self.config.prepend_bos else []
        after = [self.tokenizer.eos_id] if self.config.append_eos else []
        if not before and not after:
            return tokens
        return np.concatenate([np.array(before, dtype=np.int64), tokens, np.array(after, dtype=np.int64)])


class Lane:
    """One lane: draws documents in the order of the mix and packs them. `state` may be read and set at any time."""

    def __init__(self, number: int, reader: DocumentReader) -> None:
        self.number = number
        self._reader = reader
        self._state = LaneState.start(len(reader.sources))
        self._document: Document | None = None

    @property
    def state(self) -> LaneState:
        return self._state

    @state.setter
    def state(self, value: LaneState) -> None:
        self._state = value
        self._document = None

    def peek(self) -> Document | None:
        """The document whose turn it is, or None at the end of the last epoch. Moves the cursor past what is skipped.

        Raises:
            DataError: it cannot be read and `on_error` is "stop".
        """
        while self._document is None:
            index = self._next_source()
            if index is None:
                return None
            self._document = self._advance(self._reader.sources[index])
        return self._document

    def take(self, count: int) -> Part:
        """The next `count` tokens of the document that `peek` returned."""
        document, state = self._document, self._state
        assert document is not None and 0 < count <= len(document.tokens) - state.offset
        part = Part(
            document.tokens[state.offset : state.offset + count], document.source, document.document_id, state.offset
        )
        if state.offset + count < len(document.tokens):
            self._set(offset=state.offset + count)
            return part
        s = document.source
        self._set(
            cursors=_replaced(state.cursors, s, document.record.after),
            tokens=_replaced(state.tokens, s, state.tokens[s] + len(document.tokens)),
            offset=0,
        )
        self._document = None
        return part

    def next_chunk(self) -> Chunk:
        """The lane's next chunk; without a token once the lane has run dry.

        Raises:
            DataError: a document cannot be read and `on_error` is "stop". The lane stands where it stood before.
        """
        config = self._reader.config
        before = self._state, self._document
        parts: list[Part] = []
        room = config.chunk_tokens
        try:
            while room and (document := self.peek()) is not None:
                offset = self._state.offset
                count = tokens_to_take(
                    len(document.tokens) - offset, room,
                    chunk_is_empty=not parts, begun=offset > 0, whole=config.documents == "whole",
                )  # fmt: skip
                if count == 0:
                    break
                parts.append(self.take(count))
                room -= count
        except BaseException:
            self._state, self._document = before
            raise
        self._set(steps=self._state.steps + 1)
        return Chunk.from_parts(parts, self.number)

    def restore(self, saved: tuple[LaneState, Document | None]) -> None:
        """Go back to what `save` returned, without reading again."""
        self._state, self._document = saved

    def save(self) -> tuple[LaneState, Document | None]:
        return self._state, self._document

    def _next_source(self) -> int | None:
        """The source that has not ended and is furthest behind its share; the first of equals."""
        epochs = self._reader.config.epochs
        best: int | None = None
        for s, cursor in enumerate(self._state.cursors):
            if epochs is not None and cursor.epoch >= epochs:
                continue
            if best is None or self._drawn(s) < self._drawn(best):
                best = s
        return best

    def _drawn(self, source: int) -> Fraction:
        return self._state.tokens[source] / self._reader.weights[source]

    def _advance(self, source: Source) -> Document | None:
        """Move the source's cursor to its next usable document of this lane and read it; None at the end."""
        epochs = self._reader.config.epochs
        patience = self._state.cursors[source.index].epoch + 2
        while True:
            end = patience if epochs is None else min(patience, epochs)
            try:
                found = source.locate(self._state.cursors[source.index], self.number, end)
            except LocatedError as located:
                if located.owner:
                    self._count(located.failure)
                elif self._reader.config.on_error == "stop":
                    self._reader.policy.handle(located.failure, self._state.skipped)
                self._move(source, located.after)
                continue
            if isinstance(found, Cursor):
                self._move(source, found)
                if epochs is not None and found.epoch >= epochs:
                    return None
                self._reader.check_nonempty(source)
                patience = found.epoch + 2
                continue
            self._move(source, found.cursor)
            try:
                document = self._reader.read(source, found)
                if document is not None:
                    self._check_offset(document)
                    return document
            except RecordError as failure:
                self._count(failure)
                self._set(offset=0)
            self._move(source, found.after)

    def _check_offset(self, document: Document) -> None:
        """A document that shrank between a checkpoint and the resume cannot be continued."""
        if self._state.offset >= len(document.tokens):
            detail = (
                f"{len(document.tokens)} tokens, of which {self._state.offset} were read before the checkpoint: "
                "it has changed since"
            )
            place = partial(document.record.block.place, document.record.index)
            raise RecordError("malformed", document.path, detail, place)

    def _count(self, failure: RecordError) -> None:
        self._set(skipped=self._reader.policy.handle(failure, self._state.skipped))

    def _move(self, source: Source, cursor: Cursor) -> None:
        self._set(cursors=_replaced(self._state.cursors, source.index, cursor))

    def _set(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
