"""Whole documents packed by work, as the published comparison of core-attention disaggregation packs its baseline.

The public repository of arXiv 2510.18121 (hao-ai-lab/DistCA, `distca/planner/wlb_planner.py`) reimplements the
packing of WLB-LLM without delays. A document of l tokens weighs (l / b)² + l / b with a constant b, the length at which
attention is taken to cost as much as everything else. Longest first, each goes to the place with the least work if it
stays under a cap of tokens there, else to the one with the fewest tokens if it does there, and what is left over goes
to the place with the least work, cap or not.
"""

from __future__ import annotations

import numpy as np

from steelyard.domain.arrays import IntArray

FILLER_TOKENS = 128
"""What the published code puts into a place that gets no document."""


def pack_by_work(lengths: IntArray, places: int, breakpoint_tokens: int, cap_tokens: int) -> list[list[int]]:
    """Lengths of the documents of each place.

    Args:
        lengths: tokens of each document, int64.
        breakpoint_tokens: where a document's quadratic and linear work are equal.
        cap_tokens: what a place should not exceed.
    """
    ordered = np.sort(lengths)[::-1]
    share = ordered / breakpoint_tokens
    weight = share * share + share
    work, tokens = np.zeros(places), np.zeros(places, dtype=np.int64)
    members: list[list[int]] = [[] for _ in range(places)]
    left: list[int] = []

    def put(place: int, document: int) -> None:
        members[place].append(int(ordered[document]))
        work[place] += weight[document]
        tokens[place] += ordered[document]

    for document, length in enumerate(ordered.tolist()):
        for place in (int(work.argmin()), int(tokens.argmin())):
            if tokens[place] + length <= cap_tokens:
                put(place, document)
                break
        else:
            left.append(document)
    for document in left:
        put(int(work.argmin()), document)
    return [docs or [FILLER_TOKENS] for docs in members]
