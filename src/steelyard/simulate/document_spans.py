"""Whose documents the attention spans of a simulated trace are: each span is divided among them.

Prices know sums over a rank's tasks only. For a picture the plan is made once more, and the attention spans of a rank
are cut in proportion to what its tasks of each document cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.attention_kernels import range_counts
from steelyard.domain.arrays import FloatArray, IntArray
from steelyard.domain.plan import DispatchPlan
from steelyard.observe.trace import Span
from steelyard.simulate.scenario import Scenario
from steelyard.simulate.workloads import WorkloadCache, first_plans

NAMED_DOCUMENTS = 6
"""The longest ones have a name each; the others stay together, as a rank may hold thousands."""


def by_document(
    spans_by_rank: Mapping[int, Sequence[Span]],
    scenario: Scenario,
    cache: WorkloadCache,
    *,
    seed: int = 0,
    named: Sequence[int] | None = None,
) -> dict[int, list[Span]]:
    """The same spans; those of attention are divided by document, with `document` and `tokens` among their arguments.

    `document` is a place in `named`, or −1, and `tokens` those of the whole document, also where only a part of it is
    computed.

    Args:
        spans_by_rank: of `sampled_trace` with the same scenario and seed.
        named: documents to tell apart, from `longest_documents`: the same ones for traces that are compared. None:
            the longest of these ranks.
    """
    every = _every(scenario, cache, seed)
    if named is None:
        named = _longest(every, spans_by_rank)
    found: dict[int, list[Span]] = {rank: [] for rank in spans_by_rank}
    parts = [_Parts(placed, scenario, named) for placed in every]
    for rank, spans in spans_by_rank.items():
        for span in spans:
            half = _half_of(span)
            if span.track != "attention" or half >= len(parts):
                found[rank].append(span)
            else:
                found[rank] += parts[half].divide(span, rank)
    return found


def longest_documents(
    scenario: Scenario, cache: WorkloadCache, ranks: Collection[int], *, seed: int = 0
) -> tuple[int, ...]:
    """The longest documents, longest first, of which these ranks compute attention, by their places in the batch."""
    return _longest(_every(scenario, cache, seed), ranks)


@dataclass(frozen=True, eq=False)
class _Placed:
    """A plan whose documents are known as those of the batch.

    Attributes:
        document: of each document of the plan, its place in the batch; behind the last one where it is not known.
        tokens: of each document of the plan, how many the whole one has.
    """

    plan: DispatchPlan
    document: IntArray
    tokens: IntArray


def _every(scenario: Scenario, cache: WorkloadCache, seed: int) -> list[_Placed]:
    request = scenario.request(1, seed)
    lengths = cache.documents.batch(0, request.tokens, request.seed)
    left: dict[int, deque[int]] = {}
    for place, length in enumerate(lengths.tolist()):
        left.setdefault(length, deque()).append(place)
    found, fresh = [], len(lengths)
    for plan in first_plans(cache.documents, request):
        pieces = plan.layout.doc_lengths
        if (places := _in_stream(pieces, lengths)) is None:
            alike = [left.get(length) for length in pieces.tolist()]
            places = np.array([a.popleft() if a else fresh + i for i, a in enumerate(alike)], dtype=np.int64)
            fresh += len(pieces)
        known = places < len(lengths)
        tokens = np.where(known, lengths[np.where(known, places, 0)], pieces)
        found.append(_Placed(plan, places, tokens))
    return found


def _in_stream(pieces: IntArray, lengths: IntArray) -> IntArray | None:
    """Whose pieces these are, if they are the documents of the stream's begin, one after another, whole or cut."""
    ends, own = np.cumsum(lengths), np.cumsum(pieces)
    if not len(own) or not np.isin(ends[ends <= own[-1]], own).all() or own[-1] > ends[-1]:
        return None
    return np.searchsorted(ends, own - pieces, side="right").astype(np.int64)


