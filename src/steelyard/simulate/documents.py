"""Where document lengths come from, and how batches are sampled from them: the order of the data matters most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from steelyard.domain.arrays import IntArray, int_column
from steelyard.domain.limits import MAX_DOCUMENT_TOKENS
from steelyard.errors import UsageError

Sampler: TypeAlias = Literal["shuffle", "in_order", "batches"]


@dataclass(frozen=True, eq=False)
class Documents:
    """Where lengths come from.

    Attributes:
        name: shown in reports.
        lengths: tokens of each document, in the order of the source, int64.
        sampler: `shuffle` draws at random with replacement; `in_order` reads on from batch to batch; `batches` takes
            the given batches as they are.
        batches: for `batches`: the lengths of each, in packing order.
    """

    name: str
    lengths: IntArray
    sampler: Sampler = "shuffle"
    batches: tuple[IntArray, ...] = ()

    def batch(self, number: int, tokens: int, seed: int) -> IntArray:
        """Lengths of batch `number` in packing order: exactly `tokens` tokens, the last document cut to fit.

        Raises:
            UsageError: a given batch holds another number of tokens.
        """
        if self.sampler == "batches":
            given = self.batches[number % len(self.batches)]
            total = int(given.sum())
            if total != tokens:
                raise UsageError(
                    f"documents {self.name}: batch {number % len(self.batches)} holds {total} tokens, the "
                    f"configuration needs {tokens} a step; nearest: sampler='shuffle', or degrees and "
                    f"micro_batches that make {total}"
                )
            return given
        if self.sampler == "in_order":
            taken = np.cumsum(np.resize(self.lengths, 8 * len(self.lengths)))
            whole = int(taken[-1])
            begin = (number * tokens) % whole
            order = np.resize(self.lengths, len(self.lengths) * (2 + 8 * ((begin + tokens) // whole + 1)))
            first = int(np.searchsorted(np.cumsum(order), begin, side="right"))
            return _cut_to(order[first:], tokens)
        random = np.random.default_rng((seed, number))
        mean = float(self.lengths.mean())
        drawn: list[IntArray] = []
        total = 0
        while total < tokens:
            more = random.choice(self.lengths, size=max(16, int(1.2 * (tokens - total) / mean) + 1))
            drawn.append(more)
            total += int(more.sum())
        return _cut_to(np.concatenate(drawn), tokens)


def _cut_to(lengths: IntArray, tokens: int) -> IntArray:
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens, side="left"))
    taken = np.array(lengths[: last + 1], dtype=np.int64)
    taken[-1] -= int(ends[last]) - tokens
    return int_column(taken[taken > 0])


def uniform_documents(length: int) -> Documents:
    """All documents of one length."""
    return Documents(f"uniform {length}", int_column([length]), "in_order")


def lognormal_documents(median: float, sigma: float, longest: int, *, count: int = 4096, seed: int = 0) -> Documents:
    """A skewed stream: lengths from a log-normal distribution, cut at `longest`."""
    if not 1 <= median < MAX_DOCUMENT_TOKENS or not 0 <= sigma <= 100 or longest < 1:
        raise UsageError(
            f"documents: median={median}, sigma={sigma}, longest={longest}, expected a median of 1 token or more, a "
            "sigma of 0 … 100 and a positive longest"
        )
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    lengths = np.clip(np.rint(drawn), 1, longest).astype(np.int64)
    return Documents(f"log-normal, median {median:g}, sigma {sigma:g}, at most {longest}", int_column(lengths))


def documents_from_json(path: Path, sampler: Sampler = "shuffle") -> Documents:
    """A list of lengths, or a workload file with `batches` of `docs`.

    Raises:
        UsageError: no such file, or neither of the two forms.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"documents: there is no file {path}") from error
    except OSError as error:
        raise UsageError(f"documents: {path} cannot be read ({error.strerror}); expected a JSON file") from error
    except RecursionError as error:
        raise UsageError(f"documents: {path} has lists within lists without end; expected one of lengths") from error
    except ValueError as error:
        digits = "a number of thousands of digits" if "digits" in str(error) else str(error)
        raise UsageError(f"documents: {path} is no JSON: {digits}") from error
    if isinstance(content, list):
        if sampler == "batches":
            raise UsageError(f"documents: {path} is a list of lengths, sampler='batches' needs batches; use 'in_order'")
        return Documents(path.stem, _lengths(content, path), sampler)
    given = content.get("batches") if isinstance(content, dict) else None
    docs: list[Any] = [b.get("docs") if isinstance(b, dict) else None for b in given] if isinstance(given, list) else []
    if docs and all(isinstance(d, list) for d in docs):
        batches = tuple(_lengths(d, path) for d in docs)
        return Documents(path.stem, int_column(np.concatenate(batches)), sampler, batches)
    raise UsageError(
        f"documents: {path} is neither a list of lengths, [120, 4096, …], nor a workload, "
        '{"batches": [{"docs": [lengths]}, …]}'
    )


def _lengths(values: Sequence[object], path: Path) -> IntArray:
    wrong = next((v for v in values if isinstance(v, bool) or not isinstance(v, int) or v < 1), None)
    if not values or wrong is not None:
        raise UsageError(
            f"documents: {path} holds {'no length' if wrong is None else repr(wrong)}, expected positive whole numbers"
        )
    longest = max(v for v in values if isinstance(v, int))
    if longest >= MAX_DOCUMENT_TOKENS:
        raise UsageError(
            f"documents: {path} holds {longest:,}, expected fewer than {MAX_DOCUMENT_TOKENS:,} tokens in a document"
        )
    return int_column([int(v) for v in values if isinstance(v, int)])


def cut_at_multiples(lengths: IntArray, room: int) -> list[IntArray]:
    """Pack documents one after another and cut at every multiple of `room`; lengths of each piece."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    cuts = np.union1d(ends, np.arange(room, total + 1, room))
    starts = np.concatenate([[0], cuts[:-1]])
    piece, place = cuts - starts, starts // room
    borders = np.searchsorted(place, np.arange(1, -(-total // room)))
    return [int_column(p) for p in np.split(piece, borders)]
