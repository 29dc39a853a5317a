"""The plan of one Transformers batch, and the forward passes that carry it out. It travels as `steelyard_plan=`.

Shapes: B rows of the batch, L their length, N query heads, K key/value heads, H head size; T the tokens of documents.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from steelyard.balance import Balancer, Kernel, NanoBatchAttention, NanoBatchPlan, StepPlan
from steelyard.errors import UsageError
from steelyard.integrations.joining import raise_if_told
from steelyard.integrations.transformers.documents import Documents, rows_tensor


@dataclass(frozen=True)
class Note:
    """What every rank says along with its lengths.

    Attributes:
        records: whether gradients are on: a rank that evaluates while the others train is found out here.
        labels: labels that count, in each of its batches.
        tokens: tokens of its documents.
        wall_s, wait_s: since the plan before this one: time that passed, and time blocked in transfers.
        idle: it has no batch left and joins with a token that does not count.
        failure: why this rank cannot take part: the others wait for its lengths, and are told.
    """

    records: bool
    labels: tuple[int, ...]
    tokens: int
    wall_s: float
    wait_s: float
    failure: str | None = None
    idle: bool = False


class BatchPlan:
    """The plan of a batch, perhaps still in the making. Hand it to the model as `steelyard_plan=`.

    Attributes:
        documents: of this rank's batch.
        balancer: which made it.
        index: which nano-batch of its step it is.

    Args:
        on_step: called with the step once it is made, when it is first asked for.
    """

    def __init__(
        self,
        balancer: Balancer,
        documents: Documents,
        step: StepPlan | Future[StepPlan],
        index: int = 0,
        *,
        on_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.balancer, self.documents, self.index = balancer, documents, index
        self._step, self._on_step = step, on_step

    @cached_property
    def step(self) -> StepPlan:
        """The step it belongs to; waits if it is still in the making.

        Raises:
            PeerError: a rank did not come to plan, or could not.
            UsageError: some ranks train while others evaluate, or they have different numbers of batches.
        """
        step = self._step if isinstance(self._step, StepPlan) else self._step.result()
        raise_if_told(step.notes)
        modes = [note.records for note in step.notes if isinstance(note, Note)]
        if len(set(modes)) > 1:
            names = ", ".join(f"rank {r} {'trains' if mode else 'evaluates'}" for r, mode in enumerate(modes))
            raise UsageError(
                f"planning of step {step.step}: {names}; every rank must take the same step at the same time. To run a "
                "model on some ranks only, put it into `with attached.local():`"
            )
        counts = [len(note.labels) for note in step.notes if isinstance(note, Note)]
        if len(set(counts)) > 1:
            raise UsageError(
                f"planning of step {step.step}: the ranks came with {', '.join(map(str, counts))} batches; every rank "
                "must take as many forward passes as the others: a rank without documents takes one of collate([])"
            )
        if self._on_step is not None:
            self._on_step(step)
        return step

    @property
    def nano_batch(self) -> NanoBatchPlan:
        """Who computes what."""
        return self.step.nano_batches[self.index]

    @property
    def label_count(self) -> int:
        """Labels of all ranks in all nano-batches of the step: what a summed loss is divided by."""
        return sum(sum(note.labels) for note in self.step.notes if isinstance(note, Note))

    def begin(self, device: torch.device, turn: Callable[[], None] | None = None) -> ForwardPass:
        """A forward pass of this batch."""
        attention = NanoBatchAttention(self.balancer, self.nano_batch, turn)
        return ForwardPass(attention, self.documents.batch_shape, rows_tensor(self.documents, device))


class ForwardPass:
    """One forward pass of a model over one batch: packs the rows of documents around core attention.

    Args:
        attention: of the nano-batch.
        batch_shape: (B, L).
        rows_T: rows among B · L that belong to documents, int64; None: all.
    """

    def __init__(self, attention: NanoBatchAttention, batch_shape: tuple[int, int], rows_T: Tensor | None) -> None:
        self.attention, self.batch_shape, self.rows_T = attention, batch_shape, rows_T

    def attend(
        self,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        layer: int | None,
        kernel: Kernel,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attention output (B, L, N, H); 0 in padding."""
        expected, shapes = self.batch_shape, [(x.shape[0], x.shape[2]) for x in (q_BNLH, k_BKLH, v_BKLH)]
        if any(shape != expected for shape in shapes):
            raise UsageError(
                f"attention: q, k and v have {', '.join(str(s) for s in shapes)} (rows, tokens), the plan is for "
                f"{expected}: generation with a cache or a prefix is not balanced; put it into "
                "`with attached.detached():`"
            )
        q_XNH, k_XKH, v_XKH = (_flat(x) for x in (q_BNLH, k_BKLH, v_BKLH))
        if self.rows_T is None:
            out_XNH = self.attention(q_XNH, k_XKH, v_XKH, layer=layer, kernel=kernel, sink_N=sink_N)
        else:
            q_TNH, k_TKH, v_TKH = (x.index_select(0, self.rows_T) for x in (q_XNH, k_XKH, v_XKH))
            out_TNH = self.attention(q_TNH, k_TKH, v_TKH, layer=layer, kernel=kernel, sink_N=sink_N)
            out_XNH = out_TNH.new_zeros(q_XNH.shape).index_copy(0, self.rows_T, out_TNH)
        return out_XNH.view(*expected, *out_XNH.shape[1:])


def _flat(x_BNLH: Tensor) -> Tensor:
    """(B, N, L, H) as (B · L, N, H); a view for a batch of one row."""
    return x_BNLH.transpose(1, 2).flatten(0, 1)
