"""What the ranks measured, and the verdict on it. Without torch.

A difference is judged by the size of what it was found in: rounding grows with the numbers that are rounded. The
tolerances leave room for the rounding of deep models; a fault is two to four orders of magnitude above them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.check.request import CheckRequest, Dtype

NAMES = ("rank_count_invariance", "document_isolation", "causal", "token_weighted_loss", "label_shift", "balance")

ADVICE = {
    "rank_count_invariance": (
        "The step is not the one of its documents taken one by one: another number of ranks trains another model. If "
        "checks below fail too, mend them first. Otherwise look for what depends on a rank's share: tokens or "
        "documents dropped at the end of a batch, a loss or gradient scaled by the number of ranks, statistics over a "
        "batch."
    ),
    "document_isolation": (
        "Tokens must see their own document only. Tell attention where documents end: position ids that restart, or "
        "cu_seq_lens_q (Transformers), or doc_lens (steelyard.Balancer). An attention of the model's own that ignores "
        "them must go."
    ),
    "causal": (
        "No token may see later ones of its document, or the model reads its labels. balancer.attention sees none; "
        "an attention of the model's own needs is_causal=True or a mask. Look for what else reaches ahead: a "
        "convolution, a pooling or a norm over the sequence."
    ),
    "token_weighted_loss": (
        "The loss is not the mean over the tokens of all ranks. Sum the token losses, divide by the labels of all "
        "ranks (label_count; num_items_in_batch in Transformers), and add up the ranks. A mean of the ranks' means "
        "weighs a token of a short batch more."
    ),
    "label_shift": (
        "The loss is not next-token cross-entropy within each document. The label of a document's last token is -100; "
        "labels are shifted once, by the collator or by the model's loss, not by both. Terms besides cross-entropy "
        "(router or z-loss, label smoothing) must be off for this check."
    ),
    "balance": (
        "The busiest rank has more attention work than the tolerance allows. If attention did not pass through "
        "Steelyard, call balancer.attention, or let the model take its attention from Transformers' AttentionInterface."
    ),
}
"""What a failure means and what to do about it."""

MISSING_TOKENS = (
    "Mend this first: the collator, or what packs documents, must keep every token, also those at the end of a batch. "
    "The checks of the loss count the labels of all documents, so they may fail for the same reason."
)
"""In the place of the advice above, where a batch lacks tokens."""


@dataclass(frozen=True)
class Tolerances:
    """What rounding may do, relative to the size of the numbers.

    Attributes:
        gradient: to the largest element of a gradient, or to a hundredth of the largest of all gradients if that is
            more (some gradients are nothing but rounding: a bias of the keys does not change the softmax).
        loss: to the loss. logits: to the largest logit.
    """

    gradient: float
    loss: float
    logits: float


TOLERANCES: Mapping[Dtype, Tolerances] = {
    "float32": Tolerances(gradient=1e-4, loss=1e-5, logits=1e-5),
    # Transformers' norms and losses round to fp32 whatever the parameters are.
    "float64": Tolerances(gradient=2e-6, loss=1e-6, logits=1e-6),
}
_ROUNDING = 100.0
"""Times what is allowed, up to which a difference may still be rounding of an unusually deep or badly scaled model."""
SMALL_GRADIENT = 0.01
"""Part of the largest gradient below which a gradient's own size no longer counts."""


@dataclass(frozen=True)
class Difference:
    """A difference that was found, what is allowed there, and where it was."""

    value: float
    allowed: float
    where: str

    @property
    def ratio(self) -> float:
        """Above 1 it is too large; infinite for one that is no number."""
        if not math.isfinite(self.value):
            return math.inf
        return self.value / self.allowed if self.allowed > 0 else (math.inf if self.value > 0 else 0.0)


def worst(differences: Iterable[Difference]) -> Difference:
    """The difference nearest to what is allowed, or furthest beyond."""
    return max(differences, key=lambda d: d.ratio)


@dataclass(frozen=True)
class AloneBatch:
    """One rank's batch, computed by one process alone with its own labels.

    Attributes:
        label_count: labels that its documents have.
        loss: what the subject's loss says.
        cross_entropy: mean over those labels of next-token cross-entropy, from the logits.
    """

    label_count: int
    loss: float
    cross_entropy: float


