"""The steps that `frameworks_run` makes with each framework, made by hand: documents one by one, stock attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers_ranks as tiny_models

LENGTHS = [30, 3, 9, 4, 25, 2, 17, 5, 6, 40, 3, 8, 12, 5, 1, 33]
DOCS = [{"input_ids": tiny_models.tokens_of(i, n)} for i, n in enumerate(LENGTHS)]
STEPS = 2


def figures(model: Any, losses: list[float], **more: Any) -> dict[str, Any]:
    """Losses and a fingerprint of the parameters."""
    weights = [float(p.detach().double().norm()) for p in model.parameters()]
    return {"losses": losses, "weights": weights, **more}


def stock(documents_by_step: Sequence[Sequence[list[int]]] | None = None) -> dict[str, Any]:
    """The same steps by hand: documents one by one through the model's own attention."""
    if documents_by_step is None:
        documents_by_step = [[doc["input_ids"] for doc in DOCS[8 * step : 8 * step + 8]] for step in range(STEPS)]
    model = tiny_models.tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for documents in documents_by_step:
        docs = [torch.tensor([ids]) for ids in documents]
        labels = sum(doc.shape[1] - 1 for doc in docs)
        total = 0.0
        for doc in docs:
            if doc.shape[1] > 1:
                logits = model(input_ids=doc, use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits[0, :-1], doc[0, 1:], reduction="sum") / labels
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return figures(model, losses)


def mean_loss(model: Any, attached: Any, docs: list[dict[str, list[int]]]) -> float:
    """Mean over tokens of the documents one by one, with the model's own attention."""
    total = labels = 0.0
    with attached.detached(), torch.no_grad():
        for doc in docs:
            ids = torch.tensor([doc["input_ids"]])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            labels += ids.shape[1] - 1
    return total / labels
