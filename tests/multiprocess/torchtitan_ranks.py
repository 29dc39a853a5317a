"""One rank's part of the tests of the torchtitan adapter. Runs on the pool's workers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as distributed
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import (
    ScaledDotProductAttention,
    VarlenAttention,
    create_varlen_metadata_for_document,
)
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec

import steelyard.integrations.torchtitan as st


def spec_of(window_size: tuple[int, int] = (-1, 0)) -> ModelSpec:
    """Two layers of torchtitan's own small Llama 3, with the variable-length attention that has no CPU kernel."""
    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:2]
    init = {"weight": functools.partial(nn.init.normal_, std=0.1)}
    for layer in spec.model.layers:
        layer.attention = make_gqa_config(
            dim=256,
            n_heads=16,
            n_kv_heads=4,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=VarlenAttention.Config(window_size=window_size),
            fuse_qkv=True,
            rope=layer.attention.rope,
        )
    return spec


def built(config: Any) -> nn.Module:
    """The model of a configuration, with weights that are the same whatever its attention."""
    torch.manual_seed(0)
    model: nn.Module = config.build()
    model.init_weights()
    return model


def documents(rank: int, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """(tokens, weights of the logits in the loss) of each document of a rank."""
    found = []
    for index, length in enumerate(n for row in rows for n in row):
        generator = torch.Generator().manual_seed(100 * rank + index)
        tokens = torch.randint(0, 2048, (length,), generator=generator)
        found.append((tokens, torch.randn(length, 2048, generator=generator)))
    return found


def batch_of(rank: int, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and positions (rows, L), and weights of the logits."""
    parts = documents(rank, rows)
    positions = torch.cat([torch.arange(n) for row in rows for n in row])
    shape = (len(rows), -1)
    return torch.cat([t for t, _ in parts]).view(shape), positions.view(shape), torch.cat([w for _, w in parts])


def stock(rows_by_rank: Sequence[Sequence[Sequence[int]]]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Logits by rank and summed gradients of the stock model, run on every document alone."""
    spec = spec_of()
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = built(spec.model)
    logits = []
    for rank, rows in enumerate(rows_by_rank):
        parts = []
        for tokens, weight in documents(rank, rows):
            out = model(tokens[None], torch.arange(len(tokens))[None])[0]
            (out * weight).sum().backward()
            parts.append(out.detach())
        logits.append(torch.cat(parts).numpy())
    return logits, {name: p.grad.numpy() for name, p in model.named_parameters()}


def train_step(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    rows_by_rank: Sequence[Sequence[Sequence[int]]],
    checkpointing: str,
    micro_batches: int,
) -> dict[str, Any]:
    """Forward and backward of a model that was converted and bound, the batch `micro_batches` times."""
    config = st.BalancedAttentionConverter.Config().build().convert(spec_of().model)
    model = built(config)
    if checkpointing != "none":
        {"full": FullAC, "selective": SelectiveAC}[checkpointing].Config().build().apply(model)
    passes = st.bind(model, group, st.BalancerOptions(tolerance=0.0, timeout_s=30, planning_group=group))
    tokens, positions, weight = batch_of(rank, rows_by_rank[rank])
    for _ in range(micro_batches):
        masks = model.get_attention_masks(positions=positions)
        out = model(tokens, positions, masks).flatten(0, 1)
        (out * weight).sum().backward()
    attention = passes._passes[masks.cu_seq_q].attention
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    grads = {n.replace("_checkpoint_wrapped_module.", ""): p.grad.numpy() for n, p in model.named_parameters()}
    return {
        "logits": out.detach().numpy(), "grads": grads, "planned": passes.balancer._planned_steps,
        "entries": attention.entries, "answers": attention.answers,
        "work": attention.plan.work_by_server.tolist(), "home": attention.plan.work_by_home.tolist(),
    }  # fmt: skip


def train_step_of_trainer(
    rank: int,
    ranks: int,
    group: dist.ProcessGroup,
    rows_by_rank: Sequence[Sequence[Sequence[int]]],
    replicas: int,
) -> dict[str, Any]:
    """What torchtitan's trainer does with the specification: build, parallelise (FSDP2, replicated or not), train."""
    spec = st.balance(spec_of(), tolerance=0.0, timeout_s=30)
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicas,
        data_parallel_shard_degree=ranks // replicas,
        spmd_backend="partial_dtensor",  # the FSDP2 of torch 2.13 knows nothing of the other two
    )
    parallel_dims.device_type = "cpu"  # torchtitan says "cuda" on machines without any accelerator
    dims = ParallelDims.from_config(parallelism, ranks)
    distributed.set_spmd_backend(parallelism.spmd_backend)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=SelectiveAC.Config(),
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
        # Random numbers of a sharded model are others.
        weights = built(spec_of().model).state_dict()
        model.load_state_dict(
            {
                name: distribute_tensor(weights[name], value.device_mesh, value.placements)
                if isinstance(value, DTensor)
                else weights[name]
                for name, value in model.state_dict().items()
            }
        )
    tokens, positions, weight = batch_of(rank, rows_by_rank[rank])
    with distributed.get_spmd_context(parallel_dims=dims)():
        out = model(tokens, positions, model.get_attention_masks(positions=positions)).flatten(0, 1)
        (out * weight).sum().backward()
    grads = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor().numpy()
        for name, parameter in model.named_parameters()
    }
    return {"logits": out.detach().numpy(), "grads": grads}


def other_windows(
    rank: int, ranks: int, group: dist.ProcessGroup, rows_by_rank: Sequence[Sequence[Sequence[int]]]
) -> dict[str, Any]:
    """Attention alone, of a layer with a window of 4 earlier keys, and what it was given."""
    config = st.BalancedAttentionConverter.Config().build().convert(spec_of(window_size=(4, 0)).model)
    module = config.layers[0].attention.inner_attention.build()
    st.bind(module, group, st.BalancerOptions(tolerance=0.0, timeout_s=30, planning_group=group))
    positions = batch_of(rank, rows_by_rank[rank])[1]
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(*positions.shape, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    masks = create_varlen_metadata_for_document(positions)
    out = module(q, k, v, attention_masks=masks, scale=0.3, enable_gqa=True)
    return {name: tensor.flatten(0, 1).numpy() for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out))}
