"""Spans of sampled ranks for one micro-batch (or a whole pipeline step), in the trace format of real runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steelyard.cost.linear import head_s
from steelyard.cost.peak_memory import stage_layers
from steelyard.observe.trace import Span
from steelyard.planner.schedules import interleaved, one_f_one_b
from steelyard.simulate.engine import Recording
from steelyard.simulate.graph import run_layers, run_pipeline
from steelyard.simulate.passes import halves_of, layer_prices
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.workloads import WorkloadCache


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

    Args:
        layers: of the pass; None: those of the first stage.
        head: whether head and loss stand between the two passes.
    """
    halves = halves_of(cache.work(scenario.request(1, seed)), 1, scenario.nano_batches)
    prices = layer_prices(scenario, halves)
    shape = halves[0].tokens.shape
    chosen = list(ranks) or list(range(0, shape[-1], max(1, shape[-1] // 8)))[:8]
    count = layers or stage_layers(scenario.model.layers, scenario.degrees.stage)[0]
    found: dict[int, list[Span]] = {r: [] for r in chosen}
    origin_s = 0.0
    for name, costs in (("forward", prices.forward), ("backward", prices.backward)):
        recordings = [Recording((0, 0, r)) for r in chosen]
        times = run_layers(costs, count, shape, recordings)
        for rank, recording in zip(chosen, recordings, strict=True):
            found[rank] += [
                Span(f"{name} {s.name}", s.track, s.start_s + origin_s, s.end_s + origin_s) for s in recording.spans
            ]
        origin_s += float(times.duration_s[0, 0].max())
        if head and name == "forward" and scenario.degrees.stage == 1:
            head_time_s = 3 * sum(head_s(scenario.model, h.tokens[0, 0], scenario.profile, precision=scenario.precision,
                                         tensor=scenario.degrees.tensor) for h in halves)  # fmt: skip
            by_rank_s = np.broadcast_to(np.asarray(head_time_s), shape[-1:])
            for rank in chosen:
                found[rank].append(Span("head and loss", "compute", origin_s, origin_s + float(by_rank_s[rank])))
            origin_s += float(by_rank_s.max())
    return found


def pipeline_trace(scenario: Scenario, cache: WorkloadCache, *, seed: int = 0) -> dict[int, list[Span]]:
    """All passes of a 1F1B or interleaved step of the first batch on the first rank of every stage."""
    degrees = scenario.degrees
    halves = halves_of(cache.work(scenario.request(1, seed)), 1, scenario.nano_batches)
    prices = layer_prices(scenario, halves)
    shape = halves[0].tokens.shape
    layers = max(1, scenario.model.layers // (degrees.stage * degrees.virtual_stages))
    forward = run_layers(prices.forward, layers, shape).duration_s[0, :, 0]
    backward = run_layers(prices.backward, layers, shape).duration_s[0, :, 0]
    spread = np.ones((degrees.stage, degrees.virtual_stages, 1, 1))
    if degrees.virtual_stages > 1:
        schedule = interleaved(degrees.stage, scenario.micro_batches, degrees.virtual_stages)
    else:
        schedule = one_f_one_b(degrees.stage, scenario.micro_batches)
    times = run_pipeline(
        schedule, spread * forward[None, None, :, None], spread * backward[None, None, :, None], 0.0, picked=(0,)
    )
    found: dict[int, list[Span]] = {s: [] for s in range(degrees.stage)}
    for stage, op, begin_s, end_s in times.spans:
        found[stage].append(Span(f"{op.phase} {op.micro_batch}", "compute", begin_s, end_s))
    return found
