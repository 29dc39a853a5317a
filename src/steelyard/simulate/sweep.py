"""Which configurations exist, what each does, and why others are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.cost.peak_memory import MemoryEstimate, Recompute
from steelyard.cost.profiles import DeviceProfile, Precision
from steelyard.domain.degrees import Degrees, Sharding
from steelyard.domain.model_shape import ModelShape
from steelyard.errors import SteelyardError
from steelyard.simulate.answer import dominant_cause
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.workloads import PolicyName, WorkloadCache


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen.

    Attributes:
        devices: that all degrees multiply to.
        tokens_per_step: of a step; every configuration has exactly as many.
        longest_document: a group of ranks that shares a sequence must hold it.
        policies, recomputes, shardings: choices to try.
        base: everything else.
    """

    base: Scenario
    devices: int
    tokens_per_step: int
    longest_document: int
    policies: tuple[PolicyName, ...] = ("packed", "wlb", "per_document_cp", "balanced")
    recomputes: tuple[Recompute, ...] = ("none", "token_wise", "full")
    shardings: tuple[Sharding, ...] = ("optimizer", "full")
    largest_stage: int = 16
    largest_context: int = 16


@dataclass(frozen=True)
class Outcome:
    """One configuration: what it does, or why it is refused.

    Attributes:
        scenario: what was tried.
        pairs_kept: share of the attention work that is left after documents are cut.
        step_time_s, tokens_per_s_per_device, mfu_causal, memory_gib, verdict, dominant: of its estimate; 0 and "" if
            refused.
        refused: the reason, or "".
    """

    scenario: Scenario
    step_time_s: float = 0.0
    tokens_per_s_per_device: float = 0.0
    mfu_causal: float = 0.0
    memory_gib: float = 0.0
    verdict: str = ""
    dominant: str = ""
    refused: str = ""
    pairs_kept: float = 1.0


def _divisors(number: int, largest: int) -> list[int]:
    return [d for d in range(1, min(number, largest) + 1) if number % d == 0]


def candidates(space: SearchSpace) -> Iterator[Scenario | tuple[Scenario, str]]:
    """All configurations of the space, those refused with a reason."""
    base, model = space.base, space.base.model
    tensors = [t for t in _divisors(space.devices, base.profile.node_size) if model.heads % t == 0]
    for tensor in tensors:
        for stage in _divisors(space.devices // tensor, space.largest_stage):
            rest = space.devices // (tensor * stage)
            for context in _divisors(rest, space.largest_context):
                data = rest // context
                yield from _of_degrees(space, Degrees(data, tensor, context, stage))


def _of_degrees(space: SearchSpace, degrees: Degrees) -> Iterator[Scenario | tuple[Scenario, str]]:
    per_lane, odd = divmod(space.tokens_per_step, degrees.lanes)
    if odd or degrees.stage > space.base.model.layers:
        reason = "data × context does not divide the tokens of a step" if odd else "more stages than layers"
        yield space.base.replace(degrees=degrees), f"{reason} (counted once for all choices)"
        return
    chunks: set[int] = set()
    for micro_batches in (1, 2, 4, 8, 16, 32, 64, 128):
        if per_lane % micro_batches == 0 and (micro_batches >= degrees.stage or micro_batches == 1):
            chunks.add(micro_batches)
    for micro_batches, policy in itertools.product(sorted(chunks), space.policies):
        chunk = per_lane // micro_batches
        if degrees.context > 1 and policy == "packed":
            continue  # the same as per_document_cp, for documents that are cut at the group's end
        if degrees.context == 1 and policy == "per_document_cp":
            continue  # the same as packed
        if degrees.context > 1 and policy == "balanced":
            continue  # ranks of one nano-batch form one group already
        scenario = space.base.replace(
            degrees=degrees, policy=policy, micro_batches=micro_batches, chunk_tokens=chunk,
            ping_pong=False,
        )  # fmt: skip
        room = chunk * (degrees.lanes if policy == "balanced" else degrees.context)
        for variant in _variants(space, scenario):
            if room < space.longest_document:
                yield variant, "a document is longer than the ranks that share a sequence hold"
            else:
                yield variant


def _variants(space: SearchSpace, scenario: Scenario) -> Iterator[Scenario]:
    """Recomputation, sharding and ping-pong: choices that keep the tokens of a step."""
    recomputes, balanced = space.recomputes, scenario.policy == "balanced"
    if balanced and "token_wise" in recomputes:  # the same as full: attention is not computed again
        recomputes = tuple(r for r in recomputes if r != "full")
    for recompute, sharding in itertools.product(recomputes, space.shardings):
        yield scenario.replace(recompute=recompute, sharding=sharding)
    if balanced and scenario.micro_batches % 2 == 0:
        for recompute in recomputes:
            yield scenario.replace(recompute=recompute, ping_pong=True, micro_batches=scenario.micro_batches // 2)


def outcome_of(scenario: Scenario, cache: WorkloadCache, *, batches: int, seed: int) -> Outcome:
    """Estimate one configuration; what cannot be laid out or does not fit is refused with the reason."""
    try:
        estimate = simulate_step(scenario, cache, batches=batches, seed=seed)
    except SteelyardError as error:
        return Outcome(scenario, refused=str(error).split(";")[0])
    return outcome_from(estimate)


def outcome_from(estimate: StepEstimate) -> Outcome:
    """An estimate in short, refused where it does not fit."""
    memory = estimate.memory
    refused = does_not_fit(memory) if memory.verdict == "does not fit" else ""
    return Outcome(
        estimate.scenario, estimate.step_time_s, estimate.tokens_per_s_per_device, estimate.mfu_causal,
        memory.expected / 2**30, memory.verdict, dominant_cause(estimate), refused,
        estimate.pairs_kept,
    )  # fmt: skip


def does_not_fit(memory: MemoryEstimate) -> str:
    """The reason of a refusal."""
    largest = max(memory.parts().items(), key=lambda part: part[1])
    return f"does not fit: {memory.expected / 2**30:.0f} GiB, most of it {largest[0]}"


def base_scenario(model: ModelShape, profile: DeviceProfile, precision: Precision) -> Scenario:
    """What a search starts from: everything that is not chosen."""
    return Scenario(
        model=model, profile=profile, degrees=Degrees(), chunk_tokens=1, precision=precision, tensor_overlap=True
    )
