"""Attention spans divided by document: nothing is lost, and every piece is where its document's tasks are."""

from __future__ import annotations

import itertools

import pytest

from steelyard.cost.profiles import load_profile
from steelyard.domain.arrays import int_column
from steelyard.domain.degrees import Degrees
from steelyard.domain.model_shape import model_shape
from steelyard.simulate.document_spans import NAMED_DOCUMENTS, by_document, longest_documents
from steelyard.simulate.documents import Documents
from steelyard.simulate.sampled_trace import sampled_trace
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.workloads import WorkloadCache

LENGTHS = [9000, 300, 2000, 100, 50, 4000, 700, 700, 700, 600, 500, 400, 300, 200, 200, 18]
DOCUMENTS = Documents("d", int_column(LENGTHS), "batches", (int_column(LENGTHS),))
BASE = Scenario(
    model=model_shape("llama3-8b"), profile=load_profile("H200"), degrees=Degrees(data=4),
    chunk_tokens=sum(LENGTHS) // 4,
)  # fmt: skip


@pytest.mark.parametrize("policy", ["packed", "balanced"])
def test_every_attention_span_is_divided_without_rest(policy: str) -> None:
    scenario, cache = BASE.replace(policy=policy), WorkloadCache(DOCUMENTS)
    whole = sampled_trace(scenario, cache, layers=2)
    divided = by_document(whole, scenario, cache)
    assert sum(LENGTHS) % 4 == 0
    for rank, spans in whole.items():
        for track in ("compute", "attention", "transfer", "wait"):
            before = sum(s.duration_s for s in spans if s.track == track)
            assert sum(s.duration_s for s in divided[rank] if s.track == track) == pytest.approx(before)
        pieces = [s for s in divided[rank] if s.track == "attention"]
        assert all(-1 <= int(s.args["document"]) < NAMED_DOCUMENTS for s in pieces)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(pieces))


def test_the_longest_document_is_where_its_tasks_are() -> None:
    """Packed, its parts lie on ranks 0 and 1 only; balanced, every rank computes some of it."""
    cache = WorkloadCache(DOCUMENTS)

    def ranks_of_longest(policy: str) -> set[int]:
        scenario = BASE.replace(policy=policy)
        spans = by_document(sampled_trace(scenario, cache, layers=1), scenario, cache)
        return {rank for rank, own in spans.items() if any(s.args.get("document") == 0 for s in own)}

    chunk = BASE.chunk_tokens
    assert 9000 // chunk == 1  # it is cut once
    assert ranks_of_longest("packed") == {0, 1}
    assert ranks_of_longest("balanced") == {0, 1, 2, 3}


def tokens_by_number(policy: str, named: tuple[int, ...]) -> dict[int, int]:
    scenario, cache = BASE.replace(policy=policy), WorkloadCache(DOCUMENTS)
    spans = by_document(sampled_trace(scenario, cache, layers=1), scenario, cache, named=named)
    found = [s.args for own in spans.values() for s in own if int(s.args.get("document", -1)) >= 0]
    return {int(args["document"]): int(args["tokens"]) for args in found}


def test_a_document_has_one_number_whole_or_cut() -> None:
    """Packed training cuts the longest: its pieces keep its number, and are told as parts of it."""
    scenario, cache = BASE.replace(policy="balanced"), WorkloadCache(DOCUMENTS)
    named = longest_documents(scenario, cache, range(4))
    assert [LENGTHS[place] for place in named] == sorted(LENGTHS, reverse=True)[:NAMED_DOCUMENTS]
    whole = tokens_by_number("balanced", named)
    assert whole == {number: LENGTHS[place] for number, place in enumerate(named)}
    assert tokens_by_number("packed", named) == tokens_by_number("wlb", named) == whole
    packed = BASE.replace(policy="packed")
    spans = by_document(sampled_trace(packed, cache, layers=1), packed, cache, named=named)
    said = {s.name.partition(": ")[2] for own in spans.values() for s in own if s.args.get("document") == 0}
    assert said == {"part of a document of 9,000 tokens"}


def test_documents_are_named_of_the_ranks_that_are_drawn() -> None:
    scenario, cache = BASE.replace(policy="packed"), WorkloadCache(DOCUMENTS)
    chunk, ends = BASE.chunk_tokens, list(itertools.accumulate(LENGTHS))
    there = [n for n, end in zip(LENGTHS, ends, strict=True) if end > 3 * chunk]
    named = longest_documents(scenario, cache, [3])
    assert [LENGTHS[place] for place in named] == sorted(there, reverse=True)[:NAMED_DOCUMENTS]
