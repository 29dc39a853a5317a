"""Every placement of every query row there is, for tiny layouts, and what each costs, without help of the planners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import assume
from hypothesis import strategies as st

from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.planner.shares import work_caps

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Placements:
    """Figures of all placements, in the same order.

    Attributes:
        work: pairs per server, (placements, ranks).
        received: query rows plus key rows per server, (placements, ranks).
        bytes_in, bytes_out: dispatch phase, per rank, (placements, ranks).
        total: both phases, bytes inside a node at their weight, (placements,).
    """

    topology: Topology
    work: Ints
    received: Ints
    bytes_in: Ints
    bytes_out: Ints
    total: npt.NDArray[np.float64]

    @property
    def relays(self) -> Bools:
        """Whether any rank both sends and receives in the dispatch phase, (placements,)."""
        return np.any((self.bytes_in > 0) & (self.bytes_out > 0), axis=1)

    @property
    def busiest(self) -> Ints:
        """Most bytes in or out of a rank in the dispatch phase, (placements,)."""
        return np.maximum(self.bytes_in.max(axis=1), self.bytes_out.max(axis=1))

    def send(self, which: Bools, home: int, server: int, dispatch_bytes: int, all_bytes: int) -> None:
        """Count one row from `home` to `server`, in the placements `which`."""
        if home == server:
            return
        size = self.topology.node_size
        weight = self.topology.intra_node_weight if home // size == server // size else 1.0
        self.received[:, server] += which
        self.bytes_in[:, server] += which * dispatch_bytes
        self.bytes_out[:, home] += which * dispatch_bytes
        self.total[:] += which * (all_bytes * weight)


def all_placements(layout: Layout, topology: Topology, shape: AttentionShape, window: int | None = None) -> Placements:
    """Count every way to put each query row on some server, from the mask alone."""
    ranks, lengths = layout.ranks, layout.doc_lengths.tolist()
    count = ranks ** sum(lengths)
    home = [[0] * length for length in lengths]
    for shard in layout:
        home[shard.doc][shard.start : shard.start + shard.length] = [shard.rank] * shard.length
    found = Placements(topology, *(np.zeros((count, ranks), dtype=np.int64) for _ in range(4)), np.zeros(count))
    number, row = np.arange(count), 0
    for doc, length in enumerate(lengths):
        chosen = [number // ranks**at % ranks for at in range(row, row + length)]
        row += length
        for server in range(ranks):
            has = np.zeros((count, length), dtype=bool)
            for query in range(length):
                here = chosen[query] == server
                low = 0 if window is None else max(0, query - window + 1)
                found.work[:, server] += here * (query - low + 1)
                has[:, low : query + 1] |= here[:, None]
                found.send(here, home[doc][query], server, shape.query_bytes, shape.alpha_bytes)
            for key in range(length):
                found.send(has[:, key], home[doc][key], server, shape.beta_bytes, shape.beta_bytes)
    return found


def within_caps(
    placements: Placements, topology: Topology, tolerance: float, longest_row: int, *, promise: bool
) -> Bools:
    """Placements that keep the caps of work (the promised ones, or the targets) and of memory."""
    total = int(placements.work[0].sum())
    caps = work_caps(total, topology, tolerance, longest_row)
    kept = np.all(placements.work <= np.array(caps.promise if promise else caps.target), axis=1)
    if topology.memory_tokens:
        kept &= np.all(placements.received <= np.array(topology.memory_tokens), axis=1)
    return kept


def few_rows(layout: Layout, most: int = 7_000) -> Layout:
    """The layout, if it has at most so many placements; for use in a strategy."""
    assume(layout.ranks ** int(layout.doc_lengths.sum()) <= most)
    return layout


SPEEDS = [0.0, 0.5, 1.0, 2.0]


@st.composite
def topologies(draw: st.DrawFn, ranks: int, *, memory: bool = False, nodes: bool = False) -> Topology:
    """Equal or unequal speeds; on demand memory caps, often tight, and nodes."""
    speeds = draw(
        st.just([])
        | st.lists(st.sampled_from(SPEEDS), min_size=ranks, max_size=ranks).filter(lambda chosen: any(chosen))
    )
    caps = draw(st.just([]) | st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks)) if memory else []
    node_size, weight = draw(st.sampled_from([(1, 1.0), (2, 0.25), (2, 0.0)])) if nodes else (1, 1.0)
    return Topology(ranks, tuple(speeds), tuple(caps), node_size, weight)
