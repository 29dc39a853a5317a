"""The attention servers that a plan may use: how many, how fast, how much they may receive, how they are joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from operator import index

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

    Raises:
        UsageError: a value of another kind or out of range, or not one for each server; the first is named.
    """

    servers: int
    speeds: tuple[float, ...] = ()
    memory_tokens: tuple[int, ...] = ()
    node_size: int = 1
    intra_node_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("servers", "node_size"):
            _require_whole(getattr(self, name), name, least=1)
        for name, kind in (("speeds", "numbers"), ("memory_tokens", "whole numbers")):
            given = getattr(self, name)
            if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
                raise UsageError(f"topology: {name}={given!r}, expected {kind}, one for each server, or ()")
            values = tuple(given)
            object.__setattr__(self, name, values)  # a list would make equal topologies unequal
            if values and len(values) != self.servers:
                raise UsageError(f"topology: {len(values)} {name} for {self.servers} servers; give one each, or none")
        for server, speed in enumerate(self.speeds):
            if not _is_number(speed) or not (isfinite(speed) and speed >= 0):
                raise UsageError(f"topology: speeds[{server}]={speed!r}, expected a number of at least 0")
        if self.speeds and not any(self.speeds):
            raise UsageError("topology: all speeds are 0; expected one above 0 at least: somebody must compute")
        for server, tokens in enumerate(self.memory_tokens):
            _require_whole(tokens, f"memory_tokens[{server}]", least=0)
        if not _is_number(self.intra_node_weight) or not 0 <= self.intra_node_weight <= 1:
            raise UsageError(f"topology: intra_node_weight={self.intra_node_weight!r}, expected a number from 0 to 1")


def _require_whole(value: object, name: str, *, least: int) -> None:
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError(f"topology: {name}={value!r}, expected a whole number of at least {least}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
