"""Grouped heads share K and V: no buffer may hold them once per query head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from steelyard.attention import build_backend, packed_tasks, selected_tasks

ROWS, HEADS, KV_HEADS, HEAD_DIM = 4096, 16, 1, 32
KEY_BYTES = ROWS * KV_HEADS * HEAD_DIM * 4


def largest_allocation(work: object) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()  # type: ignore[operator]
    return max(event.self_cpu_memory_usage for event in record.events())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_allocation_holds_keys_once_per_query_head(dtype: torch.dtype) -> None:
    """One late range of a long document: its keys, 16 times, would be 8 MiB; all temporaries stay far below."""
    torch.manual_seed(0)
    tasks = packed_tasks([ROWS], range_length=128)
    late = selected_tasks(tasks, np.array([len(tasks) - 1]))
    q = torch.randn(ROWS, HEADS, HEAD_DIM).to(dtype)
    kv = torch.randn(ROWS, 2, KV_HEADS, HEAD_DIM).to(dtype)
    out, lse, dq, dkv = torch.empty_like(q), torch.empty(ROWS, HEADS), torch.empty_like(q), torch.zeros(kv.shape)
    backend = build_backend("cpu", head_dim=HEAD_DIM, heads=HEADS, kv_heads=KV_HEADS, device="cpu", dtype=dtype)

    def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x[:0]

    inputs = (pair(q), pair(kv[:, 0]), pair(kv[:, 1]), pair(out), pair(lse))
    forward = largest_allocation(lambda: backend.forward(late, *inputs))
    backward = largest_allocation(
        lambda: backend.backward(late, pair(q), *inputs, pair(dq), pair(dkv[:, 0]), pair(dkv[:, 1]))
    )
    multiplied = largest_allocation(lambda: kv[:, 0].repeat_interleave(HEADS, dim=1))
    assert multiplied >= 8 * KEY_BYTES, "the measure must see what it is to exclude"
    assert 0 < forward <= 2 * KEY_BYTES, f"{forward} bytes at once, K has {KEY_BYTES}"
    assert 0 < backward <= 2 * KEY_BYTES, f"{backward} bytes at once, K has {KEY_BYTES}"
