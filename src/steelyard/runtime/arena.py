"""Exchange buffers that are allocated once and reused.

Shapes of exchange buffers change every step; allocating them anew fragments memory (arXiv 2510.18121 names it as its
main loss), and keeping a buffer for every size that has occurred comes to more than twice what is needed at once. So
the arena has one block of memory and lends ranges of it, whatever shapes and types are asked for: it holds the most
that was ever lent at one moment, and that is what a plan states (`cost.memory`). While this still grows, further blocks
stand beside it; one that is as large as all that was lent takes their place as soon as nothing is lent. Loans that are
not given back in order leave gaps: where one fits into none of them although there is room, the block becomes up to an
eighth larger, each time that it happens. It never shrinks, so one long step is kept. After the first steps it no longer
grows: `allocations` counts how often it had to.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_UNIT_BYTES = 512  # ranges begin and end at multiples of it, as kernels on any device like it


@dataclass(eq=False)
class _Block:
    """One allocation. `free`: offset and length of the ranges that are not lent, in order, none beside another."""

    storage: torch.UntypedStorage
    size_bytes: int
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return self.free == [(0, self.size_bytes)]

    def give_back(self, offset: int, size_bytes: int) -> None:
        free: list[tuple[int, int]] = []
        for start, length in sorted([*self.free, (offset, size_bytes)]):
            if free and sum(free[-1]) == start:
                start, length = free[-1][0], free.pop()[1] + length
            free.append((start, length))
        self.free = free


@dataclass(frozen=True, eq=False)
class _Loan:
    block: _Block
    offset: int
    size_bytes: int
    number: int
    end: weakref.finalize[..., Any]


class Arena:
    """Lends tensors of any shape out of one block of memory of one device.

    Not thread-safe: one training thread acquires and releases, for one stream of a device. A tensor that is never
    released (its graph was dropped without backward) comes back by itself when nothing refers to *this* tensor any
    more: who keeps a detached tensor or a view of it must keep the tensor as well.

    Attributes:
        allocations: how often memory was allocated.
        allocated_bytes: what is held now, lent or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocations = 0
        self._blocks: list[_Block] = []
        self._lent: dict[int, _Loan] = {}  # by address
        self._numbers = itertools.count()
        self._lost: deque[tuple[int, int]] = deque()  # address and number of loans whose tensor is gone
        self._lent_bytes = 0
        self._wanted_bytes = 0  # by the one block: the most that was lent at once, and more where that did not fit

    @property
    def allocated_bytes(self) -> int:
        return sum(block.size_bytes for block in self._blocks)

    def acquire(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with arbitrary contents; give it back with `release`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        self._take_back_lost()
        size_bytes = -(-count * dtype.itemsize // _UNIT_BYTES) * _UNIT_BYTES
        block, offset = self._range(size_bytes)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        # Not a view of the block: views would share the counter by which autograd notices changes in place.
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        tensor.set_(block.storage, offset // dtype.itemsize, shape, strides)
        address, number = tensor.data_ptr(), next(self._numbers)
        end = weakref.finalize(tensor, self._lost.append, (address, number))
        end.atexit = False
        self._lent[address] = _Loan(block, offset, size_bytes, number, end)
        return tensor

    def release(self, *tensors: Tensor | None) -> None:
        """Take back tensors that `acquire` lent; their contents are gone. Others are none of the arena's, not even
        those that share their memory."""
        for tensor in tensors:
            if tensor is None or not tensor.numel():
                continue
            loan = self._lent.get(tensor.data_ptr())
            alive = loan.end.peek() if loan is not None else None
            if loan is not None and alive is not None and alive[0] is tensor:
                del self._lent[tensor.data_ptr()]
                loan.end.detach()
                self._end(loan)

    def _range(self, size_bytes: int) -> tuple[_Block, int]:
        """Take the smallest free range that is large enough, or a new block."""
        if not self._lent and len(self._blocks) > 1:
            self._blocks.clear()
            self._allocate(self._wanted_bytes)
        self._lent_bytes += size_bytes
        self._wanted_bytes = max(self._wanted_bytes, self._lent_bytes)
        fitting = (
            (length, number, place)
            for number, block in enumerate(self._blocks)
            for place, (_, length) in enumerate(block.free)
            if length >= size_bytes
        )
        best = min(fitting, default=None)
        if best is None:
            self._note_gaps(size_bytes)
            self._drop_idle(size_bytes)
            self._allocate(size_bytes)
            best = size_bytes, len(self._blocks) - 1, 0
        length, number, place = best
        block = self._blocks[number]
        offset = block.free[place][0]
        block.free[place : place + 1] = [(offset + size_bytes, length - size_bytes)] if length > size_bytes else []
        return block, offset

    def _allocate(self, size_bytes: int) -> None:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        self._blocks.append(_Block(memory.untyped_storage(), size_bytes, [(0, size_bytes)]))
        self.allocations += 1

    def _note_gaps(self, size_bytes: int) -> None:
        """The one block has room, but in pieces: it must become a little larger, or the next step would miss again."""
        if len(self._blocks) == 1 and self._lent_bytes <= self._blocks[0].size_bytes:
            more = self._wanted_bytes // 8 // _UNIT_BYTES * _UNIT_BYTES + _UNIT_BYTES
            self._wanted_bytes += min(more, size_bytes)

    def _drop_idle(self, wanted_bytes: int) -> None:
        """Free blocks of which nothing is lent and that are too small, until so much has become free."""
        for block in sorted((block for block in self._blocks if block.idle), key=lambda block: block.size_bytes):
            if wanted_bytes <= 0:
                break
            self._blocks.remove(block)
            wanted_bytes -= block.size_bytes

    def _end(self, loan: _Loan) -> None:
        loan.block.give_back(loan.offset, loan.size_bytes)
        self._lent_bytes -= loan.size_bytes

    def _take_back_lost(self) -> None:
        while self._lost:
            address, number = self._lost.popleft()
            loan = self._lent.get(address)
            if loan is not None and loan.number == number:
                del self._lent[address]
                self._end(loan)
