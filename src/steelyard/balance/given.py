"""What callers hand to the `Balancer`, checked: a wrong kind of thing is told at once, in the caller's words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from operator import index
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.attention.interface import NAMES
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError
from steelyard.planner import POLICIES
from steelyard.runtime.dispatch import Memory
from steelyard.settings import ProcessSettings, nearest

_SHOWN = 60
_IN_PLACE = ("balanced", "packed", "reference")
"""Policies that leave tokens where the data loader put them; the others are planned and compared, not carried out."""
_LONGEST_S = 1e9


def shown(value: Any) -> str:
    """A value as messages show it: short, on one line."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def lengths_of(name: str, given: Any) -> list[int]:
    """Document lengths of one nano-batch.

    Raises:
        UsageError: no sequence of whole numbers of at least 0.
    """
    try:
        lengths = [_length(n) for n in _items(given)]
    except TypeError:
        raise UsageError(
            f"{name}: {shown(given)}, expected the lengths of this rank's documents as whole numbers, such as [10, 20]"
        ) from None
    if any(n < 0 for n in lengths):
        raise UsageError(f"{name}: {shown(given)}: a document cannot have {min(lengths)} tokens; expected 0 or more")
    return lengths


def nano_batches_of(name: str, given: Any) -> list[list[int]]:
    """Document lengths for each nano-batch.

    Raises:
        UsageError: no sequence of those.
    """
    try:
        parts = list(_items(given))
    except TypeError:
        parts = [0]
    if any(_is_number(part) for part in parts):
        raise UsageError(
            f"{name}: {shown(given)}, expected a list of document lengths for each nano-batch, such as [[100, 200]] "
            "for one nano-batch of two documents"
        )
    return [lengths_of(name, part) for part in parts]


def shards_of(name: str, given: Any) -> list[tuple[int, ...]]:
    """(doc, start, length), or (doc, start, length, rank), of rows.

    Raises:
        UsageError: anything else.
    """
    try:
        return [tuple(_length(n) for n in _items(shard)) for shard in _items(given)]
    except TypeError:
        raise UsageError(
            f"{name}: {shown(given)}, expected (doc, start, length) of this rank's rows, such as [(0, 0, 100)], or "
            "(doc, start, length, rank) of all ranks' rows"
        ) from None


def layout_of(table: Sequence[tuple[int, ...]], ranks: int) -> Layout:
    """The layout of (doc, start, length, rank), whatever numbers the documents have.

    Raises:
        UsageError: a shard does not say its rank, or they do not cover every document once.
    """
    wrong = next((shard for shard in table if len(shard) != 4), None)
    if wrong is not None:
        raise UsageError(
            f"shards: {wrong}, expected (doc, start, length), or (doc, start, length, rank) in all of them"
        )
    number = {doc: i for i, doc in enumerate(sorted({shard[0] for shard in table if shard[2]}))}
    return Layout.from_shards([(number[d], s, n, r) for d, s, n, r in table if n], ranks)


def check_groups(where: str, **groups: Any) -> None:
    """Refuse what is no process group, and None in a process of several that have not been joined yet: before that,
    `torch.distributed.group.WORLD` is None as well.

    Raises:
        UsageError: names the argument.
    """
    for name, value in groups.items():
        if value is not None and not isinstance(value, dist.ProcessGroup):
            raise UsageError(
                f"{where}: {name}={shown(value)}, expected a process group, such as torch.distributed.group.WORLD "
                "after init_process_group, or None"
            )
    joined = dist.is_initialized() or groups["group"] is not None
    if not joined and ProcessSettings.from_environment().world_size > 1:
        raise UsageError(
            f"{where}: this process is one of several (WORLD_SIZE), but torch.distributed is not initialised, and its "
            "group.WORLD is None until then: call torch.distributed.init_process_group(…) first, or, for a Trainer, "
            "make TrainingArguments(…) first"
        )


