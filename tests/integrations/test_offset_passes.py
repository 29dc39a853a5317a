"""Passes are told apart by when the first layer is entered, and found by the tensor that all layers are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from steelyard.attention import core_attention_reference
from steelyard.balance import Kernel
from steelyard.errors import UsageError
from steelyard.integrations.offset_passes import BalancerOptions, OffsetPasses

LENGTHS = [5, 1, 14]
LAYERS = (3, 4)


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0)


def passes() -> OffsetPasses:
    found = OffsetPasses(None, BalancerOptions())
    for layer in LAYERS:
        found.add_layer(layer)
    return found


def two_layers(attend: Any, x: Tensor, reentrant: bool | None) -> Tensor:
    """Attention over attention, each in a checkpoint unless `reentrant` is None."""
    for layer in LAYERS:

        def block(x: Tensor, layer: int = layer) -> Tensor:
            return torch.tanh(attend(x.sin(), x[:, :2].cos(), x[:, 2:], layer))

        x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
    return x


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(LENGTHS), 4, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)
    ]


def expected() -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return core_attention_reference(q, k, v, LENGTHS)

    return [torch.autograd.grad(two_layers(attend, x, None).square().sum(), x)[0] for x in inputs()]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("same_tensor", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_passes_in_flight(order: tuple[int, int], same_tensor: bool, reentrant: bool | None) -> None:
    """Backward in either order, from the right pass's outputs, although both may have been given one tensor."""
    found, tensors = passes(), [offsets(), offsets()]
    leaves = inputs()

    def run(x: Tensor, bounds: Tensor) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return found.attention(q, k, v, bounds, layer=layer, kernel=Kernel(), training=True)

        return two_layers(attend, x, reentrant).square().sum()

    losses = [run(x, tensors[0 if same_tensor else i]) for i, x in enumerate(leaves)]
    assert found.balancer._planned_steps == 2
    for index in order:
        losses[index].backward()
    for x, want in zip(leaves, expected(), strict=True):
        torch.testing.assert_close(x.grad, want, rtol=1e-10, atol=1e-12)
    answers = [found._passes[bounds].attention.answers for bounds in (tensors[:1] if same_tensor else tensors)]
    assert answers == ([0] if same_tensor else [0, 0] if reentrant is None else [2, 2])


def test_kernels_run_outside_dispatch_modes() -> None:
    """Selective checkpointing would otherwise keep what they compute."""
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    found, x = passes(), inputs()[0].detach()
    with Seen():
        x.sin()
        found.attention(x, x, x, offsets(), layer=LAYERS[0], kernel=Kernel())
    assert [name for name in seen if "sin" in name] and not [name for name in seen if "mm" in name or "exp" in name]


def test_layers_must_be_given_one_tensor() -> None:
    found, x = passes(), inputs()[0]
    found.attention(x, x, x, offsets(), layer=LAYERS[0], kernel=Kernel())
    with pytest.raises(UsageError, match="same tensor to every layer"):
        found.attention(x, x, x, offsets(), layer=LAYERS[1], kernel=Kernel())


def test_plans_do_not_outlive_their_tensor() -> None:
    found, x, bounds = passes(), inputs()[0].detach(), offsets()
    found.attention(x, x, x, bounds, layer=LAYERS[0], kernel=Kernel())
    assert len(found._passes) == 1
    del bounds
    assert len(found._passes) == 0


def test_no_balancer_before_the_first_pass() -> None:
    with pytest.raises(UsageError, match="first forward pass"):
        passes().balancer  # noqa: B018


def test_the_windows_of_layers_are_compared_before_the_first_of_them() -> None:
    found = OffsetPasses(None, BalancerOptions())
    for layer, window in ((3, 7), (4, None), (1, 2)):
        found.add_layer(layer, window)
    x = torch.randn(sum(LENGTHS), 2, 8)
    found.attention(x, x, x, offsets(), layer=1, kernel=Kernel(window=2))
    assert found.balancer.agreed == {"attention layers": 3, "windows of layers": {1: 2, 3: 7}}
    assert found.balancer._settings()["windows of layers"] == "{1: 2, 3: 7}"
