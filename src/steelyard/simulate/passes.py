"""Prices: what a scenario's work costs per layer in each direction, as the costs that the graph takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steelyard.cost.attention_kernels import RangeCounts
from steelyard.cost.collectives import all_gather_s, all_to_all_s, group_of, reduce_scatter_s, ring_line
from steelyard.cost.linear import TokenWiseCost, token_wise_cost
from steelyard.cost.peak_memory import Recompute
from steelyard.domain.arrays import FloatArray
from steelyard.simulate.engine import Together, everybody, neighbours
from steelyard.simulate.graph import Exchange, HalfCosts, PassCosts
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.workloads import RankWork

_AGAIN: Mapping[Recompute, float] = {
    "none": 0.0, "attention": 0.0, "feed_forward": 0.0, "products": 0.4, "alternate": 0.5, "token_wise": 1.0,
    "full": 1.0,
}  # fmt: skip
"""Share of the token-wise forward pass that backward repeats, the feed-forward layer alone aside. Of `products`: keys,
output and up, every second of the seven products, have 0.37 of the operations of Llama 3 8B, and all that is
element-wise is repeated too: 0.4, counted for that model and assumed for others."""
_ATTENTION_AGAIN: Mapping[Recompute, float] = {
    "none": 0.0, "attention": 1.0, "feed_forward": 0.0, "products": 0.0, "alternate": 0.5, "token_wise": 0.0,
    "full": 1.0,
}  # fmt: skip
_GATHER_AGAIN: Mapping[Recompute, float] = {"alternate": 0.5, "full": 1.0}
"""Share of layers whose gathered keys are not kept, so that backward gathers them once more."""
TENSOR_LAUNCHES = 0.05
"""What collectives of a tensor axis add to a layer's launches; fitted together with the A100 profile's constants
(benchmarks/fit_profiles.py). They wait in a queue behind the kernels of their own stream: the host hardly notices."""


@dataclass(frozen=True, eq=False)
class HalfWork:
    """One nano-batch of every (batch, micro-batch, rank); float64 of that shape."""

    tokens: FloatArray
    local: RangeCounts
    received: RangeCounts
    query_out: tuple[FloatArray, FloatArray]
    query_in: tuple[FloatArray, FloatArray]
    key_out: tuple[FloatArray, FloatArray]
    key_in: tuple[FloatArray, FloatArray]


def halves_of(work: RankWork, batches: int, nano_batches: int) -> list[HalfWork]:
    """Split rounds (batch, micro-batch or tick, nano-batch) into one work per nano-batch."""

    def counts(whole: RangeCounts, half: int) -> RangeCounts:
        return whole.map(lambda column: part(column, half))

    def part(column: FloatArray, half: int) -> FloatArray:
        shaped = column.reshape(batches, -1, nano_batches, column.shape[-1])
        return shaped[:, :, half]

    def pair(columns: tuple[FloatArray, FloatArray], half: int) -> tuple[FloatArray, FloatArray]:
        return part(columns[0], half), part(columns[1], half)

    return [
        HalfWork(
            part(work.tokens, h),
            counts(work.local, h),
            counts(work.received, h),
            pair(work.query_out, h),
            pair(work.query_in, h),
            pair(work.key_out, h),
            pair(work.key_in, h),
        )
        for h in range(nano_batches)
    ]


@dataclass(frozen=True, eq=False)
class LayerPrices:
    """Costs of one layer, forward and backward."""

    forward: PassCosts
    backward: PassCosts


def layer_prices(scenario: Scenario, halves: list[HalfWork]) -> LayerPrices:
    """Price one layer of all nano-batches."""
    exchange, group = _exchange(scenario)
    forward, backward = [], []
    for half in halves:
        token_wise = token_wise_cost(
            scenario.model, half.tokens, scenario.profile,
            tensor=scenario.degrees.tensor, precision=scenario.precision,
            sequence_parallel=scenario.sequence_parallel, fused=scenario.fused, element_bytes=scenario.element_bytes,
        )  # fmt: skip
        local, received, again = _attention(scenario, half, exchange)
        out, back, out_backward, back_backward = _transfers(scenario, half, exchange)
        tensor_s = _tensor_s(scenario, half.tokens)
        forward.append(_forward(scenario, token_wise, tensor_s, local, received, out, back))
        backward.append(_backward(scenario, token_wise, tensor_s, again, out_backward, back_backward))
    gather_s, scatter_s = _sharded_s(scenario)
    return LayerPrices(
        PassCosts(tuple(forward), exchange, group, gather_s, 0.0),
        PassCosts(tuple(backward), exchange, group, gather_s, scatter_s),
    )


def _exchange(scenario: Scenario) -> tuple[Exchange, Together]:
    if scenario.policy == "balanced":
        return "servers", everybody
    if scenario.degrees.context == 1:
        return "none", everybody
    return ("ring" if scenario.context_exchange == "ring" else "gather"), neighbours(scenario.degrees.context)


def slowness(scenario: Scenario, ranks: int) -> FloatArray | float:
    """By what each rank's own work takes longer; stages repeat the ranks of data × context."""
    if not scenario.speeds:
        return 1.0
    return 1 / np.resize(np.array(scenario.speeds), ranks)


