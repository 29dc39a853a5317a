"""Which documents a Transformers batch holds, and which of its rows belong to none.

A batch is (rows, length) tokens. Every row starts a document; inside a row a document starts where `position_ids` do
not go on counting, or where `cu_seq_lens_q` says so. Padding is no document: its rows are left out of attention.

Shapes: B rows of the batch, L their length, T = B · L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.domain.arrays import IntArray
from steelyard.errors import UsageError


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one batch.

    Attributes:
        lengths: tokens of each document, in the order of the rows.
        batch_shape: (B, L).
        rows: the rows among all T that belong to documents, int64; None: all of them.
    """

    lengths: tuple[int, ...]
    batch_shape: tuple[int, int]
    rows: IntArray | None = None


def read_documents(batch: Mapping[str, Any]) -> Documents:
    """Read the documents of what a model is called with.

    Raises:
        UsageError: a mask, positions or sequence lengths that cannot be honoured; says what to give instead.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"a batch of type {type(batch).__name__}: expected a mapping with input_ids, such as what collate returns"
        )
    shape = _batch_shape(batch)
    mask_BL = _padding(batch.get("attention_mask"), shape)
    cu_seq_lens = batch.get("cu_seq_lens_q")
    if cu_seq_lens is not None:
        if mask_BL is not None:
            raise UsageError(
                "attention_mask marks padding and cu_seq_lens_q is given as well: they may contradict each other; "
                "leave the padding out of the batch, or cu_seq_lens_q away"
            )
        return Documents(_lengths_of(cu_seq_lens, shape), shape)
    starts_BL = _document_starts(batch.get("position_ids"), shape)
    if mask_BL is None:
        _refuse_parts(batch.get("position_ids"), starts_BL)
        starts = np.flatnonzero(starts_BL)
        return Documents(tuple(np.diff(np.append(starts, starts_BL.size)).tolist()), shape)
    return _without_padding(starts_BL, mask_BL, batch.get("position_ids"), shape)


def _batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    named = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    tokens = batch.get(named)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise UsageError("no documents: the model is called without input_ids or inputs_embeds of (rows, tokens)")
    if not tokens.shape[0] * tokens.shape[1]:
        raise UsageError(
            f"a batch of shape {tuple(tokens.shape)} holds no token; a rank without documents joins with a token that "
            "does not count, as collate([]) makes"
        )
    if named == "input_ids" and (tokens.is_floating_point() or tokens.dtype == torch.bool):
        raise UsageError(f"input_ids of dtype {tokens.dtype}, expected token ids, torch.int64")
    return int(tokens.shape[0]), int(tokens.shape[1])


def _padding(mask: Any, shape: tuple[int, int]) -> np.ndarray | None:
    """True where there is a token, bool (B, L); None without padding."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        given = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"of type {type(mask).__name__}"
        raise UsageError(
            f"attention_mask {given}: only a padding mask of shape {shape} can be honoured; say which documents there "
            "are by position_ids that restart, or by cu_seq_lens_q"
        )
    if tuple(mask.shape) != shape:
        raise UsageError(
            f"attention_mask of shape {tuple(mask.shape)} for tokens of shape {shape}: a mask longer than the tokens "
            "means generation with a cache or a prefix, which is not balanced; detach the model for that"
        )
    real = mask.detach().to("cpu").numpy() != 0
    return None if real.all() else real


