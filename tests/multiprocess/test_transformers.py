"""The Transformers integration on several ranks: every way gives what the documents give one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers_ranks as on_rank

from steelyard.testing.pool import WorkerPool

# The models themselves round to fp32 in their norms, router and loss, whatever their parameters are.
IN_FP64 = 3e-7
LENGTHS = [7, 1, 13, 4, 0, 30]


def dealt(ranks: int) -> list[list[int]]:
    """The documents in blocks over the ranks."""
    per_rank: list[list[int]] = [[] for _ in range(ranks)]
    for doc, length in enumerate(LENGTHS):
        per_rank[min(ranks - 1, doc * ranks // len(LENGTHS))].append(length)
    return per_rank


def assert_same(result: dict[str, Any], loss: float, gradients: dict[str, np.ndarray], bound: float) -> None:
    assert result["loss"] == pytest.approx(loss, rel=bound, abs=bound)
    for name, gradient in gradients.items():
        scale = max(1.0, float(np.abs(gradient).max()))
        np.testing.assert_allclose(result["gradients"][name], gradient, rtol=0, atol=bound * scale, err_msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.float64, IN_FP64)])
def test_any_number_of_ranks(pool: WorkerPool, ranks: int, dtype: torch.dtype, bound: float) -> None:
    loss, gradients = on_rank.one_by_one(dealt(ranks), "llama", dtype)
    for result in pool.run(on_rank.step, ranks, dealt(ranks), "llama", dtype):
        assert_same(result, loss, gradients, bound)
        assert result["planned"] == 1
    if ranks > 1:
        assert result["order"], "something must travel, or this test shows nothing"


@pytest.mark.parametrize("name", [name for name in on_rank.MODELS if name != "llama"])
def test_model_families(pool: WorkerPool, name: str) -> None:
    loss, gradients = on_rank.one_by_one(dealt(2), name, torch.float64)
    for result in pool.run(on_rank.step, 2, dealt(2), name, torch.float64):
        assert_same(result, loss, gradients, IN_FP64)
        assert result["order"]


@pytest.mark.parametrize("memory", ["keep", "resend"])
@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_checkpointing_sends_and_plans_nothing_twice(
    pool: WorkerPool, checkpointing: str, ping_pong: bool, memory: str
) -> None:
    lengths = dealt(2)
    loss, gradients = on_rank.one_by_one(lengths, "llama", torch.float64)
    args = (2, lengths, "llama", torch.float64)
    plain = pool.run(on_rank.step, *args, "none", memory, ping_pong)
    again = pool.run(on_rank.step, *args, checkpointing, memory, ping_pong)
    for one, other in zip(plain, again, strict=True):
        assert_same(other, loss, gradients, IN_FP64)
        assert sorted(one["order"]) == sorted(other["order"]) and one["order"]
        kernels = [[s[0] for s in result["spans"] if s[1] == "attention"] for result in (one, other)]
        assert sorted(kernels[0]) == sorted(kernels[1])
        assert other["planned"] == 1
    assert again[0]["order"] == again[1]["order"], "every rank must run the same collectives in the same order"


PING = [[40], [8, 9, 3]]
PONG = [[3, 5, 30], [20]]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_ping_pong_equals_one_after_the_other_bit_for_bit(pool: WorkerPool, checkpointing: str, autocast: bool) -> None:
    together = pool.run(on_rank.halves, 2, PING, PONG, True, checkpointing, autocast)
    apart = pool.run(on_rank.halves, 2, PING, PONG, False, checkpointing, autocast)
    for one, other in zip(together, apart, strict=True):
        assert one["loss"] == other["loss"]
        for name, gradient in one["gradients"].items():
            assert np.array_equal(gradient, other["gradients"][name]), name
        assert one["visits"] == other["visits"], "the model's own hooks run as often"
        assert one["order"] != other["order"] and sorted(one["order"]) == sorted(other["order"])
    assert together[0]["order"] == together[1]["order"]
    assert together[0]["forward_visits"][:4] == ["forward 0", "forward 0", "forward 1", "forward 1"]


def test_transfers_of_one_half_lie_under_work_of_the_other(pool: WorkerPool) -> None:
    """From the trace, by the order of events: what one half sends is waited for after the other half has computed."""
    for result in pool.run(on_rank.halves, 2, PING, PONG, True):
        spans = result["spans"]

        def one(name: str, layer: int, nano: int, spans: list[Any] = spans) -> Any:
            found = [s for s in spans if s[0] == name and s[4].get("layer") == layer and s[4].get("nano_batch") == nano]
            return min(found, key=lambda s: s[2])

        for layer in range(2):
            started, computed = one("return", layer, 0)[2], one("local tasks", layer, 1)[2]
            assert started <= computed, "ping's outputs are on their way home before pong computes"
            first_wait = min(s[2] for s in spans if s[0] == "wait return" and s[4]["layer"] == layer)
            assert one("local tasks", layer, 1)[3] <= first_wait, "and are waited for after it has"
            back, other = one("gradient dispatch", layer, 1), one("gradient dispatch", layer, 0)
            kernel = one("local tasks, backward", layer, 1)
            assert back[2] <= other[2] <= kernel[2], "both halves' gradients travel before a kernel needs them"


@pytest.mark.parametrize(
    ("kind", "checkpointing", "ping_pong"),
    [
        (kind, checkpointing, ping_pong)
        for kind in ("ddp", "fsdp2")
        for checkpointing in ("none", "reentrant", "non-reentrant")
        for ping_pong in (False, True)
        if (kind, checkpointing, ping_pong) != ("ddp", "reentrant", True)  # refused: the next test
    ],
)
def test_under_data_parallelism(pool: WorkerPool, kind: str, checkpointing: str, ping_pong: bool) -> None:
    loss, gradients = on_rank.one_by_one(dealt(4), "llama")
    results = pool.run(on_rank.parallel, 4, dealt(4), kind, checkpointing, ping_pong)
    for result in results:
        assert_same(result, loss, gradients, 5e-6)
        assert result["order"] == results[0]["order"] and result["order"]


@pytest.mark.nightly  # it breaks the workers' pool
def test_ddp_refuses_ping_pong_with_reentrant_checkpointing(pool: WorkerPool) -> None:
    """Each half runs its own backward inside the backward pass, and DDP counts a parameter's gradients once."""
    outcomes = pool.run_all(on_rank.parallel, 4, dealt(4), "ddp", "reentrant", True)
    for outcome in outcomes:
        assert outcome.type_name == "RuntimeError" and "reentrant backward passes" in outcome.text


