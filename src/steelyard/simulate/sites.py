"""Replicas at several sites, each one whole cluster: from a configuration to one answer for all of them."""

from __future__ import annotations

from typing import Any

from steelyard.simulate.config import SimulateConfig
from steelyard.simulate.replicas import Site, simulate_replicas
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.workloads import WorkloadCache


def simulate_sites(config: SimulateConfig, cache: WorkloadCache, own: StepEstimate) -> dict[str, Any]:
    """All sites of the configuration together, under its sync mode."""
    sites = []
    for section in config.sites:
        estimate = own
        if section.device and section.device != config.cluster.device:
            scenario = config.scenario(policy=own.scenario.policy, device=section.device)
            estimate = simulate_step(scenario, cache, batches=config.sampling.batches, seed=config.sampling.seed)
        sites.append(Site(section.name, estimate.step_s / section.speed, estimate.tokens, section.link()))
    mode = config.sync.sync_mode()
    parameters = float(config.model.shape().parameters)
    found = simulate_replicas(sites, mode, parameters, seed=config.sampling.seed)
    alone = sum(site.tokens / float(site.step_s.mean()) for site in sites)
    return {
        "mode": mode.mode,
        "sites": [
            {"name": s.name, "step_time_s": float(s.step_s.mean()), "busy_share": b}
            for s, b in zip(sites, found.busy, strict=True)
        ],
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_without_links": alone,
        "step_time_s": found.step_time_s,
        "exposed_share": found.exposed_share,
        "waiting_share": found.waiting_share,
        "bytes_per_step": found.bytes_per_step,
    }
