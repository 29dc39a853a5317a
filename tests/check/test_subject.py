"""How a model is prepared for the checks."""

from __future__ import annotations

import torch
import users_models

from steelyard.check.subject import _checkpoint_layers


def test_layers_are_checkpointed_although_dropout_is_off() -> None:
    model = users_models.hf().eval()
    _checkpoint_layers(model)
    runs: list[bool] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda part, *_: runs.append(part.training))
    tokens = torch.arange(6)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert runs == [False, False], "once in the forward pass and again in the backward pass"
