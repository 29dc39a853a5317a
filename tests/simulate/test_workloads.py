"""Packing keeps tokens and documents; work in numbers equals the plan's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cost.profiles import load_profile
from steelyard.domain.arrays import int_column
from steelyard.domain.shapes import LLAMA3_8B
from steelyard.errors import PlanError, UsageError
from steelyard.simulate import workloads
from steelyard.simulate.documents import (
    Documents,
    cut_at_multiples,
    documents_from_json,
    lognormal_documents,
    uniform_documents,
)
from steelyard.simulate.workloads import WorkloadCache, WorkRequest


def request(**changes: object) -> WorkRequest:
    values: dict[str, object] = {
        "policy": "packed", "data": 4, "context": 1, "stage": 1, "chunk_tokens": 1024, "micro_batches": 2,
        "nano_batches": 1, "ranks_per_node": 2, "tolerance": 0.05, "planner": "balanced", "layout": "contiguous",
        "kernel": None, "memory": "keep", "shape": LLAMA3_8B,
        "speeds": (), "cut_documents": False, "batches": 2, "seed": 3,
    }  # fmt: skip
    return WorkRequest(**{**values, **changes})  # type: ignore[arg-type]


STREAM = Documents("mixed", int_column([64, 900, 3000, 128, 777, 50]))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 30))
def test_cutting_keeps_tokens_and_order(lengths: list[int], room: int) -> None:
    pieces = cut_at_multiples(np.array(lengths), room)
    assert [int(p.sum()) for p in pieces[:-1]] == [room] * (len(pieces) - 1)
    assert sum(int(p.sum()) for p in pieces) == sum(lengths)


@pytest.mark.parametrize("sampler", ["shuffle", "in_order"])
def test_batches_have_exactly_their_tokens_and_repeat(sampler: str) -> None:
    documents = Documents("d", int_column([5, 7, 11]), sampler)  # type: ignore[arg-type]
    for number in range(4):
        batch = documents.batch(number, 100, 1)
        assert int(batch.sum()) == 100
        assert batch.tolist() == documents.batch(number, 100, 1).tolist()


def test_shuffled_batches_differ_with_number_and_seed() -> None:
    assert STREAM.batch(0, 9000, 0).tolist() != STREAM.batch(1, 9000, 0).tolist()
    assert STREAM.batch(0, 9000, 0).tolist() != STREAM.batch(0, 9000, 1).tolist()


@pytest.mark.parametrize("policy", ["packed", "wlb", "per_document_cp", "balanced"])
@pytest.mark.parametrize("context", [1, 2])
def test_every_token_is_somewhere_and_no_pair_is_lost_but_by_cutting(policy: str, context: int) -> None:
    r = request(policy=policy, data=4 // context, context=context)
    work = WorkloadCache(STREAM).work(r)
    assert work.tokens.sum() == pytest.approx(2 * r.tokens)
    done, whole = work.pairs.sum(), work.whole_pairs.sum()
    assert done <= whole * (1 + 1e-9)
    if policy == "wlb":
        assert done == pytest.approx(whole)  # whole documents


def test_balanced_work_is_even_and_rows_that_leave_arrive() -> None:
    work = WorkloadCache(STREAM).work(request(policy="balanced"))
    total = work.local.pairs + work.received.pairs
    assert float((total.max(axis=1) / total.mean(axis=1)).max()) <= 1.06
    for out, arrive in ((work.query_out, work.query_in), (work.key_out, work.key_in)):
        for where in (0, 1):
            assert out[where].sum(axis=1).tolist() == arrive[where].sum(axis=1).tolist()
    assert work.query_out[1].sum() > 0


def test_a_chosen_layout_sends_fewer_rows() -> None:
    rows = {}
    for name in ("contiguous", "chosen"):
        work = WorkloadCache(STREAM).work(request(policy="balanced", layout=name))
        rows[name] = sum(float(part.sum()) for part in (*work.query_out, *work.key_out))
    assert rows["chosen"] < rows["contiguous"]


def test_balancing_time_evens_out_seconds_where_documents_are_short() -> None:
    kernel = load_profile("h200").kernel("fa2")
    mixed = Documents("d", int_column([16384, *[512] * 64, 8192, 8192]), "in_order")
    seconds = []
    for chosen in (None, kernel):
        work = WorkloadCache(mixed).work(
            request(policy="balanced", chunk_tokens=16384, micro_batches=1, kernel=chosen, tolerance=0.01, batches=1)
        )
        total = sum(kernel.forward_s(c, 32, 128) for c in (work.local, work.received))
        seconds.append(float(np.max(total) / np.mean(total)))
    assert seconds[1] < seconds[0]
    assert seconds[1] < 1.03


def test_slow_ranks_get_less_work() -> None:
    work = WorkloadCache(STREAM).work(request(policy="balanced", speeds=(1.0, 1.0, 1.0, 0.25)))
    total = (work.local.pairs + work.received.pairs).sum(axis=0)
    assert total[3] < 0.4 * total[0]


def test_ticks_hold_every_micro_batch_once_per_stage() -> None:
    work = WorkloadCache(STREAM).work(request(policy="balanced", stage=2, data=2, micro_batches=3, batches=1))
    assert work.tokens.shape == (3 + 2 - 1, 4)
    assert work.tokens.sum() == 2 * request(data=2, micro_batches=3).tokens
    assert work.pairs.sum() <= work.whole_pairs.sum()


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"batches": [{"docs": [3, 5]}, {"docs": [8]}]}))
    documents = documents_from_json(path, "batches")
    assert documents.batch(1, 8, 0).tolist() == [8]
    with pytest.raises(UsageError, match="batch 0 holds 8 tokens"):
        documents.batch(0, 9, 0)
    path.write_text("[1, 0]")
    with pytest.raises(UsageError, match="holds 0, expected positive whole numbers"):
        documents_from_json(path)
    with pytest.raises(UsageError, match="there is no file"):
        documents_from_json(tmp_path / "none.json")


def test_distributions() -> None:
    assert set(uniform_documents(7).batch(0, 21, 0)) == {7}
    lengths = lognormal_documents(1000, 1.0, 4000).lengths
    assert int(lengths.max()) == 4000
    assert 900 < float(np.median(lengths)) < 1100


def test_rounds_that_cannot_be_planned_are_not_taken_for_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, calls = request(policy="balanced", micro_batches=8), iter(range(100))
    place = workloads._place

    def third_fails(pieces: object, request: WorkRequest) -> object:
        if next(calls) == 2:
            raise PlanError("no plan for this round")
        return place(pieces, request)  # type: ignore[arg-type]

    monkeypatch.setattr(workloads, "_place", third_fails)
    cache = WorkloadCache(STREAM)
    with pytest.raises(PlanError):
        cache.first_rounds(asked, 4)
    assert len(cache.work(asked).tokens) == 16


@pytest.mark.parametrize("changes", [{"stage": 3}, {"nano_batches": 2}, {"stage": 2, "nano_batches": 2}, {"data": 8}])
def test_processes_plan_the_same_rounds(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(policy="balanced", micro_batches=3, **changes)
    alone = WorkloadCache(STREAM).work(asked)
    assert len(alone.tokens) == 2 * asked.rounds
    monkeypatch.setattr(workloads, "MANY", 1)
    shared = WorkloadCache(STREAM, processes=3).work(asked)
    for name in ("tokens", "squares", "pairs", "whole_pairs"):
        assert getattr(alone, name).tolist() == getattr(shared, name).tolist()
    assert alone.received.blocks.tolist() == shared.received.blocks.tolist()
    assert [c.tolist() for c in alone.key_in] == [c.tolist() for c in shared.key_in]
