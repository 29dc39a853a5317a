"""Context parallelism from torch's working pieces, with our CPU kernel: every rank gathers all keys and values.

torch's `context_parallel` itself fails on CPU, and FlexAttention has no CPU backward. What works is used here: its load
balancers decide which rank holds which tokens of the global batch, `_context_parallel_shard` deals out tokens,
positions and labels, and `flex_cp_allgather` gathers keys and values in each layer (its backward pass sums their
gradients where they belong). Core attention of a rank's queries over all gathered keys goes to the same kernel as in
the other variants; the table of tasks for it is made here.

Shapes: B = 1 row, N query heads, K key/value heads, L tokens of a rank, T tokens of all ranks, H head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import _context_parallel_shard
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from steelyard.attention import build_backend
from steelyard.attention.interface import Backend
from steelyard.attention.local import local_attention
from steelyard.cost.attention import pairs
from steelyard.domain.arrays import IntArray, int_column
from steelyard.domain.plan import KernelTasks

NAME = "torch_all_gather"
BALANCERS = ("head_tail", "per_document", "ptrr")
BLOCK = 128
_SHARDED = ("input_ids", "position_ids", "labels", "shift_labels")


@dataclass(frozen=True, eq=False)
class Gathered:
    """What core attention of one rank needs to know in a step; travels to the layers as `context_parallel=`."""

    tasks: KernelTasks
    backend: Backend
    group_name: str


class ContextParallel:
    """Cuts global batches for one rank and lets a Transformers model compute on its part.

    Args:
        model: gets its attention from here.
        group: the ranks that gather; not the one that sums gradients.
        kind: one of `BALANCERS`.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup, kind: str) -> None:
        self.kind, self.mesh = kind, DeviceMesh.from_group(group, "cpu")
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.group_name = group.group_name
        config = model.config
        self.backend = build_backend(
            "cpu", head_dim=config.head_dim, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
            device="cpu", dtype=torch.float32,
        )  # fmt: skip
        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, no_mask)
        model.set_attn_implementation(NAME)

    def shard(self, batch: Mapping[str, Tensor], doc_lengths: Sequence[int]) -> dict[str, Any]:
        """This rank's part of a global batch, as keywords of the model."""
        balancer = load_balancer(self.kind, doc_lengths, self.ranks)
        buffers = {name: batch[name] for name in _SHARDED}
        parts = _context_parallel_shard(self.mesh, buffers, dict.fromkeys(buffers, 1), balancer)
        tasks = gathered_tasks(order_of(balancer), doc_lengths, self.rank, self.ranks)
        return {**parts, "context_parallel": Gathered(tasks, self.backend, self.group_name)}

    def pairs_by_rank(self, doc_lengths: Sequence[int]) -> list[int]:
        """(query, key) pairs that each rank computes."""
        order = order_of(load_balancer(self.kind, doc_lengths, self.ranks))
        tables = (gathered_tasks(order, doc_lengths, rank, self.ranks) for rank in range(self.ranks))
        return [
            sum(pairs(start, start + n) for start, n in zip(t.q_position.tolist(), t.q_length.tolist(), strict=True))
            for t in tables
        ]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    context_parallel: Gathered | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in each layer: q (B, N, L, H), k and v (B, K, L, H) to (B, L, N, H)."""
    assert attention_mask is None and context_parallel is not None and not kwargs.get("dropout")
    k_BKTH, v_BKTH = flex_cp_allgather(key, value, 2, context_parallel.group_name)
    rows = (x[0].transpose(0, 1) for x in (query, k_BKTH, v_BKTH))
    return local_attention(*rows, context_parallel.tasks, context_parallel.backend)[None], None


def no_mask(**kwargs: Any) -> None:
    """Who sees whom is in the table of tasks."""


def load_balancer(kind: str, doc_lengths: Sequence[int], ranks: int) -> _LoadBalancer:
    """torch's own, for one row with these documents."""
    if kind == "head_tail":
        return _HeadTailLoadBalancer(sum(doc_lengths), ranks, "cpu")
    if kind == "per_document":
        return _PerDocumentHeadTailLoadBalancer([list(doc_lengths)], ranks, "cpu")
    return _PTRRLoadBalancer(block_mask(doc_lengths), ranks)


def order_of(balancer: _LoadBalancer) -> IntArray:
    """Which token of the global batch is in each gathered row, int64 (T,)."""
    indices = balancer._generate_indices()
    assert indices is not None
    return int_column(indices[0].numpy())


def gathered_tasks(order_T: IntArray, doc_lengths: Sequence[int], rank: int, ranks: int) -> KernelTasks:
    """The tasks of one rank's queries; rows of queries count in its part, rows of keys in all gathered rows.

    Args:
        order_T: token of the global batch in each gathered row; rank r holds the r-th of `ranks` equal parts.
        doc_lengths: documents of the global batch, in its order.
    """
    lengths = np.array(doc_lengths, dtype=np.int64)
    per_rank = len(order_T) // ranks
    doc_T = np.repeat(np.arange(len(lengths)), lengths)[order_T]
    position_T = order_T - (np.cumsum(lengths) - lengths)[doc_T]
    goes_on = (np.diff(doc_T) == 0) & (np.diff(position_T) == 1)
    goes_on &= np.arange(1, len(order_T)) % per_rank != 0
    row = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    length = np.diff(np.append(row, len(order_T)))
    sorted_runs = np.lexsort((position_T[row], doc_T[row]))
    row, length = row[sorted_runs], length[sorted_runs]
    doc, position = doc_T[row], position_T[row]
    own = np.flatnonzero(row // per_rank == rank)
    first = np.searchsorted(doc, doc)  # first run of each run's document
    segments = [np.arange(first[run], run + 1) for run in own]  # all runs before it, and itself
    segment = np.concatenate(segments) if segments else np.zeros(0, dtype=np.int64)
    return KernelTasks(
        q_store=np.zeros(len(own), dtype=np.int64),
        q_row=row[own] - rank * per_rank,
        q_length=length[own],
        q_position=position[own],
        segment_offset=int_column(np.cumsum([0, *(len(s) for s in segments)])),
        segment_store=np.zeros(len(segment), dtype=np.int64),
        segment_row=row[segment],
        segment_length=length[segment],
        segment_position=position[segment],
    )


def block_mask(doc_lengths: Sequence[int]) -> BlockMask:
    """The block mask of a packed row, which torch's balancer by processing time reads: only its counts are used.

    `create_block_mask` would make a tokens × tokens mask first.
    """
    starts = np.repeat(np.cumsum(doc_lengths) - doc_lengths, doc_lengths)
    if len(starts) % BLOCK:
        raise SystemExit(f"{len(starts)} tokens on all ranks: torch's block masks need a multiple of {BLOCK}")
    blocks = len(starts) // BLOCK
    lowest = torch.from_numpy(starts[::BLOCK] // BLOCK)  # of the document that a block of queries begins in
    count = torch.arange(blocks) - lowest + 1
    indices = (lowest[:, None] + torch.arange(blocks)).clamp(max=blocks - 1)
    return BlockMask.from_kv_blocks(
        count[None, None].int(), indices[None, None].int(), BLOCK_SIZE=BLOCK, compute_q_blocks=False
    )
