"""Balanced attention for models that tell every layer of a forward pass where documents begin, by one tensor.

torchtitan and Megatron-Core both hand offsets (`cu_seqlens`) to each layer. A forward pass begins when the first layer
is entered, outside a backward pass: the ranks plan then, whether the tensor is a new one or not. All other layers, and
layers that activation checkpointing enters again in the backward pass, find the pass by the identity of the tensor.

T: tokens of the rank, N: query heads, K: key/value heads, H: head size.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from steelyard.balance import Balancer, Kernel, NanoBatchAttention
from steelyard.collectives import twin_group
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError
from steelyard.observe.meter import Meter
from steelyard.runtime.dispatch import Memory


@dataclass(frozen=True)
class BalancerOptions:
    """What the frameworks' adapters take and hand on; see `steelyard.Balancer`.

    Attributes:
        planning_group: a gloo group of the same ranks for lengths; with it no group is made, and transfers run on the
            given one, which must then not be the one that sums gradients.
    """

    tolerance: float = 0.05
    policy: str = "balanced"
    backend: str = "auto"
    memory: Memory = "keep"
    speeds: Sequence[float] = ()
    timeout_s: float = 300.0
    meter: Meter | None = None
    planning_group: dist.ProcessGroup | None = None


@dataclass
class _Pass:
    """A forward pass. `alone`: no other pass has had the same tensor, so what its layers kept is told by it."""

    attention: NanoBatchAttention
    lengths: list[int]
    alone: bool


class OffsetPasses:
    """The forward passes of one model on one rank.

    Args:
        group: ranks that share attention work, the same layers on each; None: this process alone. Transfers run on
            groups of their own with the same ranks, made at the first forward pass.
        options: of the balancer.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: BalancerOptions) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._options = options
        self._layers: set[int] = set()
        self._balancer: Balancer | None = None
        self._passes: MutableMapping[Tensor, _Pass] = WeakTensorKeyDictionary()

    @property
    def balancer(self) -> Balancer:
        """Plans and carries out.

        Raises:
            UsageError: there was no forward pass yet.
        """
        if self._balancer is None:
            raise UsageError("the balancer is made at the first forward pass; there was none yet")
        return self._balancer

    def add_layer(self, number: int) -> None:
        """Say that this rank has a layer; all of them before the first forward pass."""
        self._layers.add(number)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        offsets: Tensor,
        *,
        layer: int,
        kernel: Kernel,
        training: bool = False,
    ) -> Tensor:
        """Core attention (T, N, H) of one layer; every rank calls it for the same layers in the same order.

        Args:
            offsets: (documents + 1,), from 0 to T, not descending.
            layer: its number, as told to `add_layer`.
            kernel: what it computes.
            training: whether there will be a backward pass although gradients are off now, as they are in the forward
                pass of reentrant checkpointing.

        Raises:
            UsageError: offsets that do not fit, or what the back end cannot compute.
            PeerError: a rank did not take part in time.
        """
        # Selective checkpointing keeps results of operators under a dispatch mode, in the order in which they run. Our
        # kernels' would be kept for nothing, and a layer that is answered from what was kept runs none of them again.
        with _disable_current_modes():
            if layer == min(self._layers) and not _in_backward():
                with torch.set_grad_enabled(training or torch.is_grad_enabled()):
                    self._begin(q_TNH, k_TKH, offsets)
            found = self._passes.get(offsets)
            if found is None:
                raise UsageError(
                    f"layer {layer} is given offsets of documents that layer {min(self._layers)}, the first, was not: "
                    "hand the same tensor to every layer of a forward pass"
                )
            return found.attention(q_TNH, k_TKH, v_TKH, layer=layer if found.alone else None, kernel=kernel)

    def _begin(self, q_TNH: Tensor, k_TKH: Tensor, offsets: Tensor) -> None:
        lengths = _lengths(offsets, len(q_TNH))
        if self._balancer is None:
            self._balancer = self._make_balancer(q_TNH, k_TKH)
        before = self._passes.get(offsets)
        if before is not None and before.lengths != lengths:
            raise UsageError(
                "offsets of documents were changed in place: an earlier forward pass may still need them; make a new "
                "tensor for every batch"
            )
        self._passes[offsets] = _Pass(self._balancer.begin(doc_lens=lengths), lengths, alone=before is None)

    def _make_balancer(self, q_TNH: Tensor, k_TKH: Tensor) -> Balancer:
        options, group, device = self._options, self._group, q_TNH.device
        if group is not None and options.planning_group is None:
            # Among the sums of gradients the place of an exchange would depend on when a bucket fills.
            group = twin_group(group, "gloo" if device.type == "cpu" else dist.get_backend(group), options.timeout_s)
        return Balancer(
            group,
            shape=AttentionShape(q_TNH.shape[1], k_TKH.shape[1], q_TNH.shape[2], element_bytes=q_TNH.element_size()),
            tolerance=options.tolerance,
            policy=options.policy,
            backend=options.backend,
            dtype=q_TNH.dtype,
            device=device,
            timeout_s=options.timeout_s,
            planning_group=options.planning_group,
            speeds=options.speeds,
            memory=options.memory,
            meter=options.meter,
        )


def _lengths(offsets: Tensor, tokens: int) -> list[int]:
    """Lengths of documents.

    Raises:
        UsageError: offsets that do not cover the tokens once.
    """
    bounds = offsets.detach().tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(length < 0 for length in lengths):
        shown = bounds if len(bounds) <= 6 else [*bounds[:3], "…", bounds[-1]]
        raise UsageError(
            f"offsets of documents {shown} for {tokens} tokens; expected ascending ones from 0 to {tokens}"
        )
    return lengths


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
