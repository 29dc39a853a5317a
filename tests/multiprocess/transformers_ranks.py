"""One rank's part of the tests of the Transformers integration. Runs on the pool's workers.

Documents are dealt to ranks whole; tokens depend on a document's number only, so that any number of ranks computes the
same step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import steelyard.integrations.transformers as st
from steelyard.errors import SteelyardError
from steelyard.observe.meter import Meter
from steelyard.observe.trace import Trace

VOCAB = 61
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 4, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 7}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 4, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 7},
    ),
    "gpt-oss": ("GptOss", {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "layer_types": _ALTERNATING}),
}


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small random model, the same on every rank."""
    family, settings = MODELS[name]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**_SIZES, **settings, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    if "experts" in str(model):
        model.set_experts_implementation("eager")  # the fused one has no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # larger than a fresh model's, so that attention matters
                parameter.mul_(4.0)
    return model


def tokens_of(doc: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(100 + doc)).tolist()


def docs_of(lengths_by_rank: Sequence[Sequence[int]], rank: int) -> list[list[int]]:
    """This rank's documents."""
    first = sum(len(lengths) for lengths in lengths_by_rank[:rank])
    return [tokens_of(first + i, length) for i, length in enumerate(lengths_by_rank[rank])]


def one_by_one(
    lengths_by_rank: Sequence[Sequence[int]], name: str, dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of all documents, each alone through the stock model: what every other way must give."""
    model = tiny(name, dtype)
    model.train()
    docs = [doc for rank in range(len(lengths_by_rank)) for doc in docs_of(lengths_by_rank, rank) if doc]
    labels = sum(len(doc) - 1 for doc in docs)
    total = 0.0
    for doc in docs:
        ids = torch.tensor([doc])
        logits = model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum") / labels
        if len(doc) > 1:
            loss.backward()
            total += float(loss.detach())
    return total, gradients_of(model)


def gradients_of(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """All gradients in fp64, summed over the group."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        gradient = gradient.detach().double().clone()
        if group is not None:
            dist.all_reduce(gradient, group=group)
        found[name] = gradient.numpy()
    return found


def recorded(attached: st.Attachment) -> list[str]:
    """The order of this rank's exchanges, from now on."""
    order: list[str] = []
    start = attached.balancer.exchange.start

    def start_and_note(*args: Any) -> Any:
        point = args[-1]
        order.append(f"{point.phase} layer {point.layer} nano {point.nano_batch}")
        return start(*args)

    attached.balancer.exchange.start = start_and_note  # type: ignore[method-assign]
    return order


def step(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    lengths_by_rank: Sequence[Sequence[int]],
    name: str = "llama",
    dtype: torch.dtype = torch.float32,
    checkpointing: str = "none",
    memory: str = "keep",
    ping_pong: bool = False,
    autocast: bool = False,
    policy: str = "balanced",
) -> dict[str, Any]:
    """Loss and summed gradients of one step, and what was sent for it."""
    model = tiny(name, dtype)
    model.train()
    if checkpointing != "none":
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    trace = Trace(rank)
    attached = st.attach(
        model, group, tolerance=0.0, memory=memory, meter=Meter(trace), timeout_s=30, planning_group=group,
        policy=policy,
    )  # fmt: skip
    order = recorded(attached)
    batch = st.collate(docs_of(lengths_by_rank, rank))
    labels = st.label_count(batch, group if ranks > 1 else None)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        if ping_pong:
            loss = st.PingPong(model)(**batch, num_items_in_batch=labels).loss
            planned = 1
        else:
            plan = attached.plan(batch)
            assert plan.label_count == labels
            loss = model(**batch, steelyard_plan=plan, num_items_in_batch=labels).loss
            planned = attached.balancer._planned_steps
    loss.backward()
    total = loss.detach().double()
    if ranks > 1:
        dist.all_reduce(total, group=group)
    attached.balancer.close()
    return {
        "loss": float(total),
        "gradients": gradients_of(model, group if ranks > 1 else None),
        "order": order,
        "planned": planned,
        "allocations": attached.balancer.arena.allocations,
        "spans": [(s.name, s.track, s.start_s, s.end_s, dict(s.args)) for s in trace.take()],
    }


def halves(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    ping: Sequence[Sequence[int]],
    pong: Sequence[Sequence[int]],
    together: bool,
    checkpointing: str = "none",
    autocast: bool = False,
) -> dict[str, Any]:
    """Two nano-batches in turn, or one forward pass after the other; one backward pass for both."""
    model = tiny()
    model.train()
    if checkpointing != "none":
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    visits: list[str] = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, n=number: visits.append(f"forward {n}"))
        layer.mlp.register_full_backward_hook(lambda *_, n=number: visits.append(f"backward {n}"))
    trace = Trace(rank)
    attached = st.attach(model, group, tolerance=0.0, meter=Meter(trace), timeout_s=30, planning_group=group)
    order = recorded(attached)
    batches = [st.collate(docs_of(lengths, rank)) for lengths in (ping, pong)]
    labels = sum(st.label_count(batch, group) for batch in batches)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        if together:
            loss = st.PingPong(model, reorder=False)(halves=batches, num_items_in_batch=labels).loss
        else:
            plans = attached.plan_together(batches)
            one, other = (
                model(**batch, steelyard_plan=plan, num_items_in_batch=labels).loss
                for batch, plan in zip(batches, plans, strict=True)
            )
            loss = one + other
    forward_visits = list(visits)
    loss.backward()
    attached.balancer.close()
    return {
        "loss": float(loss.detach()),
        "gradients": gradients_of(model),
        "order": order,
        "visits": sorted(visits),
        "forward_visits": forward_visits,
        "spans": [(s.name, s.track, s.start_s, s.end_s, dict(s.args)) for s in trace.take()],
    }


