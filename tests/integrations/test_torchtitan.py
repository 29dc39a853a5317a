"""torchtitan's own Llama 3 with balanced attention equals the stock model run on every document alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchtitan_ranks as on_rank
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
    VarlenMetadata,
    create_varlen_metadata_for_document,
)
from torchtitan.models.deepseek_v3 import model_registry as deepseek
from torchtitan.models.gpt_oss import model_registry as gpt_oss
from torchtitan.models.llama3 import model_registry as llama3
from torchtitan.models.qwen3 import model_registry as qwen3
from torchtitan_trainer_run import write_assets

import steelyard.integrations.torchtitan as st
from steelyard.attention import core_attention_reference
from steelyard.errors import UsageError
from steelyard.testing.pool import WorkerPool

ROWS = [[[64, 32], [96]], [[7, 1, 40, 48], [30, 30, 36]]]


@pytest.fixture(scope="module")
def stock() -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    return on_rank.stock(ROWS)


def assert_grads(got: dict[str, np.ndarray], want: dict[str, np.ndarray], factor: float) -> None:
    assert got.keys() == want.keys()
    for name, grad in got.items():
        bound = 2e-5 * np.abs(want[name]).max()
        np.testing.assert_allclose(grad / factor, want[name], rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize(
    ("checkpointing", "micro_batches", "answers"), [("none", 1, 0), ("full", 2, 2), ("selective", 2, 2)]
)
def test_two_ranks_equal_the_stock_model(
    pool: WorkerPool, stock: tuple[Any, Any], checkpointing: str, micro_batches: int, answers: int
) -> None:
    results = pool.run(on_rank.train_step, 2, ROWS, checkpointing, micro_batches)
    for result, logits in zip(results, stock[0], strict=True):
        np.testing.assert_allclose(result["logits"], logits, rtol=0, atol=1e-5)
        assert_grads(result["grads"], stock[1], micro_batches)
        assert (result["planned"], result["entries"], result["answers"]) == (micro_batches, 2, answers)
        assert max(result["work"]) < max(result["home"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_as_the_trainer_does_it_under_fsdp(pool: WorkerPool, replicas: int) -> None:
    rows = [[[96]], [[50, 46]], [[1, 95]], [[30, 30, 36]]]
    logits, grads = on_rank.stock(rows)
    for result, expected in zip(pool.run(on_rank.train_step_of_trainer, 4, rows, replicas), logits, strict=True):
        np.testing.assert_allclose(result["logits"], expected, rtol=0, atol=1e-5)
        # torchtitan turns the gradient mean of FSDP off: losses are divided by the global number of tokens.
        assert_grads(result["grads"], grads, 1.0)


def test_windows_count_earlier_keys(pool: WorkerPool) -> None:
    for rows, result in zip(ROWS, pool.run(on_rank.other_windows, 2, ROWS), strict=True):
        q, k, v = (torch.from_numpy(result[name]) for name in "qkv")
        lengths = [n for row in rows for n in row]
        want = core_attention_reference(q, k, v, lengths, window=5, scale=0.3)
        np.testing.assert_allclose(result["out"], want.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [lambda: llama3("debugmodel"), lambda: qwen3("debugmodel", attn_backend="varlen")])
def test_every_layer_is_replaced_and_numbered(spec: Callable[[], Any]) -> None:
    config = st.balance(spec()).model
    inner = [layer.attention.inner_attention for layer in config.layers]
    assert [attention.layer for attention in inner] == list(range(len(config.layers)))
    # torchtitan's trainer makes the metadata of documents for configurations of this type.
    assert all(isinstance(attention, VarlenAttention.Config) for attention in inner)


def with_inner(inner: Any) -> Any:
    spec = llama3("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = inner
    return spec


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (lambda: gpt_oss("debugmodel"), "inner_attention belongs to"),
        (lambda: deepseek("debugmodel"), "inner_attention belongs to"),
        (lambda: with_inner(ScaledDotProductAttention.Config()), "sees no documents"),
        (lambda: with_inner(VarlenAttention.Config(window_size=(-1, -1))), "window_size"),
    ],
)
def test_configurations_that_are_refused(spec: Callable[[], Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        st.balance(spec())


@pytest.mark.parametrize(
    ("degrees", "compiled", "named"),
    [
        ({"cp": 2}, False, "context_parallel_degree"),
        ({"pp": 2}, False, "pipeline_parallel_degree"),
        ({"dp_shard": 2}, True, "compile.components"),
    ],
)
def test_settings_that_are_refused(degrees: dict[str, int], compiled: bool, named: str) -> None:
    spec = st.balance(on_rank.spec_of())
    every = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, **degrees}
    with pytest.raises(UsageError, match=named):
        spec.parallelize_fn(
            on_rank.built(spec.model),
            parallel_dims=ParallelDims(**every, world_size=2),
            training=TrainingConfig(),
            parallelism=ParallelismConfig(),
            compile_config=CompileConfig(enable=compiled, components=["model", "loss"]),
            ac_config=None,
            dump_folder="",
        )


def one_layer() -> tuple[st.BalancedAttention, torch.Tensor]:
    config = st.BalancedAttentionConverter.Config().build().convert(on_rank.spec_of().model)
    return config.layers[0].attention.inner_attention.build(), torch.randn(1, 6, 4, 8)


def test_calls_that_are_refused() -> None:
    attention, x = one_layer()
    masks = create_varlen_metadata_for_document(torch.tensor([[0, 1, 2, 0, 1, 2]]))
    with pytest.raises(UsageError, match="does not know its ranks"):
        attention(x, x, x, attention_masks=masks)
    st.bind(attention, None)
    assert attention(x, x, x, attention_masks=masks).shape == x.shape
    with pytest.raises(UsageError, match="out_transform"):
        attention(x, x, x, attention_masks=masks, out_transform=lambda out, lse: out)
    with pytest.raises(UsageError, match="score_mod"):
        attention(x, x, x, attention_masks=masks, score_mod=lambda *_: 0)
    with pytest.raises(UsageError, match=r"NoneType.*positions"):
        attention(x, x, x)
    with pytest.raises(UsageError, match=r"\[2, 6\] for 6 tokens"):
        attention(x, x, x, attention_masks=VarlenMetadata(torch.tensor([2, 6]), torch.tensor([2, 6]), 4, 4))
    with pytest.raises(UsageError, match="no balanced attention"):
        st.bind(torch.nn.Linear(2, 2), None)


def test_tensors_changed_in_place_are_noticed() -> None:
    attention, x = one_layer()
    st.bind(attention, None)
    masks = create_varlen_metadata_for_document(torch.tensor([[0, 1, 2, 0, 1, 2]]))
    attention(x, x, x, attention_masks=masks)
    masks.cu_seq_q[1] = 2
    with pytest.raises(UsageError, match="changed in place"):
        attention(x, x, x, attention_masks=masks)


def test_without_torchtitan_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.models.common.attention", None)
    spec = importlib.util.find_spec("steelyard.integrations.torchtitan")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"pip install 'steelyard\[torchtitan\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_flex_is_replaced_with_all_earlier_keys() -> None:
    config = st.balance(with_inner(FlexAttention.Config())).model
    assert config.layers[0].attention.inner_attention.window_size == (-1, 0)


def trained(folder: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What every rank found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    run = [str(Path(__file__).parent / "torchtitan_trainer_run.py"), str(folder), *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *run],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize(
    ("spmd_backend", "ranks", "tensor"),
    [
        ("partial_dtensor", 4, 2),
        ("partial_dtensor", 2, 1),
        ("full_dtensor", 2, 1),
        ("full_dtensor", 4, 2),
    ],
)
@pytest.mark.nightly  # half a minute and more each; `test_as_the_trainer_does_it_under_fsdp` is in the ordinary run
def test_torchtitan_s_own_trainer(tmp_path: Path, spmd_backend: str, ranks: int, tensor: int) -> None:
    """Its data loader, FSDP2, tensor parallelism, checkpointing, loss and optimizer: the same as with nothing moved."""
    write_assets(tmp_path)
    # With "full_dtensor" torchtitan keeps a mesh that a second trainer in the process cannot use.
    together = [["balanced", "packed"]] if spmd_backend == "partial_dtensor" else [["balanced"], ["packed"]]
    parts = [trained(tmp_path, ranks, spmd_backend, str(tensor), *policies) for policies in together]
    results = [
        {policy: found for part in of_rank for policy, found in part.items()} for of_rank in zip(*parts, strict=True)
    ]
    assert len(results) == ranks
    for result in results:
        balanced, packed = result["balanced"], result["packed"]
        np.testing.assert_allclose(balanced["logged"], packed["logged"], rtol=2e-6)
        assert len(balanced["logged"]) == 3 and np.isfinite(balanced["logged"]).all()
        assert [home for home, _ in balanced["work"]] == [home for home, _ in packed["work"]]
        assert all(server == home for home, server in packed["work"])
        assert any(max(server) < max(home) for home, server in balanced["work"]), "something must move"
