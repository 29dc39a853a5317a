"""Back ends against autograd through one dense mask: outputs, log-sum-exp and all three gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.attention import (
    Backend,
    accumulator_dtype,
    build_backend,
    core_attention_reference,
    local_attention,
    packed_tasks,
    selected_tasks,
)
from steelyard.attention.cpu import CpuBackend, Limits
from steelyard.attention.reference import ReferenceBackend
from steelyard.domain.plan import KernelTasks

HEAD_DIM = 16
DOCS = [7, 1, 13, 4, 0, 150]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
SMALL_BLOCKS = {"forward": Limits(24, 60, 768, 768, 768), "backward": Limits(20, 48, 768, 768, 768), "strip": 8}


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    kv: torch.Tensor
    dout: torch.Tensor

    @property
    def k(self) -> torch.Tensor:
        return self.kv[:, 0]

    @property
    def v(self) -> torch.Tensor:
        return self.kv[:, 1]


def make_inputs(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(
        draw(tokens, heads, HEAD_DIM).requires_grad_(),
        draw(tokens, 2, kv_heads, HEAD_DIM).requires_grad_(),
        draw(tokens, heads, HEAD_DIM),
    )


def build(name: str, inputs: Inputs, **options: object) -> Backend:
    return build_backend(
        name,
        head_dim=HEAD_DIM,
        heads=inputs.q.shape[1],
        kv_heads=inputs.kv.shape[2],
        device="cpu",
        dtype=inputs.q.dtype,
        **options,  # type: ignore[arg-type]
    )


def expected(inputs: Inputs, docs: Sequence[int], **options: object) -> list[torch.Tensor]:
    """Output, dq and dkv in fp64."""
    q, kv = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.kv))
    out = core_attention_reference(q, kv[:, 0], kv[:, 1], docs, **options)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, (q, kv), inputs.dout.double())]


def actual(inputs: Inputs, documents: Sequence[int] | KernelTasks, backend: Backend) -> list[torch.Tensor]:
    out = local_attention(inputs.q, inputs.k, inputs.v, documents, backend)
    return [out.detach(), *torch.autograd.grad(out, (inputs.q, inputs.kv), inputs.dout)]


def cut(docs: Sequence[int], length: int, form: str) -> list[KernelTasks]:
    """Documents cut into ranges of `length` queries: tables whose results add up to the whole's.

    "adjacent": one table. "alternate": every other range in each of two. "lone": in an order in which none follows the
    one before it.
    """
    every = packed_tasks(docs, range_length=length)
    index = np.arange(len(every))
    if form == "alternate":
        return [selected_tasks(every, index[first::2]) for first in (0, 1)]
    return [every if form == "adjacent" else selected_tasks(every, index[::-1])]


def actual_sum(inputs: Inputs, tables: Sequence[KernelTasks], backend: Backend) -> list[torch.Tensor]:
    parts = [actual(inputs, table, backend) for table in tables]
    return [torch.stack(same).sum(0) for same in zip(*parts, strict=True)]


def assert_close(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    for name, a, b in zip(("out", "dq", "dkv"), got, want, strict=True):
        assert torch.isfinite(a).all(), name
        error = float((a.double() - b).abs().max() / b.abs().max().clamp_min(1.0)) if b.numel() else 0.0
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("form", ["adjacent", "alternate", "lone"])
@pytest.mark.parametrize("range_length", [151, 64, 5])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_equals_dense_attention(
    name: str, range_length: int, form: str, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    inputs = make_inputs(sum(DOCS), heads, kv_heads, dtype)
    got = actual_sum(inputs, cut(DOCS, range_length, form), build(name, inputs))
    assert_close(got, expected(inputs, DOCS), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "gather"), [(2, 200), (2, 2048), (8, 2048)])
@pytest.mark.parametrize("scale", [0.25, 5.0])
def test_gathered_ranges_through_operator_and_tiles(scale: float, heads: int, gather: int, dtype: torch.dtype) -> None:
    docs = [1500, 30, 400]
    inputs = make_inputs(sum(docs), heads, 2, dtype)
    limits = Limits(block=512, gather=gather, operator=300, operator_near=200, square=300)
    backend = CpuBackend(scale=scale, forward=limits, backward=limits)
    got = actual_sum(inputs, cut(docs, 100, "alternate"), backend)
    assert_close(got, expected(inputs, docs, scale=scale), dtype)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 0.25), (torch.float64, 5.0), (torch.bfloat16, 0.25)])
def test_long_documents_through_every_path(heads: int, dtype: torch.dtype, scale: float) -> None:
    """Long enough for the operator before a block, and for its own squares where heads are not grouped."""
    docs = [1300, 129, 601]
    inputs = make_inputs(sum(docs), heads, 2, dtype)
    for rows in (600, 1100):
        limits = Limits(block=rows, gather=rows, operator=768, operator_near=400, square=1050 if heads == 2 else 2000)
        backend = CpuBackend(scale=scale, forward=limits, backward=limits)
        assert_close(actual(inputs, docs, backend), expected(inputs, docs, scale=scale), dtype)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("docs", [[], [0, 0], [1], [1, 1, 1], [0, 5, 0]])
def test_empty_and_tiny(name: str, docs: list[int]) -> None:
    inputs = make_inputs(sum(docs), 4, 2, torch.float32)
    assert_close(actual(inputs, docs, build(name, inputs)), expected(inputs, docs), torch.float32)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_no_tasks_touch_nothing(name: str) -> None:
    inputs = make_inputs(3, 4, 2, torch.float32)
    backend = build(name, inputs)
    out, lse = torch.full_like(inputs.q, 7.0), torch.full((3, 4), 7.0)
    none = inputs.q[:0].detach()
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    backend.forward(KernelTasks.empty(), (q, none), (k, k[:0]), (v, v[:0]), (out, none), (lse, lse[:0]))
    assert bool((out == 7).all()) and bool((lse == 7).all())


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_only_rows_of_tasks_are_written(name: str) -> None:
    """The middle document has no task: its rows of out, lse and dq stay, its keys' gradients are 0."""
    inputs = make_inputs(30, 4, 2, torch.float32)
    backend = build(name, inputs)
    tasks = selected_tasks(packed_tasks([10, 12, 8]), np.array([0, 2]))
    stores = {key: (value.detach(), value[:0].detach()) for key, value in (("q", inputs.q), ("k", inputs.k))}
    stores["v"] = (inputs.v.detach(), inputs.v[:0].detach())
    out, lse, dq = torch.full_like(inputs.q, 7.0), torch.full((30, 4), 7.0), torch.full_like(inputs.q, 7.0)
    dk, dv = torch.zeros(30, 2, HEAD_DIM), torch.zeros(30, 2, HEAD_DIM)
    pair = lambda x: (x.detach(), x[:0].detach())  # noqa: E731
    backend.forward(tasks, stores["q"], stores["k"], stores["v"], pair(out), pair(lse))
    backend.backward(tasks, pair(inputs.dout), *stores.values(), pair(out), pair(lse), pair(dq), pair(dk), pair(dv))
    for written in (out, lse, dq):
        assert bool((written[10:22] == 7).all()) and not bool((written[:10] == 7).any())
    assert not dk[10:22].any() and not dv[10:22].any() and dk[:10].any() and dv[22:].any()


