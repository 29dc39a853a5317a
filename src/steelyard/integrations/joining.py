"""How the ranks of an adapter are joined: their groups, and news of failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from steelyard.collectives import release_group, twin_group
from steelyard.errors import PeerError, SteelyardError


@dataclass(frozen=True)
class Joined:
    """The groups of one balancer.

    Attributes:
        transfers: where rows are exchanged; None: one rank alone.
        planning: a gloo group of the same ranks, for lengths; None: one rank alone.
        made: those that were made here.
    """

    transfers: dist.ProcessGroup | None
    planning: dist.ProcessGroup | None
    made: tuple[dist.ProcessGroup, ...] = ()

    def release(self) -> None:
        """End the threads and sockets of the groups that were made here, once no transfer is left: gloo's."""
        for group in self.made:
            release_group(group)


def join(
    group: dist.ProcessGroup | None, planning: dist.ProcessGroup | None, device: torch.device, timeout_s: float
) -> Joined:
    """Groups for a balancer of the ranks of `group`. Collective.

    Transfers get a group of their own: among the sums of gradients the place of an exchange would depend on when a
    bucket fills. With `planning` no group is made.

    Raises:
        PeerError, UsageError: as `twin_group`.
    """
    if group is None or dist.get_world_size(group) == 1:
        return Joined(None, planning)
    if planning is not None:
        return Joined(group, planning)
    backend = "gloo" if device.type == "cpu" else dist.get_backend(group)
    made = (twin_group(group, backend, timeout_s), twin_group(group, "gloo", timeout_s))
    return Joined(*made, made)


def told(error: Exception) -> str:
    """What the other ranks are told of an error of this one."""
    return str(error) if isinstance(error, SteelyardError) else f"{type(error).__name__}: {error}"


def raise_if_told(notes: Iterable[Any]) -> None:
    """Look for a rank that said with its lengths (`failure` of its note) that it cannot take part.

    Raises:
        PeerError: names it and says why.
    """
    for rank, note in enumerate(notes):
        failure = getattr(note, "failure", None)
        if failure is not None:
            raise PeerError(f"rank {rank} cannot take the step: {failure}")
