"""Two nano-batches in turn: equal to one after the other, the same collectives on every rank, transfers hidden."""

from __future__ import annotations

import numpy as np
import pytest
import ranks as on_rank
import torch

from steelyard.attention import core_attention_reference
from steelyard.planner.rates import Rate
from steelyard.testing.pool import WorkerPool

PING = [[40], [8, 9, 1]]
PONG = [[3, 5, 30], [20]]
SLOW_ONE = (on_rank.MODEL, False, "keep")
REORDERED = (on_rank.MODEL, False, "keep", None, True)


def reference_step(lengths: list[list[list[int] | None]], dtype: torch.dtype) -> tuple[float, dict[str, np.ndarray]]:
    """Loss sum and gradients of all documents, one by one, in one process with a dense mask."""
    decoder = on_rank.decoder_of(dtype=dtype)
    total = 0.0
    for index, per_rank in enumerate(lengths):
        doc = 1000 * index
        for length in [n for own in per_rank for n in own or []]:
            tokens, positions, labels = on_rank.chunk_of([length], doc)
            loss = decoder(
                tokens, positions, lambda q, k, v, layer, n=length: core_attention_reference(q, k, v, [n]), labels
            )
            loss.backward()
            total += float(loss.detach())
            doc += 1
    return total, {name: p.grad.double().numpy() for name, p in decoder.named_parameters()}


