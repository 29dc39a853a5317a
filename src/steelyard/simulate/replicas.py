"""Several replicas over wide-area links: how long a step of all of them is under each sync mode.

Inside a site a step is what `simulate_step` says. Between sites the mode decides who waits for whom, and a link
carries one transfer at a time. What is periodic is computed directly; where replicas run ahead of each other or queue
at a server, events are played through in order of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from steelyard.cost.collectives import WideLink, wide_all_reduce_s
from steelyard.domain.arrays import FloatArray
from steelyard.domain.sync_mode import SyncMode
from steelyard.errors import UsageError

EVENT_STEPS = 200
"""Steps of the slowest replica that are played through."""
MOST_EVENTS = 20_000
"""Steps of all replicas together, where the slowest is so slow that it would make others' too many."""


@dataclass(frozen=True, eq=False)
class Site:
    """One replica and its link.

    Attributes:
        name: of the site.
        step_s: of each sampled batch, float64.
        tokens: of one of its steps.
        link: to the others.
    """

    name: str
    step_s: FloatArray
    tokens: float
    link: WideLink


@dataclass(frozen=True)
class ReplicaEstimate:
    """All replicas together.

    Attributes:
        tokens_per_s: of all of them.
        step_time_s: time in which each replica, on average over tokens, makes a step.
        exposed_share: time in which replicas wait for a transfer.
        waiting_share: time in which they wait for a slower replica.
        bytes_per_step: that a replica sends per step of its own, on average.
        busy: share of time in which each site computes.
    """

    tokens_per_s: float
    step_time_s: float
    exposed_share: float
    waiting_share: float
    bytes_per_step: float
    busy: tuple[float, ...]


def simulate_replicas(sites: Sequence[Site], mode: SyncMode, parameters: float, *, seed: int = 0) -> ReplicaEstimate:
    """Estimate the sites together.

    Raises:
        UsageError: no site.
    """
    if not sites:
        raise UsageError("sync: no site; give at least one table [[sites]]")
    payload = parameters * mode.bytes_per_parameter
    if len(sites) == 1:
        only = float(sites[0].step_s.mean())
        return ReplicaEstimate(sites[0].tokens / only, only, 0.0, 0.0, 0.0, (1.0,))
    if mode.mode in ("every_step", "local_sgd", "diloco"):
        return _rounds(sites, mode, payload)
    if mode.mode == "gossip":
        return _gossip(sites, mode, payload)
    return _events(sites, mode, payload, seed)


def _slowest(sites: Sequence[Site]) -> WideLink:
    return max((s.link for s in sites), key=lambda link: link.transfer_s(1e9))


def _rounds(sites: Sequence[Site], mode: SyncMode, payload: float) -> ReplicaEstimate:
    """All wait for the slowest at the end of a period; parts of the exchange may hide under the steps after it."""
    fragments = mode.fragments if mode.mode == "diloco" else 1
    count = max(len(s.step_s) for s in sites)
    table = np.stack([np.resize(s.step_s, count) for s in sites])
    # Over a period each site's batches add up before anybody waits: spread shrinks with the period.
    period_s = mode.period * table.mean(axis=1)
    slowest_s = _expected_slowest_s(period_s, mode.period**0.5 * table.std(axis=1))
    transfer_s = wide_all_reduce_s(payload / fragments, len(sites), _slowest(sites))
    exposed_s = fragments * max(0.0, transfer_s - mode.overlap * slowest_s / mode.period)
    round_s = slowest_s + exposed_s
    busy = tuple(float(p / round_s) for p in period_s)
    tokens = mode.period * sum(s.tokens for s in sites)
    sent = 2 * (len(sites) - 1) / len(sites) * payload / mode.period
    waiting = float(np.mean((slowest_s - period_s) / round_s))
    return ReplicaEstimate(tokens / round_s, round_s / mode.period, exposed_s / round_s, waiting, sent, busy)


