"""The token-wise layers of a decoder block, on packed tokens without a batch dimension.

Shape suffixes: T tokens of one chunk, C hidden size, N query heads, K key/value heads, H head size, P = H / 2 pairs of
dimensions the rotary embedding turns, F feed-forward size.

A block is two ordinary modules with core attention between them, so that sharding, checkpointing and the ping-pong
walker can take each on its own. Everything here treats rows independently; documents exist only through positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steelyard.errors import UsageError
from steelyard.model.config import ModelConfig


class RotaryTable:
    """Cosines and sines of shape (T, P) in fp32, one row per token.

    Deliberately neither a tuple nor a dataclass: FSDP2's mixed precision looks into those and rounds the tensors that
    it finds among a module's inputs.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos_TP: Tensor, sin_TP: Tensor) -> None:
        self.cos = cos_TP
        self.sin = sin_TP


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021) in the split-half layout of Transformers: i turns with i + P.

    Frequencies are computed in fp32 in every forward (P numbers) instead of being kept in a buffer: a buffer would be
    rounded by `model.bfloat16()` and lost by building on the meta device.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling

    def frequencies(self, device: torch.device) -> Tensor:
        """Angle per position of each pair of dimensions: (P,) fp32."""
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32, device=device) / self.head_size
        frequency_P = 1.0 / (self.theta**exponents)
        if self.scaling is None:
            return frequency_P
        turns_P = self.scaling.original_max_positions * frequency_P / (2 * torch.pi)
        span = self.scaling.high_freq_factor - self.scaling.low_freq_factor
        kept_P = ((turns_P - self.scaling.low_freq_factor) / span).clamp(0.0, 1.0)
        return frequency_P * kept_P + frequency_P / self.scaling.factor * (1 - kept_P)

    @torch.no_grad()
    def forward(self, positions_T: Tensor) -> RotaryTable:
        """Tables for int64 positions that restart at 0 in every document; once per chunk, shared by all layers."""
        with torch.autocast(positions_T.device.type, enabled=False):
            angles_TP = positions_T[:, None].float() * self.frequencies(positions_T.device)
            return RotaryTable(angles_TP.cos(), angles_TP.sin())


def rotate(x_TNH: Tensor, rope: RotaryTable) -> Tensor:
    """Turn every head by its token's angles, in fp32 at least; same dtype and shape as `x_TNH`, contiguous."""
    cos_T1P, sin_T1P = rope.cos[:, None], rope.sin[:, None]
    a_TNP, b_TNP = x_TNH.chunk(2, dim=-1)
    turned = torch.cat((a_TNP * cos_T1P - b_TNP * sin_T1P, b_TNP * cos_T1P + a_TNP * sin_T1P), dim=-1)
    return turned.to(x_TNH.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) × weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`; the statistics are computed in fp32 at least."""
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Embedding(nn.Module):
    """Token ids to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, tokens_T: Tensor) -> Tensor:
        """int64 ids to x_TC.

        Raises:
            UsageError: an id outside the vocabulary (checked on CPU; a device would have to wait for the answer).
        """
        if tokens_T.device.type == "cpu" and len(tokens_T):
            low, high = (int(bound) for bound in torch.aminmax(tokens_T))
            if low < 0 or high >= len(self.weight):
                raise UsageError(
                    f"token id {low if low < 0 else high} is outside the model's vocabulary of {len(self.weight)} ids; "
                    "use the model's own tokenizer or raise vocab_size"
                )
        return F.embedding(tokens_T, self.weight)


class BeforeAttention(nn.Module):
    """Norm, query/key/value projections, optional norm per head, rotation: the block up to core attention."""

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        size, head_size = config.hidden_size, config.head_size
        self.head_size = head_size
        self.recompute = recompute
        self.norm = RMSNorm(size, config.norm_eps)
        self.query = nn.Linear(size, config.heads * head_size, bias=config.attention_bias)
        self.key = nn.Linear(size, config.kv_heads * head_size, bias=config.attention_bias)
        self.value = nn.Linear(size, config.kv_heads * head_size, bias=config.attention_bias)
        self.query_norm = RMSNorm(head_size, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(head_size, config.norm_eps) if config.qk_norm else None

    def forward(self, x_TC: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        """x_TC to q_TNH, k_TKH, v_TKH, contiguous; with `recompute` only x_TC is kept for the backward pass."""
        if self.recompute and torch.is_grad_enabled():
            result: tuple[Tensor, Tensor, Tensor] = checkpoint(
                self._compute, x_TC, rope, use_reentrant=False, preserve_rng_state=False
            )
            return result
        return self._compute(x_TC, rope)

    def _compute(self, x_TC: Tensor, rope: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        normed_TC = self.norm(x_TC)
        q_TNH = self.query(normed_TC).unflatten(-1, (-1, self.head_size))
        k_TKH = self.key(normed_TC).unflatten(-1, (-1, self.head_size))
        v_TKH = self.value(normed_TC).unflatten(-1, (-1, self.head_size))
        if self.query_norm is not None and self.key_norm is not None:
            q_TNH, k_TKH = self.query_norm(q_TNH), self.key_norm(k_TKH)
        # A copy, the smallest of the three: a module that FSDP2 shards must not return a view (an in-place operation on
        # it would drop the hook that gathers the parameters for the backward pass).
        return rotate(q_TNH, rope), rotate(k_TKH, rope), v_TKH.clone()


class AfterAttention(nn.Module):
    """Output projection and residual, norm, SwiGLU (Shazeer 2020) and residual: the block from core attention on."""

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        size = config.hidden_size
        self.recompute = recompute
        self.output = nn.Linear(config.heads * config.head_size, size, bias=False)
        self.norm = RMSNorm(size, config.norm_eps)
        self.gate = nn.Linear(size, config.ffn_size, bias=False)
        self.up = nn.Linear(size, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, size, bias=False)

    def forward(self, x_TC: Tensor, out_TNH: Tensor) -> Tensor:
        """The block's input and its core attention's output to the next block's x_TC; with `recompute` only the two
        inputs are kept for the backward pass."""
        if self.recompute and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._compute, x_TC, out_TNH, use_reentrant=False, preserve_rng_state=False)
            return result
        return self._compute(x_TC, out_TNH)

    def _compute(self, x_TC: Tensor, out_TNH: Tensor) -> Tensor:
        x_TC = x_TC + self.output(out_TNH.flatten(1))
        normed_TC = self.norm(x_TC)
        y_TC: Tensor = x_TC + self.down(F.silu(self.gate(normed_TC)) * self.up(normed_TC))
        return y_TC


class Block(nn.Module):
    """One decoder block, in two halves. Core attention belongs between them and to the caller:
    `q, k, v = block.before_attention(x, rope); x = block.after_attention(x, core_attention(q, k, v))`."""

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.before_attention = BeforeAttention(config, recompute=recompute)
        self.after_attention = AfterAttention(config, recompute=recompute)
