"""The fast CPU back end under a sliding window and a soft cap; and sinks after any back end."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import test_backends as dense
import test_blocks as pairs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.attention import build_backend, core_attention_reference, packed_tasks
from steelyard.attention import sink as sink_module
from steelyard.attention.blocks import Cut, blocks, joined, short_squares
from steelyard.attention.cpu import CpuBackend, Limits
from steelyard.attention.sink import add_sink, query_runs, sink_gradient_of
from steelyard.domain.plan import KernelTasks

FUNCTIONS: list[dict[str, float]] = [
    {"window": 2}, {"window": 5}, {"window": 17}, {"window": 64}, {"window": 1000}, {"softcap": 1.5}, {"softcap": 60.0},
    {"window": 9, "softcap": 2.0},
]  # fmt: skip
SMALL = {**dict.fromkeys(("forward", "backward"), Limits(24, 60, 30, 20, 24)), "strip": 8}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["adjacent", "alternate", "lone"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("heads", [2, 6])
def test_equals_dense_attention(heads: int, function: dict[str, float], form: str, dtype: torch.dtype) -> None:
    inputs = dense.make_inputs(sum(dense.DOCS), heads, 2, dtype)
    want = dense.expected(inputs, dense.DOCS, **function)
    for scale, options in ((0.25, SMALL), (0.25, {})):
        got = dense.actual_sum(inputs, dense.cut(dense.DOCS, 20, form), CpuBackend(scale=scale, **function, **options))
        dense.assert_close(got, want, dtype)


@pytest.mark.parametrize("function", [{"window": 150}, {"window": 700}, {"softcap": 3.0}])
@pytest.mark.parametrize("scale", [0.25, 8.0])
def test_long_documents_in_whole_strips(function: dict[str, float], scale: float) -> None:
    """Whole documents, of many strips; at the larger scale scores leave the bound without which maxima are needed."""
    docs = [1300, 129, 601]
    inputs = dense.make_inputs(sum(docs), 4, 2, torch.float64)
    backend = build_backend(
        "cpu", head_dim=16, heads=4, kv_heads=2, device="cpu", dtype=torch.float64, scale=scale, **function
    )  # type: ignore[arg-type]
    assert backend.name == "cpu"
    dense.assert_close(
        dense.actual(inputs, docs, backend), dense.expected(inputs, docs, scale=scale, **function), torch.float64
    )


def trimmed(tasks: KernelTasks, window: int) -> KernelTasks:
    """The table of the same tasks without the keys that none of their queries sees, as a plan with a window has it."""
    columns: dict[str, list[int]] = {name: [] for name in KernelTasks.__dataclass_fields__}
    columns["segment_offset"].append(0)
    for task in range(len(tasks)):
        low = max(0, int(tasks.q_position[task]) - window + 1)
        for name in ("q_store", "q_row", "q_length", "q_position"):
            columns[name].append(int(getattr(tasks, name)[task]))
        for s in range(int(tasks.segment_offset[task]), int(tasks.segment_offset[task + 1])):
            position, length = int(tasks.segment_position[s]), int(tasks.segment_length[s])
            cut = max(0, low - position)
            if cut < length:
                columns["segment_store"].append(int(tasks.segment_store[s]))
                columns["segment_row"].append(int(tasks.segment_row[s]) + cut)
                columns["segment_length"].append(length - cut)
                columns["segment_position"].append(position + cut)
        columns["segment_offset"].append(len(columns["segment_row"]))
    return KernelTasks(**{name: dense.np.array(values, dtype=dense.np.int64) for name, values in columns.items()})


@settings(max_examples=80)
@given(
    case=dense.scattered_documents(),
    group=st.sampled_from([1, 2, 4]),
    small=st.booleans(),
    scale=st.sampled_from([0.25, 8.0]),
    window=st.integers(1, 45),
    softcap=st.sampled_from([None, 2.0, 50.0]),
    cut=st.booleans(),
)
def test_random_tables_over_two_stores(
    case: tuple[list[int], dense.Scattered],
    group: int,
    small: bool,
    scale: float,
    window: int,
    softcap: float | None,
    cut: bool,
) -> None:
    docs, view = case
    inputs = dense.make_inputs(sum(docs), 2 * group, 2, torch.float64)
    want = dense.expected(inputs, docs, scale=scale, window=window, softcap=softcap)
    if cut:
        view = dense.Scattered(trimmed(view.tasks, window), view.store_of_row, view.row_in_store)
    options = {**dict.fromkeys(("forward", "backward"), Limits(12, 30, 24, 16, 12)), "strip": 5} if small else {}
    backend = CpuBackend(scale=scale, window=window, softcap=softcap, **options)  # type: ignore[arg-type]
    dense.assert_close(dense.run_scattered(inputs, view, backend), want, torch.float64)


def within(window: int, tasks: KernelTasks) -> Counter[pairs.Pair]:
    """What the table's definition says of pairs under a window."""
    seen: Counter[pairs.Pair] = Counter()
    for task in range(len(tasks)):
        keys, length = pairs.keys_of(tasks, task), int(tasks.q_length[task])
        for i in range(length):
            query = (int(tasks.q_store[task]), int(tasks.q_row[task]) + i)
            seen.update((query, key) for key in keys[: len(keys) - length + 1 + i][-window:])
    return seen


