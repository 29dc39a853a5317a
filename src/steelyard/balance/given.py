"""What callers hand to the `Balancer`, checked: a wrong kind of thing is told at once, in the caller's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError

_SHOWN = 60


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


def check_makings(
    group: Any, planning_group: Any, shape: Any, dtype: Any, device: Any, numbers: Mapping[str, Any], speeds: Any
) -> None:
    """Refuse arguments of the wrong kind when a `Balancer` is made.

    Raises:
        UsageError: names the argument.
    """
    for name, value in (("group", group), ("planning_group", planning_group)):
        if value is not None and not isinstance(value, dist.ProcessGroup):
            raise UsageError(
                f"Balancer: {name}={shown(value)}, expected a process group, such as torch.distributed.group.WORLD "
                "after init_process_group, or None"
            )
    if shape is not None and not isinstance(shape, AttentionShape):
        raise UsageError(
            f"Balancer: shape={shown(shape)}, expected AttentionShape(heads=…, kv_heads=…, head_dim=…) from "
            "steelyard.domain.shapes, or None to take that of the first q and k"
        )
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"Balancer: dtype={shown(dtype)}, expected a type of torch such as torch.bfloat16")
    if device is not None and not isinstance(device, torch.device):
        raise UsageError(f"Balancer: device={shown(device)}, expected torch.device(…) or None")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"Balancer: {name}={shown(value)}, expected a number")
    if isinstance(speeds, str) or not isinstance(speeds, Sequence) or not all(_is_number(s) for s in speeds):
        raise UsageError(f"Balancer: speeds={shown(speeds)}, expected a number for each rank, such as (1.0, 0.5)")


def check_tensors(**given: Any) -> None:
    """Refuse what is no tensor.

    Raises:
        UsageError: names the argument.
    """
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise UsageError(f"attention: {name}={shown(value)}, expected a tensor")


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
