"""How long the documents of a data set are, and the imbalance that this causes.

Core attention of a document of n tokens costs n(n + 1)/2 pairs, so chunks of equal tokens are of unequal work. With
one chunk a rank and step, everyone waits for the largest: `imbalance` packs the lengths as training would, lane by
lane, and gives the largest work over the mean for each number of ranks: what balancing can gain on core attention.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappushpop
from pathlib import Path
from typing import Any, Literal

import numpy as np

from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.failures import SkipReport
from steelyard.data.lanes import DocumentReader, Lane
from steelyard.data.packing import tokens_to_take
from steelyard.data.sources import Source
from steelyard.data.stable import stable_permutation
from steelyard.data.tokenizers import load_tokenizer
from steelyard.domain.arrays import FloatArray, IntArray, int_column
from steelyard.errors import DataError, UsageError

DEFAULT_RANKS = (2, 4, 8, 16, 32, 64)
LEAST_STEPS = 8
LONGEST_SHOWN = 5
PROGRESS_BYTES = 1 << 20


@dataclass(frozen=True)
class LengthBin:
    """Documents of low … high − 1 tokens, and the tokens they hold together."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Imbalance:
    """Core-attention work of the busiest rank over the mean, when each of `ranks` ranks computes one packed chunk.

    Attributes:
        ranks: number of ranks.
        steps: simulated steps.
        max_over_mean: mean over steps of (largest work / mean work).
        max_over_mean_p95: its 95th percentile.
    """

    ranks: int
    steps: int
    max_over_mean: float
    max_over_mean_p95: float