def test_log_sum_exp_is_natural() -> None:
    inputs = make_inputs(40, 4, 2, torch.float32)
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    for name in ("reference", "cpu"):
        for range_length in (None, 9):
            out, lse = torch.empty_like(q), torch.empty(40, 4)
            tasks = packed_tasks([40], range_length=range_length)
            build(name, inputs).forward(tasks, (q, q[:0]), (k, k[:0]), (v, v[:0]), (out, out[:0]), (lse, lse[:0]))
            score = torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, dim=1)) * HEAD_DIM**-0.5
            score = score.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
            torch.testing.assert_close(lse, score.logsumexp(-1).T, rtol=0, atol=2e-6)


@dataclass(frozen=True)
class Scattered:
    """One process's view of packed documents whose rows are spread over the two stores."""

    tasks: KernelTasks
    store_of_row: np.ndarray
    row_in_store: np.ndarray


def scatter(docs: Sequence[int], cuts: Sequence[Sequence[int]], stores: Sequence[Sequence[int]]) -> Scattered:
    """Shards [cut, next cut) of each document, each with a store for its rows; one task per shard."""
    store_of_row, row_in_store, used = [], [], [0, 0]
    columns: dict[str, list[int]] = {name: [] for name in KernelTasks.__dataclass_fields__}
    columns["segment_offset"].append(0)
    for length, doc_cuts, doc_stores in zip(docs, cuts, stores, strict=True):
        seen: list[tuple[int, int, int, int]] = []
        borders = [0, *doc_cuts, length]
        for start, end, store in zip(borders[:-1], borders[1:], doc_stores, strict=True):
            row = used[store]
            used[store] += end - start
            store_of_row += [store] * (end - start)
            row_in_store += range(row, row + end - start)
            if seen and seen[-1][0] == store and seen[-1][1] + seen[-1][2] == row:
                seen[-1] = (store, seen[-1][1], seen[-1][2] + end - start, seen[-1][3])
            else:
                seen.append((store, row, end - start, start))
            for name, value in (("q_store", store), ("q_row", row), ("q_length", end - start), ("q_position", start)):
                columns[name].append(value)
            for segment in seen:
                for name, value in zip(("store", "row", "length", "position"), segment, strict=True):
                    columns[f"segment_{name}"].append(value)
            columns["segment_offset"].append(len(columns["segment_row"]))
    table = KernelTasks(**{name: np.array(values, dtype=np.int64) for name, values in columns.items()})
    return Scattered(table, np.array(store_of_row, dtype=np.int64), np.array(row_in_store, dtype=np.int64))


