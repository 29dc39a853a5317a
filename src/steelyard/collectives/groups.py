"""Process groups with the same ranks as another one, for traffic that must not get between that one's collectives; and
the store that all ranks share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from steelyard.errors import PeerError, UsageError

_OWN = "steelyard-own-group"
"""Names of groups that are not in torch's register begin with it."""


def twin_group(group: dist.ProcessGroup | None, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A new group of the ranks of `group` (None: all). Collective over `group`, and over nothing else.

    Raises:
        PeerError: a rank did not come within the time-out; names it.
        UsageError: the ranks of a part of the world cannot agree on a name for it.
    """
    ranks = dist.get_process_group_ranks(group)
    turn = _roll_call(ranks, timeout_s, "make")
    timeout = timedelta(seconds=timeout_s)
    whole, store = len(ranks) == dist.get_world_size(), _default_store()
    if not whole and backend == "gloo" and store is not None:
        twin = _own_group(ranks, store, f"{_OWN}/{_name_of(ranks)}/{turn}", timeout)
    else:
        if not whole:
            _check_names(group, len(ranks))
        made = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not whole)
        assert isinstance(made, dist.ProcessGroup)
        twin = made
    # gloo returns on each rank when that rank's own connections stand. One that destroyed the group at once would cut
    # off ranks that are still connecting.
    _roll_call(ranks, timeout_s, "finish")
    return twin


def release_group(group: dist.ProcessGroup) -> None:
    """Give up a group that `twin_group` made, once no transfer is left. gloo's end without the other ranks: threads and
    sockets go when nobody holds the group any more. NCCL's stay until the process ends."""
    if _is_own(group):
        group.shutdown()
    elif dist.is_initialized() and dist.get_backend(group) == "gloo":
        dist.destroy_process_group(group)


def rank_in(group: dist.ProcessGroup) -> int:
    """Rank of this process in a group; below 0 if it is none of its members."""
    return group.rank() if _is_own(group) else dist.get_rank(group)


def _own_group(ranks: Sequence[int], store: dist.Store, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of a part of the world, made of torch's own pieces.

    `new_group` would name it after the number of groups that a process has. Once one is destroyed, the next would get
    the name of one that still lives, which torch refuses, or of the one destroyed, whose addresses are still in the
    store. This one has a name of its own, and is not entered in torch's register of groups: collectives need no more.
    """
    store, own, size = dist.PrefixStore(name, store), list(ranks).index(dist.get_rank()), len(ranks)
    backend = dist.ProcessGroupGloo(store, own, size, timeout)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, own, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group


def _is_own(group: dist.ProcessGroup) -> bool:
    return group.group_name.startswith(f"{_OWN}/")


def shared_store(group: dist.ProcessGroup | None) -> dist.Store | None:
    """A part of the default group's store for the ranks of `group`, by which they can say who is missing; None for a
    single rank, and where this torch keeps its store elsewhere.

    Every rank of the group calls it as often as the others: each call gets a part of its own. It may be used by another
    thread while the default group's store blocks this one.
    """
    store = _default_store()
    if group is None or store is None:
        return None
    ranks = [] if _is_own(group) else dist.get_process_group_ranks(group)  # the name of our own says them
    name = f"steelyard-progress/{group.group_name}/{_name_of(ranks)}"
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


def _roll_call(ranks: Sequence[int], timeout_s: float, what: Literal["make", "finish"]) -> int:
    """Wait until all ranks are here. torch would wait as well, but does not say for whom.

    Returns:
        How often these ranks have come for this.
    """
    store = _default_store()
    if store is None:
        return 0
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
    return turn


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
