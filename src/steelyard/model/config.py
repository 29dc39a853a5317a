"""The shape of a Llama-type decoder, as configuration files, Hugging Face folders and cost models see it.

Torch-free. Covers the Llama, Qwen2, Qwen3 and Mistral families: they differ in a bias, a norm on queries and keys and
the scaling of the rotary frequencies. What a family can also switch on and this decoder does not compute (a sliding
window in use, experts, other rotary scalings, dropout, ...) is refused by name when the configuration is read: a model
that runs is the model that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError


@dataclass(frozen=True)
class RopeScaling:
    """Stretches the slow rotary frequencies as Llama 3.1 does (rope type `llama3`), for a longer context.

    Wavelengths above `original_max_positions / low_freq_factor` are stretched by `factor`, those below
    `original_max_positions / high_freq_factor` are left alone, and between the two it is interpolated.

    Raises:
        UsageError: a value is not positive, or `high_freq_factor` is not above `low_freq_factor`.
    """

    factor: float = 8.0
    """How many times longer the slowest wavelengths become."""
    low_freq_factor: float = 1.0
    """Wavelengths longer than the original context divided by this are stretched fully."""
    high_freq_factor: float = 4.0
    """Wavelengths shorter than the original context divided by this stay as they are."""
    original_max_positions: int = 8192
    """Context the model was first trained with, in tokens."""

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            _require_positive("rope_scaling", name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise UsageError(
                f"rope_scaling: high_freq_factor={self.high_freq_factor} is not above "
                f"low_freq_factor={self.low_freq_factor}; swap or correct them"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder. The defaults are a small byte-level model.

    Raises:
        UsageError: a size is not positive, sizes do not divide each other, or a combination does not exist.
    """

    vocab_size: int = 320
    """Number of token ids; the default holds 256 bytes and room for special tokens."""
    hidden_size: int = 256
    """Width of the residual stream."""
    layers: int = 4
    """Number of decoder blocks."""
    heads: int = 8
    """Query heads per block."""
    kv_heads: int = 4
    """Key/value heads per block; must divide `heads` (equal: multi-head, 1: multi-query attention)."""
    head_dim: int | None = None
    """Size of one head; must be even. Unset: hidden_size / heads."""
    ffn_size: int = 768
    """Inner width of the SwiGLU feed-forward layer."""
    max_positions: int = 8192
    """Context: the longest chunk or document, in tokens, the model is meant for."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's stretching of the rotary frequencies; unset: none."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    tied_head: bool = False
    """The output head shares the embedding's weight."""
    attention_bias: bool = False
    """The query, key and value projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """Queries and keys are RMS-normed per head before the rotation (Qwen3)."""
    initializer_range: float = 0.02
    """Standard deviation of freshly initialised matrices."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "ffn_size", "max_positions")
        for name in (*sizes, "rope_theta", "norm_eps"):
            _require_positive("model", name, getattr(self, name))
        for name in sizes:
            if not isinstance(getattr(self, name), int):
                raise UsageError(f"model: {name}={getattr(self, name)!r}, expected a whole number")
        if self.initializer_range < 0:
            raise UsageError(f"model: initializer_range={self.initializer_range}, expected zero or more")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"model: kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                "every key/value head must serve the same number of query heads"
            )
        if self.head_dim is None and self.hidden_size % self.heads:
            raise UsageError(
                f"model: hidden_size={self.hidden_size} is not a multiple of heads={self.heads}; "
                "change one of them or set head_dim"
            )
        if self.head_dim is not None:
            _require_positive("model", "head_dim", self.head_dim)
        if self.head_size % 2:
            raise UsageError(
                f"model: a head has {self.head_size} dimensions; the rotary embedding turns pairs, so make "
                "head_dim (or hidden_size / heads) even"
            )
        if self.attention_bias and self.qk_norm:
            raise UsageError(
                "model: attention_bias and qk_norm are both set; no supported family has both (Qwen2 has the bias, "
                "Qwen3 the norm), so unset one"
            )

    @property
    def head_size(self) -> int:
        """Dimensions of one head: `head_dim`, or hidden_size / heads where that is unset."""
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim

    def attention_shape(self, element_bytes: int = 2) -> AttentionShape:
        """Core attention of one layer with elements of `element_bytes` bytes, as planner and cost model take it."""
        return AttentionShape(self.heads, self.kv_heads, self.head_size, element_bytes)

    @property
    def block_matrix_elements(self) -> int:
        """Elements of all matrices of one block (projections and feed-forward): one multiply-add per token each."""
        attention_width = (2 * self.heads + 2 * self.kv_heads) * self.head_size
        return self.hidden_size * (attention_width + 3 * self.ffn_size)

    @property
    def parameter_count(self) -> int:
        """Trained parameters; a tied head is counted once."""
        vectors = 2 * self.hidden_size
        if self.attention_bias:
            vectors += (self.heads + 2 * self.kv_heads) * self.head_size
        if self.qk_norm:
            vectors += 2 * self.head_size
        matrices = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.layers * (self.block_matrix_elements + vectors) + matrices + self.hidden_size

    @property
    def token_wise_flops_per_token(self) -> int:
        """Forward flops of all token-wise layers and the head for one token (matrix products; backward: twice)."""
        return 2 * (self.layers * self.block_matrix_elements + self.vocab_size * self.hidden_size)

    @property
    def attention_flops_per_pair(self) -> int:
        """Forward flops of core attention of all layers for one causal pair (QKᵀ and PV; backward: twice)."""
        return 4 * self.layers * self.heads * self.head_size

    def training_flops(self, tokens: int, pairs: int) -> int:
        """Model flops of forward and backward for `tokens` tokens that make `pairs` causal pairs: what MFU counts.

        Recomputation (checkpointing, the second QKᵀ of an attention backward) is work done, not model flops, and is
        left out, as in PaLM (Chowdhery et al. 2022, appendix B); unlike there, pairs above the diagonal do not count.
        """
        return 3 * (tokens * self.token_wise_flops_per_token + pairs * self.attention_flops_per_pair)

    def inverse_frequencies(self) -> list[float]:
        """Rotary angle per position of each of the head_size / 2 pairs of dimensions, after scaling.

        The double-precision twin of what the model computes in fp32 on its device.
        """
        half = self.head_size // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        if self.rope_scaling is None:
            return plain
        scaling = self.rope_scaling
        span = scaling.high_freq_factor - scaling.low_freq_factor
        scaled = []
        for frequency in plain:
            turns = scaling.original_max_positions * frequency / (2 * math.pi)
            kept = min(max((turns - scaling.low_freq_factor) / span, 0.0), 1.0)
            scaled.append(frequency * (kept + (1 - kept) / scaling.factor))
        return scaled

    @classmethod
    def from_hf(cls, values: Mapping[str, object]) -> ModelConfig:
        """Read a Transformers `config.json` of model type llama, mistral, qwen2 or qwen3 (v4 and v5 spellings).

        Raises:
            UsageError: another model type, a missing key, or a feature this decoder does not compute.
        """
        from steelyard.model.hf_config import config_from_hf

        return config_from_hf(values)

    def to_hf(self, model_type: str | None = None) -> dict[str, object]:
        """The `config.json` with which `transformers` builds the same function (without dtype and special tokens).

        `model_type` unset picks qwen3 with `qk_norm`, qwen2 with `attention_bias`, else llama.

        Raises:
            UsageError: `model_type` cannot express this model.
        """
        from steelyard.model.hf_config import config_to_hf

        return config_to_hf(self, model_type)


def _require_positive(record: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise UsageError(f"{record}: {name}={value!r}, expected a positive number")
