"""How a model is prepared for the checks."""

from __future__ import annotations

import pytest
import torch
import transformers
import users_models

from steelyard.check.subject import _checkpoint_layers
from steelyard.errors import UsageError


def test_layers_are_checkpointed_although_dropout_is_off() -> None:
    model = users_models.hf().eval()
    _checkpoint_layers(model)
    runs: list[bool] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda part, *_: runs.append(part.training))
    tokens = torch.arange(6)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert runs == [False, False], "once in the forward pass and again in the backward pass"


def test_layers_that_drop_values_themselves_drop_nothing_when_checkpointed() -> None:
    model = users_models.hf_opt().eval()
    tokens = torch.arange(6)[None]
    expected = model(input_ids=tokens).logits
    _checkpoint_layers(model)
    assert model.model.decoder.layers[0].training and model.model.decoder.training
    for _ in range(3):  # a layer is left out with probability 1/2
        assert torch.equal(model(input_ids=tokens).logits, expected)


def test_checkpointing_once_the_old_name_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = users_models.hf()
    model.activation_checkpointing_enable = model._activation_checkpointing_enable
    monkeypatch.delattr(transformers.PreTrainedModel, "gradient_checkpointing_enable")
    _checkpoint_layers(model)
    assert model.model.layers[0].gradient_checkpointing


def test_a_model_that_cannot_be_checkpointed() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_key_value_heads": 1, "kv_channels": 8, "num_local_experts": 2}  # fmt: skip
    model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes))
    with pytest.raises(UsageError, match=r"--checkpointing: JetMoeForCausalLM does not support"):
        _checkpoint_layers(model)
