"""ModelConfig: what is refused, what is derived, and Transformers' config.json in both directions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig, RopeScaling
from steelyard.model.transformer import Decoder

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"hidden_size": -8}, "hidden_size=-8"),
        ({"ffn_size": 1.5}, "ffn_size=1.5"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"initializer_range": -1.0}, "initializer_range=-1.0"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads=4 does not divide heads=6"),
        ({"hidden_size": 250}, "hidden_size=250 is not a multiple of heads=8"),
        ({"head_dim": 7}, "7 dimensions"),
        ({"hidden_size": 24}, "3 dimensions"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"attention_bias": True, "qk_norm": True}, "attention_bias and qk_norm"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        ModelConfig(**changes)  # type: ignore[arg-type]


def test_rope_scaling_is_checked() -> None:
    with pytest.raises(UsageError, match="factor=0"):
        RopeScaling(factor=0)
    with pytest.raises(UsageError, match=r"high_freq_factor=1\.0 is not above"):
        RopeScaling(low_freq_factor=1.0, high_freq_factor=1.0)


def test_attention_shape() -> None:
    assert ModelConfig(hidden_size=64, heads=4, kv_heads=2).attention_shape(4) == AttentionShape(4, 2, 16, 4)
    assert ModelConfig(hidden_size=64, heads=4, kv_heads=2, head_dim=32).attention_shape() == AttentionShape(
        4, 2, 32, 2
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": True}, {"attention_bias": True}, {"qk_norm": True}, {"head_dim": 24}, {"kv_heads": 1}],
)
def test_parameter_count_is_that_of_the_model(changes: dict[str, object], make_model: Callable[..., Decoder]) -> None:
    model = make_model(**changes)
    assert model.config.parameter_count == sum(p.numel() for p in model.parameters())


def test_flops_of_a_published_shape() -> None:
    """Llama 3 8B: 8.03 G parameters, of which all but embedding and norms work on each token; 2 flops each."""
    config = ModelConfig(
        vocab_size=128_256, hidden_size=4096, layers=32, heads=32, kv_heads=8, ffn_size=14_336, max_positions=8192
    )
    assert config.parameter_count == 8_030_261_248
    assert config.token_wise_flops_per_token == 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    assert config.attention_flops_per_pair == 4 * 32 * 4096
    assert config.training_flops(10, 7) == 30 * config.token_wise_flops_per_token + 21 * 4 * 32 * 4096


def test_from_hf_reads_both_spellings() -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": None, "rms_norm_eps": 1e-5}
    new = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rms_norm_eps": 1e-5}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(old).rope_theta == 5e5
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 64}
    old["rope_scaling"] = {"type": "llama3", **scaling}
    new["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(old).rope_scaling == RopeScaling(4.0, 1.0, 2.0, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"tied_head": True, "head_dim": 16},
        {"attention_bias": True},
        {"qk_norm": True, "rope_theta": 1e6},
        {"rope_scaling": RopeScaling(4.0, 1.0, 2.0, 64), "norm_eps": 1e-6},
    ],
)
def test_to_hf_and_back(changes: dict[str, object]) -> None:
    config = ModelConfig(**changes)  # type: ignore[arg-type]
    values = config.to_hf()
    new_spelling = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling")}
    old_spelling = {key: value for key, value in values.items() if key != "rope_parameters"}
    for written in (values, new_spelling, old_spelling):
        assert asdict(ModelConfig.from_hf(written)) == asdict(replace(config, head_dim=config.head_size))


def test_to_hf_refuses_a_family_that_cannot_say_it() -> None:
    assert ModelConfig().to_hf("mistral")["model_type"] == "mistral"
    with pytest.raises(UsageError, match="expected qwen3"):
        ModelConfig(qk_norm=True).to_hf("llama")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": "default"}, "expected a JSON object"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"model_type": "mistral", "sliding_window": 256}, "sliding_window=256"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "default of a missing key"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "window=64",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "=64"),
    ],
)
def test_from_hf_refuses_what_it_does_not_compute(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 8192},
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    ],
)
def test_a_window_that_hides_nothing_is_no_reason_to_refuse(changes: dict[str, object]) -> None:
    assert ModelConfig.from_hf({**LLAMA, **changes}).layers == 2


def test_configuration_does_not_load_torch() -> None:
    code = (
        "import sys; from steelyard.model.config import ModelConfig; c = ModelConfig(); ModelConfig.from_hf(c.to_hf());"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
