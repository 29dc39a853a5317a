"""The graph of a step: one pass of a micro-batch through its layers, and all passes through a pipeline.

*Layers.* Per layer and nano-batch there are T (what is token-wise: after attention of one layer and before attention of
the next), L (attention tasks that need local rows only) and R (tasks that need received ones). Two nano-batches are
laid out as `runtime.ping_pong` does it: T a, R b', L a, T b, R a, L b. After T a transfer leaves that R needs; after R
one that the next T needs. Which transfers those are is what tells the policies apart:

- core attention dispatched to servers: rows out, outputs back, all ranks together;
- keys gathered over the context axis: a gather before R (exposed: everything is R; overlapped: what needs local keys
  only is L), and in backward the keys' gradients scattered after it;
- a ring over the context axis: the same transfer, but only the next T waits for it.

Backward is the mirror image: T with the two sides exchanged, the transfer home first.

*Pipeline.* The passes of `planner.schedules`, with times per micro-batch: end(stage, pass) = max(end(stage, previous),
end(neighbour) + transfer) + cost. With unequal micro-batches there is no closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from steelyard.domain.arrays import FloatArray
from steelyard.planner.schedules import LockstepSchedule, Schedule
from steelyard.planner.schedules.schedule import StageOp
from steelyard.simulate.engine import TENSOR_TRANSFERS, Operation, Recording, Timeline, Together, everybody

Exchange: TypeAlias = Literal["none", "servers", "gather", "ring"]


@dataclass(frozen=True, eq=False)
class HalfCosts:
    """One nano-batch in one layer and one direction; arrays over (…, ranks), seconds.

    Attributes:
        first, second: token-wise work on the two sides of attention, in the order in which this direction meets them.
        tensor_s: transfers of the tensor axis that are exposed, on either side of attention.
        local, received: attention on local rows, and on received ones.
        out, back: the transfer before R, and the one after it.
        launch_s: time of a layer in which the host has not launched anything yet.
    """

    first: FloatArray
    second: FloatArray
    tensor_s: FloatArray | float
    local: FloatArray
    received: FloatArray
    out: FloatArray | float
    back: FloatArray | float
    launch_s: FloatArray | float


@dataclass(frozen=True, eq=False)
class PassCosts:
    """One direction of a layer for all nano-batches of a micro-batch.

    Attributes:
        halves: one or two nano-batches.
        exchange: which kind of transfer `out` and `back` are.
        group: who takes part in it.
        gather_s, scatter_s: parameters of a layer gathered before use, gradients scattered after it (sharded data
            parallelism); all ranks together.
    """

    halves: tuple[HalfCosts, ...]
    exchange: Exchange
    group: Together
    gather_s: float = 0.0
    scatter_s: float = 0.0


@dataclass(eq=False)
class PassTimes:
    """How long a pass takes on every rank, and where the time goes.

    Attributes:
        duration_s: until the rank is done.
        chain_work_s: how much of that is work on the chain of operations that ends then, whoever did it; the rest are
            transfers.
        busy_s, waits_s: of the rank itself, by cause.
    """

    duration_s: FloatArray
    chain_work_s: FloatArray
    busy_s: dict[str, FloatArray]
    waits_s: dict[str, FloatArray]


def run_layers(
    costs: PassCosts, layers: int, shape: tuple[int, ...], recordings: Sequence[Recording] = ()
) -> PassTimes:
    """Evaluate one pass through `layers` equal layers. `shape`: of all arrays."""
    timeline = Timeline(shape, recordings)
    halves = [_Half(timeline, costs, h, number) for number, h in enumerate(costs.halves)]
    parameters = _Parameters(timeline, costs)
    ping, pong = halves[0], halves[-1] if len(halves) == 2 else None
    parameters.prefetch(0)
    if layers > 1:
        parameters.prefetch(1)
    ping.begin(parameters)
    ping.local(0)
    if pong is not None:
        pong.begin(parameters)
    for layer in range(layers):
        ping.receive(layer)
        if pong is not None:
            pong.local(layer)
        ping.finish(layer, layers, parameters)
        if pong is not None:
            pong.receive(layer)
        if layer + 1 < layers:
            ping.local(layer + 1)
        if pong is not None:
            pong.finish(layer, layers, parameters)
        parameters.scatter(layer)
    return PassTimes(timeline.end_s, timeline.work_s, timeline.busy_s, timeline.waits_s)


class _Parameters:
    """Gathers one layer ahead and scatters gradients behind, on a stream of its own."""

    def __init__(self, timeline: Timeline, costs: PassCosts) -> None:
        self.timeline, self.costs = timeline, costs
        self.gathered: dict[int, Operation] = {}
        self.last: Operation | None = None

    def prefetch(self, layer: int) -> None:
        if self.costs.gather_s > 0:
            needs = [self.last] if self.last is not None else []
            self.gathered[layer] = self.timeline.transfer(
                f"gather parameters {layer}", "sharded parameters", self.costs.gather_s, needs,
                stream="parameters", together=everybody,
            )  # fmt: skip

    def needed(self, layer: int) -> list[Operation]:
        return [self.gathered[layer]] if layer in self.gathered else []

    def scatter(self, layer: int) -> None:
        self.gathered.pop(layer, None)
        if self.costs.scatter_s > 0:
            needs = [self.last] if self.last is not None else []
            self.timeline.transfer(
                f"scatter gradients {layer}", "sharded parameters", self.costs.scatter_s, needs,
                stream="parameters", together=everybody,
            )  # fmt: skip


class _Half:
    """One nano-batch on its way through the layers."""

    def __init__(self, timeline: Timeline, costs: PassCosts, half: HalfCosts, number: int) -> None:
        self.timeline, self.costs, self.half = timeline, costs, half
        self.number, self.label = number, "ab"[number]
        self.sent: Operation | None = None
        self.returned: Operation | None = None
        # Whether there is anything: the same for all ranks, which decide from the whole array.
        self.sends, self.returns = bool(np.any(half.out)), bool(np.any(half.back))
        self.launches, self.tensor = bool(np.any(half.launch_s)), bool(np.any(half.tensor_s))

    def begin(self, parameters: _Parameters) -> None:
        self._token_wise(0, self.half.first, parameters.needed(0), parameters, sides=1)
        self._send(0)

    def local(self, layer: int) -> None:
        if self.costs.exchange != "none":
            self.timeline.compute(f"attention {layer}{self.label}, local", "attention", self.half.local)

    def receive(self, layer: int) -> None:
        needs = [self.sent] if self.sent is not None and self.costs.exchange != "ring" else []
        done = self.timeline.compute(f"attention {layer}{self.label}", "attention", self.half.received, needs)
        if self.costs.exchange in ("servers", "gather") and self.returns:
            self.returned = self.timeline.transfer(
                f"back {layer}{self.label}", "exchange", self.half.back, [done], together=self.costs.group
            )
        elif self.costs.exchange == "ring":
            self.returned = self.sent

    def finish(self, layer: int, layers: int, parameters: _Parameters) -> None:
        if self.launches:
            self.timeline.compute(f"launches {layer}{self.label}", "launches", self.half.launch_s)
        needs = [self.returned] if self.returned is not None else []
        if layer + 1 == layers:
            self._token_wise(layer, self.half.second, needs, parameters, sides=1)
        elif self.costs.gather_s > 0:
            self._token_wise(layer, self.half.second, needs, parameters, sides=1)
            if self.number == 0 and layer + 2 < layers:  # the layer after next, as soon as the next one begins
                parameters.prefetch(layer + 2)
            self._token_wise(layer + 1, self.half.first, parameters.needed(layer + 1), parameters, sides=1)
        else:
            self._token_wise(layer, self.half.second + self.half.first, needs, parameters, sides=2)
        if layer + 1 < layers:
            self._send(layer + 1)

    def _token_wise(
        self, layer: int, cost: FloatArray, needs: list[Operation], parameters: _Parameters, *, sides: int
    ) -> None:
        parameters.last = self.timeline.compute(f"token-wise {layer}{self.label}", "token_wise", cost, needs)
        if self.tensor:
            self.timeline.compute(f"tensor axis {layer}{self.label}", TENSOR_TRANSFERS, sides * self.half.tensor_s)

    def _send(self, layer: int) -> None:
        if self.costs.exchange == "none" or not self.sends:
            return
        ready = self.timeline.now("exchange")
        self.sent = self.timeline.transfer(
            f"out {layer}{self.label}", "exchange", self.half.out, [ready], together=self.costs.group
        )


@dataclass(frozen=True, eq=False)
class PipelineTimes:
    """How all passes went.

    Attributes:
        end_s: when each stage is done, float64 (stages, …).
        last_backward_s: when the last backward pass of each stage begins.
        spans: (stage, pass, begin, end) of one chosen element, for pictures.
    """

    end_s: FloatArray
    last_backward_s: FloatArray
    spans: list[tuple[int, StageOp, float, float]] = field(default_factory=list)


def run_pipeline(
    schedule: Schedule,
    forward_s: FloatArray,
    backward_s: FloatArray,
    transfer_s: float,
    picked: tuple[int, ...] | None = None,
) -> PipelineTimes:
    """Evaluate a schedule.

    Args:
        forward_s, backward_s: times of the passes, float64 (stages, chunks, micro_batches or 1, …): the rest of the
            shape is whatever runs side by side without waiting (batches, ranks of the data axis).
        transfer_s: of one micro-batch's activations from stage to stage.
        picked: the element of the rest whose spans are kept.
    """
    stages, rest = schedule.stages, forward_s.shape[3:]
    now = [np.zeros(rest) for _ in range(stages)]
    last_backward = [np.zeros(rest) for _ in range(stages)]
    ends: dict[tuple[int, StageOp], FloatArray] = {}
    spans: list[tuple[int, StageOp, float, float]] = []
    times = {"forward": forward_s, "backward": backward_s}
    distinct = forward_s.shape[2]
    for stage, op in schedule.in_order():
        begin = now[stage]
        for other, need in schedule.needs(stage, op):
            if other == stage and need.phase != op.phase:
                continue  # its own forward pass came before it on the same stream
            begin = np.maximum(begin, ends[other, need] + (transfer_s if other != stage else 0.0))
        cost = times[op.phase][stage, op.chunk, op.micro_batch % distinct]
        end = begin + cost
        now[stage] = ends[stage, op] = end
        if op.phase == "backward":
            last_backward[stage] = begin
        if picked is not None:
            spans.append((stage, op, float(begin[picked]), float(end[picked])))
    return PipelineTimes(np.stack(now), np.stack(last_backward), spans)


def run_lockstep(
    schedule: LockstepSchedule, forward_s: FloatArray, backward_s: FloatArray, transfer_s: float
) -> FloatArray:
    """Length of all ticks together: each lasts as long as its slowest rank.

    Args:
        forward_s, backward_s: (…, ticks of that phase, ranks of all stages).
    """
    forward = forward_s.max(axis=-1).sum(axis=-1)
    backward = backward_s.max(axis=-1).sum(axis=-1)
    total: FloatArray = forward + backward + transfer_s * len(schedule.ticks)
    return total
