"""`attach`: a model's attention becomes balanced, by Transformers' public registers and a module hook.

A forward pre-hook reads the documents of each call, plans them with the other ranks and adds the pass to the keywords
of the model, which carry it to every layer: so checkpointing that runs a layer again finds the pass it belongs to,
however many are in flight.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from steelyard.balance import Balancer
from steelyard.balance.given import check_groups, check_options
from steelyard.errors import SteelyardError, UsageError
from steelyard.integrations.joining import Joined, join, told
from steelyard.integrations.transformers.batch_plan import BatchPlan, ForwardPass, Note
from steelyard.integrations.transformers.collate import collate, count_labels
from steelyard.integrations.transformers.documents import Documents, read_documents
from steelyard.integrations.transformers.features import attention_shape, check_features, check_kernels
from steelyard.integrations.transformers.registered import NAME, attention_forward, check_mask
from steelyard.integrations.transformers.report import BalanceReport
from steelyard.observe.meter import Meter
from steelyard.runtime.dispatch import Memory

_ATTRIBUTE = "steelyard_attachment"
_DECIDE_WHAT_LAYERS_COMPUTE = ("sliding_window", "attn_logit_softcapping", "query_pre_attn_scalar")
"""Of a configuration; compared by the ranks before the first layer. (The calls themselves are, a step later.)"""
_CACHES = ("cache", "past_key_values")


def attach(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    tolerance: float = 0.05,
    policy: str = "balanced",
    backend: str = "auto",
    memory: Memory = "keep",
    speeds: Sequence[float] = (),
    timeout_s: float = 300.0,
    meter: Meter | None = None,
    planning_group: dist.ProcessGroup | None = None,
) -> Attachment:
    """Balance the core attention of a Transformers model over the data-parallel ranks. Collective.

    Args:
        model: a causal language model or its decoder; before or after DDP, FSDP2, accelerate, PEFT or `torch.compile`.
        group: the data-parallel ranks; None: all ranks of the default process group, or this process alone if none was
            initialised. Transfers run on a group of their own with the same ranks, apart from gradients.
        tolerance, policy, backend, memory, speeds, timeout_s, meter: as for `steelyard.Balancer`.
        planning_group: a gloo group of the same ranks for lengths; with it no group is made, and transfers run on
            `group`, which must then not be the one that sums gradients.

    Raises:
        UsageError: the model has a feature that is not computed exactly (named), or the ranks are not joined yet.
    """
    inner = _language_model(model)
    check_features(inner)
    check_options(
        "attach", tolerance=tolerance, timeout_s=timeout_s, policy=policy, backend=backend, memory=memory, speeds=speeds
    )
    check_groups("attach", group=group, planning_group=planning_group)
    if isinstance(getattr(inner, _ATTRIBUTE, None), Attachment):
        raise UsageError(f"attach: this {type(inner).__name__} is attached already; call its `detach` first")
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    parameter = next(inner.parameters())
    shape = attention_shape(inner.config, parameter.element_size())
    joined = join(group, planning_group, parameter.device, timeout_s)
    try:
        balancer = Balancer(
            joined.transfers,
            shape=shape,
            tolerance=tolerance,
            policy=policy,
            backend=backend,
            dtype=parameter.dtype,
            device=parameter.device,
            timeout_s=timeout_s,
            planning_group=joined.planning,
            speeds=speeds,
            memory=memory,
            meter=meter,
        )
    except BaseException:
        joined.release()
        raise
    try:
        check_kernels(inner.config, balancer, shape)
        config = inner.config.get_text_config()
        balancer.agreed = {
            "attention layers": getattr(config, "num_hidden_layers", None),
            "model": type(inner).__name__,
            **{name: getattr(config, name, None) for name in _DECIDE_WHAT_LAYERS_COMPUTE},
        }
        return Attachment(inner, balancer, joined)
    except BaseException:
        balancer.close()
        joined.release()
        raise


class Attachment:
    """A model whose attention is balanced; `attach` makes it.

    Attributes:
        model: the Transformers model.
        balancer: plans and carries out.
        report: how the steps were balanced, for logs.
    """

    def __init__(self, model: PreTrainedModel, balancer: Balancer, joined: Joined) -> None:
        self.model, self.balancer, self._joined_groups = model, balancer, joined
        self.report = BalanceReport(balancer.ranks)
        self._alone: Balancer | None = None
        self._local = False
        self._last_plan_s = balancer.meter.clock()
        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, check_mask)
        self._before = str(model.config._attn_implementation)
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise UsageError(
                f"attach: {type(model).__name__} does not take its attention from Transformers' AttentionInterface, so "
                "it cannot be replaced without changing its code"
            )
        self._sharing: WeakSet[Attachment] = WeakSet([self])  # with copies of the model: the last one closes
        self._hooks: list[RemovableHandle] = []
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                self._hooks += [
                    part.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                    part.register_forward_hook(self._after_forward),
                ]
        setattr(model, _ATTRIBUTE, self)
        self._parameters = {type(part): _parameter_names(part) for part in model.modules() if _is_model(part)}

    def plan(self, batch: Mapping[str, Any]) -> BatchPlan:
        """Plan a batch with the other ranks. Collective: every rank calls it once per forward pass.

        Without it the model plans when it is called. With it the global number of labels is known before:
        `model(**batch, steelyard_plan=plan, num_items_in_batch=plan.label_count)`.
        """
        return self.plan_together([batch])[0]

    def plan_together(self, batches: Sequence[Mapping[str, Any]], *, reorder: bool = False) -> list[BatchPlan]:
        """Plan the nano-batches of one step: two that alternate, or several micro-batches ahead. Collective.

        Returns:
            The plan of each batch. With `reorder` (the same on all ranks) neighbours may change places where that
            leaves less to move: run them in the order of `BatchPlan.index` then.
        """
        with self.telling_others(reorder=reorder):
            if isinstance(batches, (Mapping, str)) or not isinstance(batches, Sequence) or not batches:
                raise UsageError("plan_together: expected a list of one or more batches; `plan` takes a single one")
            documents = [read_documents(batch) for batch in batches]
            note = self._note(batches, documents)
        balancer = self._balancer()
        step = balancer.plan([d.lengths for d in documents], note, reorder=reorder)
        place = {given: index for index, given in enumerate(step.order)} if reorder else range(len(documents))
        plans = [BatchPlan(balancer, d, step, place[given]) for given, d in enumerate(documents)]
        self.report.add(plans[0].step)
        return plans

    @contextmanager
    def telling_others(self, *, reorder: bool = False) -> Iterator[None]:
        """Around what a rank does before it plans: if it fails, the others are told instead of left waiting.

        Args:
            reorder: as for the plan that would have followed.
        """
        try:
            yield
        except Exception as error:
            with suppress(SteelyardError):  # the error of this rank is the one to report
                self._balancer().plan([], replace(self._note([], []), failure=told(error)), reorder=reorder)
            raise

    def prefetch(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Batches with their plans, each planned in the background while the one before is computed. Collective: every
        rank iterates. Ranks may have different numbers of batches: one that has none left is handed batches without
        labels (`collate([])`) until no rank has any, so all take as many steps. If a rank cannot read a batch, that
        rank's error is raised, and on the others a `PeerError` that names it, where this batch was due.

        Raises:
            UsageError: lengths and transfers have the same group: from two threads they would get mixed up.
        """
        balancer = self._balancer()
        if balancer.ranks > 1 and balancer.planning_group is balancer.group:
            raise UsageError(
                "prefetch plans on a thread, and planning_group is the group of the transfers: give attach another "
                "gloo group of the same ranks as planning_group, or none"
            )
        ahead: dict[str, Any] | None = None
        source: Iterator[Mapping[str, Any]] | None = None
        failure: Exception | None = None
        while failure is None:
            planned: dict[str, Any] | None = None
            idle = False
            try:
                with self.telling_others():
                    source = _batches(batches) if source is None else source
                    given = next(source, None)
                    idle = given is None
                    batch = given if given is not None else _nothing(self.balancer.device)
                    documents = read_documents(batch)
                    note = replace(self._note([batch], [documents]), idle=idle)
                if ahead is not None:  # raises if a rank could not plan it: that rank will not plan another one now
                    ahead["steelyard_plan"].step  # noqa: B018
                step = self._balancer().prefetch([documents.lengths], note)
                plan = BatchPlan(self._balancer(), documents, step, on_step=None if idle else self.report.add)
                planned = {**batch, "steelyard_plan": plan}
            except Exception as error:
                failure = error
            if ahead is not None:  # also before an error: the others compute this batch, and wait for our rows
                yield ahead
            ahead = planned
            if idle and failure is None:
                if all(note.idle for note in plan.step.notes):
                    return
                self.report.add(plan.step)
        if failure is not None:
            raise failure

    def evaluate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """Mean loss over the labelled tokens of all ranks' batches. Collective, and ranks may have different numbers of
        batches: who has none left joins with empty work. (`Trainer.evaluate` takes a mean of the batches' means.)"""
        was_training = self.model.training
        device = next(self.model.parameters()).device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        self.model.train(False)
        try:
            with torch.no_grad():
                for batch, plan in self._joined(batches):
                    batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
                    loss = self.model(**{**batch, "num_items_in_batch": 1, "steelyard_plan": plan}).loss
                    labels = count_labels(batch)
                    if labels:
                        total[0] += loss
                        total[1] += labels
        finally:
            self.model.train(was_training)
        if self.balancer.ranks > 1 and not self._local:
            dist.all_reduce(total, group=self.balancer.group)
        return float(total[0] / total[1].clamp(min=1))

    def _joined(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], BatchPlan]]:
        """Batches with their plans until no rank has any left."""
        source: Iterator[Mapping[str, Any]] | None = None
        while True:
            with self.telling_others():
                source = _batches(batches) if source is None else source
                given = next(source, None)
                batch = given if given is not None else collate([])
                documents = read_documents(batch)
                note = replace(self._note([batch], [documents]), idle=given is None)
            balancer = self._balancer()
            plan = BatchPlan(balancer, documents, balancer.plan([documents.lengths], note))
            if all(note.idle for note in plan.step.notes):
                return
            self.report.add(plan.step)
            yield batch, plan

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, this rank computes its attention alone, with no word to the others: for evaluation or anything else
        that only some ranks do. Documents are still kept apart."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Inside, the model has the attention it had before: for generation. A backward pass of before is refused
        there: it might run layers again (checkpointing), with the wrong attention."""
        self.model.set_attn_implementation(self._before)
        try:
            yield
        finally:
            self.model.set_attn_implementation(NAME)

    def detach(self) -> None:
        """Give the model its own attention back for good, on every rank and after the last backward pass (a later one
        is refused). Once no copy of it is attached any more either, the gloo groups that `attach` made are given up. A
        second call does nothing."""
        if getattr(self.model, _ATTRIBUTE, None) is not self:
            return
        self.model.set_attn_implementation(self._before)
        for hook in self._hooks:
            hook.remove()
        delattr(self.model, _ATTRIBUTE)
        self._sharing.discard(self)
        if self._sharing:
            gc.collect()  # a copy and its attachment hold each other: one that was dropped may still be there
        if not self._sharing:
            self.balancer.close()
            self._joined_groups.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """A copy of the model takes part in the same balancing, and is detached by itself."""
        for shared in (self.balancer, self.report, self._joined_groups, self._sharing):
            memo[id(shared)] = shared
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        self._sharing.add(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "an attached model cannot be pickled: save its weights (`model.save_pretrained(…)`, `model.state_dict()`), "
            "or call `detach` first"
        )

    @property
    def _on(self) -> bool:
        """Whether the model's attention is balanced now: not when detached, for a while or for good."""
        return bool(self.model.config._attn_implementation == NAME)

    def _balancer(self) -> Balancer:
        if not self._local:
            return self.balancer
        if self._alone is None:
            self._alone = self.balancer.alone()
        return self._alone

    def _note(self, batches: Sequence[Mapping[str, Any]], documents: Sequence[Documents]) -> Note:
        now_s = self.balancer.meter.clock()
        wall_s, self._last_plan_s = now_s - self._last_plan_s, now_s
        return Note(
            records=torch.is_grad_enabled(),
            labels=tuple(count_labels(batch) for batch in batches),
            tokens=sum(sum(d.lengths) for d in documents),
            wall_s=wall_s,
            wait_s=self.balancer.meter.take().get("wait", 0.0),
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the pass to the keywords of a model that is called."""
        given = kwargs.get("steelyard_plan")
        if not self._on or isinstance(given, ForwardPass):
            return None
        batch = {**dict(zip(self._parameters[_model_type(part, self._parameters)], args, strict=False)), **kwargs}
        if any(batch.get(name) is not None for name in _CACHES):
            raise UsageError(
                "the model is called with a cache of keys and values: generation is not balanced; put it into "
                "`with attached.detached():`"
            )
        if given is not None and not isinstance(given, BatchPlan):
            raise UsageError(
                f"steelyard_plan of type {type(given).__name__}; expected what `attached.plan(batch)` returns"
            )
        if given is None:
            return args, {**kwargs, "steelyard_plan": self.plan(batch).begin(_device_of(batch))}
        documents, plan = read_documents(batch), given
        if plan.documents.batch_shape != documents.batch_shape or plan.documents.lengths != documents.lengths:
            raise UsageError("steelyard_plan was made for other documents than the model is called with")
        return args, {**kwargs, "steelyard_plan": plan.begin(_device_of(batch))}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Have the backward pass of what a model returned look whether the model is still attached."""
        if self._on:
            for tensor in tree_leaves(output):  # `hidden_states` too, from which backward meets no other output
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]

    def _before_backward(self, gradient: Tensor) -> None:
        if not self._on:
            raise UsageError(
                "backward after the model was detached: layers under activation checkpointing would be run again with "
                "the model's own attention; leave `detached()`, or call `detach`, after the last backward pass"
            )