def test_ping_pong_refuses_fsdp2_that_frees_parameters(pool: WorkerPool) -> None:
    for result in pool.run(on_rank.parallel, 4, dealt(4), "fsdp2", "none", True, True):
        assert result["error"].startswith("UsageError") and "set_reshard_after_forward(False)" in result["error"]


def test_what_only_some_ranks_do(pool: WorkerPool) -> None:
    one, other = pool.run(on_rank.one_rank_evaluates, 2)
    for found in (one, other):
        assert "rank 0 evaluates, rank 1 trains" in found["evaluates"]
    assert "only a padding mask" in other["broken"]
    assert one["broken"].startswith("PeerError: rank 1 cannot take the step") and "padding mask" in one["broken"]
    assert one["alone"] == pytest.approx(one["together"], rel=1e-6)
    # Three batches of 11 labels on rank 0, one on rank 1: a mean over tokens, who has none left joins.
    expected = (3 * one["together"] + other["together"]) / 4
    assert [one["ragged"], other["ragged"]] == pytest.approx([expected] * 2, rel=1e-6)


def test_a_rank_that_cannot_read_tells_the_others_whatever_the_error(pool: WorkerPool) -> None:
    one, other, *_ = pool.run(on_rank.one_rank_cannot_read, 4)
    own = {
        "prefetch": (2, "OSError: shard 3 is gone"),
        "evaluate": (2, "OSError: shard 3 is gone"),
        "plan": (0, "UsageError: position_ids of type int"),
        "embeds": (0, "UsageError: PingPong: a batch without input_ids (inputs_embeds cannot be split)"),
        "halves": (0, "UsageError: PingPong: a batch without input_ids (inputs_embeds cannot be split)"),
    }
    for way, (computed, says) in own.items():
        assert other[way][0] == computed == one[way][0], "both computed what came before"
        assert other[way][1].startswith(says)
        said = says.removeprefix("UsageError: ")
        assert one[way][1].startswith(f"PeerError: rank 1 cannot take the step: {said}")
        assert one[way][2] and other[way][2], "and the model is left in training mode"
    for found in (one, other):
        assert found["counted ahead"] == 3 and found["counted after evaluation"] == 6


def test_a_rank_without_documents_and_one_without_labels(pool: WorkerPool) -> None:
    results = pool.run(on_rank.masked_and_empty, 3)
    loss, gradients = on_rank.one_by_one([[20]], "llama")
    assert [result["labels"] for result in results] == [19] * 3
    assert [result["loss"] for result in results] == pytest.approx([loss, 0, 0], rel=1e-6)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all()
        np.testing.assert_allclose(results[0]["gradients"][name], gradient, rtol=0, atol=5e-6, err_msg=name)


def test_ten_steps_twice_are_the_same_bits(pool: WorkerPool) -> None:
    first, second = (pool.run(on_rank.ten_steps, 4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(first[0], first[3], strict=True)), "replicas agree"
