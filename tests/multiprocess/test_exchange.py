"""The three-step exchange against a dense mask in one process: outputs, gradients, empty sides, failures."""

from __future__ import annotations

import numpy as np
import pytest
import ranks as on_rank
import torch

from steelyard.attention import core_attention_reference
from steelyard.domain.layout import Layout
from steelyard.testing.pool import RemoteError, WorkerPool

DOCUMENTS = [7, 1, 13, 4, 0, 30]
"""The lengths of the case 'any number of ranks'."""


def whole_documents(ranks: int) -> list[tuple[int, int, int, int]]:
    """Documents dealt to ranks in blocks; with 4 ranks the last one holds only the long one."""
    lengths = [n for n in DOCUMENTS if n]
    return [(doc, 0, n, min(ranks - 1, doc * ranks // len(lengths))) for doc, n in enumerate(lengths)]


def spanning_documents(ranks: int) -> list[tuple[int, int, int, int]]:
    """Documents laid one after another over equal ranks, so that they are cut by rank ends."""
    layout = Layout.contiguous(DOCUMENTS, -(-sum(DOCUMENTS) // ranks), ranks)
    return [(s.doc, s.start, s.length, s.rank) for s in layout]


def expected(shards: list[tuple[int, int, int, int]], ranks: int, dtype: torch.dtype, layers: int = 1) -> list[dict]:
    """The same function of all documents in one process with a dense mask, cut into ranks again."""
    layout = Layout.from_shards(shards, ranks)
    one = Layout.from_doc_lengths([layout.doc_lengths.tolist()])
    q, k, v, dout = on_rank.qkv_of(one, 0, dtype, on_rank.SHAPE)
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    out = q
    for _ in range(layers):
        out = core_attention_reference(out, k, v, layout.doc_lengths.tolist())
    (out * dout).sum().backward()
    named = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    first = np.concatenate([[0], np.cumsum(layout.doc_lengths)])
    results = []
    for rank in range(ranks):
        rows = [np.arange(s.length) + first[s.doc] + s.start for s in layout if s.rank == rank]
        index = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        results.append({name: tensor.numpy()[index] for name, tensor in named.items()})
    return results


def assert_equal(results: list[dict], references: list[dict], tolerance: float) -> None:
    for rank, (result, reference) in enumerate(zip(results, references, strict=True)):
        for name in ("out", "dq", "dk", "dv"):
            assert result[name].shape == reference[name].shape
            np.testing.assert_allclose(
                result[name], reference[name], rtol=tolerance, atol=tolerance, err_msg=f"{name} of rank {rank}"
            )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shards_of", [whole_documents, spanning_documents])
@pytest.mark.parametrize(
    ("dtype", "backend", "bound"), [(torch.float32, "cpu", 2e-6), (torch.float64, "reference", 1e-12)]
)
def test_any_number_of_ranks(
    pool: WorkerPool, ranks: int, shards_of, dtype: torch.dtype, backend: str, bound: float
) -> None:
    shards = shards_of(ranks)
    results = pool.run(on_rank.attention_of_layout, ranks, shards, dtype, "balanced", 0.0, backend, 2)
    assert_equal(results, expected(shards, ranks, dtype, layers=2), bound)
    if ranks > 1:
        assert sum(sum(r["sent"]) for r in results) > 0, "the case must exchange something"
        assert sum(r["sent"][0] for r in results) == sum(r["received"][0] for r in results)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_resending_equals_keeping(pool: WorkerPool, ranks: int) -> None:
    shards = spanning_documents(ranks)
    kept = pool.run(on_rank.attention_of_layout, ranks, shards, torch.float32, "balanced", 0.0, "cpu", 2, "keep")
    resent = pool.run(on_rank.attention_of_layout, ranks, shards, torch.float32, "balanced", 0.0, "cpu", 2, "resend")
    for one, other in zip(kept, resent, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("memory", ["keep", "resend"])
def test_bytes_are_those_of_the_plan(pool: WorkerPool, memory: str) -> None:
    """Counted where they are sent, against the plan's tables, in both memory modes."""
    ranks, shape = 3, on_rank.SHAPE
    results = pool.run(
        on_rank.attention_of_layout, ranks, spanning_documents(ranks), torch.float32, "balanced", 0.0, "cpu", 1, memory
    )
    for result in results:
        queries, keys = result["sent"]
        q_in, kv_in = result["received"]
        q_bytes, kv_bytes, lse_bytes = shape.query_bytes, shape.key_value_bytes, 4 * shape.heads
        lse = lse_bytes if memory == "resend" else 0
        assert result["bytes"]["dispatch"] == (queries * q_bytes + keys * kv_bytes, q_in * q_bytes + kv_in * kv_bytes)
        assert result["bytes"]["return"] == (q_in * (q_bytes + lse), queries * (q_bytes + lse))
        assert result["bytes"]["gradient return"] == (
            q_in * q_bytes + kv_in * kv_bytes,
            queries * q_bytes + keys * kv_bytes,
        )
        again = (2 * queries * q_bytes + keys * kv_bytes + queries * lse) if memory == "resend" else 0
        assert result["bytes"]["gradient dispatch"][0] == queries * q_bytes + again
    sent = sum(r["bytes"]["dispatch"][0] for r in results) + sum(r["sent"][0] * shape.query_bytes for r in results)
    assert sent == results[0]["report"].bytes_total


@pytest.mark.parametrize("memory", ["keep", "resend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_as_large_as_the_plan_says(pool: WorkerPool, memory: str, dtype: torch.dtype) -> None:
    """What the arena lends, moment by moment, against what `verify` works out from the tables."""
    results = pool.run(on_rank.live_bytes, 3, spanning_documents(3), dtype, memory)
    assert [r["counted"] for r in results] == [r["planned"] for r in results]
    assert all(r["counted"][0] > 0 for r in results)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window(pool: WorkerPool, ranks: int) -> None:
    """Case 'stricter masks': window 4, documents [6, 6]; with two ranks the second one holds nothing."""
    shards = [(0, 0, 6, 0), (1, 0, 6, 0)]
    results = pool.run(
        on_rank.attention_of_layout, ranks, shards, torch.float64, "balanced", 0.0, "reference", 1, "keep", 4
    )
    q, k, v, _ = on_rank.qkv_of(Layout.from_doc_lengths([[6, 6]]), 0, torch.float64, on_rank.SHAPE)
    reference = core_attention_reference(q, k, v, [6, 6], window=4).numpy()
    np.testing.assert_allclose(results[0]["out"], reference, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(results[0]["out"][6], v[6].repeat_interleave(2, dim=0), rtol=1e-12)
    assert results[0]["work"].sum() == 2 * (1 + 2 + 3 + 4 + 4 + 4)
    assert ranks == 1 or results[1]["work"][1] > 0, "the empty rank must get work"


def test_packed_exchanges_nothing_and_is_equal(pool: WorkerPool) -> None:
    shards = whole_documents(2)
    results = pool.run(on_rank.attention_of_layout, 2, shards, torch.float32, "packed", 0.0, "cpu")
    assert_equal(results, expected(shards, 2, torch.float32), 2e-6)
    assert all(r["sent"] == (0, 0) and r["allocations"] == 0 for r in results)


@pytest.mark.parametrize(
    ("shards", "silent_sender", "silent_receiver"),
    [
        pytest.param([(0, 0, 24, 0), (1, 0, 8, 1)], 1, 0, id="one-giant"),
        pytest.param([(0, 0, 24, 0)], 1, 0, id="a-rank-without-a-token"),
        pytest.param([(0, 0, 24, 0), (1, 0, 10, 1), (2, 0, 10, 1), (3, 0, 3, 2)], 2, 0, id="three-ranks"),
    ],
)
def test_a_rank_that_sends_nothing_and_one_that_receives_nothing(
    pool: WorkerPool, shards, silent_sender: int, silent_receiver: int
) -> None:
    ranks = max(2, 1 + max(s[3] for s in shards))
    results = pool.run(on_rank.attention_of_layout, ranks, shards, torch.float32, "balanced", 0.1, "cpu", 2)
    assert results[silent_sender]["sent"] == (0, 0) and results[silent_receiver]["received"] == (0, 0)
    assert sum(results[0]["sent"]) > 0
    assert_equal(results, expected(shards, ranks, torch.float32, layers=2), 2e-6)


def test_no_token_anywhere(pool: WorkerPool) -> None:
    results = pool.run(on_rank.attention_of_layout, 2, [], torch.float32, "balanced", 0.1, "cpu")
    assert all(r["out"].shape == (0, 4, 8) for r in results)


def test_repeats_are_bit_identical(pool: WorkerPool) -> None:
    shards = spanning_documents(4)
    first, second = (
        pool.run(on_rank.attention_of_layout, 4, shards, torch.float32, "balanced", 0.0, "cpu", 2) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in ("out", "dq", "dk", "dv"))


def test_arena_does_not_grow_once_warm(pool: WorkerPool) -> None:
    for growth in pool.run(on_rank.arena_growth, 2, [40, 3, 5], 6):
        assert growth[0] > 0, "the first step must allocate"
        assert growth[3:] == [0, 0, 0]


def test_a_missing_peer_is_named() -> None:
    """With workers of its own: the kill would cost the others a new start."""
    with WorkerPool(2) as own_pool:
        outcomes = own_pool.run_all(on_rank.meet_a_missing_peer, 2)
    error = outcomes[0]
    assert error["type"] == "PeerError"
    assert "rank 1" in error["message"] and "layer 1" in error["message"], error["message"]
    assert "does not respond" in error["message"] and "step 7" in error["message"]
    assert "failed after" in error["message"], "the connection broke at once: no advice to raise a time-out"
    assert error["seconds"] < 20
    assert isinstance(outcomes[1], RemoteError) and outcomes[1].type_name == "ProcessDied"


def test_only_one_of_two_ranks_reaches_attention(pool: WorkerPool) -> None:
    waiting, elsewhere, *_ = pool.run(on_rank.reach_attention_alone, pool.ranks)
    assert waiting["type"] == "PeerError"
    assert "rank 1 is alive elsewhere" in waiting["message"] and "layer 0" in waiting["message"], waiting["message"]
    assert "before its first exchange" in waiting["message"]
    assert "did not complete within 2 s" in waiting["message"]
    assert waiting["seconds"] < 20 and elsewhere == "elsewhere"


def test_rows_that_do_not_fit_the_plan_are_refused(pool: WorkerPool) -> None:
    [said] = pool.run(on_rank.wrong_rows, 1)
    assert "expected (tokens, heads, head size) with 8 tokens" in said


def test_autocast_does_not_reach_the_kernels(pool: WorkerPool) -> None:
    assert pool.run(on_rank.attention_under_autocast, 2) == [[True] * 4] * 2


@pytest.mark.parametrize("memory", ["keep", "resend"])
def test_saved_tensor_hooks_may_keep_other_tensors(pool: WorkerPool, memory: str) -> None:
    """What a hook keeps may be a view of a lent buffer, which must not be lent again before backward has read it."""
    for same in pool.run(on_rank.attention_under_hooks, 2, memory):
        assert same == [[True] * 4] * 3


def test_a_second_backward_is_refused(pool: WorkerPool) -> None:
    [said] = pool.run(on_rank.backward_twice, 1)
    assert "backward ran twice through the same forward" in said
