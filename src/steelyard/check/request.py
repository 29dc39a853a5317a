"""What is checked, and on which documents: values and pure functions, without torch.

Documents are dealt to ranks in contiguous blocks whose tokens grow with the rank, 1 : 2 : 3 : …: ranks with equal
numbers of labels would hide a mean of means, and ranks with equal work would leave attention nothing to move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from steelyard.domain.arrays import IntArray, int_column
from steelyard.errors import UsageError

Dtype: TypeAlias = Literal["float32", "float64"]
ModelKind: TypeAlias = Literal["decoder", "family", "folder", "module"]

RANDOM_LENGTHS = (7, 1, 13, 40, 4, 30, 96, 2, 64, 19, 3, 50)
"""Lengths of the documents where no data are given: single tokens, odd numbers, one long one."""


@dataclass(frozen=True)
class ModelSource:
    """Which model is checked.

    Attributes:
        kind: our own decoder; a small random model of a Transformers family; a Transformers folder; or what a function
            of the user's builds.
        name: of the family; the folder; or `pkg.mod:build` or `path/to/file.py:build`.
        layers: keep only the first ones of a Transformers model; None: all.
    """

    kind: ModelKind = "decoder"
    name: str = "decoder"
    layers: int | None = None


@dataclass(frozen=True)
class CheckRequest:
    """One run of the checks.

    Attributes:
        source: the model.
        documents: token ids of each document; None: random ones of `RANDOM_LENGTHS`.
        ranks: numbers of processes; 1 is always among them.
        tolerance: of the balance, as for training.
        dtype: of all parameters and computations.
        seed: of random weights, documents and perturbations.
        checkpointing, ping_pong: run a Transformers model with activation checkpointing, and as two halves in turn.
        search_paths: where the user's module is looked for before anything else.
    """

    source: ModelSource = ModelSource()
    documents: tuple[tuple[int, ...], ...] | None = None
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    tolerance: float = 0.05
    dtype: Dtype = "float32"
    seed: int = 0
    checkpointing: bool = False
    ping_pong: bool = False
    search_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise UsageError(f"--ranks {' '.join(map(str, self.ranks))}: expected numbers from 1, such as 1 2 3 4")
        if not 0 < self.tolerance < math.inf:
            raise UsageError(f"--tolerance {self.tolerance}: expected a number above 0 such as 0.05")
        if self.source.layers is not None and self.source.layers < 1:
            raise UsageError(f"--layers {self.source.layers}: expected at least 1")
        if self.source.kind == "decoder" and (self.checkpointing or self.ping_pong):
            raise UsageError("--checkpointing, --ping-pong: only for Transformers models; the built-in decoder is none")
        object.__setattr__(self, "ranks", tuple(sorted({1, *self.ranks})))
        check_documents(self.lengths, self.ranks[-1])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return RANDOM_LENGTHS if self.documents is None else tuple(len(doc) for doc in self.documents)


def check_documents(lengths: Sequence[int], ranks: int) -> None:
    """Refuse documents with which the checks could not fail.

    Raises:
        UsageError: fewer documents with a label than ranks, or fewer than two.
    """
    needed = max(2, ranks)
    labelled = sum(length > 1 for length in lengths)
    if labelled < needed:
        raise UsageError(
            f"the data hold {labelled} document{'s' * (labelled != 1)} of two or more tokens, expected at least "
            f"{needed} to deal to {ranks} processes; give more documents or a lower --ranks"
        )


def random_documents(vocab_size: int, seed: int, context: int | None = None) -> list[IntArray]:
    """Random tokens of `RANDOM_LENGTHS`, cut to the context of the model; the same on every rank."""
    draw = np.random.default_rng(seed)
    lengths = [length if context is None else min(length, max(2, context)) for length in RANDOM_LENGTHS]
    return [int_column(draw.integers(0, vocab_size, length)) for length in lengths]


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Which documents each rank holds: contiguous blocks, tokens about 1 : 2 : 3 : …, a label on every rank.

    Raises:
        UsageError: there are not enough documents.
    """
    check_documents(lengths, ranks)
    total, whole = sum(lengths), ranks * (ranks + 1) / 2
    blocks: list[list[int]] = [[] for _ in range(ranks)]
    rank, before, labelled_left = 0, 0, sum(length > 1 for length in lengths)
    for doc, length in enumerate(lengths):
        blocks[rank].append(doc)
        before += length
        labelled_left -= length > 1
        served = any(lengths[d] > 1 for d in blocks[rank])
        end = total * (rank + 1) * (rank + 2) / 2 / whole
        next_length = lengths[doc + 1] if doc + 1 < len(lengths) else 0
        full = before + next_length / 2 > end  # the next one would lie beyond the end for the most part
        if rank < ranks - 1 and served and (full or labelled_left <= ranks - 1 - rank):
            rank += 1
    return blocks


