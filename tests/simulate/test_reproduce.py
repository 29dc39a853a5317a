"""Reproduction: assumptions change what they name, and a small point comes out whole."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.simulate.documents import Documents
from steelyard.simulate.published import points_of
from steelyard.simulate.reproduce import (
    ASSUMPTIONS,
    IDEAL,
    LISTED,
    PUBLISHED,
    baseline,
    published_shape,
    reproduce,
    simulate_run,
)
from steelyard.simulate.step import simulate_step
from steelyard.simulate.streams import published_documents
from steelyard.simulate.validate import load_tables
from steelyard.simulate.workloads import WorkloadCache

POINT = {"model": "llama-8b", "parallelism": "3D", "n_gpus": 64, "max_doc_len": 131072, "tokens_per_batch": 1048576}


def documents() -> Documents:
    lengths = np.random.default_rng(1).lognormal(8, 1.6, 2000).clip(16, 124_000).astype(int).tolist()
    return published_documents("pretrain", lengths, 131072, 1048576, [0, 1])


def test_a_small_point() -> None:
    one = reproduce(POINT, documents())
    assert one is not None
    assert set(one.baseline_s) == set(one.greedy_s) == {a.name for a in ASSUMPTIONS}
    assert one.hidden_s[1.0] <= one.hidden_s[0.5] <= one.hidden_s[0.0] == one.baseline_s[LISTED.name]
    assert one.speed_up(overhead=0.1) == pytest.approx(one.speed_up() / 1.1)
    assert 0.8 < one.under(IDEAL) < 1.6


def test_the_published_34b_has_twice_the_key_heads() -> None:
    assert published_shape("llama-34b").kv_heads == 16
    assert published_shape("llama-8b").kv_heads == 8


def test_published_packing_is_another_one() -> None:
    given = documents()
    times = [
        simulate_step(baseline(POINT, Degrees(4, 8, 2, 1), 1, a), WorkloadCache(given), batches=2).step_s
        for a in (IDEAL, PUBLISHED)
    ]
    assert not np.allclose(times[0], times[1])


def test_a_single_document_per_group_takes_its_published_time() -> None:
    """Each of 16 groups of two ranks of the published runs holds one document of the context; no sampler matters."""
    [point] = [
        p
        for p in points_of(load_tables()["distca_runs"]["tables"][0])
        if p["dataset"] == "pretrain" and p.get("cp") == 2
    ]
    full = Documents("full", int_column([131072]), "batches", (int_column([131072] * 16),))
    run = simulate_run(point, full)
    assert run.simulated_s == pytest.approx(run.measured_s, rel=0.05)
