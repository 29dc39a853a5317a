"""The decoder: documents stay apart, odd chunks run, recomputation and precision change nothing they should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig
from steelyard.model.layers import Block
from steelyard.model.transformer import Decoder

MakeModel = Callable[..., Decoder]
MakeChunk = Callable[..., Any]


def _grads(model: Decoder) -> dict[str, Tensor]:
    result = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        result[name] = parameter.grad
        parameter.grad = None
    return result


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"qk_norm": True}, {"tied_head": True}])
def test_packed_documents_equal_documents_one_by_one(
    changes: dict[str, object], make_model: MakeModel, make_chunk: MakeChunk
) -> None:
    model = make_model(torch.float64, **changes)
    chunk = make_chunk([5, 3, 1, 4])
    logits_TV = model(chunk.tokens, chunk.positions, chunk.attention)
    alone = [model(d.tokens, d.positions, d.attention) for d in chunk.documents()]
    torch.testing.assert_close(logits_TV, torch.cat(alone), rtol=1e-12, atol=1e-12)

    model(chunk.tokens, chunk.positions, chunk.attention, chunk.labels).backward()
    packed = _grads(model)
    for d in chunk.documents():
        model(d.tokens, d.positions, d.attention, d.labels).backward()
    for name, grad in _grads(model).items():
        torch.testing.assert_close(packed[name], grad, rtol=1e-11, atol=1e-11, msg=name)
        assert grad.abs().max() > 0, name


def test_another_document_does_not_move_the_others(make_model: MakeModel, make_chunk: MakeChunk) -> None:
    model, chunk = make_model(), make_chunk([5, 3, 4])
    before = model(chunk.tokens, chunk.positions, chunk.attention)
    changed_T = chunk.tokens.clone()
    changed_T[5:8] = (changed_T[5:8] + 1) % 61
    after = model(changed_T, chunk.positions, chunk.attention)
    moved_T = (before - after).abs().amax(-1) > 0
    assert moved_T.tolist() == [False] * 5 + [True] * 3 + [False] * 4


def test_positions_matter(make_model: MakeModel, make_chunk: MakeChunk) -> None:
    """The control of the tests above: positions that do not restart give another function of the second document."""
    model, chunk = make_model(), make_chunk([5, 4])
    right = model(chunk.tokens, chunk.positions, chunk.attention)
    shifted = chunk.positions.clone()
    shifted[5:] *= 2
    wrong = model(chunk.tokens, shifted, chunk.attention)
    torch.testing.assert_close(right[:5], wrong[:5])
    assert (right[6:] - wrong[6:]).abs().max() > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_loss_equals_cross_entropy_of_the_logits(tied: bool, make_model: MakeModel, make_chunk: MakeChunk) -> None:
    model, chunk = make_model(torch.float64, tied_head=tied), make_chunk([7, 1, 13, 4, 0, 30])
    logits_TV = model(chunk.tokens, chunk.positions, chunk.attention)
    expected = torch.nn.functional.cross_entropy(logits_TV, chunk.labels, reduction="sum")
    expected.backward()
    expected_grads = _grads(model)
    loss = model(chunk.tokens, chunk.positions, chunk.attention, chunk.labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, grad in _grads(model).items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "tied_head": True}, {"qk_norm": True}])
@pytest.mark.parametrize("case", ["no token", "all labels ignored"])
def test_a_chunk_that_does_not_count_gives_zero_gradients(
    case: str, changes: dict[str, object], recompute: bool, make_model: MakeModel, make_chunk: MakeChunk
) -> None:
    model = make_model(recompute=recompute, **changes)
    chunk = make_chunk([] if case == "no token" else [4, 3])
    attention = chunk.attention
    loss = model(chunk.tokens, chunk.positions, attention, torch.full_like(chunk.labels, -100))
    assert loss.item() == 0.0 and loss.dtype == torch.float32
    loss.backward()
    assert attention.layers == [0, 1]
    for name, grad in _grads(model).items():
        assert torch.equal(grad, torch.zeros_like(grad)), name


def test_empty_chunk_has_empty_logits(make_model: MakeModel, make_chunk: MakeChunk) -> None:
    chunk = make_chunk([])
    assert make_model()(chunk.tokens, chunk.positions, chunk.attention).shape == (0, 61)


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputing_token_wise_layers_changes_nothing_and_repeats_no_attention(
    autocast: bool, make_model: MakeModel, make_chunk: MakeChunk
) -> None:
    chunk, results = make_chunk([6, 9]), []
    for recompute in (False, True):
        model = make_model(recompute=recompute)
        attention = chunk.attention
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(chunk.tokens, chunk.positions, attention, chunk.labels)
        loss.backward()
        assert attention.layers == [0, 1]
        results.append((loss, _grads(model)))
    assert torch.equal(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][name]), name


def test_autocast_to_bfloat16(make_model: MakeModel, make_chunk: MakeChunk) -> None:
    """Core attention receives bf16, the residual stream and all gradients stay fp32, the loss is near the fp32 one."""
    model, chunk = make_model(initializer_range=0.1), make_chunk([20, 30])
    exact = model(chunk.tokens, chunk.positions, chunk.attention, chunk.labels)
    exact.backward()
    exact_grads = _grads(model)
    dense, seen = chunk.attention, set()

    def attention(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        seen.update((q.dtype, k.dtype, v.dtype))
        return dense(q, k, v, layer)

    residual: list[torch.dtype] = []
    model.head.register_forward_pre_hook(lambda _, args: residual.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(chunk.tokens, chunk.positions, attention, chunk.labels)
    loss.backward()
    assert seen == {torch.bfloat16} and residual == [torch.float32] and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for name, grad in _grads(model).items():
        assert grad.dtype == torch.float32
        assert (grad - exact_grads[name]).norm() < 0.05 * exact_grads[name].norm(), name


def test_forward_is_the_sum_of_its_parts(make_model: MakeModel, make_chunk: MakeChunk) -> None:
    """A walker that drives the parts itself (ping-pong) computes the same bits."""
    model, chunk = make_model(), make_chunk([6, 9])
    rope, x_TC = model.rotary(chunk.positions), model.embedding(chunk.tokens)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x_TC = block.after_attention(x_TC, chunk.attention(*block.before_attention(x_TC, rope), layer))
    assert torch.equal(model.head.logits(x_TC), model(chunk.tokens, chunk.positions, chunk.attention))


def test_initialisation_is_decided_by_the_generator(make_model: MakeModel) -> None:
    config = ModelConfig(layers=8)

    def fresh(seed: int, config: ModelConfig = config, dtype: torch.dtype = torch.float32) -> Decoder:
        torch.manual_seed(torch.seed())  # the global generator must not matter
        model = Decoder(config).to(dtype)
        model.init_weights(torch.Generator().manual_seed(seed))
        return model

    first, again, other = fresh(1).state_dict(), fresh(1).state_dict(), fresh(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    matrices = {name: t for name, t in first.items() if t.dim() == 2}
    assert len({t.double().sum().item() for t in matrices.values()}) == len(matrices)
    for name, tensor in matrices.items():
        std = 0.02 / 4 if name.endswith(("output.weight", "down.weight")) else 0.02
        assert tensor.std().item() == pytest.approx(std, rel=0.05), name
    shallow = fresh(1, ModelConfig(layers=2)).state_dict()
    assert torch.equal(shallow["blocks.1.after_attention.up.weight"], first["blocks.1.after_attention.up.weight"])
    rounded = fresh(1, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], first[name].bfloat16()) for name in first)


def test_tied_head_is_one_parameter(make_model: MakeModel) -> None:
    model = make_model(tied_head=True)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("tokens", torch.zeros(1, 4, dtype=torch.int64)),
        ("positions", torch.zeros(3, dtype=torch.int64)),
        ("labels", torch.zeros(4)),
    ],
)
def test_parts_of_a_chunk_that_do_not_fit_are_named(name: str, bad: Tensor, make_model: MakeModel) -> None:
    parts = {part: torch.zeros(4, dtype=torch.int64) for part in ("tokens", "positions", "labels")} | {name: bad}
    with pytest.raises(UsageError, match=f"(positions|{name}): shape"):
        make_model()(parts["tokens"], parts["positions"], lambda q, k, v, layer: q, parts["labels"])


def test_a_model_learns(make_chunk: MakeChunk) -> None:
    """Forty steps on one chunk, from the product's own initialisation, halve the loss."""
    chunk = make_chunk([16, 16])
    model = Decoder(ModelConfig(vocab_size=61, hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48))
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(chunk.tokens, chunk.positions, chunk.attention, chunk.labels) / 30
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.11, abs=0.1)  # ln 61
    assert losses[-1] < losses[0] / 2
