"""Where the time of a step went, in one format for real runs and for simulations.

A *span* is a named interval on a *track* of one rank. The tracks that the runtime and the simulator fill:

- `compute`: token-wise work;
- `attention`: core-attention kernels;
- `transfer`: from the start of an asynchronous transfer to its completion. Spans here may overlap each other and those
  of every other track: that is the point of starting them early;
- `wait`: blocked until a transfer completes, i.e. exposed communication.

`write_perfetto` saves the spans of all ranks as a Chrome trace-event file that https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from steelyard.errors import UsageError

ArgValue: TypeAlias = int | float | str

TRACKS = ("compute", "attention", "wait", "transfer")
"""The tracks in the order in which pictures and trace viewers list them; other names follow them."""

ASYNC_TRACKS = frozenset({"transfer"})
"""Tracks whose spans overlap by nature and are therefore written as asynchronous events."""


@dataclass(frozen=True)
class Span:
    """The interval [start_s, end_s) on one track of one rank; `args` is what a viewer shows when it is selected."""

    name: str
    track: str
    start_s: float
    end_s: float
    args: Mapping[str, ArgValue] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Trace:
    """Collects the spans of one rank. `add` may be called from any thread; a disabled trace collects nothing.

    Args:
        rank: whose spans these are.
        clock: seconds; spans of ranks on one machine line up because the default clock is shared by its processes.
        enabled: False makes `span` and `add` return at once.
    """

    def __init__(self, rank: int, *, clock: Callable[[], float] = time.perf_counter, enabled: bool = True) -> None:
        self.rank = rank
        self.clock = clock
        self.enabled = enabled
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def span(self, name: str, track: str = "compute", **args: ArgValue) -> AbstractContextManager[None]:
        """A context manager that adds the span from its entry to its exit, also when its body raises."""
        if not self.enabled:
            return _NOTHING
        return _OpenSpan(self, name, track, args)

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: ArgValue) -> None:
        """Add a span whose times, by this trace's clock, are already known."""
        if not self.enabled:
            return
        self._append(Span(name, track, start_s, end_s, args))

    def _append(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)

    @property
    def spans(self) -> list[Span]:
        """A copy of the spans collected so far, in the order in which they ended."""
        with self._lock:
            return list(self._spans)

    def clear(self) -> None:
        """Forget all spans."""
        with self._lock:
            self._spans.clear()

    def take(self) -> tuple[Span, ...]:
        """Return the spans collected so far and forget them, in one step."""
        with self._lock:
            taken = tuple(self._spans)
            self._spans.clear()
        return taken

    def total_s(self, track: str) -> float:
        """Seconds during which at least one span of `track` was open; overlapping spans count once."""
        return busy_s(self.spans, (track,))


class _OpenSpan:
    """The context manager of an enabled trace; a class, because a generator costs several times as much."""

    __slots__ = ("_args", "_name", "_start_s", "_trace", "_track")

    def __init__(self, trace: Trace, name: str, track: str, args: Mapping[str, ArgValue]) -> None:
        self._trace = trace
        self._name = name
        self._track = track
        self._args = args
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = self._trace.clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._trace._append(Span(self._name, self._track, self._start_s, self._trace.clock(), self._args))


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def busy_s(spans: Iterable[Span], tracks: Sequence[str] | None = None) -> float:
    """Seconds covered by at least one span of `tracks` (None: of any track)."""
    chosen = sorted((s.start_s, s.end_s) for s in spans if tracks is None or s.track in tracks)
    total_s, covered_to_s = 0.0, -math.inf
    for start_s, end_s in chosen:
        if end_s > covered_to_s:
            total_s += end_s - max(start_s, covered_to_s)
            covered_to_s = end_s
    return total_s


def gaps(spans: Iterable[Span], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """The parts of [start_s, end_s) that no span covers: what a rank did there nobody measured on its own."""
    found, covered_to_s = [], start_s
    for span in sorted(spans, key=lambda s: s.start_s):
        if covered_to_s < span.start_s < end_s:
            found.append((covered_to_s, span.start_s))
        elif span.start_s >= end_s:
            break
        covered_to_s = max(covered_to_s, span.end_s)
    if covered_to_s < end_s:
        found.append((covered_to_s, end_s))
    return found


def write_perfetto(
    path: str | Path,
    spans_by_rank: Mapping[int, Sequence[Span]],
    *,
    name_of: Callable[[int], str] = "rank {}".format,
) -> None:
    """Write the spans of all ranks as Chrome trace events; gzip-compressed if `path` ends in `.gz`.

    A rank becomes a process and each of its tracks a named thread. Times count from the earliest span of all ranks, so
    the clocks of the ranks must agree. Spans of one thread must nest for a viewer to draw them as they were: where two
    overlap without nesting the later one moves to a second thread of the same track. Spans of `ASYNC_TRACKS` are
    asynchronous events, which may overlap at will.

    Args:
        name_of: what the process of a rank is called.
    """
    origin_s = min((s.start_s for spans in spans_by_rank.values() for s in spans), default=0.0)
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for rank in sorted(spans_by_rank):
        metadata.append(_metadata(rank, 0, "process_name", name=name_of(rank)))
        metadata.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
        thread = 0
        for track in ordered_tracks(spans_by_rank[rank]):
            spans = [s for s in spans_by_rank[rank] if s.track == track]
            lanes = [spans] if track in ASYNC_TRACKS else _nesting_lanes(spans, origin_s)
            for number, lane in enumerate(lanes):
                thread += 1
                name = track if number == 0 else f"{track} ({number + 1})"
                metadata.append(_metadata(rank, thread, "thread_name", name=name))
                metadata.append(_metadata(rank, thread, "thread_sort_index", sort_index=thread))
                for span in lane:
                    if track in ASYNC_TRACKS:
                        events.extend(_async_events(span, rank, thread, origin_s, event_id=len(events) + 1))
                    else:
                        events.append(_complete_event(span, rank, thread, origin_s))
    # Of two that begin together the longer one comes first: a viewer takes it for the parent.
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    document = {"traceEvents": metadata + events, "displayTimeUnit": "ms", "otherData": {"origin_s": origin_s}}
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    path = Path(path)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text, encoding="utf-8")