def attachment_of(model: nn.Module) -> Attachment:
    """The attachment of a model, wrapped or not.

    Raises:
        UsageError: it is not attached.
    """
    attachment = getattr(_language_model(model), _ATTRIBUTE, None)
    if not isinstance(attachment, Attachment):
        raise UsageError(
            f"{type(model).__name__} is not attached: call steelyard.integrations.transformers.attach first"
        )
    return attachment


def _language_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside what it is wrapped into."""
    seen = model
    while not isinstance(seen, PreTrainedModel):
        get_base = getattr(seen, "get_base_model", None)
        inner = get_base() if callable(get_base) else getattr(seen, "module", getattr(seen, "_orig_mod", None))
        if not isinstance(inner, nn.Module) or inner is seen:
            raise UsageError(
                f"attach: {type(model).__name__} is no Transformers model (PreTrainedModel) and holds none"
            )
        seen = inner
    return seen


def _batches(given: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    if isinstance(given, (Mapping, str)) or not isinstance(given, Iterable):
        raise UsageError(
            f"batches of type {type(given).__name__}: expected several batches, such as [batch] or a DataLoader"
        )
    return iter(given)


def _nothing(device: torch.device) -> dict[str, Any]:
    """A batch without documents."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in collate([]).items()}


def _is_model(part: nn.Module) -> bool:
    return isinstance(part, PreTrainedModel)


def _parameter_names(part: nn.Module) -> list[str]:
    """The positional parameters of a model's forward."""
    return list(inspect.signature(type(part).forward).parameters)[1:]


def _model_type(part: nn.Module, known: Mapping[type, list[str]]) -> type:
    """The class that was there when the model was attached: FSDP2 puts a subclass in its place."""
    return next(kind for kind in type(part).__mro__ if kind in known)


def _device_of(batch: Mapping[str, Any]) -> torch.device:
    tokens = batch.get("input_ids")
    tokens = tokens if isinstance(tokens, Tensor) else batch["inputs_embeds"]
    assert isinstance(tokens, Tensor)
    return tokens.device
