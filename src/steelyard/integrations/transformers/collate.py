"""Packing documents for a Transformers model, with labels shifted inside each document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.data.batches import IGNORED_LABEL, doc_positions, shift_labels
from steelyard.domain.arrays import IntArray, int_column
from steelyard.errors import UsageError


def collate(docs: Sequence[Any]) -> dict[str, Any]:
    """Pack documents into one row. Takes what a `Trainer` hands to its `data_collator`, too.

    Args:
        docs: a sequence of token ids for each document; or a mapping with `input_ids` and, if some of them are not to
            be learned, `labels` of the same length with −100 there (not shifted). Empty documents are dropped.

    Returns:
        input_ids, position_ids (restart at 0 per document), labels and shift_labels: int64 (1, tokens);
        cu_seq_lens_q, cu_seq_lens_k: int32 (documents + 1,); max_length_q, max_length_k: int.
        `shift_labels` is what the loss takes: the next token of the same document, −100 after its last one. `labels`
        are not shifted and −100 at the first token of each document, so that a loss that shifts them itself comes to
        the same. Without any token: one token of id 0 that is not learned, so that a rank without data can take part.

    Raises:
        UsageError: what is no document, a token id below 0, or labels that do not fit their tokens.
    """
    if isinstance(docs, (str, bytes, Mapping)) or not isinstance(docs, Iterable):
        raise UsageError(
            f"collate: documents of type {type(docs).__name__}, expected a list of documents: token ids, or mappings "
            "with input_ids"
        )
    tokens, labels = [], []
    for number, doc in enumerate(docs):
        doc_tokens, doc_labels = _document(doc, number)
        if len(doc_tokens):
            tokens.append(doc_tokens)
            labels.append(doc_labels)
    if not tokens:
        tokens, labels = [np.zeros(1, dtype=np.int64)], [np.full(1, IGNORED_LABEL, dtype=np.int64)]
    lengths = int_column([len(t) for t in tokens])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    all_labels = np.concatenate(labels)
    shifted = shift_labels(all_labels, lengths)
    all_labels[bounds[:-1]] = IGNORED_LABEL
    cu_seq_lens = torch.tensor(bounds, dtype=torch.int32)
    longest = int(lengths.max())
    return {
        "input_ids": _row(np.concatenate(tokens)),
        "position_ids": _row(doc_positions(lengths)),
        "labels": _row(all_labels),
        "shift_labels": _row(shifted),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def label_count(batch: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> int:
    """Tokens with a label in this batch; with a group, over all its ranks (collective): what the summed loss is
    divided by. `Attachment.plan` counts them without another message."""
    count = count_labels(batch)
    if group is None:
        return count
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor(count, dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    return int(total)


def count_labels(batch: Mapping[str, Any]) -> int:
    """Labels that count in the loss of this batch; 0 without labels.

    Raises:
        UsageError: not a batch.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(f"a batch of type {type(batch).__name__}: expected a mapping, such as what collate returns")
    shifted, labels = batch.get("shift_labels"), batch.get("labels")
    if isinstance(shifted, Tensor):
        return int((shifted != IGNORED_LABEL).sum())
    return int((labels[..., 1:] != IGNORED_LABEL).sum()) if isinstance(labels, Tensor) else 0


def _document(doc: Any, number: int) -> tuple[IntArray, IntArray]:
    """Tokens and labels (not shifted) of one document, int64 of one length."""
    if not isinstance(doc, Mapping):
        tokens = _token_ids(doc, number, "token ids")
        return tokens, tokens.copy()
    if doc.get("input_ids") is None:
        raise UsageError(
            f"collate: document {number} has {', '.join(map(str, doc)) or 'nothing'} and no input_ids; tokenise it "
            "first (with a Trainer: remove_unused_columns=False)"
        )
    tokens = _token_ids(doc["input_ids"], number, "input_ids")
    labels = _column(doc["labels"], number, "labels") if doc.get("labels") is not None else tokens.copy()
    if len(labels) != len(tokens):
        raise UsageError(f"collate: document {number} has {len(tokens)} tokens and {len(labels)} labels")
    if doc.get("attention_mask") is not None:
        real = _column(doc["attention_mask"], number, "attention_mask", kinds="iub") != 0
        if len(real) != len(tokens):
            raise UsageError(
                f"collate: document {number} has {len(tokens)} tokens and an attention_mask of {len(real)}"
            )
        tokens, labels = tokens[real], labels[real]
    return tokens, labels


def _token_ids(values: Any, number: int, name: str) -> IntArray:
    """Token ids of one document, int64.

    Raises:
        UsageError: as `_column`; or one of them is negative.
    """
    column = _column(values, number, name)
    if (column < 0).any():
        at = int((column < 0).argmax())
        raise UsageError(
            f"collate: {name} of document {number}: {column[at]} at place {at}; expected token ids from 0 (what is not "
            "learned is marked by -100 in `labels`, padding by 0 in `attention_mask`)"
        )
    return column


def _column(values: Any, number: int, name: str, *, kinds: str = "iu") -> IntArray:
    """Whole numbers of one document, int64. `kinds`: numpy's letters for what is taken.

    Raises:
        UsageError: anything else, also several rows of them: those are several documents.
    """
    given = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    try:
        column = np.array(given if isinstance(given, np.ndarray) else list(given))
    except (TypeError, ValueError):
        column = np.array("")
    one = column.ndim == 1 or (column.ndim == 2 and len(column) == 1)
    if isinstance(values, (str, bytes)) or not one or (column.size and column.dtype.kind not in kinds):
        shown = f"shape {column.shape}" if column.ndim > 1 else " ".join(repr(values).split())[:40]
        raise UsageError(
            f"collate: {name} of document {number}: {shown}; expected whole numbers in a row, such as [5, 3, 8]"
            + ("; a document for each row" if column.ndim > 1 else "")
        )
    return column.astype(np.int64).reshape(-1)


def _row(column: IntArray) -> Tensor:
    return torch.tensor(column, dtype=torch.int64)[None]
