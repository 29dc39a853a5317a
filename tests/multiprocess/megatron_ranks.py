"""One rank's part of the tests of the Megatron-Core adapter. Runs on the pool's workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import steelyard.integrations.megatron as sm

VOCABULARY = 64


def config_of(**changes: Any) -> TransformerConfig:
    """Two small layers with grouped heads."""
    settings = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
        "use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.2,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**{**settings, **changes})


def built(spec: Any, config: TransformerConfig) -> GPTModel:
    """A model with the same weights for any specification. On CPU Megatron has no rotary positions."""
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=128,
        position_embedding_type="learned_absolute",
        parallel_output=False,
    )


@contextmanager
def model_parallel(tensor: int) -> Iterator[None]:
    """Megatron's groups over all ranks of the world."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def documents(rank: int, lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """(tokens, weights of the logits in the loss) of each document of a rank."""
    found = []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * rank + index)
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator)
        found.append((tokens, torch.randn(length, VOCABULARY, generator=generator)))
    return found


def packed(lengths: Sequence[int]) -> tuple[Tensor, PackedSeqParams]:
    """Positions (1, T), and the documents as Megatron is told them."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return positions, PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def train_step(
    rank: int, ranks: int, group: dist.ProcessGroup, lengths_by_data_rank: Sequence[Sequence[int]], tensor: int,
    recompute: bool,
) -> dict[str, Any]:  # fmt: skip
    """Forward and backward of a packed batch with balanced attention; with `recompute` every layer is checkpointed."""
    with model_parallel(tensor), _device_of_buffers(tensor > 1), _no_random_states(recompute):
        data_group = parallel_state.get_data_parallel_group()
        data_rank = dist.get_rank(data_group)
        spec = sm.balance(
            get_gpt_layer_local_spec(), data_group, tolerance=0.0, timeout_s=30, planning_group=data_group
        )
        checkpointing = (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if recompute
            else {}
        )
        model = built(spec, config_of(tensor_model_parallel_size=tensor, **checkpointing))
        lengths = lengths_by_data_rank[data_rank]
        parts = documents(data_rank, lengths)
        positions, packed_seq_params = packed(lengths)
        tokens, weight = torch.cat([t for t, _ in parts])[None], torch.cat([w for _, w in parts])
        out = model(tokens, positions, None, packed_seq_params=packed_seq_params)[0]
        (out * weight).sum().backward()
        passes = model.decoder.layers[0].self_attention.core_attention._shared.passes
        attention = passes._passes[packed_seq_params.cu_seqlens_q].attention
        plan = attention.plan
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data_group)
        return {
            "data_rank": data_rank, "logits": out.detach().numpy(), "planned": passes.balancer._planned_steps,
            "grads": {name: parameter.grad.numpy() for name, parameter in model.named_parameters()},
            "entries": attention.entries, "answers": attention.answers,
            "work": plan.work_by_server.tolist(), "home": plan.work_by_home.tolist(),
        }  # fmt: skip


def stock(
    rank: int, ranks: int, group: dist.ProcessGroup, lengths_by_data_rank: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Logits and summed gradients of Megatron's own model, run on every document alone."""
    with model_parallel(1), _stock_attention_on_cpu():
        model = built(get_gpt_layer_local_spec(), config_of())
        logits: list[np.ndarray] = []
        for data_rank, lengths in enumerate(lengths_by_data_rank):
            parts = []
            for tokens, weight in documents(data_rank, lengths):
                length = len(tokens)
                hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
                out = model(tokens[None], torch.arange(length)[None], hidden)[0]
                (out * weight).sum().backward()
                parts.append(out.detach())
            logits.append(torch.cat(parts).numpy())
        grads = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
        return {"logits": logits, "grads": grads}


@contextmanager
def _stock_attention_on_cpu() -> Iterator[None]:
    """Megatron's `DotProductAttention` asks for a buffer on the current GPU, and for random numbers for its dropout."""
    tracker = mock.Mock(fork=nullcontext)
    with (
        _device_of_buffers(True),
        mock.patch.object(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", return_value=tracker),
    ):
        yield


def _device_of_buffers(needed: bool) -> AbstractContextManager[Any]:
    """Where Megatron makes the buffers of its tensor-parallel transfers: on the current GPU, even with gloo."""
    return mock.patch.object(torch.cuda, "current_device", return_value="cpu") if needed else nullcontext()


@contextmanager
def _no_random_states(needed: bool) -> Iterator[None]:
    """Megatron's checkpoints save the random state of the current GPU; these models draw no random numbers."""
    if not needed:
        yield
        return
    with (
        mock.patch.object(random, "_get_all_rng_states", return_value=()),
        mock.patch.object(random, "_set_all_rng_states"),
    ):
        yield
