"""Layouts: equal tokens, even work, few bytes; the count of bytes against the tables."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import SMALL_SHAPE, TOLERANCES, WINDOWS, layouts

from steelyard.domain.layout import Layout
from steelyard.domain.plan import DispatchPlan
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.domain.topology import Topology
from steelyard.errors import PlanError, UsageError
from steelyard.planner import layouts as planner_layouts
from steelyard.planner import make_plan
from steelyard.planner.checks import verify
from steelyard.planner.layouts import (
    FORWARD,
    _Filling,
    _Mix,
    bytes_sent,
    choose_layout,
    layout_candidates,
    weighted_bytes_sent,
    woven_layout,
)
from steelyard.planner.tables import build_all_tables
from steelyard.planner.work import RowWork

LENGTHS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3_000)), min_size=1, max_size=12)
LONG = st.lists(st.one_of(st.integers(1, 3_000), st.integers(10_000, 60_000)), min_size=4, max_size=30)
SPEED = st.sampled_from([0.0, 0.25, 1.0, 1.0])


@settings(max_examples=200)
@given(layouts(), TOLERANCES, WINDOWS, st.sampled_from(["balanced", "packed"]))
def test_bytes_are_those_of_the_tables(layout: Layout, tolerance: float, window: int | None, policy: str) -> None:
    plan = make_plan(layout, policy=policy, shape=SMALL_SHAPE, tolerance=tolerance, window=window)
    assert bytes_sent(plan) == verify(plan).bytes_total


@settings(max_examples=200)
@given(LENGTHS, st.integers(1, 9), TOLERANCES, st.none() | st.integers(1, 500), st.data())
def test_every_rank_gets_equally_many_tokens(
    lengths: list[int], ranks: int, tolerance: float, window: int | None, data: st.DataObject
) -> None:
    speeds = data.draw(st.just([]) | st.lists(SPEED, min_size=ranks, max_size=ranks).filter(any))
    topology = Topology(ranks, speeds=tuple(speeds))
    per_rank = -(-sum(lengths) // ranks)
    layout = woven_layout(lengths, per_rank, ranks, topology=topology, tolerance=tolerance, window=window)
    assert layout.doc_lengths.tolist() == [length for length in lengths if length]
    assert layout.tokens_by_rank.max() <= per_rank
    assert layout.tokens_by_rank.max() - layout.tokens_by_rank.min() <= 1
    report = verify(make_plan(layout, topology=topology, shape=SMALL_SHAPE, tolerance=tolerance, window=window))
    assert report.pairs_total == verify(make_plan(
        Layout.contiguous(lengths, per_rank, ranks), policy="packed", shape=SMALL_SHAPE, window=window
    )).pairs_total  # fmt: skip


def test_one_document_alone_is_about_head_tail() -> None:
    for ranks in (2, 4, 7):
        woven = woven_layout([ranks * 8_192], 8_192, ranks, tolerance=0.02)
        even = Layout.head_tail([ranks * 8_192], ranks)
        costs = [bytes_sent(make_plan(layout, shape=LLAMA3_8B, tolerance=0.02)) for layout in (woven, even)]
        assert costs[0] <= 1.01 * costs[1]


def test_among_short_documents_a_long_one_is_cut_into_equal_work() -> None:
    layout = woven_layout([65_536, *[1_024] * 192], 65_536, 4, tolerance=0.02)
    plan = make_plan(layout, policy="packed", shape=LLAMA3_8B)
    report = verify(plan)
    assert report.work_max_over_mean <= 1.02
    # Four parts of equal work end at √(j/4) of the length; each but the first needs the keys before it.
    ideal = sum(65_536 * (part / 4) ** 0.5 for part in (1, 2, 3)) * LLAMA3_8B.beta_bytes
    assert report.bytes_total <= 1.05 * ideal


def test_whole_documents_are_not_cut_where_that_is_even() -> None:
    layout = woven_layout([4_000, 4_000, 1_000, 1_000], 5_000, 2, tolerance=0.02)
    assert layout.shards == 4
    assert layout.tokens_by_rank.tolist() == [5_000, 5_000]


def test_a_slow_rank_gets_light_documents() -> None:
    topology = Topology(2, speeds=(1.0, 0.1))
    layout = woven_layout([8_192, *[64] * 128], 8_192, 2, topology=topology, tolerance=0.05)
    work = np.zeros(2)
    np.add.at(work, layout.shard_rank, layout.shard_length * (2 * layout.shard_start + layout.shard_length))
    assert work[1] < 0.15 * work[0]


def test_long_documents_are_cut_at_blocks() -> None:
    layout = woven_layout([30_001, 20_003, 9_999, *[700] * 30], 20_251, 4, tolerance=0.02)
    late = layout.shard_start[(layout.shard_start > 0) & (layout.doc_lengths[layout.shard_doc] > 5_000)]
    assert len(late) and np.count_nonzero(late % 128 == 0) >= len(late) - 3


def test_ranks_that_share_a_document_are_neighbours() -> None:
    layout = woven_layout([40_000, 39_000, *[100] * 10], 10_000, 8, tolerance=0.05)
    first = set(layout.shard_rank[layout.shard_doc == 0].tolist())
    assert first <= set(range(min(first), min(first) + len(first) + 1))


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 6), TOLERANCES, WINDOWS)
def test_fillings_are_what_they_say(lengths: list[int], ranks: int, tolerance: float, window: int | None) -> None:
    """The running totals, kept up while parts come and go at both ends, against adding up parts."""
    weigh, rows = _Mix.weigh, RowWork(window)

    def checked(mix: _Mix, count: int) -> _Filling:
        found, shelf, dense = weigh(mix, count), mix.shelf, mix.dense
        assert list(shelf.parts[shelf.first :]) == sorted(shelf.parts[shelf.first :])
        light = [(part.start, part.end) for part in shelf.parts[shelf.first : found.whole]]
        ranges = [*light, (dense.end - count, dense.end), (dense.start, dense.start + found.head)]
        if found.cut:
            start = shelf.parts[found.further].start
            ranges.append((start, start + found.cut))
        assert found.tokens == sum(end - start for start, end in ranges) <= mix.tokens
        assert found.work == sum(rows.of(start, end) for start, end in ranges)
        if found.whole < len(shelf.parts):
            further = shelf.parts[found.whole]
            assert sum(end - start for start, end in light) + count + further.end - further.start > mix.tokens
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Mix, "weigh", checked)
        woven_layout(lengths, -(-sum(lengths) // ranks), ranks, tolerance=tolerance, window=window)


@settings(max_examples=100)
@given(LENGTHS | LONG, st.integers(2, 6), TOLERANCES)
def test_a_tail_is_as_long_as_its_work_allows(lengths: list[int], ranks: int, tolerance: float) -> None:
    """Found in a few steps, not one by one: a block more is too much work."""
    search = planner_layouts._longest_within

    def checked(mix: _Mix, none: _Filling, guess: int, most: int) -> _Filling:
        found = search(mix, none, guess, most)
        assert found.work <= most
        block = 128 if mix.dense.end >= 512 else 1
        longer = found.tail + block if found.tail else mix.dense.end - (mix.dense.end - 1) // block * block
        assert longer > mix.longest or mix.weigh(longer).work > most
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_layouts, "_longest_within", checked)
        woven_layout(lengths, -(-sum(lengths) // ranks), ranks, tolerance=tolerance)


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 6), TOLERANCES)
def test_the_choice_is_the_cheapest_candidate(lengths: list[int], ranks: int, tolerance: float) -> None:
    per_rank = -(-sum(lengths) // ranks) + 3
    chosen = choose_layout(lengths, per_rank, ranks, shape=LLAMA3_8B, tolerance=tolerance)
    costs = [
        bytes_sent(make_plan(layout, shape=LLAMA3_8B, tolerance=tolerance))
        for layout in (chosen, *layout_candidates(lengths, per_rank, ranks, tolerance=tolerance).values())
    ]
    assert costs[0] == min(costs)


@pytest.mark.parametrize("parts", [[32], [24, 8], [24, 7, 1]])
def test_documents_over_many_ranks_are_compared_too(parts: list[int]) -> None:
    """Among 32 ranks or more the woven layout is not always the cheapest of these."""
    lengths = [part * 16_384 for part in parts]
    layouts = layout_candidates(lengths, 16_384, 32, tolerance=0.02)
    costs = {name: bytes_sent(make_plan(each, shape=LLAMA3_8B, tolerance=0.02)) for name, each in layouts.items()}
    chosen = choose_layout(lengths, 16_384, 32, shape=LLAMA3_8B, tolerance=0.02)
    assert bytes_sent(make_plan(chosen, shape=LLAMA3_8B, tolerance=0.02)) == min(costs.values()) < costs["woven"]


def weighted_bytes(plan: DispatchPlan) -> float:
    """Bytes of both phases of the forward pass; those inside a node with their weight."""
    near, far = bytes_by_nearness(plan)
    return far + near * plan.topology.intra_node_weight


def bytes_by_nearness(plan: DispatchPlan) -> tuple[int, int]:
    """Bytes of both phases of the forward pass that stay in a node, and that leave one."""
    sizes, topology = [0, 0], plan.topology
    for table in build_all_tables(plan):
        for sent, row_bytes in ((table.q_send, plan.shape.alpha_bytes), (table.kv_send, plan.shape.beta_bytes)):
            for peer, rows in zip(sent.peer.tolist(), sent.rows.tolist(), strict=True):
                near = peer // topology.node_size == table.rank // topology.node_size
                sizes[0 if near else 1] += rows * row_bytes
    return sizes[0], sizes[1]


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    "lengths",
    # Equal long documents lie whole in a node as they are packed; weaving takes them apart.
    [[40_000, 40_000], [16_000] * 5, [70_000, *[500] * 20], [9_000, 30_000, 800, 800, 20_000]],
)
def test_bytes_inside_a_node_count_less_in_the_choice(lengths: list[int], weight: float) -> None:
    topology, per_rank = Topology(8, node_size=4, intra_node_weight=weight), -(-sum(lengths) // 8)
    candidates = layout_candidates(lengths, per_rank, 8, topology=topology)
    chosen = choose_layout(lengths, per_rank, 8, shape=LLAMA3_8B, topology=topology)
    costs = [
        weighted_bytes(make_plan(layout, shape=LLAMA3_8B, topology=topology))
        for layout in (chosen, *candidates.values())
    ]
    assert costs[0] == pytest.approx(min(costs))


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.3, 1.0])
def test_the_choice_goes_by_whole_numbers(weight: float) -> None:
    """A sum of floats is rounded, and could fall out otherwise elsewhere."""
    topology = Topology(8, node_size=4, intra_node_weight=weight)
    layout = Layout.contiguous([9_000, 30_001, 800, 801, 20_003], 7_576, 8)
    cost = weighted_bytes_sent(make_plan(layout, shape=LLAMA3_8B, topology=topology), FORWARD)
    assert isinstance(cost, int)
    units = Fraction(round(1_024 * weight), 1_024)
    near, far = bytes_by_nearness(make_plan(layout, shape=LLAMA3_8B, topology=topology))
    assert near > 0 < far
    assert cost == 1_024 * (far + units * near)


def test_a_candidate_that_memory_forbids_is_passed_over() -> None:
    """Woven, every rank needs keys of the long documents; packed one after another, two ranks need none."""
    lengths, topology = [8_000, 8_000], Topology(4, memory_tokens=(0, 4_000, 0, 4_000))
    candidates = layout_candidates(lengths, 4_000, 4, topology=topology)
    with pytest.raises(PlanError):
        make_plan(candidates["woven"], shape=LLAMA3_8B, topology=topology)
    layout = choose_layout(lengths, 4_000, 4, shape=LLAMA3_8B, topology=topology)
    assert layout.shard_rank.tolist() == candidates["contiguous"].shard_rank.tolist()
    assert layout.shard_start.tolist() == candidates["contiguous"].shard_start.tolist()
    with pytest.raises(PlanError, match="no layout fits"):
        choose_layout(lengths, 4_000, 4, shape=LLAMA3_8B, topology=Topology(4, memory_tokens=(0,) * 4))


def test_a_late_piece_under_a_memory_cap_lies_with_the_head_it_needs() -> None:
    """The end of document 0 needs more earlier keys than any rank may receive, unless that rank holds some of them."""
    lengths, topology = [20_000, *[500] * 88], Topology(4, memory_tokens=(13_000,) * 4)
    free = choose_layout(lengths, 16_000, 4, shape=LLAMA3_8B, tolerance=0.02)
    with pytest.raises(PlanError, match="raise its memory_tokens"):
        make_plan(free, shape=LLAMA3_8B, topology=topology, tolerance=0.02)
    chosen = choose_layout(lengths, 16_000, 4, shape=LLAMA3_8B, topology=topology, tolerance=0.02)
    report = verify(make_plan(chosen, shape=LLAMA3_8B, topology=topology, tolerance=0.02))
    assert report.work_max_over_mean <= 1.02


def test_ranks_with_other_memory_keep_their_own_parts() -> None:
    lengths, memory = [20_000, *[500] * 88], (40_000, 40_000, 40_000, 12_000)
    layout = choose_layout(lengths, 16_000, 4, shape=LLAMA3_8B, topology=Topology(4, memory_tokens=memory))
    assert verify(make_plan(layout, shape=LLAMA3_8B, topology=Topology(4, memory_tokens=memory))).bytes_total


def test_a_balanced_candidate_is_taken_before_a_cheaper_one_that_memory_unbalances() -> None:
    lengths, topology = [7_530, 15_722, 748], Topology(3, memory_tokens=(9_250,) * 3)
    candidates = layout_candidates(lengths, 8_000, 3, topology=topology, tolerance=0.02)
    reports = {
        name: verify(make_plan(layout, shape=LLAMA3_8B, topology=topology, tolerance=0.02))
        for name, layout in candidates.items()
    }
    assert reports["contiguous"].bytes_total < reports["woven"].bytes_total
    assert reports["contiguous"].work_max_over_mean > 1.02 >= reports["woven"].work_max_over_mean
    layout = choose_layout(lengths, 8_000, 3, shape=LLAMA3_8B, topology=topology, tolerance=0.02)
    assert layout.shard_start.tolist() == candidates["woven"].shard_start.tolist()


def check_bytes_on_workload(path: Path, published: dict[str, float]) -> None:
    workload = json.loads(path.read_text())
    sent = []
    for batch in workload["batches"]:
        layout = choose_layout(
            batch["docs"], workload["tokens_per_rank"], workload["ranks"], shape=LLAMA3_8B, tolerance=0.02
        )
        assert layout.tokens_by_rank.max() <= workload["tokens_per_rank"]
        report = verify(make_plan(layout, shape=LLAMA3_8B, tolerance=0.02))
        assert report.work_max_over_mean <= 1.02
        sent.append(report.bytes_total)
    assert sum(sent) / len(sent) <= 0.75 * published[path.stem]


@pytest.fixture(scope="module")
def published(shared_dir: Path) -> dict[str, float]:
    rows = json.loads((shared_dir / "workloads" / "reference_results.json").read_text())["rows"]
    return {row["workload"]: row["gigabytes"] * 1e9 for row in rows if row["tolerance"] == 0.02}


@pytest.mark.parametrize("name", ["prolong_ctx512K_T128K_n8", "prolong_ctx512K_T64K_n64", "pretrain_ctx256K_T128K_n8"])
def test_bytes_against_the_published_planner(shared_dir: Path, published: dict[str, float], name: str) -> None:
    check_bytes_on_workload(shared_dir / "workloads" / f"{name}.json", published)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_bytes_against_the_published_planner_everywhere(shared_dir: Path, published: dict[str, float]) -> None:
    for path in sorted((shared_dir / "workloads").glob("*_n*.json")):
        check_bytes_on_workload(path, published)


@pytest.mark.parametrize(
    ("lengths", "changes", "message"),
    [
        ([30, 1], {}, "31 tokens do not fit 3 ranks of 10"),
        ([30, -1], {}, "-1"),
        ([3], {"topology": Topology(2)}, "2 servers for 3 ranks"),
    ],
)
def test_mistakes_are_explained(lengths: list[int], changes: dict[str, Topology], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        woven_layout(lengths, 10, 3, **changes)
    with pytest.raises(UsageError, match=message):
        choose_layout(lengths, 10, 3, shape=SMALL_SHAPE, **changes)