@dataclass(frozen=True)
class ReferenceMeasure:
    """What one process found: documents one by one, and every rank's batch alone.

    Attributes:
        loss: of all documents one by one, their token mean.
        fingerprint: of the weights.
        batches: for each number of ranks, each rank's batch.
        findings: what is wrong with the collated batches, in words.
        documents, tokens, parameters: how much was checked.
    """

    loss: float
    fingerprint: float
    batches: Mapping[int, Sequence[AloneBatch]]
    findings: tuple[str, ...]
    documents: int
    tokens: int
    parameters: int


@dataclass(frozen=True)
class RankMeasure:
    """What one rank of several found.

    Attributes:
        loss: of the step, over all ranks.
        gradient: the gradient that differs most from the reference's; None on ranks other than 0.
        leak: how far outputs moved when other documents were changed.
        lookahead: how far outputs moved when later tokens of their document were changed.
        blind: an output that depends on no earlier token of its document, in words; empty if there is none.
        work: (query, key) pairs that this rank computed.
        balanced: whether attention passed through Steelyard.
        missing_tokens: tokens of its documents that its batch does not hold.
        fingerprint: of the weights.
    """

    loss: float
    gradient: Difference | None
    leak: Difference
    lookahead: Difference
    blind: str
    work: int
    balanced: bool
    missing_tokens: int
    fingerprint: float


@dataclass(frozen=True)
class CheckResult:
    """The verdict of one check.

    Attributes:
        name: one of `NAMES`.
        passed: whether it holds.
        max_abs_diff: the difference nearest to, or furthest beyond, what is allowed; not finite if there was no number.
        tolerance: what is allowed there.
        where: where that difference was.
        finding: in a failure, what was seen; empty if the difference says it all.
    """

    name: str
    passed: bool
    max_abs_diff: float
    tolerance: float
    where: str
    finding: str = ""

    @property
    def advice(self) -> str:
        """What to do about a failure."""
        return MISSING_TOKENS if self.name == "rank_count_invariance" and self.finding else ADVICE[self.name]

    @property
    def may_be_rounding(self) -> bool:
        """Whether a failure is so small that a wider type might pass: a fault that was seen, or is large, is none."""
        return self.name != "balance" and not self.finding and self.max_abs_diff <= _ROUNDING * self.tolerance

    def as_json(self) -> dict[str, Any]:
        """The keys of the contract."""
        return {
            "name": self.name,
            "passed": self.passed,
            "max_abs_diff": self.max_abs_diff,
            "tolerance": self.tolerance,
        }


