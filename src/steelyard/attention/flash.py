"""Core attention on CUDA devices, from the variable-length functions of flash-attn or torch (`flash_kernels`).

Such a function computes several *entries* at once: queries and keys that lie packed one behind another, with a causal
mask aligned to the bottom right. That is the mask of a task, so a task is one entry. Its keys must lie in one piece;
where they do not (they come in segments of two stores, or two tasks share them), they are copied. A copy costs what
one query row per key costs, and saves computing the task in several parts, whose results would be rounded to 16 bits
before they are merged. Rows that already lie as a call wants them are passed as views: all of them when whole documents
are computed where they are.

Tasks are computed in as few calls as possible without copying more key rows in any of them than both stores hold. How a
table is cut into calls is worked out once per table and device, and kept as long as the table lives: all layers of a
step have the same.

M: query rows of a call, N: its key rows, H: query heads, K: key/value heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch

from steelyard.attention.blocks import Keys, Stores, joined
from steelyard.attention.flash_kernels import Entries, FlashKernels, Masking
from steelyard.domain.plan import KernelTasks
from steelyard.errors import UsageError

Runs: TypeAlias = tuple[Keys, ...]
_HEAD_DIM_UNIT = 8
# Kernels treat calls whose longest entry has one query as decoding steps, with layouts of their own.
_LEAST_LONGEST = 2


class FlashBackend:
    """Causal core attention by flash kernels; see `interface.Backend` for the two calls.

    Repeats bit for bit if `torch.use_deterministic_algorithms` is on and the kernels can.

    Args:
        kernels: of one package.
        scale: factor on q·k.
        window: keys that a query sees at most, its own included; None: all earlier ones.
        softcap: c in c·tanh(score / c); None: no cap.
    """

    name = "flash"
    DTYPES = (torch.bfloat16, torch.float16)

    def __init__(
        self, kernels: FlashKernels, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> None:
        self.kernels = kernels
        self.masking = Masking(scale, window, softcap)
        self._calls: WeakKeyDictionary[KernelTasks, dict[tuple[torch.device, int], tuple[Call, ...]]]
        self._calls = WeakKeyDictionary()

    def forward(self, tasks: KernelTasks, q: Stores, k: Stores, v: Stores, out: Stores, lse: Stores) -> None:
        for call in self._calls_of(tasks, k):
            q_MHD, k_NKD, v_NKD = _packed(call.queries, q), _packed(call.keys, k), _packed(call.keys, v)
            out_MHD, lse_HM = self.kernels.forward(q_MHD, k_NKD, v_NKD, call.entries, self.masking)
            for target, part in _parts(call.queries, out, out_MHD):
                target.copy_(part)
            for target, part in _parts(call.queries, lse, lse_HM.t()):
                target.copy_(part)

    def backward(
        self,
        tasks: KernelTasks,
        dout: Stores,
        q: Stores,
        k: Stores,
        v: Stores,
        out: Stores,
        lse: Stores,
        dq: Stores,
        dk: Stores,
        dv: Stores,
    ) -> None:
        for call in self._calls_of(tasks, k):
            dq_MHD, dk_NKD, dv_NKD = self.kernels.backward(
                _packed(call.queries, dout),
                _packed(call.queries, q),
                _packed(call.keys, k),
                _packed(call.keys, v),
                _packed(call.queries, out),
                _packed(call.queries, lse).t().contiguous(),
                call.entries,
                self.masking,
            )
            for target, part in _parts(call.queries, dq, dq_MHD):
                target.copy_(part)
            for stores, grad_NKD in ((dk, dk_NKD), (dv, dv_NKD)):
                for target, part in _parts(call.keys, stores, grad_NKD):
                    target.add_(part)

    def _calls_of(self, tasks: KernelTasks, k: Stores) -> tuple[Call, ...]:
        found = self._calls.setdefault(tasks, {})
        key = (k[0].device, sum(len(store) for store in k))
        if key not in found:
            found[key] = tuple(calls_of(tasks, *key))
        return found[key]


def check_flash(kernels: FlashKernels, *, head_dim: int, dtype: torch.dtype, softcap: float | None) -> None:
    """Refuse what kernels cannot compute.

    Raises:
        UsageError: names the argument, and what to use instead.
    """
    given = f"attention back end 'flash' ({kernels.name})"
    if dtype not in FlashBackend.DTYPES:
        raise UsageError(
            f"{given} cannot compute in dtype={dtype}; use one of {', '.join(str(d) for d in FlashBackend.DTYPES)}"
        )
    if head_dim % _HEAD_DIM_UNIT or head_dim > kernels.head_dim_limit:
        raise UsageError(
            f"{given} cannot compute head_dim={head_dim}; expected a multiple of {_HEAD_DIM_UNIT} up to "
            f"{kernels.head_dim_limit}"
        )
    if softcap is not None and not kernels.softcap:
        raise UsageError(f"{given} has no softcap; install flash-attn 2 or 3, or use name='reference' for small checks")


@dataclass(frozen=True, eq=False)
class Call:
    """Tasks that are computed together: runs of their query and key rows, in the order of the entries."""

    queries: Runs
    keys: Runs
    entries: Entries


class _Task(NamedTuple):
    queries: Keys
    keys: Runs

    @property
    def key_rows(self) -> int:
        return sum(_length(run) for run in self.keys)


def calls_of(tasks: KernelTasks, device: torch.device, key_rows: int) -> Iterator[Call]:
    """Cut a table into calls of at most `key_rows` key rows each, at least one task in each, in the table's order."""
    gathered: list[_Task] = []
    rows = 0
    for task in _tasks(joined(tasks).tasks):
        if gathered and rows + task.key_rows > key_rows:
            yield _call(gathered, device)
            gathered, rows = [], 0
        gathered.append(task)
        rows += task.key_rows
    if gathered:
        yield _call(gathered, device)