@given(
    tasks=pairs.tables(),
    window=st.integers(1, 70),
    limit=st.integers(1, 40),
    gather=st.integers(1, 90),
    strip=st.integers(1, 20),
    fused=st.integers(0, 25),
)
def test_every_pair_once_and_none_outside(
    tasks: KernelTasks, window: int, limit: int, gather: int, strip: int, fused: int
) -> None:
    work = joined(tasks)
    alone, squares = short_squares(work, strip)
    found: Counter[pairs.Pair] = Counter()
    for square in squares:
        for q_row, k_row in zip(square.q_row.tolist(), square.k_row.tolist(), strict=True):
            found.update(
                ((square.q_store, q_row + i), (square.k_store, k_row + j))
                for i in range(square.length)
                for j in range(max(0, i - window + 1), i + 1)
            )
    computed = 0
    for block in blocks(work, alone, limit, gather):
        for piece in block.pieces(Cut(strip, fused, 10_000, window)):
            queries = pairs.queries_of(block)[piece.rows]
            keys = [(run.store, row) for run in piece.keys for row in range(run.rows.start, run.rows.stop)]
            for i, query in enumerate(queries):
                seen = keys[: len(keys) - len(queries) + 1 + i] if piece.causal else keys
                if piece.edge is not None:
                    assert piece.fresh and piece.edge.stop == len(queries)
                    seen = seen[max(0, i - piece.edge.start) :]
                    computed += len(keys)
                found.update((query, key) for key in seen)
            if piece.edge is not None:
                assert len(keys) < window + len(queries), "keys that no query of the strip sees are left out"
    assert found == within(window, tasks)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("function", [{}, {"window": 9}, {"softcap": 2.0}])
@pytest.mark.parametrize("range_length", [None, 7])
def test_sinks_after_any_back_end(
    backend: str, function: dict[str, float], range_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "_WIDE_ELEMENTS", 200)  # 3 rows at a time
    docs = [40, 1, 0, 23]
    inputs = dense.make_inputs(sum(docs), 4, 2, torch.float64)
    sink = torch.linspace(-2, 3, 4, dtype=torch.float64).requires_grad_()
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    want = core_attention_reference(q, k, v, docs, sink=sink, **function)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(want, (q, k, v, sink), inputs.dout)
    tasks = packed_tasks(docs, range_length=range_length)
    engine = dense.build(backend, inputs, **function)

    def pair(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.detach(), x[:0].detach()]

    out, lse, dq = torch.empty_like(q), torch.empty(64, 4, dtype=torch.float64), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    engine.forward(tasks, pair(q), pair(k), pair(v), pair(out), pair(lse))
    runs = query_runs(tasks)
    add_sink(sink.detach(), runs, pair(out), pair(lse))
    torch.testing.assert_close(out.detach(), want.detach(), rtol=0, atol=1e-12)
    engine.backward(
        tasks, pair(inputs.dout), pair(q), pair(k), pair(v), pair(out), pair(lse), pair(dq), pair(dk), pair(dv)
    )
    dsink = sink_gradient_of(sink.detach(), runs, pair(inputs.dout), pair(out), pair(lse))
    for got, expected in zip((dq, dk, dv, dsink), gradients, strict=True):
        torch.testing.assert_close(got.detach(), expected, rtol=0, atol=1e-11)


@given(tasks=pairs.tables())
def test_query_runs_are_every_query_once_and_as_few_as_can_be(tasks: KernelTasks) -> None:
    rows = [(store, row) for store, run in query_runs(tasks) for row in range(run.start, run.stop)]
    assert sorted(rows) == sorted(
        (int(tasks.q_store[t]), int(tasks.q_row[t]) + i) for t in range(len(tasks)) for i in range(tasks.q_length[t])
    )
    runs = query_runs(tasks)
    assert all(a[0] != b[0] or a[1].stop != b[1].start for a, b in pairwise(runs))
