"""One rank's part of the tests of how adapters join ranks.

Runs on all of the pool's workers: torch cannot always make groups of some.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers_ranks as tiny_models
from ranks import tell, wait_for

import steelyard.integrations.transformers as st
from steelyard.balance import Balancer, Kernel
from steelyard.errors import SteelyardError
from steelyard.integrations.offset_passes import BalancerOptions, OffsetPasses


def passes_of(group: dist.ProcessGroup, timeout_s: float) -> OffsetPasses:
    passes = OffsetPasses(group, BalancerOptions(tolerance=0.0, timeout_s=timeout_s))
    for layer in (0, 1):
        passes.add_layer(layer)
    return passes


def bad_offsets_on_rank_1(rank: int, ranks: int, group: dist.ProcessGroup, passes_before: int) -> dict[str, Any]:
    """What each rank raises, how long that took, and whether the next pass goes through."""
    passes = passes_of(group, 60.0)
    x = torch.randn(6, 2, 8)

    def one_pass(bounds: list[int]) -> None:
        offsets = torch.tensor(bounds)
        for layer in (0, 1):
            passes.attention(x, x, x, offsets, layer=layer, kernel=Kernel())

    for _ in range(passes_before):
        one_pass([0, 2, 6])
    begin_s = time.monotonic()
    try:
        one_pass([0, 2, 5] if rank == 1 else [0, 2, 6])
        error = "none"
    except SteelyardError as raised:
        error = f"{type(raised).__name__}: {raised}"
    took_s = time.monotonic() - begin_s
    one_pass([0, 6])
    passes.close()
    return {"error": error, "took_s": took_s}


def rank_1_leaves_after_the_first_layer(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """What the others raise."""
    passes = passes_of(group, 2.0)
    length = 2 if rank == 1 else 30
    x, offsets = torch.randn(length, 2, 8), torch.tensor([0, length])
    passes.attention(x, x, x, offsets, layer=0, kernel=Kernel())
    error = "none"
    if rank == 1:
        wait_for(*(f"rank {other} has named rank 1" for other in range(ranks) if other != 1))
    else:
        try:
            passes.attention(x, x, x, offsets, layer=1, kernel=Kernel())
        except SteelyardError as raised:
            error = str(raised)
        tell(f"rank {rank} has named rank 1")
    passes.balancer.close()
    return error


def held_after_attaching(rank: int, ranks: int, group: dist.ProcessGroup, times: int) -> list[tuple[int, int]]:
    """Threads and file descriptors of two of four processes, after each of several times a model was attached, called
    and detached, and a balancer made, used and closed, while another model stays attached. Results are checked."""
    pair = dist.new_group([0, 2])
    found: list[tuple[int, int]] = []
    if rank not in (0, 2):
        dist.barrier(group)
        return found
    own = pair.rank()
    batch = st.collate([[1, 2, 3], [4, 5]] if own else [[1] * 20])
    staying = st.attach(tiny_models.tiny(), pair, timeout_s=60)
    expected = float(staying.model(**batch, num_items_in_batch=1).loss)
    model = tiny_models.tiny()
    x = torch.randn(2 if own else 30, 2, 8)
    for _ in range(times):
        attached = st.attach(model, pair, timeout_s=60)
        assert abs(float(model(**batch, num_items_in_batch=1).loss) - expected) < 1e-6 * abs(expected)
        attached.detach()
        balancer = Balancer(pair, timeout_s=60)
        balancer.attention(x, x, x, doc_lens=[len(x)])
        balancer.close()
        del attached, balancer
        gc.collect()
        found.append(tuple(len(list(Path(f"/proc/{os.getpid()}/{what}").iterdir())) for what in ("task", "fd")))
    assert abs(float(staying.model(**batch, num_items_in_batch=1).loss) - expected) < 1e-6 * abs(expected)
    staying.detach()
    dist.barrier(group)
    dist.destroy_process_group(pair)
    return found


def threads_after_attaching(rank: int, ranks: int, group: dist.ProcessGroup, times: int) -> list[int]:
    """Threads of this process after each of several times a model was attached, called and detached."""
    model, found = tiny_models.tiny(), []
    batch = st.collate([[1, 2, 3], [4, 5]] if rank else [[1] * 20])
    for _ in range(times):
        attached = st.attach(model, group, timeout_s=60)
        model(**batch, num_items_in_batch=1).loss.backward()
        attached.detach()
        del attached
        gc.collect()
        found.append(len(list(Path(f"/proc/{os.getpid()}/task").iterdir())))
    return found
