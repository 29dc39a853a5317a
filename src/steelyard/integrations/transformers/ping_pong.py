"""`PingPong`: two halves of a batch through one Transformers model in turn, so that transfers lie under work.

Documents are never cut to make halves: that would change the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutput

from steelyard.errors import UsageError
from steelyard.integrations.transformers.attach import Attachment, attachment_of
from steelyard.integrations.transformers.batch_plan import BatchPlan
from steelyard.integrations.transformers.collate import collate, count_labels
from steelyard.integrations.transformers.documents import read_documents
from steelyard.runtime import greenlets


class PingPong(nn.Module):
    """Runs each batch as two nano-batches that alternate at attention; called like the model, with the same loss.

    Wrap it into DDP, not the other way round; under FSDP2 shard the model with `reshard_after_forward=False` first.
    Other attributes are the model's.

    Args:
        model: attached (`attach`).
        reorder: let the halves of a rank change places where that leaves less attention to move.

    Raises:
        UsageError: the model is not attached, or is wrapped into DDP.
    """

    def __init__(self, model: nn.Module, *, reorder: bool = True) -> None:
        super().__init__()
        if isinstance(model, DistributedDataParallel):
            raise UsageError(
                "PingPong(DistributedDataParallel(model)): DDP counts on one forward pass at a time; wrap the other "
                "way round: DistributedDataParallel(PingPong(model))"
            )
        self.model = model
        self._reorder = reorder
        self._attachment: Attachment = attachment_of(model)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(super().__getattr__("model"), name)

    def forward(
        self,
        *unnamed: Any,
        halves: Sequence[Mapping[str, Any]] | None = None,
        labels: Tensor | None = None,
        **batch: Any,
    ) -> CausalLMOutput:
        """Loss and, without gradients, logits of a batch.

        Args:
            halves: two batches of this rank that go alternately, instead of one that is split. Every rank gives two.
            labels: of the batch; named here because a `Trainer` evaluates the loss of models that name them.
            batch: what the model takes, packed into one row or several. It is split between the documents nearest to
                the middle. `num_items_in_batch` divides the sum of losses; without it the loss is this rank's mean.

        Raises:
            UsageError: a batch that cannot be split or has no `input_ids`, FSDP2 that frees parameters after each
                layer, or a model that draws random numbers in forward.
        """
        _refuse_resharding(self.model)
        if unnamed:
            raise UsageError(
                f"PingPong: called with a {type(unnamed[0]).__name__}; give the batch by name, as in together(**batch)"
            )
        items = batch.pop("num_items_in_batch", None)
        if labels is not None:
            batch["labels"] = labels
        with self._attachment.telling_others(reorder=self._reorder):
            _refuse_dropout(self.model)
            halves, padded = _halves_of(halves, batch)
            counts = [count_labels(half) for half in halves]
        total = items if items is not None else max(1, sum(counts))
        plans = self._attachment.plan_together(halves, reorder=self._reorder)
        turns = sorted(range(2), key=lambda given: plans[given].index)
        device = halves[0]["input_ids"].device
        random_before = _random_state(device)
        ran = greenlets.alternate([self._half(halves[given], plans[given], total) for given in turns])
        outputs = [ran[turns.index(given)] for given in range(2)]
        if self.training and not torch.equal(random_before, _random_state(device)):
            raise UsageError(
                "PingPong: the model draws random numbers in forward (dropout?); two halves would draw them in another "
                "order than one after the other: set dropout to 0, or train without PingPong"
            )
        losses = [output.loss for output in outputs if output.loss is not None]
        logits = None
        if not torch.is_grad_enabled():
            logits = outputs[0].logits if padded else _joined([output.logits for output in outputs])
        return CausalLMOutput(loss=losses[0] + losses[1] if len(losses) == 2 else None, logits=logits)

    def _half(self, half: Mapping[str, Any], plan: BatchPlan, items: Any) -> Callable[[Callable[[], None]], Any]:
        def run(turn: Callable[[], None]) -> Any:
            device = half["input_ids"].device
            return self.model(**{**half, "num_items_in_batch": items, "steelyard_plan": plan.begin(device, turn)})

        return run


def _halves_of(
    halves: Sequence[Mapping[str, Any]] | None, batch: Mapping[str, Any]
) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """The two halves that were given, or of the batch; True if the second one is only a place-holder.

    Raises:
        UsageError: they are not two, or cannot be made.
    """
    if halves is not None and batch:
        raise UsageError(f"PingPong: halves and also {', '.join(sorted(batch))}; give one or the other")
    if halves is not None and len(halves) != 2:
        raise UsageError(f"PingPong: {len(halves)} halves, expected 2")
    for part in halves if halves is not None else [batch]:
        if not isinstance(part.get("input_ids"), Tensor):
            also = " (inputs_embeds cannot be split)" if part.get("inputs_embeds") is not None else ""
            raise UsageError(f"PingPong: a batch without input_ids{also}; give input_ids, or train without PingPong")
    return (halves, False) if halves is not None else split(batch)


def split(batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Two batches with the documents of one, of about as many tokens; True if the second is only a place-holder.

    Raises:
        UsageError: something in the batch cannot be cut.
    """
    documents = read_documents(batch)
    rows, length = documents.batch_shape
    if rows > 1:
        return [_part(batch, rows, 0, slice(0, rows // 2)), _part(batch, rows, 0, slice(rows // 2, rows))], False
    ends = torch.tensor(documents.lengths).cumsum(0)[:-1]
    if not len(ends):
        nothing = {key: value for key, value in collate([]).items() if key in batch}
        device = batch["input_ids"].device
        return [dict(batch), {k: v.to(device) if isinstance(v, Tensor) else v for k, v in nothing.items()}], True
    if documents.rows is not None:
        raise UsageError("PingPong: a batch of one row with padding cannot be split; leave the padding out (collate)")
    cut = int((ends - length / 2).abs().argmin())
    middle = int(ends[cut])
    lengths = (documents.lengths[: cut + 1], documents.lengths[cut + 1 :])
    halves = []
    for part, own in zip((slice(0, middle), slice(middle, length)), lengths, strict=True):
        half = _part(batch, length, 1, part)
        if batch.get("position_ids") is None and batch.get("cu_seq_lens_q") is None:
            raise UsageError("PingPong: a batch of one row holds one document; it cannot be split")
        bounds = torch.tensor([0, *own], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if name in batch:
                half[name] = bounds.to(batch[name].device)
        for name in ("max_length_q", "max_length_k"):
            if name in batch:
                half[name] = max(own)
        halves.append(half)
    return halves, False


def _part(batch: Mapping[str, Any], size: int, dim: int, part: slice) -> dict[str, Any]:
    """The tensors of a batch cut along rows (dim 0) or tokens (dim 1); all else as it is."""
    cut = {}
    for name, value in batch.items():
        along = isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == size and value.dim() > 1
        cut[name] = (value[part] if dim == 0 else value[:, part]) if along else value
    return cut


def _joined(logits: Sequence[Tensor]) -> Tensor:
    """Logits of both halves in the order of the batch."""
    one, other = logits
    return torch.cat([one, other], dim=1 if one.shape[0] == other.shape[0] == 1 else 0)


def _random_state(device: torch.device) -> Tensor:
    """The generators that a forward pass may draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device).cpu())
    return torch.cat(states)


def _refuse_dropout(model: nn.Module) -> None:
    """Before anything is computed; what else draws random numbers is found after the forward pass."""
    for name, part in model.named_modules():
        if isinstance(part, _DropoutNd) and part.training and part.p > 0:
            raise UsageError(
                f"PingPong: the model draws random numbers in forward ({name} is {type(part).__name__}, p={part.p:g}); "
                "two halves would draw them in another order than one after the other: set dropout to 0, or train "
                "without PingPong"
            )


def _refuse_resharding(model: nn.Module) -> None:
    """FSDP2 is not re-entrant: what the first half frees after a layer, the second one still needs."""
    for name, part in model.named_modules():
        if part is not model and isinstance(part, FSDPModule) and _reshards(part):
            raise UsageError(
                f"PingPong: FSDP2 frees the parameters of {name} after its forward pass (reshard_after_forward=True), "
                "and the other half still needs them; shard with fully_shard(…, reshard_after_forward=False), or call "
                "model.set_reshard_after_forward(False)"
            )


def _reshards(part: FSDPModule) -> bool:
    """Whether FSDP2 frees the parameters after forward. torch has a public setter, and no public way to ask."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return any(getattr(group, "post_forward_mesh_info", None) is not None for group in groups if group is not None)
