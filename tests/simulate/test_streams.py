"""Published streams: whole sequences, the given order, batches that hold what they should."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.simulate.streams import (
    FIXED_SHARE,
    MEAN_LONG,
    PUBLISHED_BATCHES,
    THRESHOLD,
    pretrain_order,
    prolong_order,
    published_documents,
    spread,
)

CONTEXT = 131072
LENGTHS = [int(n) for n in np.random.default_rng(0).lognormal(8, 1.5, 3000).clip(16, 120_000)]


def ends(order: np.ndarray) -> set[int]:
    return set(np.cumsum(order).tolist())


@pytest.mark.parametrize("stream", ["pretrain", "prolong"])
def test_documents_are_cut_at_sequences_and_batches_hold_their_tokens(stream: str) -> None:
    tokens = 4 * CONTEXT
    documents = published_documents(stream, LENGTHS, CONTEXT, tokens, [0, 3, 7])
    assert len(documents.batches) == 3
    for batch in documents.batches:
        assert int(batch.sum()) == tokens
        assert int(batch.max()) <= CONTEXT
        assert {CONTEXT, 2 * CONTEXT, 3 * CONTEXT, 4 * CONTEXT} <= ends(batch)


def test_pretrain_lengths_are_stretched() -> None:
    order = pretrain_order(LENGTHS, 4 * THRESHOLD, 40 * 4 * THRESHOLD)
    whole = order[order < THRESHOLD]
    assert np.mean(whole % 4 == 0) > 0.9  # but for the pieces that a sequence's end leaves


def test_prolong_begins_with_all_long_documents() -> None:
    tokens = 600 * CONTEXT
    order = prolong_order([n for n in LENGTHS if n < THRESHOLD], CONTEXT, tokens)
    whole = np.cumsum(order)
    first_short = int(whole[np.flatnonzero(order < 2000)[5]])
    last_full = int(whole[np.flatnonzero(order == CONTEXT)[-1]])
    expected = 188 * (FIXED_SHARE * CONTEXT + (1 - FIXED_SHARE) * MEAN_LONG)
    assert last_full < 1.2 * expected
    assert first_short > 0.05 * expected
    assert int((order[whole > 1.3 * expected]).max()) < THRESHOLD


def test_spread_numbers_are_within_the_published_ones() -> None:
    assert spread(PUBLISHED_BATCHES) == list(range(PUBLISHED_BATCHES))
    assert spread(6) == [2, 7, 12, 17, 22, 27]
