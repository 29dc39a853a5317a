"""Workloads: document lengths in packing order, a batch at a time, as planners are compared on them.

A workload file is `{"tokens_per_rank": T, "ranks": n, "batches": [{"docs": [lengths]}, …]}`. Documents fill rank after
rank in order; one that crosses a rank's end continues on the next. A data set becomes one by reading its documents in
the order of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.data.stream import ChunkStream
from steelyard.domain.arrays import IntArray, int_column
from steelyard.domain.layout import Layout
from steelyard.domain.limits import (
    MAX_DOCUMENT_TOKENS,
    MAX_NANO_BATCH_TOKENS,
    MAX_RANKS,
    MAX_TOKENS_PER_RANK,
    require_countable,
)
from steelyard.errors import UsageError

MOST = {"tokens_per_rank": MAX_TOKENS_PER_RANK, "ranks": MAX_RANKS}
EXAMPLE = '{"tokens_per_rank": 8192, "ranks": 4, "batches": [{"docs": [9000, 120, 4000]}]}'


@dataclass(frozen=True, eq=False)
class Workload:
    """Batches of `ranks` × `tokens_per_rank` tokens at most.

    Attributes:
        name: for people: the file or folder it came from.
        batches: lengths of the documents of each batch in packing order, int64 (documents,).

    Raises:
        UsageError: a number that cannot be right, or a batch that does not fit; it is named.
    """

    name: str
    tokens_per_rank: int
    ranks: int
    batches: tuple[IntArray, ...]

    def __post_init__(self) -> None:
        for key in ("tokens_per_rank", "ranks"):
            _require_positive(self.name, key, getattr(self, key))
        if not self.batches:
            raise UsageError(f'{self.name}: "batches" is empty, expected at least one, for example {EXAMPLE}')
        room = self.ranks * self.tokens_per_rank
        for index, lengths in enumerate(self.batches):
            longest = int(lengths.max(initial=0))
            if longest > room:
                raise UsageError(
                    f"{self.name}: batches[{index}].docs[{int(lengths.argmax())}] is a document of {longest:,} tokens, "
                    f"longer than {self.ranks} ranks × {self.tokens_per_rank:,} tokens = {room:,}; "
                    "use more ranks or more tokens per rank, or cut the document"
                )
            total = int(lengths.sum())
            if total > room:
                raise UsageError(
                    f"{self.name}: the documents of batches[{index}] hold {total:,} tokens, more than "
                    f"{self.ranks} ranks × {self.tokens_per_rank:,} tokens = {room:,}; "
                    "use more ranks or more tokens per rank, or more batches"
                )
            if total > MAX_NANO_BATCH_TOKENS:
                raise UsageError(
                    f"{self.name}: the documents of batches[{index}] hold {total:,} tokens, expected at most "
                    f"{MAX_NANO_BATCH_TOKENS:,} (2^38); use fewer documents in a batch"
                )
            require_countable(lengths, f"{self.name}: batches[{index}]")

    def layouts(self) -> list[Layout]:
        """One layout a batch, documents filling rank after rank."""
        return [Layout.contiguous(lengths.tolist(), self.tokens_per_rank, self.ranks) for lengths in self.batches]


def read_workload(path: str | Path) -> Workload:
    """Read a workload file.

    Raises:
        UsageError: it cannot be read, is not JSON, or a key is missing or wrong; file, batch and key are named.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"workload {path}: a pipe, socket or device; give a regular file")
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors begin files with a mark
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    except RecursionError:
        raise UsageError(f"{path}: lists or objects within each other too deep, expected {EXAMPLE}") from None
    except ValueError:  # what Python says of it asks for a change in the program
        raise UsageError(f"{path}: a number of thousands of digits, expected lengths in tokens") from None
    return parse_workload(values, name=str(path))


