"""Exchange buffers that are allocated once and reused.

Shapes of exchange buffers change every step; allocating them anew fragments memory (arXiv 2510.18121 names it as its
main loss). The arena keeps flat buffers of a few size classes and lends slices of them. After the first steps it no
longer grows: `allocations` counts how often it had to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Arena:
    """Lends tensors of any shape out of reusable flat buffers of one device.

    Not thread-safe: one training thread acquires and releases. A buffer that is never released (its graph was dropped
    without backward) is freed by Python as usual.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocations = 0
        self.allocated_bytes = 0
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def acquire(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with arbitrary contents; give it back with `release`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        free = self._free.setdefault(dtype, [])
        # A small request must not hold a large buffer: whoever needs that next would have to allocate another one.
        most = 2 * _size_class(count)
        fitting = (i for i, b in enumerate(free) if count <= b.numel() <= most)
        best = min(fitting, key=lambda i: free[i].numel(), default=None)
        if best is not None:
            buffer = free.pop(best)
        else:
            buffer = torch.empty(_size_class(count), dtype=dtype, device=self.device)
            self.allocations += 1
            self.allocated_bytes += buffer.numel() * buffer.element_size()
        return buffer[:count].view(shape)

    def release(self, *tensors: Tensor | None) -> None:
        """Take back tensors that `acquire` lent; their contents are gone."""
        for tensor in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            whole = torch.empty(0, dtype=tensor.dtype, device=self.device).set_(tensor.untyped_storage())
            self._free[tensor.dtype].append(whole)


def _size_class(count: int) -> int:
    """The next of 2^k, 1.5 · 2^k: at most half is wasted, and shapes that vary a little share a class."""
    if count <= 1024:
        return 1024
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power
