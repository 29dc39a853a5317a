"""Balanced attention for models that tell every layer of a forward pass where documents begin, by one tensor.

torchtitan and Megatron-Core both hand offsets (`cu_seqlens`) to each layer. A forward pass begins when the first layer
is entered, outside a backward pass: the ranks plan then, whether the tensor is a new one or not. All other layers, and
layers that activation checkpointing enters again in the backward pass, find the pass by the identity of the tensor.

T: tokens of the rank, N: query heads, K: key/value heads, H: head size.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from steelyard.balance import Balancer, Kernel, NanoBatchAttention
from steelyard.balance.given import check_options
from steelyard.balance.in_flight import in_backward
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import SteelyardError, UsageError
from steelyard.integrations.joining import Joined, join, raise_if_told, told
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

    def __post_init__(self) -> None:
        check_options(
            "balance", tolerance=self.tolerance, timeout_s=self.timeout_s, policy=self.policy, backend=self.backend,
            memory=self.memory, speeds=self.speeds,
        )  # fmt: skip


@dataclass(frozen=True)
class _Note:
    """What a rank says with its lengths: why it cannot take part, if so."""

    failure: str | None = None


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
        self._layers: dict[int, int | None] = {}
        self._balancer: Balancer | None = None
        self._joined: Joined | None = None
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

    def add_layer(self, number: int, window: int | None = None) -> None:
        """Say that this rank has a layer, and its window if it has one; all of them before the first forward pass. The
        ranks compare them when they plan."""
        self._layers[number] = window

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
            PeerError: a rank could not take part, or did not in time.
        """
        # Selective checkpointing keeps results of operators under a dispatch mode, in the order in which they run. Our
        # kernels' would be kept for nothing, and a layer that is answered from what was kept runs none of them again.
        with _disable_current_modes():
            if self.begins(layer):
                with torch.set_grad_enabled(training or torch.is_grad_enabled()):
                    self._begin(q_TNH, k_TKH, offsets)
            found = self._passes.get(offsets)
            if found is None:
                raise UsageError(
                    f"layer {layer} is given offsets of documents that layer {min(self._layers)}, the first, was not: "
                    "hand the same tensor to every layer of a forward pass"
                )
            return found.attention(q_TNH, k_TKH, v_TKH, layer=layer if found.alone else None, kernel=kernel)

    def begins(self, layer: int) -> bool:
        """Whether entering this layer now begins a forward pass, so that the ranks plan."""
        return layer == min(self._layers) and not in_backward()

    @contextmanager
    def telling_others(self, q_TNH: Tensor, k_TKH: Tensor, *, layer: int) -> Iterator[None]:
        """Around what a rank does with what its layer was given: if it fails where the ranks were to plan, the others
        are told instead of left waiting. (At a later layer the time-out of an exchange names it.)"""
        try:
            yield
        except Exception as error:
            can_tell = self._balancer is not None or q_TNH.dim() == k_TKH.dim() == 3
            if self._group is not None and can_tell and self.begins(layer):
                with suppress(SteelyardError):  # the error of this rank is the one to report
                    self._balancer_for(q_TNH, k_TKH).plan([], _Note(told(error)))
            raise

    def close(self) -> None:
        """End the threads and groups of the balancer, on every rank and after the last backward pass."""
        if self._balancer is not None:
            self._balancer.close()
        if self._joined is not None:
            self._joined.release()
        self._balancer = self._joined = None

    def _begin(self, q_TNH: Tensor, k_TKH: Tensor, offsets: Tensor) -> None:
        balancer = self._balancer_for(q_TNH, k_TKH)
        with self.telling_others(q_TNH, k_TKH, layer=min(self._layers)):
            lengths = _lengths(offsets, len(q_TNH))
            before = self._passes.get(offsets)
            if before is not None and before.lengths != lengths:
                raise UsageError(
                    "offsets of documents were changed in place: an earlier forward pass may still need them; make a "
                    "new tensor for every batch"
                )
        step = balancer.plan([lengths], _Note())
        raise_if_told(step.notes)
        self._passes[offsets] = _Pass(balancer.begin(plan=step.nano_batches[0]), lengths, alone=before is None)

    def _balancer_for(self, q_TNH: Tensor, k_TKH: Tensor) -> Balancer:
        """The balancer; made at the first forward pass, by all ranks."""
        if self._balancer is None:
            self._balancer = self._make_balancer(q_TNH, k_TKH)
        return self._balancer

    def _make_balancer(self, q_TNH: Tensor, k_TKH: Tensor) -> Balancer:
        options, device = self._options, q_TNH.device
        if self._joined is None:
            self._joined = join(self._group, options.planning_group, device, options.timeout_s)
        balancer = Balancer(
            self._joined.transfers,
            shape=AttentionShape(q_TNH.shape[1], k_TKH.shape[1], q_TNH.shape[2], element_bytes=q_TNH.element_size()),
            tolerance=options.tolerance,
            policy=options.policy,
            backend=options.backend,
            dtype=q_TNH.dtype,
            device=device,
            timeout_s=options.timeout_s,
            planning_group=self._joined.planning,
            speeds=options.speeds,
            memory=options.memory,
            meter=options.meter,
        )
        balancer.agreed["attention layers"] = len(self._layers)
        balancer.agreed["windows of layers"] = {layer: w for layer, w in sorted(self._layers.items()) if w is not None}
        return balancer


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
