"""Peak memory of one device: what is kept per token and layer, per parameter, and for the exchange.

Activations follow what a Llama-type block keeps for its backward pass with a FlashAttention kernel: inputs of both
norms and of both projections behind them, queries, keys and values, the output with its log-sum-exp, gate, up and their
product. With dropout its masks come on top (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from steelyard.cost.profiles import DeviceProfile
from steelyard.domain.degrees import Degrees, Sharding
from steelyard.domain.model_shape import ModelShape

Recompute: TypeAlias = Literal["none", "attention", "feed_forward", "products", "alternate", "token_wise", "full"]
"""What the backward pass computes again: nothing; the core attention of unfused kernels ("selective" of Korthikanti);
the feed-forward layer; every second matrix product and all element-wise work ("selective, op"
of torchtitan); every second layer whole; token-wise layers but not attention; every layer whole."""
Verdict: TypeAlias = Literal["fits", "tight", "does not fit"]

CHUNKED_SHARE = 1 / 16
"""Of the logits, what a loss computed chunk by chunk holds at once: sixteen chunks (assumed)."""
LOGIT_BYTES = 10
"""Counted: logits in 16 bits, their copy in 32 bits for the loss, and the gradient of that."""


def activation_bytes(
    shape: ModelShape,
    *,
    tensor: int = 1,
    sequence_parallel: bool = True,
    recompute: Recompute = "none",
    unfused_context: int = 0,
    fused: bool = True,
    element_bytes: int = 2,
) -> float:
    """Bytes kept per token of one layer, averaged over layers.

    Args:
        unfused_context: sequence length whose score matrices are kept (unfused kernels); 0: a fused kernel.
        fused: element-wise kernels are fused; else the gate's activation, unrotated queries and keys and the norms'
            32-bit inputs are kept too.
    """
    e, h = element_bytes, shape.hidden
    q, k, f = shape.query_width / tensor, max(shape.key_width / tensor, shape.head_size), shape.ffn / tensor
    whole = h / tensor if sequence_parallel else h  # what tensor parallelism alone does not split
    norms = 4 * whole * e
    attention = (2 * q + 2 * k) * e + 4 * shape.heads / tensor
    feed_forward = (3 if shape.gated else 2) * f * e
    if shape.dropout:  # masks of a byte per element, after attention and after the feed-forward layer
        norms += 2 * whole
    if not fused and not shape.dropout:
        norms += 2 * whole * 4 if e < 4 else 0.0  # in 32 bits they are the layer's own inputs
        attention += (q + k) * e
        feed_forward += f * e
    scores = 5 * shape.heads / tensor * unfused_context if recompute != "attention" else 0.0
    everything = norms + attention + feed_forward + scores
    block_input = whole * e
    if recompute == "full":
        return block_input
    if recompute == "alternate":
        return (everything + block_input) / 2
    if recompute == "feed_forward":  # its input stays, the second norm's output
        return everything - feed_forward
    if recompute == "products":  # of q, k, v, output, gate, up and down every second result stays, and attention's
        return block_input + (2 * q + k) * e + 4 * shape.heads / tensor + (f + h / tensor) * e
    if recompute == "token_wise":  # attention's output and log-sum-exp stay; queries, keys and values are made again
        return block_input + q * e + 4 * shape.heads / tensor
    return everything


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device, by what they hold.

    Attributes:
        parameters, gradients, optimizer, gathered, activations, logits, exchange: what is live at the peak.
        reserved: driver, libraries and communication buffers.
        fragmentation_low, fragmentation_high: what the allocator cannot use, as a share of what is live.
        capacity: memory of the device.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    exchange: float
    reserved: float
    fragmentation_low: float
    fragmentation_high: float
    capacity: float

    @property
    def live(self) -> float:
        """Everything that must be there at the peak."""
        parts = (self.parameters, self.gradients, self.optimizer, self.gathered, self.activations, self.logits)
        return sum(parts) + self.exchange

    @property
    def held(self) -> float:
        """What the allocator holds: live and fragmented, without driver and libraries."""
        return self.expected - self.reserved

    @property
    def low(self) -> float:
        return self.live * (1 + self.fragmentation_low) + self.reserved

    @property
    def high(self) -> float:
        return self.live * (1 + self.fragmentation_high) + self.reserved

    @property
    def expected(self) -> float:
        """Between the two."""
        return (self.low + self.high) / 2

    @property
    def verdict(self) -> Verdict:
        """Whether the device's memory holds it: also with the larger fragmentation, only with the smaller, or not."""
        if self.high <= self.capacity:
            return "fits"
        return "tight" if self.low <= self.capacity else "does not fit"

    def parts(self) -> dict[str, float]:
        """Bytes by name, in the order in which a picture stacks them."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "gathered parameters": self.gathered,
            "activations": self.activations,
            "logits": self.logits,
            "exchange buffers": self.exchange,
            "reserved": self.reserved,
        }


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of parameters, gradients, optimizer state and gathered blocks of one device."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage: as even as possible, the first ones get what is left."""
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def stage_parameters(shape: ModelShape, degrees: Degrees, stage: int) -> float:
    """Parameters of one stage that one device of the tensor axis holds or shards."""
    held = stage_layers(shape.layers, degrees.stage)[stage] * shape.layer_parameters
    if stage == 0:
        held += shape.embedding_parameters
    if stage == degrees.stage - 1 and not (shape.tied_head and degrees.stage == 1):
        held += shape.embedding_parameters
    return held / degrees.tensor


def parameter_bytes(
    shape: ModelShape, degrees: Degrees, stage: int, *, sharding: Sharding, shards: int, mixed: bool = True
) -> ParameterBytes:
    """What parameters cost on a device of `stage`.

    Mixed precision: replicated 18 bytes each (2 + 4 gradient + 12 optimizer), optimizer sharded 6 + 12/shards, all
    sharded 16/shards and two gathered blocks. In one fp32 type: 16 in all. Fully sharded stages of a pipeline keep the
    gathered parameters and whole gradients from the first micro-batch to the last.

    Args:
        shards: ranks over which state is sharded.
    """
    held = stage_parameters(shape, degrees, stage)
    if sharding == "full":
        if degrees.stage > 1 and shards > 1:
            wide = 2 if mixed else 4
            return ParameterBytes(4 * held / shards, 4 * held, 8 * held / shards, wide * held)
        block = max(shape.layer_parameters, shape.embedding_parameters) / degrees.tensor
        gathered = 2 * (2 if mixed else 4) * block if shards > 1 else 0.0
        return ParameterBytes(4 * held / shards, 4 * held / shards, 8 * held / shards, gathered)
    weights, masters = (2.0, 12.0) if mixed else (4.0, 8.0)
    sharded = shards if sharding == "optimizer" else 1
    return ParameterBytes(weights * held, 4 * held, masters * held / sharded, 0.0)


def estimate(
    parameters: ParameterBytes, profile: DeviceProfile, *, activations: float, logits: float, exchange: float = 0.0
) -> MemoryEstimate:
    """Put the parts together for a device."""
    return MemoryEstimate(
        parameters=parameters.parameters,
        gradients=parameters.gradients,
        optimizer=parameters.optimizer,
        gathered=parameters.gathered,
        activations=activations,
        logits=logits,
        exchange=exchange,
        reserved=profile.reserved_bytes,
        fragmentation_low=profile.fragmentation_low,
        fragmentation_high=profile.fragmentation_high,
        capacity=profile.memory_bytes,
    )
