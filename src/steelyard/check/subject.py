"""A model with what surrounds it, its *subject*: how documents become a batch, and a batch logits and a loss.

There are two surfaces. A Transformers model is attached (`integrations.transformers.attach`); any other one is handed a
`Balancer` and calls its `attention`. A function of the user's builds either, and may bring its own collator, logits and
loss: exactly what is then checked.

Shapes: T tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from steelyard.balance import Balancer, NanoBatchPlan
from steelyard.check.request import CheckRequest
from steelyard.data.batches import IGNORED_LABEL, DocumentBatch
from steelyard.domain.arrays import IntArray
from steelyard.domain.layout import Layout
from steelyard.errors import SteelyardError, UsageError, first_line
from steelyard.observe.meter import Meter
from steelyard.observe.trace import Trace

if TYPE_CHECKING:
    from steelyard.integrations.transformers import Attachment, PingPong

Batch: TypeAlias = Mapping[str, Any]
KEYS = ("model", "collate", "loss", "logits", "gradients", "vocab_size")
"""What the mapping that a user's function returns may hold; only `model` must be there."""
_LABEL_KEYS = ("labels", "shift_labels")


class ObservedBalancer(Balancer):
    """A balancer that remembers the plans it carries out."""

    def __init__(self, group: dist.ProcessGroup | None, **options: Any) -> None:
        super().__init__(group, **options)
        self.plans: list[NanoBatchPlan] = []

    def plan_layout(self, layout: Layout, index: int = 0, **options: Any) -> NanoBatchPlan:
        """As `Balancer.plan_layout`."""
        plan = super().plan_layout(layout, index, **options)
        self.plans.append(plan)
        return plan


