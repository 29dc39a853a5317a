"""A stream of packed chunks: deterministic, the same on any number of ranks, resumable to the exact token.

A global step takes `batch_chunks` chunks, one from each lane. Rank r of n owns the lanes r, r + n, … and reads only
those. A lane's state is a cursor per source, the tokens drawn from each source, and the tokens of the current document
that earlier chunks took; the next document is the first one at or after the cursor of the source that is furthest
behind its share. Nothing else is remembered, so the state of a run on n ranks starts a run on any other number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from steelyard.data.config import DataConfig, Split
from steelyard.data.failures import SkipReport
from steelyard.data.lanes import DocumentReader, Lane, LaneState
from steelyard.data.packing import Chunk
from steelyard.data.sources import Source
from steelyard.data.tokenizers import Tokenizer, load_tokenizer
from steelyard.errors import DataError, UsageError

STATE_VERSION = 1


class ChunkStream:
    """The chunks of one rank, step by step.

    May be called from any thread, one call at a time. After a step, `state_dict()` is the state *after* it: a thread
    that prefetches keeps the state with the chunks, and a checkpoint stores the one of the last step trained on.

    Args:
        config: what to read and how to pack it.
        rank, ranks: this rank of the data group; it owns the lanes rank, rank + ranks, …
        split: "train", or "eval" for the documents that `eval_fraction` keeps.
        tokenizer: instead of loading `config.tokenizer`.

    Raises:
        UsageError: nothing to read, more ranks than `batch_chunks`, a tokenizer without the tokens asked for.
        DataError: a folder cannot be read.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        rank: int = 0,
        ranks: int = 1,
        split: Split = "train",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise UsageError(f"data: rank {rank} of {ranks}, expected 0 … ranks - 1")
        if ranks > config.batch_chunks:
            raise UsageError(
                f"data: {ranks} ranks for batch_chunks={config.batch_chunks}; every rank needs a chunk of each step: "
                f"raise batch_chunks to {ranks} or more, or start fewer processes"
            )
        if split not in ("train", "eval"):
            raise UsageError(f"data: split={split!r}, expected 'train' or 'eval'")
        if split == "eval" and config.eval_fraction == 0:
            raise UsageError("data: split 'eval' with eval_fraction=0; set eval_fraction, for example 0.01")
        self.config = config
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.tokenizer, config.eos_token)
        self._check_special_tokens()
        owned = range(rank, config.batch_chunks, ranks)
        self.sources = tuple(
            Source(s, i, config, lanes=config.batch_chunks, owned_lanes=len(owned))
            for i, s in enumerate(config.sources)
        )
        reader = DocumentReader(config, split, self.tokenizer, self.sources)
        self._split = split
        self._lanes = tuple(Lane(number, reader) for number in owned)
        self._lock = threading.RLock()

    @property
    def lanes(self) -> tuple[int, ...]:
        """Numbers of the lanes that this rank owns, in the order of `next_chunks`."""
        return tuple(lane.number for lane in self._lanes)

    @property
    def exhausted(self) -> bool:
        """Whether every lane of this rank has given its last token. Always False without `epochs`.

        Looks one document ahead where that is needed. A document that cannot be read counts as more to come: the
        next `next_chunks` raises its error.
        """
        if self.config.epochs is None:
            return False
        with self._lock:
            try:
                return all(lane.peek() is None for lane in self._lanes)
            except DataError:
                return False

    @property
    def skipped(self) -> SkipReport:
        """What this rank's lanes left out so far, since the start of the run (also before a resume)."""
        with self._lock:
            return SkipReport.merged(lane.state.skipped for lane in self._lanes)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the order of data depends on: equal on all ranks, or they do not see the same files."""
        c = self.config
        return {
            "split": self._split,
            "seed": c.seed,
            "shuffle": c.shuffle,
            "batch_chunks": c.batch_chunks,
            "eval_fraction": c.eval_fraction,
            "tokenizer": self.tokenizer.fingerprint,
            "special_tokens": [c.prepend_bos, c.append_eos, self.tokenizer.bos_id, self.tokenizer.eos_id],
            "files": [s.fingerprint for s in self.sources],
            "sources": [[s.weight, s.field, s.encoding, s.min_bytes, s.max_bytes] for s in c.sources],
        }

    def next_chunks(self) -> list[Chunk]:
        """One chunk for each owned lane; a chunk without tokens from a lane that has run dry.

        Raises:
            DataError: a document cannot be read and `on_error` is "stop". No lane has moved: calling again tries again.
        """
        with self._lock:
            before = [lane.save() for lane in self._lanes]
            try:
                return [lane.next_chunk() for lane in self._lanes]
            except BaseException:
                for lane, saved in zip(self._lanes, before, strict=True):
                    lane.restore(saved)
                raise

    def state_dict(self) -> dict[str, Any]:
        """Where the owned lanes stand, as JSON values. `merge_states` joins the states of all ranks."""
        with self._lock:
            return {
                "version": STATE_VERSION,
                "fingerprint": self.fingerprint,
                "lanes": {str(lane.number): lane.state.as_json() for lane in self._lanes},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` (of the ranks that owned these lanes, merged) stood.

        Raises:
            UsageError: a state of other data, another seed, …; or without a lane that this rank owns.
        """
        with self._lock:
            if state.get("version") != STATE_VERSION:
                raise UsageError(f"data state: version {state.get('version')!r}, expected {STATE_VERSION}")
            stored = state["fingerprint"]
            for key, mine in self.fingerprint.items():
                if stored.get(key) != mine:
                    raise UsageError(
                        f"data state: {key} was {stored.get(key)!r} and is {mine!r}; the order of data would change: "
                        "restore it, or start without the loader's state"
                    )
            missing = [n for n in self.lanes if str(n) not in state["lanes"]]
            if missing:
                raise UsageError(f"data state: no lanes {missing}; merge the states of all ranks with merge_states")
            for lane in self._lanes:
                lane.state = LaneState.from_json(state["lanes"][str(lane.number)])

    def reset(self) -> None:
        """Back to the start, for example before each evaluation."""
        with self._lock:
            for lane in self._lanes:
                lane.state = LaneState.start(len(self.sources))

    def _check_special_tokens(self) -> None:
        if self.config.append_eos and self.tokenizer.eos_id is None:
            raise UsageError(
                f"tokenizer {self.tokenizer.name}: it declares no end-of-document token; "
                "set data.eos_token, or data.append_eos = false"
            )
        if self.config.prepend_bos and self.tokenizer.bos_id is None:
            raise UsageError(
                f"tokenizer {self.tokenizer.name}: it declares no begin-of-document token; set data.prepend_bos = false"
            )


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state with the lanes of all ranks, for `ChunkStream.load_state_dict` on any number of ranks.

    Raises:
        UsageError: the states are of different streams, or a lane stands in two of them in different places.
    """
    merged: dict[str, Any] = {}
    for state in states:
        if not merged:
            merged = {**state, "lanes": dict(state["lanes"])}
            continue
        if state["fingerprint"] != merged["fingerprint"] or state["version"] != merged["version"]:
            raise UsageError("data state: the ranks' states are of different data or settings")
        for number, lane in state["lanes"].items():
            if merged["lanes"].setdefault(number, lane) != lane:
                raise UsageError(f"data state: lane {number} stands in two states, in different places")
    if not merged:
        raise UsageError("data state: nothing to merge")
    merged["lanes"] = {number: merged["lanes"][number] for number in sorted(merged["lanes"], key=int)}
    return merged
