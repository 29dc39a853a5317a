"""Exchange buffers by hand; `tests/multiprocess/test_exchange.py` holds them against what the arena lends."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.cost.memory import exchange_memory
from steelyard.domain.shapes import AttentionShape

Q, KV, LSE = 4 * 8 * 2, 2 * 2 * 8 * 2, 4 * 4
SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=8, element_bytes=2)


def rows(count: int) -> np.ndarray:
    return np.array([count])


@pytest.mark.parametrize(
    ("q_sent", "kv_sent", "q_received", "kv_received", "kept", "keep_peak", "resend_peak"),
    [
        pytest.param(0, 0, 0, 0, 0, 0, 0, id="nothing"),
        # In backward a home rank that resends holds q, out, dOut, log-sum-exps, k and v; else two phases take turns.
        pytest.param(10, 20, 0, 0, 0, 10 * Q + 20 * KV, 10 * (3 * Q + LSE) + 20 * KV, id="only sends"),
        # q, out, dOut and dQ, and k, v with their gradients in fp32.
        pytest.param(
            0, 0, 10, 20, 10 * (2 * Q + LSE) + 20 * KV, *[10 * (4 * Q + LSE) + 20 * 3 * KV] * 2, id="only receives"
        ),
        pytest.param(10, 0, 10, 0, 10 * (2 * Q + LSE), 10 * (4 * Q + LSE), 20 * (3 * Q + LSE), id="queries both ways"),
    ],
)
def test_exchange_memory(
    q_sent: int, kv_sent: int, q_received: int, kv_received: int, kept: int, keep_peak: int, resend_peak: int
) -> None:
    memory = exchange_memory(rows(q_sent), rows(kv_sent), rows(q_received), rows(kv_received), SHAPE)
    assert [memory.kept, memory.keep_peak, memory.resend_peak] == [[kept], [keep_peak], [resend_peak]]


def test_sums_in_the_rows_own_dtype_are_not_copied() -> None:
    wide = AttentionShape(heads=4, kv_heads=2, head_dim=8, element_bytes=4)
    memory = exchange_memory(rows(0), rows(0), rows(0), rows(5), wide)
    assert memory.keep_peak == 5 * 2 * wide.key_value_bytes
