"""From a scenario and documents to an estimate of one training step: time and where it goes, memory, verdict.

One evaluation covers all sampled batches and all micro-batches at once; they are axes of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.collectives import all_gather_s, all_reduce_s, group_of, reduce_scatter_s, send_s
from steelyard.cost.linear import head_s, model_flops, optimizer_s
from steelyard.cost.peak_memory import MemoryEstimate, stage_layers, stage_parameters
from steelyard.domain.arrays import FloatArray
from steelyard.planner.schedules import interleaved, lockstep, one_f_one_b
from steelyard.planner.schedules.schedule import Schedule
from steelyard.simulate.engine import IMBALANCE
from steelyard.simulate.footprint import memory_estimate
from steelyard.simulate.graph import PassTimes, run_layers, run_lockstep, run_pipeline
from steelyard.simulate.passes import GRADIENT_BYTES, HalfWork, LayerPrices, halves_of, layer_prices
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.workloads import Documents, RankWork, WorkloadCache, is_uniform

PARTS = (
    "token_wise", "attention", "head", "tensor transfers", "exchange", "sharded parameters", IMBALANCE,
    "pipeline bubble", "gradient reduction", "optimizer", "overhead",
)  # fmt: skip
"""Where device time goes; the shares of an estimate add up to 1."""
USEFUL = ("token_wise", "attention", "head")
EXPOSED = ("tensor transfers", "exchange", "sharded parameters", "gradient reduction")


@dataclass(frozen=True, eq=False)
class StepEstimate:
    """What a step will do.

    Attributes:
        scenario: what was simulated.
        step_s: of each sampled batch, float64 (batches,).
        shares: of device time, by the names of `PARTS`.
        memory: of the fullest device.
        tokens, pairs, squares: of a step (mean over batches): tokens, causal pairs, and full squares.
        pairs_kept: share of the pairs that documents have when none is cut.
        rank_work_s: attention seconds of every rank in the first micro-batch of the first batch, one layer forward.
    """

    scenario: Scenario
    step_s: FloatArray
    shares: Mapping[str, float]
    memory: MemoryEstimate
    tokens: float
    pairs: float
    squares: float
    pairs_kept: float
    rank_work_s: FloatArray

    @property
    def step_time_s(self) -> float:
        """Mean over the sampled batches."""
        return float(self.step_s.mean())

    @property
    def band_s(self) -> tuple[float, float]:
        """Within which a measured mean is expected: the profile's error and twice the spread of the mean together."""
        mean = self.step_time_s
        spread = 2 * float(self.step_s.std()) / max(1, len(self.step_s)) ** 0.5 / mean if mean else 0.0
        half = (self.scenario.profile.time_error**2 + spread**2) ** 0.5
        return mean * (1 - half), mean * (1 + half)

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens / self.step_time_s / self.scenario.degrees.devices

    def _utilization(self, pairs: float) -> float:
        flops = model_flops(self.scenario.model, self.tokens, pairs)
        peak = self.scenario.profile.peak_flops(self.scenario.precision) * self.scenario.degrees.devices
        return flops / (self.step_time_s * peak)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation with attention counted in full."""
        return self._utilization(self.squares)

    @property
    def mfu_causal(self) -> float:
        """The same with the pairs that the causal mask leaves."""
        return self._utilization(self.pairs)

    @property
    def idle_share(self) -> float:
        """Device time without useful or repeated work."""
        return 1 - sum(self.shares[name] for name in (*USEFUL, "optimizer"))

    @property
    def bubble_share(self) -> float:
        return self.shares["pipeline bubble"]

    @property
    def exposed_comm_share(self) -> float:
        return sum(self.shares[name] for name in EXPOSED)


def simulate_step(
    scenario: Scenario, documents: Documents | WorkloadCache, *, batches: int = 4, seed: int = 0
) -> StepEstimate:
    """Estimate a step over `batches` sampled batches.

    Raises:
        UsageError: the scenario cannot be laid out, or the documents do not suit it.
    """
    scenario.check()
    cache = documents if isinstance(documents, WorkloadCache) else WorkloadCache(documents)
    small, repeat = _one_for_all(scenario, cache.documents)
    batches = 1 if repeat > 1 or small is not scenario else batches
    work = cache.work(small.request(batches, seed))
    halves = halves_of(work, batches, scenario.nano_batches)
    prices = layer_prices(scenario, halves)
    if scenario.schedule_name == "lockstep":
        run = _lockstep(scenario, prices, halves)
    elif scenario.degrees.stage > 1:
        run = _pipelined(scenario, prices, halves)
    else:
        run = _single_stage(scenario, prices, halves)
    core_s, parts = run
    return _finish(
        scenario, work, halves, prices, core_s, parts, scale=scenario.tokens_per_step / small.tokens_per_step
    )


def _one_for_all(scenario: Scenario, documents: Documents) -> tuple[Scenario, int]:
    """With equal documents everywhere, one rank group and one micro-batch stand for all of them."""
    plain = scenario.policy in ("packed", "per_document_cp") and not scenario.speeds
    if not (plain and is_uniform(documents, scenario.request(1, 0))):
        return scenario, 1
    degrees = scenario.degrees
    one = type(degrees)(1, degrees.tensor, degrees.context, degrees.stage, degrees.virtual_stages)
    micro = degrees.stage if degrees.virtual_stages > 1 else 1
    return scenario.replace(degrees=one, micro_batches=micro), scenario.micro_batches


Parts = dict[str, FloatArray]
"""Device seconds per step by name, mean over ranks; float64 (batches,)."""


def _sums(times: PassTimes, into: Parts, factor: float) -> None:
    """Add a pass's busy and waiting time, averaged over ranks and summed over micro-batches."""
    for totals in (times.busy_s, times.waits_s):
        for name, seconds in totals.items():
            into[name] = into.get(name, 0.0) + factor * seconds.mean(axis=-1).sum(axis=-1)


