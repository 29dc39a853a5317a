"""Two functions in turn on one thread, each with what it has set on the thread."""

from __future__ import annotations

import contextvars

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from steelyard.errors import UsageError
from steelyard.runtime.greenlets import alternate


def test_order_is_that_of_the_walker() -> None:
    done: list[str] = []

    def half(name: str):
        def run(turn) -> str:
            for layer in range(2):
                for piece in ("T", "L", "R"):
                    done.append(f"{piece}{layer} {name}")
                    turn()
            done.append(f"end {name}")
            return name

        return run

    assert alternate([half("ping"), half("pong")]) == ["ping", "pong"]
    assert done == [
        "T0 ping", "L0 ping", "T0 pong", "R0 ping", "L0 pong", "T1 ping", "R0 pong", "L1 ping", "T1 pong", "R1 ping",
        "L1 pong", "end ping", "R1 pong", "end pong",
    ]  # fmt: skip
    done.clear()
    assert alternate([half("alone")]) == ["alone"]


def test_each_half_keeps_its_own_thread_state() -> None:
    packed: dict[str, list[torch.Size]] = {"ping": [], "pong": []}
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nobody")

    def ping(turn) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed["ping"].append(tensor.shape)
            return tensor.detach()

        variable.set("ping")
        with torch.autocast("cpu", dtype=torch.bfloat16), saved_tensors_hooks(pack, lambda t: t):
            turn()
            assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
            torch.ones(3, requires_grad=True) ** 2
        turn()
        assert not torch.is_autocast_enabled("cpu") and variable.get() == "ping"

    def pong(turn) -> None:
        with torch.no_grad():
            assert not torch.is_autocast_enabled("cpu") and variable.get() == "nobody"
            turn()
            assert not torch.is_grad_enabled()
        torch.ones(5, requires_grad=True) ** 2
        turn()
        torch.ones(7, requires_grad=True) ** 2

    outer: list[torch.Size] = []
    with saved_tensors_hooks(lambda t: outer.append(t.shape) or t.detach(), lambda t: t):
        alternate([ping, pong])
        torch.ones(2, requires_grad=True) ** 2
    assert packed["ping"] == [torch.Size([3])] and outer == [torch.Size([5]), torch.Size([7]), torch.Size([2])]
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and variable.get() == "nobody"


def test_an_error_ends_the_other_half_in_good_order() -> None:
    left: list[str] = []

    def fails(turn) -> None:
        with torch.no_grad():
            turn()
            raise ValueError("wrong")

    def waits(turn) -> None:
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                turn()
                turn()
                turn()
        finally:
            left.append("left")

    with pytest.raises(ValueError, match="wrong"):
        alternate([waits, fails])
    assert left == ["left"] and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_a_turn_outside_of_its_half_does_nothing() -> None:
    turns, done = [], []
    alternate([turns.append, lambda turn: None])
    turns[0]()

    def half(name: str):
        def run(turn) -> None:
            done.append(name)
            turns[0]()
            done.append(name)
            turn()
            done.append(f"end {name}")

        return run

    alternate([half("ping"), half("pong")])
    assert done == ["ping", "ping", "end ping", "pong", "pong", "end pong"]


def test_modes_that_two_halves_cannot_share_are_refused() -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def run(turn) -> None:
        with Mode():
            turn()

    with pytest.raises(UsageError, match="torch mode"):
        alternate([run, lambda turn: None])


def test_inference_mode_that_two_halves_cannot_share_is_refused() -> None:
    seen: list[bool] = []

    def half(turn) -> None:
        turn()
        seen.append(torch.is_inference_mode_enabled())

    def enters(turn) -> None:
        with torch.inference_mode():
            turn()

    def enters_between(turn) -> None:
        with torch.inference_mode():
            torch.ones(2)
        half(turn)

    for pair in ([enters, half], [half, enters]):
        with pytest.raises(UsageError, match=r"enters or leaves torch\.inference_mode"):
            alternate(pair)
        assert not torch.is_inference_mode_enabled()
    alternate([enters_between, half])
    assert not any(seen)
    seen.clear()
    with torch.inference_mode():
        alternate([half, half])
        assert torch.is_inference_mode_enabled()
    assert seen == [True, True]


def test_number_of_halves() -> None:
    with pytest.raises(UsageError, match="3 nano-batches at once"):
        alternate([lambda turn: None] * 3)


def test_a_torch_that_hides_its_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    with pytest.raises(UsageError, match="does not tell which saved-tensor hooks are set"):
        alternate([lambda turn: turn()])