def _tasks(tasks: KernelTasks) -> Iterator[_Task]:
    """Tasks that have queries."""
    offset = tasks.segment_offset.tolist()
    segments = [
        Keys(store, slice(row, row + length))
        for store, row, length in zip(
            tasks.segment_store.tolist(), tasks.segment_row.tolist(), tasks.segment_length.tolist(), strict=True
        )
    ]
    columns = (tasks.q_store.tolist(), tasks.q_row.tolist(), tasks.q_length.tolist(), offset[:-1], offset[1:])
    for store, row, length, first, end in zip(*columns, strict=True):
        if length:
            yield _Task(Keys(store, slice(row, row + length)), tuple(segments[first:end]))


def _call(tasks: Sequence[_Task], device: torch.device) -> Call:
    q_offset, q_longest = _offsets([_length(task.queries) for task in tasks], device)
    k_offset, k_longest = _offsets([task.key_rows for task in tasks], device)
    return Call(
        _merged([task.queries for task in tasks]),
        _merged([run for task in tasks for run in task.keys]),
        Entries(q_offset, k_offset, q_longest, k_longest),
    )


def _offsets(lengths: Sequence[int], device: torch.device) -> tuple[torch.Tensor, int]:
    offset = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
    return offset.to(device), max(_LEAST_LONGEST, *lengths)


def _merged(runs: Sequence[Keys]) -> Runs:
    """Runs of which none continues the one before it."""
    found: list[Keys] = []
    for run in runs:
        if found and found[-1].store == run.store and found[-1].rows.stop == run.rows.start:
            found[-1] = Keys(run.store, slice(found[-1].rows.start, run.rows.stop))
        else:
            found.append(run)
    return tuple(found)


def _length(run: Keys) -> int:
    return int(run.rows.stop - run.rows.start)


def _packed(runs: Runs, stores: Stores) -> torch.Tensor:
    """Rows of stores one behind another: a view of a single run, a copy of several."""
    views = [stores[store][rows] for store, rows in runs]
    return views[0] if len(views) == 1 else torch.cat(views)


def _parts(runs: Runs, stores: Stores, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each run's rows in its store, and in the packed tensor."""
    first = 0
    for run in runs:
        yield stores[run.store][run.rows], packed[first : first + _length(run)]
        first += _length(run)
