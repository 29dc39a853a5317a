"""Whose documents the attention spans of a simulated trace are: each span is divided among them.

Prices know sums over a rank's tasks only. For a picture the plan is made once more, and the attention spans of a rank
are cut in proportion to what its tasks of each document cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    spans_by_rank: Mapping[int, Sequence[Span]], scenario: Scenario, cache: WorkloadCache, *, seed: int = 0
) -> dict[int, list[Span]]:
    """The same spans; those of attention are divided by document, with `document` and `tokens` among their arguments.

    Args:
        spans_by_rank: of `sampled_trace` with the same scenario and seed.
    """
    plans = first_plans(cache.documents, scenario.request(1, seed))
    longest = _longest(plans)
    found: dict[int, list[Span]] = {rank: [] for rank in spans_by_rank}
    parts = [_Parts(plan, number, scenario, longest) for number, plan in enumerate(plans)]
    for rank, spans in spans_by_rank.items():
        for span in spans:
            half = _half_of(span)
            if span.track != "attention" or half >= len(parts):
                found[rank].append(span)
            else:
                found[rank] += parts[half].divide(span, rank)
    return found


def _half_of(span: Span) -> int:
    """Spans are called "attention 3b, local": the letter is the nano-batch's."""
    place = span.name.partition(",")[0]
    return 1 if place.endswith("b") else 0


def _longest(plans: Sequence[DispatchPlan]) -> dict[tuple[int, int], int]:
    """(plan, document) of the longest documents, with the number by which pictures call them."""
    every = sorted(
        ((int(n), number, doc) for number, plan in enumerate(plans) for doc, n in enumerate(plan.layout.doc_lengths)),
        reverse=True,
    )
    return {(number, doc): index for index, (_, number, doc) in enumerate(every[:NAMED_DOCUMENTS])}


class _Parts:
    """What the tasks of each document cost on every rank, apart for local and received rows."""

    def __init__(
        self, plan: DispatchPlan, number: int, scenario: Scenario, longest: Mapping[tuple[int, int], int]
    ) -> None:
        tasks = plan.tasks
        kernel, shape = scenario.profile.kernel(scenario.kernel), scenario.local_attention
        self._cost_s = kernel.forward_s(range_counts(tasks.start, tasks.end), shape.heads, shape.head_dim)
        self._server, self._local = tasks.server, _needs_local_rows_only(plan)
        names = np.array([longest.get((number, doc), -1) for doc in range(plan.layout.docs)], dtype=np.int64)
        self._name: IntArray = names[tasks.doc]
        self._tokens = {int(names[d]): int(n) for d, n in enumerate(plan.layout.doc_lengths) if names[d] >= 0}

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
            text = "other documents" if name < 0 else f"document of {self._tokens[name]:,} tokens"
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
