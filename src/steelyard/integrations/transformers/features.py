"""Which models are computed exactly, and what is refused when they are attached: by feature, never by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from steelyard.balance import Balancer, Kernel
from steelyard.domain.shapes import AttentionShape
from steelyard.errors import UsageError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def attention_shape(config: Any, element_bytes: int) -> AttentionShape:
    """Heads and head size that a model's configuration names."""
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return AttentionShape(heads, int(kv_heads), int(head_dim), element_bytes=element_bytes)


def check_features(model: nn.Module) -> None:
    """Refuse a model whose attention is another function than ours.

    Raises:
        UsageError: names the feature, where it was found, and what to change.
    """
    for feature, advice in _obstacles(model):
        raise UsageError(f"attach: {type(model).__name__} uses {feature}; {advice}")


def kernels(config: Any) -> list[Kernel]:
    """What the layers compute besides plain causal attention: one for each combination that occurs."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not layer_types and getattr(config, "use_sliding_window", True) is False:
        window = None
    sliding = "sliding_attention" in layer_types or (not layer_types and window is not None)
    full = "full_attention" in layer_types or not sliding
    softcap = getattr(config, "attn_logit_softcapping", None)
    return [Kernel(window=w, softcap=softcap) for w in ([None] if full else []) + ([window] if sliding else [])]


def check_kernels(config: Any, balancer: Balancer, shape: AttentionShape) -> dict[Kernel, str]:
    """The back end of each kernel of a model.

    Raises:
        UsageError: a sliding window or a soft cap that the chosen back end cannot compute.
    """
    found = {}
    for kernel in kernels(config):
        try:
            found[kernel] = balancer.check(kernel, shape)
        except UsageError as error:
            features = [
                text
                for text, value in (
                    (f"a sliding window (sliding_window={kernel.window})", kernel.window),
                    (f"a soft cap (attn_logit_softcapping={kernel.softcap})", kernel.softcap),
                )
                if value is not None
            ]
            raise UsageError(
                f"attach: the model uses {' and '.join(features) or 'plain attention'}: {error}"
            ) from error
    return found


def _obstacles(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(feature, advice) of everything that stands in the way."""
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        yield "cross attention (is_encoder_decoder=True)", "only decoders are balanced"
    if getattr(config, "sub_configs", None):
        parts = ", ".join(config.sub_configs)
        yield f"several models in one ({parts})", "attach its language model alone, e.g. attach(model.language_model)"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "bidirectional attention", "only causal attention is balanced"
    for name in _DROPOUTS:
        holders = (config, *model.modules())
        value = next((v for h in holders if isinstance(v := getattr(h, name, 0.0), float) and v > 0), 0.0)
        if value:
            yield f"attention dropout ({name}={value})", f"build the model with {name}=0: no kernel drops weights"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if strange := sorted(str(t) for t in layer_types - _LAYER_TYPES):
        yield f"layers of type {', '.join(strange)}", f"only {' and '.join(sorted(_LAYER_TYPES))} layers are balanced"
    if getattr(config, "kv_lora_rank", None):
        yield "latent attention (kv_lora_rank)", "keys and values have different sizes there, which is not supported"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "absolute") != "absolute":
        yield "a position bias in the scores", "only attention without a bias is balanced"
