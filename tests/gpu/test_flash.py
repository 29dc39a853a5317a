"""The kernels themselves, where there is a GPU: the `flash` back end with every package that is installed."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from steelyard.attention import build_backend, core_attention_reference, local_attention, packed_tasks, selected_tasks
from steelyard.attention.flash import FlashBackend
from steelyard.attention.flash_kernels import Flash2, Flash3, Flash4, TorchVarlen, candidates_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels of `flash` cannot run here"),
]

DOCS = [700, 1, 130, 0, 2050]
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
PACKAGES = (Flash2, Flash3, Flash4, TorchVarlen)


def kernels_of(package: type[Flash2 | Flash3 | Flash4 | TorchVarlen]) -> Flash2 | Flash3 | Flash4 | TorchVarlen:
    capability = torch.cuda.get_device_capability()
    if package not in candidates_for(capability):
        pytest.skip(f"{package.name} has no kernels for compute capability {capability}")
    try:
        return package(importlib.import_module)
    except ImportError as error:
        pytest.skip(f"{package.name} is not installed: {error}")


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(sum(DOCS), heads, HEAD_DIM, generator=generator).to("cuda", dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.double() - want).abs().max() / want.abs().max().clamp_min(1.0))
    assert torch.isfinite(got).all() and error < 3e-2, f"relative error {error:.1e}"


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("package", PACKAGES)
def test_equals_dense_attention(package: type[Flash2], dtype: torch.dtype, window: int | None) -> None:
    """Whole documents, and documents cut into every other range in each of two tables, whose keys are copied."""
    backend = FlashBackend(kernels_of(package), scale=HEAD_DIM**-0.5, window=window)
    q, k, v, dout = inputs(dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = core_attention_reference(*wide, DOCS, window=window)
    gradients = torch.autograd.grad(want, wide, dout.double())
    ranges = packed_tasks(DOCS, range_length=128)
    index = np.arange(len(ranges))
    tables = [[packed_tasks(DOCS)], [selected_tasks(ranges, index[first::2]) for first in (0, 1)]]
    for table in tables:
        outs = [local_attention(q, k, v, tasks, backend) for tasks in table]
        out = torch.stack(outs).sum(0)
        assert_close(out, want)
        for got, expected in zip(torch.autograd.grad(out, (q, k, v), dout), gradients, strict=True):
            assert_close(got, expected)


@pytest.mark.parametrize("package", PACKAGES)
def test_log_sum_exp_is_natural(package: type[Flash2]) -> None:
    backend = FlashBackend(kernels_of(package), scale=0.1)
    q, k, v, _ = (x.detach() for x in inputs(torch.bfloat16))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    stores = [(x, x[:0]) for x in (q, k, v, out, lse)]
    backend.forward(packed_tasks(DOCS), *stores)
    length = DOCS[0]
    keys = k[:length].repeat_interleave(HEADS // KV_HEADS, dim=1).float()
    score = torch.einsum("thd,shd->hts", q[:length].float(), keys) * 0.1
    score = score.masked_fill(torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    torch.testing.assert_close(lse[:length], score.logsumexp(-1).T, rtol=0, atol=2e-2)


def test_deterministic_algorithms_repeat_bit_for_bit() -> None:
    backend = build_backend(
        "flash", head_dim=HEAD_DIM, heads=HEADS, kv_heads=KV_HEADS, device="cuda", dtype=torch.bfloat16
    )
    q, k, v, dout = inputs(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(local_attention(q, k, v, DOCS, backend), (q, k, v), dout) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
