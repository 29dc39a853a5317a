"""Which configuration to take: the best of a sweep, and why the others were refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.cost.profiles import load_profile
from steelyard.errors import UsageError
from steelyard.simulate.answer import CAUSES
from steelyard.simulate.config import SimulateConfig
from steelyard.simulate.documents import Documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.sweep import Outcome, SearchSpace, base_scenario, candidates, outcome_from, spread_evenly, sweep
from steelyard.simulate.workloads import WorkloadCache

FINALISTS = 8
KEPT = 0.95
"""Configurations that cut so many documents that less than this of the attention work is left come last: they compute
another function."""


@dataclass(frozen=True, eq=False)
class Advice:
    """What came of a search.

    Attributes:
        outcomes: all configurations that were tried: those of `best` first, in its order, refused ones last. What is
            in `best` was estimated over all batches, everything else over few of them.
        unfit: reasons of those that were refused without trying, with their number.
        untried: how many more there are that the limit left out.
        best: estimates of those that fit and are fastest, over all batches, best first.
        documents: the stream.
    """

    outcomes: list[Outcome]
    unfit: dict[str, int]
    untried: int
    best: list[StepEstimate]
    documents: Documents

    @property
    def fit(self) -> int:
        """How many of those that were tried fit, tightly or not."""
        return sum(not o.refused for o in self.outcomes)

    @property
    def kernel(self) -> str:
        """Attention kernel generation of all of them."""
        return (self.best[0].scenario if self.best else self.outcomes[0].scenario).kernel_name

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
    seed = config.sampling.seed
    outcomes = sweep(spread_evenly(tried, limit), documents, seed=seed, processes=processes)
    outcomes.sort(key=_place)
    best, late = _best_of(outcomes, WorkloadCache(documents), batches=config.sampling.batches, seed=seed)
    done = len(best) + len(late)
    ordered = sorted([*late, *outcomes[done:]], key=_place)
    return Advice(
        [*map(outcome_from, best), *ordered], dict(unfit), len(tried) - len(outcomes), best, documents
    )  # fmt: skip


def _place(outcome: Outcome) -> tuple[bool, bool, bool, float]:
    """What sorts the best first: it fits, computes all of the attention, fits surely, is fast."""
    o = outcome
    return bool(o.refused), o.pairs_kept < KEPT, o.verdict != "fits", -o.tokens_per_s_per_device


def _best_of(
    outcomes: Sequence[Outcome], cache: WorkloadCache, *, batches: int, seed: int
) -> tuple[list[StepEstimate], list[Outcome]]:
    """The first ones estimated over all batches, best first, until there are enough that fit; and those among them that
    turn out not to fit, since a later batch has more in memory."""
    best: list[tuple[Outcome, StepEstimate]] = []
    late: list[Outcome] = []
    for outcome in outcomes:
        if outcome.refused or len(best) == FINALISTS:
            break
        estimate = simulate_step(outcome.scenario, cache, batches=batches, seed=seed)
        again = outcome_from(estimate)
        if again.refused:
            late.append(again)
        else:
            best.append((again, estimate))
    best.sort(key=lambda pair: _place(pair[0]))
    return [estimate for _, estimate in best], late


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
        "refused": [{"reason": r, "configurations": n} for r, n in advice.refusals.items()],
        "sampler": f"{advice.documents.name}, {advice.documents.sampler}",
    }  # fmt: skip