def parallel(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    lengths_by_rank: Sequence[Sequence[int]],
    kind: str,
    checkpointing: str = "none",
    ping_pong: bool = False,
    reshard: bool | None = None,
) -> dict[str, Any]:
    """A step under DDP or FSDP2, which take the mean of gradients: the loss is scaled by the number of ranks."""
    model = tiny()
    model.train()
    if checkpointing != "none":
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30)
    order = recorded(attached)
    batch = st.collate(docs_of(lengths_by_rank, rank))
    labels = st.label_count(batch, group)
    runner: Any = model
    if kind == "fsdp2":
        mesh = DeviceMesh.from_group(group, "cpu")
        reshard = not ping_pong if reshard is None else reshard
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if ping_pong:
        runner = st.PingPong(model)
    if kind == "ddp":
        runner = DistributedDataParallel(runner, process_group=group)
    if ping_pong and reshard:
        return {"error": error_of(lambda: runner(**batch))}
    loss = runner(**batch, num_items_in_batch=labels).loss * ranks
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).double().numpy()
    total = loss.detach().double() / ranks
    dist.all_reduce(total, group=group)
    attached.detach()
    return {"loss": float(total), "gradients": gradients, "order": order}


def one_rank_evaluates(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Things that only some ranks do: refused on all of them at once, or done apart."""
    model = tiny()
    attached = st.attach(model, group, tolerance=0.0, timeout_s=20, planning_group=group)
    batch = st.collate([tokens_of(rank, 9), tokens_of(7, 4)])
    found: dict[str, Any] = {}
    with torch.set_grad_enabled(rank != 0):
        found["evaluates"] = error_of(lambda: model(**batch))
    broken = {**batch, "attention_mask": torch.ones(1, 1, 13, 13)} if rank == 1 else batch
    found["broken"] = error_of(lambda: model(**broken))
    if rank == 0:
        with attached.local(), torch.no_grad():
            found["alone"] = float(model(**batch).loss)
    with torch.no_grad():
        found["together"] = float(model(**batch).loss)
    found["ragged"] = attached.evaluate(iter([batch] * (3 if rank == 0 else 1)))
    attached.balancer.close()
    return found


def broken_batches(broken: bool) -> Iterator[dict[str, Any]]:
    """Two batches; a rank whose data is broken fails where the third is due, with an error that is not ours."""
    for number in range(2):
        yield st.collate([tokens_of(number, 9), tokens_of(7, 4)])
    if broken:
        raise OSError("shard 3 is gone")
    yield st.collate([tokens_of(2, 9)])


def one_rank_cannot_read(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 1 fails in every way of going through batches; how many were computed before, and what is said."""
    model = tiny()
    attached = st.attach(model, group, tolerance=0.0, timeout_s=20)
    computed: list[str] = []
    model.register_forward_hook(lambda *_: computed.append("step"))

    def train() -> None:
        for batch in attached.prefetch(broken_batches(rank == 1)):
            model(**batch).loss.backward()

    def attempt(call: Callable[[], object]) -> tuple[int, str, bool]:
        computed.clear()
        model.train()
        try:
            call()
        except (SteelyardError, OSError, AttributeError) as error:
            return len(computed), f"{type(error).__name__}: {error}", model.training
        return len(computed), "no error", model.training

    batch = st.collate([tokens_of(0, 9), tokens_of(7, 4)])
    embeds = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach(), "labels": batch["labels"]}
    not_a_batch = {"input_ids": batch["input_ids"], "position_ids": 3} if rank == 1 else batch
    found = {
        "prefetch": attempt(train),
        "evaluate": attempt(lambda: attached.evaluate(broken_batches(rank == 1))),
        "plan": attempt(lambda: attached.plan(not_a_batch)),
        "embeds": attempt(lambda: st.PingPong(model)(**(embeds if rank == 1 else batch))),
        "halves": attempt(lambda: st.PingPong(model)(halves=[batch, embeds if rank == 1 else batch])),
    }
    attached.report.take()
    steps = [dict(batch) for batch in attached.prefetch(broken_batches(False))]
    for batch in steps:
        model(**batch).loss.backward()
    found["counted ahead"] = attached.report._steps
    attached.evaluate(broken_batches(False))
    found["counted after evaluation"] = attached.report._steps
    attached.balancer.close()
    return found


def error_of(call: Any) -> str:
    try:
        call()
    except SteelyardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def masked_and_empty(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 1 has no document, rank 2 only labels of −100."""
    model = tiny()
    attached = st.attach(model, group, tolerance=0.0, timeout_s=20, planning_group=group)
    doc = tokens_of(rank, 20)
    batch = st.collate([[doc], [], [{"input_ids": doc, "labels": [-100] * 20}]][rank])
    plan = attached.plan(batch)
    loss = model(**batch, steelyard_plan=plan, num_items_in_batch=plan.label_count).loss
    loss.backward()
    attached.balancer.close()
    return {"loss": float(loss.detach()), "labels": plan.label_count, "gradients": gradients_of(model, group)}


def ten_steps(rank: int, ranks: int, group: dist.ProcessGroup) -> list[Any]:
    """Parameters after ten steps of ping-pong under DDP."""
    model = tiny()
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30)
    replica = DistributedDataParallel(st.PingPong(model), process_group=group)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    for number in range(10):
        batch = st.collate([tokens_of(1000 * number + 10 * rank + i, 3 + 11 * ((rank + i) % 4)) for i in range(3)])
        replica(**batch, num_items_in_batch=40).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    attached.detach()
    return [parameter.detach().numpy() for parameter in model.parameters()]
