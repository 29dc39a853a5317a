"""Peak memory of a scenario: the fullest stage, with the micro-batches that its schedule keeps in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steelyard.cost.attention_kernels import UnfusedKernel
from steelyard.cost.peak_memory import (
    CHUNKED_SHARE,
    LOGIT_BYTES,
    MemoryEstimate,
    Recompute,
    activation_bytes,
    estimate,
    parameter_bytes,
    stage_layers,
)
from steelyard.domain.arrays import FloatArray
from steelyard.simulate.passes import HalfWork
from steelyard.simulate.scenario import Scenario

_BALANCED: Mapping[Recompute, Recompute] = {"full": "token_wise", "attention": "none"}
"""What a choice amounts to where core attention is dispatched, and never computed again."""


def memory_estimate(scenario: Scenario, halves: Sequence[HalfWork]) -> MemoryEstimate:
    """The estimate of the stage that needs most."""
    stages = range(scenario.degrees.stage)
    return max((_stage(scenario, halves, s) for s in (stages[0], stages[-1])), key=lambda m: m.expected)


def in_flight(scenario: Scenario, stage: int) -> float:
    """Micro-batches, each through all layers of the stage, whose activations it holds at once."""
    stages, micro_batches = scenario.degrees.stage, scenario.micro_batches
    if stages == 1:
        return 1.0
    if scenario.schedule_name == "lockstep":
        return float(min(micro_batches, 2 * (stages - 1 - stage) + 1))
    if scenario.schedule_name == "interleaved":
        chunks = scenario.degrees.virtual_stages
        passes = 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1
        return min(micro_batches * chunks, passes) / chunks
    return float(min(micro_batches, stages - stage))


def _tokens_in_flight(scenario: Scenario, halves: Sequence[HalfWork], stage: int) -> float:
    """Tokens of the largest consecutive micro-batches: with unequal ones, not the mean times their number."""
    tokens: FloatArray = np.sum([h.tokens for h in halves], axis=0)  # (batches, micro-batches, ranks)
    count = in_flight(scenario, stage)
    if scenario.schedule_name == "lockstep":
        return count * float(tokens.max())
    whole: int = min(int(count), tokens.shape[1])
    if tokens.shape[1] < count or whole == 0:
        return count * float(tokens.max())
    sums = np.cumsum(np.concatenate([np.zeros_like(tokens[:, :1]), tokens], axis=1), axis=1)
    windows: FloatArray = sums[:, whole:] - sums[:, :-whole]
    largest: float = float(windows.max())
    return largest * (count / whole)


def _exchange_bytes(scenario: Scenario, halves: Sequence[HalfWork], layers: int, count: float) -> float:
    """Rows that a server receives and keeps, rows that it sends; or gathered keys."""
    shape, degrees = scenario.local_attention, scenario.degrees
    q, kv = shape.query_bytes, shape.key_value_bytes
    if scenario.policy == "balanced":
        received = sum(2 * q * (h.query_in[0] + h.query_in[1]) + kv * (h.key_in[0] + h.key_in[1]) for h in halves)
        sent = sum(q * (h.query_out[0] + h.query_out[1]) + kv * (h.key_out[0] + h.key_out[1]) for h in halves)
        kept = layers * count if scenario.keeps_received else 1.0
        return float(np.max(np.asarray(received) * kept + np.asarray(sent)))
    if degrees.context > 1 and scenario.context_exchange != "ring":
        gathered = degrees.context * float(np.max([h.tokens.max() for h in halves])) * kv
        if scenario.recompute == "full":
            return gathered * 2.0
        return gathered * (layers * count / 2 + 1.0 if scenario.recompute == "alternate" else layers * count)
    return 0.0


def _stage(scenario: Scenario, halves: Sequence[HalfWork], stage: int) -> MemoryEstimate:
    model, degrees, profile = scenario.model, scenario.degrees, scenario.profile
    layers = stage_layers(model.layers, degrees.stage)[stage]
    element = scenario.element_bytes
    unfused = isinstance(profile.kernel(scenario.kernel), UnfusedKernel)
    context = 0
    if unfused:
        h = halves[0]
        context = int(np.max(h.received.rectangle + h.local.rectangle) / max(1.0, float(h.tokens.max())))

    def kept(recompute: Recompute) -> float:
        if scenario.policy == "balanced":  # core attention is never computed again: its output and log-sum-exp stay
            if recompute == "alternate":
                return (kept("none") + kept("full")) / 2
            recompute = _BALANCED.get(recompute, recompute)
        return activation_bytes(
            model, tensor=degrees.tensor, sequence_parallel=scenario.sequence_parallel, recompute=recompute,
            unfused_context=context, fused=scenario.fused, element_bytes=element,
        )  # fmt: skip

    tokens = _tokens_in_flight(scenario, halves, stage)
    activations = tokens * layers * kept(scenario.recompute)
    chunk = float(np.max([h.tokens.max() for h in halves]))
    if scenario.recompute in ("full", "alternate", "token_wise", "feed_forward", "products"):
        activations += chunk * kept("none")  # the layer at work
    # The residual stream's gradient and the gradient of the layer's widest activation, while backward runs.
    activations += chunk * element * (model.hidden + 2 * model.ffn / degrees.tensor)
    if degrees.tensor > 1 and scenario.sequence_parallel:  # inputs and gradients gathered over the tensor axis
        activations += 4 * chunk * element * model.hidden
    logits = chunk * model.vocab / degrees.tensor * LOGIT_BYTES if stage == degrees.stage - 1 else 0.0
    if scenario.chunked_loss:
        logits *= CHUNKED_SHARE
    parameters = parameter_bytes(
        model, degrees, stage, sharding=scenario.sharding, shards=scenario.shards, mixed=scenario.mixed_precision
    )
    count = in_flight(scenario, stage)
    exchange = _exchange_bytes(scenario, halves, layers, count)
    return estimate(parameters, profile, activations=activations, logits=logits, exchange=exchange)
