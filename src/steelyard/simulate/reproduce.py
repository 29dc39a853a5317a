"""Published speed-ups of core-attention disaggregation, simulated: configurations of arXiv 2510.18121, tables 3 and 4.

Baseline: the best of a sweep over data × context (and micro-batches in 4D) of whole-document packing with
per-document context parallelism (WLB), its keys gathered before attention. Against it: attention dispatched to servers
with ping-pong, by the published idea of a planner (`greedy`) and by ours. How the baseline is simulated is a chain of
`ASSUMPTIONS`: from the best that we can build to what the publication's own text and code say, one change at a time.

Two nano-batches hold half of a batch each, so a long document may have to be cut where the baseline keeps it whole. The
attention that this saves is added to the dispatched time again: both sides compute the same pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.cost.profiles import load_profile
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import ModelShape, model_shape
from steelyard.errors import SteelyardError
from steelyard.simulate.documents import Documents
from steelyard.simulate.published import points_of
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.workloads import WorkloadCache

OVERHEADS = (0.0, 0.05, 0.10, 0.15)
HIDDEN = (0.0, 0.5, 1.0)
SEQUENCES = (1, 2)
"""Sequences of a baseline's micro-batch: more of them are packed better, fewer leave smaller bubbles."""
STAGES = {"3D": 1, "4D": 2}
"""4D means a pipeline: two stages on both sides, as in almost all of the published lists of runs."""
CONTEXTS = (1, 2, 4, 8, 16, 32)
LISTED_SPLIT = (4, 2)
LISTED_MICRO_BATCHES = {131072: 8, 262144: 4, 393216: 4, 524288: 4}
"""Context and stages of the baseline, and its micro-batches by context, in the published lists of final 4D runs."""
BREAKPOINTS = {"llama-8b": 64_000, "llama-34b": 131_072}
"""Where attention is taken to cost as much as the rest, as the published scripts set it for each model."""


def published_shape(name: str) -> ModelShape:
    """The model of table 2 of the publication: its 34B has twice the key heads of Code Llama 34B."""
    shape = model_shape(name)
    return dataclasses.replace(shape, kv_heads=16) if name == "llama-34b" else shape


@dataclass(frozen=True)
class Assumptions:
    """How the two sides are simulated.

    Attributes:
        name: of the row in reports.
        published_packing: documents are packed by the published weights and cap (`simulate.packing`); else by the
            planner's `wlb`.
        largest_context: of the baseline's sweep.
        published_layer: recomputation of the feed-forward layer only and exposed transfers of the tensor axis, as in
            the published code; else token-wise recomputation and overlapped transfers.
        listed: in 4D no sweep, but the degrees and micro-batches of the published lists of final runs.
    """

    name: str
    published_packing: bool = False
    largest_context: int = 8
    published_layer: bool = False
    listed: bool = False

    @property
    def choices(self) -> dict[str, Any]:
        """What the scenarios of both sides get."""
        if self.published_layer:
            return {"recompute": "feed_forward", "tensor_overlap": False}
        return {"recompute": "token_wise", "tensor_overlap": True}


IDEAL = Assumptions("best that we can build")
PACKED = Assumptions("+ packed by the published weights and cap", published_packing=True)
PUBLISHED = Assumptions(
    "+ published recomputation and transfers, context up to 32",
    published_packing=True, largest_context=32, published_layer=True,
)  # fmt: skip
LISTED = dataclasses.replace(
    PUBLISHED, name="+ in 4D: degrees and micro-batches of the published run lists", listed=True
)  # fmt: skip
ASSUMPTIONS = (IDEAL, PACKED, PUBLISHED, LISTED)


