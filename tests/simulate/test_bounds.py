"""Bounds against simulations: never above them, and tight where everything is known."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cost.attention_kernels import range_counts
from steelyard.cost.peak_memory import Recompute
from steelyard.cost.profiles import load_profile
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import model_shape
from steelyard.simulate.bounds import Bounds, least_counts
from steelyard.simulate.documents import Documents, lognormal_documents, uniform_documents
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.step import once_a_step, simulate_step
from steelyard.simulate.workloads import WorkloadCache

MODEL = dataclasses.replace(model_shape("llama3-8b"), layers=4)
BASE = Scenario(model=MODEL, profile=load_profile("H200"), degrees=Degrees(4), chunk_tokens=2048)
STREAMS = (
    Documents("mix", int_column([1, 40, 63, 128, 200, 1000, 2047, 3000, 8192])),
    lognormal_documents(700, 1.6, 8192),
    uniform_documents(1024),
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any that an adviser may meet, and more."""
    policy = draw(st.sampled_from(["packed", "wlb", "per_document_cp", "balanced", "balanced"]))
    stage = draw(st.sampled_from([1, 1, 2, 3, 4]))
    context = draw(st.sampled_from([1, 2, 3, 4]))
    virtual = 2 if stage == 2 and policy != "balanced" and draw(st.booleans()) else 1
    micro_batches = draw(st.sampled_from([2, 4] if virtual == 2 else [1, 2, 3, 5]))
    degrees = Degrees(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8])), context, stage, virtual)
    least = -(-8192 // degrees.lanes) if policy == "balanced" else 512
    chunk = max(least, draw(st.sampled_from([512, 1000, 4096])))
    kernel = draw(st.sampled_from(["H200", "A100", "cpu-local"]))
    return BASE.replace(
        profile=BASE.profile.replace(kernels=load_profile(kernel).kernels), degrees=degrees, chunk_tokens=chunk,
        micro_batches=micro_batches, policy=policy, ping_pong=policy == "balanced" and draw(st.booleans()),
        recompute=draw(st.sampled_from(get_args(Recompute))),
        sharding=draw(st.sampled_from(["none", "optimizer", "full"])),
        context_exchange=draw(st.sampled_from(["gather", "gather", "gather_overlapped", "ring"])),
        fused=draw(st.booleans()), tensor_overlap=draw(st.booleans()), gradient_overlap=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()), chunked_loss=draw(st.booleans()), keep_received=draw(st.booleans()),
        cut_documents=draw(st.booleans()), hidden_gather=draw(st.sampled_from([0.0, 0.5])),
        extra_overhead=draw(st.sampled_from([0.0, 0.1])), exchange_overhead_s=draw(st.sampled_from([0.0, 1e-3])),
        skip_optimizer=draw(st.booleans()), sliced_state=draw(st.booleans()), speed=draw(st.sampled_from([1.0, 0.7])),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(scenarios(), st.sampled_from(STREAMS), st.integers(0, 3))
def test_no_simulation_undercuts_a_bound(scenario: Scenario, documents: Documents, seed: int) -> None:
    best = Bounds(documents, batches=2, seed=seed).at_best(scenario)
    estimate = simulate_step(scenario, documents, batches=2, seed=seed)
    assert 0 < best.step_time_s <= estimate.step_time_s * (1 + 1e-9)
    assert best.memory.expected <= estimate.memory.expected * (1 + 1e-9)
    assert best.pairs_kept == pytest.approx(estimate.pairs_kept, rel=1e-12)
    less = best.with_chunked_loss().memory
    chunked = simulate_step(scenario.replace(chunked_loss=True), documents, batches=2, seed=seed)
    assert less.expected <= chunked.memory.expected * (1 + 1e-9)
    assert chunked.step_time_s == estimate.step_time_s


@settings(max_examples=60, deadline=None)
@given(scenarios().filter(lambda s: s.policy == "balanced"), st.sampled_from(STREAMS[:2]), st.data())
def test_the_first_plans_make_bounds_better(scenario: Scenario, documents: Documents, data: st.DataObject) -> None:
    bounds, cache = Bounds(documents, batches=2, seed=1), WorkloadCache(documents)
    request = scenario.request(2, 1)
    ticks = 2 * (scenario.micro_batches + (scenario.degrees.stage - 1))
    known = sorted(data.draw(st.sets(st.integers(1, ticks), min_size=1, max_size=3)))
    seconds = [bounds.at_best(scenario).step_time_s]
    for count in known:
        planned = cache.first_rounds(request, count * scenario.nano_batches)
        assert planned.tokens.shape[0] == count * scenario.nano_batches
        seconds.append(bounds.with_plans(scenario, planned))
    assert seconds == sorted(seconds)
    simulated = simulate_step(scenario, cache, batches=2, seed=1)
    assert seconds[-1] <= simulated.step_time_s * (1 + 1e-9)
    anew = simulate_step(scenario, documents, batches=2, seed=1)
    assert simulated.step_s.tolist() == anew.step_s.tolist()  # rounds that were planned before are the same ones
    if known[-1] == ticks and scenario.degrees.stage > 1:  # then everything is known
        assert seconds[-1] >= (1 - 1e-9) * simulated.step_time_s


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"policy": "packed"}, 1.0 - 1e-9),  # nothing is unknown
        ({"policy": "wlb"}, 1.0 - 1e-9),
        ({"policy": "packed", "sharding": "full", "recompute": "full"}, 0.9),  # the first gather, and some last ones
        ({"policy": "per_document_cp", "degrees": Degrees(2, 1, 4), "chunk_tokens": 8192}, 0.85),
        ({"policy": "packed", "degrees": Degrees(2, 1, 1, 4), "micro_batches": 8}, 0.75),
        ({"degrees": Degrees(8, 8), "chunk_tokens": 32768}, 0.85),
        ({"degrees": Degrees(2, 8, 1, 4), "chunk_tokens": 32768, "micro_batches": 8}, 0.6),
    ],
)
def test_bounds_are_tight_enough_to_be_of_use(changes: dict[str, object], least: float) -> None:
    documents = lognormal_documents(2000, 1.5, 8192)
    scenario = BASE.replace(model=model_shape("llama3-8b"), **changes)
    best = Bounds(documents, batches=2, seed=0).at_best(scenario)
    assert best.step_time_s >= least * simulate_step(scenario, documents, batches=2).step_time_s


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=8), st.data())
def test_no_division_of_documents_counts_less(lengths: list[int], data: st.DataObject) -> None:
    whole = least_counts(int_column(lengths))
    start, end = [], []
    for n in lengths:
        cuts = sorted(data.draw(st.sets(st.integers(1, n - 1) if n > 1 else st.nothing(), max_size=min(6, n - 1))))
        start += [0, *cuts]
        end += [*cuts, n]
    parts = range_counts(int_column(start), int_column(end))
    for field in dataclasses.fields(whole):
        assert getattr(whole, field.name).sum() <= getattr(parts, field.name).sum() * (1 + 1e-12)


@given(st.floats(0.001, 100), st.floats(0, 100), scenarios())
def test_a_longer_core_makes_a_longer_step(core_s: float, more_s: float, scenario: Scenario) -> None:
    def step_s(seconds: float) -> float:
        core = np.array([seconds])
        return float((core + sum(once_a_step(scenario, core).values()))[0])

    assert step_s(core_s) <= step_s(core_s + more_s) * (1 + 1e-12)


def test_ranks_of_unequal_speed_have_no_bound_of_time() -> None:
    documents = uniform_documents(1000)
    best = Bounds(documents, batches=1, seed=0).at_best(BASE.replace(speeds=(1.0, 1.0, 2.0, 1.0)))
    assert best.step_time_s == 0
    assert best.memory.expected > 0
