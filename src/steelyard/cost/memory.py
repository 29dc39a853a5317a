"""Bytes of the exchange buffers that core attention of one layer and one nano-batch holds on a rank.

A server receives Q query rows and S key/value rows and computes Q output rows with their log-sum-exps; the rank itself
sends q and s rows. Under `keep` the received rows, the outputs and the log-sum-exps stay on the server from the forward
to the backward pass, once per layer under way; under `resend` nothing stays and the home ranks send it all again. What
is alive at one moment is largest in backward, where gradients stand beside what they are computed from. These are the
tensors that `runtime.dispatch` asks its arena for, moment by moment; it holds no more than
the most that was asked for at one moment, but for the steps in which this grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from steelyard.domain.arrays import IntArray
from steelyard.domain.shapes import AttentionShape


@dataclass(frozen=True, eq=False)
class ExchangeMemory:
    """Bytes per rank, int64 (ranks,).

    Attributes:
        kept: what stays between the passes of one layer under `keep` (under `resend`: nothing).
        keep_peak, resend_peak: most that is alive at one moment, the layer's own kept rows included.
    """

    kept: IntArray
    keep_peak: IntArray
    resend_peak: IntArray

    def of_layers(self, layers: int, mode: Literal["keep", "resend"] = "keep") -> IntArray:
        """Most bytes over a step of so many layers, int64 (ranks,): under `keep` all of them keep their rows until
        backward, and one at a time has its exchange under way."""
        return self.keep_peak + (layers - 1) * self.kept if mode == "keep" else self.resend_peak


def exchange_memory(
    q_sent: IntArray, kv_sent: IntArray, q_received: IntArray, kv_received: IntArray, shape: AttentionShape
) -> ExchangeMemory:
    """Exchange buffers of ranks that send and receive so many rows of queries and of keys with values: (ranks,)."""
    query, key_value = shape.query_bytes, shape.key_value_bytes
    sum_bytes = max(4, shape.element_bytes)  # sums and log-sum-exps are fp32, or fp64 beside fp64
    lse, key_value_sum = shape.heads * sum_bytes, key_value // shape.element_bytes * sum_bytes
    q_moved, kv_moved = q_sent + q_received, kv_sent + kv_received

    kept = q_received * (2 * query + lse) + kv_received * key_value
    dispatch = q_moved * query + kv_moved * key_value
    outputs_keep = kept + q_sent * query
    outputs_resend = outputs_keep + q_sent * lse
    gradients_keep = kept + q_moved * query
    gradients_resend = q_moved * (3 * query + lse) + kv_moved * key_value
    kernels = kept + 2 * q_received * query + kv_received * key_value_sum
    rounding = key_value if sum_bytes > shape.element_bytes else 0  # the sums in the rows' own dtype, beside them
    rounded = q_received * query + kv_received * (key_value_sum + rounding)
    home = q_moved * query + kv_moved * key_value
    both = np.maximum.reduce([dispatch, kernels, rounded, home])
    return ExchangeMemory(
        kept,
        np.maximum.reduce([both, outputs_keep, gradients_keep]),
        np.maximum.reduce([both, outputs_resend, gradients_resend]),
    )