@dataclass(frozen=True)
class SpeedUp:
    """One published configuration with one stream of documents.

    Attributes:
        model, parallelism, devices, context_tokens, stream: which.
        baseline_s: step time of the best baseline by name of the assumptions, nothing of its gather hidden.
        hidden_s: the same under the last assumptions, by share of the gather that is hidden.
        baseline: its degrees, under the last assumptions.
        overlapped_s: of the best baseline whose gather runs beside attention, under the last assumptions.
        greedy_s: dispatched attention by name of the assumptions, without overhead.
        ours_s: the same with our planner, under the last assumptions.
        pairs_kept: share of the pairs that the dispatched step computed before the correction.
        tight: the dispatched configuration does not surely fit.
    """

    model: str
    parallelism: str
    devices: int
    context_tokens: int
    stream: str
    baseline_s: Mapping[str, float]
    hidden_s: Mapping[float, float]
    baseline: str
    overlapped_s: float
    greedy_s: Mapping[str, float]
    ours_s: float
    pairs_kept: float
    tight: bool

    def under(self, assumptions: Assumptions) -> float:
        """Speed-up of `greedy` under these assumptions."""
        return self.baseline_s[assumptions.name] / self.greedy_s[assumptions.name]

    def speed_up(self, *, planner: str = "greedy", overhead: float = 0.0, hidden: float = 0.0) -> float:
        """Under the last assumptions."""
        dispatched = self.greedy_s[LISTED.name] if planner == "greedy" else self.ours_s
        return self.hidden_s[hidden] / (dispatched * (1 + overhead))


