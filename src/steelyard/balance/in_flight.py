"""Which forward passes may still be asked, in backward, to run a layer again (activation checkpointing)."""

from __future__ import annotations

import weakref

import torch

from steelyard.runtime.dispatch import Call


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread: what is called then is a layer run again."""
    return torch._C._current_graph_task_id() != -1


class InFlight:
    """Keeps count of one forward pass, without holding anything of it.

    A call that autograd's graph holds is done with when its backward begins or the graph is gone. One that no graph
    holds (the first run of a layer under reentrant checkpointing, or a layer whose inputs need no gradient) gives no
    such sign. It counts as done with when another pass begins after backward has been seen in this one.

    Args:
        owner: the forward pass.
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self._calls: list[weakref.ref[Call]] = []
        self._prune_at = 64
        self._unheld = False
        self._seen_backward = False

    def add(self, call: Call, held: bool) -> None:
        """Count a call of the forward pass in. `held`: autograd's graph holds it."""
        if not held:
            self._calls = self._waiting()
            self._unheld, self._seen_backward = True, False
            return
        if len(self._calls) >= self._prune_at:
            waiting = self._waiting()
            self._seen_backward |= len(waiting) < len(self._calls)
            self._calls, self._prune_at = waiting, 2 * max(32, len(waiting))
        self._calls.append(weakref.ref(call))

    def run_again(self) -> None:
        """A layer was run again in backward."""
        self._seen_backward = True

    @property
    def open(self) -> bool:
        """Whether a layer of this pass may be run again in a backward pass that is still to come, or in this one."""
        return self._unheld or any(
            call is not None and not call.backward_started for call in (r() for r in self._calls)
        )

    def another_begins(self) -> bool:
        """Another pass begins; whether this one must still be counted."""
        if self._seen_backward or len(self._waiting()) < len(self._calls):
            self._unheld = False
        return self._owner() is not None or self.open

    def _waiting(self) -> list[weakref.ref[Call]]:
        return [ref for ref in self._calls if (call := ref()) is not None and not call.backward_started]