def check_kinds(shape: Any, dtype: Any, device: Any) -> None:
    """Refuse arguments of the wrong kind when a `Balancer` is made.

    Raises:
        UsageError: names the argument.
    """
    if shape is not None and not isinstance(shape, AttentionShape):
        raise UsageError(
            f"Balancer: shape={shown(shape)}, expected AttentionShape(heads=…, kv_heads=…, head_dim=…) from "
            "steelyard.domain.shapes, or None to take that of the first q and k"
        )
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"Balancer: dtype={shown(dtype)}, expected a type of torch such as torch.bfloat16")
    if device is not None and not isinstance(device, torch.device):
        raise UsageError(f"Balancer: device={shown(device)}, expected torch.device(…) or None")


def check_options(
    where: str, *, tolerance: Any, timeout_s: Any, policy: Any, backend: Any, memory: Any, speeds: Any
) -> None:
    """Refuse options that cannot be honoured, before any rank waits for another.

    Args:
        where: what the caller called.

    Raises:
        UsageError: names the option and what is nearest to it.
    """
    if not 0 <= _number(where, "tolerance", tolerance) < math.inf:
        raise UsageError(f"{where}: tolerance={tolerance}, expected a number >= 0 such as 0.05")
    check_seconds(where, "timeout_s", timeout_s)
    for name, value, known in (
        ("policy", policy, tuple(POLICIES)), ("backend", backend, NAMES), ("memory", memory, get_args(Memory))
    ):  # fmt: skip
        if not isinstance(value, str) or value not in known:
            close = nearest(value, known) if isinstance(value, str) else None
            hint = f"; did you mean {close!r}?" if close else ""
            raise UsageError(f"{where}: {name}={shown(value)}, expected one of {', '.join(known)}{hint}")
    if policy not in _IN_PLACE:
        raise not_carried_out(where, policy)
    if isinstance(speeds, str) or not isinstance(speeds, Sequence) or not all(_is_number(s) for s in speeds):
        raise UsageError(f"{where}: speeds={shown(speeds)}, expected a number for each rank, such as (1.0, 0.5)")


def not_carried_out(where: str, policy: str) -> UsageError:
    """The error for a policy that moves documents between ranks."""
    return UsageError(
        f"{where}: policy={policy!r} places the tokens of documents elsewhere than they are, so it can be planned and "
        f"compared (`steelyard plan`) but not carried out here; use one of {', '.join(_IN_PLACE)}"
    )


def check_seconds(where: str, name: str, value: Any) -> None:
    """Refuse what is no time to wait.

    Raises:
        UsageError: names it.
    """
    if not 0 < _number(where, name, value) <= _LONGEST_S:
        raise UsageError(f"{where}: {name}={value}, expected seconds above 0 (at most {_LONGEST_S:g}), such as 300")


def check_row_keys(where: str, value: Any) -> None:
    """Refuse what is no number of keys.

    Raises:
        UsageError: says what was given.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise UsageError(f"{where}: row_keys={shown(value)}, expected a whole number >= 0; 0 balances pairs")


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{where}: {name}={shown(value)}, expected a number")
    return float(value)


def check_tensors(**given: Any) -> None:
    """Refuse what is no packed tensor of tokens, heads and channels.

    Raises:
        UsageError: names the argument.
    """
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise UsageError(f"attention: {name}={shown(value)}, expected a tensor")
        if value.dim() != 3:
            batch = "; leave the batch dimension out" if value.dim() == 4 and value.shape[0] == 1 else ""
            raise UsageError(
                f"attention: {name} has shape {tuple(value.shape)}, expected (tokens, heads, head size): all documents "
                f"of this rank one after another{batch}"
            )


def _items(given: Any) -> Any:
    """What a sequence holds; texts, tables by name and sets are none."""
    if isinstance(given, (str, bytes, Mapping, set)):
        raise TypeError
    return given.tolist() if isinstance(given, Tensor) else given


def _length(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _is_number(value: Any) -> bool:
    scalar = isinstance(value, (Tensor, np.ndarray)) and not value.ndim
    return scalar or isinstance(value, (int, float, np.generic))
