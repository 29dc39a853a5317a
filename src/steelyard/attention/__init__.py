"""Core attention over task tables: one interface, several back ends.

`interface` names the contract and chooses the back end, `reference` is slow and obvious, `cpu` is fast on CPUs, with
`blocks` and `tiles`, `flash` on CUDA, with `flash_kernels`; `merge` joins partial results, `tasks` and `local` serve
attention that needs no exchange.
"""

from __future__ import annotations

from steelyard.attention.interface import Backend, build_backend
from steelyard.attention.local import local_attention
from steelyard.attention.reference import accumulator_dtype, core_attention_reference, sink_gradient
from steelyard.attention.tasks import packed_tasks, selected_tasks

__all__ = [
    "Backend",
    "accumulator_dtype",
    "build_backend",
    "core_attention_reference",
    "local_attention",
    "packed_tasks",
    "selected_tasks",
    "sink_gradient",
]