def run_scattered(inputs: Inputs, view: Scattered, backend: Backend) -> list[torch.Tensor]:
    """Forward and backward over two stores; results gathered back into the packed order."""

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (x.detach()[torch.from_numpy(view.store_of_row == store)].clone() for store in (0, 1))
        return first, second

    def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = [parts[s][r] for s, r in zip(view.store_of_row.tolist(), view.row_in_store.tolist(), strict=True)]
        return torch.stack(rows) if rows else parts[0][:0]

    wide = accumulator_dtype(inputs.q.dtype)
    q, kv, dout = split(inputs.q), split(inputs.kv), split(inputs.dout)
    k, v = [x[:, 0] for x in kv], [x[:, 1] for x in kv]
    out, dq = [torch.empty_like(x) for x in q], [torch.empty_like(x) for x in q]
    lse = [torch.empty(x.shape[:2], dtype=wide) for x in q]
    dkv = [torch.zeros(x.shape, dtype=wide) for x in kv]
    backend.forward(view.tasks, q, k, v, out, lse)
    backend.backward(view.tasks, dout, q, k, v, out, lse, dq, [x[:, 0] for x in dkv], [x[:, 1] for x in dkv])
    return [joined(out), joined(dq), joined(dkv)]


@st.composite
def scattered_documents(draw: st.DrawFn) -> tuple[list[int], Scattered]:
    docs = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    cuts = [sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else [] for length in docs]
    stores = [draw(st.lists(st.integers(0, 1), min_size=len(c) + 1, max_size=len(c) + 1)) for c in cuts]
    return docs, scatter(docs, cuts, stores)


@settings(max_examples=60)
@given(
    case=scattered_documents(),
    group=st.sampled_from([1, 2, 4]),
    small=st.booleans(),
    scale=st.sampled_from([0.25, 5.0]),
)
def test_random_tables_over_two_stores(
    case: tuple[list[int], Scattered], group: int, small: bool, scale: float
) -> None:
    """The larger scale leads scores beyond the bound under which `tiles` leaves out the running maximum."""
    docs, view = case
    inputs = make_inputs(sum(docs), 2 * group, 2, torch.float64)
    want = expected(inputs, docs, scale=scale)
    options = dict.fromkeys(("forward", "backward"), Limits(12, 30, 24, 16, 12)) | {"strip": 8} if small else {}
    backends: list[Backend] = [build("reference", inputs, scale=scale), CpuBackend(scale=scale, **options)]
    for backend in backends:
        assert_close(run_scattered(inputs, view, backend), want, torch.float64)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("first_store", [0, 1])
