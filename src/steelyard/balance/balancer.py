"""`Balancer`: exchange lengths, plan, and hand out core attention that carries the plan out.

All ranks learn all document lengths of a step over a small CPU group of its own, so that planning messages cannot fall
between two exchanges, and then compute the same plan: the planner is deterministic, so nothing else is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.attention import build_backend
from steelyard.attention.interface import Backend
from steelyard.balance.agreement import Message, gather
from steelyard.balance.background import Background
from steelyard.balance.calls import Called, Calls, described
from steelyard.balance.chunk_order import orders_of
from steelyard.balance.given import (
    check_groups,
    check_kinds,
    check_options,
    check_row_keys,
    check_seconds,
    check_tensors,
    layout_of,
    lengths_of,
    nano_batches_of,
    not_carried_out,
    shards_of,
    shown,
)
from steelyard.balance.in_flight import InFlight, in_backward
from steelyard.balance.nano_batch import Kernel, NanoBatchAttention
from steelyard.balance.plans import NanoBatchPlan, StepPlan
from steelyard.collectives import Exchange, Progress, rank_in, release_group, shared_store, twin_group
from steelyard.cost.attention import pairs_before_array
from steelyard.domain.layout import Layout
from steelyard.domain.shapes import AttentionShape
from steelyard.domain.topology import Topology
from steelyard.errors import UsageError
from steelyard.observe.meter import Meter
from steelyard.planner import make_plan
from steelyard.planner.rates import Rate, speeds_of
from steelyard.planner.tables import build_tables
from steelyard.runtime import greenlets
from steelyard.runtime.arena import Arena
from steelyard.runtime.dispatch import CoreAttention, Memory

Result = TypeVar("Result")
Shards: TypeAlias = Sequence[tuple[int, ...]]
"""(doc, start, length) of this rank's rows, in order, or (doc, start, length, rank) of all ranks' rows."""

_DEFAULT_TOLERANCE = 0.05


class Balancer:
    """Balanced core attention for any model whose ranks form `group`.

    The shortest use is `attention(q, k, v, doc_lens=…)` in every layer of a step. What it does in turn, `plan` (or
    `prefetch`, a step ahead) and `begin`, is there to be called on its own.

    Args:
        group: the ranks that share attention work; None: this process alone.
        shape: heads, key/value heads and head size of the model's attention; None: what the first q and k have.
        tolerance: no server's work exceeds (1 + tolerance) × its share.
        policy: planner to use: "balanced", or "packed" (every rank computes what it holds).
        backend: attention kernels: "auto", "cpu", "flash", "reference".
        dtype, device: of q, k and v for `core_attention`; `attention` goes by its arguments.
        timeout_s: longest wait for the other ranks, in a transfer or to plan.
        planning_group: a CPU (gloo) group of the same ranks, used for lengths only; None: one is made, and every rank
            of `group` must come to that.
        store: any store that the ranks share, by which a time-out names who is missing; None: that of torch's default
            process group. A thread writes to it once in `progress_period_s`.
        speeds: relative speed of each rank; () means equal.
        window: keys that a query sees at most, its own included; None: all earlier ones of its document.
        row_keys: what a query costs the kernels besides the keys that it sees, in keys; 0 balances pairs.
        memory: "keep" holds received rows on the server until backward, "resend" sends them again then.
        meter: where times go; a new one by default.

    Attributes:
        calls: what its layers computed lately; the ranks compare it when they plan.
        agreed: what else must be the same on every rank, by name; yours to fill. It is compared at each plan: a number
            of layers, say, since ranks that differ in it would answer each other's transfers with others.

    Raises:
        UsageError: an argument that cannot be honoured; it is named.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        shape: AttentionShape | None = None,
        tolerance: float = _DEFAULT_TOLERANCE,
        policy: str = "balanced",
        backend: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        timeout_s: float = 300.0,
        planning_group: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
        speeds: Sequence[float] = (),
        window: int | None = None,
        row_keys: int = 0,
        memory: Memory = "keep",
        meter: Meter | None = None,
        progress_period_s: float = 1.0,
    ) -> None:
        check_groups("Balancer", group=group, planning_group=planning_group)
        check_kinds(shape, dtype, device)
        check_options(
            "Balancer", tolerance=tolerance, timeout_s=timeout_s, policy=policy, backend=backend, memory=memory,
            speeds=speeds,
        )  # fmt: skip
        check_row_keys("Balancer", row_keys)
        check_seconds("Balancer", "progress_period_s", progress_period_s)
        self.group = group
        self.rank = rank_in(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        if group is not None and self.rank < 0:
            raise UsageError("Balancer: this process is not in the group that was given; make it on its ranks only")
        if speeds and len(speeds) != self.ranks:
            raise UsageError(
                f"Balancer: {len(speeds)} speeds for {self.ranks} ranks; give one for each rank, or none: all are alike"
            )
        plain = Kernel(window=window)
        self.shape, self.tolerance, self.policy = shape, tolerance, policy
        self.window, self.memory, self.row_keys = window, memory, row_keys
        self.topology = Topology(self.ranks, speeds=tuple(speeds))
        self.meter = meter if meter is not None else Meter()
        self.device = device if device is not None else torch.device("cpu")
        self.timeout_s = timeout_s
        self._backend_name, self._dtype = backend, dtype
        self._backends: dict[Any, Backend] = {}
        self._arenas: dict[torch.device, Arena] = {}
        if shape is not None:
            self.check(plain, shape)
        self.planning_group = planning_group
        self._made_group = self.ranks > 1 and planning_group is None
        if self._made_group:
            self.planning_group = twin_group(group, "gloo", timeout_s)
        self.progress = self._publish_progress(store, progress_period_s)
        self.exchange = Exchange(group, progress=self.progress, timeout_s=timeout_s, meter=self.meter)
        self.agreed: dict[str, object] = {}
        self.calls = Calls()
        self._asks: tuple[int, str] | None = None
        self._made_unjoined = not dist.is_initialized()
        self._closed = False
        self._planned_steps = 0
        self._planning = threading.Lock()
        self._planner: Background | None = None
        self._windowed: WeakKeyDictionary[NanoBatchPlan, dict[int, NanoBatchPlan]] = WeakKeyDictionary()
        self._current: NanoBatchAttention | None = None
        self._in_flight: list[InFlight] = []
        self._given: tuple[Any, tuple[Any, ...]] | None = None
        self._halves: dict[int, NanoBatchAttention] = {}

    @property
    def arena(self) -> Arena:
        """The exchange buffers on this balancer's device."""
        return self._arena_of(self.device)

    @property
    def backend(self) -> Backend:
        """The kernels of `core_attention`."""
        if self.shape is None:
            raise UsageError("Balancer: the back end is chosen at the first attention; give shape=… to have it before")
        return self._backend_of(Kernel(window=self.window), self.shape, self._dtype, self.device)

    def check(self, kernel: Kernel, shape: AttentionShape) -> str:
        """The name of the back end that computes `kernel` on this balancer's device.

        Raises:
            UsageError: none can; names the argument.
        """
        return self._backend_of(kernel, shape, self._dtype, self.device).name

    def alone(self) -> Balancer:
        """A balancer for this rank without the others, that computes as this one does."""
        return Balancer(
            shape=self.shape, tolerance=self.tolerance, policy=self.policy, backend=self._backend_name,
            dtype=self._dtype, device=self.device, window=self.window, row_keys=self.row_keys, memory=self.memory,
            meter=self.meter,
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Balancer:
        return self  # a copy of a model takes part in the same balancing: process groups cannot be copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a Balancer cannot be pickled: it holds process groups and memory of this process; save what the model has "
            "learned (its state_dict) and make a new Balancer where it is loaded"
        )

    # Planning: collective, over the planning group.

    def plan(
        self,
        doc_lengths_by_nano_batch: Sequence[Sequence[int]],
        note: Any = None,
        *,
        rate: Rate | None = None,
        reorder: bool = False,
    ) -> StepPlan:
        """Plan one step. Every rank calls it, in the same order; it may run on a background thread.

        Args:
            doc_lengths_by_nano_batch: lengths of this rank's documents in packing order, per nano-batch. Ranks may
                give different numbers of nano-batches: all get plans for the largest number, joined with no documents.
            note: any small picklable value; every rank receives every rank's note with the plan.
            rate: how fast this rank was lately; if every rank says so, each gets the share of attention with which all
                end together, instead of one by the balancer's `speeds`.
            reorder: let two nano-batches that follow each other change places on some ranks, where that leaves less to
                move (`planner.pairing`); all ranks must say the same. `StepPlan.order` says what became of this rank's.

        Raises:
            PeerError: a rank did not come to plan within the time-out.
            UsageError: the ranks do not do the same thing, have other settings, or no shape is known yet.
        """
        self._refuse_if_closed("plan")
        lengths, settings = nano_batches_of("plan", doc_lengths_by_nano_batch), self._settings(reorder)
        asks = self._asks
        return self._in_order(lambda: self._plan_now(lengths, note, rate, reorder, settings, asks))

    def prefetch(
        self,
        doc_lengths_by_nano_batch: Sequence[Sequence[int]],
        note: Any = None,
        *,
        rate: Rate | None = None,
        reorder: bool = False,
    ) -> Future[StepPlan]:
        """As `plan`, on a background thread; calls are worked off in order. Hand lengths over a step early, on every
        rank, and planning costs the step nothing."""
        self._refuse_if_closed("prefetch")
        lengths, settings = nano_batches_of("prefetch", doc_lengths_by_nano_batch), self._settings(reorder)
        if self._planner is None:
            self._planner = Background("steelyard-plan")
        return self._planner.submit(lambda: self._plan_now(lengths, note, rate, reorder, settings))

    def _in_order(self, plan: Callable[[], StepPlan]) -> StepPlan:
        """Plan now, or after what was handed over before: every rank must plan in the same order."""
        return plan() if self._planner is None else self._planner.submit(plan).result()

    def _plan_now(
        self,
        own: list[list[int]],
        note: Any,
        rate: Rate | None,
        reorder: bool,
        settings: Mapping[str, str],
        asks: tuple[int, str] | None = None,
    ) -> StepPlan:
        with self._planning:
            step = self._planned_steps
            self._planned_steps += 1
            calls = self._calls_before(step, asks)
            messages = self._gather(Message("documents", own, (note, rate), settings, calls), step)
            rounds = max(len(said.content) for said in messages)
            by_rank = [[*said.content, *[[]] * (rounds - len(said.content))] for said in messages]
            notes, rates = zip(*(said.note for said in messages), strict=True)

            def speeds(work: int) -> Sequence[float]:
                return self.topology.speeds if None in rates else speeds_of(work, rates)

            orders = [list(range(rounds))] * self.ranks
            if reorder:
                orders = orders_of(by_rank, self.window, row_keys=self.row_keys, speeds=speeds)
            nano_batches = []
            for index in range(rounds):
                own_index = [order[index] for order in orders]
                layout = Layout.from_doc_lengths([lengths[i] for lengths, i in zip(by_rank, own_index, strict=True)])
                pairs = pairs_before_array(layout.doc_lengths, self.window)
                work = int((pairs + self.row_keys * layout.doc_lengths).sum())
                nano_batches.append(self.plan_layout(layout, index, step=step, speeds=speeds(work)))
            return StepPlan(tuple(nano_batches), notes, step, tuple(orders[self.rank]))

    def plan_shards(self, shards: Shards, note: Any = None) -> StepPlan:
        """Plan one nano-batch whose documents span ranks. Collective, as `plan`.

        Args:
            shards: (doc, start, length) of this rank's rows, in order; document numbers mean the same on all ranks.

        Raises:
            PeerError, UsageError: as `plan`; or the shards do not cover every document once.
        """
        self._refuse_if_closed("plan_shards")
        message = Message("shards", shards_of("plan_shards", shards), note, self._settings())
        asks = self._asks
        return self._in_order(lambda: self._plan_shards_now(message, asks))

    def _plan_shards_now(self, message: Message, asks: tuple[int, str] | None) -> StepPlan:
        with self._planning:
            step = self._planned_steps
            self._planned_steps += 1
            messages = self._gather(replace(message, calls=self._calls_before(step, asks)), step)
            table = [(*shard, rank) for rank, said in enumerate(messages) for shard in said.content]
            nano_batch = self.plan_layout(layout_of(table, self.ranks), step=step)
            return StepPlan((nano_batch,), tuple(said.note for said in messages), step)

    def plan_layout(
        self,
        layout: Layout,
        index: int = 0,
        *,
        policy: str | None = None,
        step: int = 0,
        window: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> NanoBatchPlan:
        """Plan a layout that all ranks know already; no message. `policy`, `window` and `speeds` override the
        balancer's.

        Raises:
            UsageError: no shape is known yet, or the policy moves documents between ranks.
        """
        if self.shape is None:
            raise UsageError(
                "Balancer: heads and head size are not known before the first attention; give shape=AttentionShape(…) "
                "to plan ahead of it"
            )
        policy = policy if policy is not None else self.policy
        by_time = self.row_keys > 0 and policy == "balanced"
        plan = make_plan(
            layout,
            policy=policy,
            topology=self.topology if speeds is None else replace(self.topology, speeds=tuple(speeds)),
            shape=self.shape,
            tolerance=self.tolerance,
            window=window if window is not None else self.window,
            memory=self.memory,
            objective="time" if by_time else "pairs",
            row_keys=self.row_keys if by_time else None,
        )
        plan = replace(plan, row_keys=self.row_keys)  # the unit of work is one, whatever a policy balances
        if plan.layout is not layout:
            raise not_carried_out("plan_layout", plan.policy)
        return NanoBatchPlan(plan, build_tables(plan, self.rank), index, step)

    # Attention.

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        doc_lens: Sequence[int] | None = None,
        shards: Shards | None = None,
        layer: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Core attention of this rank's packed tokens, causal within each document.

        A step is planned once: give *the same object* as `doc_lens` (or `shards`) in every layer of a step and a new
        one in the next, on every rank alike; or call `begin` yourself and give neither. Then a layer that activation
        checkpointing runs again in backward is one of the pass that was begun last; where another pass is still to go
        through backward, call what `begin` returned, or what `alternate` hands over, instead.

        Args:
            q: (tokens, heads, head size). k, v: (tokens, key/value heads, head size). Rotary embeddings are applied.
            doc_lens: lengths of this rank's documents, in the order of the rows; no document spans ranks.
            shards: (doc, start, length) of this rank's rows, where documents span ranks; or (doc, start, length, rank)
                of all ranks' rows, known to all of them: then no message is needed.
            layer: number of the layer; with it, after `begin`, a layer that activation checkpointing enters again is
                answered from what was kept instead of being computed and sent anew.
            scale: factor on q·k; None: 1/√(head size).
            window: keys that a query sees at most, its own included; None: the balancer's.
            softcap: c in c·tanh(score / c).
            sink: (heads,) logits of one more key per head that takes weight and has no value; the same on every rank. A
                rank's gradient of it is that of the rows it computed, and the sum over ranks is right.

        Returns:
            (tokens, heads, head size), in the dtype of q.

        Raises:
            UsageError: what does not fit, what the back end cannot compute, or a layer run again in backward that may
                be one of several passes.
            PeerError: a rank did not take part within the time-out.
        """
        self._refuse_if_closed("attention")
        if not all(isinstance(each, Tensor) and each.dim() == 3 for each in (q, k, v)):
            check_tensors(q=q, k=k, v=v)
        self._learn_shape(q, k)
        if doc_lens is not None and shards is not None:
            raise UsageError("attention: doc_lens and shards are given; give the one that says where the documents are")
        kernel = Kernel(scale, window if window is not None else self.window, softcap)
        named = doc_lens is not None or shards is not None
        if named:
            # Told when this call plans, and compared before anything is sent.
            self._asks = (0 if layer is None else layer, described(q, k, kernel, sink))
            try:
                self._begin_if_new(doc_lens, shards)
            finally:
                self._asks = None
        current = self._halves.get(greenlets.current_id(), self._current) if self._halves else self._current
        if in_backward() and not named:
            self._refuse_to_guess(current)
        if current is None:
            raise UsageError("attention: no documents yet; give doc_lens=… or shards=…, or call begin first")
        return current(q, k, v, layer=layer, kernel=kernel, sink_N=sink)

    def begin(
        self,
        *,
        doc_lens: Sequence[int] | None = None,
        shards: Shards | None = None,
        plan: NanoBatchPlan | None = None,
        turn: Callable[[], None] | None = None,
    ) -> NanoBatchAttention:
        """Begin a forward pass of a nano-batch; `attention` without documents belongs to it from now on.

        Give exactly one of `doc_lens` and `shards` (planned here: every rank must call it) and `plan`, made earlier.

        Args:
            turn: called between the steps of each layer: another forward pass may run then (see `alternate`).

        Raises:
            PeerError, UsageError: as `plan` and `plan_shards`.
        """
        self._refuse_if_closed("begin")
        if sum(given is not None for given in (doc_lens, shards, plan)) != 1:
            raise UsageError("begin: give exactly one of doc_lens=…, shards=… and plan=…")
        if doc_lens is not None:
            plan = self.plan([lengths_of("doc_lens", doc_lens)]).nano_batches[0]
        elif shards is not None:
            own = shards_of("shards", shards)
            whole = bool(own) and all(len(shard) == 4 for shard in own)
            plan = self.plan_layout(layout_of(own, self.ranks)) if whole else self.plan_shards(own).nano_batches[0]
        if not isinstance(plan, NanoBatchPlan):
            raise UsageError(f"begin: plan={shown(plan)}, expected one of `plan(…).nano_batches`")
        self._current = self._given = None
        self._current = self._new_pass(plan, turn)
        return self._current

    def alternate(
        self, forwards: Sequence[Callable[[NanoBatchAttention], Result]], plans: Sequence[NanoBatchPlan]
    ) -> list[Result]:
        """Run the forward passes of one or two nano-batches in turn, so that transfers of one lie under work of the
        other (ping-pong); see `runtime.greenlets`.

        Args:
            forwards: called with the attention of its nano-batch; `attention` called inside belongs to it as well.
            plans: of each, as `plan` made them. Every rank gives the same number.

        Returns:
            What each returned.
        """
        if len(forwards) != len(plans):
            raise UsageError(f"alternate: {len(forwards)} forward passes and {len(plans)} plans")

        def half(forward: Callable[[NanoBatchAttention], Result], plan: NanoBatchPlan) -> Any:
            def run(turn: Callable[[], None]) -> Result:
                mine = greenlets.current_id()
                self._halves[mine] = self._new_pass(plan, turn)
                try:
                    return forward(self._halves[mine])
                finally:
                    del self._halves[mine]

            return run

        return greenlets.alternate([half(f, p) for f, p in zip(forwards, plans, strict=True)])

    def core_attention(self, nano_batch: NanoBatchPlan, step: int | None = None) -> CoreAttention:
        """Core attention that carries out `nano_batch` on this rank: `attention(q, k, v, layer)`. `step` is what errors
        and traces call this step; None: the number of the plan."""
        step = nano_batch.step if step is None else step
        return self._core_attention(nano_batch, self.backend, self.device, step)

    def core_attention_of(
        self, nano_batch: NanoBatchPlan, kernel: Kernel, q_TNH: Tensor, k_TKH: Tensor
    ) -> CoreAttention:
        """Core attention of a layer that computes `kernel` on tensors like these.

        A window that no document outgrows is no window; which documents there are is known alike on all ranks.
        """
        plan = nano_batch.plan
        longest = int(plan.layout.doc_lengths.max(initial=1))
        window, planned = (
            None if w is None or w >= longest else w
            for w in (kernel.window if kernel.window is not None else self.window, plan.window)
        )
        if window != planned:
            nano_batch = self._plan_with_window(nano_batch, longest if window is None else window)
        shape = AttentionShape(q_TNH.shape[1], k_TKH.shape[1], q_TNH.shape[2], element_bytes=q_TNH.element_size())
        kernel = Kernel(kernel.scale, window, kernel.softcap)
        backend = self._backend_of(kernel, shape, q_TNH.dtype, q_TNH.device)
        return self._core_attention(nano_batch, backend, q_TNH.device, nano_batch.step)

    def close(self) -> None:
        """Stop publishing progress, and planning ahead. Nothing can be planned or begun afterwards; a backward pass of
        what was begun before still runs."""
        self._closed = True
        if self._planner is not None:
            self._planner.close()
            self._planner = None
        if self.progress is not None:
            self.progress.close()
        if self._made_group and self.planning_group is not None and not self.exchange.is_broken:
            # After a failure it may still wait for a rank, and its end would wait with it.
            release_group(self.planning_group)
            self.planning_group, self._made_group = None, False

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise UsageError(f"{what}: this Balancer was closed; make a new one, on all its ranks")

    def _plan_with_window(self, nano_batch: NanoBatchPlan, window: int) -> NanoBatchPlan:
        """The same nano-batch for layers with another window; planned once, however many passes carry it out."""
        plans = self._windowed.setdefault(nano_batch, {})
        if window not in plans:
            plan = nano_batch.plan
            plans[window] = self.plan_layout(
                plan.layout, nano_batch.index, policy=plan.policy, step=nano_batch.step, window=window,
                speeds=plan.topology.speeds,
            )  # fmt: skip
        return plans[window]

    def _new_pass(self, plan: NanoBatchPlan, turn: Callable[[], None] | None) -> NanoBatchAttention:
        attention = NanoBatchAttention(self, plan, turn)
        self._in_flight = [*(before for before in self._in_flight if before.another_begins()), attention.in_flight]
        return attention

    def _refuse_to_guess(self, current: NanoBatchAttention | None) -> None:
        """A layer is run again in backward: refuse unless it can only be one of `current`."""
        own = None if current is None else current.in_flight
        others = sum(one.open for one in self._in_flight if one is not own)
        if others:
            raise UsageError(
                "attention: a layer is run again in backward (activation checkpointing), and besides the forward pass "
                f"begun last {others} more wait for backward: to which it belongs cannot be told; use the attention "
                "object that begin returned or that alternate handed to forward (and torch.no_grad() for passes "
                "without a backward)"
            )

    def _begin_if_new(self, doc_lens: Sequence[int] | None, shards: Shards | None) -> None:
        given = doc_lens if doc_lens is not None else shards
        content = tuple(lengths_of("doc_lens", given) if shards is None else shards_of("shards", given))
        if self._given is not None and self._given[0] is given and self._given[1] == content:
            return
        self.begin(doc_lens=doc_lens, shards=shards)
        self._given = (given, content)

    def _learn_shape(self, q: Tensor, k: Tensor) -> None:
        if self.shape is None and q.dim() == 3 and k.dim() == 3 and q.shape[1] and k.shape[1]:
            self.shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], element_bytes=q.element_size())
            self.device, self._dtype = q.device, q.dtype

    def _core_attention(
        self, nano_batch: NanoBatchPlan, backend: Backend, device: torch.device, step: int
    ) -> CoreAttention:
        return CoreAttention(
            nano_batch.tables, backend, self.exchange, self._arena_of(device),
            memory=self.memory, nano_batch=nano_batch.index, step=step,
        )  # fmt: skip

    def _arena_of(self, device: torch.device) -> Arena:
        if device not in self._arenas:
            self._arenas[device] = Arena(device)
        return self._arenas[device]

    def _backend_of(self, kernel: Kernel, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Backend:
        key = (kernel, shape.heads, shape.kv_heads, shape.head_dim, dtype, device)
        if key not in self._backends:
            self._backends[key] = build_backend(
                self._backend_name,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                device=device,
                dtype=dtype,
                window=kernel.window,
                softcap=kernel.softcap,
                scale=kernel.scale,
            )
        return self._backends[key]

    def _settings(self, reorder: bool = False) -> dict[str, str]:
        """What must be the same on every rank, by name; of the thread that asks for a plan, whichever makes it."""
        settings = {
            "reorder": reorder, "tolerance": float(self.tolerance), "policy": self.policy, "window": self.window,
            "row_keys": self.row_keys, "speeds": tuple(float(s) for s in self.topology.speeds), "memory": self.memory,
            "shape": self.shape, "dtype": self._dtype, "autocast": _autocast(self.device), **self.agreed,
        }  # fmt: skip
        return {name: str(value) for name, value in settings.items()}

    def _calls_before(self, step: int, asks: tuple[int, str] | None) -> tuple[Called, ...]:
        """What the layers computed in the steps before, and what the call computes that asks for this plan, if one
        does."""
        return (*self.calls.before(step), *([] if asks is None else [(step, 0, *asks)]))

    def _gather(self, message: Message, step: int) -> list[Message]:
        """Every rank's message, in rank order; see `agreement.gather`."""
        if self.group is None and self._made_unjoined and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                "Balancer: it was made before torch.distributed was initialised, when group.WORLD was None, and so for "
                "one rank alone; make it after init_process_group"
            )
        return gather(message, self.planning_group, self.exchange, self.ranks, step)

    def _publish_progress(self, store: dist.Store | None, period_s: float) -> Progress | None:
        """Begin to say where this rank is; None where there is nobody, or no way, to say it."""
        store = store if store is not None or self.ranks == 1 else shared_store(self.group)
        if store is None or self.ranks == 1:
            return None
        progress = Progress(store, self.rank, self.ranks, period_s=period_s)
        progress.start()
        finalize(self, progress.close).atexit = False  # dropped without `close`: the thread ends, too
        return progress


def _autocast(device: torch.device) -> str:
    """The dtype that autocast gives this thread now: ranks that differ would send rows of different sizes."""
    return str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "off"
