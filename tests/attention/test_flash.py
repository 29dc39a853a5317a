"""The `flash` back end over dense stand-ins of its kernels: which rows go into which call, and where results go."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import flash_packages as packages
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.attention import build_backend, core_attention_reference, local_attention, packed_tasks, selected_tasks
from steelyard.attention.flash import FlashBackend, calls_of, check_flash
from steelyard.attention.flash_kernels import Entries, Flash2, Flash4, FlashKernels, Masking, TorchVarlen
from steelyard.attention.reference import ReferenceBackend
from steelyard.domain.plan import KernelTasks
from steelyard.errors import UsageError

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
CPU = torch.device("cpu")


class Counting:
    """Kernels that remember the shapes and addresses they were called with."""

    name, head_dim_limit, softcap = "counting", 256, True

    def __init__(self) -> None:
        self._kernels: FlashKernels = Flash2(packages.installed(packages.flash2()))
        self.forwards: list[tuple[int, int, int]] = []
        self.addresses: list[tuple[int, ...]] = []

    def forward(
        self, q_MHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, entries: Entries, masking: Masking
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.forwards.append((len(entries.q_offset) - 1, len(q_MHD), len(k_NKD)))
        self.addresses.append(tuple(x.data_ptr() for x in (q_MHD, k_NKD, v_NKD)))
        return self._kernels.forward(q_MHD, k_NKD, v_NKD, entries, masking)

    def backward(self, *given: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._kernels.backward(*given)  # type: ignore[arg-type]


def rows(count: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(count, heads, HEAD_DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table(tasks: Sequence[tuple[int, int, int, int, Sequence[tuple[int, int, int]]]]) -> KernelTasks:
    """Tasks of (store, row, length, position of queries, segments (store, row, length))."""
    columns: dict[str, list[int]] = {name: [] for name in KernelTasks.__dataclass_fields__}
    columns["segment_offset"].append(0)
    for store, row, length, position, segments in tasks:
        low = position + length - sum(n for _, _, n in segments)
        for name, value in (("q_store", store), ("q_row", row), ("q_length", length), ("q_position", position)):
            columns[name].append(value)
        for segment_store, segment_row, segment_length in segments:
            columns["segment_store"].append(segment_store)
            columns["segment_row"].append(segment_row)
            columns["segment_length"].append(segment_length)
            columns["segment_position"].append(low)
            low += segment_length
        columns["segment_offset"].append(len(columns["segment_row"]))
    return KernelTasks(**{name: np.array(values, dtype=np.int64) for name, values in columns.items()})


def run(backend: object, tasks: KernelTasks, q_rows: Sequence[int], k_rows: Sequence[int]) -> list[torch.Tensor]:
    """Both directions over two stores; rows of no task keep 7 (out, lse, dq), gradients of keys are added to 1."""
    q, dout = ([rows(n, HEADS, seed + s) for s, n in enumerate(q_rows)] for seed in (0, 10))
    k, v = ([rows(n, KV_HEADS, seed + s) for s, n in enumerate(k_rows)] for seed in (20, 30))
    out, dq = ([torch.full_like(x, 7.0) for x in q] for _ in range(2))
    lse = [torch.full(x.shape[:2], 7.0, dtype=x.dtype) for x in q]
    dk, dv = ([torch.ones_like(x) for x in k] for _ in range(2))
    backend.forward(tasks, q, k, v, out, lse)  # type: ignore[attr-defined]
    backend.backward(tasks, dout, q, k, v, out, lse, dq, dk, dv)  # type: ignore[attr-defined]
    return [*out, *lse, *dq, *dk, *dv]


@st.composite
def scattered_tables(draw: st.DrawFn) -> tuple[KernelTasks, list[int]]:
    """Documents cut into shards, each with its rows in one of two stores; some shards have a task."""
    used = [0, 0]
    tasks = []
    for _ in range(draw(st.integers(1, 4))):
        segments: list[tuple[int, int, int]] = []
        position = 0
        for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
            store = draw(st.integers(0, 1))
            row = used[store]
            used[store] += length
            if segments and segments[-1][0] == store and sum(segments[-1][1:]) == row:
                segments[-1] = (store, segments[-1][1], segments[-1][2] + length)
            else:
                segments.append((store, row, length))
            if draw(st.booleans()):
                tasks.append((store, row, length, position, tuple(segments)))
            position += length
    return table(tasks), used


@settings(max_examples=80)
@given(
    case=scattered_tables(),
    window=st.sampled_from([None, 1, 4]),
    softcap=st.sampled_from([None, 1.5]),
    shuffled=st.randoms(use_true_random=False),
)
def test_random_tables_over_two_stores(
    case: tuple[KernelTasks, list[int]], window: int | None, softcap: float | None, shuffled: object
) -> None:
    tasks, used = case
    order = list(range(len(tasks)))
    shuffled.shuffle(order)  # type: ignore[attr-defined]
    tasks = selected_tasks(tasks, np.array(order, dtype=np.int64))
    want = run(ReferenceBackend(scale=0.4, window=window, softcap=softcap), tasks, used, used)
    got = run(FlashBackend(Counting(), scale=0.4, window=window, softcap=softcap), tasks, used, used)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_whole_documents_are_one_call_without_copies() -> None:
    kernels = Counting()
    q, k, v = rows(23, HEADS, 0), rows(23, KV_HEADS, 1), rows(23, KV_HEADS, 2)
    lengths = [7, 0, 1, 15]
    out = local_attention(q, k, v, lengths, FlashBackend(kernels, scale=HEAD_DIM**-0.5))
    torch.testing.assert_close(out, core_attention_reference(q, k, v, lengths), rtol=1e-11, atol=1e-11)
    assert kernels.forwards == [(3, 23, 23)]
    assert kernels.addresses == [(q.data_ptr(), k.data_ptr(), v.data_ptr())]


def test_ranges_that_continue_each_other_are_one_entry() -> None:
    (call,) = calls_of(packed_tasks([40, 9], range_length=8), CPU, 49)
    assert call.entries.q_offset.tolist() == [0, 40, 49] and call.entries.k_offset.tolist() == [0, 40, 49]
    assert (call.entries.q_longest, call.entries.k_longest) == (40, 40)


def test_no_call_copies_more_keys_than_there_are() -> None:
    """Head and tail ranges of one document share its keys: they go into calls of their own."""
    parts = packed_tasks([100, 20], range_length=10)
    tasks = selected_tasks(parts, np.array([0, 9, 4, 10]))
    calls = list(calls_of(tasks, CPU, 120))
    assert [call.entries.k_offset.tolist() for call in calls] == [[0, 10, 110], [0, 50, 60]]
    assert all(int(call.entries.k_offset[-1]) <= 120 for call in calls)


def test_single_queries_are_not_taken_for_decoding() -> None:
    (call,) = calls_of(packed_tasks([1, 1, 1]), CPU, 3)
    assert call.entries.q_longest == 2


def test_tables_are_cut_once_and_forgotten_with_the_table() -> None:
    backend = FlashBackend(Counting(), scale=1.0)
    tasks = packed_tasks([5, 3])
    first = backend._calls_of(tasks, [rows(8, KV_HEADS, 0), rows(0, KV_HEADS, 0)])
    assert backend._calls_of(tasks, [rows(8, KV_HEADS, 1), rows(0, KV_HEADS, 1)]) is first
    del tasks
    gc.collect()
    assert len(backend._calls) == 0


def test_no_task_makes_no_call() -> None:
    kernels = Counting()
    got = run(FlashBackend(kernels, scale=1.0), KernelTasks.empty(), [3, 0], [3, 0])
    assert kernels.forwards == [] and bool((got[0] == 7).all()) and bool((got[6] == 1).all())


@pytest.mark.parametrize(
    ("kernels", "options", "named"),
    [
        (TorchVarlen, {"dtype": torch.float32}, "dtype=torch.float32"),
        (TorchVarlen, {"head_dim": 20}, "head_dim=20"),
        (TorchVarlen, {"head_dim": 264}, "head_dim=264"),
        (TorchVarlen, {"softcap": 1.0}, "softcap"),
        (Flash4, {"head_dim": 136}, "head_dim=136"),
        (Flash4, {"softcap": 1.0}, "softcap"),
    ],
)
def test_refusals_name_the_argument(kernels: type[FlashKernels], options: dict[str, object], named: str) -> None:
    built = kernels(packages.installed(packages.flash2(), packages.flash4()))  # type: ignore[call-arg]
    given_: dict[str, object] = {"head_dim": 64, "dtype": torch.bfloat16, "softcap": None, **options}
    with pytest.raises(UsageError, match=named) as caught:
        check_flash(built, **given_)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    check_flash(built, head_dim=64, dtype=torch.bfloat16, softcap=None)


@pytest.mark.parametrize(("device", "named"), [("cpu", "cuda only"), ("meta", "cuda only")])
def test_flash_is_refused_off_cuda(device: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        build_backend("flash", head_dim=64, heads=4, kv_heads=2, device=device, dtype=torch.bfloat16)


def test_cuda_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("auto", "flash"):
        with pytest.raises(UsageError, match="finds no such device"):
            build_backend(name, head_dim=64, heads=4, kv_heads=2, device="cuda", dtype=torch.bfloat16)


def test_cuda_takes_flash_with_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    backend = build_backend("auto", head_dim=64, heads=4, kv_heads=2, device="cuda", dtype=torch.bfloat16, window=9)
    assert isinstance(backend, FlashBackend) and backend.masking == Masking(64**-0.5, 9, None)
    with pytest.raises(UsageError, match="dtype"):
        build_backend("auto", head_dim=64, heads=4, kv_heads=2, device="cuda", dtype=torch.float32)
