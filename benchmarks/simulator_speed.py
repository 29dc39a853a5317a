"""How long the simulator itself takes: one step of 4,096 devices, and a search among thousands of configurations.

    python benchmarks/simulator_speed.py [--limit 1000] [--processes 2]

Seconds of the processor as well as of the clock: the former hold on a shared machine too. The goals are 1 s for a step
and 60 s on two cores for the search (docs/results/simulator-self.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable

from steelyard.simulate.advise import Advice, advise
from steelyard.simulate.config import (
    ClusterSection,
    DocumentsSection,
    ModelSection,
    ParallelSection,
    RunSection,
    SamplingSection,
    SimulateConfig,
)
from steelyard.simulate.documents import Documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import StepEstimate, simulate_step
from steelyard.simulate.workloads import WorkloadCache

CONFIG = SimulateConfig(
    model=ModelSection("llama3-8b"),
    cluster=ClusterSection("H200", nodes=512),
    documents=DocumentsSection(median=4096, sigma=1.8, longest=131072),
    sampling=SamplingSection(batches=1),
)
STEPS = {
    "balanced, data 4096": (ParallelSection(), RunSection(chunk_tokens=32768)),
    "balanced, data 512, tensor 8": (ParallelSection(tensor=8), RunSection(chunk_tokens=131072)),
    "balanced, ping-pong, data 4096": (ParallelSection(), RunSection(chunk_tokens=16384, ping_pong=True)),
    "balanced, lockstep, data 512, stage 8": (
        ParallelSection(stage=8), RunSection(chunk_tokens=32768, micro_batches=8)
    ),
    "wlb, data 128, tensor 8, context 4": (
        ParallelSection(tensor=8, context=4), RunSection(policy="wlb", chunk_tokens=32768, micro_batches=4)
    ),
    "packed, 1F1B, data 64, tensor 8, stage 8": (
        ParallelSection(tensor=8, stage=8), RunSection(policy="packed", chunk_tokens=131072, micro_batches=32)
    ),
}  # fmt: skip


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of all processors (children included)."""
    before, begin_s = sum(os.times()[:4]), time.perf_counter()
    work()
    return time.perf_counter() - begin_s, sum(os.times()[:4]) - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=1000, help="of the search; 0: none")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    for name, (parallel, run) in STEPS.items():
        config = dataclasses.replace(CONFIG, parallel=parallel, run=run)
        scenario = config.scenario()
        documents = config.stream(scenario)
        wall_s, processor_s = seconds(lambda s=scenario, d=documents: _step(s, d, given.processes))
        print(
            f"one step, {scenario.degrees.devices} devices, {name}: {wall_s:.2f} s, {processor_s:.2f} s of processors"
        )
    config = dataclasses.replace(CONFIG, cluster=ClusterSection("H200", nodes=8))
    if given.limit:
        found: list[Advice] = []
        wall_s, processor_s = seconds(lambda: found.append(_search(config, given.limit, given.processes)))
        [advice] = found
        print(
            f"advise, 64 devices, {given.processes} processes: {wall_s:.1f} s, {processor_s:.1f} s of processors for "
            f"{advice.configurations:,} configurations: {len(advice.outcomes):,} tried, {advice.slower:,} slower by "
            f"their bounds, {advice.untried:,} left out by --limit, {sum(advice.unfit.values()):,} refused untried"
        )


def _step(scenario: Scenario, documents: Documents, processes: int) -> StepEstimate:
    return simulate_step(scenario, WorkloadCache(documents, processes=processes), batches=1)


def _search(config: SimulateConfig, limit: int, processes: int) -> Advice:
    return advise(config, tokens_per_step=1 << 22, limit=limit, processes=processes)


if __name__ == "__main__":
    main()
