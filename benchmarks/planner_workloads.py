"""Workloads for any number of servers: drawn at random from a seed, with constant tokens per server.

Lengths are a mixture, chosen to look like the *pretrain* stream of the workload files (about 55 % of the tokens in
documents of 64K tokens and more, medians of some thousands):

- 45 % of the tokens: log-normal, median 3,000 tokens, sigma 0.9, at most 16K;
- 55 % of the tokens: log-uniform between 32K and the context.

`whole`: the context is what a server holds, and documents are cut where a server is full, so that none spans servers.
`spanning`: the context is four times that, and documents fill server after server.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from steelyard.data.workload import Workload
from steelyard.domain.arrays import IntArray, int_column

Kind = Literal["whole", "spanning"]
TOKENS_PER_SERVER = 1 << 17
SHORT_MEDIAN, SHORT_SIGMA, SHORT_MOST = 3_000, 0.9, 1 << 14
LONG_LEAST = 1 << 15
LONG_SHARE = 0.55
SPANNING_CONTEXT = 4  # times what a server holds


def generated_workload(servers: int, kind: Kind, *, batches: int = 1, seed: int = 0) -> Workload:
    """`batches` batches for `servers` servers; the same for the same arguments, on every machine."""
    random = np.random.default_rng([seed, servers, kind == "spanning"])
    name = f"generated {kind}, {servers} servers"
    return Workload(name, TOKENS_PER_SERVER, servers, tuple(_batch(servers, kind, random) for _ in range(batches)))


def _batch(servers: int, kind: Kind, random: np.random.Generator) -> IntArray:
    if kind == "spanning":
        return _filled(servers * TOKENS_PER_SERVER, TOKENS_PER_SERVER * SPANNING_CONTEXT, random)
    # No document is longer than a server's tokens, so cutting where a server ends leaves all of them whole.
    ends = np.cumsum(_filled(servers * TOKENS_PER_SERVER, TOKENS_PER_SERVER, random))
    ends = np.union1d(ends, np.arange(1, servers + 1) * TOKENS_PER_SERVER)
    return int_column(np.diff(ends, prepend=0))


def _filled(tokens: int, context: int, random: np.random.Generator) -> IntArray:
    """Lengths that add up to `tokens`; the last one is cut to fit."""
    mean_short = SHORT_MEDIAN * np.exp(SHORT_SIGMA**2 / 2)
    mean_long = (context - LONG_LEAST) / np.log(context / LONG_LEAST)
    documents_long = LONG_SHARE / mean_long
    chance_long = documents_long / (documents_long + (1 - LONG_SHARE) / mean_short)
    lengths: list[IntArray] = []
    total = 0
    while total < tokens:
        count = 4_096
        short = np.minimum(SHORT_MOST, random.lognormal(np.log(SHORT_MEDIAN), SHORT_SIGMA, count))
        long = np.exp(random.uniform(np.log(LONG_LEAST), np.log(context), count))
        drawn = np.where(random.random(count) < chance_long, long, short).astype(np.int64) + 1
        lengths.append(np.minimum(drawn, context))
        total += int(lengths[-1].sum())
    line = np.minimum(np.cumsum(np.concatenate(lengths)), tokens)
    return int_column(np.diff(np.unique(line), prepend=0))
