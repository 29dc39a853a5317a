"""One rank's part of the test of memory: most bytes at once of a Transformers model, attached and not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import steelyard.integrations.transformers as st
from steelyard.cost.memory import exchange_memory
from steelyard.domain.arrays import int_column
from steelyard.domain.plan import DispatchTables
from steelyard.domain.shapes import AttentionShape
from steelyard.integrations.transformers.ping_pong import split
from steelyard.runtime.dispatch import Memory
from steelyard.testing.allocations import peak_allocated_bytes

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 4, 2, 32, 64


def model_of(tokens: int) -> LlamaForCausalLM:
    """A Llama whose memory is mostly attention's: narrow and with few words."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def batch_of(lengths: Sequence[int], rank: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(rank)
    return st.collate([torch.randint(VOCAB, (n,), generator=random).tolist() for n in lengths])


def stated_bytes(tables: DispatchTables, memory: Memory) -> int:
    """Exchange buffers that a plan states for this rank, in all layers of the model."""
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, element_bytes=4)
    rows = (tables.q_sent, tables.kv_sent, tables.q_received, tables.kv_received)
    return int(exchange_memory(*(int_column([n]) for n in rows), shape).of_layers(LAYERS, memory)[0])


def peak(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    steps: Sequence[Sequence[Sequence[int]]],
    policy: str,
    memory: Memory = "keep",
    ping_pong: bool = False,
) -> dict[str, int]:
    """Train on one batch after the other; the largest of what their plans state stands beside what was allocated.

    Args:
        steps: per step and rank, the lengths of its documents.
        policy: "sdpa" for the stock model, else of the balancer.
    """
    model = model_of(max(sum(lengths[rank]) for lengths in steps))
    batches = [batch_of(lengths[rank], rank) for lengths in steps]
    attached: st.Attachment | None = None
    runner: nn.Module = model
    stated = [0]
    if policy == "sdpa":
        names = ("input_ids", "position_ids", "labels", "shift_labels")
        batches = [{name: batch[name] for name in names} for batch in batches]
    else:
        attached = st.attach(model, group, policy=policy, memory=memory, timeout_s=30, planning_group=group)
        for batch in batches:
            plans = attached.plan_together(split(batch)[0] if ping_pong else [batch], reorder=ping_pong)
            stated.append(sum(stated_bytes(plan.nano_batch.tables, memory) for plan in plans))
    if ping_pong:
        runner = st.PingPong(model)

    def train() -> None:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            extra = {} if ping_pong else {"use_cache": False}
            runner(**batch, **extra).loss.backward()

    peak_bytes = peak_allocated_bytes(train)
    arena_bytes = 0
    if attached is not None:
        arena_bytes = attached.balancer.arena.allocated_bytes
        attached.balancer.close()
    return {"peak": peak_bytes, "stated": max(stated), "arena": arena_bytes}
