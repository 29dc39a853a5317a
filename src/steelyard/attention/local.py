"""Core attention of one process: a back end under autograd, without any exchange.

T: tokens, H: query heads, K: key/value heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from steelyard.attention.interface import Backend
from steelyard.attention.reference import ReferenceBackend, accumulator_dtype, sink_gradient
from steelyard.attention.tasks import packed_tasks
from steelyard.domain.arrays import IntArray
from steelyard.domain.plan import KernelTasks
from steelyard.errors import UsageError


def local_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    documents: Sequence[int] | IntArray | KernelTasks,
    backend: Backend,
) -> torch.Tensor:
    """Core attention of packed documents in this process, differentiable once in q, k, v and the back end's sink.

    Args:
        q_THD: (tokens, heads, head_dim); k_TKD, v_TKD: (tokens, kv_heads, head_dim); contiguous last dimension.
        documents: lengths of the packed documents, or a task table over these rows (store 0).
        backend: computes the tasks.

    Returns:
        (tokens, heads, head_dim) in the type of `q_THD`; 0 in rows that belong to no task.

    Raises:
        UsageError: the documents do not cover exactly the rows given.
    """
    if isinstance(documents, KernelTasks):
        tasks = documents
    else:
        tasks = packed_tasks(documents)
        if int(tasks.q_length.sum()) != len(q_THD):
            raise UsageError(
                f"documents hold {int(tasks.q_length.sum())} tokens in total, but q has {len(q_THD)} rows: "
                "give the length of every packed document"
            )
    sink = backend.sink if isinstance(backend, ReferenceBackend) else None
    result: torch.Tensor = _LocalAttention.apply(q_THD, k_TKD, v_TKD, sink, tasks, backend)  # type: ignore[no-untyped-call]
    return result


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        tasks: KernelTasks,
        backend: Backend,
    ) -> torch.Tensor:
        make = torch.empty if int(tasks.q_length.sum()) == len(q) else torch.zeros
        out = make(q.shape, dtype=q.dtype, device=q.device)
        lse = make(q.shape[:2], dtype=accumulator_dtype(q.dtype), device=q.device)
        with torch.autocast(q.device.type, enabled=False):  # it would round the kernels' fp32 sums to 16 bits
            backend.forward(tasks, _stores(q), _stores(k), _stores(v), _stores(out), _stores(lse))
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.tasks, ctx.backend = tasks, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        wide = accumulator_dtype(k.dtype)
        make = torch.empty if int(ctx.tasks.q_length.sum()) == len(q) else torch.zeros
        dq = make(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        stores = (_stores(x) for x in (dout, q, k, v, out, lse, dq, dk, dv))
        ctx.backend.backward(ctx.tasks, *stores)
        dsink = sink_gradient(sink, dout, out, lse) if sink is not None and ctx.needs_input_grad[3] else None
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsink, None, None


def _stores(local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair of stores when nothing is received."""
    return local, local[:0]