def _expected_slowest_s(mean_s: FloatArray, spread_s: FloatArray) -> float:
    """Mean of the largest of independent normally distributed times (a time of no spread counts as of very little)."""
    spread_s = np.maximum(spread_s, 1e-9 * mean_s)
    low_s, high_s = float((mean_s - 8 * spread_s).max()), float((mean_s + 8 * spread_s).max())
    grid_s = np.linspace(low_s, high_s, 4001)
    below = np.ones_like(grid_s)  # probability that all of them are shorter
    for mean, spread in zip(mean_s.tolist(), spread_s.tolist(), strict=True):
        normal = NormalDist(mean, spread)
        below *= [normal.cdf(time_s) for time_s in grid_s.tolist()]
    return low_s + float((1 - below).mean()) * (high_s - low_s)


def _gossip(sites: Sequence[Site], mode: SyncMode, payload: float) -> ReplicaEstimate:
    """Nobody waits for all: a step is followed by an exchange with one neighbour, hidden as far as overlap reaches."""
    busy, rates, exposed = [], [], []
    for site in sites:
        step_s = float(site.step_s.mean())
        own_s = site.link.transfer_s(payload)
        others_s = [other.link.transfer_s(payload) for other in sites if other is not site]
        # With any of them in turn, as fast as the slower of the two links.
        late_s = float(np.mean([max(0.0, max(own_s, s) - mode.overlap * step_s) for s in others_s]))
        busy.append(step_s / (step_s + late_s))
        rates.append(site.tokens / (step_s + late_s))
        exposed.append(late_s / (step_s + late_s))
    total = sum(rates)
    mean_s = sum(s.tokens for s in sites) / total
    return ReplicaEstimate(total, mean_s, float(np.mean(exposed)), 0.0, payload, tuple(busy))


def _events(sites: Sequence[Site], mode: SyncMode, payload: float, seed: int) -> ReplicaEstimate:
    """Bounded staleness and parameter server: replicas at their own pace, transfers queued on the server's link.

    The server stands at the site whose link is fastest. A slower link makes its own replica's transfer longer, and does
    not hold up the others'.
    """
    random = np.random.default_rng(seed)
    count = len(sites)
    done, busy_s, wait_s, exposed_s = [0] * count, [0.0] * count, [0.0] * count, [0.0] * count
    lead = mode.lead if mode.mode == "bounded_staleness" else EVENT_STEPS * 10**6
    server_rate = max(s.link.rate for s in sites)
    link_free_s = 0.0
    blocked: list[tuple[float, int]] = []
    queue: list[tuple[float, int, int, str]] = []  # time, order, site, what ended
    order = 0

    def begin(site: int, now_s: float) -> None:
        nonlocal order
        step_s = float(random.choice(sites[site].step_s))
        busy_s[site] += step_s
        heapq.heappush(queue, (now_s + step_s, order, site, "step"))
        order += 1

    for site in range(count):
        begin(site, 0.0)
    now_s = 0.0
    while min(done) < EVENT_STEPS and sum(done) < MOST_EVENTS:
        now_s, _, site, what = heapq.heappop(queue)
        if what == "step":
            start_s = max(now_s, link_free_s)
            link_free_s = start_s + 2 * payload / server_rate  # what it sends, and what it gets back
            arrives_s = start_s + sites[site].link.transfer_s(2 * payload)
            hidden_s = mode.overlap * float(sites[site].step_s.mean())
            resume_s = max(now_s, arrives_s - hidden_s)
            exposed_s[site] += resume_s - now_s
            heapq.heappush(queue, (resume_s, order, site, "sent"))
            order += 1
            continue
        done[site] += 1
        blocked.append((now_s, site))
        still: list[tuple[float, int]] = []
        for since_s, waiting in blocked:
            if done[waiting] - min(done) <= lead:
                wait_s[waiting] += now_s - since_s
                begin(waiting, now_s)
            else:
                still.append((since_s, waiting))
        blocked = still
    tokens = sum(n * s.tokens for n, s in zip(done, sites, strict=True))
    return ReplicaEstimate(
        tokens_per_s=tokens / now_s,
        step_time_s=now_s * sum(s.tokens for s in sites) / tokens,
        exposed_share=sum(exposed_s) / (now_s * count),
        waiting_share=sum(wait_s) / (now_s * count),
        bytes_per_step=2 * payload,
        busy=tuple(min(1.0, b / now_s) for b in busy_s),
    )
