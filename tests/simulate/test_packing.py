"""Packing by published weights: every document once, caps obeyed where they can be, and the weights matter."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.domain.arrays import int_column
from steelyard.simulate.packing import FILLER_TOKENS, pack_by_work


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 20000))
def test_every_document_has_one_place(lengths: list[int], places: int, cap: int) -> None:
    packed = pack_by_work(int_column(lengths), places, 1000, cap)
    assert len(packed) == places
    kept = sorted(n for docs in packed for n in docs)
    fillers = places - sum(1 for docs in packed if docs != [FILLER_TOKENS])
    assert sorted(lengths + [FILLER_TOKENS] * max(0, len(kept) - len(lengths))) == kept
    assert len(kept) - len(lengths) <= fillers


def test_a_small_breakpoint_balances_squares_and_a_large_one_tokens() -> None:
    lengths = int_column([1000, *[100] * 50])
    by_squares = pack_by_work(lengths, 2, 1, 10**9)
    by_tokens = pack_by_work(lengths, 2, 10**9, 10**9)
    assert [len(d) for d in by_squares] == [1, 50]
    assert abs(sum(by_tokens[0]) - sum(by_tokens[1])) <= 100


def test_what_does_not_fit_under_the_cap_goes_by_work() -> None:
    packed = pack_by_work(int_column([600, 600, 600, 10]), 2, 100, 700)
    assert [sorted(d) for d in packed] == [[600, 600], [10, 600]] or [sorted(d) for d in packed] == [
        [10, 600], [600, 600],
    ]  # fmt: skip
    assert np.sum([sum(d) for d in packed]) == 1810