def read_perfetto(path: str | Path) -> dict[int, tuple[Span, ...]]:
    """Read a file of `write_perfetto`: the spans of each rank by start, with times as they were (to a nanosecond).

    Raises:
        UsageError: the file is not a trace-event file.
    """
    raw = Path(path).read_bytes()
    try:
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = document["traceEvents"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{path}: not a trace-event file ({error}); expected JSON with a key traceEvents") from error
    origin_s = float(document.get("otherData", {}).get("origin_s", 0.0))
    spans: dict[int, list[Span]] = {e["pid"]: [] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    began: dict[tuple[int, str], dict[str, Any]] = {}
    for event in events:
        if event["ph"] == "X":
            first, end_us = event, event["ts"] + event["dur"]
        elif event["ph"] == "b":
            began[event["pid"], event["id"]] = event
            continue
        elif event["ph"] == "e":
            first, end_us = began.pop((event["pid"], event["id"])), event["ts"]
        else:
            continue
        start_s, end_s = origin_s + first["ts"] / 1e6, origin_s + end_us / 1e6
        spans.setdefault(event["pid"], []).append(
            Span(first["name"], first["cat"], start_s, end_s, first.get("args", {}))
        )
    return {rank: tuple(sorted(found, key=lambda s: (s.start_s, -s.end_s))) for rank, found in spans.items()}


def ordered_tracks(spans: Iterable[Span]) -> Iterator[str]:
    """The tracks that occur, those of `TRACKS` first and others by name."""
    names = {s.track for s in spans}
    yield from (t for t in TRACKS if t in names)
    yield from sorted(names.difference(TRACKS))


def _nesting_lanes(spans: Sequence[Span], origin_s: float) -> list[list[Span]]:
    """Split into as few lanes as first-fit finds, in each of which any two spans are disjoint or nested."""
    lanes: list[list[Span]] = []
    open_ends: list[list[int]] = []  # of each lane, when its open spans end, innermost last
    for span in sorted(spans, key=lambda s: (_ns(s.start_s - origin_s), -s.end_s)):
        start_ns, end_ns = _ns(span.start_s - origin_s), _ns(span.end_s - origin_s)
        for ends in open_ends:
            while ends and ends[-1] <= start_ns:
                ends.pop()
        fitting = (i for i, ends in enumerate(open_ends) if not ends or end_ns <= ends[-1])
        index = next(fitting, len(lanes))
        if index == len(lanes):
            lanes.append([])
            open_ends.append([])
        lanes[index].append(span)
        open_ends[index].append(end_ns)
    return lanes


def _ns(time_s: float) -> int:
    """Whole nanoseconds: begin and end are rounded alike, so rounding never breaks the nesting."""
    return round(time_s * 1e9)


def _metadata(rank: int, thread: int, kind: str, **args: ArgValue) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": args}


def _complete_event(span: Span, rank: int, thread: int, origin_s: float) -> dict[str, Any]:
    start_ns, end_ns = _ns(span.start_s - origin_s), _ns(span.end_s - origin_s)
    return {
        "ph": "X", "pid": rank, "tid": thread, "name": span.name, "cat": span.track,
        "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3, "args": _plain_args(span.args),
    }  # fmt: skip


def _async_events(
    span: Span, rank: int, thread: int, origin_s: float, event_id: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pair that begins and ends one asynchronous span; ids are unique over the file, as viewers expect."""
    same = {"pid": rank, "tid": thread, "name": span.name, "cat": span.track, "id": f"0x{event_id:x}"}
    begin = {"ph": "b", **same, "ts": _ns(span.start_s - origin_s) / 1e3, "args": _plain_args(span.args)}
    return begin, {"ph": "e", **same, "ts": _ns(span.end_s - origin_s) / 1e3}


def _plain_args(args: Mapping[str, Any]) -> dict[str, ArgValue]:
    """What JSON can hold: numpy numbers become Python's, and what is no finite number becomes text."""
    plain: dict[str, ArgValue] = {}
    for name, value in args.items():
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        plain[name] = value if isinstance(value, (int, float, str)) else str(value)
    return plain
