"""Process groups with the same ranks as another one, for traffic that must not get between that one's collectives."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from steelyard.errors import UsageError


def twin_group(group: dist.ProcessGroup | None, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A new group of the ranks of `group` (None: all). Collective over `group`, and over nothing else.

    Raises:
        UsageError: the ranks of a part of the world cannot agree on a name for it.
    """
    ranks = dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=timeout_s)
    whole = len(ranks) == dist.get_world_size()
    if not whole:
        _check_names(group, len(ranks))
    twin = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not whole)
    assert isinstance(twin, dist.ProcessGroup)
    return twin


def _check_names(group: dist.ProcessGroup | None, ranks: int) -> None:
    """torch names a group that only its ranks make after the number of groups that each of them is in. Where that
    differs they would wait for each other under different names until the time-out."""
    world = getattr(dist.distributed_c10d, "_world", None)
    counts: list[int] = [0] * ranks
    dist.all_gather_object(counts, len(world.pg_names) if world is not None else 0, group=group)
    if len(set(counts)) > 1:
        raise UsageError(
            f"process groups: the ranks of this group are in {counts} groups each, so torch cannot make another one of "
            "them alone; make it with torch.distributed.new_group on all ranks and pass it as planning_group"
        )
