from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import SMALL_SHAPE, contiguous_layouts, layouts, spanning_layouts

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B, AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.baselines import greedy, plan_greedy
from steelyard.planner.baselines.greedy import head_tail_where_spanning
from steelyard.planner.checks import verify


def test_deficits_are_filled_until_they_are_within_tolerance() -> None:
    layout = Layout.from_doc_lengths([[32_000, 32_000], [64_000], [1_000] * 64, [8_000] * 8])
    before = verify(plan_greedy(layout, Topology(4), LLAMA3_8B, 10.0))
    assert before.moved_tasks == 0
    work = verify(plan_greedy(layout, Topology(4), LLAMA3_8B, 0.02)).work_by_server
    assert work.min() >= 0.98 * work.mean()


def test_small_deficits_move_nothing_however_large_one_surplus_is() -> None:
    layout = Layout.from_doc_lengths([[131_072], *[[65_536, 65_536]] * 63])
    report = verify(plan_greedy(layout, Topology(64), LLAMA3_8B, 0.02))
    assert report.moved_tasks == 0
    assert report.work_max_over_mean == pytest.approx(1.97, abs=0.01)


def test_a_cut_takes_as_many_queries_from_the_front_as_from_the_back() -> None:
    plan = plan_greedy(Layout.from_doc_lengths([[1_000], []]), Topology(2), LLAMA3_8B, 0.0)
    moved = [(t.start, t.end) for t in plan.tasks if t.server == 1]
    assert moved == [(0, 250), (750, 1_000)]
    assert verify(plan).work_by_server.tolist() == [250_250, 250_250]


def test_work_per_byte_decides_which_document_moves() -> None:
    plan = plan_greedy(Layout.from_doc_lengths([[400, 200], [300]]), Topology(2), LLAMA3_8B, 0.05)
    assert {t.doc for t in plan.tasks if t.server == 1} == {0, 2}  # a part of the long one, though the short one fits


@settings(max_examples=80)
@given(spanning_layouts())
def test_spanning_documents_are_dealt_to_the_ranks_that_held_them(layout: Layout) -> None:
    dealt = head_tail_where_spanning(layout)
    assert dealt.doc_lengths.tolist() == layout.doc_lengths.tolist()
    held, now = (
        np.bincount(x.shard_doc * x.ranks + x.shard_rank, weights=x.shard_length, minlength=x.docs * x.ranks)
        for x in (layout, dealt)
    )
    assert held.tolist() == now.tolist()


def test_the_head_tail_deal_of_a_document_on_three_ranks() -> None:
    dealt = head_tail_where_spanning(Layout.contiguous([12], 4, 3))
    assert [(s.rank, s.start, s.length) for s in dealt] == [
        (0, 0, 2), (0, 10, 2), (1, 2, 2), (1, 8, 2), (2, 4, 2), (2, 6, 2),
    ]  # fmt: skip


@settings(max_examples=60)
@given(contiguous_layouts(longest=3_000))
def test_under_loaded_servers_end_within_tolerance_of_their_share(layout: Layout) -> None:
    report = verify(plan_greedy(layout, Topology(layout.ranks), SMALL_SHAPE, 0.05))
    share = report.pairs_total / layout.ranks
    # A row from the front and one from the back is the least that moves: every server may keep a surplus below that.
    assert report.work_by_server.min() >= 0.95 * share - layout.ranks * (int(layout.doc_lengths.max()) + 2)


def test_same_lengths_same_plan() -> None:
    layout = Layout.contiguous([30_000, 5_000, *[700] * 60, 12_345], 12_000, 8)
    one, other = (plan_greedy(layout, Topology(8), LLAMA3_8B, 0.02) for _ in range(2))
    assert one.tasks.server.tolist() == other.tasks.server.tolist()
    assert one.tasks.start.tolist() == other.tasks.start.tolist()


@settings(max_examples=200)
@given(
    layouts(longest=40, most_ranks=6) | layouts(longest=3_000, most_ranks=6),
    st.sampled_from([SMALL_SHAPE, LLAMA3_8B, AttentionShape(1, 1, 1)]),
    st.sampled_from([0.0, 0.02, 0.2]),
    st.none() | st.none() | st.integers(2, 500),
    st.booleans(),
)
def test_many_documents_are_moved_as_few_are(
    layout: Layout, shape: AttentionShape, tolerance: float, window: int | None, uneven: bool
) -> None:
    """What is not priced among many would not be taken."""
    topology = Topology(layout.ranks, speeds=tuple(1.0 + rank % 3 for rank in range(layout.ranks)) if uneven else ())
    found = []
    for few in (0, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(greedy, "FEW_ITEMS", few)
            tasks = plan_greedy(layout, topology, shape, tolerance, window).tasks
        found.append(list(zip(tasks.start.tolist(), tasks.server.tolist(), tasks.shard.tolist(), strict=True)))
    assert found[0] == found[1]


def test_many_documents_are_not_priced_for_every_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the documents, four times the moves, and not much more to price for each."""
    priced = [0]
    cut = greedy._Items.cut

    def counting(items: greedy._Items, *args: Any) -> Any:
        priced[0] += len(items.server)
        return cut(items, *args)

    monkeypatch.setattr(greedy._Items, "cut", counting)
    monkeypatch.setattr(greedy, "FEW_ITEMS", 300)
    for lengths in ([1] * 400, list(range(1, 401))):
        counts = []
        for times in (1, 4):
            priced[0] = 0
            plan = plan_greedy(Layout.from_doc_lengths([lengths * times, [], [], []]), Topology(4), LLAMA3_8B, 0.05)
            counts.append(priced[0])
            assert (plan.tasks.server > 0).sum() >= 60 * times
        assert 0 < counts[1] <= 8 * counts[0]
