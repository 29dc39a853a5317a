"""Megatron-Core's GPT model with balanced attention equals the stock model run on every document alone."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import megatron_ranks as on_rank
import numpy as np
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import steelyard.integrations.megatron as sm
from steelyard.attention import core_attention_reference
from steelyard.balance import Kernel
from steelyard.errors import UsageError
from steelyard.integrations.offset_passes import BalancerOptions, OffsetPasses
from steelyard.testing.pool import WorkerPool


@pytest.mark.parametrize(
    ("tensor", "recompute", "lengths"),
    [
        (1, False, [[60], [7, 1, 30], [20, 20], [1, 40]]),
        (1, True, [[60], [7, 1, 30], [20, 20], [1, 40]]),
        (2, False, [[64], [7, 1, 13, 4, 30]]),
    ],
)
def test_equals_the_stock_model(pool: WorkerPool, tensor: int, recompute: bool, lengths: list[list[int]]) -> None:
    """On 4 data-parallel ranks; and on 2, each of two tensor-parallel ones with half of the heads."""
    expected = pool.run(on_rank.stock, 4, lengths)[0]
    for result in pool.run(on_rank.train_step, 4, lengths, tensor, recompute):
        np.testing.assert_allclose(result["logits"], expected["logits"][result["data_rank"]], rtol=0, atol=2e-5)
        for name, grad in result["grads"].items():
            want = expected["grads"][name]
            if grad.shape == want.shape:  # a tensor-parallel rank has a part of the others
                np.testing.assert_allclose(grad, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)
        whole = sum(grad.shape == expected["grads"][name].shape for name, grad in result["grads"].items())
        assert whole == len(expected["grads"]) if tensor == 1 else whole > 5
        assert (result["entries"], result["answers"]) == (2, 2 if recompute else 0)
        assert result["planned"] == 1 and max(result["work"]) < max(result["home"])


def layer(**changes: Any) -> sm.BalancedCoreAttention:
    """The attention of the second layer, alone in this process."""
    shared = sm.Shared(None, BalancerOptions())
    shared._passes = OffsetPasses(None, BalancerOptions())
    given = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    given |= {name: changes.pop(name) for name in list(changes) if name in (*given, "k_channels")}
    return sm.BalancedCoreAttention(on_rank.config_of(**changes), 2, **given, shared=shared)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"qk_clip": True}, "qk_clip"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, "pipeline_model_parallel_size=2"),
        ({"window_size": (4, 4)}, "window_size"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type"),
        ({"attention_type": "cross"}, "attention_type"),
        ({"k_channels": 8}, "k_channels"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        layer(**changes)
    assert "\n" not in str(caught.value)


def test_calls_that_are_refused() -> None:
    attention, (q, k) = layer(), (torch.randn(6, heads, 8) for heads in (4, 2))
    documents = on_rank.packed([2, 4])[1]
    assert attention(q, k, k, None, packed_seq_params=documents).shape == (6, 32)

    def changed(**changes: Any) -> PackedSeqParams:
        other = copy.copy(documents)
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "packed_seq_params None"),
        ({"packed_seq_params": changed(qkv_format="sbhd")}, "qkv_format='sbhd'"),
        ({"packed_seq_params": changed(cu_seqlens_kv=torch.tensor([0, 3, 6]))}, "cu_seqlens_kv differs"),
        ({"packed_seq_params": changed(cu_seqlens_q_padded=torch.tensor([0, 4, 8]))}, "cu_seqlens_q_padded differs"),
        ({"packed_seq_params": documents, "attention_mask": torch.zeros(1, 1, 6, 6)}, "attention_mask cannot"),
        ({"packed_seq_params": documents, "attention_bias": torch.zeros(1)}, "attention_bias cannot"),
        ({"packed_seq_params": documents, "attn_mask_type": AttnMaskType.no_mask}, "attn_mask_type"),
    ]
    for given, named in cases:
        with pytest.raises(UsageError, match=named):
            attention(q, k, k, **given)
    with pytest.raises(UsageError, match="6 tokens"):
        attention(q, k, k, packed_seq_params=on_rank.packed([2, 3])[1])


def test_offsets_are_compared_once_in_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing waits for a GPU; later layers are given the same tensors."""
    compared: list[int] = []
    equal = torch.equal

    def counted(one: torch.Tensor, other: torch.Tensor) -> bool:
        compared.append(len(one))
        return equal(one, other)

    monkeypatch.setattr(torch, "equal", counted)
    shared, documents = sm.Shared(None, BalancerOptions()), on_rank.packed([2, 4])[1]
    documents.cu_seqlens_kv = documents.cu_seqlens_q.clone()
    for begins in (True, False, False, True, False):
        shared.offsets_of("", documents, begins=begins)
    assert len(compared) == 2
    documents.cu_seqlens_kv = torch.tensor([0, 3, 6], dtype=torch.int32)
    with pytest.raises(UsageError, match="cu_seqlens_kv differs"):
        shared.offsets_of("", documents, begins=False)


@pytest.mark.parametrize(
    ("window_size", "skip", "window"), [((3, 0), None, 4), ((-1, 0), None, None), ((3, 0), 2, None), (None, None, None)]
)
def test_windows_are_those_of_the_layer(
    window_size: tuple[int, int] | None, skip: int | None, window: int | None
) -> None:
    attention = layer(window_size=window_size, window_attn_skip_freq=skip)
    assert attention._kernel == Kernel(None, window)
    q, k, v = (torch.randn(9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    got = attention(q, k, v, packed_seq_params=on_rank.packed([2, 7])[1])
    torch.testing.assert_close(got, core_attention_reference(q, k, v, [2, 7], window=window).flatten(1))


@pytest.mark.parametrize(
    "spec",
    [get_gpt_layer_local_spec, lambda: TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec()] * 2)],
)
def test_specifications_are_copied(spec: Callable[[], Any]) -> None:
    original = spec()
    balanced = sm.balance(original)
    cores = [part.submodules.self_attention.submodules.core_attention for part in layers_of(balanced)]
    assert cores and all(core.module is sm.BalancedCoreAttention for core in cores)
    before = [part.submodules.self_attention.submodules.core_attention for part in layers_of(original)]
    assert all(getattr(core, "module", core) is not sm.BalancedCoreAttention for core in before)


def layers_of(spec: Any) -> list[Any]:
    return spec.layer_specs if hasattr(spec, "layer_specs") else [spec]


def test_specifications_that_are_refused() -> None:
    with pytest.raises(UsageError, match="no SelfAttention"):
        sm.balance(get_gpt_layer_local_spec(multi_latent_attention=True))


def test_without_megatron_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)
    spec = importlib.util.find_spec("steelyard.integrations.megatron")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"pip install 'steelyard\[megatron\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
