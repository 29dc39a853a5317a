"""Documents of two ranks, from one long one among short ones to all alike, and the model that is trained on them.

Every length is a multiple of 4, because torch's per-document load balancer cuts each document into 2 × ranks equal
parts and accepts no other; with their own lengths the other variants would do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.cost.attention import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_PAIR_AND_CHANNEL
from steelyard.cost.linear import head_flops, layer_flops
from steelyard.domain.model_shape import ModelShape

RANKS = 2
UNIT = 2 * RANKS
SHORT_DOCS = (64, 1024)
MODEL = ModelShape("benchmark", layers=2, hidden=256, heads=4, kv_heads=1, ffn=704, vocab=512, head_dim=64)


@dataclass(frozen=True)
class Skew:
    """One kind of packed documents.

    Attributes:
        name, text: in tables, and in words.
        long_by_rank: tokens of each rank's long documents as shares of its tokens; short ones fill the rest.
    """

    name: str
    text: str
    long_by_rank: tuple[tuple[float, ...], ...]

    def lengths(self, tokens: int) -> list[list[int]]:
        """Document lengths of each rank, long ones first; `tokens` in all on each."""
        random = np.random.default_rng(4)
        by_rank = []
        for shares in self.long_by_rank:
            own = [int(tokens * share) // UNIT * UNIT for share in shares]
            by_rank.append([*own, *short_documents(tokens - sum(own), random)])
        return by_rank


SKEWS = (
    Skew("long", "a document of ¾ of the tokens on one rank, short ones beside it and on the other", ((0.75,), ())),
    Skew("mild", "a document of ½ of the tokens on one rank and one of ¼ on the other, short ones", ((0.5,), (0.25,))),
    Skew("even", "short documents on both ranks", ((), ())),
)


def short_documents(tokens: int, random: np.random.Generator) -> list[int]:
    """Lengths that are equally likely on a logarithmic scale, `tokens` in all."""
    low, high = np.log(SHORT_DOCS)
    lengths: list[int] = []
    while tokens:
        length = int(np.exp(random.uniform(low, high))) // UNIT * UNIT
        lengths.append(min(max(length, UNIT), tokens))
        tokens -= lengths[-1]
    return lengths


def token_flops(model: ModelShape = MODEL) -> float:
    """Operations of the token-wise layers for one token, forward and backward."""
    return 3 * (model.layers * layer_flops(model, 1) + head_flops(model, 1))


def pair_flops(model: ModelShape = MODEL) -> float:
    """Operations of core attention for one (query, key) pair in all layers, forward and backward."""
    forward = FORWARD_FLOPS_PER_PAIR_AND_CHANNEL * model.query_width
    return model.layers * forward * (1 + BACKWARD_OVER_FORWARD)


def step_flops(tokens: int, pairs_by_rank: Sequence[int]) -> list[float]:
    """What each rank computes in a step, by arithmetic."""
    return [tokens * token_flops() + pairs * pair_flops() for pairs in pairs_by_rank]
