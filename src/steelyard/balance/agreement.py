"""What ranks say to each other before they plan, and that all came to do the same.

Every rank plans for itself from the same lengths. That gives one plan only if everything else that goes into it is the
same as well, so each rank sends that along; a difference is an error on all of them instead of a transfer that nobody
answers.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.balance.calls import Called, difference
from steelyard.collectives import Exchange, wait_in_slices
from steelyard.errors import PeerError, UsageError, first_line


@dataclass(frozen=True)
class Message:
    """What one rank says.

    Attributes:
        kind: what it came for.
        content: lengths of documents, or shards.
        note: anything; the ranks' notes may differ.
        settings: what must be the same on every rank, by name, as text.
        calls: of attention, lately, with their arguments: those that several ranks tell of must be the same.
    """

    kind: str
    content: Any
    note: Any
    settings: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[Called, ...] = ()


def gather(
    message: Message, group: dist.ProcessGroup | None, exchange: Exchange, ranks: int, step: int
) -> list[Message]:
    """Every rank's message, in rank order. Collective over `group`, a CPU group of `ranks` ranks.

    Args:
        exchange: of the same ranks: says who is missing, and is closed if a rank is.

    Raises:
        PeerError: a rank did not come, now or before.
        UsageError: the ranks came for different things, with different settings, or from different calls of attention;
            all of them raise it.
    """
    if ranks == 1:
        return [message]
    exchange.refuse_if_broken()
    own = bytearray(pickle.dumps(message))  # a note may be what cannot be: before anybody waits for it
    plans = exchange.progress.enter_planning() if exchange.progress is not None else None
    try:
        gathered = _all_gather(own, group, ranks, exchange.timeout_s)
    except RuntimeError as error:
        who = exchange.who_is_missing(plans=plans)
        failure = PeerError(
            f"planning of step {step}: the lengths of all ranks did not arrive: {who}. Look at the log of the rank "
            f"that is missing. [{first_line(error)}]"
        )
        raise exchange.broken(failure) from error
    except BaseException as end:
        exchange.interrupted(f"planning of step {step}", end)
        raise
    messages: list[Message] = [pickle.loads(each) for each in gathered]  # reads no further than what was written
    kinds = [said.kind for said in messages]
    if len(set(kinds)) > 1:
        raise UsageError(
            f"planning of step {step}: ranks came with {', '.join(f'{k} ({r})' for r, k in enumerate(kinds))}; "
            "every rank must take the same step at the same time"
        )
    first = messages[0].settings
    for rank, said in enumerate(messages):
        for name in {**first, **said.settings}:
            if said.settings.get(name) != first.get(name):
                raise UsageError(
                    f"planning of step {step}: {name} is {first.get(name)} on rank 0 and {said.settings.get(name)} on "
                    f"rank {rank}; give every rank the same"
                )
    differing = difference([said.calls for said in messages])
    if differing:
        raise UsageError(f"planning of step {step}: {differing}; give every rank the same")
    return messages


def _all_gather(own: bytearray, group: dist.ProcessGroup | None, ranks: int, timeout_s: float) -> list[bytes]:
    """The bytes that each rank gives, and perhaps zeros after them. (`all_gather_object` waits where Ctrl-C does not
    reach, and as long as the group says.)

    Raises:
        RuntimeError: it failed, or did not complete in time.
    """

    def gathered(rows: Tensor) -> list[Tensor]:
        all_rows = [torch.empty_like(rows) for _ in range(ranks)]
        wait_in_slices(dist.all_gather(all_rows, rows, group=group, async_op=True), timeout_s)
        return all_rows

    sizes = [int(size) for size in gathered(torch.tensor([len(own)]))]
    padded = own.ljust(max(sizes), b"\0")
    return [row.numpy().tobytes() for row in gathered(torch.frombuffer(padded, dtype=torch.uint8))]
