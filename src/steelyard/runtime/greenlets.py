"""Two nano-batches through *any* model: each runs its ordinary forward in a greenlet that switches at core attention.

A third party's model cannot be cut into the pieces that `ping_pong` interleaves, but its forward can be left in the
middle and taken up again. Per layer a half has three pieces, each ending in a turn: T (finish, token-wise layers, the
next send), L (tasks on local rows), R (tasks on received rows). The first half has one turn ahead, then they alternate:

    T ping, L ping, T pong, R ping, L pong, T ping, R pong, L ping, T pong, …

which is the order of `ping_pong` (decision 0005), so backward, in the reverse order of creation, is interleaved too.

Both halves run on one thread, and torch keeps grad mode, autocast and saved-tensor hooks per thread. Whatever a half
has set is taken off when it gives its turn away and put on when it comes back; without that the tensors of one half
would end up under the checkpoint of the other. Inference mode and the modes of torch can only be left in the order in
which they were entered, so a half that has entered one may not give its turn away: around both halves they are fine.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from steelyard.errors import UsageError

Result = TypeVar("Result")


def alternate(halves: Sequence[Callable[[Callable[[], None]], Result]]) -> list[Result]:
    """Run one or two functions in turn and return their results.

    Each is called with its *turn*: a function that lets the other half run until that one's next turn. Outside of its
    half (a backward pass that recomputes a layer) a turn does nothing. If a half raises, the other one is ended where
    it stands and the error is raised here.

    Raises:
        UsageError: another number of halves, `greenlet` is not installed, this torch does not tell which saved-tensor
            hooks are set, or a half holds a torch mode (such as selective checkpointing) or inference mode when it
            gives its turn away.
    """
    if not 1 <= len(halves) <= 2:
        raise UsageError(f"{len(halves)} nano-batches at once, expected 1 (plain) or 2 (ping-pong)")
    _top_hooks()
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    running = [_Half(function, devices) for function in halves]
    try:
        ahead = running[0]
        ahead.resume()
        while not all(half.done for half in running):
            for half in running:
                half.resume()
    finally:
        for half in running:
            half.end()
    return [half.result for half in running]


class _Half(Generic[Result]):
    """One function in its greenlet, and what it has set on the thread while the other one runs."""

    def __init__(self, function: Callable[[Callable[[], None]], Result], devices: Sequence[str]) -> None:
        greenlet = _greenlet_module()
        self._getcurrent, self._exit = greenlet.getcurrent, greenlet.GreenletExit
        self._function = function
        self._devices = devices
        self._modes = _modes()
        self._inference = torch.is_inference_mode_enabled()
        self._state: _ThreadState | None = None
        self._greenlet = greenlet.greenlet(lambda: function(self.turn))
        # What a library keeps in context variables during its forward is its half's own.
        self._greenlet.gr_context = contextvars.copy_context()
        self.done = False

    @property
    def result(self) -> Result:
        assert self.done
        return self._result

    def resume(self) -> None:
        """Run until the next turn or the end."""
        if self.done:
            return
        outside = _ThreadState.take(self._devices)
        (self._state or outside).put()
        try:
            result = self._greenlet.switch()
        finally:
            if self._greenlet.dead:
                self.done = True
                _ThreadState.take(self._devices)
            outside.put()
        if self.done:
            self._result = cast(Result, result)

    def turn(self) -> None:
        """Let the other half run."""
        if self._getcurrent() is not self._greenlet:
            return
        if _modes() != self._modes:
            raise UsageError(
                "ping-pong: a torch mode that the model entered is active at attention (selective checkpointing?); two "
                "halves cannot share it: use plain activation checkpointing, or run without ping-pong"
            )
        if torch.is_inference_mode_enabled() != self._inference:
            raise UsageError(
                "ping-pong: the model enters or leaves torch.inference_mode() around attention, which two halves "
                "cannot share: use torch.no_grad() there, put inference mode around the whole call, or run without "
                "ping-pong"
            )
        self._state = _ThreadState.take(self._devices)
        self._greenlet.parent.switch()

    def end(self) -> None:
        """Unwind a half that is not done: its context managers leave in good order."""
        if self.done:
            return
        outside = _ThreadState.take(self._devices)
        (self._state or outside).put()
        with contextlib.suppress(Exception):  # the error that brought us here is the one to report
            self._greenlet.throw(self._exit)
        _ThreadState.take(self._devices)
        outside.put()
        self.done = True


class _ThreadState:
    """Grad mode, autocast and saved-tensor hooks of this thread at one moment."""

    def __init__(
        self, grad: bool, autocast: list[tuple[str, bool, torch.dtype]], cache: bool, hooks: list[Any]
    ) -> None:
        self._grad, self._autocast, self._cache, self._hooks = grad, autocast, cache, hooks

    @classmethod
    def take(cls, devices: Sequence[str]) -> _ThreadState:
        """Read it, and take the hooks off."""
        hooks = []
        top = _top_hooks()
        while (pair := top(True)) is not None:
            hooks.append(pair)
            saved_tensors_hooks(*pair).__exit__()
        autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), hooks)

    def put(self) -> None:
        """Set it; there are no hooks on the thread."""
        torch._C._set_grad_enabled(self._grad)
        for device, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        for pair in reversed(self._hooks):
            saved_tensors_hooks(*pair).__enter__()


def _top_hooks() -> Callable[[bool], Any]:
    """torch's function that gives the pair of saved-tensor hooks that was set last.

    It is private, and the only way to see hooks that somebody else has set; to set and unset, the public class will do.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        raise UsageError(
            f"ping-pong: torch {torch.__version__} does not tell which saved-tensor hooks are set, so the halves could "
            "not be kept apart under checkpointing; use a torch that we name as tested, or run without ping-pong"
        )
    return cast(Callable[[bool], Any], top)


def _modes() -> list[int]:
    """The torch modes of this thread, by identity."""
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [id(mode) for mode in (*_get_current_dispatch_mode_stack(), *functions)]


def _greenlet_module() -> Any:
    try:
        import greenlet
    except ImportError as error:
        raise UsageError(
            "ping-pong of a model that is not ours needs the package greenlet: install it (pip install greenlet, or "
            "steelyard[hf])"
        ) from error
    return greenlet


def current_id() -> int:
    """Which greenlet runs: a number that no other one has while it lives."""
    return id(_greenlet_module().getcurrent())
