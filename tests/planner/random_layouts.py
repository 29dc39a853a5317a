"""Random layouts for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape

SMALL_SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=8)


def whole_documents(lengths: Sequence[int], ranks: Sequence[int], count: int) -> Layout:
    by_rank: list[list[int]] = [[] for _ in range(count)]
    for length, rank in zip(lengths, ranks, strict=True):
        by_rank[rank].append(length)
    return Layout.from_doc_lengths(by_rank)


@st.composite
def whole_layouts(draw: st.DrawFn, *, longest: int = 40, most_ranks: int = 6) -> Layout:
    """Documents whole on any rank; some ranks stay empty."""
    count = draw(st.integers(1, most_ranks))
    lengths = draw(st.lists(st.integers(1, longest), max_size=8))
    ranks = draw(st.lists(st.integers(0, count - 1), min_size=len(lengths), max_size=len(lengths)))
    return whole_documents(lengths, ranks, count)


@st.composite
def spanning_layouts(draw: st.DrawFn, *, longest: int = 40, most_ranks: int = 6) -> Layout:
    """Documents in pieces of any length on any ranks, in any order on each: contiguous, head-tail and worse."""
    count = draw(st.integers(1, most_ranks))
    shards = []
    for doc, length in enumerate(draw(st.lists(st.integers(1, longest), min_size=1, max_size=5))):
        cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
        for start, end in pairwise(cuts):
            shards.append((doc, start, end - start, draw(st.integers(0, count - 1))))
    return Layout.from_shards(draw(st.permutations(shards)), count)


@st.composite
def contiguous_layouts(draw: st.DrawFn, *, longest: int = 40, most_ranks: int = 6) -> Layout:
    """Documents packed rank after rank, the last ranks possibly empty."""
    count = draw(st.integers(1, most_ranks))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=8))
    least = -(-sum(lengths) // count)
    return Layout.contiguous(lengths, least + draw(st.integers(0, 5)), count)


def layouts(*, longest: int = 40, most_ranks: int = 6) -> st.SearchStrategy[Layout]:
    return st.one_of(
        [
            strategy(longest=longest, most_ranks=most_ranks)
            for strategy in (whole_layouts, spanning_layouts, contiguous_layouts)
        ]
    )


WINDOWS = st.none() | st.integers(1, 20)
TOLERANCES = st.sampled_from([0.0, 0.005, 0.02, 0.05, 0.3, 1.0])
