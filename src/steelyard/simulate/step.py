"""From a scenario and documents to an estimate of one training step: time and where it goes, memory, verdict.

One evaluation covers all sampled batches and all micro-batches at once; they are axes of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.collectives import all_gather_s, all_reduce_s, group_of, reduce_scatter_s
from steelyard.cost.linear import model_flops, optimizer_s
from steelyard.cost.peak_memory import MemoryEstimate, stage_layers, stage_parameters
from steelyard.domain.arrays import FloatArray
from steelyard.domain.degrees import Degrees
from steelyard.simulate.core import Parts, run_core
from steelyard.simulate.documents import Documents
from steelyard.simulate.engine import IMBALANCE, LATE_TRANSFERS, TENSOR_TRANSFERS
from steelyard.simulate.footprint import memory_estimate
from steelyard.simulate.passes import HalfWork, LayerPrices, halves_of, layer_prices
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.workloads import RankWork, WorkloadCache, is_uniform

PARTS = (
    "token_wise", "attention", "head", TENSOR_TRANSFERS, "exchange", "sharded parameters", LATE_TRANSFERS, IMBALANCE,
    "pipeline bubble", "gradient reduction", "optimizer", "overhead",
)  # fmt: skip
"""Where device time goes; the shares of an estimate add up to 1."""
USEFUL = ("token_wise", "attention", "head")
EXPOSED = (TENSOR_TRANSFERS, "exchange", "sharded parameters", LATE_TRANSFERS, "gradient reduction")
"""What transfers cost, a rank's own and those of a rank that it waits for."""


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
        """Within which a measured mean is expected: the profile's error and twice the spread of the mean together, as a
        factor either way."""
        mean = self.step_time_s
        spread = 2 * float(self.step_s.std()) / max(1, len(self.step_s)) ** 0.5 / mean if mean else 0.0
        half = (self.scenario.profile.time_error**2 + spread**2) ** 0.5
        return mean / (1 + half), mean * (1 + half)

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
    core_s, parts = run_core(scenario, prices, halves)
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


def _reduction_s(scenario: Scenario, backward_s: float, forward_s: float) -> float:
    """Exposed time of reducing gradients (and gathering parameters again) over data × context after backward."""
    degrees, profile = scenario.degrees, scenario.profile
    if degrees.lanes == 1 or (scenario.sharding == "full" and degrees.stage == 1):
        return 0.0
    group = group_of(degrees.lanes, degrees.tensor, profile.node_size)
    held = max(stage_parameters(scenario.model, degrees, s) for s in range(degrees.stage))
    layers = max(1, scenario.model.layers // degrees.stage)
    if scenario.sharding == "none":
        reduce_s, gather_s = all_reduce_s(scenario.gradient_bytes * held, group, profile), 0.0
    else:
        reduce_s = reduce_scatter_s(scenario.gradient_bytes * held, group, profile)
        gather_s = all_gather_s(2 * held, group, profile)
    if not scenario.gradient_overlap:
        return reduce_s + gather_s
    return _beyond(reduce_s, backward_s, layers, degrees) + _beyond(gather_s, forward_s, layers, degrees)


def _beyond(transfer_s: float, pass_s: float, layers: int, degrees: Degrees) -> float:
    """What is left of a stage's transfer once its passes are over (or, mirrored, before they begin).

    Gradients are complete with a chunk's last backward pass. A stage with one chunk transfers them under that pass. The
    interleaved schedule is done with the last chunk first: the passes of `stage` micro-batches, as many as go through a
    chunk in turn, separate the ends of two chunks (Narayanan et al. 2021, section 2.2; Megatron Core starts each model
    chunk's reduction at its last micro-batch). The transfers of all chunks follow each other on one stream.

    Args:
        transfer_s: of all chunks of the stage.
        pass_s: of one micro-batch through one chunk.
        layers: of the stage: the last one's transfer begins when everything else is over.
    """
    chunks = degrees.virtual_stages
    late = (n * transfer_s / chunks - pass_s * (1 + (n - 1) * degrees.stage) for n in range(1, chunks + 1))
    return max(transfer_s / layers, *late)


LAYER_LAUNCHES = 15
"""Launches that a profile's `layer_host_s` stands for."""
LAYER_TENSORS, OTHER_TENSORS = 6, 3
"""Parameters of a layer: two norms, projections of queries, keys and values together, of the output, of the gate and
up together, and of down; beside the layers: embedding, head and last norm."""


def _slices_s(scenario: Scenario) -> float:
    """Copies of an optimizer that shards every tensor by itself: after gathering, one launch for each slice of each.

    nanotron's ZeRO-1 does so (its `optim/zero.py` and `all_gather_coalesced`): tensors × ranks launches, not a bucket.
    """
    degrees = scenario.degrees
    if not scenario.sliced_state or scenario.sharding != "optimizer" or degrees.lanes == 1:
        return 0.0
    tensors = LAYER_TENSORS * stage_layers(scenario.model.layers, degrees.stage)[0] + OTHER_TENSORS
    return tensors * degrees.lanes * scenario.profile.layer_host_s / LAYER_LAUNCHES


def once_a_step(scenario: Scenario, core_s: FloatArray) -> Parts:
    """What comes beside the core, float64 (batches,): exposed reduction of gradients, optimizer and overhead.

    Args:
        core_s: of each batch. With a longer core more of the reduction hides, but never more than the core is longer.
    """
    degrees, profile = scenario.degrees, scenario.profile
    passes = scenario.micro_batches * degrees.virtual_stages
    once_s = float(core_s.mean()) / (3 * passes)  # a forward pass of one micro-batch through one chunk
    reduction_s = np.full_like(core_s, _reduction_s(scenario, 2 * once_s, once_s))
    held = max(stage_parameters(scenario.model, degrees, s) for s in range(degrees.stage))
    shards = 1 if scenario.sharding == "none" else scenario.shards
    optimizer = np.full_like(core_s, 0.0 if scenario.skip_optimizer else optimizer_s(held / shards, profile))
    host_s = profile.step_overhead_s + _slices_s(scenario)
    overhead = host_s + scenario.extra_overhead * (core_s + reduction_s + optimizer)
    return {"gradient reduction": reduction_s, "optimizer": optimizer, "overhead": overhead}


def _finish(
    scenario: Scenario, work: RankWork, halves: Sequence[HalfWork], prices: LayerPrices, core_s: FloatArray,
    parts: Parts, scale: float,
) -> StepEstimate:  # fmt: skip
    parts.update(once_a_step(scenario, core_s))
    step_s = core_s + parts["gradient reduction"] + parts["optimizer"] + parts["overhead"]
    parts["overhead"] = parts["overhead"] + parts.pop("launches", np.zeros_like(core_s))
    total = sum(np.mean(v) for v in parts.values())
    shares = {name: float(np.mean(parts.get(name, 0.0)) / total) for name in PARTS}
    batches = len(core_s)
    first = prices.forward.halves[0]
    return StepEstimate(
        scenario=scenario,
        step_s=step_s / scenario.speed,
        shares=shares,
        memory=memory_estimate(scenario, halves),
        tokens=float(scenario.tokens_per_step),
        pairs=float(work.pairs.sum()) / batches * scale,
        squares=float(work.squares.sum()) / batches * scale,
        pairs_kept=min(1.0, float(work.pairs.sum() / work.whole_pairs.sum())),
        rank_work_s=(first.local + first.received)[0, 0] / scenario.speed,
    )
