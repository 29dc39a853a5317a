"""Documents that could not be used: why, where, and how many. Nothing is dropped without being counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from steelyard.errors import DataError

logger = logging.getLogger(__name__)

Reason: TypeAlias = Literal[
    "unreadable", "encoding", "malformed", "missing_field", "oversize", "empty", "below_min_bytes", "above_max_bytes"
]

QUIET_REASONS: frozenset[str] = frozenset({"empty", "below_min_bytes", "above_max_bytes"})
"""Reasons that are counted but are not errors: the document was read, and there is nothing to train on or the user
asked to leave it out."""

EXAMPLES_PER_REASON = 3


class RecordError(Exception):
    """One record, block or file that could not be used. Stays inside `data`; callers see a `DataError` or a count.

    `place` is computed only when it is shown, since finding the line number of a byte offset means reading the file.
    """

    def __init__(self, reason: Reason, path: str, detail: str, place: Callable[[], str] | None = None) -> None:
        super().__init__(f"{path}: {detail}")
        self.reason: Reason = reason
        self.path = path
        self.detail = detail
        self.place = place

    def describe(self) -> str:
        """`path, line 12: what is wrong`."""
        place = self.place() if self.place is not None else ""
        return f"{self.path}{', ' + place if place else ''}: {self.detail}"


@dataclass(frozen=True)
class SkipReport:
    """What was left out: documents (or whole files, where a file could not be opened) per reason, with examples."""

    counts: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def errors(self) -> int:
        """Without empty documents and those outside the size limits."""
        return sum(n for reason, n in self.counts.items() if reason not in QUIET_REASONS)

    def __str__(self) -> str:
        if not self.counts:
            return "nothing skipped"
        return ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in sorted(self.counts.items()))

    @classmethod
    def merged(cls, reports: Iterable[SkipReport]) -> SkipReport:
        """Sum of reports of different lanes or ranks."""
        counts: dict[str, int] = {}
        examples: dict[str, tuple[str, ...]] = {}
        for report in reports:
            for reason, count in report.counts.items():
                counts[reason] = counts.get(reason, 0) + count
            for reason, lines in report.examples.items():
                examples[reason] = (examples.get(reason, ()) + lines)[:EXAMPLES_PER_REASON]
        return cls(counts, examples)

    def plus(self, failure: RecordError) -> SkipReport:
        """This report and one more failure."""
        counts = {**self.counts, failure.reason: self.counts.get(failure.reason, 0) + 1}
        known = self.examples.get(failure.reason, ())
        if len(known) < EXAMPLES_PER_REASON:
            return SkipReport(counts, {**self.examples, failure.reason: (*known, failure.describe())})
        return SkipReport(counts, self.examples)


class FailurePolicy:
    """Applies `on_error`: raises, or warns once a path and lets the caller count."""

    def __init__(self, on_error: Literal["stop", "skip"]) -> None:
        self.on_error = on_error
        self._warned: set[str] = set()

    def handle(self, failure: RecordError, so_far: SkipReport) -> SkipReport:
        """Return the report with `failure` counted.

        Raises:
            DataError: `on_error` is "stop" and the failure is an error.
        """
        quiet = failure.reason in QUIET_REASONS
        if self.on_error == "stop" and not quiet:
            raise DataError(
                f"{failure.describe()} (documents skipped before: {so_far.total}; "
                'mend it, or set on_error = "skip" to go on without it)'
            ) from failure
        if not quiet and failure.path not in self._warned:
            self._warned.add(failure.path)
            logger.warning("skipped: %s (further ones in this file are counted, not listed)", failure.describe())
        return so_far.plus(failure)
