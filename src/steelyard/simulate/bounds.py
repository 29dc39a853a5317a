"""What a configuration does at best: bounds of its time and memory from below, without a plan.

A search need not plan what cannot be among the best. Before anything is planned it is known which documents a group of
ranks gets (`placed_groups`), and so, with the same prices as in a simulation:

- *Attention.* A kernel is monotone in what it counts. Wherever a document of n tokens is divided, its tiles are no
  fewer than ⌈n/128⌉, and its key blocks no fewer than one 128th of the sum of those that each of its rows sees.
- *Everything per token* costs least per token where there are many: what comes once a call (a floor, a latency, half of
  a product's rate) is left out by pricing a million times as much and dividing. Without a context axis, and without
  work that moves, all of it is known exactly and nothing is left out.
- *Waiting.* The slowest rank is no faster than the mean of its group. A stage of a pipeline begins when the first
  micro-batch has come through the stages before it, works on all of them in turn, and the last one then has to go back.
  A lockstep tick is as long as the token-wise work of a stage, and as the mean over all servers.
- *Exchanges* of the balanced policy cost nothing, and what hides under work hides wholly.

What comes once a step (`step.once_a_step`) is added for a core of that length: a longer core hides more of it, but by
no more than it is longer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np

from steelyard.cost.attention_kernels import BLOCK_KEYS, TILE_QUERIES, RangeCounts, range_counts
from steelyard.cost.peak_memory import CHUNKED_SHARE, MemoryEstimate, stage_layers
from steelyard.domain.arrays import FloatArray, IntArray, int_column
from steelyard.planner.schedules import lockstep
from steelyard.simulate.core import head_forward_s, stage_transfer_s
from steelyard.simulate.documents import Documents
from steelyard.simulate.footprint import memory_estimate
from steelyard.simulate.graph import HalfCosts, PassCosts, run_layers
from steelyard.simulate.passes import HalfWork, LayerPrices, halves_of, layer_prices
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import once_a_step
from steelyard.simulate.workloads import RankWork, WorkRequest, placed_groups

MANY = float(2**20)
"""Times as much work, so that what a call costs once no longer counts."""


@dataclass(frozen=True, eq=False)
class AtBest:
    """What no simulation of the same batches undercuts.

    Attributes:
        step_time_s: mean over the batches, at least; 0 where nothing is known (ranks of unequal speed).
        memory: of the fullest device, at least.
        pairs_kept: share of the attention work that is left after documents are cut; exact.
    """

    step_time_s: float
    memory: MemoryEstimate
    pairs_kept: float

    def with_chunked_loss(self) -> AtBest:
        """The same once the loss is computed chunk by chunk, which changes memory only."""
        less = dataclasses.replace(self.memory, logits=self.memory.logits * CHUNKED_SHARE)
        return dataclasses.replace(self, memory=less)


@dataclass(frozen=True, eq=False)
class _GroupWork:
    """Documents of each group of ranks; arrays (batches, rounds, groups), sums over the group's ranks."""

    tokens: FloatArray
    counts: RangeCounts
    pairs_kept: float


