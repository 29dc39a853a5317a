"""Sum of token cross-entropies from hidden states, without ever holding the logits of all tokens.

Shape suffixes: T tokens, R rows of one piece of them, C hidden size, V vocabulary.

Logits of 128K tokens and 128K ids are 64 GiB in fp32. `linear_cross_entropy_sum` walks the rows in pieces, and forms
each piece's gradient right where its logits exist, so that they are neither stored nor computed a second time; what it
keeps until backward is the gradient of the hidden states and of the weight, at the size of the inputs. The *sum* over
tokens is returned: it is divided once, by the step's token count over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100
_PIECE_ELEMENTS = 1 << 22  # 16 MiB of fp32 logits
_LEAST_PIECE_ROWS = 512  # below it the matrix products get too thin


def rows_per_piece(vocab_size: int) -> int:
    """Rows whose logits are formed at a time: 4 Mi logits, but never under 512 rows."""
    return max(_LEAST_PIECE_ROWS, _PIECE_ELEMENTS // vocab_size)


def linear_cross_entropy_sum(hidden_TC: Tensor, weight_VC: Tensor, labels_T: Tensor, rows: int | None = None) -> Tensor:
    """Σ cross_entropy(hidden_TC · weight_VCᵀ, labels_T) over labels that are not −100; a scalar.

    Args:
        hidden_TC: normed hidden states; under autocast the product runs in its dtype.
        labels_T: int64 in [0, V), or −100 for a token that does not count.
        rows: rows whose logits exist at once (default: `rows_per_piece`).

    Returns:
        fp32 (fp64 for fp64 inputs). Without a counting token, or without a token, it is 0 and still part of the graph,
        so that every parameter receives a zero gradient.
    """
    device_type = hidden_TC.device.type
    if torch.is_autocast_enabled(device_type):
        product_dtype = torch.get_autocast_dtype(device_type)
    else:
        product_dtype = torch.promote_types(hidden_TC.dtype, weight_VC.dtype)
    total: Tensor = _LinearCrossEntropySum.apply(  # type: ignore[no-untyped-call]
        hidden_TC, weight_VC, labels_T, rows or rows_per_piece(len(weight_VC)), product_dtype
    )
    return total


def linear_cross_entropy_sum_reference(hidden_TC: Tensor, weight_VC: Tensor, labels_T: Tensor) -> Tensor:
    """The obvious twin: all logits at once, torch's own cross-entropy."""
    logits_TV = F.linear(hidden_TC, weight_VC)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return F.cross_entropy(logits_TV.to(wide), labels_T, ignore_index=IGNORED_LABEL, reduction="sum")


class _LinearCrossEntropySum(torch.autograd.Function):
    """d logits = softmax − one-hot needs nothing from later layers but a scalar factor, so forward can form it."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TC: Tensor, weight_VC: Tensor, labels_T: Tensor, rows: int, product_dtype: torch.dtype
    ) -> Tensor:
        wide = torch.promote_types(product_dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden_TC = torch.empty_like(hidden_TC) if needs_hidden else None
        d_weight_VC = torch.zeros_like(weight_VC, dtype=wide) if needs_weight else None
        total = torch.zeros((), dtype=wide, device=hidden_TC.device)
        with torch.autocast(hidden_TC.device.type, enabled=False):
            cast_weight_VC = weight_VC.to(product_dtype)
            for start in range(0, len(hidden_TC), rows):
                piece = slice(start, start + rows)
                hidden_RC = hidden_TC[piece].to(product_dtype)
                losses_R, d_logits_RV = _losses_and_logit_gradient(
                    (hidden_RC @ cast_weight_VC.T).to(wide), labels_T[piece]
                )
                total += losses_R.sum()
                d_logits_RV = d_logits_RV.to(product_dtype)
                if d_hidden_TC is not None:
                    d_hidden_TC[piece] = d_logits_RV @ cast_weight_VC
                if d_weight_VC is not None:
                    d_weight_VC += d_logits_RV.T @ hidden_RC
        ctx.weight_dtype = weight_VC.dtype
        ctx.save_for_backward(d_hidden_TC, d_weight_VC)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        d_hidden_TC, d_weight_VC = ctx.saved_tensors
        d_hidden = None if d_hidden_TC is None else d_hidden_TC * d_total.to(d_hidden_TC.dtype)
        d_weight = None if d_weight_VC is None else (d_weight_VC * d_total).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None


def _losses_and_logit_gradient(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy per row and its gradient by the logits, which it overwrites; both zero where the label is −100."""
    counts_R1 = (labels_R != IGNORED_LABEL)[:, None]
    labels_R1 = labels_R[:, None].masked_fill(~counts_R1, 0)
    lse_R1 = torch.logsumexp(logits_RV, dim=-1, keepdim=True)
    losses_R1 = (lse_R1 - logits_RV.gather(1, labels_R1)).masked_fill(~counts_R1, 0.0)
    d_logits_RV = logits_RV.sub_(lse_R1).exp_()
    d_logits_RV.scatter_add_(1, labels_R1, torch.full_like(lse_R1, -1.0))
    return losses_R1.squeeze(1), d_logits_RV.masked_fill_(~counts_R1, 0.0)