def _longest(every: Sequence[_Placed], ranks: Collection[int]) -> tuple[int, ...]:
    tokens: dict[int, int] = {}
    for placed in every:
        there = np.unique(placed.plan.tasks.doc[np.isin(placed.plan.tasks.server, list(ranks))])
        tokens |= dict(zip(placed.document[there].tolist(), placed.tokens[there].tolist(), strict=True))
    return tuple(sorted(tokens, key=lambda document: (-tokens[document], document))[:NAMED_DOCUMENTS])


def _half_of(span: Span) -> int:
    """Spans are called "attention 3b, local": the letter is the nano-batch's."""
    place = span.name.partition(",")[0]
    return 1 if place.endswith("b") else 0


class _Parts:
    """What the tasks of each document cost on every rank, apart for local and received rows."""

    def __init__(self, placed: _Placed, scenario: Scenario, named: Sequence[int]) -> None:
        plan = placed.plan
        tasks = plan.tasks
        kernel, shape = scenario.profile.kernel(scenario.kernel), scenario.local_attention
        self._cost_s = kernel.forward_s(range_counts(tasks.start, tasks.end), shape.heads, shape.head_dim)
        self._server, self._local = tasks.server, _needs_local_rows_only(plan)
        number = {document: index for index, document in enumerate(named)}
        names = np.array([number.get(document, -1) for document in placed.document.tolist()], dtype=np.int64)
        self._name: IntArray = names[tasks.doc]
        self._tokens = {int(names[d]): int(n) for d, n in enumerate(placed.tokens) if names[d] >= 0}
        cut = np.unique(names[placed.tokens > plan.layout.doc_lengths])
        self._text = {n: f"{'part of a ' * (n in cut)}document of {t:,} tokens" for n, t in self._tokens.items()}

    def divide(self, span: Span, rank: int) -> list[Span]:
        """The span in pieces, the longest document's first; the span itself where nothing is known of it."""
        own = self._server == rank
        chosen = own & self._local if span.name.endswith("local") else own & ~self._local
        if not chosen.any():
            chosen = own  # policies without an exchange compute everything in one call
        total_s = float(self._cost_s[chosen].sum())
        if total_s <= 0:
            return [span]
        shares: dict[int, float] = {}
        for name, cost_s in zip(self._name[chosen].tolist(), _floats(self._cost_s[chosen]), strict=True):
            shares[name] = shares.get(name, 0.0) + cost_s / total_s
        pieces, begin_s = [], span.start_s
        for name in sorted(shares, key=lambda n: (n < 0, n)):
            end_s = begin_s + shares[name] * span.duration_s
            text = self._text.get(name, "other documents")
            args = {"document": name} | ({"tokens": self._tokens[name]} if name >= 0 else {})
            pieces.append(Span(f"{span.name}: {text}", span.track, begin_s, end_s, args))
            begin_s = end_s
        return pieces


def _floats(column: FloatArray) -> list[float]:
    values: list[float] = column.tolist()
    return values


def _needs_local_rows_only(plan: DispatchPlan) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether each task's queries and keys live on its server."""
    layout, tasks = plan.layout, plan.tasks
    order = np.lexsort((layout.shard_start, layout.shard_doc))
    begins_with = np.full(layout.docs, -1, dtype=np.int64)  # rank of the document's first rows
    held_to = np.zeros(layout.docs, dtype=np.int64)  # rows [0, …) of it that lie there
    whole = np.ones(layout.docs, dtype=bool)
    for doc, rank, start, length in zip(
        layout.shard_doc[order].tolist(), layout.shard_rank[order].tolist(), layout.shard_start[order].tolist(),
        layout.shard_length[order].tolist(), strict=True,
    ):  # fmt: skip
        if begins_with[doc] < 0:
            begins_with[doc] = rank
        whole[doc] &= rank == begins_with[doc]
        if whole[doc]:
            held_to[doc] = start + length
    at_home = plan.home == tasks.server
    local = at_home & (begins_with[tasks.doc] == tasks.server) & (tasks.end <= held_to[tasks.doc])
    return np.asarray(local, dtype=np.bool_)
