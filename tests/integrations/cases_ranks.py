"""One rank's part of the cases from practice, through a Transformers model. Runs on the pool's workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers_ranks as tiny_models
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Starcoder2Config, Starcoder2ForCausalLM

import steelyard.integrations.transformers as st
from steelyard.errors import SteelyardError
from steelyard.observe.meter import Meter
from steelyard.observe.trace import Trace

Lengths = Sequence[Sequence[int]]
WAYS = ("position ids alone", "with the default use_cache", "with a mask of ones", "with cu_seq_lens")


def model_of(name: str, dtype: torch.dtype) -> Any:
    """A small model; "all-fp64" has no operator that rounds to fp32, as the norms and softmax of other models do."""
    if name != "all-fp64":
        return tiny_models.tiny(name, dtype)
    torch.manual_seed(7)
    config = Starcoder2Config(
        vocab_size=tiny_models.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, attn_implementation="sdpa",
        residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = Starcoder2ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def summed_loss(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """The sum of token losses in the type of the logits: the models' own loss rounds to fp32."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")


def one_by_one(docs: Sequence[Sequence[int]], name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """Loss, gradients and logits of documents, each alone through the stock model."""
    model = model_of(name, dtype)
    labels = sum(max(0, len(doc) - 1) for doc in docs)
    total, logits = 0.0, []
    for doc in docs:
        if not doc:
            continue
        ids = torch.tensor([doc])
        out = model(input_ids=ids, use_cache=False).logits
        logits.append(out.detach()[0])
        if len(doc) > 1:
            loss = summed_loss(out[:, :-1], ids[:, 1:]) / labels
            loss.backward()
            total += float(loss.detach())
    return total, tiny_models.gradients_of(model), torch.cat(logits).numpy()


def isolation(rank: int, ranks: int, group: dist.ProcessGroup, lengths: Lengths) -> dict[str, float]:
    """By way of saying where documents are: the largest difference of logits from the documents one by one."""
    model = model_of("llama", torch.float32)
    docs = tiny_models.docs_of(lengths, rank)
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([doc])).logits[0] for doc in docs])
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30, planning_group=group)
    batch = st.collate(docs)
    plain = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    more: dict[str, dict[str, Any]] = {
        WAYS[0]: {"use_cache": False},
        WAYS[1]: {},
        WAYS[2]: {"attention_mask": torch.ones_like(batch["input_ids"])},
        WAYS[3]: {name: batch[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")},
    }
    found = {}
    with torch.no_grad():
        for way in WAYS:
            found[way] = float((model(**plain, **more[way]).logits[0] - expected).abs().max())
    attached.balancer.close()
    return found


def step(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    lengths: Lengths,
    name: str = "llama",
    dtype: torch.dtype = torch.float32,
    tolerance: float = 0.0,
    backend: str = "auto",
    memory: str = "keep",
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Loss and summed gradients of one step, this rank's logits, and the work that each rank did."""
    model = model_of(name, dtype)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    trace = Trace(rank)
    attached = st.attach(
        model, group, tolerance=tolerance, timeout_s=60, planning_group=group, backend=backend, memory=memory,
        meter=Meter(trace),
    )  # fmt: skip
    batch = st.collate(tiny_models.docs_of(lengths, rank))
    plan = attached.plan(batch)
    nano = plan.nano_batch
    logits = model(**batch, steelyard_plan=plan).logits
    loss = summed_loss(logits, batch["shift_labels"]) / plan.label_count
    loss.backward()
    total = loss.detach().double()
    dist.all_reduce(total, group=group)
    attached.balancer.close()
    transfers = [span for span in trace.take() if span.track == "transfer"]
    return {
        "loss": float(total), "gradients": tiny_models.gradients_of(model, group), "logits": logits.detach()[0].numpy(),
        "work": nano.work_by_server.tolist(), "home": nano.work_by_home.tolist(), "tables": nano.tables,
        "planned": attached.balancer._planned_steps,
        "bytes": {
            phase: (
                sum(s.args["bytes_sent"] for s in transfers if s.name == phase),
                sum(s.args["bytes_received"] for s in transfers if s.name == phase),
            )
            for phase in {s.name for s in transfers}
        },
    }  # fmt: skip


def parallel(
    rank: int, ranks: int, group: dist.ProcessGroup, micro_batches: Sequence[Lengths], kind: str, name: str = "llama"
) -> dict[str, Any]:
    """A step of several micro-batches under DDP or FSDP2, with the models' own loss; `micro_batches[i][rank]`.

    Both take the mean of gradients over ranks, so the loss is multiplied by their number.
    """
    model = model_of(name, torch.float32)
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30)
    runner: Any = model
    if kind == "fsdp2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        runner = DistributedDataParallel(model, process_group=group)
    first = 0
    batches = []
    for lengths in micro_batches:
        before = first + sum(len(own) for own in lengths[:rank])
        batches.append(st.collate([tiny_models.tokens_of(before + i, n) for i, n in enumerate(lengths[rank])]))
        first += sum(len(own) for own in lengths)
    labels = sum(st.label_count(batch, group) for batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or kind == "fsdp2" else runner.no_sync():
            loss = runner(**batch, num_items_in_batch=labels).loss
            (loss * ranks).backward()
        total += loss.detach()
    dist.all_reduce(total, group=group)
    gradients = {}
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[key] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).double().numpy()
    attached.detach()
    return {"loss": float(total), "gradients": gradients}


def empty_and_masked(rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 0 says empty documents by its bounds, rank 1 has no token, all labels of rank 2 are −100."""
    model = model_of("llama", torch.float32)
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30, planning_group=group)
    docs = [tiny_models.tokens_of(i, n) for i, n in enumerate((5, 3))]
    batch = [
        st.collate(docs),
        st.collate([]),
        st.collate([{"input_ids": tiny_models.tokens_of(2, 20), "labels": [-100] * 20}]),
    ][rank]
    if rank == 0:
        bounds = torch.tensor([0, 0, 5, 5, 8, 8, 8], dtype=torch.int32)
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    plan = attached.plan(batch)
    loss = model(**batch, steelyard_plan=plan, num_items_in_batch=plan.label_count).loss
    loss.backward()
    attached.balancer.close()
    return {"loss": float(loss.detach()), "gradients": tiny_models.gradients_of(model, group)}


def uneven(
    rank: int, ranks: int, world: dist.ProcessGroup, batches_by_rank: Sequence[Lengths], labels: int
) -> dict[str, Any]:
    """Ranks with different numbers of batches, through `prefetch`; documents are numbered over all of them.

    It plans on a thread, so lengths have a group of their own; all ranks of the world make it.
    """
    members = range(len(batches_by_rank))
    group, planning = (dist.new_group(list(members)) for _ in range(2))
    if rank not in members:
        return {}
    model = model_of("llama", torch.float32)
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30, planning_group=planning)
    first = sum(len(lengths) for batches in batches_by_rank[:rank] for lengths in batches)

    def batches() -> Iterator[dict[str, Any]]:
        number = first
        for lengths in batches_by_rank[rank]:
            yield st.collate([tiny_models.tokens_of(number + i, n) for i, n in enumerate(lengths)])
            number += len(lengths)

    rounds, total = 0, torch.zeros((), dtype=torch.float64)
    for batch in attached.prefetch(batches()):
        loss = model(**batch, num_items_in_batch=labels).loss
        loss.backward()
        total += loss.detach()
        rounds += 1
    dist.all_reduce(total, group=group)
    reported = attached.report._steps
    attached.balancer.close()
    gradients = tiny_models.gradients_of(model, group)
    for made in (group, planning):
        dist.destroy_process_group(made)
    return {"loss": float(total), "gradients": gradients, "rounds": rounds, "reported": reported}


def prefetch_on_one_group(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """What is said if lengths would travel between the transfers, from another thread."""
    attached = st.attach(model_of("llama", torch.float32), group, timeout_s=20, planning_group=group)
    said = tiny_models.error_of(lambda: next(attached.prefetch([])))
    attached.balancer.close()
    return said


def different_numbers_of_nano_batches(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """Rank 0 plans two batches, rank 1 one."""
    model = model_of("llama", torch.float32)
    attached = st.attach(model, group, timeout_s=20, planning_group=group)
    batch = st.collate([tiny_models.tokens_of(0, 5)])
    said = tiny_models.error_of(lambda: attached.plan_together([batch] * (2 - rank)))
    attached.balancer.close()
    return said


def padded(rank: int, ranks: int, group: dist.ProcessGroup, lengths: Lengths, side: str) -> dict[str, Any]:
    """A batch of several rows with padding at one side, with labels; −100 in the padding."""
    model = model_of("llama", torch.float32)
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30, planning_group=group)
    docs = tiny_models.docs_of(lengths, rank)
    width = max(len(doc) for doc in docs)
    tokens, mask = torch.zeros(2, len(docs), width, dtype=torch.int64)
    for row, doc in enumerate(docs):
        at = slice(width - len(doc), width) if side == "left" else slice(0, len(doc))
        tokens[row, at], mask[row, at] = torch.tensor(doc), 1
    batch = {
        "input_ids": tokens, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "labels": tokens.masked_fill(mask == 0, -100),
    }  # fmt: skip
    if side == "left":  # the loss shifts labels: a row's first token is nobody's next one
        batch["labels"] = batch["labels"].masked_fill(mask.cumsum(1) == 1, -100)
    plan = attached.plan(batch)
    loss = model(**batch, steelyard_plan=plan, num_items_in_batch=plan.label_count).loss
    loss.backward()
    total = loss.detach().double()
    dist.all_reduce(total, group=group)
    attached.balancer.close()
    return {"loss": float(total), "gradients": tiny_models.gradients_of(model, group)}


def uniform_window(rank: int, ranks: int, group: dist.ProcessGroup) -> tuple[Any, Any]:
    """v and the attention output of the first layer, for a window of 4 and scores of 0, of documents 6 and 6."""
    model = model_of("mistral-window", torch.float64)
    first = model.model.layers[0].self_attn
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        first.q_proj.weight.zero_()
    first.v_proj.register_forward_hook(lambda *call: seen.update(v=call[2].detach()[0]))
    first.o_proj.register_forward_pre_hook(lambda *call: seen.update(out=call[1][0].detach()[0]))
    attached = st.attach(model, group, tolerance=0.0, timeout_s=30, planning_group=group)
    docs = [tiny_models.tokens_of(i, 6) for i in range(2)]
    more = [[tiny_models.tokens_of(5, 90)], []][min(rank, 1)] if ranks > 1 else []
    with torch.no_grad():
        model(**st.collate([*docs, *more]))
    attached.balancer.close()
    v_TKH, out_TNH = (seen[name][:12].unflatten(-1, (-1, 8)) for name in ("v", "out"))
    return v_TKH.repeat_interleave(2, dim=1).numpy(), out_TNH.numpy()


def head_tail(rank: int, ranks: int, group: dist.ProcessGroup) -> str:
    """What is said of the two ranks' parts of documents 4 and 4 in a head–tail layout."""
    model = model_of("llama", torch.float32)
    attached = st.attach(model, group, timeout_s=20, planning_group=group)
    positions = torch.tensor([[[0, 3, 0, 3]], [[1, 2, 1, 2]]])[rank]
    said = tiny_models.error_of(lambda: model(input_ids=positions + 5, position_ids=positions))
    attached.balancer.close()
    return said


def attach_alone(rank: int, ranks: int, group: dist.ProcessGroup) -> tuple[str, float]:
    """Rank 0 attaches without the others, and then with a group of its own; then all of them do."""
    found = "", 0.0
    if rank == 0:
        try:
            st.attach(model_of("llama", torch.float32), group, timeout_s=1.5)
        except SteelyardError as error:
            said = f"{type(error).__name__}: {error}"
        own = dist.new_group([0], use_local_synchronization=True)
        model = model_of("llama", torch.float32)
        st.attach(model, own)
        found = said, float(model(**st.collate([[5, 6, 7]])).loss.detach())
    dist.barrier(group=group)
    st.attach(model_of("llama", torch.float32), group, timeout_s=20).detach()
    return found


def odd_lengths(rank: int, ranks: int, group: dist.ProcessGroup, lengths: Lengths) -> dict[str, Any]:
    """Loss and gradients of long documents, packed and balanced, and one by one through `sdpa`."""
    changes = {
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16,
        "max_position_embeddings": 70_000,
    }  # fmt: skip
    docs = tiny_models.docs_of(lengths, rank)
    labels = sum(n - 1 for own in lengths for n in own)
    losses, gradients = [], []
    for balanced in (False, True):
        model = tiny_models.tiny("llama", **changes)
        if balanced:
            attached = st.attach(model, group, tolerance=0.02, timeout_s=300, planning_group=group)
            batches = [st.collate(docs)]
        else:
            model.set_attn_implementation("sdpa")
            batches = [{k: v for k, v in st.collate([d]).items() if "len" not in k} for d in docs]
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = model(**batch, num_items_in_batch=labels, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(float(total))
        gradients.append(tiny_models.gradients_of(model, group))
    attached.balancer.close()
    return {"losses": losses, "gradients": gradients}


class Lora(nn.Module):
    """A frozen projection and a trained one of low rank beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear, rank: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=draw) * 0.2)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=draw) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Wrapped(nn.Module):
    """Around a model as PEFT's is: it names the model inside, and hands on what it is called with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def get_base_model(self) -> nn.Module:
        return self.base_model["model"]

    def forward(self, **batch: Any) -> Any:
        return self.get_base_model()(**batch)


def with_adapters() -> Any:
    model = model_of("llama", torch.float32)
    model.requires_grad_(False)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.q_proj, attention.v_proj = (
            Lora(p, 2, 10 * number + i) for i, p in enumerate((attention.q_proj, attention.v_proj))
        )
    return model


def adapters_one_by_one(docs: Sequence[Sequence[int]]) -> tuple[float, dict[str, Any]]:
    model = with_adapters()
    labels, total = sum(len(doc) - 1 for doc in docs), 0.0
    for doc in docs:
        ids = torch.tensor([doc])
        loss = summed_loss(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:]) / labels
        loss.backward()
        total += float(loss.detach())
    return total, tiny_models.gradients_of(model)


def adapters(
    rank: int, ranks: int, group: dist.ProcessGroup, lengths: Lengths, wrapped_first: bool, ping_pong: bool
) -> dict[str, Any]:
    """A step of which only adapters learn, attached before or after the model is wrapped."""
    model = with_adapters()
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    outer: Any = Wrapped(model) if wrapped_first else model
    attached = st.attach(outer, group, tolerance=0.0, timeout_s=30, planning_group=group)
    order = tiny_models.recorded(attached)
    outer = outer if wrapped_first else Wrapped(outer)
    runner = st.PingPong(outer) if ping_pong else outer
    batch = st.collate(tiny_models.docs_of(lengths, rank))
    labels = st.label_count(batch, group)
    loss = runner(**batch, num_items_in_batch=labels).loss
    loss.backward()
    total = loss.detach().double()
    dist.all_reduce(total, group=group)
    attached.balancer.close()
    return {"loss": float(total), "gradients": tiny_models.gradients_of(model, group), "order": order}
