"""One rank's part of the tests of `Balancer.attention`. Runs on the pool's workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ranks as on_rank
import torch
import torch.distributed as dist

from steelyard.balance import Balancer, Kernel
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import SteelyardError
from steelyard.planner.rates import Rate


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


SETTINGS: dict[str, Sequence[Any]] = {
    "tolerance": (0.05, 0.1), "policy": ("balanced", "packed"), "window": (None, 7), "row_keys": (0, 3),
    "speeds": ((1.0, 1.0), (1.0, 2.0)), "memory": ("keep", "resend"), "shape": (on_rank.SHAPE, AttentionShape(8, 2, 8)),
}  # fmt: skip
"""What may differ between two ranks, and two values of it."""


def differ_in_a_setting(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, str]:
    """By setting, what planning says when rank 1 has another value than rank 0."""
    said = {}
    for name, values in SETTINGS.items():
        balancer = Balancer(group, **{"shape": on_rank.SHAPE, name: values[rank]}, planning_group=group, timeout_s=10)
        said[name] = error_of(lambda b=balancer: b.plan([[5]]))
    balancer = Balancer(group, shape=on_rank.SHAPE, planning_group=group, timeout_s=10)
    said["reorder"] = error_of(lambda: balancer.plan([[5], [3]], reorder=rank == 1))
    said["shards"] = error_of(lambda: balancer.plan_shards([(rank, 0, 5)]))
    # A rank without work has not measured how fast it is: all learn that, and plan by the balancer's speeds.
    said["rate"] = error_of(lambda: balancer.plan([[5]], rate=Rate(0.1, 1e-6) if rank == 0 else None))
    return said


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except SteelyardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def order(
    rank: int, ranks: int, group: dist.ProcessGroup, lengths: Sequence[Sequence[Sequence[int]]], ahead: bool
) -> dict[str, Any]:
    """Orders and work of a step, by what a query costs and by measured rates, planned at once or ahead."""
    found: dict[str, Any] = {}
    for row_keys in (0, 17):
        balancer = Balancer(group, shape=on_rank.SHAPE, row_keys=row_keys, planning_group=group, timeout_s=10)
        for how, rate in (("equal", None), ("measured", Rate(0.0, [4e-6, 1e-6][rank]))):
            given = {"rate": rate, "reorder": True}
            step = (
                balancer.prefetch(lengths[rank], **given).result() if ahead else balancer.plan(lengths[rank], **given)
            )
            found[f"{how} {row_keys}"] = (
                step.order, [nano.work_by_server.tolist() for nano in step.nano_batches], str(step.notes),
            )  # fmt: skip
        balancer.close()
    return found


ARGUMENTS: dict[str, Any] = {"window": 3, "softcap": 2.0, "scale": 0.5, "sink": torch.zeros(4)}
"""Arguments of a call of attention that decide what it computes, and values for the rank that gives another one."""


def differ_in_a_call(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What each call says when the last rank gives one more argument: to the call that plans, and to a later layer.

    The documents are such that nothing moves: where it does, a window that differs ends a process of gloo's.
    """
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    said: dict[str, list[str]] = {}
    for name, value in ARGUMENTS.items():
        own = {name: value} if rank == ranks - 1 else {}
        for where, calls in {"first": [own, {}], "second": [{}, own]}.items():
            balancer = Balancer(group, planning_group=group, timeout_s=10)
            errors = []
            for _ in range(2):
                lengths = [4]
                for given in calls:
                    attend = partial(balancer.attention, q, k, k, doc_lens=lengths, **given)
                    errors.append(error_of(attend))
            said[f"{name} {where}"] = errors
            balancer.close()
    return said


def differ_in_a_window_by_steps(rank: int, ranks: int, group: dist.ProcessGroup) -> list[str]:
    """All ranks change their window from step to step alike, and rank 0 plans further ahead than the others."""
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    balancer = Balancer(group, shape=AttentionShape(4, 2, 8), planning_group=group, timeout_s=10)
    steps, ahead = [balancer.prefetch([[4]])], 2 if rank == 0 else 1
    errors = []
    for step in range(4):
        while len(steps) < min(4, step + ahead):
            steps.append(balancer.prefetch([[4]]))
        nano = balancer.begin(plan=steps[step].result().nano_batches[0])
        errors.append(error_of(lambda nano=nano, step=step: nano(q, k, k, kernel=Kernel(window=1 + step))))
    balancer.close()
    return errors
