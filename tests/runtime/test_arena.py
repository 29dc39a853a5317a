"""Exchange buffers: reused, never shared, and no small request holds a large one."""

from __future__ import annotations

import torch

from steelyard.runtime.arena import Arena


def test_a_released_buffer_is_lent_again() -> None:
    arena = Arena(torch.device("cpu"))
    first = arena.acquire((100, 4, 8), torch.float32)
    arena.release(first)
    again = arena.acquire((90, 4, 8), torch.float32)
    assert arena.allocations == 1 and again.data_ptr() == first.data_ptr() and again.shape == (90, 4, 8)


def test_buffers_in_use_are_not_shared() -> None:
    arena = Arena(torch.device("cpu"))
    one, other = (arena.acquire((2000,), torch.float32) for _ in range(2))
    one.fill_(1)
    other.fill_(2)
    assert one.sum() == 2000 and arena.allocations == 2


def test_dtypes_do_not_mix() -> None:
    arena = Arena(torch.device("cpu"))
    arena.release(arena.acquire((2000,), torch.float32))
    assert arena.acquire((2000,), torch.bfloat16).dtype == torch.bfloat16 and arena.allocations == 2


def test_small_and_empty_requests_leave_large_buffers_alone() -> None:
    arena = Arena(torch.device("cpu"))
    arena.release(arena.acquire((1 << 20,), torch.float32))
    empty = arena.acquire((0, 4, 8), torch.float32)
    small = arena.acquire((10,), torch.float32)
    large = arena.acquire((1 << 20,), torch.float32)
    assert arena.allocations == 2, "one large buffer and one small one"
    arena.release(empty, small, large)
    assert arena.acquire((0,), torch.float32).numel() == 0 and arena.allocations == 2
