"""Small models of Transformers families, by name: their attention in every variety, in a tenth of a second."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # larger than usual: attention of a fresh model hardly matters
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOW: Mapping[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"sliding_window": None, "num_local_experts": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {**_WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {**_WINDOW, "query_pre_attn_scalar": 16}),
}
"""Configuration class and what it needs besides the sizes."""


def family_config(transformers: ModuleType, name: str) -> Any:
    """The configuration of a small model of a family."""
    class_name, changes = FAMILIES[name]
    return getattr(transformers, class_name)(**{**_SIZES, **changes})
