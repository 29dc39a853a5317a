"""What the page on Transformers tells people to type runs, and computes what the stock model does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.balance import NanoBatchAttention

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "transformers.md"
DOCS = ([5, 6, 7, 8], [9, 10, 11])


def test_the_program_with_activation_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[NanoBatchAttention] = []
    made = NanoBatchAttention.__init__

    def remember(self: NanoBatchAttention, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        passes.append(self)

    monkeypatch.setattr(NanoBatchAttention, "__init__", remember)
    section = PAGE.read_text(encoding="utf-8").partition("## Activation checkpointing\n")[2].partition("\n## ")[0]
    [program] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(program, str(PAGE), "exec"), found)
    model, layers = found["model"], found["model"].config.num_hidden_layers
    assert [(each.entries, each.answers) for each in passes] == [(layers, layers)]
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.eval()
    labels = sum(len(doc) - 1 for doc in DOCS)
    for doc in DOCS:
        tokens = torch.tensor([doc])
        model(input_ids=tokens, labels=tokens, num_items_in_batch=labels).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6), name
