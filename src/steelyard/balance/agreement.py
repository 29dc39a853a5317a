"""What ranks say to each other before they plan, and that all came to do the same.

Every rank plans for itself from the same lengths. That gives one plan only if everything else that goes into it is the
same as well, so each rank sends that along; a difference is an error on all of them instead of a transfer that nobody
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from steelyard.errors import PeerError, UsageError, first_line


@dataclass(frozen=True)
class Message:
    """What one rank says.

    Attributes:
        kind: what it came for.
        content: lengths of documents, or shards.
        note: anything; the ranks' notes may differ.
        settings: what must be the same on every rank, by name, as text.
    """

    kind: str
    content: Any
    note: Any
    settings: Mapping[str, str] = field(default_factory=dict)


def gather(
    message: Message, group: dist.ProcessGroup | None, ranks: int, step: int, who_is_missing: Callable[[], str]
) -> list[Message]:
    """Every rank's message, in rank order. Collective over `group`, a CPU group of `ranks` ranks.

    Raises:
        PeerError: a rank did not come.
        UsageError: the ranks came for different things or with different settings; all of them raise it.
    """
    if ranks == 1:
        return [message]
    gathered: list[Any] = [None] * ranks
    try:
        dist.all_gather_object(gathered, message, group=group)
    except RuntimeError as error:
        raise PeerError(
            f"planning of step {step}: the lengths of all ranks did not arrive: {who_is_missing()}. Look at the log of "
            f"the rank that is missing. [{first_line(error)}]"
        ) from error
    messages: list[Message] = gathered
    kinds = [said.kind for said in messages]
    if len(set(kinds)) > 1:
        raise UsageError(
            f"planning of step {step}: ranks came with {', '.join(f'{k} ({r})' for r, k in enumerate(kinds))}; "
            "every rank must take the same step at the same time"
        )
    first = messages[0].settings
    for rank, said in enumerate(messages):
        for name, value in said.settings.items():
            if value != first.get(name):
                raise UsageError(
                    f"planning of step {step}: {name} is {first.get(name)} on rank 0 and {value} on rank {rank}; give "
                    "every rank the same"
                )
    return messages
