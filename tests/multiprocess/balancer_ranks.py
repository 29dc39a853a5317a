"""One rank's part of the tests of `Balancer.attention`. Runs on the pool's workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ranks as on_rank
import torch
import torch.distributed as dist

from steelyard.balance import Balancer
from steelyard.domain.layout import Layout
from steelyard.errors import SteelyardError


def attention(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    shards: Sequence[tuple[int, int, int, int]],
    how: str,
    window: int | None,
    own_group: bool,
) -> dict[str, Any]:
    """Two layers of attention and their gradients, with documents said in one of three ways."""
    layout = Layout.from_shards(shards, ranks)
    balancer = Balancer(
        group if ranks > 1 else None, tolerance=0.0, planning_group=None if own_group else group, timeout_s=30
    )
    q, k, v, dout = on_rank.qkv_of(layout, rank, torch.float64, on_rank.SHAPE)
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    mine = [shard for shard in shards if shard[3] == rank]
    given: dict[str, Any] = {
        "doc_lens": {"doc_lens": [n for _, _, n, _ in mine]},
        "own shards": {"shards": [shard[:3] for shard in mine]},
        "all shards": {"shards": list(shards)},
    }[how]
    out = q
    for _ in range(2):
        out = balancer.attention(out, k, v, window=window, **given)
    (out * dout).sum().backward()
    balancer.close()
    return {
        "out": out.detach().numpy(), "dq": q.grad.numpy(), "dk": k.grad.numpy(), "dv": v.grad.numpy(),
        "planned": balancer._planned_steps, "work": balancer._current.plan.work_by_server.tolist(),
    }  # fmt: skip


def come_for_different_things(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """Rank 0 plans documents, rank 1 shards."""
    balancer = Balancer(group, shape=on_rank.SHAPE, planning_group=group, timeout_s=10)
    try:
        if rank == 0:
            balancer.plan([[5]])
        else:
            balancer.plan_shards([(0, 0, 5)])
    except SteelyardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
