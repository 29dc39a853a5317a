"""benchmarks/frameworks.py: its all-gather variant computes packed attention, and its comparison sees what is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import steelyard.integrations.transformers as st
from steelyard.attention import build_backend, core_attention_reference
from steelyard.attention.local import local_attention

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DOCS = [4, 300, 8, 72, 128]
RANKS = 2


@pytest.fixture(scope="module")
def gather() -> Iterator[ModuleType]:
    yield from _module("frameworks_context_parallel")


@pytest.fixture(scope="module")
def on_rank() -> Iterator[ModuleType]:
    yield from _module("frameworks_ranks")


def _module(name: str) -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("kind", ["head_tail", "per_document", "ptrr"])
def test_gathered_tasks_compute_packed_attention(gather: ModuleType, kind: str) -> None:
    torch.manual_seed(0)
    tokens = sum(DOCS)
    q, k, v = (torch.randn(tokens, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    expected = core_attention_reference(q, k, v, DOCS)
    weight = torch.randn_like(expected)
    want = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    order = gather.order_of(gather.load_balancer(kind, DOCS, RANKS)).copy()
    assert sorted(order) == list(range(tokens))
    backend = build_backend("reference", head_dim=16, heads=4, kv_heads=2, device="cpu", dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for rank, rows in enumerate(np.split(order, RANKS)):
        tasks = gather.gathered_tasks(order, DOCS, rank, RANKS)
        out = local_attention(q[rows], k[order], v[order], tasks, backend)
        torch.testing.assert_close(out, expected[rows], rtol=0, atol=1e-12)
        loss = loss + (out * weight[rows]).sum()
    for got, gradient in zip(torch.autograd.grad(loss, (q, k, v)), want, strict=True):
        torch.testing.assert_close(got, gradient, rtol=0, atol=1e-12)


def test_block_mask_counts_what_torch_counts(gather: ModuleType) -> None:
    doc = torch.repeat_interleave(torch.arange(len(DOCS)), torch.tensor(DOCS))
    tokens = sum(DOCS)

    def causal_in_document(b: object, h: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (doc[query] == doc[key])

    whole = create_block_mask(causal_in_document, 1, 1, tokens, tokens, device="cpu", BLOCK_SIZE=gather.BLOCK)
    full = whole.full_kv_num_blocks
    count = whole.kv_num_blocks + (full if full is not None else 0)
    assert gather.block_mask(DOCS).kv_num_blocks.tolist() == count.tolist()


def test_the_comparison_sees_documents_that_see_each_other(on_rank: ModuleType) -> None:
    """The control: stock attention with a mask of ones, which silently joins the documents of a packed row."""
    batch = on_rank.make_batch([[64, 32, 160], [256]], 0)
    gradients = []
    for extra in ({}, {}, {"attention_mask": torch.ones_like(batch.own["input_ids"])}):
        model = on_rank.make_model(256)
        given = {name: batch.own[name] for name in ("input_ids", "position_ids", "labels", "shift_labels")}
        model(**given, **extra, use_cache=False, num_items_in_batch=st.label_count(batch.own)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    same, wrong = (on_rank.gradient_difference(other, gradients[0]) for other in gradients[1:])
    assert same <= on_rank.GRADIENT_TOLERANCE < wrong / 100


@pytest.mark.nightly
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "frameworks.py"), "--tokens", "1024", "--rounds", "2", "--json"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout)
    assert len(record["steps"]) == 2 * 3 * 7 and len(record["compared"]) == 3 * 7 and len(record["memory"]) == 3 * 5
    assert all(row["time_s"] > 0 and row["idle_share"] < 1 for row in record["steps"])
    assert done.stderr.index("predicted") < done.stderr.index("compared") < done.stderr.index("round 1")
    assert "tokens/s" in (tmp_path / "frameworks.md").read_text(encoding="utf-8")
    assert (tmp_path / "frameworks.png").stat().st_size > 10_000
