"""One rank's part of the tests of what a `Balancer` says when ranks do not come, or do not do the same.

Runs on all of the pool's workers, in groups of its own: what fails here is of no use to the next test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from steelyard.balance import Balancer
from steelyard.collectives import twin_group
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import PeerError, UsageError

TIMEOUT_S = 1.5
ELSEWHERE_S = 4.0
"""Longer than the time-out, and the look for who is missing."""


def balancer_of(group: dist.ProcessGroup, timeout_s: float = TIMEOUT_S, **options: Any) -> Balancer:
    """Which moves attention work of documents of 2 tokens on rank 1 and 30 on the others."""
    own = twin_group(group, "gloo", 30.0)
    return Balancer(own, tolerance=0.0, timeout_s=timeout_s, progress_period_s=0.4, **options)


def documents(rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[int]]:
    length = 2 if rank == 1 else 30
    return torch.zeros(length, 2, 8, dtype=dtype, requires_grad=True), [length]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (PeerError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def rank_1_does_not_come_to_plan(rank: int, ranks: int, group: dist.ProcessGroup) -> list[str]:
    """What the others raise: at once, when they try again, when they plan ahead."""
    balancer = balancer_of(group)
    x, lengths = documents(rank)
    if rank == 1:
        time.sleep(ELSEWHERE_S)
        return []
    errors = [error_of(lambda: balancer.attention(x, x, x, doc_lens=lengths)) for _ in range(2)]
    errors.append(error_of(lambda: balancer.prefetch([lengths]).result()))
    balancer.close()
    return errors


def ranks_agree_on_layers(
    rank: int, ranks: int, group: dist.ProcessGroup, layers: tuple[int | None, int | None]
) -> str:
    """What is said where rank 0 has the first number of layers, the others the second; None: nothing to agree on."""
    balancer = balancer_of(group)
    own = layers[min(rank, 1)]
    if own is not None:
        balancer.agreed["layers"] = own
    x, lengths = documents(rank)
    error = error_of(lambda: balancer.attention(x, x, x, doc_lens=lengths))
    balancer.close()
    return error


def rank_1_has_another_dtype(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """Of the same size: the rows that are exchanged have as many bytes."""
    balancer = balancer_of(group)
    x, lengths = documents(rank, torch.bfloat16 if rank == 1 else torch.float16)
    error = error_of(lambda: balancer.attention(x, x, x, doc_lens=lengths))
    balancer.close()
    return error


def ctrl_c_while_waiting(rank: int, ranks: int, group: dist.ProcessGroup, what: str) -> tuple[float, str]:
    """Seconds until Ctrl-C ends the wait for rank 1, which is elsewhere (the time-out is longer), and what the next
    call raises: what was waited for is still under way."""
    balancer = balancer_of(group, timeout_s=30.0, shape=AttentionShape(2, 2, 8))
    x, lengths = documents(rank)
    if what == "transfer":
        balancer.begin(doc_lens=lengths)
    if rank == 1:
        time.sleep(ELSEWHERE_S / 2)
        return 0.0, ""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed_s = time.monotonic() + 0.7
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        balancer.plan([lengths]) if what == "plan" else balancer.attention(x, x, x)
    except KeyboardInterrupt:
        return time.monotonic() - pressed_s, error_of(lambda: balancer.plan([lengths]))
    finally:
        signal.signal(signal.SIGINT, before)
        time.sleep(max(0.0, ELSEWHERE_S / 2 + 0.5 - (time.monotonic() - pressed_s)))  # rank 1 leaves before
        balancer.close()
    return float("inf"), "no Ctrl-C"


def nobody_leaves_before_all_are_connected(rank: int, ranks: int, group: dist.ProcessGroup) -> tuple[float, float]:
    """When rank 1, the last by a quarter of a second, has its connections, and when this rank goes on. Monotonic."""
    connected_s = [0.0]
    new_group = dist.new_group

    def late(*args: Any, **options: Any) -> Any:
        made = new_group(*args, **options)
        if rank == 1:
            time.sleep(0.25)
        connected_s[0] = time.monotonic()
        return made

    dist.new_group = late
    try:
        own = twin_group(group, "gloo", 30.0)
        left_s = time.monotonic()
    finally:
        dist.new_group = new_group
    dist.destroy_process_group(own)
    return connected_s[0], left_s
