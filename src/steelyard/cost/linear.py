"""Token-wise work: matrix products of a layer, what goes through memory between them, the head and the optimizer.

Forward, per layer and T tokens: 2T[h(q + 2k) + q·h + 3hf] operations, with q and k the channels of queries and keys
(2hf without a gate); backward twice that. The head has 2hVT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steelyard.cost.profiles import DeviceProfile, Precision
from steelyard.domain.arrays import FloatArray
from steelyard.domain.model_shape import ModelShape

ELEMENT_BYTES = 2


def before_attention_flops(shape: ModelShape, tokens: float) -> float:
    """Query, key and value projections of one layer, forward."""
    return 2 * tokens * shape.hidden * (shape.query_width + 2 * shape.key_width)


def after_attention_flops(shape: ModelShape, tokens: float) -> float:
    """Output projection and feed-forward layer, forward."""
    return 2 * tokens * shape.hidden * (shape.query_width + (3 if shape.gated else 2) * shape.ffn)


def layer_flops(shape: ModelShape, tokens: float) -> float:
    """Matrix products of one layer, forward."""
    return before_attention_flops(shape, tokens) + after_attention_flops(shape, tokens)


def head_flops(shape: ModelShape, tokens: float) -> float:
    """The output head, forward."""
    return 2 * tokens * shape.hidden * shape.vocab


def model_flops(shape: ModelShape, tokens: float, pairs: float) -> float:
    """Operations of one training step over `tokens` tokens and `pairs` (query, key) pairs: forward and twice backward.

    Recomputation is not counted (model FLOPs). With causal pairs this is the causal count; with the squares of the
    document lengths, the full one.
    """
    attention = 4 * shape.query_width * pairs * shape.layers
    return 3 * (shape.layers * layer_flops(shape, tokens) + head_flops(shape, tokens) + attention)


@dataclass(frozen=True, eq=False)
class TokenWiseCost:
    """Seconds of one layer's token-wise forward pass on one device.

    Attributes:
        before_s, after_s: before and after core attention.
        feed_forward_s: of the latter, the feed-forward layer's products and activation.
    """

    before_s: FloatArray
    after_s: FloatArray
    feed_forward_s: FloatArray


def _product_s(
    tokens: FloatArray, rows: float, columns: float, profile: DeviceProfile, precision: Precision
) -> FloatArray:
    """A product of (tokens × rows) by (rows × columns)."""
    efficiency = profile.gemm_efficiency_fp8 if precision == "fp8" else profile.gemm_efficiency
    smallest = np.minimum(np.maximum(tokens, 1.0), min(rows, columns))
    rate = profile.peak_flops(precision) * efficiency * smallest / (smallest + profile.gemm_half_size)
    return 2 * tokens * (rows * columns) / rate


def token_wise_cost(
    shape: ModelShape,
    tokens: FloatArray,
    profile: DeviceProfile,
    *,
    tensor: int = 1,
    precision: Precision = "bf16",
    sequence_parallel: bool = True,
    fused: bool = True,
    element_bytes: int = ELEMENT_BYTES,
) -> TokenWiseCost:
    """One layer's forward pass for `tokens` (any shape) on each device of a tensor-parallel group.

    Args:
        fused: norms, rotation, activation and residuals run in few kernels.
    """
    h, q, k, f = shape.hidden, shape.query_width, shape.key_width, shape.ffn
    local_k = max(k / tensor, shape.head_size)  # key heads are repeated where there are fewer than devices
    before = _product_s(tokens, h, q / tensor + 2 * local_k, profile, precision)
    output = _product_s(tokens, q / tensor, h, profile, precision)
    feed_forward = _product_s(tokens, h, (2 if shape.gated else 1) * f / tensor, profile, precision)
    feed_forward = feed_forward + _product_s(tokens, f / tensor, h, profile, precision)
    # Norms and residuals are split over the tensor axis only with sequence parallelism; the rest always is.
    split = 1 / tensor if sequence_parallel else 0.5 + 0.5 / tensor
    transfers = profile.token_wise_transfers if fused else profile.eager_transfers
    if shape.gated and not fused:  # SiLU and product are two kernels: five passes of f, where GELU has two of 4h
        transfers += max(0.0, 5 * f / h - 2 * 4)
    if precision == "fp8":
        transfers += profile.fp8_transfers
    through_memory = transfers * h * tokens * element_bytes * split / profile.memory_bytes_per_s
    after = output + feed_forward + 0.75 * through_memory
    return TokenWiseCost(before + 0.25 * through_memory, after, feed_forward + 0.5 * through_memory)


def head_s(
    shape: ModelShape, tokens: FloatArray, profile: DeviceProfile, *, tensor: int = 1, precision: Precision = "bf16"
) -> FloatArray:
    """Forward of head and loss: the product, and the logits five times through memory, 4 bytes each: written, read for
    the maximum, for the sum and for the loss, and their gradient (counted, not measured)."""
    precision = "bf16" if precision == "fp8" else precision  # heads stay in the wider type
    product = _product_s(tokens, shape.hidden, shape.vocab / tensor, profile, precision)
    return product + 5 * 4 * tokens * (shape.vocab / tensor) / profile.memory_bytes_per_s


def optimizer_s(parameters: float, profile: DeviceProfile) -> float:
    """AdamW over `parameters` that live on one device."""
    return parameters * profile.optimizer_bytes / profile.memory_bytes_per_s