def _lengths_of(cu_seq_lens: Any, shape: tuple[int, int]) -> tuple[int, ...]:
    bounds = np.asarray(cu_seq_lens.detach().to("cpu") if isinstance(cu_seq_lens, Tensor) else cu_seq_lens)
    if bounds.dtype.kind not in "iu":
        raise UsageError(
            f"cu_seq_lens_q of dtype {bounds.dtype}, expected whole numbers from 0 to {shape[0] * shape[1]}"
        )
    bounds = bounds.reshape(-1).astype(np.int64)
    tokens = shape[0] * shape[1]
    if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        shown = ", ".join(str(n) for n in (bounds if len(bounds) < 6 else [*bounds[:3], "…", bounds[-1]]))
        raise UsageError(f"cu_seq_lens_q [{shown}] for {tokens} tokens; expected ascending bounds from 0 to {tokens}")
    lengths = np.diff(bounds)
    ends = np.cumsum(lengths)
    row_ends = np.arange(1, shape[0]) * shape[1]
    if not np.isin(row_ends, ends).all():
        raise UsageError(
            f"cu_seq_lens_q lets a document go on from one row of the batch to the next ({shape[0]} × {shape[1]}) and "
            "positions restart there: give bounds at the end of every row, or a batch of one row"
        )
    return tuple(int(n) for n in lengths if n)


def _document_starts(position_ids: Any, shape: tuple[int, int]) -> np.ndarray:
    """Where documents start, bool (B, L)."""
    starts_BL = np.zeros(shape, dtype=bool)
    starts_BL[:, :1] = True
    if position_ids is None:
        return starts_BL
    if not isinstance(position_ids, Tensor):
        raise UsageError(f"position_ids of type {type(position_ids).__name__}, expected a tensor of shape {shape}")
    if position_ids.dim() != 2 or position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
        raise UsageError(
            f"position_ids of shape {tuple(position_ids.shape)} for tokens of shape {shape}: expected one position per "
            "token; documents cannot be read from others, give cu_seq_lens_q"
        )
    positions = position_ids.detach().to("cpu").numpy()
    starts_BL[:, 1:] |= np.diff(positions, axis=1) != 1
    return starts_BL


def _refuse_parts(position_ids: Any, starts_BL: np.ndarray) -> None:
    """Refuse positions that jump to another number than 0 inside a row: the tokens before and after may be parts of
    one document (a head–tail layout of context parallelism), and would not see each other."""
    if position_ids is None:
        return
    positions_BL = np.broadcast_to(position_ids.detach().to("cpu").numpy(), starts_BL.shape)
    jumps = np.argwhere(starts_BL[:, 1:] & (positions_BL[:, 1:] != 0))
    if len(jumps):
        row, column = jumps[0]
        before, after = positions_BL[row, column : column + 2]
        raise UsageError(
            f"position_ids go from {before} to {after} at column {column + 1} of row {row}: a document starts at 0, so "
            "this may be a part of one; leave documents whole (no context parallelism beside Steelyard), or say where "
            "they end by cu_seq_lens_q"
        )


def _without_padding(
    starts_BL: np.ndarray, mask_BL: np.ndarray, position_ids: Any, shape: tuple[int, int]
) -> Documents:
    """Leave the padding out; a document with padding inside is refused, for its positions are anybody's guess."""
    after_padding_BL = mask_BL.copy()
    after_padding_BL[:, 1:] &= ~mask_BL[:, :-1]
    first_BL = np.cumsum(mask_BL, axis=1) == 1
    positions_BL = None
    if position_ids is not None:
        positions_BL = np.broadcast_to(position_ids.detach().to("cpu").numpy(), shape)
    resumed_BL = after_padding_BL & ~first_BL
    if resumed_BL.any() and (positions_BL is None or (positions_BL[resumed_BL] != 0).any()):
        row, column = np.argwhere(resumed_BL)[0]
        raise UsageError(
            f"attention_mask has padding in the middle of row {row} (tokens go on at column {column}): documents "
            "cannot go on after padding; pad at the ends only, or restart position_ids at 0 after it"
        )
    starts = (starts_BL | after_padding_BL)[mask_BL]
    bounds = np.append(np.flatnonzero(starts), len(starts))
    return Documents(tuple(np.diff(bounds).tolist()), shape, np.flatnonzero(mask_BL).astype(np.int64))


def rows_tensor(documents: Documents, device: torch.device) -> Tensor | None:
    """`Documents.rows` on a device."""
    return None if documents.rows is None else torch.from_numpy(documents.rows).to(device)
