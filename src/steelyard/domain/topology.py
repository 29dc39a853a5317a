"""The attention servers that a plan may use: how many, how fast, how much they may receive, how they are joined."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """`servers` attention servers in rank order.

    Attributes:
        servers: number of attention servers (in place: the ranks of the data group).
        speeds: relative speed of each server; `()` means all equal. A server of speed 0 computes nothing.
        memory_tokens: most tokens (query rows plus key rows) that each server may receive; `()` means no cap.
        node_size: ranks per node; bytes inside a node count `intra_node_weight` each.
        intra_node_weight: weight of a byte inside a node relative to one between nodes, 0 … 1.
    """

    servers: int
    speeds: tuple[float, ...] = ()
    memory_tokens: tuple[int, ...] = ()
    node_size: int = 1
    intra_node_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UsageError(f"topology: servers={self.servers}, expected at least 1")
        for name in ("speeds", "memory_tokens"):
            values = getattr(self, name)
            if values and len(values) != self.servers:
                raise UsageError(f"topology: {len(values)} {name} for {self.servers} servers; give one each, or none")
        if any(not 0 <= s < float("inf") for s in self.speeds) or (self.speeds and sum(self.speeds) <= 0):
            raise UsageError(f"topology: speeds={self.speeds}, expected numbers >= 0 of which at least one is > 0")
        if any(m < 0 for m in self.memory_tokens):
            raise UsageError(f"topology: memory_tokens={self.memory_tokens}, expected numbers >= 0")
        if self.node_size < 1:
            raise UsageError(f"topology: node_size={self.node_size}, expected at least 1")
        if not 0 <= self.intra_node_weight <= 1:
            raise UsageError(f"topology: intra_node_weight={self.intra_node_weight}, expected 0 … 1")
