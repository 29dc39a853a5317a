"""The two functions that Transformers calls in the place of its own: attention, and the mask for it.

Shapes: B rows of the batch, L their length, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steelyard.balance import Kernel
from steelyard.errors import UsageError
from steelyard.integrations.transformers.batch_plan import ForwardPass

NAME = "steelyard"
"""What the attention is registered as: `model.config._attn_implementation` while a model is attached."""

_NOT_OURS = ("position_bias", "head_mask", "alibi", "sinks", "indices", "block_indices")
"""What some models hand over that changes the result: biases, sinks of their own for every token, chosen keys only."""

_NO_MATTER = frozenset(
    {
        # Where documents are was read from the batch (`documents`).
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "seq_idx", "token_type_ids",
        # Of the model around attention: losses, what is returned, caches (which are refused when the model is called).
        "labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict", "output_attentions",
        "output_hidden_states", "output_router_logits", "use_cache", "cache_position", "past_key_values",
        "past_key_value", "layer_idx", "input_ids", "hidden_state", "position_embeddings", "special_tokens_mask",
        # How a kernel computes, not what.
        "deterministic",
    }
)  # fmt: skip
"""What reaches the layers and does not change what attention computes. Anything else that is given is refused: what we
do not know may change the result."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    steelyard_plan: ForwardPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in each layer: q (B, N, L, H), k and v (B, K, L, H) to (B, L, N, H).

    `s_aux` are attention sinks (GPT-OSS): (N,) logits of one more key per head that takes weight and has no value.

    Raises:
        UsageError: the call asks for another function than the plan's, or comes from a model that is not attached.
    """
    if not isinstance(steelyard_plan, ForwardPass):
        raise UsageError(
            f'attention "{NAME}" was called without a plan: attach the model and call it as a whole; one that drops'
            " unknown keywords on the way to its layers cannot be attached"
        )
    if dropout:
        raise UsageError(f"attention dropout={dropout}: no kernel drops weights; build the model with dropout 0")
    if attention_mask is not None:
        raise UsageError("attention: a mask reached the layer that is not one of padding; it cannot be honoured")
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise UsageError(f"attention of {type(module).__name__} is not causal; only causal attention is balanced")
    for name in _NOT_OURS:
        if kwargs.get(name) is not None:
            raise UsageError(
                f"attention: {name} is given, which is not computed; train this model with its own attention"
            )
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _NO_MATTER)
    if unknown:
        raise UsageError(
            f"attention of {type(module).__name__}: {', '.join(unknown)} is given, and it is not known whether that "
            "changes the result; leave it out of the batch, or, where the model adds it, train with its own attention"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as torch does for its own attention operators
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    layer = getattr(module, "layer_idx", None)
    kernel = Kernel(scaling, sliding_window, softcap)
    return steelyard_plan.attend(query, key, value, layer, kernel, s_aux), None


def check_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool | None = None,
    **kwargs: Any,
) -> None:
    """What Transformers calls for the mask: there is none, since who sees whom is in the plan. A mask that is not
    causal within documents is refused here; padding was read from the batch (`documents`).

    Raises:
        UsageError: a mask of the model's or the user's own.
    """
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        raise UsageError(
            "attention mask: the model adds a mask of its own or is bidirectional; only causal is balanced"
        )
    if q_length != kv_length:
        raise UsageError(
            f"attention mask for {q_length} queries and {kv_length} keys: generation with a cache is not balanced; put "
            "it into `with attached.detached():`"
        )
    if allow_is_causal_skip is False and mask_function is not None and q_length > 1:
        at = torch.arange(q_length - 1, device=kwargs.get("device"))
        zero = torch.zeros_like(at)
        if bool(torch.as_tensor(mask_function(zero, zero, at, at + 1)).any()):
            raise UsageError("attention mask: some tokens see later ones (a bidirectional prefix or image?)")
