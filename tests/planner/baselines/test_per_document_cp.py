from __future__ import annotations

import numpy as np

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.planner.baselines import plan_per_document_cp
from steelyard.planner.checks import verify


def test_case_positions() -> None:
    """cu_seqlens [0, 4, 8] on two ranks: each document head–tail, positions from 0 in each."""
    plan = plan_per_document_cp(Layout.from_doc_lengths([[4], [4]]), Topology(2), LLAMA3_8B, 0.0)
    positions: list[list[int]] = [[], []]
    tokens: list[list[int]] = [[], []]
    for shard in plan.layout:
        positions[shard.rank] += range(shard.start, shard.start + shard.length)
        tokens[shard.rank] += range(4 * shard.doc + shard.start, 4 * shard.doc + shard.start + shard.length)
    assert tokens == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert positions == [[0, 3, 0, 3], [1, 2, 1, 2]]


def test_any_mix_is_balanced_within_a_group_in_work_and_tokens() -> None:
    lengths = [40_001, 17_000, *[999] * 30, 123]
    layout = Layout.contiguous(lengths, 11_000, 8)
    plan = plan_per_document_cp(layout, Topology(8), LLAMA3_8B, 0.05)
    report = verify(plan)
    assert report.work_max_over_mean < 1.01
    assert np.ptp(plan.layout.tokens_by_rank) <= 2 * len(lengths)
    assert report.pairs_total == sum(n * (n + 1) // 2 for n in lengths)


def test_groups_are_not_balanced_with_each_other() -> None:
    layout = Layout.contiguous([8_000, *[100] * 80], 4_000, 4)
    report = verify(plan_per_document_cp(layout, Topology(4, node_size=2), LLAMA3_8B, 0.05))
    assert report.work_max_over_mean > 1.9
