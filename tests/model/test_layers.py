"""Token-wise layers: rotation, norm, and what a block keeps for backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig, RopeScaling
from steelyard.model.layers import Embedding, RMSNorm, Rotary, RotaryTable, rotate
from steelyard.model.transformer import Decoder


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 64)])
def test_frequencies_match_their_double_precision_twin(scaling: RopeScaling | None) -> None:
    config = ModelConfig(head_dim=64, rope_scaling=scaling, rope_theta=5e5)
    expected = torch.tensor(config.inverse_frequencies(), dtype=torch.float64)
    torch.testing.assert_close(
        Rotary(config).frequencies(torch.device("cpu")).double(), expected, rtol=1e-5, atol=1e-12
    )
    if scaling is not None:
        plain = ModelConfig(head_dim=64, rope_theta=5e5).inverse_frequencies()
        ratios = [p / s for p, s in zip(plain, config.inverse_frequencies(), strict=True)]
        assert ratios[0] == pytest.approx(1.0) and ratios[-1] == pytest.approx(8.0)
        assert any(1.1 < r < 7.9 for r in ratios)


def test_rotation_turns_pairs_and_scores_depend_on_distance_only() -> None:
    config = ModelConfig(head_dim=8)
    rope = Rotary(config)(torch.tensor([0, 5]))
    x_TNH = torch.randn(2, 3, 8)
    turned = rotate(x_TNH, rope)
    torch.testing.assert_close(turned[0], x_TNH[0])
    for pair, frequency in enumerate(config.inverse_frequencies()):
        a, b = x_TNH[1, :, pair], x_TNH[1, :, pair + 4]
        cos, sin = math.cos(5 * frequency), math.sin(5 * frequency)
        torch.testing.assert_close(turned[1, :, pair], a * cos - b * sin)
        torch.testing.assert_close(turned[1, :, pair + 4], a * sin + b * cos)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        tables = [Rotary(config)(torch.tensor([p])) for p in (query_position, key_position)]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=1e-4)


def test_rotation_is_as_exact_after_rounding_the_model_to_bfloat16() -> None:
    model = Decoder(ModelConfig(layers=1, head_dim=64)).bfloat16()
    positions_T = torch.tensor([100_000])
    rope = model.rotary(positions_T)
    assert rope.cos.dtype == torch.float32
    torch.testing.assert_close(rope.cos, Rotary(model.config)(positions_T).cos, rtol=0, atol=0)
    assert rotate(torch.randn(1, 2, 64, dtype=torch.bfloat16), rope).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype) -> None:
    norm = RMSNorm(6, eps=0.1).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6))
    x = torch.randn(5, 6).to(dtype)
    wide = x.double()
    expected = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 0.1) * torch.arange(6)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("token", [-1, 320])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(UsageError, match=f"token id {token} is outside the model's vocabulary of 320"):
        Embedding(ModelConfig())(torch.tensor([1, token]))


def test_halves_have_the_promised_shapes(make_model: Callable[..., Decoder]) -> None:
    block: Any = make_model(head_dim=24).blocks[0]
    rope = RotaryTable(torch.ones(5, 12), torch.zeros(5, 12))
    q, k, v = block.before_attention(torch.randn(5, 32), rope)
    assert not any(t._is_view() for t in (q, k, v))  # FSDP2 warns of views, and is right
    assert [tuple(t.shape) for t in (q, k, v)] == [(5, 4, 24), (5, 2, 24), (5, 2, 24)]
    assert all(t.is_contiguous() for t in (q, k, v))
    assert block.after_attention(torch.randn(5, 32), q).shape == (5, 32)


def test_recomputing_keeps_only_inputs(make_model: Callable[..., Decoder]) -> None:
    """Bytes autograd saves for one token-wise half fall to its inputs."""

    def saved_bytes(recompute: bool) -> int:
        block: Any = make_model(recompute=recompute).blocks[0]
        x_TC, out_TNH = torch.randn(64, 32, requires_grad=True), torch.randn(64, 4, 8, requires_grad=True)
        weights = {p.data_ptr() for p in block.parameters()}
        sizes: dict[int, int] = {}

        def note(t: torch.Tensor) -> torch.Tensor:
            if t.data_ptr() not in weights:
                sizes[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            result = block.after_attention(x_TC, out_TNH)
        assert result.requires_grad
        return sum(sizes.values())

    assert saved_bytes(True) <= 2 * 64 * 32 * 4
    assert saved_bytes(False) > 4 * saved_bytes(True)


def test_mixed_precision_wrappers_do_not_find_the_tables() -> None:
    """FSDP2 casts a module's inputs with this function; frequencies rounded to bf16 would blur far positions."""
    rope = RotaryTable(torch.ones(5, 12), torch.zeros(5, 12))
    x, untouched = _apply_to_tensors(lambda t: t.bfloat16(), (torch.ones(2), rope))
    assert x.dtype == torch.bfloat16
    assert untouched.cos.dtype == untouched.sin.dtype == torch.float32
