"""The shape of a decoder as cost models see it: how many layers, how wide, how many parameters.

`model.config.ModelConfig` describes the decoder that we can run; this describes any decoder whose cost we can estimate,
also those with a plain (non-gated) feed-forward layer, with dropout masks or with an untied head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType

from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError


@dataclass(frozen=True)
class ModelShape:
    """Widths of a decoder-only model.

    Attributes:
        name: how it is called in reports.
        layers, hidden, heads, kv_heads, ffn, vocab: sizes; `ffn` is the inner width of the feed-forward layer.
        head_dim: size of a head; 0 means hidden / heads.
        gated: the feed-forward layer has a gate (SwiGLU): three matrices instead of two.
        tied_head: the output head is the embedding's matrix.
        dropout: masks of dropout are kept for the backward pass (GPT-3 class models of 2020 to 2022).

    Raises:
        UsageError: a size is not positive, or sizes do not divide each other.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    gated: bool = True
    tied_head: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            if getattr(self, size) < 1:
                raise UsageError(f"model {self.name}: {size}={getattr(self, size)}, expected a positive number")
        if self.heads % self.kv_heads:
            fit = max(k for k in range(1, self.kv_heads + 1) if self.heads % k == 0)
            raise UsageError(
                f"model {self.name}: kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"nearest: kv_heads={fit}"
            )
        if not self.head_dim and self.hidden % self.heads:
            raise UsageError(
                f"model {self.name}: hidden={self.hidden} is not a multiple of heads={self.heads}; set head_dim"
            )

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Channels of all key heads (those of the values are as many)."""
        return self.kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * (self.query_width + 2 * self.key_width) + self.query_width * self.hidden
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; a tied head counts once."""
        ends = (1 if self.tied_head else 2) * self.embedding_parameters + self.hidden
        return self.layers * self.layer_parameters + ends

    def attention(self, element_bytes: int = 2) -> AttentionShape:
        """The shape of its core attention."""
        return AttentionShape(self.heads, self.kv_heads, self.head_size, element_bytes)

    def with_layers(self, layers: int) -> ModelShape:
        return replace(self, layers=layers)


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, heads, 4 * hidden, vocab, gated=False, tied_head=True, dropout=True)


_SHAPES = (
    ModelShape("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
    ModelShape("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
    ModelShape("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
    ModelShape("llama-34b", 48, 8192, 64, 8, 22016, 32000),
    ModelShape("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
    ModelShape("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
    ModelShape("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
    ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tied_head=True),
    ModelShape("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    ModelShape("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
    ModelShape("nemotron4-15b", 32, 6144, 48, 8, 24576, 256000, gated=False),
    ModelShape("nemotron4-340b", 96, 18432, 96, 8, 73728, 256000, gated=False),
    _gpt("gpt3-175b", 96, 12288, 96),
)
_ALIASES = {
    "llama-8b": "llama3-8b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "llama3-34b": "llama-34b",
}

MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {s.name: s for s in _SHAPES}
    | {alias: next(s for s in _SHAPES if s.name == name) for alias, name in _ALIASES.items()}
)
"""Built-in shapes by name: Llama 2 and 3 (arXiv 2307.09288, 2407.21783), Code Llama 34B (2308.12950), Qwen3
(2505.09388), Nemotron-4 (2402.16819, 2406.11704), GPT-3 175B (2005.14165)."""


def gpt_shape(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelShape:
    """A GPT-3 class model: multi-head attention, feed-forward of four times the width, tied head, dropout."""
    return _gpt(name, layers, hidden, heads, vocab)


def model_shape(name: str) -> ModelShape:
    """The built-in shape called `name`.

    Raises:
        UsageError: there is none; names the nearest.
    """
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    close = get_close_matches(name.lower(), MODEL_SHAPES, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(MODEL_SHAPES)}"
    raise UsageError(f"no built-in model {name!r}; {hint} (or give the path of a Transformers config.json)")