@pytest.mark.parametrize("cut", [3, 100, 560])
def test_large_square_after_few_and_many_keys(heads: int, first_store: int, cut: int) -> None:
    """Every combination of who computes the keys before a block and who its square."""
    docs = [cut + 1100]
    inputs = make_inputs(sum(docs), heads, 2, torch.float64)
    view = scatter(docs, [[cut]], [[first_store, 0]])
    assert_close(run_scattered(inputs, view, CpuBackend(scale=0.25)), expected(inputs, docs), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_are_bit_identical(dtype: torch.dtype) -> None:
    docs = [300, 3, 3, 1, 40, 3]
    inputs = make_inputs(sum(docs), 8, 2, dtype)
    backend = CpuBackend(scale=0.25, **SMALL_BLOCKS)
    for form in ("adjacent", "alternate"):
        first, second = (actual_sum(inputs, cut(docs, 37, form), backend) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "options",
    [{"window": 4}, {"window": 1}, {"softcap": 1.5}, {"sink": True}, {"window": 5, "softcap": 2.0, "sink": True}],
)
@pytest.mark.parametrize("range_length", [None, 3])
def test_stricter_masks(options: dict[str, object], range_length: int | None) -> None:
    docs = [6, 6, 1, 20]
    inputs = make_inputs(sum(docs), 4, 2, torch.float64)
    if options.get("sink"):
        options = {**options, "sink": torch.linspace(-1, 1, 4, dtype=torch.float64)}
    backend = ReferenceBackend(scale=HEAD_DIM**-0.5, **options)  # type: ignore[arg-type]
    got = actual(inputs, packed_tasks(docs, range_length=range_length), backend)
    assert_close(got, expected(inputs, docs, **options), torch.float64)


def test_window_of_the_case_table() -> None:
    """Window 4, documents [6, 6]: keys per query, and the first token of the second document sees only itself."""
    inputs = make_inputs(12, 1, 1, torch.float64)
    uniform = Inputs(torch.zeros_like(inputs.q), inputs.kv, inputs.dout)
    backend = build("reference", inputs, window=4)
    out = local_attention(uniform.q, uniform.k, uniform.v, [6, 6], backend)
    counts = [1, 2, 3, 4, 4, 4] * 2
    for row, count in enumerate(counts):
        torch.testing.assert_close(out[row], uniform.v[row - count + 1 : row + 1].mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out[6], uniform.v[6])


def test_sink_gradient_reaches_the_sink() -> None:
    docs = [9, 4]
    inputs = make_inputs(13, 4, 2, torch.float64)
    sinks = [torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_() for _ in range(2)]
    want = core_attention_reference(inputs.q, inputs.k, inputs.v, docs, sink=sinks[0])
    backend = ReferenceBackend(scale=HEAD_DIM**-0.5, sink=sinks[1])
    got = local_attention(inputs.q, inputs.k, inputs.v, docs, backend)
    for out, sink in ((want, sinks[0]), (got, sinks[1])):
        (sink.grad,) = torch.autograd.grad(out, sink, inputs.dout)
    torch.testing.assert_close(sinks[1].grad, sinks[0].grad, rtol=1e-12, atol=1e-12)


def test_scale_is_honoured() -> None:
    inputs = make_inputs(70, 4, 2, torch.float32)
    want = expected(inputs, [70], scale=0.4)
    for name in ("reference", "cpu"):
        assert_close(actual(inputs, [70], build(name, inputs, scale=0.4)), want, torch.float32)


def test_scores_far_apart_stay_finite() -> None:
    """One key dominates by hundreds: weights underflow to 0, nothing overflows."""
    inputs = make_inputs(300, 4, 2, torch.float32)
    large = Inputs((inputs.q * 40).detach().requires_grad_(), inputs.kv, inputs.dout)
    for group_of in (build("reference", large), build("cpu", large), CpuBackend(scale=0.25, **SMALL_BLOCKS)):
        got = actual(large, [300], group_of)
        want = expected(large, [300])
        assert all(torch.isfinite(x).all() for x in got)
        torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=2e-4)