def _attention(
    scenario: Scenario, half: HalfWork, exchange: Exchange
) -> tuple[FloatArray, FloatArray, tuple[FloatArray, FloatArray]]:
    """Forward seconds on local and on received rows, and the same for backward with what it repeats."""
    kernel, shape = scenario.profile.kernel(scenario.kernel), scenario.local_attention
    slow = slowness(scenario, half.tokens.shape[-1])

    def placed(local: FloatArray, received: FloatArray) -> tuple[FloatArray, FloatArray]:
        if exchange == "none" or (exchange == "gather" and scenario.context_exchange == "gather"):
            return np.zeros_like(local), (local + received) * slow  # nothing to hide under: one call
        if exchange in ("gather", "ring") and scenario.policy != "packed":
            # Head-tail pieces: of their pairs, 1/context need only keys of the own pieces.
            share = received / scenario.degrees.context
            local, received = local + share, received - share
        return local * slow, received * slow

    forward, backward = [], []
    for counts in (half.local, half.received):
        forward.append(kernel.forward_s(counts, shape.heads, shape.head_dim) + kernel.floor_s * (counts.pairs > 0))
        backward.append(kernel.backward_s(forward[-1], counts, shape.heads, shape.head_dim))
    again = 0.0 if scenario.policy == "balanced" else _ATTENTION_AGAIN[scenario.recompute]
    local, received = placed(forward[0], forward[1])
    local_back, received_back = placed(backward[0], backward[1])
    return local, received, (local_back + again * local, received_back + again * received)


def _transfers(
    scenario: Scenario, half: HalfWork, exchange: Exchange
) -> tuple[FloatArray | float, FloatArray | float, FloatArray | float, FloatArray | float]:
    """Forward out and back, backward out and back."""
    if exchange == "none":
        return 0.0, 0.0, 0.0, 0.0
    if exchange == "servers":
        return _server_transfers(scenario, half)
    shape, degrees = scenario.local_attention, scenario.degrees
    group = group_of(degrees.context, degrees.tensor, scenario.profile.node_size)
    latency, per_byte = ring_line(group, scenario.profile)
    if exchange == "ring" and group.nodes > 1:  # point to point: one port carries what crosses from node to node
        per_byte = (
            (group.size - 1) / group.size / min(scenario.profile.node_bytes_per_s, scenario.profile.network_bytes_per_s)
        )
    together = neighbours(degrees.context)
    again = _GATHER_AGAIN.get(scenario.recompute, 0.0)
    whole = degrees.context * together(half.tokens) * shape.key_value_bytes
    once = (latency + whole * per_byte) * (1 - scenario.hidden_gather)
    if exchange == "ring":  # keys and their gradients go round; attention computed again has them go round once more
        return once, 0.0, (2 + _ATTENTION_AGAIN[scenario.recompute]) * once, 0.0
    return once, 0.0, again * once, once


