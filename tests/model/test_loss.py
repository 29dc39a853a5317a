"""The summed cross-entropy in pieces against torch's own on all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from steelyard.model.loss import linear_cross_entropy_sum, linear_cross_entropy_sum_reference, rows_per_piece


def _inputs(tokens: int, dtype: torch.dtype, ignored: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden_TC = torch.randn(tokens, 8, generator=g).to(dtype).requires_grad_()
    weight_VC = torch.randn(11, 8, generator=g).to(dtype).requires_grad_()
    labels_T = torch.randint(0, 11, (tokens,), generator=g)
    labels_T[torch.rand(tokens, generator=g) < ignored] = -100
    return hidden_TC, weight_VC, labels_T


@given(
    tokens=st.integers(0, 40),
    rows=st.integers(1, 50),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([1.0, 0.125]),
)
def test_equals_the_reference_with_gradients(tokens: int, rows: int, ignored: float, scale: float) -> None:
    hidden_TC, weight_VC, labels_T = _inputs(tokens, torch.float64, ignored)
    expected = linear_cross_entropy_sum_reference(hidden_TC, weight_VC, labels_T)
    expected_grads = torch.autograd.grad(expected * scale, (hidden_TC, weight_VC))
    total = linear_cross_entropy_sum(hidden_TC, weight_VC, labels_T, rows)
    grads = torch.autograd.grad(total * scale, (hidden_TC, weight_VC))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    hidden_TC, weight_VC, labels_T = _inputs(7, torch.float64, 0.3)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy_sum(h, w, labels_T, 3), (hidden_TC, weight_VC))


@pytest.mark.parametrize(("hidden_grad", "weight_grad"), [(True, False), (False, True), (False, False)])
def test_only_what_needs_a_gradient_gets_one(hidden_grad: bool, weight_grad: bool) -> None:
    hidden_TC, weight_VC, labels_T = _inputs(7, torch.float32, 0.3)
    hidden_TC.requires_grad_(hidden_grad)
    weight_VC.requires_grad_(weight_grad)
    total = linear_cross_entropy_sum(hidden_TC, weight_VC, labels_T, 3)
    assert total.requires_grad == (hidden_grad or weight_grad)
    if total.requires_grad:
        total.backward()
    assert (hidden_TC.grad is not None) == hidden_grad
    assert (weight_VC.grad is not None) == weight_grad
    expected = linear_cross_entropy_sum_reference(hidden_TC, weight_VC, labels_T)
    torch.testing.assert_close(total, expected)


def test_huge_logits_stay_finite() -> None:
    hidden_TC, weight_VC, labels_T = _inputs(7, torch.float32, 0.0)
    total = linear_cross_entropy_sum(hidden_TC * 1e4, weight_VC, labels_T)
    torch.testing.assert_close(total, linear_cross_entropy_sum_reference(hidden_TC * 1e4, weight_VC, labels_T))
    total.backward()
    assert hidden_TC.grad is not None and hidden_TC.grad.isfinite().all()


@pytest.mark.parametrize("how", ["autocast", "bfloat16 parameters"])
def test_low_precision_is_summed_in_fp32(how: str) -> None:
    dtype = torch.float32 if how == "autocast" else torch.bfloat16
    hidden_TC, weight_VC, labels_T = _inputs(400, dtype, 0.2)
    exact = linear_cross_entropy_sum_reference(hidden_TC.double(), weight_VC.double(), labels_T)
    exact_grads = torch.autograd.grad(exact, (hidden_TC, weight_VC))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        total = linear_cross_entropy_sum(hidden_TC, weight_VC, labels_T, 64)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=3e-3, atol=0)
    for got, want in zip(torch.autograd.grad(total, (hidden_TC, weight_VC)), exact_grads, strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() <= 2e-2 * want.norm()


def test_logits_of_all_tokens_never_exist() -> None:
    assert rows_per_piece(128_256) == 512
    assert rows_per_piece(320) * 320 <= 1 << 22
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    hidden_TC, weight_VC, labels_T = _inputs(1000, torch.float32, 0.1)
    with Largest():
        linear_cross_entropy_sum(hidden_TC, weight_VC, labels_T, 100).backward()
    assert largest == 1000 * 8  # the gradient of the hidden states; all logits would be 1000 × 11
