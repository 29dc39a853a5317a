"""The best of many configurations, found without simulating those that cannot be among them.

Each configuration has a place in the order of preference (`place_of`), and before anything is planned a place that it
cannot beat (`bounds`). They are simulated in the order of the latter until it is behind the worst of those that are
wanted: what then is left out would not have been among them. So the search is exact unless `limit` ends it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

from steelyard.errors import SteelyardError
from steelyard.simulate.bounds import AtBest, Bounds
from steelyard.simulate.documents import Documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.sweep import Outcome, outcome_of
from steelyard.simulate.worker_processes import WorkerProcesses
from steelyard.simulate.workloads import WorkloadCache

KEPT = 0.95
"""Configurations that cut so many documents that less than this of the attention work is left come last: they compute
another function."""
AHEAD = 16
"""Plans that are begun before the answers of earlier ones are looked at: more than there are processes, as a rule, and
the same for any number of them, so that these change nothing but the time."""
ROUNDING = 1e-9
"""Bounds and estimates add up the same numbers in another order."""

Place: TypeAlias = tuple[bool, bool, bool, float]
"""Refused, cuts too many documents, fits tightly, seconds of a step: the smallest is the best."""
LAST: Place = (True, True, True, float("inf"))


def place_of(outcome: Outcome) -> Place:
    """What sorts the best first: it fits, computes all of the attention, fits surely, is fast."""
    o = outcome
    return bool(o.refused), o.pairs_kept < KEPT, o.verdict != "fits", o.step_time_s


def place_at_best(best: AtBest) -> Place:
    """The place that no configuration with these bounds beats."""
    memory = best.memory.verdict
    return memory == "does not fit", best.pairs_kept < KEPT, memory != "fits", best.step_time_s * (1 - ROUNDING)


@dataclass(frozen=True, eq=False)
class Refused:
    """A configuration that cannot fit into memory, and what it does at best."""

    scenario: Scenario
    at_best: AtBest


@dataclass(frozen=True)
class _Candidate:
    """A configuration, its number in the order of the space, and the place that it cannot beat."""

    place: Place
    number: int
    scenario: Scenario

    @property
    def key(self) -> tuple[Place, int]:
        return self.place, self.number


@dataclass(frozen=True)
class _Group:
    """What a worker does at once: configurations that need the same plans, which it makes once.

    Attributes:
        enough_s: of each, a step that takes longer need not be known: the worker stops when that is certain.
        in_full: complete estimates are wanted.
    """

    scenarios: list[Scenario]
    batches: int
    enough_s: list[float] = field(default_factory=list)
    in_full: bool = False


@dataclass(frozen=True)
class _TooSlow:
    """The answer of a configuration that was left while its rounds were planned: it takes at least this long."""

    step_time_s: float


class _Estimator:
    """The work of a worker."""

    def __init__(self, documents: Documents, seed: int) -> None:
        self.documents, self.seed = documents, seed

    def __call__(self, group: _Group) -> list[Outcome | StepEstimate | _TooSlow]:
        cache = WorkloadCache(self.documents)
        if group.in_full:
            return [simulate_step(s, cache, batches=group.batches, seed=self.seed) for s in group.scenarios]
        slow = self._too_slow(group, cache)
        return [
            slow[i] if i in slow else outcome_of(s, cache, batches=group.batches, seed=self.seed)
            for i, s in enumerate(group.scenarios)
        ]

    def _too_slow(self, group: _Group, cache: WorkloadCache) -> dict[int, _TooSlow]:
        """Those that are left after some of their rounds. Only policy balanced moves work, so that its plans take long
        and its bounds know little of what they cost."""
        slow: dict[int, _TooSlow] = {}
        first = group.scenarios[0]
        if first.policy != "balanced" or first.speeds or math.inf in group.enough_s:
            return slow
        bounds = Bounds(self.documents, batches=group.batches, seed=self.seed)
        request = first.request(group.batches, self.seed)
        ticks = request.micro_batches + request.stage - 1
        for part in (16, 8, 4, 2):
            rounds = group.batches * ticks // part * request.nano_batches
            try:
                planned = cache.first_rounds(request, rounds) if rounds else None
            except SteelyardError:  # the simulation says why
                return slow
            for i, (scenario, enough_s) in enumerate(zip(group.scenarios, group.enough_s, strict=True)):
                if planned is not None and i not in slow:
                    least_s = bounds.with_plans(scenario, planned) * (1 - ROUNDING)
                    if least_s > enough_s:
                        slow[i] = _TooSlow(least_s)
            if len(slow) == len(group.scenarios):
                break
        return slow


class Search:
    """A search among `scenarios`, which all have the same devices and tokens a step. Use as a context.

    Attributes:
        outcomes: those that were simulated, by their number.
        refused: those that cannot fit into memory, without having been simulated.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        documents: Documents,
        *,
        batches: int = 2,
        seed: int = 0,
        processes: int = 2,
        limit: int = 1000,
        ahead: int = AHEAD,
    ) -> None:
        self.batches, self.seed, self.limit, self.ahead = batches, seed, limit, ahead
        self.outcomes: dict[int, Outcome] = {}
        self.refused: list[Refused] = []
        self._scenarios = scenarios
        self._given = 0
        self._behind = LAST
        candidates = self._bounded(Bounds(documents, batches=batches, seed=seed))
        candidates.sort(key=lambda c: c.key)
        self._promising = candidates[limit - 1].key if len(candidates) > limit else (LAST, len(scenarios))
        groups: dict[object, list[_Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.scenario.request(batches, seed), []).append(candidate)
        self._waiting = list(groups.values())
        processes = min(processes, len(groups)) if len(candidates) >= 40 else 1
        self._workers = WorkerProcesses(_Estimator(documents, seed), processes)

    def __enter__(self) -> Search:
        self._workers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.__exit__(kind, error, trace)

    def _bounded(self, bounds: Bounds) -> list[_Candidate]:
        """Those that may fit, with their bounds."""
        found = []
        for number, scenario in enumerate(self._scenarios):
            place: Place = (False, False, False, 0.0)
            try:
                scenario.check()
                best = bounds.at_best(scenario)
            except SteelyardError:  # its simulation says why
                found.append(_Candidate(place, number, scenario))
                continue
            if best.memory.verdict == "does not fit":
                self.refused.append(Refused(scenario, best))
                continue
            found.append(_Candidate(place_at_best(best), number, scenario))
        return found

    def run(self, want: int) -> None:
        """Simulate until the best `want` are known, or the limit is reached."""
        for last in (self._promising, (LAST, len(self._scenarios))):
            for cheap in (True, False):  # what is known before policy balanced is planned saves much of that
                self._pass(want, last, cheap=cheap)

    def _pass(self, want: int, last: tuple[Place, int], *, cheap: bool) -> None:
        """Over all that waits, but none that promises less than `last`, and perhaps only what is cheap to plan."""
        waiting, left = deque(sorted(self._waiting, key=lambda group: group[0].key)), []
        flight: deque[tuple[int, list[_Candidate]]] = deque()
        while waiting or flight:
            if waiting and len(flight) < self.ahead:
                group = waiting.popleft()
                worst, room = self._worst(want), self.limit - self._given
                chosen = [c for c in group if c.place <= worst and c.key <= last][:room]
                if cheap and group[0].scenario.policy == "balanced":
                    chosen = []
                if chosen:
                    flight.append((self._give(chosen, worst), chosen))
                taken = {c.number for c in chosen}
                if rest := [c for c in group if c.number not in taken]:
                    left.append(rest)
                continue
            number, chosen = flight.popleft()
            if slow := self._take(chosen, self._workers.answer(number)):
                left.append(slow)
        self._waiting, self._behind = left, self._worst(want)

    def _give(self, chosen: Sequence[_Candidate], worst: Place) -> int:
        self._given += len(chosen)
        enough_s = [worst[3] if c.place[:3] == worst[:3] else math.inf for c in chosen]
        return self._workers.give(_Group([c.scenario for c in chosen], self.batches, enough_s))

    def _take(
        self, chosen: Sequence[_Candidate], answers: Sequence[Outcome | StepEstimate | _TooSlow]
    ) -> list[_Candidate]:
        """Note the outcomes; those that were left as too slow wait again, with what is known of them now."""
        slow = []
        for candidate, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, Outcome):
                self.outcomes[candidate.number] = answer
            elif isinstance(answer, _TooSlow):
                refused, cuts, tight, _ = candidate.place
                place = refused, cuts, tight, answer.step_time_s
                slow.append(_Candidate(place, candidate.number, candidate.scenario))
        self._given -= len(slow)
        return sorted(slow, key=lambda c: c.key)

    def _worst(self, want: int) -> Place:
        """The place of the last of the best `want` so far."""
        places = sorted(map(place_of, self.outcomes.values()))
        return places[want - 1] if len(places) >= want else LAST

    @property
    def slower(self) -> int:
        """Those that were left out since they cannot be among the wanted ones."""
        return sum(c.place > self._behind for group in self._waiting for c in group)

    @property
    def untried(self) -> int:
        """Those that might have been, had the limit been higher."""
        return sum(map(len, self._waiting)) - self.slower

    def ranking(self) -> list[tuple[int, Outcome]]:
        """Numbers and outcomes of all that were simulated, best first."""
        return sorted(self.outcomes.items(), key=lambda item: (place_of(item[1]), item[0]))

    def estimates(self, numbers: Sequence[int], batches: int) -> dict[int, StepEstimate]:
        """Full estimates of some of them over `batches` batches."""
        groups: dict[object, list[int]] = {}
        for number in numbers:
            groups.setdefault(self._scenarios[number].request(batches, self.seed), []).append(number)
        given = [
            (self._workers.give(_Group([self._scenarios[n] for n in members], batches, in_full=True)), members)
            for members in groups.values()
        ]
        found: dict[int, StepEstimate] = {}
        for task, members in given:
            for number, estimate in zip(members, self._workers.answer(task), strict=True):
                assert isinstance(estimate, StepEstimate)
                found[number] = estimate
        return found
