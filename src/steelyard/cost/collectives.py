"""How long transfers take: floor + bytes / rate by operation, size and place (an α–β model), and over wide-area links.

A group of n ranks with g of them on each node runs a ring. Inside a node its rate is the node's bus rate per device;
across nodes each node sends over g ports. An all-gather or reduce-scatter moves (n − 1)/n of the whole, an all-reduce
twice that, or once where all devices of a node take part and its switch adds. A start inside a node is the floor that
was measured with all its devices, in equal parts for the launch and for each doubling of the ranks. A rank's own part
of a reduce-scatter is added up at the end, when nothing hides it. Checked against nccl-tests
(docs/results/simulator.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from steelyard.cost.profiles import DeviceProfile
from steelyard.domain.arrays import FloatArray
from steelyard.errors import UsageError

OWN_PART_PASSES = 6.0
"""Passes of a rank's own part through memory that end a reduce-scatter; fitted on reduce-scatters of 8 H200."""

SWITCH_START = 1.35
"""Start of an all-reduce that the switch adds, over that of an all-gather: it reads and then sends, behind a barrier
each. Fitted on all-reduces of 8 H200 (benchmarks/fit_profiles.py)."""

BOARD_DEVICES = 8
"""Devices of the boards (HGX A100 to B200) whose starts were measured for 2, 4 and 8 of them."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, `per_node` on each node."""

    size: int
    per_node: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.per_node < 1:
            raise UsageError(f"group: size={self.size}, per_node={self.per_node}, expected at least 1 each")

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)


def group_of(degree: int, inner: int, node_size: int) -> Group:
    """The group along an axis of `degree` whose neighbours stand `inner` devices apart, on nodes of `node_size`."""
    return Group(degree, max(1, min(degree, node_size // inner)) if inner < node_size else 1)


def ring_line(group: Group, profile: DeviceProfile) -> tuple[float, float]:
    """An all-gather's or reduce-scatter's seconds as a line: start, and seconds per byte of the whole."""
    if group.size == 1:
        return 0.0, 0.0
    rate, latency = profile.node_bytes_per_s, _start_s(group, profile)
    if group.nodes > 1:
        rate = min(rate, group.per_node * profile.network_bytes_per_s)
        latency += (group.nodes - 1) * profile.network_hop_s if group.nodes <= 8 else _tree_hops(group, profile)
    return latency, (group.size - 1) / group.size / rate


def _start_s(group: Group, profile: DeviceProfile) -> float:
    """Launch and latency inside a node: a part for the launch and one for each doubling of the ranks.

    That holds for the boards of eight devices that it was measured on; elsewhere the floor is that of any group.
    """
    if profile.node_size != BOARD_DEVICES:
        return profile.node_floor_s
    doublings = log2(min(group.size, group.per_node, profile.node_size))
    return profile.node_floor_s * (1 + doublings) / (1 + log2(BOARD_DEVICES))


def all_gather_s(size_bytes: float, group: Group, profile: DeviceProfile) -> float:
    """Seconds until every rank has all `size_bytes`, of which each began with an equal part."""
    latency, per_byte = ring_line(group, profile)
    return latency + size_bytes * per_byte if size_bytes > 0 else 0.0


def _tree_hops(group: Group, profile: DeviceProfile) -> float:
    """Large groups go by trees or by PAT, whose depth is logarithmic: 7 hops at 8 nodes, as of the ring there, and 4
    more for each doubling (assumed, not fitted)."""
    return (7 + 4 * log2(group.nodes / 8)) * profile.network_hop_s


def reduce_scatter_s(size_bytes: float, group: Group, profile: DeviceProfile) -> float:
    """Seconds until every rank has its part of the sum of `size_bytes`."""
    if group.size == 1 or size_bytes <= 0:
        return 0.0
    own_part_s = OWN_PART_PASSES * size_bytes / group.size / profile.memory_bytes_per_s
    return all_gather_s(size_bytes, group, profile) + own_part_s


def all_reduce_s(size_bytes: float, group: Group, profile: DeviceProfile) -> float:
    """Seconds until every rank has the sum of `size_bytes`."""
    if group.size == 1 or size_bytes <= 0:
        return 0.0
    if group.nodes == 1 and group.size == profile.node_size and profile.switch_all_reduce_bytes_per_s > 0:
        return SWITCH_START * _start_s(group, profile) + size_bytes / profile.switch_all_reduce_bytes_per_s
    once = all_gather_s(size_bytes, group, profile)
    return 2 * once - _start_s(group, profile)


def send_s(size_bytes: float, profile: DeviceProfile, *, same_node: bool) -> float:
    """One device to another; inside a node with a quarter of a collective's start, its launch (see `_start_s`)."""
    if same_node:
        return profile.node_floor_s / 4 + size_bytes / profile.node_bytes_per_s
    return profile.network_hop_s + size_bytes / profile.network_bytes_per_s


def all_to_all_s(
    node_out: FloatArray, node_in: FloatArray, network_out: FloatArray, network_in: FloatArray, profile: DeviceProfile
) -> FloatArray:
    """Uneven all-to-all, per rank: the larger of what it sends and receives, inside the node and over its port at once.

    All arguments in bytes, of one shape. A rank that neither sends nor receives is done after the floor.
    """
    inside = np.maximum(node_out, node_in) / profile.node_bytes_per_s
    outside = np.maximum(network_out, network_in) / profile.network_bytes_per_s
    any_network = (network_out + network_in) > 0
    slower = np.maximum(inside, outside).astype(np.float64)
    total: FloatArray = profile.node_floor_s + any_network * profile.network_hop_s + slower
    return total


@dataclass(frozen=True)
class WideLink:
    """A link between sites.

    Attributes:
        round_trip_s: latency there and back.
        bytes_per_s: rate of the link.
        streams: connections used side by side.
        window_bytes: most unacknowledged bytes of one connection; its rate cannot exceed window / round trip.
        loss: share of packets lost; 0: none.
    """

    round_trip_s: float
    bytes_per_s: float
    streams: int = 4
    window_bytes: float = 16 * 2**20
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.round_trip_s < 0 or self.bytes_per_s <= 0 or self.streams < 1 or self.window_bytes <= 0:
            raise UsageError(
                f"link: round_trip_s={self.round_trip_s}, bytes_per_s={self.bytes_per_s}, streams={self.streams}, "
                f"window_bytes={self.window_bytes}, expected a rate, a window and a stream above 0"
            )
        if not 0 <= self.loss < 1:
            raise UsageError(f"link: loss={self.loss}, expected 0 … 1")

    @property
    def rate(self) -> float:
        """Bytes per second of all streams together: window and loss limit each of them (Mathis et al. 1997)."""
        one = self.bytes_per_s
        if self.round_trip_s > 0:
            one = min(one, self.window_bytes / self.round_trip_s)
            if self.loss > 0:
                one = min(one, 1460 / self.round_trip_s * 1.22 / self.loss**0.5)
        return min(self.bytes_per_s, self.streams * one)

    def transfer_s(self, size_bytes: float, rounds: float = 1) -> float:
        """`rounds` one-way-and-back waits, then the bytes."""
        return self.round_trip_s * rounds + size_bytes / self.rate


def wide_all_reduce_s(size_bytes: float, sites: int, link: WideLink) -> float:
    """All-reduce between sites that each hold a reduced copy (two-level): a ring over the slowest link."""
    if sites == 1:
        return 0.0
    return link.transfer_s(2 * (sites - 1) / sites * size_bytes, rounds=sites - 1)
