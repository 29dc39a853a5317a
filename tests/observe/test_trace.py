from __future__ import annotations

import gzip
import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import UsageError
from steelyard.observe.trace import Span, Trace, busy_s, gaps, read_perfetto, write_perfetto


class Clock:
    """Time that only moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_span_records_its_interval_and_args() -> None:
    clock = Clock()
    trace = Trace(3, clock=clock)
    with trace.span("attend", "attention", layer=2):
        clock.now_s += 0.5
    assert trace.spans == [Span("attend", "attention", 100.0, 100.5, {"layer": 2})]


def test_span_is_recorded_when_the_body_raises() -> None:
    trace = Trace(0, clock=Clock())
    with pytest.raises(RuntimeError), trace.span("step"):
        raise RuntimeError
    assert [s.name for s in trace.spans] == ["step"]


def test_a_disabled_trace_never_reads_the_clock() -> None:
    def clock() -> float:
        raise AssertionError("the clock of a disabled trace was read")

    trace = Trace(0, clock=clock, enabled=False)
    with trace.span("step"):
        trace.add("x", "wait", 0.0, 1.0)
    assert trace.spans == []


def test_take_returns_and_forgets_while_spans_is_a_copy() -> None:
    trace = Trace(0)
    trace.add("a", "wait", 0.0, 1.0)
    trace.spans.clear()
    assert len(trace.take()) == 1
    assert trace.take() == ()


def test_add_from_many_threads_loses_nothing() -> None:
    trace = Trace(0)

    def add_many(thread: int) -> None:
        for i in range(500):
            trace.add(f"{thread}", "transfer", i, i + 1)

    threads = [threading.Thread(target=add_many, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trace.spans) == 4000


def test_total_counts_overlap_once_and_gaps_never() -> None:
    trace = Trace(0)
    for start_s, end_s in ((0, 4), (1, 2), (3, 6), (8, 9), (9, 9)):
        trace.add("x", "transfer", start_s, end_s)
    trace.add("x", "compute", 0, 100)
    assert trace.total_s("transfer") == 7
    assert trace.total_s("absent") == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=20))
def test_busy_time_equals_counting_the_seconds(intervals: list[tuple[int, int]]) -> None:
    covered = {t for start, length in intervals for t in range(start, start + length)}
    assert busy_s(Span("x", "wait", start, start + length) for start, length in intervals) == len(covered)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=20))
def test_gaps_and_busy_time_make_up_the_whole(intervals: list[tuple[int, int]]) -> None:
    spans = [Span("x", "wait", start, start + length) for start, length in intervals]
    found = gaps(spans, 10, 50)
    assert all(10 <= start < end <= 50 for start, end in found)
    inside = [Span("x", "wait", max(10, s.start_s), min(50, s.end_s)) for s in spans]
    assert sum(end - start for start, end in found) + busy_s(s for s in inside if s.end_s > s.start_s) == 40


intervals = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 100), st.sampled_from(["compute", "transfer", "wait", "other"])),
    max_size=25,
)


@given(intervals)
def test_written_threads_nest_and_reading_gives_the_spans_back(
    tmp_path_factory: pytest.TempPathFactory, intervals: list[tuple[int, int, str]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    spans = [
        Span(f"s{i}", track, 7.0 + start / 1e4, 7.0 + (start + length) / 1e4, {"i": i})
        for i, (start, length, track) in enumerate(intervals)
    ]
    write_perfetto(path, {0: spans, 1: spans[:3]})
    events = json.loads(path.read_text())["traceEvents"]
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for thread_spans in by_thread.values():
        for i, (_, end_us) in enumerate(thread_spans):
            for later_start_us, later_end_us in thread_spans[i + 1 :]:
                assert later_start_us >= end_us - 1e-6 or later_end_us <= end_us + 1e-6
    timed = [e["ts"] for e in events if e["ph"] != "M"]
    assert all(a <= b for a, b in pairwise(timed))
    assert {e["ph"] for e in events if e.get("cat") == "transfer"} <= {"b", "e"}
    read = read_perfetto(path)
    for rank, written in ((0, spans), (1, spans[:3])):
        found = {s.name: s for s in read.get(rank, ())}
        assert found.keys() == {s.name for s in written}
        for span in written:
            assert (found[span.name].track, found[span.name].args) == (span.track, span.args)
            assert found[span.name].start_s == pytest.approx(span.start_s, abs=2e-9)
            assert found[span.name].end_s == pytest.approx(span.end_s, abs=2e-9)


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_file_names_ranks_and_tracks_and_is_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    two_transfers = [Span("send 0", "transfer", 5.0, 6.0), Span("send 1", "transfer", 5.5, 6.5)]
    write_perfetto(path, {0: [Span("mlp", "compute", 5.0, 5.001), *two_transfers], 1: []})
    events = events_of(path)
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {(0, "rank 0"), (0, "compute"), (0, "transfer"), (1, "rank 1")}
    complete = [e for e in events if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in complete] == [(0.0, 1000.0)]
    begun = [e for e in events if e["ph"] == "b"]
    assert len({e["id"] for e in begun}) == 2
    assert read_perfetto(path)[1] == ()


def test_partly_overlapping_spans_get_a_second_thread(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write_perfetto(path, {0: [Span("a", "wait", 0.0, 2.0), Span("b", "wait", 1.0, 3.0), Span("c", "wait", 2.0, 2.5)]})
    thread = {e["name"]: e["tid"] for e in events_of(path) if e["ph"] == "X"}
    assert thread["a"] == thread["c"] != thread["b"]


def test_args_that_json_cannot_hold_are_made_plain(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_perfetto(path, {0: [Span("a", "wait", 0.0, 1.0, {"bytes": np.int64(5), "ratio": float("nan")})]})  # type: ignore[dict-item]
    assert read_perfetto(path)[0][0].args == {"bytes": 5, "ratio": "nan"}


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "hello"])
def test_reading_something_else_says_so(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="not a trace-event file"):
        read_perfetto(path)