class Bounds:
    """Bounds of many scenarios over the same batches of a stream."""

    def __init__(self, documents: Documents, *, batches: int, seed: int) -> None:
        self.documents, self.batches, self.seed = documents, batches, seed
        self._batch = lru_cache(maxsize=batches)(lambda n, tokens: documents.batch(n, tokens, seed))
        self._known: dict[object, _GroupWork] = {}

    def at_best(self, scenario: Scenario) -> AtBest:
        """Raises UsageError where a given batch has another number of tokens than a step."""
        request = scenario.request(self.batches, self.seed)
        work = self._work(request)
        exact = scenario.policy != "balanced" and request.context == 1
        ranks = request.context if scenario.policy != "balanced" else request.context * request.data
        halves = _halves(work, ranks, request, scale=1.0, counted=False)
        memory = memory_estimate(scenario, halves)
        seconds = 0.0
        if not scenario.speeds:
            scale = 1.0 if exact else MANY
            core_s = _core_s(scenario, _halves(work, ranks, request, scale=scale, counted=True), scale)
            seconds = _step_s(scenario, core_s)
        return AtBest(seconds, memory, work.pairs_kept)

    def with_plans(self, scenario: Scenario, planned: RankWork) -> float:
        """Seconds that no simulation undercuts in which the first rounds have these plans.

        Args:
            scenario: balanced, without ranks of unequal speed.
            planned: as many rounds as there are micro-batches or ticks, or fewer; nano-batches all.
        """
        request = scenario.request(self.batches, self.seed)
        work, lanes = self._work(request), request.context * request.data
        halves = _halves(work, lanes, request, scale=MANY, counted=True)
        prices = layer_prices(scenario, halves)
        passes = _pass(scenario, prices.forward, MANY), _pass(scenario, prices.backward, MANY)
        rounds_s = _rounds_s(scenario, prices, *passes, head_forward_s(scenario, halves) / MANY)[..., 0]
        known_s = _planned_s(scenario, halves_of(planned, 1, scenario.nano_batches))
        flat = rounds_s.ravel()
        flat[: len(known_s)] = np.maximum(flat[: len(known_s)], known_s)
        return _step_s(scenario, flat.reshape(rounds_s.shape).sum(axis=1))

    def _work(self, request: WorkRequest) -> _GroupWork:
        exact = request.policy != "balanced" and request.context == 1
        balanced = request.policy == "balanced"
        key = (
            request.policy, request.tokens, request.micro_batches * request.nano_batches,
            request.chunk_tokens if request.cut_documents and balanced else 0, 1 if balanced else request.data, exact,
            request.packing_breakpoint, request.tolerance if request.policy == "wlb" else 0,
        )  # fmt: skip
        if key not in self._known:
            batches = [self._batch(number, request.tokens) for number in range(self.batches)]
            whole = sum(float((b * (b + 1) // 2).sum()) for b in batches)
            self._known[key] = _group_work([placed_groups(b, request) for b in batches], whole, exact=exact)
        return self._known[key]


def _group_work(groups: list[list[list[list[int]]]], whole_pairs: float, *, exact: bool) -> _GroupWork:
    """Args: groups: pieces by batch, round and group; whole_pairs: of all batches."""
    shape = (len(groups), len(groups[0]), len(groups[0][0]))
    flat = [group for batch in groups for parts in batch for group in parts]
    lengths = int_column([n for group in flat for n in group])
    place = np.repeat(np.arange(len(flat)), [len(group) for group in flat])
    counts = range_counts(np.zeros_like(lengths), lengths) if exact else least_counts(lengths)

    def sums(column: FloatArray) -> FloatArray:
        return np.bincount(place, weights=column, minlength=len(flat)).astype(np.float64).reshape(shape)

    by_group = counts.map(sums)
    kept = min(1.0, float(by_group.pairs.sum()) / whole_pairs)
    return _GroupWork(sums(lengths.astype(np.float64)), by_group, kept)


def least_counts(lengths: IntArray) -> RangeCounts:
    """Counts of whole documents that no division into query ranges undercuts, float64 (documents,)."""
    rows = lengths.astype(np.float64)
    pairs = rows * (rows + 1) / 2
    whole, rest = lengths // BLOCK_KEYS, lengths % BLOCK_KEYS
    seen = BLOCK_KEYS * (whole * (whole + 1) / 2) + rest * (whole + 1)  # key blocks of each row, added up
    blocks = np.maximum(seen / TILE_QUERIES, -(-lengths // BLOCK_KEYS))
    tiles = (-(-lengths // TILE_QUERIES)).astype(np.float64)
    return RangeCounts(tiles, blocks, np.zeros_like(rows), pairs, pairs, (rows > 0).astype(np.float64), rows, pairs)


def _halves(work: _GroupWork, ranks: int, request: WorkRequest, *, scale: float, counted: bool) -> list[HalfWork]:
    """The mean over the ranks of each group, `scale` times, as nano-batches of shape (batches, micro-batches, ranks).

    A group of a context axis stands there with all of its ranks, since prices look at neighbours.
    """
    repeats = request.context if request.policy != "balanced" else 1
    batches, nano = work.tokens.shape[0], request.nano_batches

    def part(column: FloatArray, half: int) -> FloatArray:
        shaped = column.reshape(batches, -1, nano, column.shape[-1])[:, :, half] * (scale / ranks)
        return np.repeat(shaped, repeats, axis=-1) if repeats > 1 else shaped

    found = []
    for half in range(nano):
        tokens = part(work.tokens, half)
        none = np.zeros_like(tokens)
        nothing = RangeCounts(*(none,) * 8)
        local = work.counts.map(partial(part, half=half)) if counted else nothing
        found.append(HalfWork(tokens, local, nothing, *((none, none),) * 4))
    return found


def _step_s(scenario: Scenario, core_s: FloatArray) -> float:
    """The mean over the batches with what comes once a step."""
    return float((core_s + sum(once_a_step(scenario, core_s).values())).mean()) / scenario.speed


@dataclass(frozen=True, eq=False)
class _Pass:
    """One layer in one direction; seconds (batches, micro-batches, groups)."""

    token_wise: FloatArray
    whole: FloatArray


def _pass(scenario: Scenario, costs: PassCosts, scale: float) -> _Pass:
    exposed = costs.exchange == "gather" and scenario.context_exchange == "gather"
    step = scenario.degrees.context if scenario.policy != "balanced" else 1

    def token_wise(half: HalfCosts) -> FloatArray:
        return half.first + half.second + 2 * half.tensor_s

    def rest(half: HalfCosts) -> FloatArray:
        return half.local + half.received + half.launch_s + (half.out + half.back if exposed else 0.0)

    alone: FloatArray = np.sum([token_wise(h) for h in costs.halves], axis=0)[..., ::step] / scale
    other: FloatArray = np.sum([rest(h) for h in costs.halves], axis=0)[..., ::step] / scale
    return _Pass(alone, alone + other)


def _core_s(scenario: Scenario, halves: list[HalfWork], scale: float) -> FloatArray:
    """Of each batch, float64 (batches,)."""
    prices = layer_prices(scenario, halves)
    forward, backward = _pass(scenario, prices.forward, scale), _pass(scenario, prices.backward, scale)
    step = scenario.degrees.context if scenario.policy != "balanced" else 1
    head_s = head_forward_s(scenario, halves)[..., ::step] / scale
    if scenario.degrees.stage > 1 and scenario.schedule_name != "lockstep":
        return _pipeline_s(scenario, forward.whole, backward.whole, head_s)
    core_s: FloatArray = _rounds_s(scenario, prices, forward, backward, head_s).sum(axis=1).max(axis=-1)
    return core_s


def _rounds_s(
    scenario: Scenario, prices: LayerPrices, forward: _Pass, backward: _Pass, head_s: FloatArray
) -> FloatArray:
    """Without a pipeline of micro-batches that overtake each other: of every micro-batch, or tick and its mirror image,
    float64 (batches, micro-batches or ticks, groups)."""
    if scenario.schedule_name == "lockstep":
        return _ticks_s(scenario, forward, backward, head_s)
    layers = scenario.model.layers
    gathers_s = layers * prices.forward.gather_s
    # Gathers and scatters follow each other on one stream; the last layer waits for all gathers, and for the scatters
    # of all layers but the last three, which come before them.
    both_s = layers * prices.backward.gather_s + max(0, layers - 3) * prices.backward.scatter_s
    return np.maximum(layers * forward.whole, gathers_s) + np.maximum(layers * backward.whole, both_s) + 3 * head_s


def _pipeline_s(scenario: Scenario, forward_s: FloatArray, backward_s: FloatArray, head_s: FloatArray) -> FloatArray:
    """1F1B: each stage's work, what comes before its first pass and after its last one. Interleaved: work only."""
    degrees = scenario.degrees
    work_s = (forward_s + backward_s).sum(axis=1)
    pieces = stage_layers(scenario.model.layers, degrees.stage * degrees.virtual_stages)
    layers = [sum(pieces[stage :: degrees.stage]) for stage in range(degrees.stage)]
    before = [0, *accumulate(layers)] if degrees.virtual_stages == 1 else [0] * degrees.stage
    transfer_s = stage_transfer_s(scenario) if degrees.virtual_stages == 1 else 0.0
    ends_and_begin_s = forward_s[:, 0] + backward_s[:, -1]
    by_stage = [
        count * work_s + before[stage] * ends_and_begin_s + 2 * stage * transfer_s
        + (3 * head_s.sum(axis=1) if stage == degrees.stage - 1 else 0.0)
        for stage, count in enumerate(layers)
    ]  # fmt: skip
    core_s: FloatArray = np.max(by_stage, axis=(0, 2))
    return core_s


def _ticks_s(scenario: Scenario, forward: _Pass, backward: _Pass, head_s: FloatArray) -> FloatArray:
    """Each as long as what a stage's ranks do themselves, and as the mean over the ranks of all stages."""
    stages, micro_batches = scenario.degrees.stage, scenario.micro_batches
    layers = stage_layers(scenario.model.layers, stages)[0]
    ticks = micro_batches + stages - 1
    total = np.full((len(head_s), ticks, 1), _transfers_of_tick_s(scenario))
    for phase, head in ((forward, head_s), (backward, 2 * head_s)):
        own, whole, last = layers * phase.token_wise[..., 0], layers * phase.whole[..., 0], head[..., 0]
        for tick in range(ticks):
            busy = slice(max(0, tick - stages + 1), min(micro_batches, tick + 1))
            on_last = last[:, tick - stages + 1] if tick >= stages - 1 else np.zeros(len(total))
            most = own[:, busy].max(axis=1)
            if tick >= stages - 1:
                most = np.maximum(most, own[:, tick - stages + 1] + on_last)
            total[:, tick, 0] += np.maximum(most, (whole[:, busy].sum(axis=1) + on_last) / stages)
    return total


def _transfers_of_tick_s(scenario: Scenario) -> float:
    """To the next stage after a forward tick, and back after its mirror image."""
    stages, micro_batches = scenario.degrees.stage, scenario.micro_batches
    schedule = lockstep(stages, micro_batches)
    return stage_transfer_s(scenario) * len(schedule.ticks) / (micro_batches + stages - 1)


def _planned_s(scenario: Scenario, halves: list[HalfWork]) -> FloatArray:
    """What rounds take whose plans are known: the slowest rank of a tick; of micro-batches, in which another rank may
    be the slowest each time, the mean rank. float64 (rounds,)."""
    prices, shape = layer_prices(scenario, halves), halves[0].tokens.shape
    degrees = scenario.degrees
    layers = stage_layers(scenario.model.layers, degrees.stage)[0]
    forward = run_layers(prices.forward, layers, shape).duration_s
    backward = run_layers(prices.backward, layers, shape).duration_s
    head_s = head_forward_s(scenario, halves)
    if degrees.stage == 1:
        mean_s: FloatArray = (forward + backward + 3 * head_s).mean(axis=-1)[0]
        return mean_s
    head_s[..., : -degrees.lanes] = 0.0
    most_s: FloatArray = (forward + head_s).max(axis=-1)[0] + (backward + 2 * head_s).max(axis=-1)[0]
    return most_s + _transfers_of_tick_s(scenario)
