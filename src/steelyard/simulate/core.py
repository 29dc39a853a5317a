"""The core of a step: all passes of all micro-batches, as the schedule orders them, and where their time goes.

What comes once a step (gradients, optimizer, overhead) is added by `simulate.step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from steelyard.cost.collectives import all_gather_s, group_of, send_s
from steelyard.cost.linear import head_s
from steelyard.cost.peak_memory import stage_layers
from steelyard.domain.arrays import FloatArray
from steelyard.planner.schedules import Schedule, interleaved, lockstep, one_f_one_b
from steelyard.planner.schedules.schedule import Phase
from steelyard.simulate.engine import IMBALANCE, LATE_TRANSFERS, divided_wait
from steelyard.simulate.graph import PassTimes, run_layers, run_lockstep, run_pipeline
from steelyard.simulate.passes import HalfWork, LayerPrices, slowness
from steelyard.simulate.scenario import Scenario

Parts: TypeAlias = dict[str, FloatArray]
"""Device seconds per step by name, mean over ranks; float64 (batches,)."""


def run_core(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> tuple[FloatArray, Parts]:
    """Seconds until the slowest rank is done, float64 (batches,), and where they go."""
    if scenario.schedule_name == "lockstep":
        return _lockstep(scenario, prices, halves)
    if scenario.degrees.stage > 1:
        return _pipelined(scenario, prices, halves)
    return _single_stage(scenario, prices, halves)


def head_forward_s(scenario: Scenario, halves: Sequence[HalfWork]) -> FloatArray:
    """Forward of head and loss on all nano-batches of a micro-batch; of the shape of their tokens."""
    total = sum(
        head_s(scenario.model, h.tokens, scenario.profile, tensor=scenario.degrees.tensor, precision=scenario.precision)
        for h in halves
    )
    return np.asarray(total) * slowness(scenario, halves[0].tokens.shape[-1])


def _add_times(times: PassTimes, into: Parts, factor: float) -> None:
    """Add a pass's busy and waiting time, averaged over ranks and summed over micro-batches."""
    for totals in (times.busy_s, times.waits_s):
        for name, seconds in totals.items():
            into[name] = into.get(name, 0.0) + factor * seconds.mean(axis=-1).sum(axis=-1)


