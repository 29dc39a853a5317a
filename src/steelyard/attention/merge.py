"""Joining partial attention results: each part saw other keys of the same queries.

A part's `out` is normalised over its own keys, and its log-sum-exp `lse` says how much weight these keys had. Their
combination is exact (Rabe and Staats, "Self-attention Does Not Need O(n²) Memory", 2021, section 2); it is done in the
type of `lse`, fp32 or better, whatever the type of the outputs.
"""

from __future__ import annotations

import torch


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and log-sum-exp over the keys of both parts.

    Args:
        out_a, out_b: (..., head_dim), any floating type.
        lse_a, lse_b: (...), fp32 or fp64, natural logarithm; −inf where a part saw no key (its output is
            ignored there).

    Returns:
        out (..., head_dim) and lse (...), both in the type of `lse_a`. Where neither part saw a key: out 0, lse −inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    weight_a = torch.exp(lse_a - finite).unsqueeze(-1)
    weight_b = torch.exp(lse_b - finite).unsqueeze(-1)
    # A part without keys may hold anything, NaN included, and 0 × NaN is NaN: so it is replaced, not only weighted.
    part_a = out_a.to(lse.dtype).masked_fill(weight_a == 0, 0.0)
    part_b = out_b.to(lse.dtype).masked_fill(weight_b == 0, 0.0)
    return (part_a * weight_a).addcmul_(part_b, weight_b), lse


def merge_into(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add a part to `out` and `lse` in place: fewer passes than `merge`, for parts that saw at least one key each.

    Args:
        out, part_out: (..., head_dim); out in the type of `lse`.
        lse, part_lse: (...), finite.
    """
    # The part's weight over both: exp(b) / (exp(a) + exp(b)).
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
