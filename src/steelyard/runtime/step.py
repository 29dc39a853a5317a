"""What a rank computes on in one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from steelyard.runtime.dispatch import CoreAttention


@dataclass(frozen=True)
class NanoBatch:
    """One chunk of this rank, ready for the model.

    Attributes:
        tokens_T, positions_T, labels_T: int64 (tokens,); positions restart per document, labels are −100 where there
            is nothing to predict.
        core_attention: carries out the plan that was made for these documents.
    """

    tokens_T: Tensor
    positions_T: Tensor
    labels_T: Tensor
    core_attention: CoreAttention
