"""How several replicas of one job stay together: the modes of `[sync]`, as values that simulator and runtime share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from steelyard.errors import UsageError

ModeName: TypeAlias = Literal["every_step", "bounded_staleness", "local_sgd", "diloco", "parameter_server", "gossip"]
Compression: TypeAlias = Literal["none", "bf16", "int8", "int4", "topk"]

COMPRESSED_BITS = {"none": 32.0, "bf16": 16.0, "int8": 8.25, "int4": 4.25}
"""Bits that travel per parameter; blockwise integers carry a 16-bit scale for each block of 64."""


@dataclass(frozen=True)
class SyncMode:
    """When replicas exchange, and what.

    Attributes:
        mode: see the names; `every_step` reduces gradients in each step.
        period: steps between two exchanges (`local_sgd`, `diloco`).
        lead: steps by which a fast replica may be ahead (`bounded_staleness`).
        fragments: parts that `diloco` exchanges one after another within a period.
        overlap: steps over which an exchange may be hidden under the work that follows it.
        compression: of what travels; `topk` sends `topk_share` of the values with their indices (8 bytes each).
        fraction: share of the parameters that `gossip` sends to a neighbour.
    """

    mode: ModeName = "every_step"
    period: int = 1
    lead: int = 1
    fragments: int = 1
    overlap: int = 0
    compression: Compression = "none"
    topk_share: float = 0.01
    fraction: float = 1.0

    def __post_init__(self) -> None:
        for name in ("period", "fragments"):
            if getattr(self, name) < 1:
                raise UsageError(f"sync: {name}={getattr(self, name)}, expected at least 1")
        for name in ("lead", "overlap"):
            if getattr(self, name) < 0:
                raise UsageError(f"sync: {name}={getattr(self, name)}, expected 0 or more")
        for name in ("topk_share", "fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"sync: {name}={getattr(self, name)}, expected more than 0 and at most 1")
        if self.mode in ("every_step", "bounded_staleness", "parameter_server", "gossip") and self.period != 1:
            raise UsageError(
                f"sync: period={self.period} with mode={self.mode}, which exchanges in every step; set period=1 or "
                "mode='local_sgd' or 'diloco'"
            )
        if self.overlap > self.period:
            raise UsageError(
                f"sync: overlap={self.overlap} is longer than period={self.period}; nearest: {self.period}"
            )

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of one parameter in one exchange of all of them."""
        if self.compression == "topk":
            return 8.0 * self.topk_share
        return COMPRESSED_BITS[self.compression] / 8 * (self.fraction if self.mode == "gossip" else 1.0)
