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


def test_one_block_serves_all_types() -> None:
    arena = Arena(torch.device("cpu"))
    arena.release(arena.acquire((2000,), torch.float32))
    narrow, wide = arena.acquire((1000,), torch.bfloat16), arena.acquire((500,), torch.float64)
    assert arena.allocations == 1 and (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float64)
    narrow.fill_(1)
    wide.fill_(2)
    assert narrow.sum() == 1000 and wide.sum() == 1000


def test_it_holds_what_was_lent_at_once_and_then_grows_no_more() -> None:
    """Other sizes at other moments: first all beside each other, from the second round on in one block."""
    arena = Arena(torch.device("cpu"))
    growth = []
    for _ in range(3):
        before = arena.allocations
        first = [arena.acquire((n, 128), torch.float32) for n in (30, 7, 12)]
        arena.release(*first[:2])
        second = [arena.acquire((n, 128), torch.float32) for n in (9, 25)]
        held = (30 + 12 + 25) * 512 if not growth else (30 + 7 + 12) * 512
        assert arena.allocated_bytes == held, "what is too small and not lent makes room"
        arena.release(first[2], *second)
        growth.append(arena.allocations - before)
    assert growth == [4, 1, 0], "30 and 7 rows are free when 9 and 25 are wanted, but apart from each other"
    assert arena.allocated_bytes == (30 + 7 + 12) * 512


def test_gaps_do_not_make_it_allocate_for_ever() -> None:
    """20 rows are wanted when 20 are free, 10 on each side of 10 that are lent: one block must get larger than 30."""
    arena = Arena(torch.device("cpu"))
    growth = []
    for _ in range(8):
        before = arena.allocations
        left, middle, right = (arena.acquire((10, 128), torch.float32) for _ in range(3))
        arena.release(left, right)
        arena.release(arena.acquire((20, 128), torch.float32), middle)
        growth.append(arena.allocations - before)
    assert growth[1] > 0 and growth[-3:] == [0, 0, 0]
    assert arena.allocated_bytes <= 44 * 512


def test_empty_requests_take_nothing() -> None:
    arena = Arena(torch.device("cpu"))
    empty = arena.acquire((0, 4, 8), torch.float32)
    arena.release(empty, None)
    assert empty.shape == (0, 4, 8) and arena.allocations == 0


def test_a_tensor_that_is_gone_comes_back() -> None:
    arena = Arena(torch.device("cpu"))
    lost = arena.acquire((2000,), torch.float32)
    address = lost.data_ptr()
    del lost
    assert arena.acquire((2000,), torch.float32).data_ptr() == address and arena.allocations == 1


def test_a_tensor_in_a_graph_is_not_taken_away_and_comes_back_with_it() -> None:
    arena = Arena(torch.device("cpu"))
    x = torch.randn(500, requires_grad=True)
    weight = arena.acquire((500,), torch.float32)
    address = weight.data_ptr()
    out = x * weight.fill_(3)
    del weight
    other = arena.acquire((500,), torch.float32).fill_(5)
    assert other.data_ptr() != address, "the graph still needs it"
    out.sum().backward()
    assert x.grad is not None and x.grad.eq(3).all(), "and no change of its neighbour counts as a change of it"
    del out
    assert arena.acquire((500,), torch.float32).data_ptr() == address


def test_a_tensor_of_others_is_not_taken() -> None:
    arena = Arena(torch.device("cpu"))
    own = arena.acquire((500,), torch.float32)
    arena.release(own.clone(), own)
    one, other = (arena.acquire((500,), torch.float32) for _ in range(2))
    assert one.data_ptr() != other.data_ptr()


def test_random_loans_never_overlap() -> None:
    arena, random = Arena(torch.device("cpu")), torch.Generator().manual_seed(3)
    lent: list[tuple[torch.Tensor, int]] = []
    most = 0
    for value in range(2000):
        if lent and (len(lent) > 12 or torch.rand(1, generator=random) < 0.5):
            tensor, expected = lent.pop(int(torch.randint(len(lent), (1,), generator=random)))
            assert tensor.eq(expected).all()
            arena.release(tensor)
        else:
            size = int(torch.randint(1, 3000, (1,), generator=random))
            lent.append((arena.acquire((size,), torch.int32).fill_(value), value))
        most = max(most, sum(-(-t.nbytes // 512) * 512 for t, _ in lent))
    assert all(tensor.eq(expected).all() for tensor, expected in lent)
    arena.release(*(tensor for tensor, _ in lent))
    arena.acquire((1,), torch.int32)
    assert most <= arena.allocated_bytes <= 1.25 * most


def test_only_the_tensor_that_was_lent_ends_its_loan() -> None:
    """Another tensor over the same memory is no loan: it may be old, and its memory somebody else's by now."""
    arena = Arena(torch.device("cpu"))
    first = arena.acquire((2000,), torch.float32)
    stale = first.detach()
    arena.release(stale)
    other = arena.acquire((2000,), torch.float32)
    assert other.data_ptr() != first.data_ptr(), "the first is still lent"
    arena.release(first)
    second = arena.acquire((2000,), torch.float32)
    assert second.data_ptr() == stale.data_ptr()
    arena.release(stale, first)
    third = arena.acquire((2000,), torch.float32)
    assert third.data_ptr() not in (second.data_ptr(), other.data_ptr()), "a stale name ended another loan"
