"""The thread that is one step ahead: order, errors, and an end without hanging."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from steelyard.balance import Balancer
from steelyard.data.packing import Chunk, Part
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import DataError
from steelyard.train.prefetch import Prefetcher, plan_next


def test_results_come_in_order_from_another_thread() -> None:
    prefetcher: Prefetcher[tuple[int, int]] = Prefetcher()
    for number in range(5):
        prefetcher.request(lambda n=number: (n, threading.get_ident()))  # type: ignore[misc]
    taken = [prefetcher.take() for _ in range(5)]
    assert [n for n, _ in taken] == list(range(5))
    assert {thread for _, thread in taken}.isdisjoint({threading.get_ident()})
    prefetcher.close()


def test_it_works_while_the_main_thread_does_something_else() -> None:
    prefetcher: Prefetcher[str] = Prefetcher()
    started, release = threading.Event(), threading.Event()

    def make() -> str:
        started.set()
        assert release.wait(10)
        return "made"

    prefetcher.request(make)
    assert started.wait(10)  # without a take
    release.set()
    assert prefetcher.take() == "made"
    prefetcher.close()


def test_an_error_surfaces_where_its_result_was_due_and_stays() -> None:
    prefetcher: Prefetcher[int] = Prefetcher()

    def fail() -> int:
        raise DataError("texts/3.txt: cannot be read")

    for make in (lambda: 1, fail, lambda: 3):
        prefetcher.request(make)
    assert prefetcher.take() == 1
    for _ in range(2):
        with pytest.raises(DataError, match=r"3\.txt"):
            prefetcher.take()
    prefetcher.close()


def test_close_lets_the_requests_under_way_end() -> None:
    prefetcher: Prefetcher[None] = Prefetcher()
    ended: list[int] = []
    for number in range(3):
        prefetcher.request(lambda n=number: ended.append(n))  # type: ignore[misc]
    prefetcher.close()
    assert ended == [0, 1, 2]


class Chunks:
    """A source of given chunks; its position is the number of calls."""

    def __init__(self, steps: Sequence[Sequence[Sequence[int]]]) -> None:
        self._steps, self._done = steps, 0

    def next_chunks(self) -> list[Chunk]:
        lengths_by_chunk = self._steps[self._done]
        self._done += 1
        return [
            Chunk.from_parts([Part(np.arange(n, dtype=np.int64), 0, d, 0) for d, n in enumerate(lengths)])
            for lengths in lengths_by_chunk
        ]

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}


def test_a_planned_step_counts_labels_and_keeps_the_position_after_it() -> None:
    balancer = Balancer(shape=AttentionShape(2, 1, 4))
    source = Chunks([[[5, 3], [1]], [[], [4]], [[], []]])
    first, second, end = (plan_next(source, balancer) for _ in range(3))
    assert (first.tokens, first.loss_tokens, first.loader) == (9, 6, {"done": 1})
    assert (second.tokens, second.loss_tokens, second.loader) == (4, 3, {"done": 2})
    assert [nano.plan.layout.doc_lengths.tolist() for nano in first.plan.nano_batches] == [[5, 3], [1]]
    assert end.tokens == 0 and end.loss_tokens == 0
