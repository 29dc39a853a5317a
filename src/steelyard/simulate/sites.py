"""Replicas at several sites, each one whole cluster: from a configuration to one answer for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from steelyard.errors import UsageError
from steelyard.simulate.answer import VERDICTS
from steelyard.simulate.config import SimulateConfig, SiteSection
from steelyard.simulate.replicas import Site, simulate_replicas
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.workloads import PolicyName, WorkloadCache

NOT_MODELLED = (
    "what the sync mode does to the loss",
    "memory that the sync mode itself needs: a copy of the parameters, outer momentum, what compression holds back",
)
"""Of replicas, beside what is left out inside each of them."""


@dataclass(frozen=True, eq=False)
class SiteEstimate:
    """One replica: what was said of its site, and what a step does there when it waits for nobody."""

    section: SiteSection
    estimate: StepEstimate

    @property
    def name(self) -> str:
        return self.section.name


def estimate_sites(config: SimulateConfig, cache: WorkloadCache, policy: PolicyName) -> list[SiteEstimate]:
    """Every site of the configuration for itself.

    Raises:
        UsageError: a site cannot run it; names the site where it has devices of its own.
    """
    known: dict[tuple[str, float], StepEstimate] = {}
    found = []
    for section in config.sites:
        key = section.device, section.speed
        if key not in known:
            known[key] = _estimate(config, cache, policy, section)
        found.append(SiteEstimate(section, known[key]))
    return found


def _estimate(config: SimulateConfig, cache: WorkloadCache, policy: PolicyName, section: SiteSection) -> StepEstimate:
    scenario = site_scenario(config, policy, section)
    with _naming(section):
        return simulate_step(scenario, cache, batches=config.sampling.batches, seed=config.sampling.seed)


def site_scenario(config: SimulateConfig, policy: PolicyName, section: SiteSection | None) -> Scenario:
    """Of a site; without one of `[cluster]`.

    Raises:
        UsageError: it cannot be laid out; names the site where it has devices of its own.
    """
    with _naming(section):
        return config.scenario(policy=policy, site=section)


@contextmanager
def _naming(section: SiteSection | None) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if section is None or not section.device:
            raise
        raise UsageError(f"sites: {section.name!r} with {section.device}: {error}") from error


def decisive(sites: Sequence[SiteEstimate]) -> SiteEstimate:
    """The site to look at first: of those with the worst verdict the one whose step takes longest."""
    return max(sites, key=lambda s: (VERDICTS.index(s.estimate.memory.verdict), s.estimate.step_time_s))


def together(config: SimulateConfig, sites: Sequence[SiteEstimate]) -> dict[str, Any]:
    """All sites under the configuration's sync mode, as the JSON has it."""
    replicas = [Site(s.name, s.estimate.step_s, s.estimate.tokens, s.section.link()) for s in sites]
    mode = config.sync.sync_mode()
    found = simulate_replicas(replicas, mode, float(config.model.shape().parameters), seed=config.sampling.seed)
    return {
        "mode": mode.mode,
        "verdict": decisive(sites).estimate.memory.verdict,
        "sites": [_site(s, busy) for s, busy in zip(sites, found.busy, strict=True)],
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_without_links": sum(s.estimate.tokens / s.estimate.step_time_s for s in sites),
        "step_time_s": found.step_time_s,
        "slowest_link": _slowest_link(sites),
        "exposed_share": found.exposed_share,
        "waiting_share": found.waiting_share,
        "bytes_per_step": found.bytes_per_step,
    }


def _slowest_link(sites: Sequence[SiteEstimate]) -> str | None:
    """The site whose link holds up an exchange; None where all links are alike."""
    times_s = {s.name: s.section.link().transfer_s(1e9) for s in sites}
    slowest = max(times_s, key=lambda name: times_s[name])
    return slowest if times_s[slowest] > min(times_s.values()) else None


def _site(site: SiteEstimate, busy: float) -> dict[str, Any]:
    estimate, memory = site.estimate, site.estimate.memory
    return {
        "name": site.name,
        "device": estimate.scenario.profile.name,
        "devices": estimate.scenario.degrees.devices,
        "kernel": estimate.scenario.kernel_name,
        "step_time_s": estimate.step_time_s,
        "busy_share": busy,
        "verdict": memory.verdict,
        "memory_gib_by_rank_max": memory.expected / 2**30,
        "memory_band_gib": [memory.low / 2**30, memory.high / 2**30],
        "memory_capacity_gib": memory.capacity / 2**30,
    }