def perturbation_patterns(documents: int) -> list[frozenset[int]]:
    """Sets of documents to change, so that for every ordered pair some set holds the first and not the second.

    Two numbers that differ, differ in a bit: each bit gives the documents that have it and those that do not, which
    needs 2 · log2(documents) passes instead of one for each document.
    """
    patterns = []
    for bit in range(max(1, (documents - 1).bit_length())):
        with_bit = frozenset(doc for doc in range(documents) if doc >> bit & 1)
        patterns += [with_bit, frozenset(range(documents)) - with_bit]
    return [pattern for pattern in patterns if 0 < len(pattern) < documents]


def perturbed(docs: Sequence[IntArray], changed: frozenset[int], vocab_size: int, seed: int) -> list[IntArray]:
    """The documents with other tokens in those of `changed`.

    New tokens are drawn from those that occur inside documents, and a document's last token stays: with the user's data
    it may be an end-of-document token, by which some collators find the documents.
    """
    inner = np.unique(np.concatenate([doc[:-1] for doc in docs if len(doc) > 1]))
    candidates = inner if len(inner) > 1 else np.arange(vocab_size, dtype=np.int64)
    result = []
    for number, doc in enumerate(docs):
        if number not in changed:
            result.append(doc)
            continue
        draw = np.random.default_rng((seed, number))
        place = np.searchsorted(candidates, doc)  # a step from its own place always leads to another token
        step = draw.integers(1, len(candidates), len(doc))
        other = candidates[(place + step) % len(candidates)]
        if len(doc) > 1:
            other[-1] = doc[-1]
        result.append(int_column(other))
    return result


def every_second_token_changed(docs: Sequence[IntArray], first: int, vocab_size: int, seed: int) -> list[IntArray]:
    """The documents with other tokens at places `first`, `first` + 2, …, but for their last ones (see `perturbed`).

    The outputs between must move. The token just before each of them is another, so that they do under any sliding
    window of two keys or more, and about half of all they see is, so that they do in long documents, in which a single
    token of n weighs 1 / n.
    """
    found = []
    for old, new in zip(docs, perturbed(docs, frozenset(range(len(docs))), vocab_size, seed), strict=True):
        mixed = old.copy()
        mixed[first:-1:2] = new[first:-1:2]
        found.append(int_column(mixed))
    return found


KEPT_SHARES = (0.0, 0.5)
"""Parts of a document that keep their tokens while later ones change; one token at least."""


def tokens_kept(length: int, share: float) -> int:
    """How many tokens of a document that are."""
    return max(1, int(length * share))


def later_tokens_changed(
    docs: Sequence[IntArray], changed: frozenset[int], share: float, vocab_size: int, seed: int
) -> list[IntArray]:
    """The documents with other tokens after the first `tokens_kept` of each in `changed`; last ones stay as well."""
    new = perturbed(docs, changed, vocab_size, seed)
    kept = [tokens_kept(len(doc), share) for doc in docs]
    return [int_column(np.concatenate([a[:n], b[n:]])) for a, b, n in zip(docs, new, kept, strict=True)]