@dataclass(frozen=True)
class Parts:
    """What a builder gives; None: the surface's own.

    Attributes:
        model: with random or loaded weights, the same in every process.
        collate: documents, `[{"input_ids": [...]}, …]`, to a batch.
        loss: (model, batch, …) to this rank's part of the step's loss; may take the keywords `label_count` (of all
            ranks) and `ranks`.
        logits: (model, batch) to one row of logits for each token of the batch.
        gradients: how ranks' losses and gradients are joined: "sum", or "mean" as DDP and FSDP2 do.
        vocab_size: token ids are below it; None: as the model's configuration or its embedding says.
    """

    model: nn.Module
    collate: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    logits: Callable[..., Any] | None = None
    gradients: str = "sum"
    vocab_size: int | None = None

    @classmethod
    def of(cls, built: object, who: str) -> Parts:
        """What `build` returned: a model, or a mapping with one.

        Raises:
            UsageError: something else, or a key that does not exist.
        """
        if isinstance(built, nn.Module):
            return cls(built)
        if not isinstance(built, Mapping) or not isinstance(built.get("model"), nn.Module):
            raise UsageError(
                f"{who} returned {type(built).__name__}, expected a torch.nn.Module, or a dictionary with one as "
                f"'model' (and perhaps {', '.join(KEYS[1:])})"
            )
        unknown = [str(key) for key in built if key not in KEYS]
        if unknown:
            raise UsageError(f"{who} returned the unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
        if built.get("gradients", "sum") not in ("sum", "mean"):
            raise UsageError(f"{who}: gradients={built['gradients']!r}, expected 'sum' or 'mean' (DDP, FSDP2)")
        for name in ("collate", "loss", "logits"):
            if built.get(name) is not None and not callable(built[name]):
                raise UsageError(f"{who}: {name} is {type(built[name]).__name__}, expected a function")
        return cls(**built)


class Subject:
    """A model on one rank, ready to be asked for logits and losses. `close` it.

    Args:
        parts: what the builder gave.
        who: names the builder in errors.
        attached: of a Transformers model whose attention is balanced.
        ping_pong: the attached model, run as two halves in turn; what is called then.
        balancer: that the model was built with.
    """

    def __init__(
        self,
        parts: Parts,
        who: str,
        *,
        is_transformers: bool,
        attached: Attachment | None = None,
        ping_pong: PingPong | None = None,
        balancer: ObservedBalancer | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.model, self.who = parts.model, who
        self.gradients = parts.gradients
        self._parts, self._is_transformers = parts, is_transformers
        self._attached, self._balancer, self._meter = attached, balancer, meter
        self._called = parts.model if ping_pong is None else ping_pong
        self.vocab_size = parts.vocab_size or _vocab_size(parts.model, who)
        self.context = _context(parts.model)
        self.shifts_labels = is_transformers  # the loss of a Transformers model shifts `labels` itself

    def collate(self, docs: Sequence[IntArray]) -> Batch:
        """A batch of documents."""
        with _users(f"collate of {self.who}" if self._parts.collate else "collating"):
            if self._parts.collate is not None:
                batch = self._parts.collate([{"input_ids": doc.tolist()} for doc in docs])
                if not hasattr(batch, "keys"):
                    raise UsageError(f"collate of {self.who} returned {type(batch).__name__}, expected a dictionary")
                return dict(batch)
            if self._is_transformers:
                from steelyard.integrations.transformers import collate

                return collate(docs)
        packed = DocumentBatch.from_documents(docs)
        columns = {"input_ids": packed.tokens, "position_ids": packed.positions, "labels": packed.labels}
        batch = {name: torch.tensor(column, dtype=torch.int64) for name, column in columns.items()}
        return {**batch, "doc_lens": packed.doc_lengths.tolist()}

    def logits(self, batch: Batch) -> Tensor:
        """Logits of every row of the batch, (rows, V), without gradients; padding left out."""
        with torch.no_grad(), _users(f"logits of {self.who}" if self._parts.logits else f"the model of {self.who}"):
            if self._parts.logits is not None:
                found = self._parts.logits(self._called, batch)
            else:
                found = self._called(**{name: value for name, value in batch.items() if name not in _LABEL_KEYS})
        logits = getattr(found, "logits", found)
        if not isinstance(logits, Tensor) or logits.dim() < 2:
            raise UsageError(
                f"the model of {self.who} returned {type(found).__name__}, expected logits (tokens, vocabulary) as a "
                "tensor or as .logits; or give a function 'logits' that returns them"
            )
        return _rows(logits, batch)

    def loss(self, batch: Batch, label_count: int, ranks: int) -> Tensor:
        """This rank's part of the loss of a step with `label_count` labels on `ranks` ranks; a scalar."""
        with _users(f"loss of {self.who}" if self._parts.loss else f"the model of {self.who}"):
            loss = self._loss(batch, label_count, ranks)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"loss of {self.who} returned {given}, expected a scalar with a gradient")
        return loss.reshape(())

    def _loss(self, batch: Batch, label_count: int, ranks: int) -> Any:
        if self._parts.loss is not None:
            known = {"label_count": label_count, "ranks": ranks}
            return self._parts.loss(self._called, batch, **_accepted(self._parts.loss, known))
        if self._is_transformers:
            scale = ranks if self.gradients == "mean" else 1
            output = self._called(**{**batch, "num_items_in_batch": label_count})
            return None if output.loss is None else output.loss * scale
        found = self._called(**{name: value for name, value in batch.items() if name not in _LABEL_KEYS})
        logits_TV, labels = getattr(found, "logits", found), batch.get("labels")
        if not isinstance(labels, Tensor):
            raise UsageError(f"the batches of {self.who} hold no 'labels'; give a function 'loss'")
        total = F.cross_entropy(
            logits_TV.reshape(-1, logits_TV.shape[-1]), labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return total / label_count * (ranks if self.gradients == "mean" else 1)

    def kernel_calls(self) -> int:
        """How often attention has passed through Steelyard so far."""
        trace = self._meter.trace if self._meter is not None else None
        return 0 if trace is None else sum(span.track == "attention" for span in trace.spans)

    def work(self, rank: int, batch: Batch) -> int:
        """(query, key) pairs that `rank` computes for this batch, by the plan. Collective; after a forward pass."""
        if self._attached is not None:
            from steelyard.integrations.transformers.ping_pong import split

            in_halves = self._called is not self.model
            step = self._attached.plan_together(split(batch)[0] if in_halves else [batch], reorder=in_halves)[0].step
            return sum(int(nano_batch.work_by_server[rank]) for nano_batch in step.nano_batches)
        assert self._balancer is not None and self._balancer.plans, "attention passed through the balancer"
        return int(self._balancer.plans[-1].work_by_server[rank])

    def close(self) -> None:
        """Stop what runs in the background."""
        if self._attached is not None:
            self._attached.detach()
        if self._balancer is not None:
            self._balancer.close()


def open_subject(request: CheckRequest, group: dist.ProcessGroup, *, reference: bool = False) -> Subject:
    """Build the model of a request on this rank. Collective over `group`.

    Args:
        group: the ranks that share attention, perhaps only this one.
        reference: compute attention the obvious way: a Transformers model by its own code, any other one with the
            `reference` kernels.

    Raises:
        UsageError: the model cannot be built, or has a feature that is refused.
    """
    from steelyard.check.models import builder_of

    random.seed(request.seed)
    np.random.seed(request.seed)  # users' code may draw from any of them
    torch.manual_seed(request.seed)
    dtype = {"float32": torch.float32, "float64": torch.float64}[request.dtype]
    builder = builder_of(request)
    meter = Meter(Trace(0))
    options: dict[str, Any] = {"tolerance": request.tolerance, "timeout_s": 300.0, "meter": meter}
    balancer = None
    if builder.takes_balancer:
        how = {"backend": "reference", "policy": "packed"} if reference else {}
        balancer = ObservedBalancer(
            group if dist.get_world_size(group) > 1 else None, **options, **how, planning_group=group
        )
    with _users(builder.who):
        built = builder.build(balancer) if balancer is not None else builder.build()
    parts = Parts.of(built, builder.who)
    # Dropout would differ on every rank; everything else is as in training.
    parts.model.to(dtype).eval()
    is_transformers = balancer is None and _is_transformers_model(parts.model)
    if (request.checkpointing or request.ping_pong) and not is_transformers:
        raise UsageError(
            f"--checkpointing, --ping-pong: only for Transformers models, and {builder.who} builds another one: let it "
            "build one that does so itself"
        )
    attached = ping_pong = None
    if is_transformers and not reference:
        from steelyard.integrations.transformers import PingPong, attach

        attached = attach(parts.model, group, planning_group=group, **options)
        ping_pong = PingPong(parts.model) if request.ping_pong else None
        if request.checkpointing:
            _checkpoint_layers(parts.model)
    return Subject(
        parts, builder.who, is_transformers=is_transformers, attached=attached, ping_pong=ping_pong, balancer=balancer,
        meter=meter,
    )  # fmt: skip


def _checkpoint_layers(model: Any) -> None:
    """Activation checkpointing as in training, of a model that is in `eval` mode otherwise.

    Raises:
        UsageError: the model does not support it.
    """
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    try:
        getattr(model, new if hasattr(model, new) else old)()
    except ValueError as error:
        raise UsageError(f"--checkpointing: {first_line(error)}; leave it out for this model") from error
    for part in model.modules():
        if getattr(part, "gradient_checkpointing", False):
            part.training = True  # its own flag alone, by which Transformers decides; modules in it stay as they are
            _drop_nothing(part)  # but some layers drop values by a call of their own, and decoders whole layers
            _drop_nothing(getattr(part, "config", None))


def _drop_nothing(holder: Any) -> None:
    """Set each rate that is kept as a number, such as `dropout`, `resid_pdrop` or `layerdrop`, to zero."""
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if "drop" in name and isinstance(value, float):
            setattr(holder, name, 0.0)


def _is_transformers_model(model: nn.Module) -> bool:
    """Whether it is one, without importing Transformers for those that are not."""
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
               for kind in type(model).__mro__)  # fmt: skip


@contextmanager
def _users(what: str) -> Iterator[None]:
    """Around code that is not ours: what goes wrong there is said in one line.

    Raises:
        UsageError: it raised something.
    """
    try:
        yield
    except SteelyardError:
        raise
    except Exception as error:
        raise UsageError(f"{what} raised {type(error).__name__}: {first_line(error)}; --debug shows where") from error


def _accepted(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keywords that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(known)
    return {name: value for name, value in known.items() if name in parameters}


def _vocab_size(model: nn.Module, who: str) -> int:
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if size is None:
        size = next((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), None)
    if size is None:
        raise UsageError(f"{who}: the number of token ids is not known; return it as 'vocab_size' beside the model")
    if size < 2:
        raise UsageError(f"{who}: vocab_size={size}, expected at least 2")
    return int(size)


def _context(model: nn.Module) -> int | None:
    """The longest document that the model's configuration allows."""
    config = getattr(model, "config", None)
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "max_positions", None)
    return int(found) if found else None


def _rows(logits: Tensor, batch: Batch) -> Tensor:
    """Logits by row of the batch, (rows, V), without those of padding."""
    flat = logits.reshape(-1, logits.shape[-1])
    real = _real_tokens(batch)
    tokens = batch.get("input_ids")
    if isinstance(tokens, Tensor) and tokens.numel() != len(flat):
        raise UsageError(
            f"logits of shape {tuple(logits.shape)} for input_ids of shape {tuple(tokens.shape)}; expected one row for "
            "each token; a function 'logits' may return them"
        )
    return flat if real is None or len(real) != len(flat) else flat[real]


def _real_tokens(batch: Batch) -> Tensor | None:
    """Which rows of the batch are no padding, bool; None: all."""
    mask, tokens = batch.get("attention_mask"), batch.get("input_ids")
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.shape != tokens.shape:
        return None
    return mask.reshape(-1) != 0


def tokens_held(batch: Batch, tokens: IntArray, rows: int) -> int:
    """How many of the documents' `tokens` the batch holds, from the first on; `rows`: of its logits."""
    given = batch.get("input_ids")
    if not isinstance(given, Tensor):
        return min(rows, len(tokens))
    real = _real_tokens(batch)
    flat = given.reshape(-1) if real is None else given.reshape(-1)[real]
    held = flat.cpu().numpy()
    common = min(len(held), len(tokens))
    differing = np.flatnonzero(held[:common] != tokens[:common])
    return int(differing[0]) if len(differing) else common


def wrong_label(batch: Batch, docs: Sequence[IntArray], *, shifted: bool) -> str:
    """In words, the first label of a collated batch that is not the next token of its document; empty if none is.

    Args:
        shifted: `labels` are shifted already; `shift_labels` always are.
    """
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and not shifted:
            labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
    if not isinstance(labels, Tensor):
        return ""
    real = _real_tokens(batch)
    flat = labels.reshape(-1) if real is None or len(real) != labels.numel() else labels.reshape(-1)[real]
    given, expected = flat.cpu().numpy(), DocumentBatch.from_documents(docs).labels
    common = min(len(given), len(expected))
    differing = np.flatnonzero(given[:common] != expected[:common])
    if not len(differing):
        return ""
    row = int(differing[0])
    doc = int(np.searchsorted(np.cumsum([len(d) for d in docs]), row, side="right"))
    at = row - sum(len(d) for d in docs[:doc])
    last = ", its last," if at == len(docs[doc]) - 1 else ""
    return f"token {at}{last} of document {doc} in the batch has label {given[row]}, expected {expected[row]}"