def _head_s(scenario: Scenario, halves: Sequence[HalfWork]) -> FloatArray:
    """Forward of the head on all nano-batches of a micro-batch."""
    total = sum(
        head_s(scenario.model, h.tokens, scenario.profile, tensor=scenario.degrees.tensor, precision=scenario.precision)
        for h in halves
    )
    slow = 1 / np.resize(np.array(scenario.speeds), halves[0].tokens.shape[-1]) if scenario.speeds else 1.0
    return np.asarray(total) * slow


def _single_stage(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> tuple[FloatArray, Parts]:
    shape = halves[0].tokens.shape
    repeat = scenario.micro_batches / shape[1]
    forward = run_layers(prices.forward, scenario.model.layers, shape)
    backward = run_layers(prices.backward, scenario.model.layers, shape)
    head = 3 * _head_s(scenario, halves)
    by_rank = (forward.duration_s + backward.duration_s + head).sum(axis=1) * repeat
    parts: Parts = {"head": head.mean(axis=-1).sum(axis=-1) * repeat}
    for times in (forward, backward):
        _sums(times, parts, repeat)
    core_s = by_rank.max(axis=-1)
    parts[IMBALANCE] = parts.get(IMBALANCE, 0.0) + core_s - by_rank.mean(axis=-1)
    return core_s, parts


def _schedule(scenario: Scenario) -> Schedule:
    degrees = scenario.degrees
    if degrees.virtual_stages > 1:
        return interleaved(degrees.stage, scenario.micro_batches, degrees.virtual_stages)
    return one_f_one_b(degrees.stage, scenario.micro_batches)


def _transfer_s(scenario: Scenario) -> float:
    """One micro-batch's activations to the next stage."""
    degrees = scenario.degrees
    size_bytes = scenario.nano_batches * scenario.chunk_tokens * scenario.model.hidden * 2
    inner = degrees.tensor * degrees.lanes
    near = 2 * inner <= scenario.profile.node_size
    return send_s(size_bytes / (degrees.tensor if scenario.sequence_parallel else 1), scenario.profile, same_node=near)


def _pipelined(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> tuple[FloatArray, Parts]:
    degrees, shape = scenario.degrees, halves[0].tokens.shape
    stages, chunks = degrees.stage, degrees.virtual_stages
    layers = stage_layers(scenario.model.layers, stages * chunks)  # piece k = chunk · stages + stage
    passes = {n: [run_layers(p, n, shape) for p in (prices.forward, prices.backward)] for n in set(layers)}
    head = _head_s(scenario, halves)
    repeat = scenario.micro_batches / shape[1]
    times = np.zeros((2, stages, chunks, shape[1], shape[0], shape[2]))
    parts: Parts = {"head": 3 * head.mean(axis=-1).sum(axis=-1) * repeat / stages}
    for piece, count in enumerate(layers):
        stage, chunk = piece % stages, piece // stages
        for phase in (0, 1):
            times[phase, stage, chunk] = passes[count][phase].duration_s.swapaxes(0, 1)
            _sums(passes[count][phase], parts, repeat / stages)
    times[0, -1, -1] += head.swapaxes(0, 1)
    times[1, -1, -1] += 2 * head.swapaxes(0, 1)
    ends = run_pipeline(_schedule(scenario), times[0], times[1], _transfer_s(scenario)).end_s
    by_lane = ends.max(axis=0)  # (batches, ranks): a lane is done when its slowest stage is
    core_s: FloatArray = by_lane.max(axis=-1)
    busy = times.sum(axis=(0, 2, 3)) * repeat  # (stages, batches, ranks)
    parts["pipeline bubble"] = by_lane.mean(axis=-1) - busy.mean(axis=(0, 2))
    parts[IMBALANCE] = parts.get(IMBALANCE, 0.0) + core_s - by_lane.mean(axis=-1)
    return core_s, parts


def _lockstep(scenario: Scenario, prices: LayerPrices, halves: Sequence[HalfWork]) -> tuple[FloatArray, Parts]:
    degrees, shape = scenario.degrees, halves[0].tokens.shape  # (batches, ticks, stages · lanes)
    schedule = lockstep(degrees.stage, scenario.micro_batches)
    layers = stage_layers(scenario.model.layers, degrees.stage)[0]
    forward = run_layers(prices.forward, layers, shape)
    backward = run_layers(prices.backward, layers, shape)  # mirrored ticks: the same set of times on other ranks
    head = _head_s(scenario, halves)
    on_last = np.zeros(shape[-1])
    on_last[-degrees.lanes :] = 1.0
    head = head * on_last
    core_s = run_lockstep(schedule, forward.duration_s + head, backward.duration_s + 2 * head, _transfer_s(scenario))
    parts: Parts = {"head": 3 * head.mean(axis=-1).sum(axis=-1)}
    _sums(forward, parts, 1.0)
    _sums(backward, parts, 1.0)
    known: FloatArray = sum(parts.values(), np.zeros(shape[0]))
    # Ranks without layers in a tick wait or serve: what is left of the ticks' length is the bubble.
    parts["pipeline bubble"] = np.maximum(core_s - known, 0.0)
    return core_s, parts


def _reduction_s(scenario: Scenario, backward_s: float, forward_s: float) -> float:
    """Exposed time of reducing gradients (and gathering parameters again) over data × context after backward."""
    degrees, profile = scenario.degrees, scenario.profile
    if degrees.lanes == 1 or (scenario.sharding == "full" and degrees.stage == 1):
        return 0.0
    group = group_of(degrees.lanes, degrees.tensor, profile.node_size)
    held = max(stage_parameters(scenario.model, degrees, s) for s in range(degrees.stage))
    layers = max(1, scenario.model.layers // degrees.stage)
    if scenario.sharding == "none":
        reduce_s, gather_s = all_reduce_s(GRADIENT_BYTES * held, group, profile), 0.0
    else:
        reduce_s = reduce_scatter_s(GRADIENT_BYTES * held, group, profile)
        gather_s = all_gather_s(2 * held, group, profile)
    if not scenario.gradient_overlap:
        return reduce_s + gather_s
    return max(reduce_s / layers, reduce_s - backward_s) + max(gather_s / layers, gather_s - forward_s)


def _finish(
    scenario: Scenario, work: RankWork, halves: Sequence[HalfWork], prices: LayerPrices, core_s: FloatArray,
    parts: Parts, scale: float,
) -> StepEstimate:  # fmt: skip
    degrees, profile = scenario.degrees, scenario.profile
    passes = scenario.micro_batches * degrees.virtual_stages
    once_s = float(core_s.mean()) / (3 * passes)  # a forward pass of one micro-batch through one chunk
    parts["gradient reduction"] = np.full_like(core_s, _reduction_s(scenario, 2 * once_s, once_s))
    held = max(stage_parameters(scenario.model, degrees, s) for s in range(degrees.stage))
    shards = 1 if scenario.sharding == "none" else scenario.shards
    optimizer = 0.0 if scenario.skip_optimizer else optimizer_s(held / shards, profile)
    parts["optimizer"] = np.full_like(core_s, optimizer)
    before = core_s + parts["gradient reduction"] + optimizer
    parts["overhead"] = profile.step_overhead_s + scenario.extra_overhead * before
    step_s = before + parts["overhead"]
    parts["overhead"] = parts["overhead"] + parts.pop("launches", np.zeros_like(core_s))
    total = sum(np.mean(v) for v in parts.values())
    shares = {name: float(np.mean(parts.get(name, 0.0)) / total) for name in PARTS}
    batches = len(core_s)
    first = prices.forward.halves[0]
    return StepEstimate(
        scenario=scenario,
        step_s=step_s,
        shares=shares,
        memory=memory_estimate(scenario, halves),
        tokens=float(scenario.tokens_per_step),
        pairs=float(work.pairs.sum()) / batches * scale,
        squares=float(work.squares.sum()) / batches * scale,
        pairs_kept=min(1.0, float(work.pairs.sum() / work.whole_pairs.sum())),
        rank_work_s=(first.local + first.received)[0, 0],
    )