def parse_workload(values: object, *, name: str) -> Workload:
    """A workload from the JSON value of its file. Raises as `read_workload`."""
    top = _object(values, name, name)
    tokens_per_rank, ranks = (
        _require_positive(name, key, _key(top, key, name)) for key in ("tokens_per_rank", "ranks")
    )
    batches = _key(top, "batches", name)
    if not isinstance(batches, list):
        raise UsageError(f'{name}: "batches" is {_shown(batches)}, expected a list, for example {EXAMPLE}')
    return Workload(name, tokens_per_rank, ranks, tuple(_lengths(b, i, name) for i, b in enumerate(batches)))


def pack_workload(lengths: IntArray, *, name: str, tokens_per_rank: int, ranks: int, batches: int) -> Workload:
    """Fill up to `batches` full batches with documents of these lengths, in order.

    A document is cut where a batch ends, and where it is longer than a batch: the rest is a document of its own in the
    next batch, as in training.

    Raises:
        UsageError: the documents do not fill one batch, or a number is below 1.
    """
    for key, value in (("tokens_per_rank", tokens_per_rank), ("ranks", ranks), ("batches", batches)):
        _require_positive(name, key, value)
    room, total = ranks * tokens_per_rank, int(lengths.sum())
    if total < room:
        raise UsageError(
            f"{name}: its documents hold {total:,} tokens, less than one batch of {ranks} ranks × {tokens_per_rank:,} "
            f"tokens = {room:,}; use fewer ranks, smaller chunks or more documents"
        )
    count = min(batches, total // room)
    ends = np.cumsum(lengths[lengths > 0])
    borders = np.arange(1, count + 1, dtype=np.int64) * room
    cuts = np.union1d(ends[ends <= borders[-1]], borders)
    parts, batch = np.diff(cuts, prepend=0), (cuts - 1) // room
    return Workload(name, tokens_per_rank, ranks, tuple(int_column(parts[batch == i]) for i in range(count)))


def chunk_workload(stream: ChunkStream, *, name: str, batches: int) -> Workload:
    """The next `batches` steps of training: rank r of a batch holds the chunk of lane r, its documents cut where the
    chunk ends, so that none spans ranks.

    Args:
        stream: of one process that owns all lanes, one for each rank of the workload. It has no end, so that all chunks
            are full.

    Raises:
        DataError: a document cannot be read and the stream stops there.
    """
    steps = [np.concatenate([chunk.doc_lengths for chunk in stream.next_chunks()]) for _ in range(batches)]
    return Workload(name, stream.config.chunk_tokens, len(stream.lanes), tuple(int_column(step) for step in steps))


def _lengths(batch: object, index: int, name: str) -> IntArray:
    where = f"batches[{index}]"
    docs = _key(_object(batch, name, where), "docs", name, where)
    if not isinstance(docs, list):
        raise UsageError(f"{name}: {where}.docs is {_shown(docs)}, expected a list of document lengths in tokens")
    for place, length in enumerate(docs):
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < MAX_DOCUMENT_TOKENS:
            raise UsageError(
                f"{name}: {where}.docs[{place}] is {_shown(length)}, expected the length of a document in tokens, "
                f"a whole number from 0 to {MAX_DOCUMENT_TOKENS - 1:,}"
            )
    return int_column(docs)


def _object(value: object, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        place = name if where == name else f"{name}: {where}"
        expected = EXAMPLE if where == name else '{"docs": [lengths]}'
        raise UsageError(f"{place} is {_shown(value)}, expected a JSON object such as {expected}")
    return value


def _key(values: Mapping[str, Any], key: str, name: str, where: str = "") -> Any:
    if key in values:
        return values[key]
    close = get_close_matches(key, values, n=1)
    hint = f'; did you mean it by "{close[0]}"?' if close else f", for example {EXAMPLE}"
    raise UsageError(f'{name}: {where}{" " if where else ""}lacks the key "{key}"{hint}')


def _require_positive(name: str, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}: {key} is {_shown(value)}, expected a whole number of at least 1")
    if value > MOST.get(key, value):
        raise UsageError(f"{name}: {key} is {_shown(value)}, expected at most {MOST[key]:,}")
    return value


def _shown(value: object) -> str:
    """The value as JSON, shortened: it goes into a message of one line."""
    try:
        text = json.dumps(value, default=str)
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}…"
