"""Many configurations at once: which ones exist, what each does, and why others are refused."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from steelyard.cost.peak_memory import Recompute
from steelyard.cost.profiles import DeviceProfile, Precision
from steelyard.domain.degrees import Degrees, Sharding
from steelyard.domain.model_shape import ModelShape
from steelyard.errors import SteelyardError
from steelyard.simulate.answer import dominant_cause
from steelyard.simulate.documents import Documents
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
    refused = ""
    if memory.verdict == "does not fit":
        largest = max(memory.parts().items(), key=lambda part: part[1])
        refused = f"does not fit: {memory.expected / 2**30:.0f} GiB, most of it {largest[0]}"
    return Outcome(
        estimate.scenario, estimate.step_time_s, estimate.tokens_per_s_per_device, estimate.mfu_causal,
        memory.expected / 2**30, memory.verdict, dominant_cause(estimate), refused,
        estimate.pairs_kept,
    )  # fmt: skip


def spread_evenly(items: Sequence[Scenario], limit: int) -> list[Scenario]:
    """At most `limit` of them, spread evenly in their order."""
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def sweep(
    scenarios: Sequence[Scenario], documents: Documents, *, batches: int = 2, seed: int = 0, processes: int = 2
) -> list[Outcome]:
    """Estimate all of them, over `processes` worker processes; the order is kept.

    Configurations that need the same plans go to the same process, which plans once.
    """
    if processes <= 1 or len(scenarios) < 40:
        cache = WorkloadCache(documents)
        return [outcome_of(s, cache, batches=batches, seed=seed) for s in scenarios]
    groups: dict[object, list[int]] = {}
    for index, scenario in enumerate(scenarios):
        groups.setdefault(scenario.request(batches, seed), []).append(index)
    # Long lists first, so that no process ends with one of them.
    lists = sorted(groups.values(), key=lambda m: (-scenarios[m[0]].micro_batches * len(m), m[0]))
    tasks = [(documents, [scenarios[i] for i in members], batches, seed) for members in lists]
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    with _interrupts_held_back():
        pool = context.Pool(min(processes, len(tasks)), _ignore_interrupts)
    with pool:  # whatever happens here, its end ends the workers
        found = [outcome for part in pool.map(_task, tasks, chunksize=1) for outcome in part]
    by_index = dict(zip(itertools.chain(*lists), found, strict=True))
    return [by_index[i] for i in range(len(scenarios))]


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C in here comes afterwards. What is started in here does not get it at all: a terminal sends it to all
    processes of a command, and every worker would print a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _task(task: tuple[Documents, list[Scenario], int, int]) -> list[Outcome]:
    documents, scenarios, batches, seed = task
    cache = WorkloadCache(documents)
    return [outcome_of(s, cache, batches=batches, seed=seed) for s in scenarios]


def base_scenario(model: ModelShape, profile: DeviceProfile, precision: Precision) -> Scenario:
    """What a search starts from: everything that is not chosen."""
    return Scenario(
        model=model, profile=profile, degrees=Degrees(), chunk_tokens=1, precision=precision, tensor_overlap=True
    )
