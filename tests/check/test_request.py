"""How documents are dealt and perturbed, and what is refused before anything starts."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.check.request import (
    RANDOM_LENGTHS,
    CheckRequest,
    ModelSource,
    deal,
    every_second_token_changed,
    later_tokens_changed,
    perturbation_patterns,
    perturbed,
    random_documents,
    tokens_kept,
)
from steelyard.errors import UsageError

LENGTHS = st.lists(st.integers(1, 60), min_size=4, max_size=20).filter(lambda n: sum(x > 1 for x in n) >= 4)


@given(LENGTHS, st.integers(1, 4))
def test_every_document_goes_to_one_rank_and_every_rank_has_a_label(lengths: list[int], ranks: int) -> None:
    blocks = deal(lengths, ranks)
    assert [doc for block in blocks for doc in block] == list(range(len(lengths)))
    assert len(blocks) == ranks
    assert all(any(lengths[doc] > 1 for doc in block) for block in blocks)


def test_ranks_get_unequal_numbers_of_tokens() -> None:
    for ranks in (2, 3, 4):
        tokens = [sum(RANDOM_LENGTHS[doc] for doc in block) for block in deal(RANDOM_LENGTHS, ranks)]
        assert len(set(tokens)) == ranks
        assert 1.5 * min(tokens) < max(tokens) < 8 * min(tokens)


@given(LENGTHS, st.sampled_from([0.0, 0.5, 0.9]), st.integers(0, 10**6))
def test_later_tokens_change_and_earlier_ones_stay(lengths: list[int], share: float, seed: int) -> None:
    docs = [np.random.default_rng(seed + n).integers(0, 9, length) for n, length in enumerate(lengths)]
    after = later_tokens_changed(docs, frozenset({1, 2}), share, 9, seed)
    for number, (old, new) in enumerate(zip(docs, after, strict=True)):
        kept = tokens_kept(len(old), share)
        assert kept >= 1 and (kept == 1 or kept <= len(old) * share)
        changed = old != new
        assert not changed[:kept].any() and not changed[-1]
        assert changed[kept:-1].all() if number in (1, 2) else not changed.any()


@given(st.integers(2, 40))
def test_some_pattern_changes_one_of_each_pair_and_not_the_other(documents: int) -> None:
    patterns = perturbation_patterns(documents)
    for changed, kept in permutations(range(documents), 2):
        assert any(changed in pattern and kept not in pattern for pattern in patterns)
    assert len(patterns) <= 2 * max(1, (documents - 1).bit_length())


@given(st.integers(2, 5), st.integers(0, 5))
def test_perturbed_documents_differ_everywhere_but_in_their_last_token(vocab_size: int, seed: int) -> None:
    docs = random_documents(vocab_size, seed)
    others = perturbed(docs, frozenset({0, 4}), vocab_size, seed)
    for number, (doc, other) in enumerate(zip(docs, others, strict=True)):
        assert other.shape == doc.shape
        if number in (0, 4):
            assert (other[:-1] != doc[:-1]).all() and other[-1] == doc[-1]
            assert other.min() >= 0 and other.max() < vocab_size
        else:
            assert np.array_equal(doc, other)


@given(st.integers(2, 5), st.integers(0, 5), st.integers(0, 1))
def test_every_second_token_differs_but_the_last(vocab_size: int, seed: int, first: int) -> None:
    docs = random_documents(vocab_size, seed)
    for doc, other in zip(docs, every_second_token_changed(docs, first, vocab_size, seed), strict=True):
        assert np.flatnonzero(doc != other).tolist() == list(range(first, len(doc) - 1, 2))


def test_new_tokens_are_those_of_the_data() -> None:
    docs = [np.array([5, 9, 5, 2]), np.array([9, 2])]
    others = perturbed(docs, frozenset({0, 1}), 1000, 0)
    assert others[0].tolist() == [9, 5, 9, 2]  # 2 ends every document: a collator may find them by it
    assert others[1].tolist() == [5, 2]


def test_one_process_is_always_among_them() -> None:
    assert CheckRequest(ranks=(3, 2)).ranks == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": ()}, "--ranks : expected numbers from 1"),
        ({"ranks": (0, 2)}, "--ranks 0 2: expected numbers from 1, such as 1 2 3 4"),
        ({"tolerance": 0.0}, "--tolerance 0.0: expected a number above 0 such as 0.05"),
        ({"source": ModelSource("family", "llama", 0)}, "--layers 0: expected at least 1"),
        (
            {"documents": ((1, 2), (3,), (4, 5))},
            "the data hold 2 documents of two or more tokens, expected at least 4 to",
        ),
        (
            {"documents": ((1, 2),), "ranks": (1,)},
            "the data hold 1 document of two or more tokens, expected at least 2",
        ),
        ({"ranks": (12,)}, "the data hold 11 documents of two or more tokens, expected at least 12 to deal to 12"),
    ],
)
def test_wrong_requests(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        CheckRequest(**changes)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
