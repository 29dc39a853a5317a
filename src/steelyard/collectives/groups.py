"""Process groups with the same ranks as another one, for traffic that must not get between that one's collectives; and
the store that all ranks share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from steelyard.errors import PeerError, UsageError


def twin_group(group: dist.ProcessGroup | None, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A new group of the ranks of `group` (None: all). Collective over `group`, and over nothing else.

    Raises:
        PeerError: a rank did not come within the time-out; names it.
        UsageError: the ranks of a part of the world cannot agree on a name for it.
    """
    ranks = dist.get_process_group_ranks(group)
    _roll_call(ranks, timeout_s, "make")
    timeout = timedelta(seconds=timeout_s)
    whole = len(ranks) == dist.get_world_size()
    if not whole:
        _check_names(group, len(ranks))
    twin = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not whole)
    assert isinstance(twin, dist.ProcessGroup)
    # gloo returns on each rank when that rank's own connections stand. One that destroyed the group at once would cut
    # off ranks that are still connecting.
    _roll_call(ranks, timeout_s, "finish")
    return twin


def shared_store(group: dist.ProcessGroup | None) -> dist.Store | None:
    """A part of the default group's store for the ranks of `group`, by which they can say who is missing; None for a
    single rank, and where this torch keeps its store elsewhere.

    Every rank of the group calls it as often as the others: each call gets a part of its own. It may be used by another
    thread while the default group's store blocks this one.
    """
    store = _default_store()
    if group is None or store is None:
        return None
    name = f"steelyard-progress/{group.group_name}/{_name_of(dist.get_process_group_ranks(group))}"
    turn = store.add(f"{name}/turns of {dist.get_rank()}", 1)
    clone = getattr(store, "clone", lambda: store)
    return dist.PrefixStore(f"{name}/{turn}", clone())


def _default_store() -> dist.Store | None:
    read = getattr(dist.distributed_c10d, "_get_default_store", None)
    store: dist.Store | None = read() if read is not None and dist.is_initialized() else None
    return store


def _name_of(ranks: Sequence[int]) -> str:
    """Short, and the same on all ranks."""
    return hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()


def _roll_call(ranks: Sequence[int], timeout_s: float, what: Literal["make", "finish"]) -> None:
    """Wait until all ranks are here. torch would wait as well, but does not say for whom."""
    store = _default_store()
    if store is None or len(ranks) == 1:
        return
    own, name = dist.get_rank(), f"{_name_of(ranks)}/{what}"
    turns = f"steelyard-groups/{name}/turns of {own}"
    turn = store.add(turns, 1)
    keys = {rank: f"steelyard-groups/{name}/{turn}/{rank}" for rank in ranks}
    store.set(keys[own], "here")
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        store.add(turns, -1)
        store.delete_key(keys[own])
        names = ", ".join(str(rank) for rank in missing[:8]) + (", …" if len(missing) > 8 else "")
        shown = f"rank{'s' if len(missing) > 1 else ''} {names}"
        raise PeerError(
            f"process groups: rank {own} waited {timeout_s:g} s for {shown} to {what} "
            f"a group of {len(ranks)} ranks together; every rank must attach its model (or make its Balancer). To work "
            f"without the others, give group=torch.distributed.new_group([{own}], use_local_synchronization=True)"
        ) from error


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
