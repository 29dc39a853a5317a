"""Batches of documents as the published comparison of core-attention disaggregation takes them (arXiv 2510.18121).

From the public repository (hao-ai-lab/DistCA: `distca/simulator/optimizers/samples.py`, `distca/utils/
global_batch_provider.py` and the scripts under `benchmarks`, which set the factors):

- *pretrain*: lengths are drawn at random from a list in which those of 65,536 tokens and more stand four times, and
  each is then multiplied by context / 65,536;
- *prolong*: the list itself is taken, long documents first, each of them four times and three out of ten set to the
  context; then all short ones. Nothing is shuffled, so that later batches hold short documents only;
- either way documents are laid one after another and cut at every multiple of the context (a *sequence*), and a batch
  is so many sequences. A point of the publication is the mean over the first 30 batches.

Of the long documents of *prolong* the repository's run tables show only how many batches they fill: 188 entries,
those of free length with 141K tokens on average. A Pareto distribution from 65,536 tokens with this mean stands for
them; nothing else here is assumed, and nothing at all comes from speed-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steelyard.domain.arrays import IntArray, int_column
from steelyard.simulate.documents import Documents, cut_at_multiples

THRESHOLD = 65536
LONG_ENTRIES, REPEATS = 188, 4
FIXED_SHARE = 0.3
MEAN_LONG = 141_000
PUBLISHED_BATCHES = 30


def spread(batches: int) -> list[int]:
    """Numbers of `batches` of the published 30, evenly spaced."""
    return [(2 * i + 1) * PUBLISHED_BATCHES // (2 * batches) for i in range(batches)]


def pretrain_order(lengths: Sequence[int], context: int, tokens: int, seed: int = 0) -> IntArray:
    """Sequences one after another, at least `tokens` tokens: lengths int64.

    Args:
        lengths: of the published list as it is drawn from, not yet multiplied.
    """
    factor = max(1, context // THRESHOLD)
    drawn = np.random.default_rng(seed).permutation(np.asarray(lengths, dtype=np.int64)) * factor
    repeats = -(-tokens // int(drawn.sum()))
    return _cut(np.tile(drawn, repeats), context, tokens)


def prolong_order(short: Sequence[int], context: int, tokens: int, seed: int = 0) -> IntArray:
    """The same for *prolong*; `short`: lengths below the threshold, in the order of the list."""
    random = np.random.default_rng(seed)
    long = np.tile(random.permutation(_long_lengths()), REPEATS)
    long[random.random(len(long)) < FIXED_SHARE] = context
    rest = np.asarray(short, dtype=np.int64)
    repeats = max(1, -(-(tokens - int(long.sum())) // int(rest.sum())))
    return _cut(np.concatenate([long, np.tile(rest, repeats)]), context, tokens)


def published_documents(
    stream: str, lengths: Sequence[int], context: int, batch_tokens: int, numbers: Sequence[int]
) -> Documents:
    """Batches `numbers` of a stream.

    Args:
        stream: `pretrain` or `prolong`.
        lengths: the list to draw from (pretrain), or its short documents (prolong).
    """
    order = {"pretrain": pretrain_order, "prolong": prolong_order}[stream]
    tokens = (max(numbers) + 1) * batch_tokens
    return published_batches(stream, order(lengths, context, tokens), batch_tokens, numbers)


def _long_lengths() -> IntArray:
    """Evenly spaced quantiles of the Pareto distribution whose quantiles have the mean `MEAN_LONG`."""
    middle = (np.arange(LONG_ENTRIES // REPEATS) + 0.5) / (LONG_ENTRIES // REPEATS)
    low, high = 0.1, 10.0
    for _ in range(60):
        shape = (low * high) ** 0.5
        found = THRESHOLD * (1 - middle) ** (-1 / shape)
        low, high = (shape, high) if found.mean() > MEAN_LONG else (low, shape)
    return int_column(np.rint(found).astype(np.int64))


def _cut(lengths: IntArray, context: int, tokens: int) -> IntArray:
    """Cut at every multiple of the context, and at `tokens`."""
    pieces = cut_at_multiples(lengths, context)
    whole = np.concatenate(pieces[: -(-tokens // context)])
    return int_column(whole)


def published_batches(name: str, order: IntArray, batch_tokens: int, numbers: Sequence[int]) -> Documents:
    """The given ones of consecutive batches of an order; `batch_tokens` is a multiple of the context."""
    ends = np.cumsum(order)
    batches = []
    for number in numbers:
        first, last = np.searchsorted(ends, [number * batch_tokens, (number + 1) * batch_tokens], side="left")
        first += ends[first] == number * batch_tokens  # that piece ends where the batch begins
        batches.append(int_column(order[first : last + 1]))
    return Documents(name, int_column(np.concatenate(batches)), "batches", tuple(batches))
