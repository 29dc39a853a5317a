"""`Balancer.attention` on several ranks, however the documents are said, equals a dense mask in one process."""

from __future__ import annotations

import balancer_ranks as on_balancer
import numpy as np
import pytest
import ranks as on_rank
import torch

from steelyard.attention import core_attention_reference
from steelyard.domain.layout import Layout
from steelyard.testing.pool import WorkerPool

LENGTHS = [7, 1, 13, 4, 30]


def reference(shards: list[tuple[int, int, int, int]], window: int | None) -> dict[str, np.ndarray]:
    """Everything in one process, documents in order."""
    whole = Layout.from_doc_lengths([LENGTHS])
    q, k, v, dout = on_rank.qkv_of(whole, 0, torch.float64, on_rank.SHAPE)
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    out = q
    for _ in range(2):
        out = core_attention_reference(out, k, v, LENGTHS, window=window)
    (out * dout).sum().backward()
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: tensor.numpy() for name, tensor in found.items()}


def assert_equal(results: list[dict], shards: list[tuple[int, int, int, int]], window: int | None) -> None:
    expected = reference(shards, window)
    first = np.cumsum(LENGTHS) - LENGTHS
    for rank, result in enumerate(results):
        mine = [shard for shard in shards if shard[3] == rank]
        rows = np.concatenate([np.arange(first[d] + s, first[d] + s + n) for d, s, n, _ in mine] or [[]]).astype(int)
        for name, whole in expected.items():
            np.testing.assert_allclose(result[name], whole[rows], rtol=0, atol=1e-11, err_msg=f"{name} of rank {rank}")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_whole_documents(pool: WorkerPool, ranks: int, window: int | None) -> None:
    shards = [(d, 0, n, min(ranks - 1, d * ranks // len(LENGTHS))) for d, n in enumerate(LENGTHS)]
    results = pool.run(on_balancer.attention, ranks, shards, "doc_lens", window, False)
    assert_equal(results, shards, window)
    assert all(result["planned"] == 1 for result in results)


@pytest.mark.parametrize("how", ["own shards", "all shards"])
def test_documents_that_span_ranks(pool: WorkerPool, how: str) -> None:
    shards = [(0, 0, 7, 0), (1, 0, 1, 0), (2, 0, 5, 0), (2, 5, 8, 1), (3, 0, 4, 1), (4, 0, 10, 1), (4, 10, 20, 2)]
    results = pool.run(on_balancer.attention, 3, shards, how, None, False)
    assert_equal(results, shards, None)
    assert [result["planned"] for result in results] == [1 if how == "own shards" else 0] * 3


def test_makes_its_own_planning_group(pool: WorkerPool) -> None:
    shards = [(d, 0, n, d % 4) for d, n in enumerate(LENGTHS)]
    shards.sort(key=lambda shard: shard[3])
    assert_equal(pool.run(on_balancer.attention, 4, shards, "doc_lens", None, True), shards, None)


def test_ranks_that_come_for_different_things_all_say_so(pool: WorkerPool) -> None:
    for text in pool.run(on_balancer.come_for_different_things, 2):
        assert text.startswith("UsageError: planning of step 0: ranks came with documents (0), shards (1)")


def test_ranks_with_other_settings_all_say_so(pool: WorkerPool) -> None:
    one, other = pool.run(on_balancer.differ_in_a_setting, 2)
    assert one == other
    assert one.pop("shards") == one.pop("rate") == "no error"
    for name, (first, second) in {**on_balancer.SETTINGS, "reorder": (False, True)}.items():
        text = f"{name} is {first} on rank 0 and {second} on rank 1; give every rank the same"
        assert one.pop(name).startswith("UsageError: planning of step ") and text in other[name]
    assert not one


def test_ranks_that_give_a_call_other_arguments_all_say_so(pool: WorkerPool) -> None:
    said = pool.run(on_balancer.differ_in_a_call, 3)
    assert said[0] == said[1] == said[2]
    shown = {"window": "3", "softcap": "2.0", "scale": "0.5", "sink": "given"}
    for name, value in shown.items():
        text = f"{name}=None on rank 0 and {name}={value} on rank 2; give every rank the same"
        first, second = said[0][f"{name} first"], said[0][f"{name} second"]
        assert first[0] == f"UsageError: planning of step 0: attention of layer 0 in step 0: {text}"
        assert second[:2] == ["no error"] * 2, "planned before it is called"
        assert second[2] == f"UsageError: planning of step 1: attention of layer 1 in step 0: {text}"


def test_arguments_that_change_alike_are_no_difference_however_far_ranks_plan_ahead(pool: WorkerPool) -> None:
    assert pool.run(on_balancer.differ_in_a_window_by_steps, 2) == [["no error"] * 4] * 2


def test_a_step_planned_ahead_is_ordered_by_the_same_work_and_speeds(pool: WorkerPool) -> None:
    lengths = [[[100], [10] * 30], [[10] * 30, [100]]]
    at_once, ahead = (pool.run(on_balancer.order, 2, lengths, early) for early in (False, True))
    assert at_once == ahead
    assert [result["equal 0"][0] for result in at_once] != [(0, 1)] * 2, "the long documents belong together"
    assert [result["equal 17"][0] for result in at_once] == [(0, 1)] * 2, "with what a query costs, all are alike"
    for row_keys in (0, 17):
        for slow, fast in at_once[0][f"measured {row_keys}"][1]:
            assert fast / slow == pytest.approx(4, rel=0.1)
