from __future__ import annotations

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.planner.baselines import plan_head_tail
from steelyard.planner.checks import verify


def test_the_sequence_is_dealt_whatever_the_documents() -> None:
    plan = plan_head_tail(Layout.from_doc_lengths([[4], [4]]), Topology(2), LLAMA3_8B, 0.0)
    held = [(s.rank, s.doc, s.start, s.length) for s in plan.layout]
    assert held == [(0, 0, 0, 2), (0, 1, 2, 2), (1, 0, 2, 2), (1, 1, 0, 2)]


def test_one_document_is_balanced_and_several_are_not() -> None:
    one = verify(plan_head_tail(Layout.contiguous([64_000], 8_000, 8), Topology(8), LLAMA3_8B, 0.05))
    assert one.work_max_over_mean < 1.001
    several = verify(plan_head_tail(Layout.contiguous([48_000, *[1_000] * 16], 8_000, 8), Topology(8), LLAMA3_8B, 0.05))
    assert several.work_max_over_mean > 1.2


def test_most_keys_go_almost_everywhere() -> None:
    report = verify(plan_head_tail(Layout.contiguous([16_000], 2_000, 8), Topology(8), LLAMA3_8B, 0.05))
    # Rank i has pieces i and 15 − i of 1,000 tokens: it needs the first 16,000 − 1,000 i keys and holds 2,000 of them.
    needed = sum(16_000 - 1_000 * i - 2_000 for i in range(8))
    assert report.bytes_total == needed * LLAMA3_8B.beta_bytes
    assert report.moved_tasks == 0
