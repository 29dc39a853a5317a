"""Transformers `config.json` to `ModelConfig` and back, as plain JSON values (importing `transformers` loads torch).

Understands what Transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) write. Keys that change the
function in a way the decoder does not compute are refused; keys that do not (cache, special tokens) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What Transformers assumes where a key is missing. A missing size is refused instead: it would be a 7B model's.
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_DEFAULT_WINDOW = 4096
_DEFAULT_QWEN3_HEAD_DIM = 128
_DEFAULT_THETA = 10_000.0


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UsageError(
            f"config.json: model_type={model_type!r} is not supported; expected one of {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(model_type, values)
    heads = _size(values, "num_attention_heads")
    default_head_dim = _DEFAULT_QWEN3_HEAD_DIM if model_type == "qwen3" and "head_dim" not in values else None
    if values.get("num_key_value_heads") is None and model_type != "llama" and "num_key_value_heads" not in values:
        raise UsageError(f"config.json: num_key_value_heads is missing; state it (the default of {model_type} varies)")
    theta, scaling = _rope(values)
    return ModelConfig(
        vocab_size=_size(values, "vocab_size"),
        hidden_size=_size(values, "hidden_size"),
        layers=_size(values, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if values.get("num_key_value_heads") is None else _size(values, "num_key_value_heads"),
        head_dim=default_head_dim if values.get("head_dim") is None else _size(values, "head_dim"),
        ffn_size=_size(values, "intermediate_size"),
        max_positions=_size(values, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[model_type]),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(values, "rms_norm_eps", 1e-6),
        tied_head=bool(values.get("tie_word_embeddings", False)),
        attention_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        initializer_range=_number(values, "initializer_range", 0.02),
    )


def config_to_hf(config: ModelConfig, model_type: str | None = None) -> dict[str, object]:
    """See `ModelConfig.to_hf`."""
    fitting = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    model_type = model_type or fitting
    allowed = ("llama", "mistral") if fitting == "llama" else (fitting,)
    if model_type not in allowed:
        raise UsageError(
            f"model_type={model_type!r} cannot express this model (attention_bias={config.attention_bias}, "
            f"qk_norm={config.qk_norm}); expected {' or '.join(allowed)}"
        )
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    values: dict[str, object] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        # Transformers 4 reads these two and ignores the record above.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
        "tie_word_embeddings": config.tied_head,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
    }
    if model_type == "llama":
        values |= {"attention_bias": False, "mlp_bias": False}
    elif model_type == "qwen3":
        values |= {"attention_bias": False}
    if model_type != "llama":
        values |= {"sliding_window": None}
    if model_type in ("qwen2", "qwen3"):
        values |= {"use_sliding_window": False}
    return values


def _refuse_unsupported(model_type: str, values: Mapping[str, object]) -> None:
    expected: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "attention_dropout": (0, None),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
    }
    if model_type in ("qwen2", "mistral"):
        del expected["attention_bias"]  # these families have no such switch and ignore the key
    for key, allowed in expected.items():
        if key in values and values[key] not in allowed:
            raise UsageError(
                f"config.json: {key}={values[key]!r} is not supported; expected {allowed[0]!r} or no such key"
            )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if values.get(key):
            raise UsageError(
                f"config.json: {key}={values[key]!r}: mixtures of experts are not supported; use a dense model"
            )
    _refuse_window(model_type, values)


def _refuse_window(model_type: str, values: Mapping[str, object]) -> None:
    """A window that hides a key from some query within the model's context would be a different function."""
    layer_types = values.get("layer_types")
    if isinstance(layer_types, list):
        in_use = any(kind != "full_attention" for kind in layer_types)
    elif model_type == "mistral":
        in_use = True
    elif model_type in ("qwen2", "qwen3"):
        full_layers = _size(values, "max_window_layers", 28)
        in_use = bool(values.get("use_sliding_window", False)) and full_layers < _size(values, "num_hidden_layers")
    else:
        in_use = False
    window = values.get("sliding_window", _DEFAULT_WINDOW)
    if not in_use or window is None:
        return
    context = _size(values, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[model_type])
    if not isinstance(window, int) or window < context:
        origin = "" if "sliding_window" in values else " (the default of a missing key)"
        raise UsageError(
            f"config.json: sliding_window={window}{origin} is below "
            f"the context of {context} tokens, and windows are not supported; use a model without one, "
            'or set "sliding_window": null if the model was trained so'
        )


def _rope(values: Mapping[str, object]) -> tuple[float, RopeScaling | None]:
    """theta and scaling from `rope_parameters` (v5) or `rope_theta` and `rope_scaling` (v4)."""
    record: Any = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(record, Mapping):
        raise UsageError(f"config.json: rope_parameters={record!r}, expected a JSON object")
    theta = _number(record if record.get("rope_theta") is not None else values, "rope_theta", _DEFAULT_THETA)
    kind = record.get("rope_type", record.get("type", "default"))
    if record.get("partial_rotary_factor", 1) not in (1, None):
        raise UsageError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UsageError(
            f"config.json: rope type {kind!r} is not supported; expected 'default' or 'llama3' "
            "(remove the scaling if you train within the original context)"
        )
    context = record.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    return theta, RopeScaling(
        factor=_number(record, "factor"),
        low_freq_factor=_number(record, "low_freq_factor"),
        high_freq_factor=_number(record, "high_freq_factor"),
        original_max_positions=_size({"original_max_position_embeddings": context}, "original_max_position_embeddings"),
    )


def _size(values: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        given = "is missing" if value is None else f"is {value!r}"
        raise UsageError(f"config.json: {key} {given}; expected a positive whole number")
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        given = "is missing" if value is None else f"is {value!r}"
        raise UsageError(f"config.json: {key} {given}; expected a number")
    return float(value)