def _single_stage(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> tuple[FloatArray, Parts]:
    shape = halves[0].tokens.shape
    repeat = scenario.micro_batches / shape[1]
    forward = run_layers(prices.forward, scenario.model.layers, shape)
    backward = run_layers(prices.backward, scenario.model.layers, shape)
    head = 3 * head_forward_s(scenario, halves)
    by_rank = (forward.duration_s + backward.duration_s + head).sum(axis=1) * repeat
    parts: Parts = {"head": head.mean(axis=-1).sum(axis=-1) * repeat}
    for times in (forward, backward):
        _add_times(times, parts, repeat)
    chain_work = (forward.chain_work_s + backward.chain_work_s + head).sum(axis=1) * repeat
    return _until_the_last(by_rank, by_rank - chain_work, parts), parts


def _until_the_last(end_s: FloatArray, transfers_s: FloatArray, parts: Parts) -> FloatArray:
    """When all are done, float64 (batches,); the waiting until then goes to its parts.

    Args:
        end_s: when each rank or lane is, float64 (batches, ranks).
        transfers_s: how much of that are transfers, by which it may be later than others.
    """
    last = end_s.argmax(axis=-1)[:, None]
    core_s = np.take_along_axis(end_s, last, axis=-1)
    more_transfers = np.take_along_axis(transfers_s, last, axis=-1) - transfers_s
    by_transfers, by_work = divided_wait(core_s - end_s, more_transfers)
    for name, waited in ((IMBALANCE, by_work), (LATE_TRANSFERS, by_transfers)):
        parts[name] = parts.get(name, 0.0) + waited.mean(axis=-1)
    return core_s[:, 0]


def stage_schedule(scenario: Scenario) -> Schedule:
    """The 1F1B or interleaved schedule of a pipeline."""
    degrees = scenario.degrees
    if degrees.virtual_stages > 1:
        return interleaved(degrees.stage, scenario.micro_batches, degrees.virtual_stages)
    return one_f_one_b(degrees.stage, scenario.micro_batches)


def stage_transfer_s(scenario: Scenario) -> float:
    """One micro-batch's activations to the next stage.

    Each device of the tensor axis sends an equal part; where all of them need the whole, they gather it inside the node
    (scatter/gather, Narayanan et al. 2021, section 4.1; DeepSpeed's partitioned pipeline buffers).
    """
    degrees, profile = scenario.degrees, scenario.profile
    size_bytes = scenario.nano_batches * scenario.chunk_tokens * scenario.model.hidden * 2
    inner = degrees.tensor * degrees.lanes
    part_s = send_s(size_bytes / degrees.tensor, profile, same_node=2 * inner <= profile.node_size)
    if scenario.sequence_parallel:
        return part_s
    return part_s + all_gather_s(size_bytes, group_of(degrees.tensor, 1, profile.node_size), profile)


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Passes of a pipeline; arrays (stages, chunks, micro-batches, batches, ranks), float64 seconds.

    Attributes:
        forward_s, backward_s: how long they take, the head on the last stage included.
        work_s: of that, work by phase and track: `compute`, which has the head, and `attention`. The rest is transfers
            and waiting.
        transfers_s: of all passes of a stage together, how much of the chain of operations until a rank is done are
            transfers (stages, batches, ranks).
        parts: where the passes' time goes, the head aside.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    work_s: Mapping[tuple[Phase, str], FloatArray]
    transfers_s: FloatArray
    parts: Parts


def stage_times(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> StageTimes:
    """Every pass of a 1F1B or interleaved pipeline."""
    degrees, shape = scenario.degrees, halves[0].tokens.shape
    stages, chunks = degrees.stage, degrees.virtual_stages
    layers = stage_layers(scenario.model.layers, stages * chunks)  # piece k = chunk · stages + stage
    passes = {n: [run_layers(p, n, shape) for p in (prices.forward, prices.backward)] for n in set(layers)}
    repeat = scenario.micro_batches / shape[1]
    seconds = np.zeros((2, stages, chunks, shape[1], shape[0], shape[2]))
    work = {"compute": np.zeros_like(seconds), "attention": np.zeros_like(seconds)}
    transfers = np.zeros((stages, shape[0], shape[2]))
    parts: Parts = {}
    for piece, count in enumerate(layers):
        stage, chunk = piece % stages, piece // stages
        for phase in (0, 1):
            times = passes[count][phase]
            seconds[phase, stage, chunk] = times.duration_s.swapaxes(0, 1)
            work["compute"][phase, stage, chunk] = times.busy_s["token_wise"].swapaxes(0, 1)
            work["attention"][phase, stage, chunk] = times.busy_s["attention"].swapaxes(0, 1)
            transfers[stage] += (times.duration_s - times.chain_work_s).sum(axis=1) * repeat
            _add_times(times, parts, repeat / stages)
    head = head_forward_s(scenario, halves).swapaxes(0, 1)
    for table in (seconds, work["compute"]):
        table[0, -1, -1] += head
        table[1, -1, -1] += 2 * head
    phases: tuple[Phase, Phase] = ("forward", "backward")
    by_kind = {(phase, kind): table[i] for kind, table in work.items() for i, phase in enumerate(phases)}
    return StageTimes(seconds[0], seconds[1], by_kind, transfers, parts)


def _pipelined(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> tuple[FloatArray, Parts]:
    stages = scenario.degrees.stage
    repeat = scenario.micro_batches / halves[0].tokens.shape[1]
    times = stage_times(scenario, prices, halves)
    head = head_forward_s(scenario, halves)
    parts: Parts = {"head": 3 * head.mean(axis=-1).sum(axis=-1) * repeat / stages, **times.parts}
    ends = run_pipeline(
        stage_schedule(scenario), times.forward_s, times.backward_s, stage_transfer_s(scenario)
    ).end_s  # fmt: skip
    by_lane = ends.max(axis=0)  # (batches, ranks): a lane is done when its slowest stage is
    busy = (times.forward_s + times.backward_s).sum(axis=(1, 2)) * repeat  # (stages, batches, ranks)
    parts["pipeline bubble"] = by_lane.mean(axis=-1) - busy.mean(axis=(0, 2))
    # A lane goes through all stages, so it is later by what their passes have more of: transfers of the mean stage.
    return _until_the_last(by_lane, times.transfers_s.mean(axis=0), parts), parts


def _lockstep(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> tuple[FloatArray, Parts]:
    degrees, shape = scenario.degrees, halves[0].tokens.shape  # (batches, ticks, stages · lanes)
    schedule = lockstep(degrees.stage, scenario.micro_batches)
    layers = stage_layers(scenario.model.layers, degrees.stage)[0]
    forward = run_layers(prices.forward, layers, shape)
    backward = run_layers(prices.backward, layers, shape)  # mirrored ticks: the same set of times on other ranks
    head = head_forward_s(scenario, halves)
    on_last = np.zeros(shape[-1])
    on_last[-degrees.lanes :] = 1.0
    head = head * on_last
    core_s = run_lockstep(
        schedule, forward.duration_s + head, backward.duration_s + 2 * head, stage_transfer_s(scenario)
    )
    parts: Parts = {"head": 3 * head.mean(axis=-1).sum(axis=-1)}
    _add_times(forward, parts, 1.0)
    _add_times(backward, parts, 1.0)
    known: FloatArray = sum(parts.values(), np.zeros(shape[0]))
    # Ranks without layers in a tick wait or serve: what is left of the ticks' length is the bubble.
    parts["pipeline bubble"] = np.maximum(core_s - known, 0.0)
    return core_s, parts
