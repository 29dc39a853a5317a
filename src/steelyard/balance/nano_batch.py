"""Core attention of one nano-batch in flight: what a model calls in each of its layers.

It carries out the plan of the nano-batch, with a plan of its own for layers that see a window of keys only; gives the
other half its turns when two nano-batches alternate; and answers from what was kept when activation checkpointing
enters a layer a second time, so that nothing is sent or computed twice.

Shapes: T local tokens, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol

import torch
from torch import Tensor

from steelyard.balance.calls import Calls, described
from steelyard.balance.in_flight import InFlight, in_backward
from steelyard.balance.plans import NanoBatchPlan
from steelyard.errors import UsageError
from steelyard.runtime.dispatch import Call, CoreAttention, Kept


@dataclass(frozen=True)
class Kernel:
    """Which function of q, k and v a layer computes.

    Attributes:
        scale: factor on q·k; None: 1/√(head size).
        window: keys that a query sees at most, its own included; None: all earlier ones of its document.
        softcap: c in c·tanh(score / c); None: no cap.

    Raises:
        UsageError: something that is no number, or a window below 1.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "window", "softcap"):
            value, kind = getattr(self, name), Integral if name == "window" else Real
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                expected = "a whole number" if name == "window" else "a number"
                raise UsageError(f"attention: {name}={value!r}, expected {expected} or None")
        if self.window is not None and self.window < 1:
            raise UsageError(
                f"window={self.window}: expected at least 1, the query's own key, or None to see all earlier keys"
            )

    def __str__(self) -> str:
        scale, softcap = (None if value is None else float(value) for value in (self.scale, self.softcap))
        return f"window={self.window}, scale={scale}, softcap={softcap}"


class AttentionMaker(Protocol):
    """What builds core attention for a layer: the `Balancer`."""

    @property
    def calls(self) -> Calls: ...

    def core_attention_of(
        self, nano_batch: NanoBatchPlan, kernel: Kernel, q_TNH: Tensor, k_TKH: Tensor
    ) -> CoreAttention: ...


class NanoBatchAttention:
    """Balanced core attention of one forward pass of one nano-batch; `Balancer.begin` makes it.

    Make a new one for every forward pass: that is how a second entry of a layer inside the backward pass is told from
    a second forward pass.

    Args:
        maker: builds core attention of layers.
        plan: of the nano-batch.
        turn: called between the steps of each layer; the other half of a ping-pong runs then.

    Attributes:
        plan: as given.
        entries, answers: how often layers were computed, and how often answered from what was kept.
        in_flight: whether layers may still be run again in backward.
    """

    def __init__(self, maker: AttentionMaker, plan: NanoBatchPlan, turn: Callable[[], None] | None = None) -> None:
        self.plan = plan
        self.turn = turn
        self.entries = self.answers = 0
        self.in_flight = InFlight(self)
        self._maker = maker
        self._cores: dict[tuple[Kernel, torch.dtype, torch.device, tuple[int, ...]], CoreAttention] = {}
        # Whether there will be a backward pass: under reentrant checkpointing layers run with gradients off at first.
        self._records = torch.is_grad_enabled()
        # The first pass of each layer: held here where no graph holds it, None once there were two of them.
        self._first: dict[int, Call | weakref.ref[Call] | None] = {}

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        layer: int | None = None,
        kernel: Kernel = Kernel(),
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attention output (T, N, H) of this rank's tokens.

        Args:
            layer: number of the layer in this pass; without it checkpointed layers are computed anew in backward.
            kernel: what the layer computes; must be the same on every rank.
            sink_N: logits of one more key per head that takes weight and has no value (an attention sink); the same on
                every rank. A rank's gradient of it is of the rows that it computed: sum it over the ranks.

        Raises:
            UsageError: tensors that do not fit the plan or each other, or that the back end cannot compute.
            PeerError: a rank did not take part in time.
        """
        _check(q_TNH, k_TKH, v_TKH)
        core = self._core(kernel, q_TNH, k_TKH)
        number = self.entries if layer is None else layer
        answer = None if layer is None else self._kept(layer)
        keep = layer is not None and self._records and answer is None
        again = in_backward()
        if again:
            self.in_flight.run_again()
        else:
            calls = self._maker.calls
            calls.add(self.plan.step, self.plan.index, number, described(q_TNH, k_TKH, kernel, sink_N))
        call = core.send(q_TNH, k_TKH, v_TKH, number, keep=keep, answer=answer, sink_N=sink_N)
        if answer is not None:
            self.answers += 1
            core.attend_local(call)
            core.attend_received(call)
            return core.finish(call)
        self.entries += 1
        turn = self.turn if self.turn is not None else _no_turn
        turn()
        core.attend_local(call)
        turn()
        core.attend_received(call)
        turn()
        out_TNH = core.finish(call)
        if not again and (out_TNH.requires_grad or self._records):
            self.in_flight.add(call, held=out_TNH.requires_grad)
        if keep and layer is not None:
            twice = layer in self._first
            self._first[layer] = None if twice else (weakref.ref(call) if torch.is_grad_enabled() else call)
        return out_TNH

    def _kept(self, layer: int) -> Kept | None:
        """What the first pass of a layer left, if this is its second one: inside backward, and nothing has changed."""
        first = self._first.get(layer)
        if first is None or not torch.is_grad_enabled() or not in_backward():
            return None
        if isinstance(first, Call):
            del self._first[layer]
            call: Call | None = first
        else:
            call = first()
        if call is None or call.backward_started or call.kept is None or not call.kept.intact:
            return None
        return call.kept

    def _core(self, kernel: Kernel, q_TNH: Tensor, k_TKH: Tensor) -> CoreAttention:
        shape = (*q_TNH.shape[1:], k_TKH.shape[1])
        key = (kernel, q_TNH.dtype, q_TNH.device, shape)
        if key not in self._cores:
            self._cores[key] = self._maker.core_attention_of(self.plan, kernel, q_TNH, k_TKH)
        return self._cores[key]


def _no_turn() -> None:
    pass


def _check(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
    """Refuse tensors that do not fit each other; whether they fit the plan is the dispatch's to say."""
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in (("q", q_TNH), ("k", k_TKH), ("v", v_TKH)))
    if any(t.dim() != 3 for t in (q_TNH, k_TKH, v_TKH)) or k_TKH.shape != v_TKH.shape:
        raise UsageError(
            f"attention: {shapes}; expected q (tokens, heads, head size) and k, v (tokens, key/value heads, head "
            "size), packed without a batch dimension"
        )
    if q_TNH.shape[2] != k_TKH.shape[2] or q_TNH.shape[1] % max(1, k_TKH.shape[1]):
        raise UsageError(
            f"attention: {shapes}; expected one head size, and a number of query heads that is a multiple of the "
            "key/value heads"
        )
    if not q_TNH.dtype == k_TKH.dtype == v_TKH.dtype:
        raise UsageError(f"attention: q is {q_TNH.dtype}, k {k_TKH.dtype}, v {v_TKH.dtype}; expected one dtype")