@dataclass(frozen=True)
class ScanProgress:
    """How far a scan has come. `total_bytes` is None where it is not known (compressed or columnar files)."""

    documents: int
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, eq=False)
class DataStatistics:
    """Lengths of a data set in tokens, and what they mean for training. All lengths count the special tokens added.

    Attributes:
        lengths: tokens of every document in the order of training, int64 (documents,).
        size_bytes: UTF-8 bytes of all documents.
        bins: documents and tokens by length, one bin a power of two.
        longest: path and tokens of the longest documents.
        skipped: what could not be used, by reason.
        files: files of all sources.
        ignored_files: files left aside, by their ending.
        chunk_tokens: chunk size for which `imbalance` holds.
        imbalance: one entry for each number of ranks.
        complete: False if the scan stopped at `max_documents` or `max_tokens`.
    """

    lengths: IntArray
    size_bytes: int
    bins: tuple[LengthBin, ...]
    longest: tuple[tuple[str, int], ...]
    skipped: SkipReport
    files: int
    ignored_files: dict[str, int]
    tokenizer: str
    chunk_tokens: int
    imbalance: tuple[Imbalance, ...]
    complete: bool

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def mean(self) -> float:
        return float(self.lengths.mean())

    @property
    def max(self) -> int:
        return int(self.lengths.max())

    def percentile(self, percent: float) -> int:
        """Length that `percent` of the documents do not exceed."""
        return int(np.percentile(self.lengths, percent, method="inverted_cdf"))

    def token_share_above(self, length: int) -> float:
        """Share of all tokens in documents of more than `length` tokens."""
        return float(self.lengths[self.lengths > length].sum() / self.lengths.sum())

    def as_json(self) -> dict[str, Any]:
        """Everything but the single lengths, as JSON values."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "size_bytes": self.size_bytes,
            "files": self.files,
            "ignored_files": dict(self.ignored_files),
            "complete": self.complete,
            "tokenizer": self.tokenizer,
            "length": {
                "mean": self.mean,
                "median": self.percentile(50),
                "p90": self.percentile(90),
                "p99": self.percentile(99),
                "max": self.max,
            },
            "bins": [{"low": b.low, "high": b.high, "documents": b.documents, "tokens": b.tokens} for b in self.bins],
            "longest": [{"path": path, "tokens": tokens} for path, tokens in self.longest],
            "skipped": dict(self.skipped.counts),
            "skipped_examples": {reason: list(lines) for reason, lines in self.skipped.examples.items()},
            "chunk_tokens": self.chunk_tokens,
            "token_share_above_chunk": self.token_share_above(self.chunk_tokens),
            "imbalance": [
                {
                    "ranks": i.ranks,
                    "steps": i.steps,
                    "work_max_over_mean": i.max_over_mean,
                    "work_max_over_mean_p95": i.max_over_mean_p95,
                }
                for i in self.imbalance
            ],
        }


def data_statistics(
    data: str | Path | SourceConfig | DataConfig,
    *,
    tokenizer: str = "bytes",
    chunk_tokens: int = 8192,
    ranks: Sequence[int] = DEFAULT_RANKS,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    progress: Callable[[ScanProgress], None] | None = None,
) -> DataStatistics:
    """Read every document once, in the order of training, and measure it. What cannot be read is counted.

    Args:
        data: a path, a source, or a whole configuration (whose tokenizer and chunk_tokens then hold).
        tokenizer, chunk_tokens: for a path or a source.
        ranks: numbers of ranks for which to give the imbalance.
        max_documents: stop after that many.
        max_tokens: stop once the documents hold that many tokens.
        progress: called about once a MiB and at the end.

    Raises:
        UsageError: nothing to read.
        DataError: no document could be read.
    """
    if isinstance(data, str | Path):
        data = SourceConfig(path=str(data))
    if isinstance(data, SourceConfig):
        data = DataConfig(sources=(data,), tokenizer=tokenizer, chunk_tokens=chunk_tokens)
    if max_documents is not None and max_documents < 1:
        raise UsageError(f"data stats: max_documents={max_documents}, expected at least 1")
    config = replace(data, batch_chunks=1, epochs=1, on_error="skip", eval_fraction=0.0)
    sources = [Source(s, i, config, lanes=1) for i, s in enumerate(config.sources)]
    files = [f for s in sources for f in s.files]
    known = all(f.compression is None and f.kind in ("text", "jsonl") for f in files)
    total_bytes = sum(f.size_bytes for f in files) if known else None
    loaded = load_tokenizer(config.tokenizer, config.eos_token)
    if config.append_eos and loaded.eos_id is None:
        # Lengths are wanted, not training: a tokenizer without an end-of-document token is no obstacle here.
        config = replace(config, append_eos=False)
    lane = Lane(0, DocumentReader(config, "train", loaded, sources))

    lengths = array("q")
    longest: list[tuple[int, str]] = [(0, "")] * LONGEST_SHOWN
    size_bytes = reported = tokens = 0
    complete = True
    while (document := lane.peek()) is not None:
        if (max_documents is not None and len(lengths) >= max_documents) or (
            max_tokens is not None and tokens >= max_tokens
        ):
            complete = False
            break
        lengths.append(len(document.tokens))
        tokens += len(document.tokens)
        heappushpop(longest, (len(document.tokens), document.path))
        size_bytes += document.size_bytes
        lane.take(len(document.tokens))
        if progress is not None and size_bytes - reported >= PROGRESS_BYTES:
            reported = size_bytes
            progress(ScanProgress(len(lengths), size_bytes, total_bytes))
    if progress is not None:
        progress(ScanProgress(len(lengths), size_bytes, total_bytes))
    skipped = lane.state.skipped
    if not lengths:
        example = next((lines[0] for lines in skipped.examples.values() if lines), "no record at all")
        paths = ", ".join(s.path for s in config.sources)
        raise DataError(f"data source {paths}: no document could be used: {skipped}; for example {example}")
    column = int_column(np.frombuffer(lengths, dtype=np.int64))
    ignored: dict[str, int] = {}
    for source in sources:
        for suffix, count in source.listing.ignored.items():
            ignored[suffix] = ignored.get(suffix, 0) + count
    return DataStatistics(
        lengths=column,
        size_bytes=size_bytes,
        bins=length_bins(column),
        longest=tuple((path, tokens) for tokens, path in sorted(longest, key=lambda e: (-e[0], e[1])) if tokens),
        skipped=skipped,
        files=len(files),
        ignored_files=ignored,
        tokenizer=loaded.name,
        chunk_tokens=config.chunk_tokens,
        imbalance=tuple(imbalance(column, config.chunk_tokens, n, documents=config.documents) for n in ranks),
        complete=complete,
    )


def length_bins(lengths: IntArray) -> tuple[LengthBin, ...]:
    """Documents and tokens by power of two, from the first bin that holds a document to the last."""
    if not len(lengths):
        return ()
    exponent = np.frexp(lengths.astype(np.float64))[1] - 1
    bins = []
    for e in range(int(exponent.min()), int(exponent.max()) + 1):
        inside = lengths[exponent == e]
        bins.append(LengthBin(2**e, 2 ** (e + 1), len(inside), int(inside.sum())))
    return tuple(bins)


def imbalance(
    lengths: Iterable[int] | IntArray,
    chunk_tokens: int,
    ranks: int,
    *,
    documents: Literal["cut", "whole"] = "cut",
    seed: int = 0,
) -> Imbalance:
    """Pack `lengths` (in this order, dealt to one lane a rank) into chunks and compare the ranks' work in each step.

    Few documents are repeated, reshuffled, until there are LEAST_STEPS steps, as an endless run would repeat them.

    Raises:
        UsageError: no document, or a number below 1.
    """
    column = int_column(lengths)
    column = column[column > 0]
    if chunk_tokens < 1 or ranks < 1:
        raise UsageError(f"imbalance: chunk_tokens={chunk_tokens}, ranks={ranks}, expected at least 1 each")
    if not len(column):
        raise UsageError("imbalance: no document with a token")
    work = _chunk_work if documents == "cut" else _chunk_work_whole
    # The last, partly filled chunk of a lane is left out.
    packed, copies = column, 1
    while True:
        by_lane = [work(packed[lane::ranks], chunk_tokens) for lane in range(ranks)]
        steps = min(len(w) for w in by_lane)
        if steps >= LEAST_STEPS:
            break
        copies *= 2
        repeated = np.tile(column, copies - 1)
        packed = np.concatenate([column, repeated[stable_permutation(len(repeated), seed, copies)]])
    table = np.stack([w[:steps] for w in by_lane], axis=1)
    ratio = table.max(axis=1) / table.mean(axis=1)
    return Imbalance(ranks, steps, float(ratio.mean()), float(np.percentile(ratio, 95)))


def _chunk_work(lengths: IntArray, chunk_tokens: int) -> FloatArray:
    """Causal pairs of each full chunk of one lane, documents cut at chunk ends; float64 (chunks,)."""
    ends = np.cumsum(lengths)
    chunks = int(ends[-1]) // chunk_tokens if len(ends) else 0
    cuts = np.union1d(ends, np.arange(1, chunks + 1) * chunk_tokens)
    cuts = cuts[cuts <= chunks * chunk_tokens]
    starts = np.concatenate([[0], cuts[:-1]]).astype(np.int64) if len(cuts) else cuts
    part = (cuts - starts).astype(np.float64)
    pairs = np.bincount(starts // chunk_tokens, weights=part * (part + 1) / 2, minlength=chunks)
    return pairs.astype(np.float64)


def _chunk_work_whole(lengths: IntArray, chunk_tokens: int) -> FloatArray:
    """As `_chunk_work`, documents kept whole where they fit a chunk."""
    work, room, current = [], chunk_tokens, 0.0
    for length in lengths.tolist():
        rest = length
        while rest:
            count = tokens_to_take(
                rest, room, chunk_is_empty=room == chunk_tokens, begun=rest < length, whole=True
            )  # fmt: skip
            current += count * (count + 1) / 2
            rest, room = rest - count, room - count
            if room == 0 or count == 0:
                work.append(current)
                room, current = chunk_tokens, 0.0
    return np.array(work, dtype=np.float64)
