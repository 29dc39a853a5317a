"""What fits 64 bits is taken, what does not is refused, and the borderline is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.domain.limits import MAX_DOCUMENT_TOKENS, MAX_PAIRS, require_countable
from steelyard.errors import UsageError

LENGTH = st.integers(0, 100) | st.integers(MAX_DOCUMENT_TOKENS // 2, MAX_DOCUMENT_TOKENS - 1)


@given(st.lists(LENGTH, max_size=40), st.sampled_from([0, 1, 186, 1 << 30]))
def test_refused_is_what_exceeds(lengths: list[int], row_keys: int) -> None:
    fits = sum(n * (n + 1) // 2 + row_keys * n for n in lengths) <= MAX_PAIRS
    try:
        require_countable(np.array(lengths, dtype=np.int64), "here", row_keys)
    except UsageError as error:
        assert not fits
        assert str(error).startswith(f"here: its {len(lengths)} documents have ")
    else:
        assert fits


def test_the_borderline() -> None:
    n = MAX_DOCUMENT_TOKENS - 1
    for count, fits in ((8, True), (9, False)):  # 8 × n(n + 1)/2 is 2³² below 2⁶²
        assert (count * n * (n + 1) // 2 <= MAX_PAIRS) is fits
        lengths = np.full(count, n, dtype=np.int64)
        if fits:
            require_countable(lengths, "here")
        else:
            with pytest.raises(UsageError, match=r"4\.61e\+18 \(2\^62\); use fewer or shorter documents"):
                require_countable(lengths, "here")


def test_a_document_has_an_upper_end() -> None:
    with pytest.raises(UsageError, match="here: a document of 1,073,741,824 tokens, expected fewer than 1,073,741,824"):
        require_countable(np.array([3, MAX_DOCUMENT_TOKENS], dtype=np.int64), "here")
