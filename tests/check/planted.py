"""Faults planted into Steelyard's own code, in a worker, to see what `steelyard check` says of the built-in model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from steelyard.check import measure
from steelyard.check.models import BalancedDecoder
from steelyard.check.request import CheckRequest
from steelyard.check.subject import Subject
from steelyard.runtime.row_runs import RowRuns


def rank(rank: int, ranks: int, group: dist.ProcessGroup, request: CheckRequest, path: str, fault: str) -> Any:
    """`rank_on_worker` with a fault."""
    with plant(fault):
        return measure.rank_on_worker(rank, ranks, group, request, path)


def reference(rank: int, ranks: int, group: dist.ProcessGroup, request: CheckRequest, path: str, fault: str) -> Any:
    """`reference_on_worker` with a fault."""
    with plant(fault):
        return measure.reference_on_worker(rank, ranks, group, request, path)


def plant(fault: str) -> ExitStack:
    """The fault, until the stack is closed."""
    stack = ExitStack()
    targets = {
        "leak": (BalancedDecoder, "forward", _one_document),
        "mean of means": (Subject, "_loss", _own_mean),
        "rolled labels": (Subject, "collate", _rolled(Subject.collate)),
        "dropped tail": (Subject, "collate", _shorter(Subject.collate)),
        "wrong rows sent": (RowRuns, "pack", _pack_reversed(RowRuns.pack)),
    }
    stack.enter_context(mock.patch.object(*targets[fault]))
    return stack


def _one_document(self: BalancedDecoder, input_ids: Tensor, position_ids: Tensor, doc_lens: list[int]) -> Tensor:
    whole = [sum(doc_lens)]
    return self.decoder(  # type: ignore[no-any-return]
        input_ids, position_ids, lambda q, k, v, layer: self.balancer.attention(q, k, v, doc_lens=whole, layer=layer)
    )


def _own_mean(self: Subject, batch: Any, label_count: int, ranks: int) -> Tensor:
    logits = self.model(**{name: value for name, value in batch.items() if name != "labels"})
    return F.cross_entropy(logits, batch["labels"]) / ranks


def _rolled(collate: Any) -> Any:
    def rolled(self: Subject, docs: Any) -> Any:
        batch = collate(self, docs)
        return {**batch, "labels": batch["input_ids"].roll(-1)}

    return rolled


def _shorter(collate: Any) -> Any:
    def shorter(self: Subject, docs: Any) -> Any:
        docs = list(docs)
        if len(docs) > 1 and len(docs[-1]) > 1:
            docs[-1] = docs[-1][:-1]
        return collate(self, docs)

    return shorter


def _pack_reversed(pack: Any) -> Any:
    def reversed_rows(self: RowRuns, rows: Tensor, out: Tensor) -> None:
        pack(self, rows, out)
        out.copy_(torch.flip(out, dims=(0,)))

    return reversed_rows
