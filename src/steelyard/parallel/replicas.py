"""Data parallelism: every rank computes on its own chunks, and gradients are *summed* over the ranks.

The loss is divided once, before backward, by the token count of the whole step, so what is wanted is the sum of the
ranks' gradients and never their mean. Both forms give it: DDP (all parameters on every rank) through a communication
hook, FSDP2 (parameters, gradients and optimizer state sharded) through its divide factor.

Gradients travel over a process group of their own: on the exchange's group their place among the transfers of core
attention would depend on when a bucket fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from steelyard.observe.meter import Meter

DataParallel = Literal["ddp", "fsdp2"]


class Replicas:
    """A module whose gradients are summed over the ranks of `group`. Call it like the module; see `accumulate`.

    Args:
        module: the root; its forward makes a loss. The same parameters on every rank.
        kind: "ddp" or "fsdp2".
        group: the data ranks; None: one rank, and the module is used as it is.
        units: submodules that FSDP2 gathers one by one (called through their own forward); the root keeps the rest.
            They stay gathered from forward to backward, because ping-pong runs each twice and FSDP2 is not re-entrant.
        meter: where the time blocked until the other ranks' gradients (FSDP2: and parameters) are there goes. On a
            GPU these collectives do not block the host, and this is only the time to launch them.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: DataParallel,
        group: dist.ProcessGroup | None,
        *,
        units: Iterable[nn.Module] = (),
        meter: Meter | None = None,
    ) -> None:
        self.module = module
        self._ddp: DistributedDataParallel | None = None
        self._fsdp: FSDPModule | None = None
        self._meter = meter if meter is not None else Meter()
        self._last_bucket_s = 0.0
        if group is None:
            return
        device_type = next(module.parameters()).device.type
        if kind == "fsdp2":
            mesh = DeviceMesh.from_group(group, device_type)
            for unit in units:
                fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            self._fsdp = fully_shard(module, mesh=mesh, reshard_after_forward=False)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)
                    part.set_force_sum_reduction_for_comms(True)
                    part.set_custom_all_gather(cast(Any, _TimedAllGather(self._meter)))
                    part.set_custom_reduce_scatter(cast(Any, _TimedReduceScatter(self._meter)))
        else:
            self._ddp = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
            # A lambda: DDP compares annotations by identity, and postponed ones are text.
            self._ddp.register_comm_hook(group, lambda state, bucket: self._sum_bucket(state, bucket))

    def __call__(self, *args: Any) -> Tensor:
        """The module's forward."""
        result: Tensor = self._ddp(*args) if self._ddp is not None else self.module(*args)
        return result

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients are summed over the ranks in the last one only."""
        if self._fsdp is not None:
            self._fsdp.set_requires_gradient_sync(last)
        if self._ddp is not None and not last:
            with self._ddp.no_sync():
                yield
        else:
            yield

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Around forward passes without gradients."""
        with torch.no_grad():
            yield
        if self._fsdp is not None:
            # Without a backward pass nothing gives the gathered parameters back: they would fill memory until the next
            # step, and be what a checkpoint taken now finds in the place of the shards.
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, with the wait for the other ranks' gradients on record."""
        self._last_bucket_s = 0.0
        loss.backward()  # type: ignore[no-untyped-call]
        if self._last_bucket_s:
            # This rank's gradients were complete when its last bucket left: from there on it waited.
            self._meter.add("sum gradients", "wait", self._last_bucket_s, self._meter.clock())

    def _sum_bucket(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self._last_bucket_s = self._meter.clock()
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed


class _Timed:
    """FSDP2's own collectives, with the time that they block on record. FSDP2 asks for these two methods."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _TimedAllGather(_Timed):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._meter.span("gather parameters", "wait"):
            return cast("dist.Work | None", dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op))


class _TimedReduceScatter(_Timed):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self._meter.span("sum gradients", "wait"):
            return cast(
                "dist.Work | None", dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
            )
