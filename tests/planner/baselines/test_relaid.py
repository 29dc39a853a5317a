from __future__ import annotations

import numpy as np
import pytest

from steelyard.domain.layout import Layout
from steelyard.domain.topology import Topology
from steelyard.planner.baselines.relaid import cut_at_ranks, grouped_documents, head_tail_pieces


def pieces_by_rank(length: int, ranks: int) -> dict[int, list[tuple[int, int]]]:
    _, start, end, rank = head_tail_pieces(np.array([length]), np.array([ranks]))
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for piece in zip(rank.tolist(), start.tolist(), end.tolist(), strict=True):
        by_rank.setdefault(piece[0], []).append(piece[1:])
    return by_rank


def test_front_and_back_go_together_and_the_middle_is_one_piece() -> None:
    assert pieces_by_rank(12, 3) == {0: [(0, 2), (10, 12)], 1: [(2, 4), (8, 10)], 2: [(4, 8)]}
    assert pieces_by_rank(7, 1) == {0: [(0, 7)]}


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 100, 4_097])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pieces_tile_the_line_evenly(length: int, ranks: int) -> None:
    by_rank = pieces_by_rank(length, ranks)
    tokens = sorted(token for pieces in by_rank.values() for low, high in pieces for token in range(low, high))
    assert tokens == list(range(length))
    counts = [sum(high - low for low, high in by_rank.get(rank, [])) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 2


def test_documents_are_cut_where_a_group_ends() -> None:
    layout = Layout.contiguous([10, 30, 8], 12, 4)
    documents = grouped_documents(layout, Topology(4, node_size=2))
    assert documents.group_rank.tolist() == [0, 4]  # the longest document needs three ranks, so two nodes are one group
    assert documents.part_length.tolist() == [10, 30, 8]
    documents = grouped_documents(Layout.contiguous([10, 20, 8, 10], 12, 4), Topology(4, node_size=2))
    assert documents.group_rank.tolist() == [0, 2, 4]
    assert documents.group_end.tolist() == [24, 48]
    assert documents.part_length.tolist() == [10, 14, 6, 8, 10]
    assert documents.part_group.tolist() == [0, 0, 1, 1, 1]


def test_groups_share_what_does_not_divide() -> None:
    layout = Layout.from_doc_lengths([[10]] * 21)
    assert np.diff(grouped_documents(layout, Topology(21)).group_rank).tolist() == [10, 11]


def test_cut_at_ranks_makes_every_shard_a_document() -> None:
    cut = cut_at_ranks(Layout.contiguous([10, 3], 5, 3))
    assert cut.doc_lengths.tolist() == [5, 5, 3]
    assert not cut.spans_ranks
    assert cut.tokens_by_rank.tolist() == [5, 5, 3]