def documents_over(ranks: int) -> list[list[list[int]]]:
    """The case 'any number of ranks', twice: documents dealt in blocks, some ranks with little or nothing."""
    lengths = [n for n in [7, 1, 13, 4, 0, 30] if n]
    ping: list[list[int]] = [[] for _ in range(ranks)]
    for doc, length in enumerate(lengths):
        ping[min(ranks - 1, doc * ranks // len(lengths))].append(length)
    pong: list[list[int]] = [[] for _ in range(ranks)]
    pong[0] = lengths
    return [ping, pong]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_model_on_any_number_of_ranks(pool: WorkerPool, ranks: int, dtype: torch.dtype, bound: float) -> None:
    lengths = documents_over(ranks)
    loss, gradients = reference_step(lengths, dtype)
    result = pool.run(on_rank.train_step, ranks, lengths, "balanced", True, dtype)[0]
    assert result["loss"] == pytest.approx(loss, rel=bound)
    for name, gradient in gradients.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(
            result["gradients"][name], gradient, rtol=0, atol=bound * max(scale, 1), err_msg=name
        )


def test_chunks_change_places_where_then_nothing_need_move(pool: WorkerPool) -> None:
    lengths = [[[60], [9, 8, 43]], [[8, 9, 43], [60]]]
    loss, gradients = reference_step(lengths, torch.float64)
    as_given = pool.run(on_rank.train_step, 2, lengths, "balanced", True, torch.float64)
    reordered = pool.run(on_rank.train_step, 2, lengths, "balanced", True, torch.float64, *REORDERED)
    assert as_given[0]["moved"] and not reordered[0]["moved"]
    assert sorted(r["step_order"] for r in reordered) == [(0, 1), (1, 0)]
    assert reordered[0]["loss"] == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        bound = 1e-12 * max(np.abs(gradient).max(), 1)
        np.testing.assert_allclose(reordered[0]["gradients"][name], gradient, rtol=0, atol=bound, err_msg=name)


def test_a_rank_that_is_slower_computes_less_and_the_model_is_the_same(pool: WorkerPool) -> None:
    lengths = documents_over(3)
    rates = [Rate(0.0, 3e-8), Rate(0.0, 1e-8), Rate(0.0, 1e-8)]
    loss, gradients = reference_step(lengths, torch.float64)
    results = pool.run(on_rank.train_step, 3, lengths, "balanced", True, torch.float64, *SLOW_ONE, rates)
    for work in results[0]["work"]:
        assert work[0] * 3 == pytest.approx(work[1], rel=0.2)  # rows of these short documents are coarse
        assert work[1] == pytest.approx(work[2], rel=0.1)
    assert results[0]["loss"] == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        bound = 1e-12 * max(np.abs(gradient).max(), 1)
        np.testing.assert_allclose(results[0]["gradients"][name], gradient, rtol=0, atol=bound, err_msg=name)


def test_ping_pong_equals_one_after_the_other_bit_for_bit(pool: WorkerPool) -> None:
    together = pool.run(on_rank.train_step, 2, [PING, PONG], "balanced", True)
    apart = pool.run(on_rank.train_step, 2, [PING, PONG], "balanced", False)
    assert together[0]["loss"] == pytest.approx(apart[0]["loss"], rel=1e-7)
    for name, gradient in together[0]["gradients"].items():
        # The two halves' gradients are summed in the other order (pong first): the only difference there may be.
        np.testing.assert_allclose(gradient, apart[0]["gradients"][name], rtol=0, atol=2e-6 * np.abs(gradient).max())


def test_every_rank_runs_the_same_collectives_in_the_same_order(pool: WorkerPool) -> None:
    lengths = [[[40], [8, 9], [], [6]], [[3], [], [9, 9, 9], [30]]]
    orders = [r["order"] for r in pool.run(on_rank.train_step, 4, lengths, "balanced", True)]
    assert all(order == orders[0] for order in orders)
    layers = on_rank.MODEL.layers
    # dispatch: q and kv; return: out; gradient dispatch: dOut; gradient return: dq and dkv; of two nano-batches.
    assert len(orders[0]) == 2 * layers * (2 + 1 + 1 + 2)
    forward = [entry for entry in orders[0] if not entry.startswith("gradient")]
    assert forward == ["dispatch layer 0 nano 0"] * 2 + ["dispatch layer 0 nano 1"] * 2 + [
        entry
        for layer in range(layers)
        for entry in (
            f"return layer {layer} nano 0", *[f"dispatch layer {layer + 1} nano 0"] * 2,
            f"return layer {layer} nano 1", *[f"dispatch layer {layer + 1} nano 1"] * 2,
        )
        if f"layer {layers}" not in entry
    ]  # fmt: skip
    backward = [entry for entry in orders[0] if entry.startswith("gradient")]
    last = layers - 1
    assert backward[:2] == [f"gradient dispatch layer {last} nano 1", f"gradient return layer {last} nano 1"] or (
        backward[:3]
        == [
            f"gradient dispatch layer {last} nano 1",
            f"gradient dispatch layer {last} nano 0",
            f"gradient return layer {last} nano 1",
        ]
    )


def test_pings_transfer_lies_under_pongs_compute(pool: WorkerPool) -> None:
    """By order of events, not by speed: ping is only waited for after pong has computed."""
    for result in pool.run(on_rank.train_step, 2, [PING, PONG], "balanced", True):
        spans = result["spans"]
        for layer in range(on_rank.MODEL.layers):

            def one(name: str, track: str, nano: int, layer: int = layer, spans: list = spans) -> tuple:
                found = [
                    s
                    for s in spans
                    if s[0] == name and s[1] == track and s[4] == s[4] | {"layer": layer, "nano_batch": nano}
                ]
                return min(found, key=lambda s: s[2])

            returned = one("return", "transfer", 0)
            pong = one("local tasks", "attention", 1)
            assert returned[2] <= pong[2], "ping's outputs start their way home before pong computes"
            waits = [s for s in spans if s[0] == "wait return" and s[4]["layer"] == layer]
            assert len(waits) == 2 and min(w[2] for w in waits) >= pong[3], "and are waited for after it has"
            back = one("gradient dispatch", "transfer", 1)
            other = one("gradient dispatch", "transfer", 0)
            first_kernel = one("local tasks, backward", "attention", 1)
            assert back[2] <= other[2] <= first_kernel[2], "both halves' gradients travel before a kernel needs them"


def test_a_rank_whose_labels_are_all_masked_and_one_without_tokens(pool: WorkerPool) -> None:
    lengths = [[[1, 1], [], [12]], [[], [1], [5, 6]]]
    loss, gradients = reference_step(lengths, torch.float32)
    result = pool.run(on_rank.train_step, 3, lengths, "balanced", True)[0]
    assert np.isfinite(result["loss"]) and result["loss"] == pytest.approx(loss, rel=5e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            result["gradients"][name], gradient, rtol=0, atol=5e-6 * max(1, np.abs(gradient).max())
        )


def test_uneven_counts(pool: WorkerPool) -> None:
    """Five chunks of one document on rank 0, one chunk of five short ones on rank 1: both run five rounds."""
    lengths: list[list[list[int] | None]] = [[[47], [10] * 5]] + [[[47], None]] * 4
    loss, gradients = reference_step(lengths, torch.float32)
    results = pool.run(on_rank.train_step, 2, lengths, "balanced", False)
    assert len(results[0]["order"]) == len(results[1]["order"]) == 5 * on_rank.MODEL.layers * 6
    assert results[0]["loss"] == pytest.approx(loss, rel=5e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(results[0]["gradients"][name], gradient, rtol=0, atol=5e-6 * np.abs(gradient).max())


def test_checkpointing_repeats_neither_attention_nor_transfers(pool: WorkerPool) -> None:
    plain, again = (
        pool.run(on_rank.train_step, 2, [PING, PONG], "balanced", True, torch.float32, on_rank.MODEL, recompute)
        for recompute in (False, True)
    )
    for one, other in zip(plain, again, strict=True):
        assert one["order"] == other["order"]
        kernels = [sum(s[1] == "attention" for s in r["spans"]) for r in (one, other)]
        assert kernels[0] == kernels[1] == 2 * on_rank.MODEL.layers * 4
        for name, gradient in one["gradients"].items():
            np.testing.assert_array_equal(gradient, other["gradients"][name])


def test_resending_through_a_model(pool: WorkerPool) -> None:
    kept, resent = (
        pool.run(on_rank.train_step, 2, [PING, PONG], "balanced", True, torch.float32, on_rank.MODEL, False, memory)[0]
        for memory in ("keep", "resend")
    )
    assert kept["loss"] == resent["loss"]
    for name, gradient in kept["gradients"].items():
        np.testing.assert_array_equal(gradient, resent["gradients"][name])
