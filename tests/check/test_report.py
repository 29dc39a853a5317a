"""Verdicts on hand-made measurements: each check fails by its own numbers, and only by those."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from steelyard.check.report import (
    NAMES,
    AloneBatch,
    CheckReport,
    CheckResult,
    Difference,
    RankMeasure,
    ReferenceMeasure,
    judge,
    worst,
)
from steelyard.check.request import CheckRequest

# Two ranks with 1 and 9 labels, losses 2.0 and 1.0: 1.1 over the tokens, 1.5 as a mean of means.
BATCHES = {1: (AloneBatch(10, 1.1, 1.1),), 2: (AloneBatch(1, 2.0, 2.0), AloneBatch(9, 1.0, 1.0))}
REFERENCE = ReferenceMeasure(1.1, 5.0, BATCHES, (), documents=2, tokens=12, parameters=3)
RANK = RankMeasure(
    loss=1.1,
    gradient=Difference(1e-9, 1e-6, "weight"),
    leak=Difference(0.0, 1e-5, "outputs"),
    lookahead=Difference(0.0, 1e-5, "outputs"),
    blind="",
    work=40,
    balanced=True,
    missing_tokens=0,
    fingerprint=5.0,
)
BY_RANKS = {1: (RANK,), 2: (RANK, replace(RANK, gradient=None))}


def verdict(reference: ReferenceMeasure = REFERENCE, **changes: object) -> CheckReport:
    changed = (replace(RANK, **changes), BY_RANKS[2][1])  # type: ignore[arg-type]
    return judge(CheckRequest(ranks=(2,)), reference, {1: BY_RANKS[1], 2: changed})


def failed(report: CheckReport) -> list[str]:
    return [result.name for result in report.results if not result.passed]


def test_sound() -> None:
    report = verdict()
    assert report.passed and failed(report) == []
    assert [result.name for result in report.results] == list(NAMES)
    assert [set(check) for check in report.as_json()["checks"]] == [{"name", "passed", "max_abs_diff", "tolerance"}] * 6


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"loss": 1.5}, ["rank_count_invariance", "token_weighted_loss"]),
        ({"gradient": Difference(2e-6, 1e-6, "weight")}, ["rank_count_invariance"]),
        ({"gradient": Difference(math.nan, 1e-6, "weight")}, ["rank_count_invariance"]),
        ({"lookahead": Difference(2e-5, 1e-5, "outputs")}, ["causal"]),
        ({"missing_tokens": 3}, ["rank_count_invariance"]),
        ({"leak": Difference(2e-5, 1e-5, "outputs")}, ["document_isolation"]),
        ({"leak": Difference(math.nan, 1e-5, "outputs")}, ["document_isolation"]),
        ({"work": 45}, ["balance"]),
        ({"work": 36}, ["balance"]),
    ],
)
def test_faulty(changes: dict[str, object], names: list[str]) -> None:
    assert failed(verdict(**changes)) == names


def test_the_tolerance_of_balance_itself_is_kept() -> None:
    by_ranks = {1: BY_RANKS[1], 2: (replace(RANK, work=21), replace(RANK, work=19))}
    assert judge(CheckRequest(ranks=(2,)), REFERENCE, by_ranks).passed
    by_ranks = {1: BY_RANKS[1], 2: (replace(RANK, work=22), replace(RANK, work=19))}
    assert failed(judge(CheckRequest(ranks=(2,)), REFERENCE, by_ranks)) == ["balance"]


def test_a_wrong_loss_of_one_batch() -> None:
    wrong = {1: BATCHES[1], 2: (BATCHES[2][0], AloneBatch(9, 1.0, 1.2))}
    report = verdict(replace(REFERENCE, batches=wrong, findings=("rank 1 of 2: a label",)))
    assert failed(report) == ["label_shift"]
    assert report.results[4].finding == "rank 1 of 2: a label"
    assert report.results[4].max_abs_diff == pytest.approx(0.2)
    assert report.results[4].where == "documents of rank 1 of 2"


def test_a_batch_that_lacks_tokens_is_the_first_thing_to_mend() -> None:
    lacking, plain = verdict(missing_tokens=3).results[0], verdict(loss=1.5).results[0]
    assert lacking.finding == "with 2 processes, the batch of rank 0 lacks 3 tokens of its documents"
    assert lacking.advice.startswith("Mend this first") and "mend them first" in plain.advice


def test_what_was_seen_is_told_of_the_batch_with_the_difference() -> None:
    wrong = {1: BATCHES[1], 2: (BATCHES[2][0], AloneBatch(9, 1.0, 1.2))}
    report = verdict(replace(REFERENCE, batches=wrong, findings=("rank 0 of 1: this", "rank 1 of 2: that")))
    assert (report.results[4].where, report.results[4].finding) == ("documents of rank 1 of 2", "rank 1 of 2: that")


@pytest.mark.parametrize(
    ("result", "may_be"),
    [
        (CheckResult("causal", False, 3e-4, 1e-5, "outputs"), True),
        (CheckResult("causal", False, 3e-3, 1e-5, "outputs"), False),
        (CheckResult("causal", False, math.nan, 1e-5, "outputs"), False),
        (CheckResult("label_shift", False, 3e-4, 1e-5, "documents of rank 0 of 1", "rank 0 of 1: a label"), False),
        (CheckResult("balance", False, 0.2, 0.05, "work"), False),
    ],
)
def test_only_small_differences_may_be_rounding(result: CheckResult, may_be: bool) -> None:
    assert result.may_be_rounding == may_be


def test_an_output_that_depends_on_nothing() -> None:
    blind = replace(RANK, blind="the output of token 3 of document 1, which has 9 tokens")
    report = judge(CheckRequest(ranks=(2,)), REFERENCE, {1: BY_RANKS[1], 2: (RANK, blind)})
    assert failed(report) == ["document_isolation"]
    assert report.results[1].finding.startswith("the output of token 3 of document 1, which has 9 tokens, depends on")
    assert "attention sees nothing" in report.results[1].finding
    assert report.results[1].where == "2 processes"


def test_a_leak_comes_before_an_output_that_depends_on_nothing() -> None:
    result = verdict(blind="the output of token 3", leak=Difference(2e-5, 1e-5, "outputs")).results[1]
    assert (result.passed, result.max_abs_diff, result.finding) == (False, 2e-5, "")


def test_the_worst_is_by_what_is_allowed() -> None:
    small, large = Difference(2e-6, 1e-6, "small"), Difference(0.5, 1.0, "large")
    assert worst([small, large]) == small
    assert worst([small, Difference(math.nan, 1.0, "none")]).where == "none"
    assert Difference(0.0, 0.0, "nothing").ratio == 0.0
    assert Difference(1e-30, 0.0, "something").ratio == math.inf
