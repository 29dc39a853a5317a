from __future__ import annotations

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.planner.baselines import plan_wlb
from steelyard.planner.baselines.wlb import TOKEN_CAP_PERCENT
from steelyard.planner.checks import verify


def test_documents_stay_whole_and_nothing_is_sent() -> None:
    plan = plan_wlb(Layout.contiguous([10, 30, 8], 12, 4), Topology(4), LLAMA3_8B, 0.05)
    assert not plan.layout.spans_ranks
    assert plan.layout.doc_lengths.tolist() == [10, 30, 8]
    report = verify(plan)
    assert report.bytes_total == report.moved_tasks == 0


def test_short_documents_fill_the_ranks_that_have_no_long_one() -> None:
    layout = Layout.from_doc_lengths([[100], [50, 50], [10] * 10])
    plan = plan_wlb(layout, Topology(3), LLAMA3_8B, 0.05)
    assert plan.layout.tokens_by_rank.tolist() == [100, 100, 100]
    assert verify(plan).work_by_server.tolist() == [5_050, 1_275 + 5 * 55, 1_275 + 5 * 55]


def test_memory_is_uneven_up_to_the_cap() -> None:
    layout = Layout.from_doc_lengths([[1_000], *[[10] * 100] * 3])
    tokens = plan_wlb(layout, Topology(4), LLAMA3_8B, 0.05).layout.tokens_by_rank
    assert tokens.tolist() == [1_000] * 4  # the long one's work exceeds all the others'
    layout = Layout.from_doc_lengths([[700, *[10] * 30], [500, 500], [10] * 100, [10] * 100])
    tokens = plan_wlb(layout, Topology(4), LLAMA3_8B, 0.05).layout.tokens_by_rank
    assert tokens.tolist() == [700, 900, 900, 1_500]


def test_the_longest_document_raises_the_cap() -> None:
    plan = plan_wlb(Layout.contiguous([40], 10, 4), Topology(4), LLAMA3_8B, 0.05)
    assert plan.layout.tokens_by_rank.tolist() == [40, 0, 0, 0]
    assert TOKEN_CAP_PERCENT < 400


def test_slow_ranks_get_less() -> None:
    layout = Layout.from_doc_lengths([[10] * 20, [10] * 20])
    report = verify(plan_wlb(layout, Topology(2, speeds=(1.0, 0.5)), LLAMA3_8B, 0.05))
    assert report.work_by_server.tolist() == [27 * 55, 13 * 55]
    report = verify(plan_wlb(layout, Topology(2, speeds=(0.0, 1.0)), LLAMA3_8B, 0.05))
    assert report.work_by_server.tolist() == [0, 40 * 55]
