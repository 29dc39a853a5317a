"""Which functions of q, k and v the layers of a rank computed lately, for the ranks to compare when they plan.

Arguments of a call (a window, a scale, a soft cap, a sink) decide what is computed, and a window what is sent too. They
are given layer by layer, after planning; so each rank tells with its lengths what it computed in the steps before, and
the call that asked for this plan. No message is added.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

Called: TypeAlias = tuple[int, int, int, str]
"""Step, nano-batch, layer (its number, or how many were entered before), and what was computed, in words."""

_STEPS = 2
"""How many steps before its plan are told: ranks may plan ahead, and not all of them equally far."""


class Calls:
    """The calls of the latest steps. They are made by one thread and told by another, perhaps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[tuple[int, int, int], str] = {}

    def add(self, step: int, nano_batch: int, layer: int, text: str) -> None:
        """Note a call; of several of the same layer and plan the first counts, which is the same on all ranks."""
        with self._lock:
            self._texts.setdefault((step, nano_batch, layer), text)

    def before(self, step: int) -> tuple[Called, ...]:
        """Those of the last steps before `step`; older ones are forgotten."""
        with self._lock:
            self._texts = {key: text for key, text in self._texts.items() if key[0] >= step - _STEPS}
            return tuple((*key, text) for key, text in sorted(self._texts.items()))


def described(q_TNH: Tensor, k_TKH: Tensor, kernel: object, sink_N: Tensor | None) -> str:
    """What a call computes, as ranks compare and messages show it."""
    sink = "given" if sink_N is not None else None
    return (
        f"{kernel}, sink={sink}, heads={q_TNH.shape[1]}, kv_heads={k_TKH.shape[1]}, head_dim={q_TNH.shape[2]}, "
        f"dtype={q_TNH.dtype}"
    )


def difference(by_rank: Sequence[Sequence[Called]]) -> str:
    """In words, the first call that two ranks made with different arguments; "" if there is none.

    A call that only one of them has told of, since it is further on, is no difference.
    """
    first: dict[tuple[int, int, int], tuple[int, str]] = {}
    for rank, calls in enumerate(by_rank):
        for step, nano_batch, layer, text in calls:
            told, own = first.setdefault((step, nano_batch, layer), (rank, text))
            if own != text:
                pairs = zip(own.split(", "), text.split(", "), strict=True)
                here, there = zip(*(pair for pair in pairs if pair[0] != pair[1]), strict=True)
                return (
                    f"attention of layer {layer} in step {step}: {', '.join(here)} on rank {told} and "
                    f"{', '.join(there)} on rank {rank}"
                )
    return ""
