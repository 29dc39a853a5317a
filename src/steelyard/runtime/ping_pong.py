"""Two nano-batches through our own model, so that the transfers of one hide under the compute of the other.

Per layer and half there are three pieces of work: T (finish, the token-wise layers, the next layer's send), L (tasks
that need local rows only) and R (tasks that need received ones). They are laid out as

    T ping, R pong', L ping, T pong, R ping, L pong, T ping, …        (R pong' is the layer before)

so that between the start of every transfer and the wait for it lies work of the other half: rows that T sends are
needed two pieces of large work later, outputs that R sends home are needed after an L. Backward is the mirror image by
itself, because autograd takes ready nodes in reverse order of creation, and hides its transfers in the same way
(arXiv 2510.18121 alternates whole layers' attention; `docs/decisions/0005` has the comparison).

With a single nano-batch the same walk is the plain mode, the reference for this one: the same operations in the same
order per nano-batch, so the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from steelyard.errors import UsageError
from steelyard.model.layers import Block
from steelyard.model.transformer import Decoder, check_chunk
from steelyard.runtime.dispatch import Call
from steelyard.runtime.step import NanoBatch


def forward(decoder: Decoder, nano_batches: Sequence[NanoBatch]) -> Tensor:
    """Sum of the token losses (scalar, fp32) of this rank's nano-batches: one (plain) or two (ping-pong).

    Every rank of the exchange group must call it with the same number of nano-batches.

    Raises:
        UsageError: another number of nano-batches.
    """
    if not 1 <= len(nano_batches) <= 2:
        raise UsageError(f"{len(nano_batches)} nano-batches at once, expected 1 (plain) or 2 (ping-pong)")
    halves = [_Half(decoder, nano) for nano in nano_batches]
    ping, pong = halves[0], halves[-1] if len(halves) == 2 else None
    ping.send()
    ping.attend_local()
    if pong is not None:
        pong.send()
    for layer in range(len(decoder.blocks)):
        ping.attend_received()
        if pong is not None:
            pong.attend_local()
        ping.finish()
        if pong is not None:
            pong.attend_received()
        if layer + 1 < len(decoder.blocks):
            ping.attend_local()
        if pong is not None:
            pong.finish()
    losses = [half.loss_sum() for half in halves]
    return losses[0] if len(losses) == 1 else losses[0] + losses[1]


class _Half:
    """One nano-batch on its way through the layers."""

    def __init__(self, decoder: Decoder, nano: NanoBatch) -> None:
        check_chunk(nano.tokens_T, nano.positions_T, nano.labels_T)
        self.decoder, self.nano = decoder, nano
        self.blocks = cast(Sequence[Block], decoder.blocks)
        self.layer = 0
        self.rope = decoder.rotary(nano.positions_T)
        self.x_TC: Tensor = decoder.embedding(nano.tokens_T)
        self.call: Call | None = None

    def send(self) -> None:
        q_TNH, k_TKH, v_TKH = self.blocks[self.layer].before_attention(self.x_TC, self.rope)
        self.call = self.nano.core_attention.send(q_TNH, k_TKH, v_TKH, self.layer)

    def attend_local(self) -> None:
        assert self.call is not None
        self.nano.core_attention.attend_local(self.call)

    def attend_received(self) -> None:
        assert self.call is not None
        self.nano.core_attention.attend_received(self.call)

    def finish(self) -> None:
        """The end of this layer and, if there is one, the next layer up to its send."""
        assert self.call is not None
        out_TNH = self.nano.core_attention.finish(self.call)
        self.x_TC = self.blocks[self.layer].after_attention(self.x_TC, out_TNH)
        self.layer += 1
        if self.layer < len(self.blocks):
            self.send()

    def loss_sum(self) -> Tensor:
        loss: Tensor = self.decoder.head(self.x_TC, self.nano.labels_T)
        return loss
