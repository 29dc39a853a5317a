"""One rank of benchmarks/frameworks.py: build every variant, check that all compute the same, time them in turn."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from frameworks_context_parallel import BALANCERS, ContextParallel
from frameworks_workloads import MODEL, Skew, step_flops
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import steelyard.integrations.transformers as st
from steelyard.collectives import twin_group
from steelyard.cost.attention import pairs_before
from steelyard.cost.memory import exchange_memory
from steelyard.domain.arrays import int_column
from steelyard.domain.plan import DispatchTables
from steelyard.domain.shapes import AttentionShape
from steelyard.integrations.transformers.ping_pong import split
from steelyard.observe.meter import Meter
from steelyard.runtime.dispatch import Memory
from steelyard.testing.allocations import peak_allocated_bytes

BASE = "packed"
VARIANTS = ("stock", BASE, "plain", "ping_pong", *BALANCERS)
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-5
_OWN_MODEL = ("input_ids", "position_ids", "labels", "shift_labels")


@dataclass(frozen=True)
class Batch:
    """One step's documents on this rank, and those of all ranks.

    Attributes:
        own: this rank's, collated.
        of_all: of all ranks, one after another, collated.
        lengths_by_rank: tokens of each document.
        labels: of all ranks: what the sum of losses is divided by.
    """

    own: dict[str, Any]
    of_all: dict[str, Any]
    lengths_by_rank: tuple[tuple[int, ...], ...]
    labels: int

    @property
    def all_lengths(self) -> list[int]:
        return [n for lengths in self.lengths_by_rank for n in lengths]


def make_batch(lengths_by_rank: Sequence[Sequence[int]], rank: int) -> Batch:
    """Random tokens, the same on every rank."""
    random = torch.Generator().manual_seed(11)
    docs = [[torch.randint(MODEL.vocab, (n,), generator=random).tolist() for n in own] for own in lengths_by_rank]
    of_all = st.collate([doc for own in docs for doc in own])
    return Batch(
        st.collate(docs[rank]), of_all, tuple(tuple(own) for own in lengths_by_rank), st.label_count(of_all)
    )  # fmt: skip


def make_model(tokens: int) -> LlamaForCausalLM:
    """A small Llama with fresh parameters, the same on every rank and for every variant."""
    config = LlamaConfig(
        vocab_size=MODEL.vocab, hidden_size=MODEL.hidden, intermediate_size=MODEL.ffn, head_dim=MODEL.head_dim,
        num_hidden_layers=MODEL.layers, num_attention_heads=MODEL.heads, num_key_value_heads=MODEL.kv_heads,
        max_position_embeddings=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(7)
    return LlamaForCausalLM(config).train()


class Variant:
    """One way to take a step: a model under DDP, and how it is called.

    Args:
        name: one of `VARIANTS`.
        group: the data-parallel ranks; gradients are summed on it, all else travels on groups of its own.
        tokens: of each rank.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, tokens: int) -> None:
        self.name, self.ranks = name, dist.get_world_size(group)
        self.model = make_model(tokens)
        self.attached: st.Attachment | None = None
        self.context: ContextParallel | None = None
        runner: nn.Module = self.model
        if name in (BASE, "plain", "ping_pong"):
            policy = "packed" if name == BASE else "balanced"
            self.attached = st.attach(self.model, group, policy=policy, meter=Meter())
            if name == "ping_pong":
                runner = st.PingPong(self.model)
        elif name in BALANCERS:
            self.context = ContextParallel(self.model, twin_group(group, "gloo", 300.0), name)
        elif name != "stock":
            raise SystemExit(f"variant {name!r}: expected one of {', '.join(VARIANTS)}")
        self.runner = DistributedDataParallel(runner, process_group=group)

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward and the sum of gradients; this rank's part of the loss. Everything that a step needs
        beyond its documents is made here: masks, plans with their exchange of lengths, parts of the global batch."""
        given: Mapping[str, Any] = batch.own
        if self.context is not None:
            given = self.context.shard(batch.of_all, batch.all_lengths)
        elif self.attached is None:
            given = {name: batch.own[name] for name in _OWN_MODEL}
        if self.name != "ping_pong":  # it has no cache to switch off
            given = {**given, "use_cache": False}
        loss: Tensor = self.runner(**given, num_items_in_batch=batch.labels).loss
        (loss * self.ranks).backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def pairs_by_rank(self, batch: Batch) -> list[int]:
        """(query, key) pairs that each rank computes in a step, from the plan or the mask. Collective."""
        if self.name == "stock":
            return [sum(own) ** 2 for own in batch.lengths_by_rank]  # with a mask, torch computes the whole square
        if self.context is not None:
            return self.context.pairs_by_rank(batch.all_lengths)
        if self.name == BASE:
            return [sum(pairs_before(n) for n in own) for own in batch.lengths_by_rank]
        works = [plan.nano_batch.work_by_server for plan in self._plans(batch)]
        return [int(work) for work in sum(works[1:], start=works[0])]

    def _plans(self, batch: Batch) -> list[st.BatchPlan]:
        assert self.attached is not None
        if self.name == "ping_pong":
            return self.attached.plan_together(split(batch.own)[0], reorder=True)
        return [self.attached.plan(batch.own)]


def measure(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    skews: Sequence[Skew],
    variants: Sequence[str],
    tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Predict, compare, and only then time. Rank 0 says on stderr what it is at."""
    say = _speaker(rank)
    built = [Variant(name, group, tokens) for name in variants]
    batches = {skew.name: make_batch(skew.lengths(tokens), rank) for skew in skews}
    record: dict[str, Any] = {"predicted": [], "compared": [], "steps": []}
    for skew in skews:
        record["predicted"] += [_predict(variant, skew, batches[skew.name], tokens) for variant in built]
    for row in record["predicted"]:
        say(f"predicted {row['skew']} {row['variant']}: {row['flops_max'] / 1e9:.0f} GFLOP on the busiest rank, "
            f"idle {row['idle_share']:.3f}")  # fmt: skip
    for skew in skews:
        record["compared"] += _compare(built, skew, batches[skew.name], group, say)
    for number in range(1, rounds + 1):
        for skew in skews:
            for variant in built:
                row = _timed(variant, batches[skew.name], group)
                record["steps"].append({"skew": skew.name, "round": number, "variant": variant.name, **row})
                say(f"round {number} {skew.name} {variant.name}: {row['time_s']:.3f} s, idle {row['idle_share']:.3f}")
    for variant in built:
        if variant.attached is not None:
            variant.attached.balancer.close()
    return record


