"""Core attention on one CPU thread: what does it cost to cut a document into tasks?

    python benchmarks/attention.py [--json] [--rounds 5] [--tokens 8192]

Rates are useful GFLOP/s of processor time: 4 · head_dim · heads · pairs forward and 2.5 times as many backward, pairs
being the causal (query, key) pairs; what an implementation computes above the diagonal does not count. All variants run
in turn in each round, so that a slow moment of the machine hits them alike; the best round counts.

A document is cut into ranges of n queries in three ways: "adjacent", all of them one behind another in one table;
"alternate", every other one in one table with its queries, the rest in a second one, computed in turn: what two
servers would get that share the document evenly; and "lone", all in one table, in an order in which no range sees the
keys of the one before it, so that each is computed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from steelyard.attention import build_backend, local_attention, packed_tasks, selected_tasks
from steelyard.domain.plan import KernelTasks

MATMUL_SIZE = 2048
SHORT_DOC = 512
RANGES = (2048, 512, 128)
BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Rate:
    """Best rate of one variant over the rounds."""

    shape: Shape
    variant: str
    forward_gflops: float
    backward_gflops: float


@dataclass(frozen=True)
class Part:
    """What one server computes: `run` maps its queries and all keys and values to the output, under autograd.

    rows: the queries it is sent; None: all of them.
    """

    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Variant:
    """A way to compute core attention of `doc_lengths`, in one or several parts that are timed together."""

    name: str
    doc_lengths: Sequence[int]
    parts: Sequence[Part]


def variants_of(shape: Shape, tokens: int, dtype: torch.dtype) -> list[Variant]:
    backend = build_backend("cpu", **asdict(shape), device="cpu", dtype=dtype)

    def by_us(tasks: KernelTasks, rows: torch.Tensor | None = None) -> Part:
        return Part(lambda q, k, v: local_attention(q, k, v, tasks, backend), rows)

    def ours(name: str, doc_lengths: Sequence[int], *parts: Part) -> Variant:
        return Variant(name, doc_lengths, parts)

    def torchs(name: str, doc_lengths: Sequence[int]) -> Variant:
        return Variant(name, doc_lengths, [Part(lambda q, k, v: torch_attention(q, k, v, doc_lengths))])

    one, many = [tokens], [SHORT_DOC] * (tokens // SHORT_DOC)
    variants = [torchs("torch whole", one), ours("whole", one, by_us(packed_tasks(one)))]
    for length in RANGES:
        if length < tokens:
            cut = packed_tasks(one, range_length=length)
            index = np.arange(len(cut))
            variants += [
                ours(f"adjacent {length}", one, by_us(cut)),
                ours(f"alternate {length}", one, *(by_us(*server(cut, index[first::2])) for first in (0, 1))),
                ours(f"lone {length}", one, by_us(selected_tasks(cut, index[::-1]))),
            ]
    return [
        *variants,
        torchs(f"torch docs {SHORT_DOC}", many),
        ours(f"docs {SHORT_DOC}", many, by_us(packed_tasks(many))),
    ]


def server(tasks: KernelTasks, chosen: npt.NDArray[np.int64]) -> tuple[KernelTasks, torch.Tensor]:
    """The chosen tasks of a table, with their queries one behind another, and which rows these were."""
    mine = selected_tasks(tasks, chosen)
    rows = [np.arange(row, row + length) for row, length in zip(mine.q_row, mine.q_length, strict=True)]
    first = np.cumsum(mine.q_length) - mine.q_length
    return replace(mine, q_row=first), torch.from_numpy(np.concatenate(rows))


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc_lengths: Sequence[int]) -> torch.Tensor:
    """torch's own causal attention, document by document; (tokens, heads, head_dim)."""
    outs = []
    for parts in zip(*(torch.split(x, list(doc_lengths)) for x in (q, k, v)), strict=True):
        q_, k_, v_ = (x.transpose(0, 1)[None] for x in parts)
        grouped = q.shape[1] != k.shape[1]
        out = functional.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=grouped)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(shape: Shape, tokens: int, rounds: int, dtype: torch.dtype) -> list[Rate]:
    torch.manual_seed(0)
    q = torch.randn(tokens, shape.heads, shape.head_dim, dtype=dtype).requires_grad_()
    key_value = torch.randn(tokens, 2, shape.kv_heads, shape.head_dim, dtype=dtype)
    k, v = (key_value[:, i].requires_grad_() for i in (0, 1))
    dout = torch.randn_like(q)
    square = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)
    variants = variants_of(shape, tokens, dtype)
    best: dict[str, tuple[float, float]] = {}
    matmul_s = float("inf")
    for _ in range(rounds + 1):  # the first round warms up: it counts like the others, being never the best
        matmul_s = min(matmul_s, cpu_seconds(lambda: square @ square))
        for variant in variants:
            forward_s = backward_s = 0.0
            for part in variant.parts:
                mine, dmine = q, dout
                if part.rows is not None:  # sent before the server begins
                    mine, dmine = q.detach()[part.rows].requires_grad_(), dout[part.rows]
                start = time.process_time()
                out = part.run(mine, k, v)
                forward_s += time.process_time() - start
                start = time.process_time()
                torch.autograd.grad(out, (mine, k, v), dmine)
                backward_s += time.process_time() - start
            before = best.get(variant.name, (float("inf"), float("inf")))
            best[variant.name] = (min(before[0], forward_s), min(before[1], backward_s))
    matmul_gflops = 2 * MATMUL_SIZE**3 / matmul_s / 1e9
    rates = [Rate(shape, f"matmul {MATMUL_SIZE}", matmul_gflops, matmul_gflops)]
    for variant in variants:
        pairs = sum(n * (n + 1) // 2 for n in variant.doc_lengths)
        gflop = 4 * shape.head_dim * shape.heads * pairs / 1e9
        forward_s, backward_s = best[variant.name]
        rates.append(Rate(shape, variant.name, gflop / forward_s, BACKWARD_FLOPS * gflop / backward_s))
    return rates


def table(rates: list[Rate]) -> str:
    """Markdown: rates, and each rate over the whole document's and over torch's on the same documents."""
    by_name = {rate.variant: rate for rate in rates}
    shape, whole = rates[0].shape, by_name["whole"]
    lines = [
        f"heads {shape.heads}, kv_heads {shape.kv_heads}, head_dim {shape.head_dim}",
        "",
        "| variant | forward GFLOP/s | ÷ whole | ÷ torch | backward GFLOP/s | ÷ whole | ÷ torch |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for rate in rates:
        peer = by_name["torch whole" if "docs" not in rate.variant else f"torch docs {SHORT_DOC}"]
        cells = [rate.variant]
        for own, of_whole, of_peer in (
            (rate.forward_gflops, whole.forward_gflops, peer.forward_gflops),
            (rate.backward_gflops, whole.backward_gflops, peer.backward_gflops),
        ):
            cells += [f"{own:.1f}", f"{own / of_whole:.2f}", f"{own / of_peer:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict[str, object]:
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):  # noqa: PTH110 - a device file, not a path of ours
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {"processor": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="HEADS/KV_HEADS/HEAD_DIM",
        help="may be given several times; default 8/2/64 and 4/4/64",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [Shape(*(int(n) for n in text.split("/"))) for text in options.shape or ("8/2/64", "4/4/64")]
    load = machine()
    measured = [measure(shape, options.tokens, options.rounds, getattr(torch, options.dtype)) for shape in shapes]
    if options.json:
        record = {"machine": load, "tokens": options.tokens, "dtype": options.dtype}
        print(json.dumps({**record, "rates": [asdict(rate) for rates in measured for rate in rates]}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in load.items()), f"| {options.tokens} tokens, {options.dtype}")
    for rates in measured:
        print()
        print(table(rates))


if __name__ == "__main__":
    main()