@dataclass(frozen=True)
class CheckReport:
    """All verdicts, in the order of `NAMES`, and how much was checked."""

    results: tuple[CheckResult, ...]
    documents: int
    tokens: int
    parameters: int

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(result.passed for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {"checks": [result.as_json() for result in self.results]}


def judge(
    request: CheckRequest, reference: ReferenceMeasure, by_ranks: Mapping[int, Sequence[RankMeasure]]
) -> CheckReport:
    """The verdicts on what was measured."""
    tolerances = TOLERANCES[request.dtype]
    results = (
        _rank_count_invariance(reference, by_ranks, tolerances),
        _document_isolation(by_ranks),
        _result("causal", _worst_of({ranks: [m.lookahead for m in found] for ranks, found in by_ranks.items()})),
        _token_weighted_loss(reference, by_ranks, tolerances),
        _label_shift(reference, tolerances),
        _balance(request, by_ranks),
    )
    return CheckReport(results, reference.documents, reference.tokens, reference.parameters)


def processes(ranks: int) -> str:
    """'1 process', '2 processes'."""
    return f"{ranks} process{'es' * (ranks > 1)}"


def _result(name: str, difference: Difference, finding: str = "") -> CheckResult:
    passed = difference.ratio <= 1 and not finding
    return CheckResult(name, passed, difference.value, difference.allowed, difference.where, finding)


def _worst_of(by_ranks: Mapping[int, Sequence[Difference]]) -> Difference:
    """The worst of all ranks, with the number of processes where it was."""
    return worst(
        Difference(found.value, found.allowed, f"{found.where}, {processes(ranks)}")
        for ranks, differences in by_ranks.items()
        for found in differences
    )


def _rank_count_invariance(
    reference: ReferenceMeasure, by_ranks: Mapping[int, Sequence[RankMeasure]], tolerances: Tolerances
) -> CheckResult:
    differences, missing = [], ""
    for ranks, measures in by_ranks.items():
        loss = abs(measures[0].loss - reference.loss)
        differences.append(Difference(loss, tolerances.loss * abs(reference.loss), f"loss, {processes(ranks)}"))
        gradient = measures[0].gradient
        assert gradient is not None, "rank 0 compares"
        differences.append(
            Difference(gradient.value, gradient.allowed, f"gradient of {gradient.where}, {processes(ranks)}")
        )
        lost = {rank: m.missing_tokens for rank, m in enumerate(measures) if m.missing_tokens}
        if lost and not missing:
            rank, tokens = next(iter(lost.items()))
            lacks = f"{tokens} token{'s' * (tokens > 1)}"
            missing = f"with {processes(ranks)}, the batch of rank {rank} lacks {lacks} of its documents"
    return _result("rank_count_invariance", worst(differences), missing)


def _document_isolation(by_ranks: Mapping[int, Sequence[RankMeasure]]) -> CheckResult:
    difference = _worst_of({ranks: [m.leak for m in measures] for ranks, measures in by_ranks.items()})
    blind = [(ranks, m.blind) for ranks, measures in by_ranks.items() for m in measures if m.blind]
    if not blind or difference.ratio > 1:
        return _result("document_isolation", difference)
    ranks, where = blind[0]
    nothing = Difference(math.nan, difference.allowed, processes(ranks))
    return _result(
        "document_isolation",
        nothing,
        f"{where}, depends on no earlier token of it: attention sees nothing there, or its weights are zero, and a "
        "leak could not be seen either",
    )


def _token_weighted_loss(
    reference: ReferenceMeasure, by_ranks: Mapping[int, Sequence[RankMeasure]], tolerances: Tolerances
) -> CheckResult:
    differences = []
    for ranks, measures in by_ranks.items():
        batches = reference.batches[ranks]
        expected = sum(b.loss * b.label_count for b in batches) / sum(b.label_count for b in batches)
        value = abs(measures[0].loss - expected)
        differences.append(Difference(value, tolerances.loss * abs(expected), f"loss, {processes(ranks)}"))
    return _result("token_weighted_loss", worst(differences))


def _label_shift(reference: ReferenceMeasure, tolerances: Tolerances) -> CheckResult:
    difference = worst(
        Difference(
            abs(batch.loss - batch.cross_entropy),
            tolerances.loss * abs(batch.cross_entropy),
            f"documents of rank {rank} of {ranks}",
        )
        for ranks, batches in reference.batches.items()
        for rank, batch in enumerate(batches)
    )
    result = _result("label_shift", difference)
    if result.passed or not reference.findings:
        return result
    # What was seen where the difference is; elsewhere if nothing was seen there.
    there = difference.where.removeprefix("documents of ")
    finding = next((f for f in reference.findings if f.startswith(f"{there}: ")), reference.findings[0])
    return _result("label_shift", difference, finding)


def _balance(request: CheckRequest, by_ranks: Mapping[int, Sequence[RankMeasure]]) -> CheckResult:
    differences, finding = [], ""
    for ranks, measures in by_ranks.items():
        work = [m.work for m in measures]
        above = (max(work) * ranks - sum(work)) / max(1, sum(work))  # whole numbers above the line: no rounding there
        differences.append(
            Difference(above, request.tolerance, f"work of rank {work.index(max(work))} of {ranks}, over the mean")
        )
    difference = worst(differences)
    if difference.ratio > 1 and not all(m.balanced for measures in by_ranks.values() for m in measures):
        finding = "attention did not pass through Steelyard: every rank computed what it holds"
    return _result("balance", difference, finding)
