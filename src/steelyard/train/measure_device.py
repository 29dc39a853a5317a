"""Times of what a training step is made of, on this machine: input of `simulate.calibrate`.

All ranks measure at once, as they will compute at once: on a shared machine the second process is not free.
Best of several rounds, so that a slow moment of the machine does not become a constant.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.attention import build_backend, local_attention, packed_tasks
from steelyard.model.config import ModelConfig
from steelyard.model.layers import Block, Rotary
from steelyard.simulate.calibrate import AttentionSample, LayerSample, ProductSample, Samples, TransferSample
from steelyard.testing.pool import WorkerPool

PRODUCTS = ((1024, 1024, 1024), (2048, 256, 768), (2048, 256, 256), (2048, 768, 256), (4096, 512, 512), (512, 64, 256))
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
ATTENTION_TOKENS = 4096
TRANSFER_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
LAYERS = ((2048, 256, 768), (4096, 256, 768), (2048, 512, 1536))


def measure(ranks: int = 1, *, rounds: int = 5, timeout_s: float = 300.0) -> Samples:
    """Measure with `ranks` processes at once on CPU cores; with one, transfers are left out."""
    with WorkerPool(ranks) as pool:
        found: list[Samples] = pool.run(_measure_rank, ranks, rounds, timeout_s=timeout_s)
    return found[0] if ranks == 1 else _mean_over_ranks(found)


def _mean_over_ranks(found: list[Samples]) -> Samples:
    """Of every sample the mean over ranks counts."""

    def merged(kind: str) -> tuple[Any, ...]:
        columns = zip(*(getattr(s, kind) for s in found), strict=True)
        merged_samples = []
        for column in columns:
            times = {
                f.name: sum(getattr(c, f.name) for c in column) / len(column)
                for f in dataclasses.fields(column[0])
                if f.name.endswith("_s")
            }
            merged_samples.append(dataclasses.replace(column[0], **times))
        return tuple(merged_samples)

    return dataclasses.replace(
        found[0],
        copy_bytes_per_s=sum(s.copy_bytes_per_s for s in found) / len(found),
        products=merged("products"),
        attention=merged("attention"),
        layers=merged("layers"),
        transfers=merged("transfers"),
    )


def _measure_rank(rank: int, ranks: int, group: Any, rounds: int) -> Samples:
    """What one process measures; the others do the same at the same time."""
    torch.manual_seed(rank)
    together: Callable[[], object] = (lambda: dist.barrier(group)) if ranks > 1 else (lambda: None)

    def best_s(work: Callable[[], object]) -> float:
        work()
        times = []
        for _ in range(rounds):
            together()
            begin_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin_s)
        return min(times)

    return Samples(
        device=f"{os.cpu_count()} × {_processor()}",
        precision="fp32",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks,
        copy_bytes_per_s=_copy_rate(best_s),
        products=tuple(_product(best_s, *size) for size in PRODUCTS),
        attention=tuple(_attention(best_s, length, 8, 4, 32) for length in LENGTHS),
        layers=tuple(_layer(best_s, *size) for size in LAYERS),
        transfers=tuple(_transfer(best_s, ranks, size, group) for size in TRANSFER_BYTES) if ranks > 1 else (),
    )


BestOf = Callable[[Callable[[], object]], float]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else "CPU core"
    except OSError:
        return "CPU core"


def _copy_rate(best_s: BestOf) -> float:
    source = torch.randn(16 << 20)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / best_s(lambda: target.copy_(source))


def _product(best_s: BestOf, tokens: int, rows: int, columns: int) -> ProductSample:
    a, b = torch.randn(tokens, rows), torch.randn(rows, columns)
    return ProductSample(tokens, rows, columns, best_s(lambda: a @ b))


def _attention(best_s: BestOf, length: int, heads: int, kv_heads: int, head_dim: int) -> AttentionSample:
    count = ATTENTION_TOKENS // length
    tasks = packed_tasks([length] * count)
    backend = build_backend("cpu", head_dim=head_dim, heads=heads, kv_heads=kv_heads, device="cpu", dtype=torch.float32)
    q = torch.randn(ATTENTION_TOKENS, heads, head_dim, requires_grad=True)
    k, v = (torch.randn(ATTENTION_TOKENS, kv_heads, head_dim, requires_grad=True) for _ in range(2))
    forward_s = best_s(lambda: local_attention(q.detach(), k.detach(), v.detach(), tasks, backend))

    def both() -> None:
        out = local_attention(q, k, v, tasks, backend)
        torch.autograd.backward(out, torch.ones_like(out))

    return AttentionSample(length, count, heads, head_dim, forward_s, max(best_s(both) - forward_s, 1e-9))


def _layer(best_s: BestOf, tokens: int, hidden: int, ffn: int) -> LayerSample:
    config = ModelConfig(hidden_size=hidden, layers=1, heads=8, kv_heads=4, ffn_size=ffn, vocab_size=320)
    block, rotary = Block(config), Rotary(config)
    rope = rotary(torch.arange(tokens))
    x_TC = torch.randn(tokens, hidden)

    def forward() -> Tensor:
        with torch.no_grad():
            q, _, _ = block.before_attention(x_TC, rope)
            out: Tensor = block.after_attention(x_TC, q)
            return out

    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    products = ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden))
    return LayerSample(tokens, hidden, 4, products, best_s(forward))


def _transfer(best_s: BestOf, ranks: int, size_bytes: int, group: Any) -> TransferSample:
    count = size_bytes // 4
    sent = torch.randn(ranks * count)
    received = torch.empty_like(sent)
    return TransferSample(ranks, size_bytes, best_s(lambda: dist.all_to_all_single(received, sent, group=group)))