def _speaker(rank: int) -> Callable[[str], None]:
    def say(text: str) -> None:
        if rank == 0:
            print(text, file=sys.stderr, flush=True)

    return say


def _predict(variant: Variant, skew: Skew, batch: Batch, tokens: int) -> dict[str, Any]:
    """What arithmetic says: operations of the busiest rank, and the share of time for which the others wait for it."""
    pairs = variant.pairs_by_rank(batch)
    flops = step_flops(tokens, pairs)
    return {
        "skew": skew.name,
        "variant": variant.name,
        "pairs_by_rank": pairs,
        "flops_max": max(flops),
        "idle_share": 1 - sum(flops) / len(flops) / max(flops),
    }


def _compare(
    built: Sequence[Variant], skew: Skew, batch: Batch, group: dist.ProcessGroup, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One step of each variant against the first one: loss and all gradients. Also warms everything up."""
    rows: list[dict[str, Any]] = []
    reference: tuple[float, dict[str, Tensor]] | None = None
    for variant in built:
        variant.model.zero_grad(set_to_none=True)
        total = variant.step(batch).double()
        dist.all_reduce(total, group=group)
        got = float(total), variant.gradients()
        reference = got if reference is None else reference
        loss_diff = abs(got[0] - reference[0]) / abs(reference[0])
        gradient_diff = gradient_difference(got[1], reference[1])
        rows.append(
            {"skew": skew.name, "variant": variant.name, "loss": got[0], "loss_rel_diff": loss_diff,
             "gradient_max_rel_diff": gradient_diff}
        )  # fmt: skip
        say(f"compared {skew.name} {variant.name}: loss {loss_diff:.1e}, gradients {gradient_diff:.1e}")
        if not (loss_diff <= LOSS_TOLERANCE and gradient_diff <= GRADIENT_TOLERANCE):
            raise RuntimeError(
                f"{variant.name} does not compute what {built[0].name} computes on {skew.name}: loss differs by "
                f"{loss_diff:.1e} (at most {LOSS_TOLERANCE:g}), a gradient by {gradient_diff:.1e} of its largest entry "
                f"(at most {GRADIENT_TOLERANCE:g}); nothing was timed"
            )
    return rows


def gradient_difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any entry, as a share of the largest entry of its tensor."""
    if got.keys() != expected.keys():
        return float("inf")
    return max(float((got[name] - e).abs().max() / e.abs().max()) for name, e in expected.items())


def _timed(variant: Variant, batch: Batch, group: dist.ProcessGroup) -> dict[str, Any]:
    """One step, from a barrier until the last rank has the summed gradients.

    Idle is the time in which a rank's training thread does not run: it waits for transfers, or for the other rank.
    """
    variant.model.zero_grad(set_to_none=True)
    gc.collect()
    if variant.attached is not None:
        variant.attached.balancer.meter.take()
    dist.barrier(group=group)
    wall_s, thread_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
    variant.step(batch)
    own = [time.perf_counter() - wall_s, time.thread_time() - thread_s, time.process_time() - process_s]
    wait_s = None
    if variant.attached is not None:
        wait_s = variant.attached.balancer.meter.take().get("wait", 0.0)
    by_rank: list[Any] = [None] * variant.ranks
    dist.all_gather_object(by_rank, (*own, wait_s), group=group)
    walls_s, threads_s, processes_s, waits_s = zip(*by_rank, strict=True)
    return {
        "time_s": max(walls_s),
        "thread_s": threads_s,
        "process_s": processes_s,
        "exchange_wait_s": None if None in waits_s else waits_s,
        "idle_share": 1 - sum(threads_s) / len(threads_s) / max(walls_s),
    }


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY_STEPS = 3
MEMORY_WAYS = ("stock", BASE, "plain", "plain, resend", "ping_pong")


def memory(
    rank: int, ranks: int, group: dist.ProcessGroup, lengths_by_rank: Sequence[Sequence[int]], way: str
) -> dict[str, Any]:
    """Most bytes that torch had allocated at once during some steps of a fresh model, without DDP, and what the plans
    say that exchange buffers take."""
    batch = make_batch(lengths_by_rank, rank)
    model = make_model(sum(lengths_by_rank[rank]))
    attached: st.Attachment | None = None
    runner: nn.Module = model
    given: dict[str, Any] = {**batch.own, "num_items_in_batch": batch.labels}
    stated = 0
    if way != "stock":
        memory_mode: Memory = "resend" if way.endswith("resend") else "keep"
        policy = "packed" if way == BASE else "balanced"
        attached = st.attach(model, group, policy=policy, memory=memory_mode)
        plans = [attached.plan(batch.own)]
        if way == "ping_pong":
            runner = st.PingPong(model)
            plans = attached.plan_together(split(batch.own)[0], reorder=True)
        stated = sum(stated_bytes(plan.nano_batch.tables, memory_mode) for plan in plans)
    else:
        given = {**{name: batch.own[name] for name in _OWN_MODEL}, "num_items_in_batch": batch.labels}
    if way != "ping_pong":
        given["use_cache"] = False

    def steps() -> None:
        for _ in range(MEMORY_STEPS):
            model.zero_grad(set_to_none=True)
            runner(**given).loss.backward()

    peak = peak_allocated_bytes(steps)
    arena = 0
    if attached is not None:
        arena = attached.balancer.arena.allocated_bytes
        attached.balancer.close()
    return {"peak_bytes": peak, "stated_bytes": stated, "arena_bytes": arena}


def stated_bytes(tables: DispatchTables, mode: Memory) -> int:
    """Exchange buffers of one rank and one nano-batch in all layers, as the cost model has them."""
    shape = AttentionShape(MODEL.heads, MODEL.kv_heads, MODEL.head_dim, element_bytes=4)
    rows = (tables.q_sent, tables.kv_sent, tables.q_received, tables.kv_received)
    return int(exchange_memory(*(int_column([n]) for n in rows), shape).of_layers(MODEL.layers, mode)[0])
