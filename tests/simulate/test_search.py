"""The search finds what trying everything finds, with less work, whatever the number of processes."""

from __future__ import annotations

import dataclasses

import pytest

from steelyard.cost.profiles import load_profile
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import model_shape
from steelyard.simulate import workloads
from steelyard.simulate.documents import Documents, lognormal_documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.search import Search, _Group, _TooSlow, place_of
from steelyard.simulate.sweep import Outcome, SearchSpace, base_scenario, candidates, outcome_of
from steelyard.simulate.workloads import WorkloadCache

MODEL = dataclasses.replace(model_shape("llama3-8b"), layers=8)


def space(memory_gib: float = 60.0) -> tuple[list[Scenario], Documents]:
    documents = lognormal_documents(900, 1.5, 8192)
    profile = load_profile("H200").replace(memory_bytes=memory_gib * 2**30)
    whole = SearchSpace(base_scenario(MODEL, profile, "bf16"), 4, 1 << 16, 8192)
    return [c for c in candidates(whole) if isinstance(c, Scenario)], documents


@pytest.fixture(scope="module")
def exhaustive() -> list[int]:
    """Numbers of all that fit, best first."""
    scenarios, documents = space()
    cache = WorkloadCache(documents)
    outcomes = [outcome_of(s, cache, batches=2, seed=0) for s in scenarios]
    fitting = [i for i, o in enumerate(outcomes) if not o.refused]
    return sorted(fitting, key=lambda i: (place_of(outcomes[i]), i))


@pytest.mark.parametrize("want", [1, 8, 30])
def test_the_best_are_those_of_an_exhaustive_search(want: int, exhaustive: list[int]) -> None:
    scenarios, documents = space()
    with Search(scenarios, documents, processes=1, ahead=2) as search:
        search.run(want)
    assert [number for number, _ in search.ranking()][:want] == exhaustive[:want]
    assert search.untried == 0
    assert search.slower > len(exhaustive) / 4  # it was worth it
    assert len(search.refused) > 10
    assert len(search.outcomes) + len(search.refused) + search.slower == len(scenarios)


def test_a_search_goes_on_where_more_are_wanted(exhaustive: list[int]) -> None:
    scenarios, documents = space()
    with Search(scenarios, documents, processes=1, ahead=2) as search:
        search.run(2)
        few = len(search.outcomes)
        search.run(40)
        assert few < len(search.outcomes)
        assert [number for number, _ in search.ranking()][:40] == exhaustive[:40]
        search.run(len(scenarios))
    assert search.slower == search.untried == 0
    assert len(search.outcomes) + len(search.refused) == len(scenarios)


@pytest.mark.parametrize("limit", [1, 10, 25])
def test_a_limit_leaves_out_what_promises_least(limit: int, exhaustive: list[int]) -> None:
    scenarios, documents = space()
    with Search(scenarios, documents, processes=1, limit=limit) as search:
        search.run(8)
    assert len(search.outcomes) == limit
    assert search.untried > 0
    assert len(search.outcomes) + len(search.refused) + search.slower + search.untried == len(scenarios)
    with Search(scenarios, documents, processes=1, limit=len(scenarios)) as everything:
        most = sorted(candidate.key for group in everything._waiting for candidate in group)[:limit]
    assert set(search.outcomes) == {number for _, number in most}


def test_processes_change_nothing() -> None:
    scenarios, documents = space()
    found = []
    for processes in (1, 3):
        with Search(scenarios, documents, processes=processes, ahead=4) as search:
            search.run(5)
            numbers = [number for number, _ in search.ranking()]
            estimates = search.estimates(numbers[:3], batches=3)
            times = [estimates[n].step_s.tolist() for n in numbers[:3]]
            found.append((numbers, search.slower, [o.step_time_s for _, o in search.ranking()], times))
    assert found[0] == found[1]


def test_what_cannot_be_laid_out_is_refused_with_its_reason() -> None:
    scenarios, documents = space()
    one = scenarios[0].replace(kernel="no such kernel")
    with Search([one, scenarios[-1]], documents, processes=1) as search:
        search.run(1)
    assert "has no attention kernel 'no such kernel'" in search.outcomes[0].refused


def test_planning_stops_once_it_is_certain_that_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan_of = workloads._plan_of
    monkeypatch.setattr(workloads, "_plan_of", lambda *given: (planned.append(1), plan_of(*given))[1])
    scenarios, documents = space()
    many = next(s for s in scenarios if s.policy == "balanced" and s.degrees == Degrees(4) and s.micro_batches == 8)
    with Search([many], documents, processes=1) as search:
        search.run(1)
        seconds = search.outcomes[0].step_time_s
    assert len(planned) == 16  # two batches
    planned.clear()
    estimate = Search([many], documents, processes=1)._workers._work
    [slow] = estimate(_Group([many], 2, [0.8 * seconds]))
    assert isinstance(slow, _TooSlow)
    assert 0.8 * seconds < slow.step_time_s <= seconds
    assert len(planned) <= 4  # of the second eighth at the latest
    [outcome] = estimate(_Group([many], 2, [seconds]))
    assert isinstance(outcome, Outcome)
    assert outcome.step_time_s == seconds
