"""Attention sinks: one more key per head, with a learned logit and no value, added to what any back end computed.

A sink only takes weight away. With `lse` over the keys and the sink's logit s, the log-sum-exp over all of them is
lse' = ln(e^lse + e^s), and the output out' = out · e^(lse − lse'). Backward needs nothing new: a back end that is given
out' and lse' recomputes the weights that the sink has left to the keys, and its sum of dout · out' is right because the
sink adds no value. Only the sink's own gradient remains: −Σ e^(s − lse') · (dout · out') over the rows.

T: rows of a store, R: rows of a run, H: query heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from steelyard.domain.plan import KernelTasks
from steelyard.errors import UsageError

QueryRuns: TypeAlias = tuple[tuple[int, slice], ...]
"""(store, rows) of queries."""
_WIDE_ELEMENTS = 1 << 20  # elements of outputs that are widened at a time: a few MiB, whatever a run's length


def check_sink(sink_H: Tensor, heads: int) -> None:
    """Refuse a sink that is not one logit per head.

    Raises:
        UsageError: says its shape.
    """
    if not isinstance(sink_H, Tensor):
        raise UsageError(f"attention: sink of type {type(sink_H).__name__}, expected a tensor of shape ({heads},)")
    if tuple(sink_H.shape) != (heads,) or not sink_H.is_floating_point():
        raise UsageError(
            f"attention: sink has shape {tuple(sink_H.shape)} and dtype {sink_H.dtype}; expected one floating-point "
            f"logit per query head, ({heads},)"
        )


def add_sink(sink_H: Tensor, runs: QueryRuns, out: Sequence[Tensor], lse: Sequence[Tensor]) -> None:
    """Take the sink's share from rows of queries, in place.

    Args:
        sink_H: logits, in the unit of scores after scale and soft cap.
        runs: the rows that a back end has just written, from `query_runs`.
        out, lse: per store (T, H, D) and (T, H), as the back end wrote them.
    """
    for store, rows in runs:
        lse_RH = lse[store][rows]
        with_sink_RH = torch.logaddexp(lse_RH, sink_H.to(lse_RH))
        out[store][rows].mul_(torch.exp(lse_RH - with_sink_RH)[..., None])
        lse_RH.copy_(with_sink_RH)


def sink_gradient_of(
    sink_H: Tensor, runs: QueryRuns, dout: Sequence[Tensor], out: Sequence[Tensor], lse: Sequence[Tensor]
) -> Tensor:
    """What rows of queries add to the gradient of the sink, (H,) in the type of `lse`.

    Args:
        dout: per store (T, H, D), gradient of the outputs.
        out, lse: as `add_sink` left them.
    """
    wide = lse[0].dtype
    gradient_H = torch.zeros(sink_H.shape, dtype=wide, device=sink_H.device)
    sink_H = sink_H.to(wide)
    for store, run in runs:
        step = max(1, _WIDE_ELEMENTS // max(1, out[store][0].numel()))
        for first in range(run.start, run.stop, step):
            rows = slice(first, min(first + step, run.stop))
            delta_RH = (dout[store][rows].to(wide) * out[store][rows]).sum(-1)
            gradient_H.sub_((torch.exp(sink_H - lse[store][rows]) * delta_RH).sum(0))
    return gradient_H


def query_runs(tasks: KernelTasks) -> QueryRuns:
    """All queries of a table, each row once, in as few runs as possible."""
    some = np.flatnonzero(tasks.q_length)
    order = some[np.lexsort((tasks.q_row[some], tasks.q_store[some]))]
    store, first = tasks.q_store[order], tasks.q_row[order]
    end = first + tasks.q_length[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (store[1:] != store[:-1]) | (first[1:] != end[:-1])
    starts = np.flatnonzero(begins)
    ends = end[np.append(starts[1:], len(order)) - 1] if len(order) else end
    columns = (store[starts].tolist(), first[starts].tolist(), ends.tolist())
    return tuple((number, slice(low, high)) for number, low, high in zip(*columns, strict=True))
