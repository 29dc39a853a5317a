"""Functions that run on the pool's workers: one rank's part of a multi-process test.

Shape suffixes as in `runtime.dispatch`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from steelyard.balance import Balancer, NanoBatchPlan
from steelyard.collectives import Exchange, Transfer
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import PeerError
from steelyard.model.config import ModelConfig
from steelyard.model.transformer import Decoder
from steelyard.observe.meter import Meter
from steelyard.observe.trace import Span, Trace
from steelyard.planner import make_plan
from steelyard.planner.checks import verify
from steelyard.planner.rates import Rate
from steelyard.planner.tables import build_tables
from steelyard.runtime import ping_pong
from steelyard.runtime.step import NanoBatch

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=8, element_bytes=4)


def qkv_of(layout: Layout, rank: int, dtype: torch.dtype, shape: AttentionShape) -> tuple[torch.Tensor, ...]:
    """This rank's rows of random q, k, v and dout that do not depend on the layout: one generator per document."""
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    for shard in layout:
        if shard.rank != rank:
            continue
        generator = torch.Generator().manual_seed(1000 + shard.doc)
        for part, heads in zip(parts, sizes, strict=True):
            whole = torch.randn(
                int(layout.doc_lengths[shard.doc]), heads, shape.head_dim, generator=generator, dtype=dtype
            )
            part.append(whole[shard.start : shard.start + shard.length])
    return tuple(
        torch.cat(part) if part else torch.zeros(0, heads, shape.head_dim, dtype=dtype)
        for part, heads in zip(parts, sizes, strict=True)
    )


def attention_of_layout(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    shards: Sequence[tuple[int, int, int, int]],
    dtype: torch.dtype,
    policy: str,
    tolerance: float,
    backend: str,
    layers: int = 1,
    memory: str = "keep",
    window: int | None = None,
) -> dict[str, Any]:
    """Core attention and its gradients of one layout on this rank, with the order of its collectives."""
    layout = Layout.from_shards(shards, ranks)
    trace = Trace(rank)
    balancer = Balancer(
        group if ranks > 1 else None, shape=SHAPE, tolerance=tolerance, policy=policy, backend=backend, dtype=dtype,
        planning_group=group, timeout_s=30, meter=Meter(trace), memory=memory, window=window,
    )  # fmt: skip
    q, k, v, dout = qkv_of(layout, rank, dtype, SHAPE)
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    # One plan for both memory modes: bytes differ between them, and with the bytes the plan that is best.
    plan = make_plan(layout, policy=policy, shape=SHAPE, tolerance=tolerance, window=window)
    nano = NanoBatchPlan(plan, build_tables(plan, rank), 0)
    attention = balancer.core_attention(nano)
    out = q
    for layer in range(layers):
        out = attention(out, k, v, layer)
    (out * dout).sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
    return {
        "out": out.detach().numpy(),
        "dq": q.grad.numpy(),
        "dk": k.grad.numpy(),
        "dv": v.grad.numpy(),
        "work": nano.work_by_server,
        "sent": (nano.tables.q_sent, nano.tables.kv_sent),
        "received": (nano.tables.q_received, nano.tables.kv_received),
        "allocations": balancer.arena.allocations,
        "bytes": {
            phase: (sum(s.args["bytes_sent"] for s in spans), sum(s.args["bytes_received"] for s in spans))
            for phase, spans in spans_by_phase(trace).items()
        },
        "report": verify(nano.plan),
    }


def spans_by_phase(trace: Trace) -> dict[str, list[Span]]:
    """The transfers on record, once all of them are (an end is noted on another thread)."""
    phases: dict[str, list[Span]] = {}
    for span in trace.spans:
        if span.track == "transfer":
            phases.setdefault(span.name, []).append(span)
    return phases