def configurations(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rows of tables 3 and 4."""
    for table in content["tables"][:2]:
        yield from points_of(table)


@dataclass(frozen=True)
class Run:
    """One row of the published run tables: measured, and simulated under `PUBLISHED` (with our planner too, or None).

    Attributes:
        what: devices and split, or "dispatched".
        stream, context_tokens: which documents.
        measured_s, simulated_s: mean step time; of a dispatched row `greedy`.
        ours_s: of a dispatched row: planned by ours.
    """

    what: str
    stream: str
    context_tokens: int
    measured_s: float
    simulated_s: float
    ours_s: float | None


def simulate_run(point: Mapping[str, Any], documents: Documents) -> Run:
    """One row of `distca_runs`."""
    cache, batches = WorkloadCache(documents), len(documents.batches)
    ours_s = None
    if point["mode"] == "baseline":
        context, stage = int(point["cp"]), int(point["pp"])
        degrees = Degrees(int(point["n_gpus"]) // (8 * context * stage), 8, context, stage)
        scenario = baseline(point, degrees, int(point["micro_batches"]), PUBLISHED)
        simulated_s = simulate_step(scenario, cache, batches=batches).step_time_s
        what = str(degrees)
    else:
        greedy = dispatched({**point, "parallelism": "3D"}, PUBLISHED, cache, batches)
        assert greedy is not None, "a published run can be laid out"
        simulated_s, what = whole_s(greedy), "dispatched"
        ours_s = whole_s(simulate_step(with_our_planner(greedy.scenario), cache, batches=batches))
    return Run(
        what, str(point["dataset"]), int(point["max_doc_len"]), float(point["step_time_s"]), simulated_s, ours_s
    )  # fmt: skip


def _scenario(point: Mapping[str, Any], degrees: Degrees, **choices: Any) -> Scenario:
    return Scenario(
        model=published_shape(str(point["model"])), profile=load_profile("h200"), degrees=degrees, kernel="fa2",
        skip_optimizer=True, chunked_loss=True, **choices,
    )  # fmt: skip


def _estimate(scenario: Scenario, cache: WorkloadCache, batches: int) -> StepEstimate | None:
    try:
        return simulate_step(scenario, cache, batches=batches)
    except SteelyardError:
        return None


def baseline(point: Mapping[str, Any], degrees: Degrees, micro_batches: int, assumptions: Assumptions) -> Scenario:
    """One split of the baseline."""
    tokens = int(point["tokens_per_batch"])
    return _scenario(
        point, degrees, policy="wlb", micro_batches=micro_batches,
        chunk_tokens=tokens // (degrees.lanes * micro_batches),
        packing_breakpoint=BREAKPOINTS[str(point["model"])] if assumptions.published_packing else 0,
        **assumptions.choices,
    )  # fmt: skip


def _splits(point: Mapping[str, Any], assumptions: Assumptions) -> Iterator[tuple[Degrees, int]]:
    """Every data × context split and number of micro-batches that holds the longest document and its tokens."""
    ranks, tokens = int(point["n_gpus"]) // 8, int(point["tokens_per_batch"])
    longest = int(point["max_doc_len"])
    listed = assumptions.listed and point["parallelism"] == "4D"
    stage = STAGES[str(point["parallelism"])]
    for context in CONTEXTS:
        if listed and (context, stage) != LISTED_SPLIT:
            continue
        if context > assumptions.largest_context or ranks % (context * stage):
            continue
        data = ranks // (context * stage)
        per_group = tokens // data
        if per_group * data != tokens or per_group < longest:
            continue
        most = per_group // longest
        counts = {1} if point["parallelism"] == "3D" else {most // s for s in SEQUENCES if most % s == 0}
        if listed:
            counts = {LISTED_MICRO_BATCHES[longest]}
        for micro in sorted(counts):
            if per_group % (micro * context) == 0:
                yield Degrees(data, 8, context, stage), micro


def _baselines(
    point: Mapping[str, Any], assumptions: Assumptions, cache: WorkloadCache, batches: int
) -> list[StepEstimate]:
    found = (
        _estimate(baseline(point, degrees, micro, assumptions), cache, batches)
        for degrees, micro in _splits(point, assumptions)
    )
    laid_out = [e for e in found if e is not None]
    return [e for e in laid_out if e.memory.verdict != "does not fit"] or laid_out  # the publication ran them all


def dispatched(
    point: Mapping[str, Any], assumptions: Assumptions, cache: WorkloadCache, batches: int
) -> StepEstimate | None:
    """Dispatched attention planned by `greedy`; two nano-batches of a rank hold a context."""
    ranks, tokens = int(point["n_gpus"]) // 8, int(point["tokens_per_batch"])
    longest, stage = int(point["max_doc_len"]), STAGES[str(point["parallelism"])]
    per_lane = tokens * stage // ranks
    chunk = min(longest, per_lane) // 2
    micro = per_lane // (2 * chunk)
    if ranks % stage or micro * 2 * chunk * ranks != tokens * stage or micro < stage:
        return None
    scenario = _scenario(
        point, Degrees(ranks // stage, 8, 1, stage), policy="balanced", planner="greedy", ping_pong=True,
        micro_batches=micro, chunk_tokens=chunk, tolerance=0.1, keep_received=False, **assumptions.choices,
    )  # fmt: skip
    return _estimate(scenario, cache, batches)


def with_our_planner(scenario: Scenario) -> Scenario:
    """The same step planned by ours, which may choose where documents lie."""
    return scenario.replace(planner="balanced", tolerance=0.05, layout="chosen")


def whole_s(estimate: StepEstimate) -> float:
    """Step time if no document had been cut: attention in proportion to its pairs."""
    return estimate.step_time_s * (1 + estimate.shares["attention"] * (1 / estimate.pairs_kept - 1))


def reproduce(point: Mapping[str, Any], documents: Documents) -> SpeedUp | None:
    """Simulate one configuration over the batches of `documents`; None where it cannot be laid out."""
    cache, batches = WorkloadCache(documents), len(documents.batches)
    baseline_s: dict[str, float] = {}
    greedy_s: dict[str, float] = {}
    baselines: list[StepEstimate] = []
    greedy: StepEstimate | None = None
    for assumptions in ASSUMPTIONS:
        baselines = _baselines(point, assumptions, cache, batches)
        greedy = dispatched(point, assumptions, cache, batches)
        if not baselines or greedy is None:
            return None
        baseline_s[assumptions.name] = min(e.step_time_s for e in baselines)
        greedy_s[assumptions.name] = whole_s(greedy)
    assert greedy is not None, "there are assumptions"
    ours = simulate_step(with_our_planner(greedy.scenario), cache, batches=batches)

    def best_s(**changes: Any) -> float:
        again = (simulate_step(e.scenario.replace(**changes), cache, batches=batches) for e in baselines)
        return min(e.step_time_s for e in again)

    return SpeedUp(
        model=str(point["model"]),
        parallelism=str(point["parallelism"]),
        devices=int(point["n_gpus"]),
        context_tokens=int(point["max_doc_len"]),
        stream=documents.name,
        baseline_s=baseline_s,
        hidden_s={h: best_s(hidden_gather=h) for h in HIDDEN},
        baseline=str(min(baselines, key=lambda e: e.step_time_s).scenario.degrees),
        overlapped_s=best_s(context_exchange="gather_overlapped"),
        greedy_s=greedy_s,
        ours_s=whole_s(ours),
        pairs_kept=ours.pairs_kept,
        tight=ours.memory.verdict != "fits",
    )
