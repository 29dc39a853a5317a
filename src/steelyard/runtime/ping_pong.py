"""Two nano-batches through our own model, so that the transfer of one hides under the compute of the other.

Per layer: attend ping, attend pong, then finish ping and go on to its next `send`, then the same for pong. A transfer
that ping starts is waited for only after pong has computed, and the other way round. Backward interleaves by itself,
because autograd takes the nodes in reverse order (arXiv 2510.18121, section on overlapping; `runtime.md`).

With a single nano-batch the same walk is the plain mode, the reference for this one: same order of operations per
nano-batch, so the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from steelyard.model.layers import Block, RotaryTable
from steelyard.model.transformer import Decoder
from steelyard.runtime.dispatch import Call
from steelyard.runtime.step import NanoBatch


def forward(decoder: Decoder, nano_batches: Sequence[NanoBatch]) -> Tensor:
    """Sum of the token losses (scalar, fp32) of this rank's nano-batches: one (plain) or two (ping-pong).

    Every rank of the exchange group must call it with the same number of nano-batches.
    """
    blocks = cast(Sequence[Block], decoder.blocks)
    ropes = [decoder.rotary(nano.positions_T) for nano in nano_batches]
    hidden = [decoder.embedding(nano.tokens_T) for nano in nano_batches]
    calls = [_send(blocks[0], 0, *parts) for parts in zip(hidden, ropes, nano_batches, strict=True)]
    for layer, block in enumerate(blocks):
        for call, nano in zip(calls, nano_batches, strict=True):
            nano.core_attention.attend(call)
        for i, nano in enumerate(nano_batches):
            hidden[i] = block.after_attention(hidden[i], nano.core_attention.finish(calls[i]))
            if layer + 1 < len(blocks):
                calls[i] = _send(blocks[layer + 1], layer + 1, hidden[i], ropes[i], nano)
    losses = [decoder.head(x_TC, nano.labels_T) for x_TC, nano in zip(hidden, nano_batches, strict=True)]
    total: Tensor = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def _send(block: Block, layer: int, x_TC: Tensor, rope: RotaryTable, nano: NanoBatch) -> Call:
    q_TNH, k_TKH, v_TKH = block.before_attention(x_TC, rope)
    return nano.core_attention.send(q_TNH, k_TKH, v_TKH, layer)
