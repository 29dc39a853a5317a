"""The form of an answer: verdict, number with its band, dominating cause, what to try next, what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.cost.peak_memory import MemoryEstimate, Verdict
from steelyard.domain.model_shape import ModelShape
from steelyard.domain.units import format_bytes
from steelyard.errors import UsageError
from steelyard.simulate.documents import Documents
from steelyard.simulate.engine import IMBALANCE, LATE_TRANSFERS
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.workloads import WorkloadCache

CAUSES: Mapping[str, str] = {
    "token_wise": "token-wise matrix products",
    "attention": "core attention",
    "head": "output head and loss",
    "tensor transfers": "exposed transfers of the tensor axis",
    "exchange": "exposed exchange of queries, keys or outputs",
    "sharded parameters": "exposed gathering of sharded parameters",
    LATE_TRANSFERS: "waiting for a rank whose transfers take longer",
    IMBALANCE: "waiting for a rank that works longer",
    "pipeline bubble": "pipeline bubble",
    "gradient reduction": "exposed reduction of gradients",
    "optimizer": "optimizer step",
    "overhead": "host and launch overhead",
}


MOST_PLANNED = 4096
"""Plans times ranks for which a suggestion is simulated; the answer for thousands of devices is not to wait for it."""
VERDICTS: Sequence[Verdict] = ("fits", "tight", "does not fit")
LEAST_GAIN, LEAST_LESS, LESS_CUT = 1.01, 0.99, 0.02
"""A suggestion is faster by a hundredth at least, needs less memory by one, or leaves two more of the pairs."""


@dataclass(frozen=True)
class Suggestion:
    """A configuration to try next.

    Attributes:
        change: what to change, in words.
        step_time_s, tokens_per_s_per_device, verdict: what it would do.
        reason: why.
    """

    change: str
    step_time_s: float
    tokens_per_s_per_device: float
    verdict: str
    reason: str


def dominant_cause(estimate: StepEstimate) -> str:
    """The name of `PARTS` with most device time."""
    return max(estimate.shares, key=lambda name: estimate.shares[name])


def not_modelled(scenario: Scenario, documents: Documents) -> list[str]:
    """What the estimate leaves out, in words, for this scenario."""
    left = [
        "contention between transfers of different axes on one port",
        "device clocks under load, other jobs on the same network",
        "failures, restarts and checkpoints",
        "reading and tokenizing of documents",
    ]
    if documents.sampler == "shuffle":
        left.append("the real order of documents: lengths are drawn at random")
    if scenario.degrees.stage > 1 and scenario.policy == "balanced":
        left.append("lockstep pipelines: schedule only, the runtime does not run them yet")
    if scenario.speeds:
        left.append(
            "unequal devices, but for their speed at matrix products and the memory of the smallest: attention, "
            "transfers and MFU are those of cluster.device"
        )
    if "B200" in scenario.profile.name:
        left.append("B200: constants fitted on two published rows, not on a profile of the device")
    return left


def as_json(
    estimate: StepEstimate, documents: Documents, suggestions: list[Suggestion] | None = None
) -> dict[str, Any]:
    """The contract of `steelyard simulate --json`, with the split and the suggestions beside it."""
    low, high = estimate.band_s
    memory = estimate.memory
    return {
        "step_time_s": estimate.step_time_s,
        "step_time_band_s": [low, high],
        "step_time_std_s": float(estimate.step_s.std()),
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "mfu": estimate.mfu,
        "mfu_causal": estimate.mfu_causal,
        "memory_gib_by_rank_max": memory.expected / 2**30,
        "memory_band_gib": [memory.low / 2**30, memory.high / 2**30],
        "memory_capacity_gib": memory.capacity / 2**30,
        "memory_parts_gib": {k: v / 2**30 for k, v in memory.parts().items()},
        "verdict": memory.verdict,
        "dominant": dominant_cause(estimate),
        "dominant_text": CAUSES[dominant_cause(estimate)],
        "idle_share": estimate.idle_share,
        "bubble_share": estimate.bubble_share,
        "exposed_comm_share": estimate.exposed_comm_share,
        "split": dict(estimate.shares),
        "pairs_kept": estimate.pairs_kept,
        "device": estimate.scenario.profile.name,
        "devices": estimate.scenario.degrees.devices,
        "policy": estimate.scenario.policy,
        "kernel": estimate.scenario.kernel_name,
        "degrees": str(estimate.scenario.degrees),
        "tokens_per_step": estimate.tokens,
        "batches": len(estimate.step_s),
        "sampler": f"{documents.name}, {documents.sampler}",
        "next": [s.__dict__ for s in suggestions or []],
        "not_modelled": not_modelled(estimate.scenario, documents),
    }


def next_configurations(
    estimate: StepEstimate, cache: WorkloadCache, *, batches: int, seed: int, count: int = 2
) -> list[Suggestion]:
    """The best configurations one step away, with as many devices and tokens: what they would do, and why.

    Fewer than `count`, or none, where no more are known to be better.
    """
    found: list[tuple[tuple[float, ...], Suggestion]] = []
    base = estimate.scenario
    planned = base.degrees.lanes * base.degrees.stage * base.micro_batches * base.nano_batches
    few = max(1, min(batches, 4, MOST_PLANNED // planned))
    for change, reason, scenario in neighbours_of(base):
        try:
            other = simulate_step(scenario, cache, batches=few, seed=seed)
        except UsageError:
            continue
        gain = float(estimate.step_s[: len(other.step_s)].mean()) / other.step_time_s  # on the same batches
        whole = other.pairs_kept > estimate.pairs_kept + LESS_CUT
        worth = _worth(estimate.memory, other.memory, gain, whole=whole)
        if worth is None:
            continue
        verdict = other.memory.verdict
        memory = f" ({format_bytes(other.memory.expected)})" if verdict == "does not fit" else ""
        cut = f" with {other.pairs_kept:.0%} of the pairs, not {estimate.pairs_kept:.0%}" if whole else ""
        suggestion = Suggestion(
            change, other.step_time_s, other.tokens_per_s_per_device, verdict,
            f"{reason}: {gain:.2f}× the speed{cut}, {verdict}{memory}",
        )  # fmt: skip
        found.append((worth, suggestion))
    found.sort(key=lambda f: f[0], reverse=True)
    of_kind: dict[str, Suggestion] = {}  # two values of one choice would crowd out another
    for _, suggestion in found:
        of_kind.setdefault(suggestion.change.partition(" = ")[0], suggestion)
    return list(of_kind.values())[:count]


def _worth(own: MemoryEstimate, other: MemoryEstimate, gain: float, *, whole: bool) -> tuple[float, ...] | None:
    """By what suggestions are ordered, more is better; None: no reason to try it.

    Worth a try is what fits better, and what fits as well and is faster. Where nothing fits, it is what needs less.

    Args:
        whole: it leaves more documents whole, and so computes what the other does not: that may take longer.
    """
    better = VERDICTS.index(own.verdict) - VERDICTS.index(other.verdict)
    if better < 0 or (better == 0 and own.verdict != "does not fit" and gain < LEAST_GAIN and not whole):
        return None
    if other.verdict != "does not fit":
        return better, gain
    return (0.0, -other.expected) if other.expected < LEAST_LESS * own.expected else None


def neighbours_of(base: Scenario) -> list[tuple[str, str, Scenario]]:
    """Configurations one decision away that run the same tokens per step on the same devices."""
    found: list[tuple[str, str, Scenario]] = []

    def add(change: str, reason: str, **changes: Any) -> None:
        try:
            scenario = base.replace(**changes)
            scenario.check(base.degrees.devices)
        except UsageError:
            return
        if scenario.tokens_per_step == base.tokens_per_step:
            found.append((change, reason, scenario))

    d = base.degrees
    if base.policy != "balanced":
        add("policy = balanced", "attention work is spread over all ranks", policy="balanced",
            degrees=type(d)(d.data, d.tensor, d.context, d.stage))  # fmt: skip
    elif not base.ping_pong and base.micro_batches % 2 == 0:
        micro_batches = base.micro_batches // 2
        add(f"ping_pong = true, micro_batches = {micro_batches}", "transfers hide under the other half's work",
            ping_pong=True, micro_batches=micro_batches)  # fmt: skip
    elif not base.ping_pong and base.chunk_tokens % 2 == 0:
        add(f"ping_pong = true, chunk_tokens = {base.chunk_tokens // 2}", "transfers hide under the other half's work",
            ping_pong=True, chunk_tokens=base.chunk_tokens // 2)  # fmt: skip
    if base.policy == "balanced" and base.layout == "contiguous" and not base.cut_documents and d.stage == 1:
        add("layout = chosen", "the planner places documents so that less has to travel", layout="chosen")
    if base.chunk_tokens % 2 == 0 and base.policy == "balanced":
        half, twice = base.chunk_tokens // 2, base.micro_batches * 2
        add(f"chunk_tokens = {half}, micro_batches = {twice}", "fewer activations at once",
            chunk_tokens=half, micro_batches=twice)  # fmt: skip
    if base.micro_batches % 2 == 0 and base.policy == "balanced":
        add(f"chunk_tokens = {base.chunk_tokens * 2}, micro_batches = {base.micro_batches // 2}",
            "more documents to balance at once", chunk_tokens=base.chunk_tokens * 2,
            micro_batches=base.micro_batches // 2)  # fmt: skip
    for name in base.profile.kernels:
        if base.kernel == "auto" and base.profile.kernel(name) != base.profile.kernel():
            add(f"kernel = {name}", "another generation of the attention kernel", kernel=name)
    if base.recompute == "none":
        add("recompute = token_wise", "less memory", recompute="token_wise")
    else:
        add("recompute = none", "nothing is computed twice", recompute="none")
    if base.sharding != "full" and d.stage == 1:
        add("sharding = full", "state is sharded over all ranks", sharding="full")
    elif base.sharding == "full":
        add("sharding = optimizer", "parameters are not gathered", sharding="optimizer")
    # Other policies than balanced would cut documents elsewhere, and compute another function.
    for tensor in (d.tensor // 2, d.tensor * 2) if base.policy == "balanced" else ():
        factor = d.tensor / tensor if tensor else 0
        data = int(d.data * factor)
        if tensor and data * tensor == d.data * d.tensor:
            # Fewer tensor ranks hold more lanes of fewer tokens each, so that a step keeps its tokens.
            tokens = int(base.chunk_tokens / factor)
            if tokens * data == base.chunk_tokens * d.data:
                other = type(d)(data, tensor, d.context, d.stage, d.virtual_stages)
                change = f"tensor = {tensor}, data = {data}, chunk_tokens = {tokens}"
                add(change, "another tensor degree", degrees=other, chunk_tokens=tokens)
    if d.stage > 1 and d.virtual_stages == 1 and base.policy != "balanced":
        add("virtual_stages = 2", "a smaller pipeline bubble", degrees=type(d)(d.data, d.tensor, d.context, d.stage, 2))
    if base.policy == "per_document_cp" and base.context_exchange == "gather":
        add("context_exchange = gather_overlapped", "keys travel under work", context_exchange="gather_overlapped")
    return found


def model_text(shape: ModelShape) -> str:
    """A model in a few words."""
    return f"{shape.name} ({shape.parameters / 1e9:.1f} B parameters)"
