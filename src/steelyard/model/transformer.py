"""A Llama-type decoder over one packed chunk, with core attention passed in.

Shape suffixes: T tokens of one chunk, C hidden size, N query heads, K key/value heads, H head size, V vocabulary.

The model does not know documents, ranks or plans. Documents show in two places only: positions that restart at 0, and
whatever the `core_attention` callable lets a query see. A chunk without a token runs like any other and gives every
parameter a zero gradient, so that a rank without data takes part in every collective of a step.
"""

from __future__ import annotations

from typing import Protocol, cast
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig
from steelyard.model.layers import Block, Embedding, RMSNorm, Rotary, RotaryTable
from steelyard.model.loss import linear_cross_entropy_sum


class CoreAttention(Protocol):
    """softmax(QKᵀ / √H) V of one chunk and layer. Who may see whom, and on which rank it is computed, is its secret."""

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int) -> Tensor:
        """out_TNH, in the dtype of q_TNH."""
        ...


class Head(nn.Module):
    """Final norm and output projection, to logits or straight to the summed loss."""

    def __init__(self, config: ModelConfig, weight_VC: nn.Parameter | None = None) -> None:
        """`weight_VC`: the embedding's parameter, to share it."""
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if weight_VC is None:
            weight_VC = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.weight = weight_VC

    def forward(self, hidden_TC: Tensor, labels_T: Tensor | None = None) -> Tensor:
        """With labels the *sum* of token cross-entropies, a scalar in fp32 (labels of −100 do not count; see
        `loss.linear_cross_entropy_sum`); without, logits_TV."""
        normed_TC = self.norm(hidden_TC)
        if labels_T is None:
            return F.linear(normed_TC, self.weight)
        return linear_cross_entropy_sum(normed_TC, self.weight, labels_T)

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """logits_TV of the last block's output."""
        logits_TV: Tensor = self(hidden_TC)
        return logits_TV


class Decoder(nn.Module):
    """Embedding, blocks, head. Walk it with `forward`, or drive `rotary`, `embedding`, `blocks` and `head` yourself
    (as the ping-pong walker does): `forward` does nothing that its parts do not."""

    def __init__(self, config: ModelConfig, *, checkpoint_token_wise: bool = False) -> None:
        """Parameters are uninitialised: call `init_weights` or load some.

        Args:
            checkpoint_token_wise: recompute the token-wise halves of each block in the backward pass. Core attention
                stays outside: it is never computed, and its transfers never made, twice.
        """
        super().__init__()
        self.config = config
        self.rotary = Rotary(config)
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, recompute=checkpoint_token_wise) for _ in range(config.layers))
        self.head = Head(config, self.embedding.weight if config.tied_head else None)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, core_attention: CoreAttention, labels_T: Tensor | None = None
    ) -> Tensor:
        """One chunk through the model.

        Args:
            tokens_T: int64 ids.
            positions_T: int64, 0 at the first token of every document (or what a cut document continues with).
            core_attention: called once per layer, in order.
            labels_T: int64 next tokens, shifted per document; −100 does not count.

        Returns:
            logits_TV, or with labels the sum of token losses (fp32 scalar, part of the graph even without a token).

        Raises:
            UsageError: the three are not int64 vectors of one length, or a token id is outside the vocabulary.
        """
        check_chunk(tokens_T, positions_T, labels_T)
        rope: RotaryTable = self.rotary(positions_T)
        x_TC: Tensor = self.embedding(tokens_T)
        for layer, module in enumerate(self.blocks):
            block = cast(Block, module)
            q_TNH, k_TKH, v_TKH = block.before_attention(x_TC, rope)
            x_TC = block.after_attention(x_TC, core_attention(q_TNH, k_TKH, v_TKH, layer))
        result: Tensor = self.head(x_TC, labels_T)
        return result

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fill all parameters from `generator` (a CPU one), the same on every rank and device.

        Matrices are normal with `initializer_range`, those that write into the residual stream (output, down) are
        smaller by √(2 · layers) as in GPT-2; norms are 1, biases 0. The generator is advanced by one draw and each
        parameter gets a stream of its own by its name, so a part of the model starts like the same part of the whole.
        """
        base = int(torch.randint(2**62, (), generator=generator))
        residual_std = self.config.initializer_range / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                is_residual = name.endswith(("output.weight", "down.weight"))
                own = torch.Generator().manual_seed(base ^ crc32(name.encode()))
                std = residual_std if is_residual else self.config.initializer_range
                parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=own))


def check_chunk(tokens_T: Tensor, positions_T: Tensor, labels_T: Tensor | None) -> None:
    """Refuse a chunk whose parts do not fit each other.

    Raises:
        UsageError: names the tensor, its shape and dtype, and what was expected.
    """
    named = {"tokens": tokens_T, "positions": positions_T}
    if labels_T is not None:
        named["labels"] = labels_T
    for name, tensor in named.items():
        if tensor.dim() != 1 or tensor.dtype != torch.int64 or len(tensor) != len(tokens_T):
            raise UsageError(
                f"{name}: shape {tuple(tensor.shape)}, {tensor.dtype}; expected an int64 vector as long as tokens "
                f"({tuple(tokens_T.shape)}), packed without a batch dimension"
            )