def live_bytes(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    shards: Sequence[tuple[int, int, int, int]],
    dtype: torch.dtype,
    memory: str,
) -> dict[str, Any]:
    """Bytes that one layer's attention has out of its arena: at most, between the passes, and at the end."""
    shape = AttentionShape(SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim, element_bytes=dtype.itemsize)
    layout = Layout.from_shards(shards, ranks)
    balancer = Balancer(
        group, shape=shape, tolerance=0.0, dtype=dtype, planning_group=group, timeout_s=30, memory=memory
    )  # fmt: skip
    live, peak = 0, 0
    acquire, release = balancer.arena.acquire, balancer.arena.release

    def count_acquire(size: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        nonlocal live, peak
        tensor = acquire(size, kind)
        live += tensor.nbytes
        peak = max(peak, live)
        return tensor

    def count_release(*tensors: torch.Tensor | None) -> None:
        nonlocal live
        live -= sum(tensor.nbytes for tensor in tensors if tensor is not None)
        release(*tensors)

    balancer.arena.acquire, balancer.arena.release = count_acquire, count_release  # type: ignore[method-assign]
    q, k, v, dout = (t.to(dtype) for t in qkv_of(layout, rank, torch.float32, shape))
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    nano = balancer.plan_layout(layout)
    out = balancer.core_attention(nano)(q, k, v)
    between = live
    (out * dout).sum().backward()
    planned = verify(nano.plan).memory
    kept = planned.kept if memory == "keep" else torch.zeros(ranks, dtype=torch.int64)
    peaks = planned.keep_peak if memory == "keep" else planned.resend_peak
    return {"counted": (peak, between, live), "planned": (int(peaks[rank]), int(kept[rank]), 0)}


def arena_growth(rank: int, ranks: int, group: dist.ProcessGroup, lengths: Sequence[int], steps: int) -> list[int]:
    """New allocations per step, when each step holds the documents in another order and a little shorter."""
    balancer = Balancer(group, shape=SHAPE, tolerance=0.02, planning_group=group, timeout_s=30)
    growth, before = [], 0
    for step in range(steps):
        layout = Layout.from_doc_lengths([[lengths[0] - step % 3, *lengths[1 : 1 + step % 2]], list(lengths[1:])])
        q, k, v, dout = qkv_of(layout, rank, torch.float32, SHAPE)
        for tensor in (q, k, v):
            tensor.requires_grad_(True)
        attention = balancer.core_attention(balancer.plan_layout(layout))
        out = q
        for layer in range(3):
            out = attention(out, k, v, layer)
        (out * dout).sum().backward()
        growth.append(balancer.arena.allocations - before)
        before = balancer.arena.allocations
    return growth


def tell(what: str) -> None:
    """Let a rank go on that waits for this, in `wait_for`. Once per pool: it is not forgotten."""
    dist.distributed_c10d._get_default_store().set(what, "done")


def wait_for(*told: str, limit_s: float = 60.0) -> None:
    """Do nothing until other ranks have told all this; no collective, and no lock that a heartbeat needs meanwhile."""
    store, end_s = dist.distributed_c10d._get_default_store(), time.monotonic() + limit_s
    while not store.check(list(told)):
        if time.monotonic() > end_s:
            raise TimeoutError(f"nobody told {told} within {limit_s:g} s")
        time.sleep(0.05)


def _failing_attention(rank: int, group: dist.ProcessGroup, layers: int) -> dict[str, Any]:
    layout = Layout.from_doc_lengths([[24], [8]])
    balancer = Balancer(
        group, shape=SHAPE, tolerance=0.0, planning_group=group, timeout_s=2.0, progress_period_s=0.2,
        store=dist.PrefixStore("failing", dist.distributed_c10d._get_default_store()),
    )  # fmt: skip
    q, k, v, _ = qkv_of(layout, rank, torch.float32, SHAPE)
    attention = balancer.core_attention(balancer.plan_layout(layout), step=7)
    start_s = time.monotonic()
    try:
        for layer in range(layers):
            if rank == 1 and layer == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            attention(q, k, v, layer)
    except PeerError as error:
        return {"type": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start_s}
    finally:
        balancer.close()
    return {"type": "none", "message": "", "seconds": 0.0}


def meet_a_missing_peer(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 1 is killed before layer 1; rank 0 must say so."""
    return _failing_attention(rank, group, 2)


def reach_attention_alone(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Any] | str | None:
    """Only rank 0 calls attention; rank 1 has made its balancer and is busy elsewhere. All of the pool make a group for
    the two: what rank 0 sends in vain would meet the next test's transfers."""
    group = dist.new_group([0, 1], backend="gloo")
    if rank > 1:
        return None
    if rank == 0:
        found = _failing_attention(rank, group, 1)
        tell("rank 0 has waited in vain")
        return found
    balancer = Balancer(
        group, shape=SHAPE, planning_group=group, timeout_s=2.0, progress_period_s=0.2,
        store=dist.PrefixStore("failing", dist.distributed_c10d._get_default_store()),
    )  # fmt: skip
    wait_for("rank 0 has waited in vain")
    balancer.close()
    return "elsewhere"


def wrong_rows(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """What is said when q has one row more than the plan."""
    balancer = Balancer(None, shape=SHAPE)
    attention = balancer.core_attention(balancer.plan_layout(Layout.from_doc_lengths([[8]])))
    try:
        attention(torch.zeros(9, 4, 8), torch.zeros(9, 2, 8), torch.zeros(9, 2, 8))
    except Exception as error:  # returned: raised, it would cost the pool a new start
        return f"{type(error).__name__}: {error}"
    return "nothing"


MODEL = ModelConfig(vocab_size=61, hidden_size=32, layers=3, heads=4, kv_heads=2, ffn_size=64, max_positions=64)


def decoder_of(
    config: ModelConfig = MODEL, dtype: torch.dtype = torch.float32, checkpoint_token_wise: bool = False
) -> Decoder:
    """The same small model on every rank."""
    decoder = Decoder(config, checkpoint_token_wise=checkpoint_token_wise).to(dtype)
    decoder.init_weights(torch.Generator().manual_seed(7))
    return decoder


def chunk_of(lengths: Sequence[int], first_doc: int, vocab_size: int = 61) -> tuple[torch.Tensor, ...]:
    """tokens, positions, labels of packed documents whose tokens depend on their number only."""
    tokens, positions, labels = [], [], []
    for i, length in enumerate(lengths):
        doc = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(first_doc + i))
        tokens.append(doc)
        positions.append(torch.arange(length))
        labels.append(torch.cat([doc[1:], torch.full((1,), -100)])[:length])
    if not tokens:
        return (torch.zeros(0, dtype=torch.int64),) * 3
    return torch.cat(tokens), torch.cat(positions), torch.cat(labels)


def recorded(exchange: Exchange) -> list[str]:
    """Wrap `exchange.start` so that it notes the order of collectives on this rank."""
    order: list[str] = []
    start = exchange.start

    def start_and_note(*args: Any) -> Transfer:
        point = args[-1]
        order.append(f"{point.phase} layer {point.layer} nano {point.nano_batch}")
        return start(*args)

    exchange.start = start_and_note  # type: ignore[method-assign]
    return order


def train_step(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    lengths: Sequence[Sequence[Sequence[int]]],
    policy: str,
    together: bool,
    dtype: torch.dtype = torch.float32,
    config: ModelConfig = MODEL,
    checkpoint_token_wise: bool = False,
    memory: str = "keep",
    rates: Sequence[Rate] | None = None,
    reorder: bool = False,
) -> dict[str, Any]:
    """Loss and all gradients, summed over ranks, of one step; `lengths[nano][rank]` are document lengths, None where
    that rank has run out of chunks. With `reorder` the plan says which of a rank's chunks goes first.

    `together` walks all nano-batches at once (ping-pong), otherwise one after the other.
    """
    decoder = decoder_of(config, dtype, checkpoint_token_wise)
    trace = Trace(rank)
    balancer = Balancer(
        group if ranks > 1 else None, shape=config.attention_shape(4), tolerance=0.0, policy=policy, dtype=dtype,
        planning_group=group, timeout_s=30, meter=Meter(trace), memory=memory,
    )  # fmt: skip
    order = recorded(balancer.exchange)
    own_lengths = [per_rank[rank] for per_rank in lengths if per_rank[rank] is not None]
    step = balancer.plan(own_lengths, rate=None if rates is None else rates[rank], reorder=reorder)
    nano_batches = []
    for nano, index in zip(step.nano_batches, step.order, strict=True):
        first_doc = 1000 * index + sum(len(own or []) for own in lengths[index][:rank])
        tokens, positions, labels = chunk_of(lengths[index][rank] or [], first_doc)
        nano_batches.append(NanoBatch(tokens, positions, labels, balancer.core_attention(nano)))
    if together:
        loss = ping_pong.forward(decoder, nano_batches)
        loss.backward()
    else:
        loss = torch.zeros(())
        for nano in nano_batches:
            part = ping_pong.forward(decoder, [nano])
            part.backward()
            loss = loss + part.detach()
    loss = loss.detach().double()
    gradients = {name: parameter.grad.double() for name, parameter in decoder.named_parameters()}
    if ranks > 1:
        for tensor in (loss, *gradients.values()):
            dist.all_reduce(tensor, group=group)
    return {
        "loss": float(loss),
        "step_order": step.order,
        "work": [nano.work_by_server for nano in step.nano_batches],
        "moved": any(nano.tables.exchanges for nano in step.nano_batches),
        "gradients": {name: gradient.numpy() for name, gradient in gradients.items()},
        "order": order,
        "spans": [(s.name, s.track, s.start_s, s.end_s, dict(s.args)) for s in trace.take()],
    }


def attention_under_autocast(rank: int, ranks: int, group: dist.ProcessGroup) -> list[bool]:
    """Whether bf16 core attention gives the same bits with autocast on and off: out, dq, dk, dv."""
    layout = Layout.from_doc_lengths([[64, 37, 100], [5]])
    balancer = Balancer(group, shape=SHAPE, tolerance=0.0, dtype=torch.bfloat16, planning_group=group, timeout_s=30)
    results = []
    for enabled in (False, True):
        q, k, v, dout = (t.bfloat16() for t in qkv_of(layout, rank, torch.float32, SHAPE))
        for tensor in (q, k, v):
            tensor.requires_grad_(True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = balancer.core_attention(balancer.plan_layout(layout))(q, k, v)
        (out * dout).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return [torch.equal(one, other) for one, other in zip(*results, strict=True)]


def attention_under_hooks(rank: int, ranks: int, group: dist.ProcessGroup, memory: str) -> list[list[bool]]:
    """Whether three layers give the same bits, out, dq, dk, dv, when saved-tensor hooks keep views, or copies."""
    layout = Layout.from_doc_lengths([[200], [9] * 12])
    balancer = Balancer(
        group, shape=SHAPE, tolerance=0.0, dtype=torch.float32, planning_group=group, timeout_s=30, memory=memory
    )
    results = []
    for pack in (None, torch.Tensor.detach, lambda t: t.view(t.shape), torch.Tensor.clone):
        q, k, v, dout = qkv_of(layout, rank, torch.float32, SHAPE)
        for tensor in (q, k, v):
            tensor.requires_grad_(True)
        attention = balancer.core_attention(balancer.plan_layout(layout))
        hooks = saved_tensors_hooks(pack, lambda t: t) if pack else contextlib.nullcontext()
        out = q
        with hooks:
            for layer in range(3):
                out = attention(out, k, v, layer)
        (out * dout).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return [[torch.equal(one, other) for one, other in zip(results[0], r, strict=True)] for r in results[1:]]


def backward_twice(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """What is said of a second backward pass through the same forward."""
    q, k, v = (torch.randn(8, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    balancer = Balancer(None, shape=SHAPE)
    out = balancer.core_attention(balancer.plan_layout(Layout.from_doc_lengths([[8]])))(q, k, v)
    out.sum().backward(retain_graph=True)
    try:
        out.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
