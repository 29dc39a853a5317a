"""Which configuration to take: the best of a sweep, and why the others were refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.cost.peak_memory import CHUNKED_SHARE
from steelyard.cost.profiles import load_profile
from steelyard.errors import UsageError
from steelyard.simulate.answer import CAUSES, Suggestion
from steelyard.simulate.config import SimulateConfig
from steelyard.simulate.documents import Documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.search import LAST, Search, place_at_best, place_of
from steelyard.simulate.step import StepEstimate
from steelyard.simulate.sweep import Outcome, SearchSpace, base_scenario, candidates, outcome_from

FINALISTS = 8
CONTENDERS = 12
"""So many are estimated over all batches, and the best are listed: over a few batches neighbours change places."""
WORTH = 1.02
"""What is offered beside the search must be this many times as fast as the best."""


@dataclass(frozen=True, eq=False)
class Advice:
    """What came of a search.

    Attributes:
        outcomes: all configurations that were tried: those of `best` first, in its order, refused ones last. What is
            in `best` was estimated over all batches, everything else over few of them.
        unfit: reasons of those that were refused without trying, with their number.
        slower: how many were not tried because, whatever their plans, they cannot be among the best over few batches.
        untried: how many more there are that the limit left out: those that promise least.
        best: estimates of those that fit and are fastest, over all batches, best first.
        documents: the stream.
        kernel: attention kernel generation of all of them.
        next: choices outside the search that would make the best one faster, or any fit.
    """

    outcomes: list[Outcome]
    unfit: dict[str, int]
    slower: int
    untried: int
    best: list[StepEstimate]
    documents: Documents
    kernel: str
    next: list[Suggestion] = field(default_factory=list)

    @property
    def fit(self) -> int:
        """How many of those that were tried fit, tightly or not."""
        return sum(not o.refused for o in self.outcomes)

    @property
    def configurations(self) -> int:
        """All that there are: tried, refused without trying, too slow for the list, and left out."""
        return len(self.outcomes) + sum(self.unfit.values()) + self.slower + self.untried

    @property
    def refusals(self) -> dict[str, int]:
        """Reasons with the number of configurations, most frequent first."""
        found: Counter[str] = Counter(self.unfit)
        for o in self.outcomes:
            if o.refused:
                found["does not fit in memory" if o.refused.startswith("does not fit") else o.refused] += 1
        return dict(found.most_common())


def advise(config: SimulateConfig, *, tokens_per_step: int, limit: int = 1000, processes: int = 2) -> Advice:
    """Search the configurations of a model on a cluster for a token budget per step.

    Raises:
        UsageError: no configuration has that many tokens, or a document is longer than a step.
    """
    _refuse_ignored(config)
    devices, profile = config.devices(), load_profile(config.cluster.device)
    documents = config.documents.documents(config.documents.context_tokens or tokens_per_step)
    longest = config.check_context(documents)
    if longest > tokens_per_step:
        raise UsageError(
            f"advise: a document has {longest} tokens, more than tokens_per_step={tokens_per_step}; nearest: {longest}"
        )
    config.check_number(documents, tokens_per_step)
    base = base_scenario(config.model.shape(), profile, config.run.precision).replace(
        kernel=config.run.kernel, fused=config.run.fused, tolerance=config.run.tolerance,
        chunked_loss=config.run.chunked_loss, mixed_precision=config.run.mixed_precision,
        tensor_overlap=config.parallel.tensor_overlap, layout=config.run.layout,
        extra_overhead=config.run.extra_overhead,
        exchange_overhead_s=config.run.exchange_overhead_s,
        hidden_gather=config.run.hidden_gather, skip_optimizer=config.run.skip_optimizer,
        keep_received=config.run.keep_received, cut_documents=config.documents.cut_at_chunks,
        sequence_parallel=config.parallel.sequence_parallel, context_exchange=config.parallel.context_exchange,
        gradient_overlap=config.parallel.gradient_overlap,
    )  # fmt: skip
    base.profile.peak_flops(base.precision)
    space = SearchSpace(base, devices, tokens_per_step, longest)
    tried: list[Scenario] = []
    unfit: Counter[str] = Counter()
    for candidate in candidates(space):
        if isinstance(candidate, tuple):
            unfit[candidate[1]] += 1
        else:
            tried.append(candidate)
    if not tried:
        reasons = "; ".join(unfit)
        raise UsageError(
            f"advise: no configuration of {devices} devices has {tokens_per_step} tokens a step ({reasons}); nearest: "
            f"a multiple of {devices * 128}"
        )
    search = Search(tried, documents, seed=config.sampling.seed, processes=processes, limit=limit)
    with search:
        best, behind = _best_of(search, config.sampling.batches)
    rescue = None if base.chunked_loss else _chunked_loss(search, best, documents, config.sampling.batches, processes)
    again = {number for number, _ in [*best, *behind]}
    others = [(number, outcome) for number, outcome in search.outcomes.items() if number not in again]
    others += [(number, outcome_from(estimate)) for number, estimate in behind]
    rest = sorted(others, key=lambda found: (place_of(found[1]), found[0]))
    unfit["does not fit in memory"] += len(search.refused)
    return Advice(
        outcomes=[*(outcome_from(e) for _, e in best), *(outcome for _, outcome in rest)],
        unfit=dict(+unfit),
        slower=search.slower,
        untried=search.untried,
        best=[estimate for _, estimate in best],
        documents=documents,
        kernel=base.kernel_name,
        next=[rescue] if rescue else [],
    )


def _best_of(search: Search, batches: int) -> tuple[list[tuple[int, StepEstimate]], list[tuple[int, StepEstimate]]]:
    """The first ones estimated over all batches until there are enough that fit: the best of them, best first; and the
    others, with those that turn out not to fit, since a later batch has more in memory. All with their numbers."""
    found: dict[int, StepEstimate] = {}
    want = CONTENDERS
    while True:
        search.run(want)
        first = [number for number, outcome in search.ranking()[:want] if not outcome.refused]
        found |= search.estimates([number for number in first if number not in found], batches)
        late = [(n, e) for n, e in found.items() if e.memory.verdict == "does not fit"]
        if len(first) < want or want - len(late) >= CONTENDERS:
            break
        want = CONTENDERS + len(late)
    fit = [(n, e) for n, e in found.items() if e.memory.verdict != "does not fit"]
    fit.sort(key=lambda pair: (place_of(outcome_from(pair[1])), pair[0]))
    return fit[:FINALISTS], [*fit[FINALISTS:], *late]


def _chunked_loss(
    search: Search, best: Sequence[tuple[int, StepEstimate]], documents: Documents, batches: int, processes: int
) -> Suggestion | None:
    """What fits, and is better than all that do, once the loss is computed chunk by chunk, which takes no longer.

    Tried are those that do not fit, or only tightly, and promise more than the best.
    """
    most = LAST
    if best:
        refused, cuts, tight, seconds = place_of(outcome_from(best[0][1]))
        most = refused, cuts, tight, seconds / WORTH
    tried = [(o.scenario, None) for o in search.outcomes.values() if o.verdict in ("tight", "does not fit")]
    twins = []
    for scenario, at_best in [*((r.scenario, r.at_best) for r in search.refused), *tried]:
        if at_best is None or place_at_best(at_best.with_chunked_loss()) < most:
            twins.append(scenario.replace(chunked_loss=True))
    room = search.limit - len(search.outcomes)
    if not twins or room < 1:
        return None
    with Search(twins, documents, seed=search.seed, processes=processes, limit=room, ahead=4) as other:
        other.run(1)
        first = [number for number, outcome in other.ranking()[:1] if place_of(outcome) < most]
        if not first:
            return None
        found = other.estimates(first, batches)[first[0]]
    if not place_of(outcome_from(found)) < most:
        return None
    speed, verdict = found.tokens_per_s_per_device, "fits" if found.memory.verdict == "fits" else "fits tightly"
    gain = f"{speed / best[0][1].tokens_per_s_per_device:.2f}× the speed of the best above, " if best else "then it "
    saved = found.memory.logits * (1 / CHUNKED_SHARE - 1) / 2**30
    return Suggestion(
        f"run.chunked_loss = true: {describe(found.scenario)}", found.step_time_s, speed, found.memory.verdict,
        f"the logits take {saved:.0f} GiB less: {gain}{verdict}",
    )  # fmt: skip


def _refuse_ignored(config: SimulateConfig) -> None:
    """A search over degrees cannot keep what belongs to single ranks or to one choice of degrees."""
    given = {
        "cluster.groups": config.cluster.groups,
        "cluster.slow_ranks": config.cluster.slow_ranks,
        "parallel.shard_ranks": config.parallel.shard_ranks,
        "[[sites]]": config.sites,
    }
    names = [name for name, value in given.items() if value]
    if names:
        raise UsageError(
            f"advise: the search does not take {', '.join(names)}; leave it out here, and give it to "
            "`steelyard simulate` with the configuration that you choose"
        )


def reason_for(estimate: StepEstimate) -> str:
    """Why a configuration is good and what still costs, in one line."""
    lost = {k: v for k, v in estimate.shares.items() if k not in ("token_wise", "attention", "head", "optimizer")}
    worst = max(lost, key=lambda k: lost[k])
    cut = (
        ""
        if estimate.pairs_kept > 0.99
        else f"; computes {estimate.pairs_kept:.0%} of the pairs, since it cuts documents"
    )
    return f"{estimate.mfu_causal:.0%} MFU; loses most to {CAUSES[worst]} ({lost[worst]:.0%}){cut}"


def describe(scenario: Scenario) -> str:
    """A configuration in one line."""
    parts = [scenario.policy, str(scenario.degrees), f"{scenario.micro_batches} × {scenario.chunk_tokens} tokens"]
    if scenario.ping_pong:
        parts.append("ping-pong")
    if scenario.recompute != "none":
        parts.append(f"recompute {scenario.recompute}")
    parts.append(f"sharding {scenario.sharding}")
    return ", ".join(parts)


def as_json(advice: Advice) -> dict[str, Any]:
    """What `steelyard advise --json` prints."""
    return {
        "best": [
            {
                "configuration": describe(e.scenario),
                "degrees": {
                    "data": e.scenario.degrees.data, "tensor": e.scenario.degrees.tensor,
                    "context": e.scenario.degrees.context, "stage": e.scenario.degrees.stage,
                },
                "policy": e.scenario.policy,
                "micro_batches": e.scenario.micro_batches,
                "chunk_tokens": e.scenario.chunk_tokens,
                "ping_pong": e.scenario.ping_pong,
                "recompute": e.scenario.recompute,
                "sharding": e.scenario.sharding,
                "step_time_s": e.step_time_s,
                "step_time_band_s": list(e.band_s),
                "tokens_per_s_per_device": e.tokens_per_s_per_device,
                "mfu_causal": e.mfu_causal,
                "pairs_kept": e.pairs_kept,
                "memory_gib_by_rank_max": e.memory.expected / 2**30,
                "verdict": e.memory.verdict,
                "reason": reason_for(e),
            }
            for e in advice.best
        ],
        "kernel": advice.kernel,
        "tried": len(advice.outcomes),
        "fit": advice.fit,
        "untried": advice.untried,
        "slower": advice.slower,
        "configurations": advice.configurations,
        "refused": [{"reason": r, "configurations": n} for r, n in advice.refusals.items()],
        "next": [s.__dict__ for s in advice.next],
        "sampler": f"{advice.documents.name}, {advice.documents.sampler}",
    }  # fmt: skip
