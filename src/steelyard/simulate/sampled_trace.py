"""Spans of sampled ranks for one micro-batch (or a whole pipeline step), in the trace format of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steelyard.cost.peak_memory import stage_layers
from steelyard.observe.trace import Span
from steelyard.simulate.core import head_forward_s, stage_schedule, stage_times, stage_transfer_s
from steelyard.simulate.engine import Recording
from steelyard.simulate.graph import run_layers, run_pipeline
from steelyard.simulate.passes import halves_of, layer_prices
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.workloads import WorkloadCache, first_full_tick

MOST_RANKS = 8


def sampled_trace(
    scenario: Scenario,
    cache: WorkloadCache,
    *,
    ranks: Sequence[int] = (),
    seed: int = 0,
    layers: int | None = None,
    head: bool = True,
) -> dict[int, list[Span]]:
    """Forward and backward of the first micro-batch of the first batch on some ranks (default: up to eight).

    Of a lockstep pipeline it is the first tick in which most stages have work, and ranks are those of all stages.

    Args:
        layers: of the pass; None: those of the first stage.
        head: whether head and loss stand between the two passes (without a pipeline).
    """
    request = scenario.request(1, seed)
    halves = halves_of(cache.work(request), 1, scenario.nano_batches)
    prices = layer_prices(scenario, halves)
    shape = halves[0].tokens.shape
    turn = first_full_tick(request)
    chosen = list(ranks) or list(range(0, shape[-1], max(1, shape[-1] // MOST_RANKS)))[:MOST_RANKS]
    count = layers or stage_layers(scenario.model.layers, scenario.degrees.stage)[0]
    found: dict[int, list[Span]] = {r: [] for r in chosen}
    origin_s = np.zeros(shape[-1])
    for name, costs in (("forward", prices.forward), ("backward", prices.backward)):
        recordings = [Recording((0, turn, r)) for r in chosen]
        times = run_layers(costs, count, shape, recordings)
        for rank, recording in zip(chosen, recordings, strict=True):
            begin_s = float(origin_s[rank])
            found[rank] += [
                Span(f"{name} {s.name}", s.track, s.start_s + begin_s, s.end_s + begin_s) for s in recording.spans
            ]
        # Nobody waits between the two passes, but in lockstep, where all end a tick together.
        lasted_s = times.duration_s[0, turn]
        origin_s += lasted_s.max() if scenario.schedule_name == "lockstep" else lasted_s
        if head and name == "forward" and scenario.degrees.stage == 1:
            by_rank_s = 3 * head_forward_s(scenario, halves)[0, turn]
            for rank in chosen:
                begin_s = float(origin_s[rank])
                found[rank].append(Span("head and loss", "compute", begin_s, begin_s + float(by_rank_s[rank])))
            origin_s += by_rank_s
    return {rank: [_at_speed(s, scenario.speed) for s in spans] for rank, spans in found.items()}


def _at_speed(span: Span, speed: float) -> Span:
    return span if speed == 1 else replace(span, start_s=span.start_s / speed, end_s=span.end_s / speed)


def pipeline_trace(scenario: Scenario, cache: WorkloadCache, *, seed: int = 0) -> dict[int, list[Span]]:
    """All passes of a 1F1B or interleaved step of the first batch on the first rank of every stage.

    A pass is up to three spans: its token-wise work, its attention, and what goes to transfers and to waiting for other
    ranks. In truth they alternate layer by layer.
    """
    halves = halves_of(cache.work(scenario.request(1, seed)), 1, scenario.nano_batches)
    times = stage_times(scenario, layer_prices(scenario, halves), halves)
    run = run_pipeline(
        stage_schedule(scenario), times.forward_s, times.backward_s, stage_transfer_s(scenario), picked=(0, 0)
    )
    distinct = times.forward_s.shape[2]
    found: dict[int, list[Span]] = {s: [] for s in range(scenario.degrees.stage)}
    for stage, op, begin_s, end_s in run.spans:
        name = f"{op.phase} {op.micro_batch}" + (f", chunk {op.chunk}" if times.forward_s.shape[1] > 1 else "")
        for track, what in (("compute", "token-wise"), ("attention", "attention")):
            own_s = float(times.work_s[op.phase, track][stage, op.chunk, op.micro_batch % distinct, 0, 0])
            found[stage].append(Span(f"{name}: {what}", track, begin_s, min(begin_s + own_s, end_s)))
            begin_s += own_s
        if end_s - begin_s > 1e-12 * end_s:
            found[stage].append(Span(f"{name}: transfers and waiting", "wait", begin_s, end_s))
    return {stage: [_at_speed(s, scenario.speed) for s in spans] for stage, spans in found.items()}