def _server_transfers(scenario: Scenario, half: HalfWork) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Dispatch: queries, keys and values out, outputs back. Backward: output gradients out, all others back."""
    shape, profile = scenario.local_attention, scenario.profile
    q, kv = float(shape.query_bytes), float(shape.key_value_bytes)
    lse = 4.0 * shape.heads

    def all_to_all(query: float, key: float, *, home: bool) -> FloatArray:
        out = [query * a + key * b for a, b in zip(half.query_out, half.key_out, strict=True)]
        arrive = [query * a + key * b for a, b in zip(half.query_in, half.key_in, strict=True)]
        if home:
            out, arrive = arrive, out
        cost = all_to_all_s(out[0], arrive[0], out[1], arrive[1], profile) + scenario.exchange_overhead_s
        nobody = (out[0] + out[1] + arrive[0] + arrive[1]).sum(axis=-1, keepdims=True) == 0
        return np.where(nobody, 0.0, cost)

    if scenario.keeps_received:
        return (
            all_to_all(q, kv, home=False),
            all_to_all(q, 0.0, home=True),
            all_to_all(q, 0.0, home=False),
            all_to_all(q, kv, home=True),
        )
    return (
        all_to_all(q, kv, home=False),
        all_to_all(q, 0.0, home=True),
        all_to_all(3 * q + lse, kv, home=False),  # query, output, its gradient and the log-sum-exp go out again
        all_to_all(q, kv, home=True),
    )


def _tensor_s(scenario: Scenario, tokens: FloatArray) -> FloatArray | float:
    """Exposed transfers of the tensor axis on one side of attention: a gather and a scatter (or one all-reduce)."""
    degrees, profile = scenario.degrees, scenario.profile
    if degrees.tensor == 1:
        return 0.0
    latency, per_byte = ring_line(group_of(degrees.tensor, 1, profile.node_size), profile)
    size_bytes = tokens * scenario.model.hidden * scenario.element_bytes
    exposed = 1 - profile.tensor_overlap if scenario.tensor_overlap else 1.0
    return 2 * (latency * (tokens > 0) + size_bytes * per_byte) * exposed


def _sharded_s(scenario: Scenario) -> tuple[float, float]:
    """Gather of a layer's parameters and scatter of its gradients, where parameters are sharded."""
    if scenario.sharding != "full" or scenario.degrees.stage > 1:  # stages gather once a step: see `step`
        return 0.0, 0.0
    degrees = scenario.degrees
    group = group_of(scenario.shards, degrees.tensor, scenario.profile.node_size)
    held = scenario.model.layer_parameters / degrees.tensor
    wide = 2 if scenario.mixed_precision else 4
    return (
        all_gather_s(wide * held, group, scenario.profile),
        reduce_scatter_s(scenario.gradient_bytes * held, group, scenario.profile),
    )


def _forward(
    scenario: Scenario, token_wise: TokenWiseCost, tensor_s: FloatArray | float, local: FloatArray,
    received: FloatArray, out: FloatArray | float, back: FloatArray | float,
) -> HalfCosts:  # fmt: skip
    slow = slowness(scenario, local.shape[-1])
    costs = HalfCosts(token_wise.before_s * slow, token_wise.after_s * slow, tensor_s, local, received, out, back, 0.0)
    return _at_least(costs, _host_s(scenario))


def _backward(
    scenario: Scenario, token_wise: TokenWiseCost, tensor_s: FloatArray | float,
    attention: tuple[FloatArray, FloatArray], out: FloatArray | float, back: FloatArray | float,
) -> HalfCosts:  # fmt: skip
    slow = slowness(scenario, attention[0].shape[-1])
    again = _AGAIN[scenario.recompute]
    factor = (scenario.profile.token_wise_backward + again) * slow
    repeated_s: FloatArray | float = 0.0
    if scenario.recompute == "feed_forward":  # one of the two pairs of transfers is repeated with it
        again, repeated_s = 0.5, token_wise.feed_forward_s * slow
    costs = HalfCosts(
        token_wise.after_s * factor + repeated_s, token_wise.before_s * factor, tensor_s * (1 + again),
        attention[0], attention[1], out, back, 0.0,
    )  # fmt: skip
    return _at_least(costs, _host_s(scenario) * (1 + again))


def _host_s(scenario: Scenario) -> float:
    profile = scenario.profile
    host_s = profile.layer_host_s if scenario.fused else profile.eager_host_s
    return host_s * (1 + TENSOR_LAUNCHES * (scenario.degrees.tensor > 1))


def _at_least(costs: HalfCosts, host_s: float) -> HalfCosts:
    """The same layer when the host cannot launch it faster: what is missing is time in which the device is idle."""
    device_s = costs.first + costs.second + 2 * costs.tensor_s + costs.local + costs.received
    empty = costs.local + costs.received == 0
    missing = np.where(empty, 0.0, np.maximum(host_s - device_s, 0.0))
    return dataclasses.replace(costs, launch_s=missing)
